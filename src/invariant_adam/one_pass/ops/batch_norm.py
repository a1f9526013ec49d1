# ruff: noqa: D102 - forward and backward
"""Batch norm. In train mode it is a ghost batch norm: each micro-batch has its own statistics, as in the loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ...kernels import batch_norm as kernels
from ..groups import UnsupportedUse, join
from ..mini_batch import MiniBatch, Mode
from ..weight import Weight
from . import base
from .norms import ChannelNorm, Channels


class GhostNorm(base.Squaring):
    """x (B·r, C, *spatial) normalised by the μ and r (κ, C) of its groups, times w plus b.

    μ and r are constants to autograd: what they owe to x is in the kernel's dx. `made` holds the result where it was
    made together with them.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, use: base.Use, w: Any, tag: Any, b: Any, tag_b: Any, mean: Tensor, rstd: Tensor,
        made: tuple[Tensor] | None,
    ) -> Tensor:  # fmt: skip
        # A parameter is saved as a plain tensor: in backward each use of it would ask its dispatcher. What a second
        # derivative would owe to it is lost, so `refuse_penalty`.
        ctx.save_for_backward(x, mean, rstd, w if w is None or torch.compiler.is_compiling() else w.detach())
        ctx.use, groups = use, use.groups
        if made is not None:
            return made[0]
        pieces = zip(groups.pieces(x), groups.cut(mean), groups.cut(rstd), strict=True)
        return join([kernels.normalise(xs, mu, r, w, b) for xs, mu, r in pieces])

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, mean, rstd, w = ctx.saved_tensors
        groups, weight, bias = ctx.use.groups, base.wanted(ctx, 0), base.wanted(ctx, 1)
        if ctx.needs_input_grad[0]:
            base.refuse_penalty("batch norm", ctx.use)
        shares = (weight is not None and weight.handle.grouped) or (bias is not None and bias.handle.grouped)
        if len(groups.stretches) == 1:
            made = [kernels.backward(g, x, mean, rstd, w, groups.c, shares)]
        else:
            cs = [groups.coefficients(s) for s in groups.stretches]
            pieces = zip(groups.pieces(g), groups.pieces(x), groups.cut(mean), groups.cut(rstd), cs, strict=True)
            made = [kernels.backward(gs, xs, mu, r, w, c, shares) for gs, xs, mu, r, c in pieces]
        dx, each, pairs = zip(*made, strict=True)
        grads = base.deliver_both(weight, bias, each, pairs)
        return base.returned(ctx, join(dx) if ctx.needs_input_grad[0] else None, *grads)


@base.operation("batch_norm", line=base.by_sums)
def batch_norm(
    mini: MiniBatch, func: Any, input: Tensor, running_mean: Any, running_var: Any, weight: Any = None,
    bias: Any = None, training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
) -> Any:  # fmt: skip
    """Batch norm in either mode."""

    def own(x: Tensor, w: Any, b: Any) -> Tensor:
        how = False, 0.0, eps, torch.backends.cudnn.enabled
        return torch.batch_norm(x, w, b, running_mean, running_var, *how)

    how = None if training else Channels(own, input.shape[1], eps, (running_mean, running_var))
    use = base.use_of(mini, "batch_norm", input, input.ndim - 1, (weight, bias), how)
    if use is None:
        return NotImplemented
    if not training:
        return base.call(ChannelNorm, input, use)
    tracked, cumulative = None, False
    for w in use.weights:
        if w.handle is not None and w.handle.entry is not None:
            tracked, cumulative = w.handle.entry.tracked, w.handle.entry.cumulative
            break
    return _ghost(mini, input, use, running_mean, running_var, tracked, momentum, cumulative, eps)


def _ghost(
    mini: MiniBatch, x: Tensor, use: base.Use, running_mean: Tensor | None, running_var: Tensor | None,
    tracked: Tensor | None, momentum: float, cumulative: bool, eps: float,
) -> Any:  # fmt: skip
    """Batch norm of each micro-batch of x; running statistics are updated κ times.

    `tracked` is the module's count of updates, which has counted one. Where the running statistics are `cumulative`,
    an average over all updates, `momentum` is 1/n in the n-th.
    """
    groups, (w, _, b, _) = use.groups, use.given
    uses = None if running_mean is None or cumulative else _uses(mini, running_mean)
    own = (running_mean, running_var) if not uses else (None, None)
    found, rows, affine = [], [], (w, b) if len(groups.stretches) == 1 else None
    for stretch, xs in zip(groups.stretches, groups.pieces(x), strict=True):
        kappa = stretch.hi - stretch.lo
        each = xs.numel() // (xs.shape[1] * kappa)  # values per channel
        if each == 1:
            raise ValueError(
                "Expected more than 1 value per channel in each micro-batch, for train-mode batch norm, got input "
                f"size {tuple(x.shape)} in {groups.kappa} micro-batches; take a larger micro_batch_size"
            )
        if stretch.lo:
            if cumulative:  # the updates of the stretch before have been counted in
                momentum = 1 / (round(1 / momentum) + stretch.lo)
            if tracked is not None:
                tracked.add_(1)  # of the first stretch's, the module has counted one itself
        how = kernels.running(momentum, kappa, cumulative)
        found.append(kernels.statistics(xs, kappa, eps, *own, how, tracked, affine))
        rows.append((kappa, each))
    means, rstds, (made, *_) = zip(*found, strict=True)
    new = Statistics(join(means), join(rstds), rows)
    if uses is not None:
        uses.append(new)
        if len(uses) > 1 and running_mean is not None and running_var is not None:
            _interleave(uses, running_mean, running_var, momentum, eps)
    return base.call(GhostNorm, x, use, new.mean, new.rstd, None if made is None else (made,))


class Statistics(NamedTuple):
    """Of one use of a batch norm: μ and r = 1/√(σ²+ε) (κ, C), and how many groups have how many rows."""

    mean: Tensor
    rstd: Tensor
    rows: list[tuple[int, int]]


def _uses(mini: MiniBatch, running_mean: Tensor) -> list[Statistics] | None:
    """What the batch norm of these statistics has seen of this mini-batch."""
    if not torch.compiler.is_compiling():
        return mini.normed.setdefault(id(running_mean), [])
    if mini.facts.findings.renormed:
        raise UnsupportedUse(
            "a batch norm is used twice in a forward, or in a checkpoint; its running statistics would be updated in "
            "another order than the loop's: give it momentum=None, or run the model uncompiled"
        )
    return None


@torch.no_grad()
def _interleave(uses: list[Statistics], running_mean: Tensor, running_var: Tensor, momentum: float, eps: float) -> None:
    """Update running statistics that the uses before the last have updated already.

    The loop goes through all uses of one micro-batch, a checkpoint's second forward among them, before the next one
    comes. With n uses, use j of micro-batch k has the weight α(1−α)^(n(κ−1−k) + n−1−j). The statistics of n − 1 uses
    are taken out, and those of n are put in.
    """
    keep, count, kappa = 1 - momentum, len(uses), len(uses[0].mean)
    means = torch.stack([use.mean for use in uses])
    # Numbers are made on the device: a graph that is captured takes none from the host.
    bessel = torch.stack([torch.cat([means.new_full((k,), n / max(n - 1, 1)) for k, n in use.rows]) for use in uses])
    variances = (torch.stack([use.rstd for use in uses]) ** -2 - eps) * bessel[..., None]
    for running, each in ((running_mean, means), (running_var, variances)):
        for n, sign in ((count - 1, -1.0), (count, 1.0)):
            k, j = (torch.arange(m - 1, -1, -1, dtype=each.dtype, device=each.device) for m in (kappa, n))
            weight = momentum * torch.pow(keep, n * k + j[:, None])
            running.add_(torch.einsum("jk,jkc->c", weight, each[:n]), alpha=sign)
            if sign < 0:
                running.mul_(keep**kappa)


def ghosts(module: _BatchNorm) -> bool:
    """Whether a batch norm takes its statistics from the batch."""
    return module.training or module.running_mean is None


def patch(model: nn.Module, mini: MiniBatch) -> Iterator[_BatchNorm]:
    """Give train-mode batch norms without a trainable weight or bias their ghost forward, until it is deleted.

    Those with one are seen through it. These touch no parameter, so no operation of theirs comes to a rule.
    """
    owners: dict[int, nn.Module] = {}
    for module in filter(ghosts, mini.facts.norms):
        affine = module.weight, module.bias
        for p in affine:
            entry = mini.facts.entries.get(id(p))
            if entry is not None:
                if owners.setdefault(id(p), module) is not module:
                    raise UnsupportedUse(
                        f"{_name(model, module)} shares its weight or bias with another batch norm, and the updates of "
                        "their running statistics cannot be told apart; give each its own, or loop over micro-batches"
                    )
                entry.tracked, entry.cumulative = module.num_batches_tracked, module.momentum is None
        if any(p is not None and p.requires_grad for p in affine):
            continue
        if type(module).forward is not _BatchNorm.forward:
            raise UnsupportedUse(
                f"{_name(model, module)} is a {type(module).__name__} without a trainable weight and with a "
                "forward of its own; put it in eval mode, or make its weight trainable"
            )
        module.forward = _ghost_forward(module, mini)  # type: ignore[assignment,method-assign]
        yield module


def _name(model: nn.Module, module: nn.Module) -> str:
    return str(next(name for name, m in model.named_modules() if m is module))


def _ghost_forward(module: _BatchNorm, mini: MiniBatch) -> Callable[[Tensor], Any]:
    plain = module.forward

    def forward(x: Tensor) -> Any:
        if mini.mode in (Mode.WAITING, Mode.PLAIN) or not torch.is_grad_enabled() or not ghosts(module):
            return plain(x)
        momentum, tracked = module.momentum, module.num_batches_tracked
        if tracked is not None:
            with torch.no_grad():
                tracked.add_(1)
            momentum = 1.0 / float(tracked) if momentum is None else momentum
        use = base.Use(mini.groups, 0, None, (Weight(module.weight), Weight(module.bias)))
        running = module.running_mean, module.running_var
        return _ghost(mini, x, use, *running, tracked, momentum or 0.0, module.momentum is None, module.eps)

    return forward

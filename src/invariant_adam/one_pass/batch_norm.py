# torch leaves Function.apply untyped:
# mypy: disable-error-code="no-untyped-call,no-any-return"
"""Ghost batch norm: train-mode batch norm with the statistics of each micro-batch, as in the
loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..kernels import batch_norm as kernels
from .functions import GhostNorm, join
from .groups import UnsupportedUse

if TYPE_CHECKING:
    from .engine import Engine


class Use(NamedTuple):
    """The statistics of one use of a batch norm: μ and r (κ, C), and how many groups have how many rows."""

    mean: Tensor
    rstd: Tensor
    rows: list[tuple[int, int]]


def ghost_statistics(
    engine: Engine,
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    tracked: Tensor | None,
    momentum: float,
    cumulative: bool,
    eps: float,
    w: Tensor | None,
    b: Tensor | None,
) -> tuple[Tensor, Tensor, tuple[Tensor] | None]:
    """μ and r = 1/√(σ²+ε) (κ, C) of each micro-batch and channel of x; running statistics updated κ times.

    And what batch norm by them makes of x, with w and b, if it came along.
    """
    groups = engine.groups
    uses = None if running_mean is None or cumulative else _uses(engine, running_mean)
    own = (running_mean, running_var) if not uses else (None, None)
    found, rows, made = [], [], None
    for part, xs in zip(groups.parts, groups.pieces(x.detach()), strict=True):
        kappa = part.hi - part.lo
        each = xs.numel() // (xs.shape[1] * kappa)  # values per channel
        if each == 1:
            raise ValueError(
                "Expected more than 1 value per channel in each micro-batch, for train-mode batch norm, got input "
                f"size {tuple(x.shape)} in {groups.kappa} micro-batches; take a larger micro_batch_size"
            )
        if part.lo:
            if cumulative:  # the updates of the parts before have been counted in
                momentum = 1 / (round(1 / momentum) + part.lo)
            if tracked is not None:
                tracked.add_(1)  # of the first part's, the module has counted one itself
        how = kernels.running(momentum, kappa, cumulative)
        both = kernels.forward(xs, kappa, eps, *own, how, tracked, w, b) if len(groups.parts) == 1 else None
        if both is not None:
            found.append(both[:2])
            made = (both[2],)
        else:
            found.append(kernels.statistics(xs, kappa, eps, *own, how, tracked))
        rows.append((kappa, each))
    use = Use(join([mean for mean, _ in found]), join([rstd for _, rstd in found]), rows)
    if uses is not None:
        uses.append(use)
        if len(uses) > 1 and running_mean is not None and running_var is not None:
            with torch.no_grad():
                _interleave(uses, running_mean, running_var, momentum, eps)
    return use.mean, use.rstd, made


def _uses(engine: Engine, running_mean: Tensor) -> list[Use] | None:
    """What the batch norm of these statistics has seen of this mini-batch."""
    if not torch.compiler.is_compiling():
        return engine.normed.setdefault(id(running_mean), [])
    if engine.renormed:
        raise UnsupportedUse(
            "a batch norm is used twice in a forward, or in a checkpoint; its running statistics would be updated in "
            "another order than the loop's: give it momentum=None, or run the model uncompiled"
        )
    return None


def _interleave(uses: list[Use], running_mean: Tensor, running_var: Tensor, momentum: float, eps: float) -> None:
    """Update running statistics that uses before the last have updated already.

    The loop goes through all uses of one micro-batch, a checkpoint's second forward among them, before the next one
    comes. With n uses, use j of micro-batch k has the weight α(1−α)^(n(κ−1−k) + n−1−j); those of n − 1 are taken out.
    """
    keep, count = 1 - momentum, len(uses)
    kappa = uses[0].mean.shape[0]
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


class Patch:
    """A module whose forward is replaced until `remove`."""

    def __init__(self, module: nn.Module, forward: Callable[[Tensor], Tensor]) -> None:
        self.module = module
        module.forward = forward

    def remove(self) -> None:
        """Give the module its own forward back."""
        del self.module.forward


def ghosts(module: _BatchNorm) -> bool:
    """Whether a batch norm takes its statistics from the batch."""
    return module.training or module.running_mean is None


def patches(model: nn.Module, engine: Engine) -> Iterator[Patch]:
    """Give train-mode batch norms without a trainable weight or bias their ghost forward.

    Those with one are seen through it; these touch no parameter, so no operation of theirs would
    be.
    """
    owners: dict[int, nn.Module] = {}
    for module in engine.norms:
        if not ghosts(module):
            continue
        affine = module.weight, module.bias
        for p in affine:
            entry = engine.entries.get(id(p))
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
        yield Patch(module, _ghost_forward(module, engine))


def _name(model: nn.Module, module: nn.Module) -> str:
    return next(name for name, m in model.named_modules() if m is module)


def _ghost_forward(module: _BatchNorm, engine: Engine) -> Callable[[Tensor], Tensor]:
    plain = module.forward

    def forward(x: Tensor) -> Tensor:
        if not engine.known or engine.single or not torch.is_grad_enabled() or not ghosts(module):
            return plain(x)
        momentum = module.momentum
        if module.num_batches_tracked is not None:
            with torch.no_grad():
                module.num_batches_tracked.add_(1)
            momentum = 1.0 / float(module.num_batches_tracked) if momentum is None else momentum
        mean, rstd, made = ghost_statistics(
            engine,
            x,
            module.running_mean,
            module.running_var,
            module.num_batches_tracked,
            momentum or 0.0,
            module.momentum is None,
            module.eps,
            module.weight,
            module.bias,
        )
        return GhostNorm.apply(x, mean, rstd, module.weight, None, module.bias, None, engine.groups, None, None, made)

    return forward

# torch leaves Function.apply untyped:
# mypy: disable-error-code="no-untyped-call,no-any-return"
"""Ghost batch norm: train-mode batch norm with the statistics of each micro-batch, as in the
loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..kernels import batch_norm as kernels
from .functions import GhostNorm, join
from .groups import Groups, UnsupportedUse

if TYPE_CHECKING:
    from .engine import Engine


def ghost_statistics(
    groups: Groups,
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    tracked: Tensor | None,
    momentum: float,
    cumulative: bool,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """μ and r = 1/√(σ²+ε) (κ, C) of each micro-batch and channel of x; running statistics updated κ times."""
    found = []
    with torch.no_grad():
        for part, xs in zip(groups.parts, groups.pieces(x.detach()), strict=True):
            kappa = part.hi - part.lo
            if xs.shape[0] * xs[0, 0].numel() == kappa:
                raise ValueError(
                    "Expected more than 1 value per channel in each micro-batch, for train-mode batch norm, got input "
                    f"size {tuple(x.shape)} in {groups.kappa} micro-batches; take a larger micro_batch_size"
                )
            if cumulative and part.lo:  # the updates of the parts before have been counted in
                momentum = 1 / (round(1 / momentum) + part.lo)
            how = kernels.running(momentum, kappa, cumulative)
            found.append(kernels.statistics(xs, kappa, eps, running_mean, running_var, how))
        if tracked is not None:
            tracked.add_(groups.kappa - 1)  # the module itself has counted one
    means, rstds = zip(*found, strict=True)
    return join(means), join(rstds)


class Patch:
    """A module whose forward is replaced until `remove`."""

    def __init__(self, module: nn.Module, forward: Callable[[Tensor], Tensor]) -> None:
        self.module = module
        module.forward = forward

    def remove(self) -> None:
        """Give the module its own forward back."""
        del self.module.forward


def patches(model: nn.Module, engine: Engine) -> Iterator[Patch]:
    """Give train-mode batch norms without a trainable weight or bias their ghost forward.

    Those with one are seen through it; these touch no parameter, so no operation of theirs would
    be.
    """
    for name, module in model.named_modules():
        if not isinstance(module, _BatchNorm) or not (module.training or module.running_mean is None):
            continue
        for p in (module.weight, module.bias):
            entry = engine.entries.get(id(p))
            if entry is not None:
                entry.tracked, entry.cumulative = module.num_batches_tracked, module.momentum is None
        if any(p is not None and p.requires_grad for p in (module.weight, module.bias)):
            continue
        if type(module).forward is not _BatchNorm.forward:
            raise UnsupportedUse(
                f"{name} is a {type(module).__name__} without a trainable weight and with a "
                "forward of its own; put it in eval mode, or make its weight trainable"
            )
        yield Patch(module, _ghost_forward(module, engine))


def _ghost_forward(module: _BatchNorm, engine: Engine) -> Callable[[Tensor], Tensor]:
    plain = module.forward

    def forward(x: Tensor) -> Tensor:
        if not engine.known or engine.single or not torch.is_grad_enabled():
            return plain(x)
        momentum = module.momentum
        if module.num_batches_tracked is not None:
            with torch.no_grad():
                module.num_batches_tracked.add_(1)
            momentum = 1.0 / float(module.num_batches_tracked) if momentum is None else momentum
        mean, rstd = ghost_statistics(
            engine.groups,
            x,
            module.running_mean,
            module.running_var,
            module.num_batches_tracked,
            momentum or 0.0,
            module.momentum is None,
            module.eps,
        )
        return GhostNorm.apply(x, mean, rstd, module.weight, None, module.bias, None, engine.groups, None, None)

    return forward

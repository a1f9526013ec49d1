"""Ghost batch norm: train-mode batch norm with the statistics of each micro-batch, as in the
loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from .groups import Groups, UnsupportedUse

if TYPE_CHECKING:
    from .engine import Engine


def ghost_normalise(
    groups: Groups,
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    tracked: Tensor | None,
    momentum: float,
    eps: float,
) -> Tensor:
    """x (B·r, C, *spatial) normalised per micro-batch and channel, running statistics updated κ
    times.

    κ updates r ← (1-α)r + α s_k in a row are r ← (1-α)^κ r + Σ_k α(1-α)^(κ-1-k) s_k.
    """
    channels = x.shape[1]
    out = []
    for xs in groups.stack(x, 0):
        kappa, rows = xs.shape[:2]
        folded = xs.transpose(0, 1).reshape(rows, kappa * channels, *x.shape[2:])
        # Momentum 1 leaves the batch statistics themselves, the variance unbiased as in the
        # running one.
        dtype = x.dtype if running_mean is None else running_mean.dtype
        mean = torch.zeros(kappa * channels, dtype=dtype, device=x.device)
        var = torch.ones_like(mean)
        y = F.batch_norm(folded, mean, var, None, None, True, 1.0, eps)
        out.append(y.view(rows, kappa, *x.shape[1:]).transpose(0, 1))
        if running_mean is not None and running_var is not None:
            with torch.no_grad():
                steps = torch.arange(kappa - 1, -1, -1, dtype=dtype, device=x.device)
                weight = momentum * torch.pow(1 - momentum, steps)
                keep = (1 - momentum) ** kappa
                running_mean.mul_(keep).add_(weight @ mean.view(kappa, channels))
                running_var.mul_(keep).add_(weight @ var.view(kappa, channels))
    if tracked is not None:
        with torch.no_grad():
            tracked.add_(groups.kappa - 1)  # the module itself has counted one
    return groups.merge(out, 0)


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
        if module.training and module.momentum is None and module.track_running_stats:
            raise UnsupportedUse(
                f"{name} is a batch norm with momentum=None (a cumulative average over updates); set momentum"
            )
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
        if module.num_batches_tracked is not None:
            with torch.no_grad():
                module.num_batches_tracked.add_(1)
        y = ghost_normalise(
            engine.groups,
            x,
            module.running_mean,
            module.running_var,
            module.num_batches_tracked,
            module.momentum or 0.0,
            module.eps,
        )
        shape = (1, -1) + (1,) * (x.ndim - 2)
        y = y if module.weight is None else y * module.weight.view(shape)
        return y if module.bias is None else y + module.bias.view(shape)

    return forward

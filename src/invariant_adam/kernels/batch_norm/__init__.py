"""Ghost batch norm: x (N, C, *spatial) of κ groups of N/κ samples, each normalised by its own statistics.

    forward     x̂ = (x − μ_k) r_k,  y = x̂ w + b             r_k = 1/√(σ_k² + ε), per group k and channel
    backward    a_k = Σ g,  e_k = Σ g x̂                     over the R rows of a group: its samples and places
                dx = w r_k (g − a_k/R − x̂ e_k/R)

a_k and e_k are also group k's gradients of b and w, so their squares come without another pass. κ updates of a running
statistic in a row, ρ ← (1−α)ρ + α s_k, are ρ ← keep·ρ + Σ_k gain·ratio^(κ−1−k) s_k (`running`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from torch.compiler import is_compiling

from .. import Serving, twin
from . import torch as plain

fused = twin(__name__)  # a constant, so that compiled code need not ask


class Running(NamedTuple):
    """What κ updates in a row do to a running statistic."""

    keep: float
    gain: float
    ratio: float


def running(momentum: float, kappa: int, cumulative: bool = False) -> Running:
    """κ updates with `momentum`; `cumulative`: momentum is 1/n for the first of them, the n-th update of all.

    >>> running(0.5, 2), running(1 / 3, 2, cumulative=True)  # two statistics are in the average, two are added
    (Running(keep=0.25, gain=0.5, ratio=0.5), Running(keep=0.5, gain=0.25, ratio=1.0))
    """
    if cumulative:
        before = round(1 / momentum) - 1
        return Running(before / (before + kappa), 1 / (before + kappa), 1.0)
    return Running((1 - momentum) ** kappa, momentum, 1 - momentum)


def takes_fused(x: Tensor, kappa: int) -> bool:
    """Whether Triton serves this input: it is contiguous, or its channels are last in memory.

    A compiled graph has the plain formulas: fused with the activations beside them, and without launches from Python.
    """
    return fused is not None and Serving.fused and x.is_cuda and not is_compiling() and bool(fused.serves(x, kappa))


def statistics(
    x: Tensor, kappa: int, eps: float, running_mean: Tensor | None, running_var: Tensor | None, how: Running,
    tracked: Tensor | None = None, affine: tuple[Any, Any] | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """μ and r, each (κ, C), and None; the running statistics are updated κ times, the variance unbiased.

    `tracked`, the count of updates, has seen one of them already. With w and b in `affine`, y is made by the same call
    where Triton serves.
    """
    served = takes_fused(x, kappa)
    if affine is not None and served:
        made = fused.forward(x, kappa, eps, running_mean, running_var, *how, tracked, *affine)
        if Serving.noted is None:
            return made
    served = served and Serving.noted is None  # in a rehearsal nothing was started: plain torch makes it
    if tracked is not None:
        tracked.add_(kappa - 1)
    made = (fused if served else plain).statistics(x.detach(), kappa, eps, running_mean, running_var, *how)
    return *made, None


def normalise(x: Tensor, mean: Tensor, rstd: Tensor, w: Tensor | None, b: Tensor | None) -> Tensor:
    """y, in the dtype and memory format of x."""
    served = takes_fused(x, mean.shape[0]) and Serving.noted is None
    return (fused if served else plain).normalise(x, mean, rstd, w, b)


def backward(
    g: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, w: Tensor | None, c: Tensor | None, shares: bool = True
) -> tuple[Tensor, Tensor | None, Tensor]:
    """dx, the sums (κ, 2, C) of each group, e and a, and the pairs (4, C): dW, S of w, then those of b.

    Without `shares` the sums may be left out.
    """
    return (fused if takes_fused(x, mean.shape[0]) else plain).backward(g, x, mean, rstd, w, c, shares)

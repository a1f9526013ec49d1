"""Ghost batch norm: x (N, C, *spatial) of κ groups of N/κ samples, each normalised by its own statistics.

    forward     x̂ = (x − μ_k) r_k,  y = x̂ w + b             r_k = 1/√(σ_k² + ε), per group k and channel
    backward    a_k = Σ g,  e_k = Σ g x̂                     over the R rows of a group: its samples and places
                dx = w r_k (g − a_k/R − x̂ e_k/R)

a_k and e_k are also group k's gradients of b and w, so their squares come without another pass. κ updates of a running
statistic in a row, ρ ← (1−α)ρ + α s_k, are ρ ← keep·ρ + Σ_k gain·ratio^(κ−1−k) s_k (`running`).
"""

from __future__ import annotations

import contextlib
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from .gemm_square import sum_square, wide

# The Triton twin, where there is a GPU for it; a constant, so that compiled code need not ask.
fused: ModuleType | None = None
if torch.cuda.is_available():
    with contextlib.suppress(ImportError):
        from . import batch_norm_triton as fused


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
    """Whether the Triton twin serves this input: its channels last in memory."""
    return fused is not None and x.is_cuda and fused.serves(x, kappa)


def statistics(
    x: Tensor,
    kappa: int,
    eps: float,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    how: Running,
    tracked: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """μ and r, each (κ, C); the running statistics are updated κ times, the variance unbiased.

    `tracked`, the count of updates, has seen one of them already.
    """
    if tracked is not None:
        tracked.add_(kappa - 1)
    if fused is not None and takes_fused(x, kappa):
        call = fused.statistics_op if torch.compiler.is_compiling() else fused.statistics
        mean, rstd = call(x, kappa, eps, running_mean, running_var, *how)
        return mean, rstd
    xs = _grouped(x, kappa).to(wide(x.dtype))
    var, mean = torch.var_mean(xs, dim=(1, *range(3, xs.ndim)), correction=0)
    if running_mean is not None and running_var is not None:
        rows = xs[0].numel() // x.shape[1]
        after = torch.arange(kappa - 1, -1, -1, dtype=mean.dtype, device=x.device)
        weight = how.gain * torch.pow(how.ratio, after)
        running_mean.mul_(how.keep).add_(weight @ mean)
        running_var.mul_(how.keep).add_(weight @ var * (rows / max(rows - 1, 1)))
    return mean, torch.rsqrt(var + eps)


def forward(
    x: Tensor,
    kappa: int,
    eps: float,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    how: Running,
    tracked: Tensor | None,
    w: Tensor | None,
    b: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """`statistics`, then `normalise`: μ, r and y; where no kernel does both None, and nothing is done.

    A compiled graph has them apart: it fuses what the kernels do not.
    """
    if fused is None or not takes_fused(x, kappa) or torch.compiler.is_compiling():
        return None
    mean, rstd, y = fused.forward(x, kappa, eps, running_mean, running_var, *how, tracked, w, b)
    return mean, rstd, y


def normalise(x: Tensor, mean: Tensor, rstd: Tensor, w: Tensor | None, b: Tensor | None) -> Tensor:
    """y, in the dtype and memory format of x."""
    if fused is not None and takes_fused(x, mean.shape[0]):
        call = fused.normalise_op if torch.compiler.is_compiling() else fused.normalise
        y: Tensor = call(x, mean, rstd, w, b)
        return y
    y = _standard(x, mean, rstd).flatten(0, 1)
    shape = (1, -1, *(1,) * (y.ndim - 2))
    if w is not None:
        y = y * w.view(shape)
    if b is not None:
        y = y + b.view(shape)
    if w is None and b is None and y.dtype == x.dtype:
        y = y.clone()  # a Function must not return a view: an activation may write over it
    # No cast that casts nothing: compilers return what it makes beside the output, and torch 2.11 then gives the
    # gradient to the wrong one of two names of one tensor.
    return y if y.dtype == x.dtype else y.to(x.dtype)


def backward(
    g: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, w: Tensor | None, c: Tensor | None, shares: bool = True
) -> tuple[Tensor, Tensor | None, Tensor]:
    """dx, the sums (κ, 2, C) of each group, e and a, and the pairs (4, C): dW, S of w, then those of b.

    Without `shares` the sums may be left out.
    """
    if fused is not None and takes_fused(x, mean.shape[0]):
        if torch.compiler.is_compiling():
            dx, sums, pairs = fused.backward_op(g, x, mean, rstd, w, c)
        else:
            dx, sums, pairs = fused.backward(g, x, mean, rstd, w, c, shares)
        return dx, sums, pairs
    hat = _standard(x, mean, rstd)
    grad = _grouped(g, mean.shape[0]).to(hat.dtype)
    over = (1, *range(3, hat.ndim))
    rows = hat[0].numel() // x.shape[1]
    sums = torch.stack([(grad * hat).sum(over), grad.sum(over)], 1)
    scale = rstd if w is None else rstd * w
    dx = grad - _channels(sums[:, 1] / rows, hat) - hat * _channels(sums[:, 0] / rows, hat)
    dx = dx * _channels(scale, hat)
    total, squares = sum_square(sums, c)
    return dx.flatten(0, 1).to(x.dtype), sums, torch.stack([total[0], squares[0], total[1], squares[1]])


def _grouped(x: Tensor, kappa: int) -> Tensor:
    return x.reshape(kappa, -1, *x.shape[1:])


def _channels(t: Tensor, like: Tensor) -> Tensor:
    """(κ, C) as (κ, 1, C, 1, ...)."""
    return t.view(t.shape[0], 1, t.shape[1], *(1,) * (like.ndim - 3))


def _standard(x: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
    xs = _grouped(x, mean.shape[0]).to(mean.dtype)
    return (xs - _channels(mean, xs)) * _channels(rstd, xs)

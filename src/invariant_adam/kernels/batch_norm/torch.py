"""Ghost batch norm in plain torch, for every device and memory format.

It is also what compiled graphs are made of: only what is summed is viewed as groups, and all else has the shape of x.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..gemm_square import sum_square, wide


def statistics(
    x: Tensor, kappa: int, eps: float, running_mean: Tensor | None, running_var: Tensor | None,
    keep: float, gain: float, ratio: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """μ and r (κ, C), and the running statistics updated in place."""
    xs = x.to(wide(x.dtype)).unflatten(0, (kappa, -1))
    var, mean = torch.var_mean(xs, _rows(xs), correction=0)
    if running_mean is not None and running_var is not None:
        rows = x.numel() // (kappa * x.shape[1])
        after = torch.arange(kappa - 1, -1, -1, dtype=mean.dtype, device=x.device)
        weight = gain * torch.pow(ratio, after)[:, None]  # no products of matrices: compilers fuse sums
        running_mean.mul_(keep).add_((weight * mean).sum(0))
        running_var.mul_(keep).add_((weight * var).sum(0) * (rows / max(rows - 1, 1)))
    return mean, torch.rsqrt(var + eps)


def normalise(x: Tensor, mean: Tensor, rstd: Tensor, w: Tensor | None, b: Tensor | None) -> Tensor:
    """y, in the dtype of x."""
    y = _standard(x, mean, rstd)
    shape = (1, -1, *(1,) * (y.ndim - 2))
    if w is not None:
        y = y * w.view(shape)
    if b is not None:
        y = y + b.view(shape)
    # No cast that casts nothing: compilers return what it makes beside the output, and torch 2.11 then gives the
    # gradient to the wrong one of two names of one tensor.
    return y if y.dtype == x.dtype else y.to(x.dtype)


def backward(
    g: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, w: Tensor | None, c: Tensor | None, shares: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, the sums (κ, 2, C) and the pairs (4, C)."""
    # μ − x, and not x − μ: a compiler would keep the forward's in float32, where it can make this one again from x.
    below, grad = _per_sample(mean, x) - x, g.to(mean.dtype)
    kappa, rows = mean.shape[0], x.numel() // mean.numel()
    e, a = -rstd * _sums(grad * below, kappa), _sums(grad, kappa)
    sums = torch.stack([e, a], 1)
    scale = rstd if w is None else rstd * w
    dx = grad - _per_sample(a / rows, x) + below * _per_sample(rstd * e / rows, x)
    dx = dx * _per_sample(scale, x)
    total, squares = sum_square(sums, c)
    return dx.to(x.dtype), sums, torch.stack([total, squares], 1).flatten(0, 1)


def _rows(x: Tensor) -> tuple[int, ...]:
    """The dimensions of a group's rows in x (κ, N/κ, C, *spatial)."""
    return (1, *range(3, x.ndim))


def _sums(x: Tensor, kappa: int) -> Tensor:
    """(κ, C) of x (N, C, *spatial)."""
    xs = x.unflatten(0, (kappa, -1))
    return xs.sum(_rows(xs))


def _per_sample(t: Tensor, like: Tensor) -> Tensor:
    """(κ, C) as (N, C, 1, ...): each group's for its samples."""
    samples = like.shape[0] // t.shape[0]
    return t[:, None].expand(-1, samples, -1).reshape(*like.shape[:2], *(1,) * (like.ndim - 2))


def _standard(x: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
    return (x.to(mean.dtype) - _per_sample(mean, x)) * _per_sample(rstd, x)

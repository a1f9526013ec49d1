"""Ghost batch norm in plain torch, for every device and memory format."""

from __future__ import annotations

import torch
from torch import Tensor

from ..gemm_square import sum_square, wide


def statistics(
    x: Tensor, kappa: int, eps: float, running_mean: Tensor | None, running_var: Tensor | None,
    keep: float, gain: float, ratio: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """μ and r (κ, C), and the running statistics updated in place."""
    xs = _grouped(x, kappa).to(wide(x.dtype))
    var, mean = torch.var_mean(xs, dim=(1, *range(3, xs.ndim)), correction=0)
    if running_mean is not None and running_var is not None:
        rows = xs[0].numel() // x.shape[1]
        after = torch.arange(kappa - 1, -1, -1, dtype=mean.dtype, device=x.device)
        weight = gain * torch.pow(ratio, after)
        running_mean.mul_(keep).add_(weight @ mean)
        running_var.mul_(keep).add_(weight @ var * (rows / max(rows - 1, 1)))
    return mean, torch.rsqrt(var + eps)


def normalise(x: Tensor, mean: Tensor, rstd: Tensor, w: Tensor | None, b: Tensor | None) -> Tensor:
    """y, in the dtype of x."""
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
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, the sums (κ, 2, C) and the pairs (4, C)."""
    hat = _standard(x, mean, rstd)
    grad = _grouped(g, mean.shape[0]).to(hat.dtype)
    over = (1, *range(3, hat.ndim))
    rows = hat[0].numel() // x.shape[1]
    sums = torch.stack([(grad * hat).sum(over), grad.sum(over)], 1)
    scale = rstd if w is None else rstd * w
    dx = grad - _channels(sums[:, 1] / rows, hat) - hat * _channels(sums[:, 0] / rows, hat)
    dx = dx * _channels(scale, hat)
    total, squares = sum_square(sums, c)
    return dx.flatten(0, 1).to(x.dtype), sums, torch.stack([total, squares], 1).flatten(0, 1)


def _grouped(x: Tensor, kappa: int) -> Tensor:
    return x.reshape(kappa, -1, *x.shape[1:])


def _channels(t: Tensor, like: Tensor) -> Tensor:
    """(κ, C) as (κ, 1, C, 1, ...)."""
    return t.view(t.shape[0], 1, t.shape[1], *(1,) * (like.ndim - 3))


def _standard(x: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
    xs = _grouped(x, mean.shape[0]).to(mean.dtype)
    return (xs - _channels(mean, xs)) * _channels(rstd, xs)

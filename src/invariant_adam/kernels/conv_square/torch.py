"""`conv_square` in plain torch, for every device and every convolution."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..gemm_square import wide


class Geometry(NamedTuple):
    """The arguments of a convolution besides its tensors."""

    weight: tuple[int, ...]  # the weight's shape
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int
    channels_last: bool = False  # whether the weight lies so in memory


def conv_backward(
    G: Tensor, X: Tensor, weight: Tensor, geo: Geometry, mask: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """The library's gradients of a convolution: input, weight and bias, those that `mask` asks for."""
    return torch.ops.aten.convolution_backward.default(
        G, X, weight, [weight.shape[0]], geo.stride, geo.padding, geo.dilation, geo.transposed, geo.output_padding,
        geo.groups, mask,
    )  # fmt: skip


def conv_groups(G: Tensor, X: Tensor, geo: Geometry) -> Tensor:
    """All κ weight gradients (κ, *weight), by one convolution of κ times the channel groups.

    So the library serves every stride, padding, dilation, grouping and transposition.
    """
    kappa = G.shape[0]
    weight = G.new_empty(1).expand(kappa * geo.weight[0], *geo.weight[1:])
    g, x = (t.transpose(0, 1).flatten(1, 2) for t in (G, X.to(G.dtype)))
    every = conv_backward(g, x, weight, geo._replace(groups=geo.groups * kappa), [False, True, False])[1]
    return every.view(kappa, *geo.weight)


def conv_square(G: Tensor, X: Tensor, geo: Geometry, c: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """dW and S, each of the weight's shape; G and X have one dtype, c (κ,) weighs the squares."""
    dW = torch.zeros(geo.weight, dtype=wide(G.dtype), device=G.device)
    S = torch.zeros_like(dW)
    one_by_one(G, X, geo, c, dW, S)
    return dW.to(G.dtype), S


def one_by_one(G: Tensor, X: Tensor, geo: Geometry, c: Tensor | None, dW: Tensor, S: Tensor) -> None:
    """Add the pair to dW and S by the library, one group's weight gradient alive at a time."""
    weight = G.new_empty(1).expand(geo.weight)
    for k in range(G.shape[0]):
        g = conv_backward(G[k], X[k], weight, geo, [False, True, False])[1].to(dW.dtype)
        dW += g
        S.addcmul_(g, g if c is None else c[k] * g)

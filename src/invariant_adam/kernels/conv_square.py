"""The weight gradient of a convolution and the sum of its squared micro-batch parts.

G (κ, m, O, *out) and X (κ, m, C, *in) are output gradients and inputs of κ groups of m images. A
convolution's weight gradient over separate groups is one convolution with κ times the channel
groups, so the library's kernel serves every stride, padding, dilation, grouping and transposition.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .gemm_square import wide


class Geometry(NamedTuple):
    """The arguments of a convolution besides its tensors."""

    weight: tuple[int, ...]  # the weight's shape
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int


def conv_backward(
    G: Tensor, X: Tensor, weight: Tensor, geo: Geometry, mask: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """The library's gradients of a convolution: input, weight, bias, as `mask` asks."""
    return torch.ops.aten.convolution_backward(  # type: ignore[no-any-return]
        G,
        X,
        weight,
        [weight.shape[0]],
        geo.stride,
        geo.padding,
        geo.dilation,
        geo.transposed,
        geo.output_padding,
        geo.groups,
        mask,
    )


def conv_groups(G: Tensor, X: Tensor, geo: Geometry) -> Tensor:
    """All κ weight gradients (κ, *weight)."""
    kappa = G.shape[0]
    X = X.to(G.dtype)
    if kappa == 1:
        weight = G.new_empty(1).expand(geo.weight)
        return conv_backward(G[0], X[0], weight, geo, [False, True, False])[1][None]
    wide_geo = geo._replace(groups=geo.groups * kappa)
    weight = G.new_empty(1).expand(kappa * geo.weight[0], *geo.weight[1:])
    g = G.transpose(0, 1).flatten(1, 2)
    x = X.transpose(0, 1).flatten(1, 2)
    return conv_backward(g, x, weight, wide_geo, [False, True, False])[1].view(kappa, *geo.weight)


def conv_square(G: Tensor, X: Tensor, geo: Geometry, c: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """dW and S, each of the weight's shape; one group's weight gradient alive at a time."""
    X = X.to(G.dtype)
    acc = wide(G.dtype)
    kappa = G.shape[0]
    compiling = torch.compiler.is_compiling()
    scales = None if compiling else [1.0] * kappa if c is None else c.tolist()
    dW = torch.zeros(geo.weight, dtype=acc, device=G.device)
    S = torch.zeros_like(dW)
    weight = G.new_empty(1).expand(geo.weight)
    for k in range(kappa):
        g = conv_backward(G[k], X[k], weight, geo, [False, True, False])[1].to(acc)
        dW += g
        if scales is not None:
            S.addcmul_(g, g, value=scales[k])
        else:
            S = S + (g.square() if c is None else c[k] * g.square())
    return dW.to(G.dtype), S

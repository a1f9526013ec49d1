"""The weight gradient of a convolution and the sum of its squared micro-batch parts.

G (κ, m, O, *out) and X (κ, m, C, *in) are output gradients and inputs of κ groups of m images. A
convolution's weight gradient over separate groups is one convolution with κ times the channel
groups, so the library's kernel serves every stride, padding, dilation, grouping and transposition.

On a GPU, 2-d convolutions have several ways (`conv_ways`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from types import ModuleType
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
    channels_last: bool = False  # whether the weight lies so in memory


def conv_backward(
    G: Tensor, X: Tensor, weight: Tensor, geo: Geometry, mask: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """The library's gradients of a convolution: input, weight, bias, as `mask` asks."""
    return torch.ops.aten.convolution_backward.default(  # type: ignore[no-any-return]
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


def takes_fused(G: Tensor, X: Tensor, geo: Geometry) -> bool:
    """Whether `conv_ways` serve; one group is the library's, whose gradient is then squared."""
    return fused is not None and G.is_cuda and G.shape[0] > 1 and fused.serves(G, X, geo)


def conv_square(G: Tensor, X: Tensor, geo: Geometry, c: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """dW and S, each of the weight's shape."""
    X = X if X.dtype == G.dtype else X.to(G.dtype)
    if fused is not None and takes_fused(G, X, geo):
        if torch.compiler.is_compiling():
            shape, *taps = [list(sizes) for sizes in geo[:4]]
            dW, S = fused.conv_square_op(G, X, c, shape, *taps, geo.groups, geo.channels_last)
        else:
            dW, S = fused.conv_square(G, X, geo, c)
        return dW, S
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


# The ways there are on a GPU, where there is one and Triton; a constant, so that compiled code need not ask.
fused: ModuleType | None = None
if torch.cuda.is_available():
    with contextlib.suppress(ImportError):
        from . import conv_ways as fused

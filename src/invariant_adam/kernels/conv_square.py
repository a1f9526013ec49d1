"""The weight gradient of a convolution and the sum of its squared micro-batch parts.

G (κ, m, O, *out) and X (κ, m, C, *in) are output gradients and inputs of κ groups of m images. A
convolution's weight gradient over separate groups is one convolution with κ times the channel
groups, so the library's kernel serves every stride, padding, dilation, grouping and transposition.

On a GPU, 2-d convolutions take their Triton twin, and those of one tap are products of matrices.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from .gemm_square import gemm_square, wide


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


# The Triton twin, where there is a GPU for it; a constant, so that compiled code need not ask.
fused: ModuleType | None = None
if torch.cuda.is_available():
    with contextlib.suppress(ImportError):
        from . import conv_square_triton as fused


def takes_fused(G: Tensor, X: Tensor, geo: Geometry) -> bool:
    """Whether the Triton twin serves; one group is the library's, whose gradient is then squared."""
    return fused is not None and G.is_cuda and G.shape[0] > 1 and fused.serves(G, X, geo)


def is_pointwise(geo: Geometry) -> bool:
    """Whether this is a product of matrices: one tap on every pixel, no padding, all channels."""
    one_tap = all(size == 1 for size in (*geo.weight[2:], *geo.stride)) and not any(geo.padding)
    return one_tap and geo.groups == 1 and not geo.transposed


def pointwise(G: Tensor, X: Tensor) -> tuple[Tensor, Tensor]:
    """The operands of `gemm_square` for a convolution of one tap: G (κ, R, O), X (κ, R, I)."""
    return G.movedim(2, -1).flatten(1, -2), X.movedim(2, -1).flatten(1, -2)


def conv_square(G: Tensor, X: Tensor, geo: Geometry, c: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """dW and S, each of the weight's shape."""
    X = X.to(G.dtype)
    if fused is not None and takes_fused(G, X, geo):
        if is_pointwise(geo):
            dW, S = gemm_square(*pointwise(G, X), c)
            return dW.view(geo.weight), S.view(geo.weight)
        if torch.compiler.is_compiling():
            shape, *taps = [list(sizes) for sizes in geo[:4]]
            dW, S = fused.conv_square_op(G, X, c, shape, *taps, geo.groups, geo.channels_last)
        else:
            dW, S = fused.conv_square(G, X, geo, c)
        return dW, S
    return _one_by_one(G, X, geo, c)


def _one_by_one(G: Tensor, X: Tensor, geo: Geometry, c: Tensor | None) -> tuple[Tensor, Tensor]:
    """By the library, one group's weight gradient alive at a time."""
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

# ruff: noqa: D102 - forward and backward
"""Convolutions of any stride, padding, dilation, grouping and transposition, on samples (B, C, *spatial)."""

from __future__ import annotations

from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels import cast
from ...kernels import conv_square as kernels
from ...kernels.conv_square import Geometry, conv_backward
from ...kernels.ops import operator
from ..groups import UnsupportedUse
from ..into import sink, ticket, ticket_shape
from ..mini_batch import MiniBatch
from ..weight import names_of
from . import base


def _fold(key: int, G: Tensor, X: Tensor, geo: Geometry, c: Tensor | None) -> None:
    """Fold the pair of the parameter `key` from the operands of `conv_square`, in its epilogue where that can."""
    taker = sink()
    with torch._C.DisableTorchFunctionSubclass():
        entry = taker.claim(key)
        if entry is None:
            return
        X = X.to(G.dtype)
        if kernels.takes_fused(G, X, geo):
            fused = kernels.fused
            config = fused.best(G, X, geo, c)
            target = taker.target(entry) if fused.folds(config, G, geo, entry.param) else None
            if target is not None:
                fused.conv_square(G, X, geo, c, into=target, config=config)
                return
        taker.fold(entry, *kernels.conv_square(G, X, geo, c))


@operator(
    "into_convolution(Tensor G, Tensor X, Tensor? c, int[] geometry, int key) -> Tensor", ticket_shape, replays=False
)
def _into_convolution(G: Tensor, X: Tensor, c: Tensor | None, geometry: list[int], key: int) -> Tensor:
    n, left = len(geometry) // 5 - 1, iter(geometry)  # n + 2 sizes of the weight, n of four others, and three numbers
    weight, stride, padding, dilation, output_padding = (tuple(islice(left, k)) for k in (n + 2, n, n, n, n))
    groups, transposed, last = left
    geo = Geometry(weight, stride, padding, dilation, bool(transposed), output_padding, groups, bool(last))
    _fold(key, G, X, geo, c)
    return ticket(G)


def _into(key: int, G: Tensor, X: Tensor, geo: Geometry, c: Tensor | None) -> Any:
    if not torch.compiler.is_compiling():
        return _fold(key, G, X, geo, c)
    sizes = *geo.weight, *geo.stride, *geo.padding, *geo.dilation, *geo.output_padding
    return _into_convolution(G, X, c, [*sizes, geo.groups, int(geo.transposed), int(geo.channels_last)], key)


CONV = base.Kernel(kernels.conv_square, kernels.conv_groups, _into)


class Conv(base.Squaring):
    """The convolution that the settings describe; x (B·r, C, *spatial)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, use: base.Use, w: Tensor, tag: Any, b: Any, tag_b: Any) -> Tensor:
        geo = use.settings
        weight = cast(w, x.dtype)  # autocast knows conv2d, but not the one below: the weights follow x
        ctx.save_for_backward(x, w if torch.compiler.is_compiling() else weight.detach())
        ctx.use = use
        b = None if b is None else cast(b, x.dtype)
        taps = geo.stride, geo.padding, geo.dilation, geo.transposed, geo.output_padding, geo.groups
        return torch.convolution(x, weight, b, *taps)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = ctx.saved_tensors
        groups, geo = ctx.use.groups, ctx.use.settings
        dx, pair, pair_b = None, base.NOTHING, base.NOTHING
        if ctx.needs_input_grad[0]:
            base.refuse_penalty("a convolution", ctx.use)
            dx = conv_backward(g, cast(x, g.dtype), cast(w, g.dtype), geo, [True, False, False])[0]
            dx = cast(dx, x.dtype)
        weight, bias = base.wanted(ctx, 0), base.wanted(ctx, 1)
        Gs = groups.stack(g, 0)
        if weight is not None:
            operands = [(G, X, geo) for G, X in zip(Gs, groups.stack(x, 0), strict=True)]
            pair = base.deliver(groups, weight, CONV, operands)
        if bias is not None:
            pair_b = base.deliver_places(groups, bias, Gs)
        return base.returned(ctx, dx, pair, pair_b)


def _line(seen: base.Seen) -> base.Line:
    if len(seen.shape) == 1:
        return base.by_sums(seen)
    return base.by_copies(seen)._replace(kernel="conv_square", extra=2 * seen.square)


def _sizes(value: Any, n: int) -> tuple[int, ...]:
    return (value,) * n if isinstance(value, int) else tuple(value) * (n if len(value) == 1 else 1)


@base.operation("conv1d", "conv2d", "conv3d", line=_line)
def convolution(
    mini: MiniBatch, func: Any, input: Tensor, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0,
    dilation: Any = 1, groups: int = 1, transposed: bool = False, output_padding: Any = 0,
) -> Any:  # fmt: skip
    """A convolution, or a transposed one."""
    name, x, n = func.__name__, input, weight.ndim - 2
    if x.ndim != n + 2 and not (mini.holds(x) or base.varies(mini, weight) or base.varies(mini, bias)):
        raise UnsupportedUse(
            f"{names_of([mini.handle_of(weight), mini.handle_of(bias)])} goes through {name} with an input of shape "
            f"{tuple(x.shape)} without a batch dimension; add one"
        )
    dilation, more = _sizes(dilation, n), [0]
    if padding == "same":  # as torch does it: what is odd comes after, before the convolution pads both sides
        total = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
        padding, more = [t // 2 for t in total], [v for t in reversed(total) for v in (0, t % 2)]
    last = n == 2 and weight.is_contiguous(memory_format=torch.channels_last) and not weight.is_contiguous()
    taps = _sizes(stride, n), _sizes(0 if isinstance(padding, str) else padding, n), dilation
    geo = Geometry(tuple(weight.shape), *taps, transposed, _sizes(output_padding, n), groups, last)
    use = base.use_of(mini, name, x, n + 1, (weight, bias), geo)
    if use is None:
        return NotImplemented
    x = base.autocast(x)
    return base.call(Conv, F.pad(x, more) if any(more) else x, use)


@base.operation("conv_transpose1d", "conv_transpose2d", "conv_transpose3d", line=_line)
def transposed_convolution(
    mini: MiniBatch, func: Any, input: Tensor, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0,
    output_padding: Any = 0, groups: int = 1, dilation: Any = 1,
) -> Any:  # fmt: skip
    """A transposed convolution, whose arguments come in another order."""
    return convolution(mini, func, input, weight, bias, stride, padding, dilation, groups, True, output_padding)

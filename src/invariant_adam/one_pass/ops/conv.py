# ruff: noqa: D102 - forward and backward
"""Convolutions of any stride, padding, dilation, grouping and transposition, on samples (B, C, *spatial)."""

from __future__ import annotations

from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling

from ...kernels import cast
from ...kernels import conv_square as kernels
from ...kernels.conv_square import Geometry, conv_backward
from ...kernels.ops import operator
from ..groups import Groups, UnsupportedUse
from ..into import sink, ticket, ticket_shape
from ..mini_batch import MiniBatch
from ..weight import Weight, names_of
from . import base


def _fold(key: int, G: Tensor, X: Tensor, geo: Geometry, kappa: int, c: Tensor | None) -> None:
    """Fold the pair of the parameter `key`, in the kernel's epilogue where that can, of κ groups of images G and X."""
    taker = sink()
    with torch._C.DisableTorchFunctionSubclass():
        entry = taker.claim(key)
        if entry is None:
            return
        X = cast(X, G.dtype)
        if not kernels.takes_fused(G, X, geo, kappa):
            g, x = (t.unflatten(0, (kappa, -1)) for t in (G, X))
            taker.fold(entry, *kernels.conv_square(g, x, geo, c))
            return
        plan = kernels.fused.plan_of(G, X, geo, kappa, c)
        target = taker.target(entry) if plan.folds(entry.param) else None
        pair = plan(G, X, c, target)
        if target is None:
            taker.fold(entry, *pair)


@operator(
    "into_convolution(Tensor G, Tensor X, Tensor? c, int kappa, int[] geometry, int key) -> Tensor",
    ticket_shape,
    replays=False,
    any_layout=True,
)
def _into_convolution(G: Tensor, X: Tensor, c: Tensor | None, kappa: int, geometry: list[int], key: int) -> Tensor:
    n, left = len(geometry) // 5 - 1, iter(geometry)  # n + 2 sizes of the weight, n of four others, and three numbers
    weight, stride, padding, dilation, output_padding = (tuple(islice(left, k)) for k in (n + 2, n, n, n, n))
    groups, transposed, last = left
    geo = Geometry(weight, stride, padding, dilation, bool(transposed), output_padding, groups, bool(last))
    _fold(key, G, X, geo, kappa, c)
    return ticket(G)


def _into(key: int, G: Tensor, X: Tensor, geo: Geometry, c: Tensor | None) -> Any:
    sizes = *geo.weight, *geo.stride, *geo.padding, *geo.dilation, *geo.output_padding
    numbers = [*sizes, geo.groups, int(geo.transposed), int(geo.channels_last)]
    return _into_convolution(G.flatten(0, 1), X.flatten(0, 1), c, G.shape[0], numbers, key)


CONV = base.Kernel(kernels.conv_square, kernels.conv_groups, _into)


def _deliver(groups: Groups, weight: Weight, g: Tensor, x: Tensor, geo: Geometry) -> base.Gradients:
    """`base.deliver`; groups of one size go as they are to kernels that divide a batch themselves."""
    if len(groups.stretches) == 1 and not weight.handle.grouped and not is_compiling():
        kappa, c = groups.kappa, groups.c
        if weight.into:
            _fold(weight.handle.entry.key, g, x, geo, kappa, c)
            return base.NOTHING
        x = cast(x, g.dtype)
        if kernels.takes_fused(g, x, geo, kappa):
            return base.hand_over(weight, *kernels.fused.plan_of(g, x, geo, kappa, c)(g, x, c))
    operands = [(G, X, geo) for G, X in zip(groups.stack(g, 0), groups.stack(x, 0), strict=True)]
    return base.deliver(groups, weight, CONV, operands)


def _deliver_bias(groups: Groups, weight: Weight, g: Tensor) -> base.Gradients:
    """`base.deliver_places` for images whose samples and places may be rows without a copy."""
    plain = len(groups.stretches) == 1 and not is_compiling()  # a trace must not ask how a gradient lies
    if plain and g.is_contiguous(memory_format=torch.channels_last):
        rows, channels = g.numel() // (groups.kappa * g.shape[1]), g.shape[1]
        places = g.as_strided((groups.kappa, rows, channels), (rows * channels, channels, 1))
        return base.deliver_rows(groups, weight, [places])
    return base.deliver_places(groups, weight, groups.stack(g, 0))


class Conv(base.Squaring):
    """The convolution that the settings describe; x (B·r, C, *spatial)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, use: base.Use, w: Tensor, tag: Any, b: Any, tag_b: Any) -> Tensor:
        geo = use.settings
        weight = cast(w, x.dtype)  # autocast knows conv2d, but not the one below: the weights follow x
        ctx.save_for_backward(x, w if is_compiling() else weight.detach())
        ctx.use = use
        b = None if b is None else cast(b, x.dtype)
        return torch.convolution(x, weight, b, *geo[1:7])  # from the stride to the channel groups

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = ctx.saved_tensors
        groups, geo = ctx.use.groups, ctx.use.settings
        dx, pair, pair_b = None, base.NOTHING, base.NOTHING
        seen = cast(x, g.dtype)
        if ctx.needs_input_grad[0]:
            base.refuse_penalty("a convolution", ctx.use)
            dx = cast(conv_backward(g, seen, cast(w, g.dtype), geo, (True, False, False))[0], x.dtype)
        weight, bias = base.wanted(ctx, 0), base.wanted(ctx, 1)
        if weight is not None:
            pair = _deliver(groups, weight, g, seen, geo)
        if bias is not None:
            pair_b = _deliver_bias(groups, bias, g)
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
    last = n == 2 and weight.is_contiguous(memory_format=torch.channels_last) and not weight.is_contiguous()
    given = (stride, padding, dilation, groups, transposed, output_padding, last)
    geo, more = _geometry(weight.shape, *given) if is_compiling() else _known_geometry(weight.shape, given)
    use = base.use_of(mini, name, x, n + 1, (weight, bias), geo)
    if use is None:
        return NotImplemented
    x = base.autocast(x)
    return base.call(Conv, F.pad(x, more) if more else x, use)


def _geometry(
    shape: Any, stride: Any, padding: Any, dilation: Any, groups: int, transposed: bool, output_padding: Any, last: bool
) -> tuple[Geometry, list[int] | None]:
    """The geometry of a convolution by the arguments of torch's, and what its input is padded by before."""
    n, more = len(shape) - 2, None
    dilation = _sizes(dilation, n)
    if padding == "same":  # as torch does it: what is odd comes after, before the convolution pads both sides
        total = [d * (k - 1) for d, k in zip(dilation, shape[2:], strict=True)]
        padding = [t // 2 for t in total]
        if any(t % 2 for t in total):
            more = [v for t in reversed(total) for v in (0, t % 2)]
    taps = _sizes(stride, n), _sizes(0 if isinstance(padding, str) else padding, n), dilation
    return Geometry(tuple(shape), *taps, transposed, _sizes(output_padding, n), groups, last), more


def _known_geometry(shape: torch.Size, given: tuple[Any, ...]) -> tuple[Geometry, list[int] | None]:
    """`_geometry`, which a layer needs in every forward."""
    key = (shape, given)
    try:
        found = _geometries.get(key)
    except TypeError:  # lists of numbers are no keys
        return _geometry(shape, *given)
    if found is None:
        found = _geometries[key] = _geometry(shape, *given)
    return found


_geometries: dict[tuple[Any, ...], tuple[Geometry, list[int] | None]] = {}


@base.operation("conv_transpose1d", "conv_transpose2d", "conv_transpose3d", line=_line)
def transposed_convolution(
    mini: MiniBatch, func: Any, input: Tensor, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0,
    output_padding: Any = 0, groups: int = 1, dilation: Any = 1,
) -> Any:  # fmt: skip
    """A transposed convolution, whose arguments come in another order."""
    return convolution(mini, func, input, weight, bias, stride, padding, dilation, groups, True, output_padding)

"""Operations in which each group meets its own copy of a parameter: element by element against the batch, spread over
the batch as class tokens and queries are, and row by row."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..dispatch import dispatch, fallback
from ..mini_batch import MiniBatch
from ..weight import Handle, apart, lift
from . import base
from .lookup import Looked

NAMES = (
    "add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide", "rsub", "__rdiv__",
    "__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__rtruediv__",
)  # fmt: skip


@base.operation(*NAMES)
def elementwise(mini: MiniBatch, func: Any, *args: Any, **kwargs: Any) -> Any:
    """A sum, difference, product or quotient of two tensors, one of which has a handle."""
    if len(args) != 2 or not (isinstance(args[0], Tensor) and isinstance(args[1], Tensor)):
        return NotImplemented
    first, second = mini.handle_of(args[0]), mini.handle_of(args[1])
    if (first is None) == (second is None):
        return NotImplemented
    h, x = (first, args[1]) if first is not None else (second, args[0])
    if h is None or h.value.ndim > x.ndim:
        return NotImplemented
    place = mini.place(x, 0, func.__name__, (h,), any_order=True)
    if place is None:
        return NotImplemented
    if place.routed is not None and isinstance(h, Looked) and h.value.shape == x.shape and h.names_rows:
        own = h.meeting(place.routed)
        return func(own, x, **kwargs) if first is not None else func(x, own, **kwargs)
    axis = place.axis
    under = axis - (x.ndim - h.value.ndim)  # the parameter's dimension under the batch
    if under >= 0 and h.value.shape[under] != 1:
        return NotImplemented
    groups, copies = mini.groups, mini.grouped(h)
    if h.value.ndim < x.ndim:
        copies = copies.reshape(copies.shape[0], *(1,) * (x.ndim - h.value.ndim), *h.value.shape)
    if axis:
        copies = copies.movedim(axis + 1, 1)

    def meet(own: Tensor, rows: Tensor) -> Tensor:
        return func(own, rows, **kwargs) if first is not None else func(rows, own, **kwargs)  # type: ignore[no-any-return]

    if place.routed is not None:
        return meet(copies[place.routed.ids].squeeze(1), x)
    pieces = zip(groups.cut(copies), groups.stack(x, axis), strict=True)
    y = groups.merge([meet(p, xs) for p, xs in pieces], axis)
    # A number alone does not widen x, as its copies do.
    return base.as_called(y, func, *args, **kwargs) if h.value.ndim == 0 and h.value.dtype != x.dtype else y


@base.operation("expand", "repeat")
def expand(mini: MiniBatch, func: Any, input: Any, *sizes: Any) -> Any:
    """A parameter spread over the batch: the handle remembers the copies before the spread."""
    h = mini.handle_of(input)
    if len(sizes) == 1 and not isinstance(sizes[0], int):
        sizes = tuple(sizes[0])
    axis, batch = mini.groups.axis, mini.groups.batch
    source = axis - (len(sizes) - input.ndim)
    if h is None or axis >= len(sizes) or sizes[axis] != batch or (source >= 0 and input.shape[source] != 1):
        return NotImplemented
    mini.note((h,), func.__name__)
    copies = mini.grouped(h)

    def spread(lo: int, hi: int, rows: int) -> Tensor:
        to = (*sizes[:axis], rows, *sizes[axis + 1 :])
        return torch.func.vmap(lambda t: func(t, *to))(copies[lo:hi])  # type: ignore[no-any-return]

    value = func(apart(h.value), *sizes)
    return lift(value, Handle(value, spread(0, mini.groups.kappa, batch), True, None, spread, h.label))


@base.operation("expand_as")
def expand_as(mini: MiniBatch, func: Any, input: Any, other: Tensor) -> Any:
    """`expand` to the shape of another tensor."""
    return dispatch(Tensor.expand, (input, *other.shape), {})


@base.operation("prelu")
def prelu(mini: MiniBatch, func: Any, input: Any, weight: Any) -> Any:
    """PReLU, whose dtypes autocast makes equal: not where it runs group by group."""
    if mini.holds(input) or not mini.holds(weight) or input.dtype == weight.dtype:
        return NotImplemented
    x = base.autocast(input)
    return fallback(mini, func, "prelu", (x, dispatch(Tensor.to, (weight, x.dtype), {})), {})


@base.operation("__iter__")
def iterate(mini: MiniBatch, func: Any, input: Any) -> Any:
    """The rows of a parameter, one by one."""
    return iter(dispatch(Tensor.unbind, (input, 0), {}))

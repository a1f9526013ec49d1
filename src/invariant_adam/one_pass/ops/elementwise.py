"""A parameter against the batch, element by element: each group meets its own copy."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..mini_batch import MiniBatch
from . import base

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
    assert h is not None
    if h.value.ndim > x.ndim:
        return NotImplemented
    place = mini.place(x, 0, func.__name__, (h,), any_order=True)
    if place is None:
        return NotImplemented
    axis = place.axis
    under = axis - (x.ndim - h.value.ndim)  # the parameter's dimension under the batch
    if under >= 0 and h.value.shape[under] != 1:
        return NotImplemented
    groups = mini.groups
    copies = mini.grouped(h)
    copies = copies.reshape(copies.shape[0], *(1,) * (x.ndim - h.value.ndim), *h.value.shape)
    copies = copies.movedim(axis + 1, 1)
    if place.routed is not None:
        own = copies[place.routed.ids].squeeze(1)
        return func(own, x, **kwargs) if first is not None else func(x, own, **kwargs)
    out = []
    for stretch, xs in zip(groups.stretches, groups.stack(x, axis), strict=True):
        p = copies[stretch.lo : stretch.hi]
        out.append(func(p, xs, **kwargs) if first is not None else func(xs, p, **kwargs))
    return groups.merge(out, axis)

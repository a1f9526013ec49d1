"""A parameter spread over the batch, as class tokens and queries are, and the rows of a parameter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..dispatch import dispatch
from ..mini_batch import MiniBatch
from ..weight import Handle, apart, lift
from . import base


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
    base = mini.grouped(h)

    def spread(copies: Tensor, rows: int) -> Tensor:
        to = (*sizes[:axis], rows, *sizes[axis + 1 :])
        return torch.func.vmap(lambda t: func(t, *to))(copies)  # type: ignore[no-any-return]

    def resize(lo: int, hi: int, rows: int) -> Tensor:
        return spread(base[lo:hi], rows)

    value = func(apart(h.value), *sizes)
    return lift(value, Handle(value, spread(base, batch), True, None, resize, h.label))


@base.operation("expand_as")
def expand_as(mini: MiniBatch, func: Any, input: Any, other: Tensor) -> Any:
    """`expand` to the shape of another tensor."""
    return dispatch(Tensor.expand, (input, *other.shape), {})


@base.operation("__iter__")
def iterate(mini: MiniBatch, func: Any, input: Any) -> Any:
    """The rows of a parameter, one by one."""
    return iter(dispatch(Tensor.unbind, (input, 0), {}))

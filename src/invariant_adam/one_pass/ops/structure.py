"""Operations that only move the elements of a value made of parameters alone: each goes to one place at most.

Of one use, the tag takes the same way as the value. Of a grouped value, the κ copies of the tag (κ, *shape) take it at
once, every dimension one further: a call per group, under `vmap`, would cost the host ten times as much.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..dispatch import name_of
from ..mini_batch import MiniBatch
from ..weight import Handle, lift
from . import base
from .lookup import rows

NUMBERS = frozenset({int})
INDICES = frozenset({int, slice, type(None), type(Ellipsis)})  # that name no element twice

# Each makes the tags of a grouped value's results: (tag, the value, its result, *the arguments).


def _in_order(tag: Tensor, value: Tensor, out: Tensor, *_: Any, **__: Any) -> Tensor:
    return tag.reshape(tag.shape[0], *out.shape)


def _copied(tag: Tensor, value: Tensor, out: Tensor) -> Tensor:
    """What lies in memory as before needs no copy: a tag is never written to. Else κ copies, which lie like `out`."""
    return tag if out.stride() == value.stride() else tag.clone(memory_format=torch.contiguous_format)


def _permuted(tag: Tensor, value: Tensor, out: Tensor, *dims: Any) -> Tensor:
    each = dims if type(dims[0]) is int else dims[0]
    return tag.permute(0, *[d % value.ndim + 1 for d in each])


def _transposed(tag: Tensor, value: Tensor, out: Tensor, first: int, second: int) -> Tensor:
    return tag.transpose(first % value.ndim + 1, second % value.ndim + 1)


def _turned(tag: Tensor, value: Tensor, out: Tensor) -> Tensor:
    return tag.permute(0, *range(value.ndim, 0, -1))


def _turned_last(tag: Tensor, value: Tensor, out: Tensor) -> Tensor:
    return tag.mT


def _moved(tag: Tensor, value: Tensor, out: Tensor, source: Any, to: Any) -> Tensor:
    n, one = value.ndim, type(source) is int
    pairs = zip([source] if one else source, [to] if one else to, strict=True)
    order = {t % n: s % n for s, t in pairs}
    rest = iter(d for d in range(n) if d not in order.values())
    return tag.permute(0, *[(order[d] if d in order else next(rest)) + 1 for d in range(n)])


def _narrowed(tag: Tensor, value: Tensor, out: Tensor, dim: int, start: int, length: int) -> Tensor:
    return tag.narrow(dim % value.ndim + 1, start, length)


def _selected(tag: Tensor, value: Tensor, out: Tensor, dim: int, index: int) -> Tensor:
    return tag.select(dim % value.ndim + 1, index)


def _indexed(tag: Tensor, value: Tensor, out: Tensor, index: Any) -> Tensor:
    return tag[(slice(None), *index) if isinstance(index, tuple) else (slice(None), index)]


def _unbound(tag: Tensor, value: Tensor, out: Any, dim: int = 0) -> Any:
    return tag.unbind(dim % value.ndim + 1)


def _split(tag: Tensor, value: Tensor, out: Any, *sizes: Any, dim: int = 0) -> Any:
    dim = (sizes[1] if len(sizes) > 1 else dim) % value.ndim
    return tag.split([t.shape[dim] for t in out], dim + 1)


WAYS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("view", "reshape", "unsqueeze", "squeeze", "flatten", "unflatten", "ravel"), _in_order),
    **dict.fromkeys(("contiguous", "clone"), _copied),
    **dict.fromkeys(("transpose", "swapaxes", "swapdims"), _transposed),
    **dict.fromkeys(("movedim", "moveaxis"), _moved),
    **dict.fromkeys(("split", "chunk", "split_with_sizes"), _split),
    "permute": _permuted, "t": _turned, "T": _turned, "mT": _turned_last, "narrow": _narrowed, "select": _selected,
    "unbind": _unbound, "__getitem__": _indexed,
}  # fmt: skip


@base.operation(*WAYS)
def rearrange(mini: MiniBatch, func: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
    """A view, a copy, a part or parts of a value made of parameters alone; what is not simple is left to `fallback`."""
    h, name = mini.handle_of(input), name_of(func)
    if h is None or not h.value.ndim:
        return NotImplemented
    way = WAYS[name]
    if way is _indexed:
        (index,) = args
        if isinstance(index, Tensor):
            return rows(mini, name, h, index, lambda t: func(t, index))
        for i in index if type(index) is tuple else args:
            if type(i) not in INDICES:
                return NotImplemented
    elif not _are_numbers(args) or (kwargs and not (_are_numbers(kwargs.values()) and _knows(way, kwargs))):
        return NotImplemented
    mini.note((h,), name)
    if h.direct:
        mini.serve(h, f"a value of {name}", delivers=False)
    value = h.value
    if h.grouped:
        out = func(value, *args, **kwargs)
        mini.serve(h, "copies")
        tags = way(h.tag, value, out, *args, **kwargs)
        entry = None
    else:
        out, entry = func(value, *args, **kwargs), h.entry
        tags = h.tag if way is _copied else func(h.tag, *args, **kwargs)
    if isinstance(out, Tensor):
        return lift(out, Handle(out, tags, h.grouped, entry, label=h.label, own=h.own))
    pairs = zip(out, tags, strict=True)
    return tuple([lift(v, Handle(v, t, h.grouped, entry, label=h.label, own=h.own)) for v, t in pairs])


def _are_numbers(args: Any) -> bool:
    """Whether these are integers, or sequences of them: nothing that torch.compile or the batch would vary."""
    for a in args:
        if type(a) not in NUMBERS:
            if not isinstance(a, (tuple, list)):
                return False
            for i in a:
                if type(i) not in NUMBERS:
                    return False
    return True


def _knows(way: Callable[..., Any], kwargs: dict[str, Any]) -> bool:
    """Whether a way takes these arguments by name; `_in_order` looks at none."""
    return way is _in_order or (list(kwargs) == ["dim"] and way in (_split, _unbound))

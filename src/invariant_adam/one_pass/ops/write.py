"""Parameters that are written over a part of the batch: `x[:, 0] = p`, `x[mask] = p`, `x[i, :n] = p` for sample i.

Each sample gets its micro-batch's own copy, also in a tensor of the batch's size that held constants so far. No probe
looks at what is written over, which may never have been written: the loop tells whether this is right.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..mini_batch import MiniBatch, Mode
from ..routing import routed, sample_groups
from ..weight import Handle
from . import base
from .structure import INDICES


@base.operation("__setitem__")
def write(mini: MiniBatch, func: Any, input: Any, index: Any, value: Any) -> Any:
    """A value of parameters, written into a block of the batch or wherever an index says."""
    h, groups = mini.handle_of(value), mini.groups
    if h is None or mini.holds(input) or torch.compiler.is_compiling():
        return NotImplemented
    if mini.mode is Mode.OUTSIDE and torch._C._current_graph_task_id() < 0:  # a checkpoint runs again in a backward
        return NotImplemented
    sized = [d for d, n in enumerate(input.shape) if n == groups.batch]
    if not sized or routed(input, groups) is not None:
        return NotImplemented
    axis = groups.axis if groups.axis in sized else sized[0]
    parts = list(index) if isinstance(index, tuple) else [index]
    if all(type(part) in INDICES for part in parts):
        return _write_block(mini, func, input, axis, index, h)
    if h.value.ndim > _left_whole(input, parts):
        return NotImplemented
    places = torch.zeros_like(input, dtype=torch.bool)
    places[index] = True
    own = _for_samples(mini, h, axis, input.ndim).to(input.dtype)
    input.copy_(torch.where(places, own, input))
    return None


def _write_block(mini: MiniBatch, func: Any, input: Tensor, axis: int, index: Any, h: Handle) -> Any:
    """Where slices and numbers say: the same block of all samples, or one sample."""
    batch = mini.groups.batch
    # The sample of each element that is written over; its strides tell where the batch has come to.
    samples = torch.arange(batch).as_strided(input.shape, [int(d == axis) for d in range(input.ndim)])[index]
    if not samples.numel():
        return None
    at = next((d for d, stride in enumerate(samples.stride()) if stride), None)
    missing = samples.ndim - h.value.ndim
    if missing < 0:
        return NotImplemented
    if at is None:
        mini.note((h,), "__setitem__")
        func(input, index, mini.grouped(h)[int(samples.flatten()[0]) // mini.groups.micro])
    # A part of the samples, by their places in the mini-batch, would be another part of each micro-batch.
    elif samples.shape[at] != batch or (at >= missing and h.value.shape[at - missing] != 1):
        return NotImplemented
    else:
        func(input, index, _for_samples(mini, h, at, samples.ndim))
    return None


def _for_samples(mini: MiniBatch, h: Handle, axis: int, ndim: int) -> Tensor:
    """For each sample its own copy of a value, in so many dimensions, the samples in dimension `axis`."""
    mini.note((h,), "__setitem__")
    own = mini.grouped(h)[sample_groups(mini.groups, mini.groups.batch, h.value.device)]
    return own.reshape(len(own), *(1,) * (ndim - h.value.ndim), *h.value.shape).transpose(0, axis + 1).squeeze(0)


def _left_whole(x: Tensor, parts: list[Any]) -> int:
    """How many of the last dimensions of x an index takes as they are."""
    while parts and isinstance(parts[-1], slice) and parts[-1] == slice(None):
        parts.pop()
    if not all(isinstance(part, (int, slice, Tensor)) and not isinstance(part, bool) for part in parts):
        return 0
    return x.ndim - sum(part.ndim if isinstance(part, Tensor) and part.dtype == torch.bool else 1 for part in parts)

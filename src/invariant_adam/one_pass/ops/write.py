"""Parameters that are written over a part of the batch: `x[:, 0] = p`, `x[mask] = p`, `x[i, :n] = p` for sample i."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..mini_batch import MiniBatch, Mode
from ..routing import routed, sample_groups
from . import base
from .structure import INDICES


@base.operation("__setitem__")
def write(mini: MiniBatch, func: Any, input: Any, index: Any, value: Any) -> Any:
    """Each sample gets its micro-batch's own copy, also in a tensor of the batch's size that held constants so far."""
    h, groups = mini.handle_of(value), mini.groups
    if h is None or mini.holds(input) or torch.compiler.is_compiling():
        return NotImplemented
    if mini.mode is Mode.OUTSIDE and torch._C._current_graph_task_id() < 0:  # a checkpoint runs again in a backward
        return NotImplemented
    # No probe looks at what is written over, which may never have been written. The loop tells whether this is right.
    sized = [d for d, n in enumerate(input.shape) if n == groups.batch]
    if not sized or routed(input, groups) is not None:
        return NotImplemented
    axis = groups.axis if groups.axis in sized else sized[0]
    mask = index if isinstance(index, Tensor) and index.dtype is torch.bool else None
    if mask is None and any(type(i) not in INDICES for i in (index if isinstance(index, tuple) else (index,))):
        return NotImplemented
    # The sample of each element that is written over; its strides tell where the batch has come to.
    samples = torch.arange(groups.batch).as_strided(input.shape, [int(d == axis) for d in range(input.ndim)])
    if mask is None:
        samples = samples[index]
    at = next((d for d, stride in enumerate(samples.stride()) if stride), None)
    missing = samples.ndim - h.value.ndim
    if not samples.numel():
        return None
    if missing < (0 if mask is None else mask.ndim):
        return NotImplemented
    if at is None:
        mini.note((h,), "__setitem__")
        func(input, index, mini.grouped(h)[int(samples.flatten()[0]) // groups.micro])
        return None
    # A part of the samples, by their places in the mini-batch, would be another part of each micro-batch.
    if samples.shape[at] != groups.batch or (at >= missing and h.value.shape[at - missing] != 1):
        return NotImplemented
    mini.note((h,), "__setitem__")
    own = mini.grouped(h)[sample_groups(groups, groups.batch, input.device)]
    own = own.reshape(len(own), *(1,) * missing, *h.value.shape).transpose(0, at + 1).squeeze(0)
    if mask is None:
        func(input, index, own)
    else:
        mask = mask.reshape(*mask.shape, *(1,) * (input.ndim - mask.ndim))
        input.copy_(torch.where(mask, own.to(input.dtype), input))
    return None

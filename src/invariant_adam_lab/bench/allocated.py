"""The bytes that torch allocates during some work: on a GPU by its caching allocator, on the CPU by its profiler."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function


class Growth(NamedTuple):
    """Bytes beyond those at the start: after the first part of the work, and at the worst moment of all of it."""

    between: int
    peak: int


def growth(first: Callable[[], object], second: Callable[[], object], device: torch.device) -> Growth:
    """Run `first` and `second` and count the memory that torch allocates meanwhile."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        start = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        first()
        between = torch.cuda.memory_allocated(device)
        second()
        return Growth(between - start, torch.cuda.max_memory_allocated(device) - start)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or the profiler greets on stderr
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as seen:
        first()
        with record_function("invariant_adam.second"):
            second()
    results = seen.profiler.kineto_results
    events = sorted(results.events(), key=lambda event: event.start_ns())
    now = between = peak = 0
    for event in events:
        if event.name() == "invariant_adam.second":
            between = now
        elif event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return Growth(between, peak)


def size_of(tensors: Sequence[Tensor]) -> int:
    """Return the size of the memory behind tensors, shared memory once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())

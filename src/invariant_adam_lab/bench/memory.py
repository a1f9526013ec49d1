"""The memory of an update by each method of `one_pass`, in bytes of torch's allocator.

| | |
|---|---|
| held | optimizer state and gradients when the last backward is done and the weights are about to move |
| tensors | held and the weights, over the weights: w, m, v and an accumulated gradient are 4 |
| peak | everything alive at the worst moment of the update |
| bare | the same of a forward and backward whose gradients are dropped as they come, without an optimizer |

`peak` − `bare` is what training costs beyond the activations: the state, and the gradients that are alive while the
activations are. On a GPU the caching allocator counts; on the CPU torch's profiler, which sees each allocation and
release, those inside operators too. Neither sees the scratch memory that a library takes elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..record import Rows
from .allocated import growth, size_of
from .one_pass import Case, CaseStep, Job, Tell, failure, title

__all__ = ["HEAD", "cells", "growth", "measure", "title"]
HEAD = ("method", "M", "tensors", "held MiB", "peak MiB", "peak − bare MiB")


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """Return a row as it is printed under `HEAD`."""
    found = row["method"], str(row["micro_batch"] or "")
    if "error" in row:
        return found
    sizes = (row["held_bytes"], row["peak_bytes"], row["peak_bytes"] - row["bare_bytes"])
    return (*found, f"{row['tensors']:.2f}", *(f"{size / 2**20:,.1f}" for size in sizes))


def measure(todo: list[Job], rows: Rows, *, tell: Tell) -> Iterator[dict[str, Any]]:
    """Measure method by method and yield each row once it is written."""
    bare: tuple[dict[str, Any], int] | None = None
    for case, method in todo:
        tell(f"{case}: {method}")
        torch.compiler.reset()
        try:
            looped = method in ("accumulate", "loop")
            like = {**case.settings("loop" if looped else "plain"), "looped": looped}
            if bare is None or bare[0] != like:
                bare = like, _bare(case, looped)
            measured = {**_of(case, method), "bare_bytes": bare[1]}
        except Exception as error:  # out of memory, refused, not to be compiled
            measured = failure(error)
        yield rows.add(case.settings(method), measured)


def _of(case: Case, method: str) -> dict[str, Any]:
    device = torch.device(case.device)
    update = CaseStep(case, method)
    for _ in range(2):  # the first makes the state and whatever is kept between updates
        update()
    params = list(update.model.parameters())
    state = [t for values in update.optimizer.state.values() for t in values.values() if isinstance(t, Tensor)]
    weights, kept, rest = size_of(params), size_of(state), size_of([*update.model.buffers(), *update.batch])
    grown = growth(update.gather, update.step, device)
    held = kept + grown.between
    return {
        "parameters": sum(p.numel() for p in params),
        "weight_bytes": weights,
        "state_bytes": kept,
        "held_bytes": held,
        "tensors": round((weights + held) / weights, 4),
        "peak_bytes": weights + kept + rest + grown.peak,
    }


def _bare(case: Case, looped: bool) -> int:
    """The peak of a forward and backward alone, over the mini-batch or over one micro-batch after another."""
    update = CaseStep(case, "accumulate" if looped else "plain")
    del update.optimizer

    def drop(p: Tensor) -> None:
        p.grad = None

    params = list(update.model.parameters())
    for p in params:
        p.register_post_accumulate_grad_hook(drop)
    for _ in range(2):
        update.gather()
    grown = growth(update.gather, lambda: None, torch.device(case.device))
    return size_of([*params, *update.model.buffers(), *update.batch]) + grown.peak

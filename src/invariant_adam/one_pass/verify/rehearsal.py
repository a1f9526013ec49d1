"""Compile the kernels of a model's first update side by side, before the update comes to them one after the other.

The model runs forward and backward on its own mini-batch, and where a kernel would be started its launch is put down
instead. The library's kernels do run, so that what reaches ours has the shapes, dtypes and layouts of an update. All
that it makes is dropped.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from itertools import chain
from typing import Any

import torch

from ...kernels import rehearsal, rehearses
from .against_loop import differentiated
from .probe import Trial, differentiable, freed

log = logging.getLogger(__name__.partition(".")[0])


def rehearse(trial: Trial, tell: Callable[[str], None], backward: bool = True) -> None:
    """Have the kernels of an update at hand, or of its forward alone.

    It only saves time: where it cannot be done, the update compiles its kernels itself, and says itself what is wrong.
    """
    entries = trial.mini.facts.order
    devices = {entry.param.device for entry in entries}
    # No hook is to see gradients that were never made.
    hooked = any(entry.param._backward_hooks for entry in entries) or any(
        m._backward_hooks or m._backward_pre_hooks for m in trial.model.modules()
    )
    if hooked or not any(map(rehearses, devices)):
        return
    try:
        # In one thread, on several devices too: launches of other threads are others' and do start.
        with rehearsal(tell), torch.autograd.set_multithreading_enabled(False):
            _run(trial, devices) if backward else trial.run(freed)
    except Exception as problem:  # no memory, most likely
        log.debug("the first update compiles its kernels one by one: %s", problem)
        if isinstance(problem, torch.OutOfMemoryError):
            problem.with_traceback(None)  # whose frames hold what takes the memory
            torch.cuda.empty_cache()
    finally:
        for entry in entries:  # the backward has passed by all of them
            entry.arrived = 0
            entry.restart()


def _run(trial: Trial, devices: set[torch.device]) -> None:
    facts = trial.mini.facts
    leaves = [t for entry in facts.order for t in (entry.param, entry.companion)]
    leaves += chain.from_iterable(facts.tickets.values())

    def differentiate(outputs: list[Any]) -> None:
        trial.mini.probe = None  # checkpoints recompute their forward in here
        found = differentiable(outputs)
        losses = [o for o in found if o.ndim == 0] or found  # what a step differentiates, if the model returns it
        with ExitStack() as stack:
            for device in devices:  # as in a step, whose backward runs outside of it
                stack.enter_context(torch.autocast(device.type, enabled=False))
            differentiated(losses, leaves, [torch.ones_like(o) for o in losses])

    trial.run(differentiate, backward=True)

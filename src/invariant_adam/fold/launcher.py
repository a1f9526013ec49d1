"""How the kernels of an update are started: `Launcher`, at once; a capture has its own (see `graphs`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ..kernels import adam as kernels
from ..kernels.adam import Fold
from .pair import Pair
from .scalars import Counters, Tally
from .update import Update


class Step(NamedTuple):
    """What a step does to parameters that share a history: w ← decay·w − size·m/(√v + eps), then new counters."""

    params: list[Tensor]
    size: float
    eps: float
    decay: float
    counters: Counters


class Launcher:
    """Starts folds and steps as they come."""

    captures = False  # whether a fold may be captured in a CUDA graph

    def arrive(self, p: Tensor, tally: Tally, pair: Pair) -> int:
        """Note a pair that is about to be counted; return its place among those of the update."""
        return -1

    def slots(self, moment: Tensor, places: Sequence[int] = (), params: Sequence[Tensor] = ()) -> Tensor | None:
        """Where a launch on `moment` and its like reads its scalars on the device; None: they are arguments."""
        return None

    def fold(self, folds: list[Fold]) -> None:
        """Fold gradients that share all scalars."""
        keep, gain, count = folds[0][2:5]
        slots = self.slots(folds[0].exp_avg, [f.place for f in folds])
        kernels.fold(*_lists(folds), keep=keep, gain=gain, count=count, slots=slots)

    def step(self, params: list[Tensor], weights: list[Tensor], ms: list[Tensor], vs: list[Tensor], step: Step) -> None:
        """Move `weights`, the pieces of `params` that are here, by the moments `ms` and `vs`."""
        slots = self.slots(ms[0], params=params)
        kernels.step(weights, ms, vs, size=step.size, eps=step.eps, decay=step.decay, slots=slots)

    def fold_step(self, folds: list[Fold], step: Step) -> None:
        """`fold`, then `step` on the same parameters, in one pass over memory."""
        keep, gain, count = folds[0][2:5]
        params: Any = [f.param for f in folds]
        slots = self.slots(folds[0].exp_avg, [f.place for f in folds], params)
        kernels.fold_step(
            params, *_lists(folds), keep=keep, gain=gain, size=step.size, eps=step.eps, decay=step.decay,
            count=count, slots=slots,
        )  # fmt: skip

    def finish(self, update: Update) -> bool:
        """Note that all launches of an update are started; return whether it has happened, and is to be counted."""
        return True


def _lists(folds: list[Fold]) -> tuple[Any, Any, list[Tensor], list[Tensor]]:
    """Gradients, squares (None where the gradients are to be squared), m and v."""
    squares = None if folds[0].square is None else [f.square for f in folds]
    return [f.grad for f in folds], squares, [f.exp_avg for f in folds], [f.exp_avg_sq for f in folds]

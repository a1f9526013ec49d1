"""What a check is asked for -> a `Problem`: arguments refused by name, samples drawn, marks set."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ..growth import grown_kappa
from . import runs
from .runs import LossFn, Problem
from .samples import draw, moved

Progress = Callable[[int, int, str], None]  # samples done, samples in all, what is being done

_MARKS = 8  # times that the loss is measured in a run
_PROBED = 128  # samples that it is measured on, about
_WHOLE = 4  # updates of the largest batch that a run must have at least


class Clock:
    """Tells of progress."""

    def __init__(self, progress: bool | Progress, total: int) -> None:
        self.done, self.total = 0, total
        self.report: Progress | None = progress if callable(progress) else _print_line() if progress else None

    def __call__(self, what: str) -> Callable[[int], None]:
        """What a run tells of the samples that it has seen."""

        def tell(samples: int) -> None:
            self.done += samples
            self.total = max(self.total, self.done)
            if self.report is not None:
                self.report(self.done, self.total, what)

        return tell


def _print_line() -> Progress:
    last: list[str] = []

    def report(done: int, total: int, what: str) -> None:
        if last != [what]:
            last[:] = [what]
            sys.stderr.write(f"invariance check: {what} ({done:,} of {total:,} samples)\n")

    return report


def check_sizes(batch_sizes: Sequence[int], micro_batch_size: int | None) -> tuple[list[int], int]:
    """Return the batch sizes in order, M among them, and M; refused by name where they do not fit."""
    given = sorted(set(batch_sizes))
    if not given or any(not isinstance(size, int) or size < 1 for size in given):
        raise ValueError(f"batch_sizes must be numbers of samples of at least 1, got {tuple(batch_sizes)}")
    micro = given[0] if micro_batch_size is None else micro_batch_size
    if not isinstance(micro, int) or micro < 1:
        raise ValueError(f"micro_batch_size must be at least 1 sample, got {micro_batch_size}")
    for size in given:
        if size % micro:
            raise ValueError(
                f"batch_sizes must be multiples of micro_batch_size = {micro}: {size} is not; use "
                f"{max(size // micro, 1) * micro} or {(size // micro + 1) * micro}"
            )
    sizes = sorted({micro, *given})
    if len(sizes) < 2:
        raise ValueError(f"batch_sizes must have a size above micro_batch_size = {micro}, got {tuple(batch_sizes)}")
    return sizes, micro


def check_rest(lr: float, samples: int | None, coupled: str | None, tolerance: float, options: dict[str, Any]) -> None:
    """Refuse by name what cannot be checked."""
    if not 0 < lr < math.inf:
        raise ValueError(f"lr must be a finite number above 0, got {lr}")
    if samples is not None and (not isinstance(samples, int) or samples < 1):
        raise ValueError(f"samples must be a number of samples, got {samples}")
    if coupled not in (None, "micro-batch"):
        raise ValueError(f'coupled must be None or "micro-batch", got {coupled!r}')
    if not tolerance > 0:
        raise ValueError(f"tolerance must be above 0, a difference of log losses, got {tolerance}")
    if options.get("fold", "backward") != "backward":
        raise ValueError(
            f"fold={options['fold']!r}: the check folds in backward; leave fold out, the update is the same"
        )
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        ranks = torch.distributed.get_world_size()
        if ranks > 1:
            raise RuntimeError(
                f"the check trains in one process, and a process group of {ranks} ranks is up; run it before "
                "init_process_group, with a model that fits one device"
            )


def problem_of(
    make_model: Callable[[], nn.Module] | nn.Module,
    loss_fn: LossFn,
    data: Any,
    sizes: list[int],
    micro: int,
    samples: int | None,
    seed: int,
    device: Any,
    schedule: Callable[[float], float] | None,
    grow: bool | float,
    options: dict[str, Any],
) -> Problem:
    """Draw the samples and say what is trained; the arguments are those of `invariance_check`."""
    ratio = 0.1 if grow is True else float(grow) if grow else None
    block = math.lcm(*sizes)
    least = -(-_least(sizes[-1] // micro, ratio) * micro // block) * block
    samples = max(2048, 16 * sizes[-1], least) if samples is None else samples
    blocks = samples // block
    if samples < least:
        grown = "" if ratio is None else f", growing in, after {_WHOLE} whole updates"
        raise ValueError(
            f"samples={samples} is too few to tell: batch_sizes {tuple(sizes)} can be compared from {least} samples "
            f"on{grown}; ask for at least that many, or for smaller batch sizes"
        )
    if not callable(loss_fn):
        raise TypeError(f"loss_fn must be a function of (model, batch), got {type(loss_fn).__name__}")
    runs.seeded(seed)
    count = blocks * block // micro
    batches = draw(data, micro, count, seed)
    number = min(blocks, _MARKS)
    marks = [round((i + 1) * blocks / number) * block // micro for i in range(number)]
    probed = min(count, max(1, _PROBED // micro), 64)
    probes = [i * count // probed for i in range(probed)]

    def warm(model: nn.Module) -> None:
        with torch.no_grad():
            loss_fn(model, moved(batches[0], torch.device(device or "cpu")))

    build = runs.builder(make_model, device, seed, warm)
    return Problem(build, loss_fn, batches, micro, options, schedule, ratio, marks, probes, seed)


def _least(kappa: int, ratio: float | None) -> int:
    """Micro-batches until an update had κ of them `_WHOLE` times: before, runs that grow in are one and the same."""
    seen = whole = 0
    while whole < _WHOLE:
        left = kappa
        while left:
            now = grown_kappa(left, seen, math.inf if ratio is None else ratio)
            seen, left, whole = seen + now, left - now, whole + (now == kappa)
    return seen

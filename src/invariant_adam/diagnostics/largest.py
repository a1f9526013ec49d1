"""`largest_invariant_lr`: up to which learning rate, or batch size, do runs agree?"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from . import runs
from .runs import Curve, LossFn, spread, train
from .setup import Clock, Progress, check_rest, check_sizes, problem_of


@dataclass
class Search:
    """What `largest_invariant_lr` found: a bracket around the value at which the spread passes the threshold."""

    vary: str  # "lr" or "batch_size"
    passes: float | None  # the largest value that passed; None: not even the smallest did
    fails: float | None  # the smallest that did not; None: even the largest passed
    threshold: float  # of the spread, a difference of log losses
    tried: dict[float, float]  # value -> spread between B = M and the batch size
    runs: int  # at most, as told beforehand
    samples: int  # of each run

    @property
    def cost(self) -> str:
        """What the search costs at most."""
        return f"at most {self.runs} runs of {self.samples:,} samples, {self.runs * self.samples:,} samples in all"

    def __str__(self) -> str:
        name = "learning rate" if self.vary == "lr" else "batch size"
        lines = [f"{value:>12g}  spread {self.tried[value]:.2g}" for value in sorted(self.tried)]
        if not self.tried:
            return f"Search of the largest invariant {name}: {self.cost}"
        if self.fails is None:
            verdict = f"even {self.passes:g}, the largest tried, is invariant"
        elif self.passes is None:
            verdict = f"not even {self.fails:g}, the smallest tried, is invariant"
        else:
            verdict = f"between {self.passes:g}, which is invariant, and {self.fails:g}, which is not"
        return "\n".join([f"Largest invariant {name}: {verdict} (threshold {self.threshold:g}).", *lines])


def largest_invariant_lr(
    make_model: Callable[[], nn.Module] | nn.Module,
    loss_fn: LossFn,
    data: Any,
    *,
    batch_size: int,
    micro_batch_size: int,
    low: float = 1e-5,
    high: float = 1e-1,
    resolution: float = 1.5,
    vary: str = "lr",
    lr: float | None = None,
    threshold: float = 0.05,
    samples: int | None = None,
    grow: bool | float = True,
    schedule: Callable[[float], float] | None = None,
    seed: int = 0,
    device: Any = None,
    progress: bool | Progress = False,
    dry_run: bool = False,
    **options: Any,
) -> Search:
    """Bisect the learning rate at which the runs at B = M and at `batch_size` part by more than a threshold.

    The spread grows with the learning rate; where it does not, one of several crossings is found. The cost is bounded
    and known: `dry_run=True` returns it, in `runs`, `samples` and `cost`, and trains nothing.

    Args:
        make_model: makes a new model, as for `invariance_check`; what is not said here is as there.
        loss_fn: `loss_fn(model, batch)` -> the mean loss of a micro-batch.
        data: drawn once.
        batch_size: B, samples; with vary="batch_size" the largest to try.
        micro_batch_size: M, samples.
        low: the smallest learning rate to try, of one update at the tuned batch size.
        high: the largest.
        resolution: stop where `fails`/`passes` is at most this.
        vary: "lr", or "batch_size": bisect over 2M, 4M, ... up to `batch_size` at the learning rate `lr`.
        lr: with vary="batch_size" alone.
        threshold: of the spread, in log loss.
        samples: that each run sees.
        grow: grow in.
        schedule: factor on the learning rate by samples seen.
        seed: of weights and order.
        device: where to train.
        progress: True, or a function of (samples done, samples in all, what).
        dry_run: tell the cost, and train nothing.
        options: other arguments of `InvariantAdam`.
    """
    sizes, micro = check_sizes([batch_size], micro_batch_size)
    if vary == "lr":
        if lr is not None:
            raise ValueError(f'lr={lr} is what is searched; give low and high, or vary="batch_size"')
        values = _rates(low, high, resolution)
    elif vary == "batch_size":
        if lr is None:
            raise ValueError('vary="batch_size" needs lr, the learning rate of one update at the tuned batch size')
        values = _doublings(micro, batch_size)
        sizes = [micro, *(int(value) for value in values)]
    else:
        raise ValueError(f'vary must be "lr" or "batch_size", got {vary!r}')
    check_rest(lr or low, samples, None, threshold, options)
    with runs.randomness():
        problem = problem_of(
            make_model, loss_fn, data, sizes, micro, samples, seed, device, schedule, grow, {**options, "lr": lr or low}
        )
        seen = problem.marks[-1] * micro
        tries = min(len(values), 2 + math.ceil(math.log2(max(1, len(values) - 1))))
        count = 2 * tries if vary == "lr" else 1 + tries
        found = Search(vary, None, None, threshold, {}, count, seen)
        if dry_run:
            return found
        clock = Clock(progress, count * seen)
        base: list[Curve] = []  # the run at B = M, the same for all batch sizes

        def passes(value: float) -> bool:
            if vary == "lr":
                pair = [train(problem, size, lr=value, tell=clock(f"lr = {value:.3g}")) for size in sizes]
            else:
                base[:] = base or [train(problem, micro, tell=clock(f"B = {micro}"))]
                pair = [*base, train(problem, int(value), tell=clock(f"B = {value:g}"))]
            found.tried[value] = spread(pair)
            return found.tried[value] <= threshold

        found.passes, found.fails = _bisect(values, passes)
    return found


def _rates(low: float, high: float, resolution: float) -> list[float]:
    """Learning rates from `low` to `high`, at equal ratios of at most `resolution`."""
    if not 0 < low < high < math.inf:
        raise ValueError(f"low and high must be learning rates, 0 < low < high, got {low} and {high}")
    if not resolution > 1:
        raise ValueError(f"resolution must be a ratio above 1, got {resolution}")
    steps = max(1, math.ceil(math.log(high / low) / math.log(resolution) - 1e-9))
    return [low * (high / low) ** (i / steps) for i in range(steps + 1)]


def _doublings(micro: int, batch: int) -> list[float]:
    """2M, 4M, ... below the batch size, and the batch size.

    >>> _doublings(4, 24)
    [8.0, 16.0, 24.0]
    """
    sizes = [micro << i for i in range(1, (batch // micro).bit_length())]
    return [float(size) for size in sizes if size < batch] + [float(batch)]


def _bisect(values: list[float], passes: Callable[[float], bool]) -> tuple[float | None, float | None]:
    """Of values in order the largest that passes, and the next, which does not; None where all pass, or none does.

    >>> _bisect([1.0, 2.0, 3.0, 4.0], lambda value: value < 3)
    (2.0, 3.0)
    """
    bottom, top = 0, len(values) - 1
    if passes(values[top]):
        return values[top], None
    if top == bottom or not passes(values[bottom]):
        return None, values[bottom]
    while top - bottom > 1:
        middle = (top + bottom) // 2
        if passes(values[middle]):
            bottom = middle
        else:
            top = middle
    return values[bottom], values[top]

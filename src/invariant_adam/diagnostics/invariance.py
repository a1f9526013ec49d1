"""`invariance_check`: does the batch size matter for this model, this loss and these hyperparameters?

The user's model is trained at several batch sizes from the same weights, on the same micro-batches in the same order.
Beside it stands the *order floor*: runs at B = M whose micro-batches are reordered inside of blocks of the largest
batch. A run at that batch size does not know their order, so that less spread than that cannot be expected.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ..growth import grown_kappa
from ..scaling import RULES
from . import coupling, runs
from .report import Cause, InvarianceResult
from .runs import Curve, LossFn, Problem, spread, train
from .samples import draw, moved

Progress = Callable[[int, int, str], None]  # samples done, samples in all, what is being done

_MARKS = 8  # times that the loss is measured in a run
_PROBED = 128  # samples that it is measured on, about
_FLOOR_RUNS = 2
_WHOLE = 4  # updates of the largest batch that a run must have at least


def invariance_check(
    make_model: Callable[[], nn.Module] | nn.Module,
    loss_fn: LossFn,
    data: Any,
    *,
    batch_sizes: Sequence[int],
    micro_batch_size: int | None = None,
    lr: float,
    samples: int | None = None,
    grow: bool | float = True,
    schedule: Callable[[float], float] | None = None,
    coupled: str | None = None,
    tolerance: float = 0.05,
    seed: int = 0,
    device: Any = None,
    progress: bool | Progress = False,
    **options: Any,
) -> InvarianceResult:
    """Train your own model at several batch sizes on the same samples, and say whether and why they part.

    The cost is known beforehand: batch sizes + 3 runs of `samples` samples at most, and four more where they part,
    forward and backward by micro-batches. Random numbers of torch, numpy and random are given back as they were.

    Args:
        make_model: makes a new model; or a model, of which copies are trained.
        loss_fn: `loss_fn(model, batch)` -> the mean loss of a micro-batch, to be differentiated.
        data: a tensor, a tuple or dict of tensors with the samples first, a Dataset or a DataLoader. Drawn once.
        batch_sizes: B, samples per update, multiples of M; M itself is always one of them.
        micro_batch_size: M, samples; None: the smallest batch size.
        lr: learning rate of one update at the tuned batch size (`tuned_batch_size`, by default M).
        samples: that each run sees, rounded down to what all batch sizes divide; None: 2048, or 16 times the largest
            batch. Growing in, that batch first comes whole when ten times as many samples were seen.
        grow: grow in (`BatchGrowth`); a number is its ratio.
        schedule: factor on the learning rate by samples seen, such as `warmup_cosine(...)`.
        coupled: "micro-batch" where samples of one micro-batch are meant to see each other, as in batch norm: M is
            then part of the model. None: that is a cause.
        tolerance: the spread of the log loss that counts as none; more, up to four times, where the order floor is
            high.
        seed: of weights, order and random numbers of the model.
        device: where to train; None: where make_model puts the model.
        progress: True prints a line for each run to stderr; or a function of (samples done, samples in all, what).
        options: other arguments of `InvariantAdam`: betas, weight_decay, tuned_batch_size, rule, ...

    >>> x = torch.randn(512, 4, generator=torch.Generator().manual_seed(0))
    >>> result = invariance_check(
    ...     lambda: nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 1)),
    ...     lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
    ...     (x, x.sum(1, keepdim=True)), batch_sizes=(4, 32), lr=1e-3, samples=512)
    >>> result.ok, result.causes
    (True, [])
    """
    sizes, micro = _check_sizes(batch_sizes, micro_batch_size)
    _check_rest(lr, samples, coupled, tolerance, options)
    ratio = 0.1 if grow is True else float(grow) if grow else None
    with runs.randomness():
        problem = _problem(
            make_model, loss_fn, data, sizes, micro, samples, seed, device, schedule, ratio, {**options, "lr": lr}
        )
        seen = problem.marks[-1] * micro
        clock = _Clock(progress, (len(sizes) + _FLOOR_RUNS) * seen + problem.marks[:2][-1] * micro)
        causes, notes = _look(problem, sizes, coupled == "micro-batch")
        curves = [train(problem, size, tell=clock(f"B = {size}")) for size in sizes]
        orders = [_reordered(problem, sizes[-1] // micro, i) for i in range(_FLOOR_RUNS)]
        floors = [train(problem, micro, order=order, tell=clock("order floor")) for order in orders]
        again = train(problem, micro, until=2, tell=clock("the same run again"))
        result = InvarianceResult(
            micro_batch_size=micro,
            lr=lr,
            tuned_batch_size=options.get("tuned_batch_size") or micro,
            betas=tuple(options.get("betas", (0.9, 0.999))),
            rule=options.get("rule", "exponential"),
            growth=ratio,
            tolerance=tolerance,
            samples=[0, *(mark * micro for mark in problem.marks)],
            curves=curves,
            floors=floors,
            spread=spread(curves),
            floor=spread([curves[0], *floors]),
            repeat=_repeat(curves[0], again),
            causes=causes,
            notes=notes,
        )
        _explain(result, problem, clock)
    return result


def _repeat(curve: Curve, again: Curve) -> float:
    """How far the same run is from itself; equal numbers are equal, lost or not."""
    first = curve._replace(losses=curve.losses[: len(again.losses)])
    return 0.0 if str(first.losses) == str(again.losses) else spread([first, again])


class _Clock:
    """Tells of progress."""

    def __init__(self, progress: bool | Progress, total: int) -> None:
        self.done, self.total = 0, total
        self.report: Progress | None = progress if callable(progress) else _print_line() if progress else None

    def __call__(self, what: str) -> Callable[[int], None]:
        def tell(samples: int) -> None:
            self.done += samples
            self.total = max(self.total, self.done)
            if self.report is not None:
                self.report(self.done, self.total, what)

        return tell


def _print_line() -> Progress:
    import sys

    last: list[str] = []

    def report(done: int, total: int, what: str) -> None:
        if last != [what]:
            last[:] = [what]
            sys.stderr.write(f"invariance check: {what} ({done:,} of {total:,} samples)\n")

    return report


# ---------------------------------------------------------------- what is asked for


def _check_sizes(batch_sizes: Sequence[int], micro_batch_size: int | None) -> tuple[list[int], int]:
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


def _check_rest(lr: float, samples: int | None, coupled: str | None, tolerance: float, options: dict[str, Any]) -> None:
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


def _problem(
    make_model: Callable[[], nn.Module] | nn.Module,
    loss_fn: LossFn,
    data: Any,
    sizes: list[int],
    micro: int,
    samples: int | None,
    seed: int,
    device: Any,
    schedule: Callable[[float], float] | None,
    ratio: float | None,
    options: dict[str, Any],
) -> Problem:
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


def _reordered(problem: Problem, block: int, which: int) -> list[int]:
    """The micro-batches in another order inside of each block."""
    generator = torch.Generator().manual_seed(problem.seed + 1 + which)
    firsts = range(0, problem.marks[-1], block)
    return [first + i for first in firsts for i in torch.randperm(block, generator=generator).tolist()]


# ---------------------------------------------------------------- why runs part


def _look(problem: Problem, sizes: list[int], accepted: bool) -> tuple[list[Cause], list[str]]:
    """Look at the model for what couples samples, remembers, or is random."""
    model = problem.build()
    device = runs.device_of(model)
    batches = [moved(b, device) for b in problem.batches[:2]]
    found = coupling.find_coupling(model, problem.loss_fn, batches[0], batches[-1], problem.seed)
    with torch.no_grad():  # once more a little away, where what begins at zero is seen
        runs.seeded(problem.seed + 1)
        for p in model.parameters():
            if p.is_floating_point():
                p.add_(0.02 * torch.randn_like(p))
    more = coupling.find_coupling(model, problem.loss_fn, batches[-1], batches[0], problem.seed)
    found += [one for one in more if one not in found]
    model = problem.build()
    causes = Cause.of(found, problem.size)
    notes = [cause.text for cause in causes if cause.kind == "factor"]
    causes = [cause for cause in causes if cause.kind != "factor"]
    if accepted:
        notes += [f"{c.text} You say that this is meant." for c in causes if c.kind == "coupled"]
        causes = [cause for cause in causes if cause.kind != "coupled"]
    if coupling.draws(model, problem.loss_fn, batches[0], problem.seed):
        notes.append(
            "The model draws random numbers (dropout?). Here each micro-batch draws the same at every batch size, as a "
            "loop of micro-batches does from one seed. One pass draws once for a mini-batch: runs at different batch "
            "sizes then agree on average only."
        )
    written = coupling.writes_state(model, problem.loss_fn, batches[0], problem.seed)
    if written:
        others = f" and {len(written) - 3} more" if len(written) > 3 else ""
        notes.append(
            f"A forward writes buffers ({', '.join(written[:3])}{others}): one micro-batch after the other, at every "
            "batch size. Ranks and one pass see them in another order."
        )
    return causes, notes


def _explain(result: InvarianceResult, problem: Problem, clock: _Clock) -> None:
    """Add the causes that the runs show, by what mends them."""
    named = [cause for cause in result.causes if cause.kind == "random"]
    result.causes[:] = [cause for cause in result.causes if cause.kind != "random"]
    noisy = result.repeat > 1e-6
    if noisy:
        result.causes += [Cause.nondeterministic(result.repeat, named)]
    if result.agrees or (noisy and result.spread <= 3 * max(result.repeat, result.floor)):
        return
    ends = (result.micro_batch_size, result.curves[-1].batch)
    lost = [curve.batch for curve in result.curves if curve.diverged]
    remedies: list[str] = []
    if result.growth is None:
        grown = problem._replace(growth=0.1)
        after = spread([result.curves[0], train(grown, ends[1], tell=clock("grown in"))])
        if after <= result.limit or after < result.spread_at(ends[1]) / 3:
            remedies.append(f"grow in (grow=True): the spread is {after:.2g} then")
    fits = [curve.batch for curve in result.curves[1:] if result.spread_at(curve.batch) <= result.limit]
    if fits:
        remedies.append(f"stay at B = {max(fits)} or below, which is within the limit")
    lower = problem.options["lr"] / 10
    pair = [train(problem, size, lr=lower, tell=clock(f"lr = {lower:g}")) for size in ends]
    after = spread(pair)
    kind = "update too large"
    rho = ends[1] / result.tuned_batch_size
    share = 1 - RULES[result.rule].beta(result.betas[0], rho)
    if after <= result.limit or after < result.spread_at(ends[1]) / 3:
        remedies.append(f"lower lr: at {lower:g} the spread is {after:.2g}")
    else:
        remedies.append(f"lower lr by more than ten times (at {lower:g} the spread is {after:.2g}), or warm up")
    if share > 0.5:
        remedies.append("raise beta1, or tune at a larger batch (tuned_batch_size)")
    gone = f" Runs are lost at B = {', '.join(map(str, lost))}." if lost else ""
    first = "" if result.growth else " The first update is all that the moments have, since nothing grew in."
    chance = result.floor > 4 * result.tolerance
    order = f" The order of the samples alone moves the loss by {result.floor:.2g}." if chance else ""
    result.causes.append(
        Cause(
            kind,
            "",
            f"Updates are too large: lr = {result.lr:g} becomes {result.lr * rho:.3g} at B = {ends[1]}, and one update "
            f"replaces {share:.0%} of m.{gone}{first}{order}",
            "; ".join(remedies),
        )
    )

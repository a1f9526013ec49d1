"""`invariance_check`: does the batch size matter for this model, this loss and these hyperparameters?

The user's model is trained at several batch sizes from the same weights, on the same micro-batches in the same order.
Beside it stands the *order floor*: runs at B = M whose micro-batches are reordered inside of blocks of the largest
batch. A run at that batch size does not know their order, so that less spread than that cannot be expected.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ..scaling import RULES
from . import coupling, runs
from .report import Cause, InvarianceResult
from .runs import Curve, LossFn, Problem, spread, train
from .samples import moved
from .setup import Clock, Progress, check_rest, check_sizes, problem_of

_FLOOR_RUNS = 2


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

    The cost is known beforehand: batch sizes + 3 runs of `samples` samples at most, and three more where they part,
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
    sizes, micro = check_sizes(batch_sizes, micro_batch_size)
    check_rest(lr, samples, coupled, tolerance, options)
    with runs.randomness():
        problem = problem_of(
            make_model, loss_fn, data, sizes, micro, samples, seed, device, schedule, grow, {**options, "lr": lr}
        )
        seen = problem.marks[-1] * micro
        clock = Clock(progress, (len(sizes) + _FLOOR_RUNS) * seen + problem.marks[:2][-1] * micro)
        causes, notes = _look(problem, coupled == "micro-batch")
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
            growth=problem.growth,
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


def _reordered(problem: Problem, block: int, which: int) -> list[int]:
    """The micro-batches in another order inside of each block."""
    generator = torch.Generator().manual_seed(problem.seed + 1 + which)
    firsts = range(0, problem.marks[-1], block)
    return [first + i for first in firsts for i in torch.randperm(block, generator=generator).tolist()]


# ---------------------------------------------------------------- why runs part


def _look(problem: Problem, accepted: bool) -> tuple[list[Cause], list[str]]:
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
            "batch size. Ranks see them in another order."
        )
    return causes, notes


def _explain(result: InvarianceResult, problem: Problem, clock: Clock) -> None:
    """Add the causes that the runs show, by what mends them."""
    named = [cause for cause in result.causes if cause.kind == "random"]
    result.causes[:] = [cause for cause in result.causes if cause.kind != "random"]
    noisy = result.repeat > 1e-6
    if noisy:
        result.causes += [Cause.nondeterministic(result.repeat, named)]
    if result.agrees or (noisy and result.spread <= 3 * max(result.repeat, result.floor)):
        return
    result.causes.append(_too_large(result, problem, clock))


def _too_large(result: InvarianceResult, problem: Problem, clock: Clock) -> Cause:
    """Updates are too large; what would mend it is tried in runs of its own."""
    micro, largest = result.micro_batch_size, result.curves[-1].batch

    def helps(after: float) -> bool:
        return after <= result.limit or after < result.spread_at(largest) / 3

    remedies: list[str] = []
    if result.growth is None:
        grown = problem._replace(growth=0.1)
        after = spread([result.curves[0], train(grown, largest, tell=clock("grown in"))])
        if helps(after):
            remedies.append(f"grow in (grow=True): the spread is {after:.2g} then")
    fits = [curve.batch for curve in result.curves[1:] if result.spread_at(curve.batch) <= result.limit]
    if fits:
        remedies.append(f"stay at B = {max(fits)} or below, which is within the limit")
    lower = problem.options["lr"] / 10
    after = spread([train(problem, size, lr=lower, tell=clock(f"lr = {lower:g}")) for size in (micro, largest)])
    if helps(after):
        remedies.append(f"lower lr: at {lower:g} the spread is {after:.2g}")
    else:
        remedies.append(f"lower lr by more than ten times (at {lower:g} the spread is {after:.2g}), or warm up")
    rho = largest / result.tuned_batch_size
    share = 1 - RULES[result.rule].betas(result.betas, rho)[0]
    if share > 0.5:
        remedies.append("raise beta1, or tune at a larger batch (tuned_batch_size)")
    text = (
        f"Updates are too large: lr = {result.lr:g} becomes {result.lr * rho:.3g} at B = {largest}, and one update "
        f"replaces {share:.0%} of m."
    )
    lost = [curve.batch for curve in result.curves if curve.diverged]
    if lost:
        text += f" Runs are lost at B = {', '.join(map(str, lost))}."
    if not result.growth:
        text += " The first update is all that the moments have, since nothing grew in."
    if result.floor > 4 * result.tolerance:
        text += f" The order of the samples alone moves the loss by {result.floor:.2g}."
    return Cause("update too large", "", text, "; ".join(remedies))

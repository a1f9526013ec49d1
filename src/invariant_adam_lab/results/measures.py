"""Curves -> their spread over batch sizes, where it breaks, and what the best learning rate reaches.

A spread is held against two others. At equal η₀, which holds at B_max, the optimizers do not train at the same speed,
and slower runs lie closer together; so standard Adam's is also read off at the same final loss (`matched`). And no
optimizer that sees a block of B_max samples at once can do better than the order floor (`floor`).

Runs that diverged, stopped early or are missing are named beside every number that they touch.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from .curves import METRICS, Curve, Results, Series, by_batch_size, rate

TOLERANCE = 0.01  # a spread of 0.01 is 1 % of the loss: beyond it invariance is said to break
OUTSIDE = "outside the range tried"
BELOW = "not reached"  # by the rival, whose loss is higher at every learning rate tried
NOT_MEASURED = "not measured"


def spread(curves: Sequence[Sequence[float]]) -> float:
    """Return the mean over epochs of (max − min over the curves) of the log loss.

    Args:
        curves: the losses of each batch size, all positive and equally many.

    >>> spread([[1.0, 1.0], [math.e, 1.0]])
    0.5
    """
    per_epoch = zip(*(map(math.log, curve) for curve in curves), strict=True)
    return _mean([max(logs) - min(logs) for logs in per_epoch])


class Spread(NamedTuple):
    """How far the batch sizes lie apart, over what, and what is wrong with it."""

    value: float  # mean over seeds; inf when a run diverged and another did not; nan with nothing to compare
    per_seed: dict[int, float]
    finite: float  # where runs diverged: the same over the runs that did not; else nan
    batch_sizes: list[int]
    epochs: int
    notes: list[str]  # runs that diverged, are missing or stopped early, and what becomes of them


def level(runs: Iterable[Curve]) -> list[Curve]:
    """Return the runs of those seeds that have all batch sizes, of runs that differ only in batch size and seed.

    All are as many as any seed has. Otherwise the means at two batch sizes would be over different seeds.
    """
    by_seed: dict[int, dict[int, Curve]] = defaultdict(dict)
    for run in sorted(runs, key=lambda run: (run.seed, run.batch_size)):
        by_seed[run.seed][run.batch_size] = run
    sizes = max((list(found) for found in by_seed.values()), key=len, default=[])
    return [found[size] for found in by_seed.values() if set(sizes) <= set(found) for size in sizes]


def measure(
    runs: Sequence[Curve],
    epochs: Iterable[float] | None = None,
    expected: Iterable[int] = (),
    metric: str = "train_loss",
) -> Spread:
    """Measure the spread of runs that differ only in batch size and seed.

    Batch sizes are compared within a seed, where all see the same samples, and the seeds then averaged. A seed that
    lacks batch sizes which another one has is left out, because it would look closer than it is. Epochs are those that
    all runs have.

    Args:
        runs: what is compared.
        epochs: count these epochs only.
        expected: batch sizes to name where they are missing.
        metric: of a loss the spread is that of its logarithm; of an accuracy it is the difference of shares. No number
            where a run did not measure it.
    """
    counted = level(runs)
    sizes, seeds = (sorted({getattr(run, name) for run in counted}) for name in ("batch_size", "seed"))
    wild = [run for run in counted if run.diverged is not None]
    tame = [run for run in counted if run.diverged is None]
    shared = set.intersection(*(set(run.losses) for run in tame)) if tame else set()
    chosen = sorted(shared if epochs is None else shared & set(epochs))
    finite = {seed: _over([run for run in tame if run.seed == seed], chosen, metric) for seed in seeds}
    per_seed = finite | {
        # One batch size learns and another does not: no number says how far apart they are.
        seed: math.inf if any(run.seed == seed for run in tame) else math.nan
        for seed in {run.seed for run in wild}
    }
    everything = sorted({run.batch_size for run in runs})
    longest = max((len(run.losses) for run in tame), default=0)
    lacking = {
        seed: [size for size in sizes if size not in {run.batch_size for run in runs if run.seed == seed}]
        for seed in sorted({run.seed for run in runs}.difference(seeds))
    }
    notes = [f"missing: B = {_list(less)}, seed {seed}; the seed is left out" for seed, less in lacking.items()]
    for what, left in (
        ("left out", set(everything).difference(sizes)),
        ("missing", set(expected).difference(everything)),
    ):
        if left:
            notes.append(f"{what}: B = {_list(sorted(left))}" + ", which not every seed has" * (what == "left out"))
    notes += [f"diverged: {run.at}, in epoch {run.diverged:g}" for run in wild]
    notes += [
        f"short: {run.at} has {len(run.losses)} of {longest} epochs; all are compared over {len(shared)}"
        for run in tame
        if len(run.losses) < longest
    ]
    if len(sizes) < 2:
        notes.append("one batch size: nothing to compare")
    elif not tame:
        notes.append("every run diverged: nothing to compare")
    rest = [value for value in finite.values() if not math.isnan(value)]
    value = _mean(list(per_seed.values()))
    return Spread(value, per_seed, _mean(rest) if wild else math.nan, sizes, len(chosen), notes)


def in_common(sides: Sequence[Sequence[Curve]]) -> list[list[Curve]]:
    """Return the runs of each side at the batch sizes and seeds that all sides have."""
    shared = set.intersection(*({(run.batch_size, run.seed) for run in side} for side in sides))
    return [level(run for run in side if (run.batch_size, run.seed) in shared) for side in sides]


def compare(sides: Sequence[Sequence[Curve]], metric: str = "train_loss") -> list[Spread]:
    """Measure the spread of each side over the batch sizes, seeds and epochs that all of them have."""
    kept = in_common(sides)
    curves = [set(run.losses) for side in kept for run in side if run.diverged is None]
    epochs = set.intersection(*curves) if curves else set()
    return [measure(side, epochs, metric=metric) for side in kept]


def _list(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))


def _over(runs: Sequence[Curve], epochs: Sequence[float], metric: str) -> float:
    if len(runs) < 2 or not epochs:
        return math.nan
    curves = [[values[epoch] for epoch in epochs] for values in (run.values(metric) for run in runs)]
    if any(math.isnan(value) for curve in curves for value in curve):
        return math.nan
    if metric.endswith("accuracy"):
        return _mean([max(shares) - min(shares) for shares in zip(*curves, strict=True)])
    if any(not 0 < value < math.inf for curve in curves for value in curve):
        return math.inf
    return spread(curves)


class SpreadRow(NamedTuple):
    """The spread of a series at one learning rate, beside its rival's."""

    model: str
    series: Series
    lr0: float
    spread: Spread
    ratio: float  # the rival's spread over this one's, both over the runs and epochs that the two have; nan: none
    ratio_over: str  # those runs and epochs, where they are fewer than the spread's


def spreads(results: Results) -> list[SpreadRow]:
    """Measure every series at every learning rate, over its runs with a constant batch size."""
    rows = []
    for model in results.models:
        for series in results.series(model):
            sizes = by_batch_size(results.group(model, series))
            for lr0 in sorted({run.lr0 for run in results.group(model, series)}):
                runs = results.group(model, series, lr0)
                rival = results.group(model, series.rival, lr0) if series.rival != series else []
                rows.append(SpreadRow(model, series, lr0, measure(runs, expected=sizes), *_ratio(runs, rival)))
    return rows


def ratio(below: float, above: float) -> float:
    """Return one spread over another; no number where both are infinite or one is none.

    >>> ratio(0.5, 2.0), ratio(0.0, 2.0), ratio(math.inf, math.inf)
    (4.0, inf, nan)
    """
    if math.isnan(below) or math.isnan(above) or (math.isinf(below) and math.isinf(above)):
        return math.nan
    return above / below if below else math.inf


def _ratio(runs: Sequence[Curve], rival: Sequence[Curve]) -> tuple[float, str]:
    below, above = compare((runs, rival))
    whole = measure(runs)
    value = ratio(below.value, above.value)
    if math.isnan(value):
        return value, ""
    said = [f"B = {_list(s.batch_sizes)}; seeds {_list(s.per_seed)}; {s.epochs} epochs" for s in (below, whole)]
    return value, "" if said[0] == said[1] else said[0]


def common_size(sides: Collection[Iterable[int]]) -> int:
    """Return the batch size that most sides have, the largest of several; 0 if there is none.

    >>> common_size([(25, 100, 400), (100, 400), (400,)]), common_size([(25, 100), (25, 100)])
    (400, 100)
    """
    every = [size for sizes in sides for size in set(sizes)]
    return max(every, key=lambda size: (every.count(size), size), default=0)


def usual(rows: Iterable[SpreadRow]) -> list[int]:
    """Return the most batch sizes that a spread is over, of those that several rows have: a stray run is in one."""
    sets = [row.spread.batch_sizes for row in rows if not math.isnan(row.spread.value)]
    return max([sizes for sizes in sets if sets.count(sizes) > 1] or sets, key=len, default=[])


def with_lines(rates: Mapping[str, Collection[float]]) -> list[str]:
    """Return the models whose results are at several learning rates, of which a line can be drawn; else all.

    >>> with_lines({"vit": {1e-5, 1e-4}, "gpt2": {1e-3}}), with_lines({"gpt2": {1e-3}})
    (['vit'], ['gpt2'])
    """
    return [model for model, found in rates.items() if len(found) > 1] or list(rates)


class Range(NamedTuple):
    """The critical learning rate of a series, between two that were tried."""

    model: str
    series: Series
    holds_up_to: float | None  # the largest up to which no spread exceeds TOLERANCE
    breaks_at: float | None  # the smallest at which it does
    holds_over: list[int]  # the batch sizes of the spread at holds_up_to
    breaks_over: list[int]


def ranges(rows: Iterable[SpreadRow]) -> list[Range]:
    """Find where invariance breaks: the first learning rate at which the spread exceeds TOLERANCE.

    It counts as holding only where the largest batch size of the series was tried, which breaks first.
    """
    groups: dict[tuple[str, Series], dict[float, Spread]] = defaultdict(dict)
    for row in rows:
        if not math.isnan(row.spread.value):
            groups[row.model, row.series][row.lr0] = row.spread
    found = []
    for (model, series), spreads in groups.items():
        largest = max(spread.batch_sizes[-1] for spread in spreads.values())
        breaks = min((lr0 for lr0, spread in spreads.items() if spread.value > TOLERANCE), default=None)
        holding = (lr0 for lr0, spread in spreads.items() if spread.batch_sizes[-1] == largest)
        holds = max((lr0 for lr0 in holding if breaks is None or lr0 < breaks), default=None)
        over = [[] if lr0 is None else spreads[lr0].batch_sizes for lr0 in (holds, breaks)]
        found.append(Range(model, series, holds, breaks, *over))
    return found


# --------------------------------------------------------------------------- at the same speed, and the order floor


class Matched(NamedTuple):
    """A series at one learning rate beside its rival at the same final loss."""

    loss: float  # where the series ends; see `final`
    spread: float
    rival: float  # the rival's spread at that loss; nan where there is none
    ratio: float
    between: tuple[float, ...]  # the rival's learning rates that it is interpolated between
    why: str  # why there is no ratio; "" where there is one


def final(runs: Sequence[Curve], metric: str = "train_loss") -> float:
    """Return a metric at the last epoch that all runs have: the geometric mean over batch sizes and seeds.

    It is no number where a run diverged or did not measure it.
    """
    counted = level(runs)
    if not counted or any(run.diverged is not None for run in counted):
        return math.nan
    tables = [run.values(metric) for run in counted]
    shared = set.intersection(*map(set, tables))
    values = [table[max(shared)] for table in tables] if shared else [math.nan]
    if not all(0 < value < math.inf for value in values):
        return math.nan
    return math.exp(math.fsum(map(math.log, values)) / len(values))


def matched(
    results: Results,
    model: str,
    series: Series,
    lr0: float,
    metric: str = "train_loss",
    batch_sizes: Collection[int] = (),
) -> Matched:
    """Compare a series at one learning rate with its rival at the same final loss.

    The rival's points, final loss and spread, are those of its learning rates that have all batch sizes of the series,
    up to the one that reaches the lowest loss: beyond it a larger step is a slower one. Between neighbouring learning
    rates both are interpolated in their logarithms. Where the rival passes the loss twice, the smaller spread counts.
    Seeds are those that all of them have. `batch_sizes` are those that count; by default all of the series.
    """
    ours = level(r for r in results.group(model, series, lr0) if not batch_sizes or r.batch_size in batch_sizes)
    sizes, seeds = {run.batch_size for run in ours}, {run.seed for run in ours}
    rivals: dict[float, list[Curve]] = {}
    for other in sorted({run.lr0 for run in results.group(model, series.rival)}):
        theirs = level(r for r in results.group(model, series.rival, other) if r.batch_size in sizes)
        if {run.batch_size for run in theirs} == sizes and seeds & {run.seed for run in theirs}:
            rivals[other] = theirs
            seeds &= {run.seed for run in theirs}
    ours = [run for run in ours if run.seed in seeds]
    loss, own = final(ours, metric), measure(ours, metric=metric).value
    if math.isnan(loss) or math.isnan(own) or len(sizes) < 2:
        return Matched(loss, own, math.nan, math.nan, (), NOT_MEASURED)
    points = []
    for other, theirs in rivals.items():
        same = [run for run in theirs if run.seed in seeds]
        point = (other, final(same, metric), compare((ours, same), metric)[1].value)
        if all(0 < value < math.inf for value in point):
            points.append(point)
    fastest = min((point[1] for point in points), default=math.nan)
    points = points[: 1 + next((i for i, point in enumerate(points) if point[1] == fastest), 0)]
    found = []
    for (one, x, y), (two, x2, y2) in itertools.pairwise(points):
        if min(x, x2) <= loss <= max(x, x2):
            part = (math.log(loss) - math.log(x)) / (math.log(x2) - math.log(x)) if x != x2 else 0.5
            found.append((math.exp((1 - part) * math.log(y) + part * math.log(y2)), (one, two)))
    if not found:
        return Matched(loss, own, math.nan, math.nan, (), BELOW if loss < fastest else OUTSIDE)
    rival, between = min(found)
    return Matched(loss, own, rival, ratio(own, rival), between, "")


def floor(results: Results, model: str, series: Series, lr0: float, metric: str = "train_loss") -> float:
    """Return the order floor of a series: the spread over orders of micro-batches at B = M; nan if not measured."""
    runs = results.orders(model, series, lr0)
    orders = sorted({run.order for run in runs})
    # The spread over orders is the spread over batch sizes with an order in the place of each.
    return measure([r._replace(batch_size=1 + orders.index(r.order), order=0) for r in runs], metric=metric).value


# --------------------------------------------------------------------------- curves and points


def mean_curve(runs: Sequence[Curve], metric: str) -> tuple[list[float], list[float]]:
    """Return the epochs that all seeds have, and the mean of a metric over the seeds; nan where one has no number."""
    tables = [dict(zip(run.columns["epoch"], run.columns[metric], strict=True)) for run in runs]
    epochs = sorted(set.intersection(*map(set, tables)))
    means = [_mean([table[epoch] for table in tables]) for epoch in epochs]
    return epochs, [mean if math.isfinite(mean) else math.nan for mean in means]


def difference(runs: Sequence[Curve], base: Sequence[Curve]) -> tuple[list[float], list[float]]:
    """Return the epochs that both have, and by how many percent the training loss of `runs` is above that of `base`."""
    above = dict(zip(*mean_curve(runs, "train_loss"), strict=True))
    below = dict(zip(*mean_curve(base, "train_loss"), strict=True)) if base else {}
    epochs = [epoch for epoch in above if epoch in below]
    return epochs, [100 * (above[epoch] / below[epoch] - 1) for epoch in epochs]


def fixed_samples(runs: Iterable[Curve]) -> float:
    """Return the largest number of samples after which every run that did not diverge was measured; nan if none."""
    counts = [set(run.columns["samples"]) for run in runs if run.diverged is None]
    return max(set.intersection(*counts), default=math.nan) if counts else math.nan


def at_samples(runs: Sequence[Curve], metric: str, samples: float) -> float:
    """Return the mean of a metric over seeds after so many samples; nan if one diverged or was not measured there."""
    tables = [dict(zip(run.columns["samples"], run.columns[metric], strict=True)) for run in runs]
    tame = all(run.diverged is None for run in runs)
    return _mean([table.get(samples, math.nan) for table in tables]) if tame else math.nan


class Best(NamedTuple):
    """The best learning rate of a series at one batch size, after as many samples as all that are compared saw."""

    model: str
    series: Series
    metric: str
    batch_size: int
    lr0: float
    value: float  # mean over `seeds`
    tried: list[float]  # the learning rates that it is the best of
    seeds: list[int]
    at_edge: bool  # lr0 is the smallest or largest of them: a better one may lie beyond
    samples: float


TRIED = 3  # the fewest learning rates of which one can be the best and not at the edge


def best(results: Results, model: str, metric: str) -> list[Best]:
    """Choose the best learning rate of every series at every batch size by `metric`.

    Each series is judged by the rates that it tried itself, and a best one at their edge is marked. A series with fewer
    than `TRIED` learning rates (or than any has, where all have fewer) is left out. All of a batch size are means over
    the same seeds.
    """
    sides: dict[int, list[Curve]] = defaultdict(list)
    for series in results.series(model):
        for run in results.group(model, series):
            sides[run.batch_size].append(run)
    contests = {size: _contest(sides[size]) for size in sorted(sides)}
    samples = fixed_samples(run for tried in contests.values() for runs in tried.values() for run in runs)
    sign = -1 if metric.endswith("accuracy") else 1
    chosen = []
    for size, tried in contests.items():
        for series in dict.fromkeys(series for series, _ in tried):
            rates = sorted(lr0 for other, lr0 in tried if other == series)
            values = [(sign * at_samples(tried[series, lr0], metric, samples), lr0) for lr0 in rates]
            finite = [(value, lr0) for value, lr0 in values if math.isfinite(value)]
            if finite:
                value, lr0 = min(finite)
                edge, seeds = lr0 in (rates[0], rates[-1]), [run.seed for run in tried[series, lr0]]
                chosen.append(Best(model, series, metric, size, lr0, sign * value, rates, seeds, edge, samples))
    return chosen


def _contest(runs: Iterable[Curve]) -> dict[tuple[Series, float], list[Curve]]:
    """Return the runs of one batch size that are compared, by series and learning rate: those of the seeds that most
    have, and of the series that tried enough."""
    tried: dict[tuple[Series, float], dict[int, Curve]] = defaultdict(dict)
    for run in runs:
        tried[run.series, run.lr0][run.seed] = run
    counts = Counter(seed for seeds in tried.values() for seed in seeds)
    usual = sorted(seed for seed, count in counts.items() if count == max(counts.values()))
    kept = {key: [seeds[n] for n in usual] for key, seeds in tried.items() if set(usual) <= set(seeds)}
    rates = Counter(series for series, _ in kept)
    enough = min(TRIED, max(rates.values(), default=0))
    return {key: found for key, found in kept.items() if rates[key[0]] >= enough}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


# --------------------------------------------------------------------------- as JSON and in words


def table(results: Results) -> dict[str, Any]:
    """Return spreads, where they break, and the best learning rates, as JSON holds them.

    JSON has no infinity: "inf" stands for it, and null for what cannot be said.
    """
    rows = spreads(results)

    def named(model: str, series: Series) -> dict[str, Any]:
        return {"model": model, **series._asdict(), "label": results.label(model, series)}

    return {
        "measure": "mean over epochs of (max - min over batch sizes) of the log training loss; mean over seeds",
        "spreads": [
            {
                **named(row.model, row.series),
                "lr0": row.lr0,
                "spread": plain(row.spread.value),
                "ratio": plain(row.ratio),
                "ratio_over": row.ratio_over or None,
                **_speed(results, row),
                "per_seed": {str(seed): plain(value) for seed, value in row.spread.per_seed.items()},
                "spread_of_finite_runs": plain(row.spread.finite),
                "batch_sizes": row.spread.batch_sizes,
                "epochs": row.spread.epochs,
                "notes": row.spread.notes,
            }
            for row in rows
        ],
        "ratio": "spread of standard Adam with a learning rate as the root of the batch size, over the row's",
        "ratio_at_final_loss": "the same, where standard Adam reaches the row's final loss; between learning rates "
        "both are interpolated in their logarithms",
        "order_floor": "the spread at B = M over orders of micro-batches inside blocks of max_batch_size samples",
        "critical": [
            {
                **named(row.model, row.series),
                "tolerance": TOLERANCE,
                **{name: value for name, value in row._asdict().items() if name not in ("model", "series")},
            }
            for row in ranges(rows)
        ],
        "best": [
            {**named(row.model, row.series), **{k: v for k, v in row._asdict().items() if k not in ("model", "series")}}
            for model in results.models
            for metric in METRICS
            for row in best(results, model, metric)
        ],
        "grids": results.grids,
    }


def _speed(results: Results, row: SpreadRow) -> dict[str, Any]:
    """Return what stands beside a spread: final loss, ratio at that loss, order floor, spreads of the other metrics."""
    runs = results.group(row.model, row.series, row.lr0)
    beside = matched(results, row.model, row.series, row.lr0) if row.series != row.series.rival else None
    return {
        "final_loss": plain(final(runs)),
        "ratio_at_final_loss": plain(beside.ratio) if beside else None,
        "no_ratio_at_final_loss": (beside.why or None) if beside else None,
        "order_floor": plain(floor(results, row.model, row.series, row.lr0)),
        "spread_of": {name: plain(measure(runs, metric=name).value) for name in METRICS},
    }


def plain(value: float) -> float | str | None:
    """Return a number as JSON holds it.

    >>> plain(0.5), plain(math.inf), plain(math.nan)
    (0.5, 'inf', None)
    """
    return value if math.isfinite(value) else None if math.isnan(value) else "inf"


def remarks(results: Results) -> list[str]:
    """Name the runs that a reader of the figures would otherwise miss or misread: a line for each series and note."""
    said: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for row in spreads(results):
        for note in row.spread.notes:
            said[row.model, results.label(row.model, row.series), note].append(row.lr0)
    for run in results.runs:
        if run.ramp and run.diverged is not None:
            note = f"diverged: {run.at}, in epoch {run.diverged:g}"
            said[run.model, results.label(run.model, run.series), note].append(run.lr0)
    return [
        f"{model}, {label}, η₀ = {_list(map(rate, sorted(set(rates))))}: {note}"
        for (model, label, note), rates in said.items()
    ]

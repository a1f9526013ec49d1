"""A grid's results -> its figures, PNG and SVG, and the table of spreads.

In curves, colour is the learning rate η₀, the same in all figures of a folder, but for models of one pass, which have
their own; opacity and width are the batch size: small ones pale and wide, large ones dark and narrow, so that those on
top of each other can all be seen. An × ends a curve whose run diverged.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from .. import record
from . import speed
from .curves import METRICS, MODELS, Curve, Results, Series, by_batch_size
from .measures import (
    TOLERANCE,
    SpreadRow,
    at_samples,
    best,
    common_size,
    difference,
    fixed_samples,
    in_common,
    level,
    mean_curve,
    spreads,
    table,
    usual,
    with_lines,
)
from .style import (
    ALGORITHMS,
    COLOURS,
    FAINT,
    INK,
    STYLE,
    VARIANTS,
    Look,
    batch_size_axis,
    dark,
    difference_axes,
    dot,
    dress,
    epoch_axis,
    headline,
    legend_below,
    marker,
    panels,
    power_of_ten,
    render,
    series_looks,
    sizes_said,
)


def draw(results: Results, out_dir: Path) -> list[Path]:
    """Draw everything that the results allow; return what was written under `out_dir`."""
    written = [record.write_json(out_dir / "spreads.json", table(results))]
    for name, figure in figures(results):
        written += [record.write(out_dir / f"{name}.{form}", render(figure, form)) for form in ("png", "svg")]
    return written


def figures(results: Results) -> Iterator[tuple[str, Figure]]:
    """Make the figures one by one, each with the name of its files; what there are no runs for is not drawn."""
    with matplotlib.rc_context(STYLE):
        if any(math.isfinite(row.spread.value) for row in spreads(results)):
            yield "spread", spread_figure(results)
        everywhere = all(_measured(run, "end_train_loss") for run in results.runs)
        for name, metric in (("speed", "end_train_loss" if everywhere else "train_loss"), ("speed-test", "test_loss")):
            if any(speed.points(results, model, metric) for model in results.models):
                yield name, speed.speed_figure(results, metric)
        for model in results.models:
            every = results.series(model)
            pairs = [(s.rival, s) for s in every if s.algorithm == "invariant" and s.rival in every]
            pairs = [(rival, ours) for rival, ours in pairs if not _stands_for_grown(results, model, ours)]
            shown: set[str] = set()
            for pair in pairs:
                more = ["warmup"] * bool(pair[1].warmup_samples) + ["grown"] * bool(pair[1].grow)
                name = "-".join((model, "curves", *more))
                # A warm-up or growing in is compared over batch sizes, not with what had none.
                alone = bool(more) and not any(_several(results, model, series) for series in pair)
                if name not in shown and not alone:  # the paper's pair; others are in the figure of all
                    shown.add(name)
                    yield name, curves_figure(results, model, pair, METRICS, _whole(results, model, pair))
            rates = _whole(results, model, every)
            compared = [series for series in every if _several(results, model, series, rates)]
            if not set(compared) <= {series for pair in pairs[:1] for series in pair}:
                yield f"{model}-all", curves_figure(results, model, compared, ("train_loss", "test_accuracy"), rates)
            constant = _everywhere(results, model, every)
            if constant:
                yield f"{model}-batch-size", batch_size_figure(results, model, constant)
                if any(len(row.tried) > 1 for row in best(results, model, "train_loss")):
                    yield f"{model}-best", best_figure(results, model)
            for name, columns in _questions(results, model):
                if any(_beside(results, columns)):
                    yield f"{model}-{name}", difference_figure(results, columns)
            if len(_micro(results, model)) > 1:
                yield f"{model}-micro", micro_figure(results, model)
            if results.ramps(model):
                yield f"{model}-ramp", ramp_figure(results, model)


def _models(rows: Iterable[SpreadRow]) -> list[str]:
    return list(dict.fromkeys(row.model for row in rows))


def _stands_for_grown(results: Results, model: str, series: Series) -> bool:
    """Whether a series is the run at B = M alone, and its other batch sizes were grown in: it is a curve among them."""
    grown = [s for s in results.paper(model) if s.grow and s._replace(grow=0.0) == series]
    return not _several(results, model, series) and any(_several(results, model, s) for s in grown)


def _whole(results: Results, model: str, columns: Sequence[Series]) -> set[float]:
    """Return the η₀ that were tried at the most batch sizes: those of finer grids at a few would hide them."""
    sizes: dict[float, set[int]] = {}
    for run in (run for series in columns for run in results.group(model, series)):
        sizes.setdefault(run.lr0, set()).add(run.batch_size)
    return {lr0 for lr0, found in sizes.items() if len(found) == max(map(len, sizes.values()))}


def _questions(results: Results, model: str) -> Iterator[tuple[str, list[tuple[str, Series]]]]:
    """Yield what is compared with invariant Adam as in the paper, of most runs, in one thing alone."""
    every = results.series(model)
    paper = results.paper(model)
    for ours in [s for s in paper if s._replace(rule="exponential") in every][:1]:
        yield "rules", [(model, ours), (model, ours._replace(rule="exponential"))]
    accumulated = {s.rival: s for s in every if s.algorithm == "accumulate"}
    for ours in [s for s in paper if s.rival in accumulated][:1]:
        here = [(model, s) for s in (ours, ours.rival, accumulated[ours.rival])]
        beside = [("resnet-ln", s) for s in (ours, ours.rival) if model == "resnet-bn"]
        yield "norm", here + beside if any(_beside(results, here + beside)) else here


def _beside(results: Results, columns: Sequence[tuple[str, Series]]) -> dict[float, list[list[Curve]]]:
    """Return the runs of each column, by η₀, at the batch sizes and seeds that all have; none where that is one B."""
    rates = sorted({run.lr0 for model, series in columns for run in results.group(model, series)})
    sides = {lr0: in_common([results.group(*column, lr0) for column in columns]) for lr0 in rates}
    return {lr0: found for lr0, found in sides.items() if len(by_batch_size(found[0])) > 1}


def _micro(results: Results, model: str) -> dict[Series, list[Curve]]:
    """Return the runs of invariant Adam at the batch size that most M have, by series, which differ in M alone."""
    paper = [s for s in results.paper(model) if not s.warmup_samples and not s.grow]
    betas = common_size([[series.max_batch_size] for series in paper])
    groups = {s: by_batch_size(results.group(model, s)) for s in paper if s.max_batch_size == betas}
    size = common_size(groups.values())
    return {series: found[size] for series, found in groups.items() if size in found}


# --------------------------------------------------------------------------- the figures


def curves_figure(
    results: Results,
    model: str,
    columns: Sequence[Series],
    metrics: Iterable[str],
    rates: Iterable[float] | None = None,
) -> Figure:
    """Draw the paper's layout: a row for each metric, a column for each series, mean over seeds.

    Args:
        results: all runs.
        model: whose.
        columns: which series.
        metrics: which, where they were measured.
        rates: which η₀; all if not given.
    """
    runs = [run for series in columns for run in results.group(model, series) if rates is None or run.lr0 in rates]
    look = Look(results, runs)
    metrics = [metric for metric in metrics if any(_measured(run, metric) for run in runs)]
    groups = {
        (series, lr0): by_batch_size(level(results.group(model, series, lr0)))
        for series in columns
        for lr0 in look.rates
    }
    rows = [METRICS[metric] for metric in metrics]
    figure, grid = panels(_titles(results, model, columns), rows, heights=2.5)
    for axes, series in zip(grid, columns, strict=True):
        for ax, metric in zip(axes, metrics, strict=True):
            for lr0 in look.rates:
                for size, seeds in groups[series, lr0].items():
                    look.curve(ax, *mean_curve(seeds, metric), lr0, size)
            dress(ax, log=metric.endswith("loss"))
            epoch_axis(ax)
    look.legend(figure)
    headline(figure, model, _seeds(seeds for group in groups.values() for seeds in group.values()))
    return figure


def spread_figure(results: Results) -> Figure:
    """Draw the spread over batch sizes against η₀, a panel for each model: where a line rises, invariance breaks.

    A panel is over the batch sizes that its series usually have. A point that lacks some would look closer than it is:
    it is hollow and on no line. A series of such points, or of one learning rate where others have several, is left to
    the tables, but for the others' rival; and so is a model of one learning rate.
    """
    rows = [row for row in spreads(results) if not math.isnan(row.spread.value)]
    models = with_lines({model: {row.lr0 for row in rows if row.model == model} for model in _models(rows)})
    rows = [row for row in rows if row.model in models]
    figure = Figure(figsize=(max(6.4, 2.9 * len(models)), 4.1), layout="constrained")
    axes = figure.subplots(1, len(models), sharey=True, squeeze=False)[0]
    finite = [row.spread.value for row in rows if math.isfinite(row.spread.value)]
    ceiling = 2.5 * max([*finite, TOLERANCE])
    common = {model: set(usual(row for row in rows if row.model == model)) for model in models}
    points = Counter((r.model, r.series) for r in rows if common[r.model] <= set(r.spread.batch_sizes))
    several = {model for (model, _), count in points.items() if count > 1}
    whole = {(model, series) for (model, series), count in points.items() if count > 1 or model not in several}
    whole |= {(model, series.rival) for model, series in whole}
    rows = [row for row in rows if row.spread.value > 0 and (row.model, row.series) in whole]  # no log axis has 0
    drawn = {model: list(dict.fromkeys(row.series for row in rows if row.model == model)) for model in models}
    # One legend for all panels, in which the paper's two have one name whatever else a model was tried with.
    labels = {(m, s): results.label(m, s, among=drawn[m]) for m in models for s in drawn[m]}
    styles = series_looks((series, label) for (_, series), label in labels.items())
    handles: dict[str, Line2D] = {}
    lacking = False
    for ax, model in zip(axes, models, strict=True):
        sizes = common[model]
        for series in drawn[model]:
            found = [(r.lr0, r.spread) for r in rows if (r.model, r.series) == (model, series)]
            fewer = [(lr0, s) for lr0, s in found if not sizes <= set(s.batch_sizes)]
            label = labels[model, series]
            look = styles[label]
            hollow: Any = {"linestyle": "", "markerfacecolor": "white", "zorder": 4}
            for shown, more in (([p for p in found if p not in fewer], {"label": label}), (fewer, hollow)):
                y = [min(s.value, ceiling) for _, s in shown]
                (line,) = ax.plot([lr0 for lr0, _ in shown], y, **look | more)
                if more is not hollow:
                    handles.setdefault(label, line)
            lacking = lacking or bool(fewer)
            wild = [lr0 for lr0, s in found if math.isinf(s.value)]
            for lr0 in wild:
                ax.plot(lr0, ceiling, "^", color=look["color"], markersize=11)
                place: Any = {"textcoords": "offset points", "ha": "right", "va": "center"}
                ax.annotate("diverged", (lr0, ceiling), (-9, 0), **place, color=FAINT, fontsize=9)
            for lr0, s in found:  # the seeds, where there are several
                if len(s.per_seed) > 1 and math.isfinite(s.value):
                    values = list(s.per_seed.values())
                    ax.plot([lr0] * len(values), values, ".", color=look["color"], alpha=0.45, markersize=4)
        ax.axhline(TOLERANCE, color=FAINT, linewidth=1, linestyle=(0, (2, 2)), zorder=1)
        ax.set_xscale("log")
        dress(ax, log=True)
        ax.set_title(f"{MODELS.get(model, model)},\n{sizes_said(sizes)}", loc="left", fontweight="bold")
        ax.set_xlabel("learning rate η₀")
        ax.margins(x=0.12)
    axes[-1].annotate(
        f"{TOLERANCE:.0%} of the loss".replace("%", " %"), (0.99, TOLERANCE), (0, -4), ha="right", va="top",
        xycoords=axes[-1].get_yaxis_transform(), textcoords="offset points", color=FAINT, fontsize=9,
    )  # fmt: skip
    axes[0].set_ylabel("spread over batch sizes")
    more = [marker("hollow: fewer batch sizes", "o", markerfacecolor="white", color=FAINT)] if lacking else []
    legend_below(figure, [[*handles.values(), *more]])
    return figure


def batch_size_figure(results: Results, model: str, columns: Sequence[Series]) -> Figure:
    """Draw the training loss after a fixed number of samples against B, and its difference from the smallest B."""
    runs = {series: results.group(model, series) for series in columns}
    look = Look(results, [run for group in runs.values() for run in group])
    samples = fixed_samples(run for group in runs.values() for run in group)
    rows = ("training loss", "difference from\nthe smallest B, %")
    figure, grid = panels([results.label(model, series) for series in columns], rows, heights=2.6)
    for (above, below), series in zip(grid, columns, strict=True):
        for lr0 in look.rates:
            groups = by_batch_size(level(run for run in runs[series] if run.lr0 == lr0))
            values = {size: at_samples(seeds, "train_loss", samples) for size, seeds in groups.items()}
            style: dict[str, Any] = {"color": look.colours[lr0], "marker": "o", "linewidth": 2, "markersize": 5}
            above.plot(list(values), list(values.values()), **style)
            base = next(iter(values.values()), math.nan)
            below.plot(list(values), [100 * (value / base - 1) for value in values.values()], **style)
            wild = [size for size, seeds in groups.items() if any(run.diverged is not None for run in seeds)]
            for size in wild:
                top: Any = {"transform": above.get_xaxis_transform(), "markersize": 8, "markeredgewidth": 2}
                above.plot(size, 0.95, "x", color=look.colours[lr0], **top)
        dress(above, log=True)
        batch_size_axis(above, look.sizes)
        batch_size_axis(below, look.sizes)
    difference_axes([below for _, below in grid])
    look.legend(figure, sizes=False)
    headline(figure, model, f"after {samples:,.0f} samples" if samples > 0 else "no samples in common")
    return figure


def best_figure(results: Results, model: str) -> Figure:
    """Draw what each series reaches at each B with its best η₀ of those it tried there; hollow where it is the last of
    them. A line is thin between batch sizes where other η₀ were tried: it would look like an effect of B. A series that
    is compared at one batch size alone is left to the tables."""
    chosen = {m: best(results, model, m) for m in ("train_loss", "test_loss", "test_accuracy")}
    chosen = {metric: rows for metric, rows in chosen.items() if any(len(row.tried) > 1 for row in rows)}
    figure = Figure(figsize=(3.7 * len(chosen), 4.1), layout="constrained")
    axes = figure.subplots(1, len(chosen), squeeze=False)[0]
    labels = {series: results.label(model, series) for series in results.series(model)}
    styles = series_looks(labels.items())
    handles: dict[str, Line2D] = {}
    thin: Any = {"linewidth": 0.9, "zorder": 1}
    apart = False
    for ax, (metric, rows) in zip(axes, chosen.items(), strict=True):
        found = {series: [row for row in rows if row.series == series] for series in labels}
        fewest = min(2, max(map(len, found.values())))
        for series, points in found.items():
            if len(points) < fewest:
                continue
            look = styles[labels[series]] | {"markersize": 7.5, "markeredgecolor": "white"}
            parts = [list(part) for _, part in itertools.groupby(points, key=lambda row: row.tried)]
            for part in parts:
                (line,) = ax.plot([row.batch_size for row in part], [row.value for row in part], **look)
            for one, two in itertools.pairwise(parts):
                ends = one[-1], two[0]
                ax.plot([row.batch_size for row in ends], [row.value for row in ends], color=look["color"], **thin)
            handles.setdefault(labels[series], line)
            apart = apart or len(parts) > 1
            edge = [(row.batch_size, row.value) for row in points if row.at_edge]
            hollow = look | {"linestyle": "", "markerfacecolor": "white", "markeredgecolor": look["color"], "zorder": 4}
            ax.plot([b for b, _ in edge], [v for _, v in edge], **hollow)
        dress(ax, log=metric.endswith("loss"))
        batch_size_axis(ax, sorted({row.batch_size for row in rows}))
        ax.tick_params(axis="x", labelsize=9)
        ax.set_title(METRICS[metric], loc="left", fontweight="bold")
    for label, line in handles.items():
        line.set_label(label)
    said = [marker("hollow: the best η₀ is the smallest or largest tried", "o", markerfacecolor="white", color=FAINT)]
    said += [Line2D([], [], color=FAINT, label="thin: not the same η₀ were tried", **thin)] * apart
    legend_below(figure, [[*handles.values()], said])
    samples = next(row.samples for rows in chosen.values() for row in rows)
    headline(figure, model, f"the best of the η₀ tried, after {samples:,.0f} samples")
    return figure


def difference_figure(results: Results, columns: Sequence[tuple[str, Series]]) -> Figure:
    """Draw how far batch sizes are from the smallest, epoch by epoch: a column for each model and series, a row for
    each η₀, over the batch sizes and seeds that all columns have there."""
    sides = _beside(results, columns)
    look = Look(results, [run for row in sides.values() for side in row for run in side])
    models = {model: [s for m, s in columns if m == model] for model, _ in columns}
    titles = [results.label(model, series, among=models[model]) for model, series in columns]
    if len(models) > 1:
        titles = [f"{MODELS.get(model, model)}:\n{title}" for (model, _), title in zip(columns, titles, strict=True)]
    rows = [
        f"η₀ = {power_of_ten(lr0)}: difference\nfrom B = {min(run.batch_size for run in row[0])}, %"
        for lr0, row in sides.items()
    ]
    figure, grid = panels(titles, rows, heights=2.8)
    for axes, runs in zip(grid, zip(*sides.values(), strict=True), strict=True):
        for ax, lr0, side in zip(axes, sides, runs, strict=True):
            groups = by_batch_size(side)
            for size, seeds in groups.items():
                look.curve(ax, *difference(seeds, next(iter(groups.values()))), lr0, size)
            epoch_axis(ax)
    for row in zip(*grid, strict=True):
        difference_axes(row)
    look.legend(figure)
    said = " and ".join(MODELS.get(model, model) for model in models)
    curves = [seeds for row in sides.values() for side in row for seeds in by_batch_size(side).values()]
    headline(figure, said, f"training loss, {_seeds(curves)}")
    return figure


def micro_figure(results: Results, model: str) -> Figure:
    """Draw what each M reaches after the same samples against η₀, at the batch size that most M have, and standard
    Adam there."""
    found = _micro(results, model)
    size = next(iter(found.values()))[0].batch_size
    rival = next(iter(found)).rival
    theirs = [run for run in results.group(model, rival) if run.batch_size == size]
    sides = found | ({rival: theirs} if theirs else {})
    runs = [run for side in sides.values() for run in side]
    samples = fixed_samples(runs)
    metrics = [metric for metric in ("train_loss", "test_accuracy") if any(_measured(run, metric) for run in runs)]
    figure = Figure(figsize=(4.6 * len(metrics), 4.1), layout="constrained")
    axes = figure.subplots(1, len(metrics), squeeze=False)[0]
    colours = [colour for colour in COLOURS if colour != ALGORITHMS["standard"]]
    handles: dict[Series, Line2D] = {}
    for ax, metric in zip(axes, metrics, strict=True):
        for i, (series, side) in enumerate(sides.items()):
            points = {}
            for lr0 in sorted({run.lr0 for run in side}):
                others = ({run.seed for run in other if run.lr0 == lr0} for other in sides.values())
                seeds = set.intersection(*filter(None, others))  # of all that tried this η₀
                same = [run for run in side if run.lr0 == lr0 and run.seed in seeds]
                points[lr0] = at_samples(same, metric, samples) if same else math.nan
            # With M = B invariant Adam is standard Adam: its line is wide, for both to be seen.
            style: dict[str, Any] = {"color": ALGORITHMS["standard"], "linewidth": 7, "alpha": 0.35, "zorder": 1}
            if series != rival:
                style = {"color": colours[i % len(colours)], "linewidth": 2, "marker": VARIANTS[i % len(VARIANTS)][1]}
            label = results.label(model, series, among=sides)
            (handles[series],) = ax.plot(list(points), list(points.values()), **style, label=label)
        ax.set_xscale("log")
        dress(ax, log=metric.endswith("loss"))
        ax.set_xlabel("learning rate η₀")
        ax.set_title(METRICS[metric], loc="left", fontweight="bold")
    legend_below(figure, [[handles[series] for series in found], [handles[s] for s in sides if s not in found]])
    headline(figure, model, f"B = {size}, after {samples:,.0f} samples")
    return figure


def ramp_figure(results: Results, model: str) -> Figure:
    """Draw runs whose batch size changes over those where it does not, and the differences from the smallest B."""
    ramps = results.ramps(model)
    columns = list(dict.fromkeys(series for series, _, _ in ramps))
    rates = {lr0 for _, lr0, _ in ramps}
    constant = {s: [run for run in results.group(model, s) if run.lr0 in rates] for s in columns}
    look = Look(results, [run for group in (*constant.values(), *ramps.values()) for run in group])
    rows = ("training loss", "difference from\nthe smallest B, %")
    figure, grid = panels(_titles(results, model, columns), rows, heights=3.0)
    names = list(dict.fromkeys(name for _, _, name in ramps))
    dashes: Any = dict(zip(names, ((0, (4, 2)), (0, (1, 1.5)), "-."), strict=False))
    for (above, below), series in zip(grid, columns, strict=True):
        for lr0 in look.rates:
            ramped = {name: runs for (s, rate, name), runs in ramps.items() if (s, rate) == (series, lr0)}
            seeds = {run.seed for runs in ramped.values() for run in runs}  # those of a ramp, not of other comparisons
            groups = by_batch_size(level(run for run in constant[series] if run.lr0 == lr0 and run.seed in seeds))
            base = next(iter(groups.values()), [])
            drawn: list[tuple[list[Curve], int, str]] = [(runs, size, "") for size, runs in groups.items()]
            drawn += [(runs, 0, name) for name, runs in ramped.items()]
            for runs, size, name in drawn:
                for ax, (x, y) in ((above, mean_curve(runs, "train_loss")), (below, difference(runs, base))):
                    if name:
                        dash = dashes.get(name, "-")
                        ax.plot(x, y, color=dark(look.colours[lr0]), linewidth=1.8, linestyle=dash, marker=dot(x))
                    else:
                        look.curve(ax, x, y, lr0, size)
        dress(above, log=True)
        epoch_axis(above)
        epoch_axis(below)
    difference_axes([below for _, below in grid])
    more = [Line2D([], [], color=INK, linewidth=1.8, linestyle=dashes.get(n, "-"), label=f"ramp {n}") for n in names]
    look.legend(figure, more=more)
    headline(figure, model, "batch size ramped (dashed) and constant")
    return figure


# --------------------------------------------------------------------------- how things look


def _titles(results: Results, model: str, columns: Sequence[Series]) -> list[str]:
    """Name the columns; with their batch sizes where those differ, because fewer curves look closer."""
    sizes = {series: sizes_said(by_batch_size(results.group(model, series))) for series in columns}
    more = {series: f", {sizes[series]}" * (len(set(sizes.values())) > 1) for series in columns}
    return [results.label(model, series) + more[series] for series in columns]


def _seeds(curves: Iterable[Sequence[Curve]]) -> str:
    """Say what curves are means over; each holds its seeds."""
    counts = {len(seeds) for seeds in curves}
    return "one seed" if counts <= {1} else "mean over seeds" + " where there are several" * (1 in counts)


def _several(results: Results, model: str, series: Series, rates: Collection[float] | None = None) -> bool:
    return len({run.batch_size for run in results.group(model, series) if rates is None or run.lr0 in rates}) > 1


def _everywhere(results: Results, model: str, every: Sequence[Series]) -> list[Series]:
    """Return the series with the most batch sizes and several learning rates: others would leave panels half empty."""
    tried = {s: {(run.batch_size, run.lr0) for run in results.group(model, s)} for s in every}
    sizes = {s: len({size for size, _ in found}) for s, found in tried.items()}
    most = max(sizes.values(), default=0)
    if most < 2:
        return []
    whole = [s for s in every if sizes[s] == most]
    whole = [s for s in whole if len({lr0 for _, lr0 in tried[s]}) > 1] or whole
    return sorted(whole, key=lambda s: (s.warmup_samples, s.grow, s.algorithm != "standard"))  # the paper's order


def _measured(run: Curve, metric: str) -> bool:
    return any(math.isfinite(value) for value in run.columns[metric])

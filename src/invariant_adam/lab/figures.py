"""A grid's results -> its figures, PNG and SVG, and the table of spreads.

In curves, colour is the learning rate η₀, the same in all figures of a folder; opacity and width are the batch size:
small ones pale and wide, large ones dark and narrow, so that those on top of each other can all be seen. An × ends a
curve whose run diverged.
"""

from __future__ import annotations

import io
import itertools
import math
import textwrap
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

from . import record
from .measures import (
    TOLERANCE,
    at_samples,
    best,
    common_size,
    fixed_samples,
    in_common,
    level,
    mean_curve,
    spreads,
    table,
    usual,
)
from .results import METRICS, MODELS, Curve, Results, Series, by_batch_size

INK, FAINT, GRID = "#1d2330", "#6b7285", "#e4e6ec"
# Okabe and Ito's colours, which the colour-blind tell apart, the pale ones last; and a purple.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#5b3a8e")
# Learning rates from cold to hot, in an order of hue that the colour-blind see too: dark ends, a pale middle.
SPECTRUM = ("#332288", "#0077cc", "#1fa58f", "#dda520", "#d64a1e", "#7d1f50")
_DRAWN = ("invariant", "standard", "adama", "halflife", "accumulate")
ALGORITHMS = dict(zip(_DRAWN, COLOURS, strict=False)) | {"micro": INK}
ACROSS = 4  # panels side by side; more go below
WIDTH = 11.6  # inches at most: wider, and the letters are too small in a column of text
SMALL = 0.1  # percent: axes of differences are linear up to it, logarithmic beyond
VARIANTS = (("-", "o"), ("--", "s"), (":", "D"), ("-.", "v"), ((0, (5, 1, 1, 1, 1, 1)), "P"))
STYLE: Any = {
    "font.size": 10.5,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.titlesize": 11.5,
    "legend.frameon": False,
}


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
        for model in results.models:
            every = results.series(model)
            pairs = [(s, s.rival) for s in every if s.algorithm == "invariant" and s.rival in every]
            shown: set[str] = set()
            for pair in pairs:
                name = "-".join((model, "curves", *(["warmup"] if pair[0].warmup_samples else [])))
                # A warm-up is compared over batch sizes, not with what had none.
                alone = bool(pair[0].warmup_samples) and not any(_several(results, model, series) for series in pair)
                if name not in shown and not alone:  # the paper's pair; others are in the figure of all
                    shown.add(name)
                    yield name, curves_figure(results, model, pair, METRICS, _whole(results, model, pair))
            rates = _whole(results, model, every)
            compared = [series for series in every if _several(results, model, series, rates)]
            if not set(compared) <= {series for pair in pairs[:1] for series in pair}:
                yield f"{model}-all", curves_figure(results, model, compared, ("train_loss", "test_accuracy"), rates)
            constant = [series for series in every if _several(results, model, series)]
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


def _whole(results: Results, model: str, columns: Sequence[Series]) -> set[float]:
    """Return the η₀ that were tried at the most batch sizes: those of finer grids at a few would hide them."""
    sizes: dict[float, set[int]] = {}
    for run in (run for series in columns for run in results.group(model, series)):
        sizes.setdefault(run.lr0, set()).add(run.batch_size)
    return {lr0 for lr0, found in sizes.items() if len(found) == max(map(len, sizes.values()))}


def paper_pair(results: Results, model: str) -> list[Series]:
    """Return what the paper compares, as far as it is there: invariant Adam at the M of most runs, and its rival."""
    ours = [series for series in _paper(results, model) if not series.warmup_samples][:1]
    return [series for s in ours for series in (s, s.rival) if series in results.series(model)]


def _paper(results: Results, model: str) -> list[Series]:
    """Return the series of invariant Adam as in the paper, those of most runs first."""
    paper = [s for s in results.series(model) if (s.algorithm, s.rule) == ("invariant", "linear")]
    return sorted(paper, key=lambda series: -len(results.group(model, series)))


def _questions(results: Results, model: str) -> Iterator[tuple[str, list[tuple[str, Series]]]]:
    """Yield what is compared with invariant Adam as in the paper, of most runs, in one thing alone."""
    every = results.series(model)
    paper = _paper(results, model)
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
    paper = [s for s in results.series(model) if (s.algorithm, s.rule, s.warmup_samples) == ("invariant", "linear", 0)]
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
    look = _Look(results, runs)
    metrics = [metric for metric in metrics if any(_measured(run, metric) for run in runs)]
    groups = {
        (series, lr0): by_batch_size(level(results.group(model, series, lr0)))
        for series in columns
        for lr0 in look.rates
    }
    rows = [METRICS[metric] for metric in metrics]
    figure, grid = _panels(_titles(results, model, columns), rows, heights=2.5)
    for axes, series in zip(grid, columns, strict=True):
        for ax, metric in zip(axes, metrics, strict=True):
            for lr0 in look.rates:
                for size, seeds in groups[series, lr0].items():
                    look.curve(ax, *mean_curve(seeds, metric), lr0, size)
            dress(ax, log=metric.endswith("loss"))
            _epochs(ax)
    look.legend(figure)
    _headline(figure, model, _seeds(seeds for group in groups.values() for seeds in group.values()))
    return figure


def spread_figure(results: Results) -> Figure:
    """Draw the spread over batch sizes against η₀, a panel for each model: where a line rises, invariance breaks.

    A panel is over the batch sizes that its series usually have. A point that lacks some would look closer than it is:
    it is hollow and on no line. A series of such points, or of one learning rate where others have several, is left to
    the tables, but for the others' rival.
    """
    rows = [row for row in spreads(results) if not math.isnan(row.spread.value)]
    models = [model for model in results.models if any(row.model == model for row in rows)]
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
    styles = _looks((series, label) for (_, series), label in labels.items())
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
        ax.set_title(f"{MODELS.get(model, model)},\n{_sizes(sizes)}", loc="left", fontweight="bold")
        ax.set_xlabel("learning rate η₀")
        ax.margins(x=0.12)
    axes[-1].annotate(
        f"{TOLERANCE:.0%} of the loss".replace("%", " %"), (0.99, TOLERANCE), (0, -4), ha="right", va="top",
        xycoords=axes[-1].get_yaxis_transform(), textcoords="offset points", color=FAINT, fontsize=9,
    )  # fmt: skip
    axes[0].set_ylabel("spread over batch sizes")
    more = [_marker("hollow: fewer batch sizes", "o", markerfacecolor="white", color=FAINT)] if lacking else []
    _legend(figure, [[*handles.values(), *more]])
    return figure


def batch_size_figure(results: Results, model: str, columns: Sequence[Series]) -> Figure:
    """Draw the training loss after a fixed number of samples against B, and its difference from the smallest B."""
    runs = {series: results.group(model, series) for series in columns}
    look = _Look(results, [run for group in runs.values() for run in group])
    samples = fixed_samples(run for group in runs.values() for run in group)
    rows = ("training loss", "difference from\nthe smallest B, %")
    figure, grid = _panels([results.label(model, series) for series in columns], rows, heights=2.6)
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
        _batch_sizes(above, look.sizes)
        _batch_sizes(below, look.sizes)
    _differences([below for _, below in grid])
    look.legend(figure, sizes=False)
    _headline(figure, model, f"after {samples:,.0f} samples" if samples > 0 else "no samples in common")
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
    styles = _looks(labels.items())
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
        _batch_sizes(ax, sorted({row.batch_size for row in rows}))
        ax.tick_params(axis="x", labelsize=9)
        ax.set_title(METRICS[metric], loc="left", fontweight="bold")
    for label, line in handles.items():
        line.set_label(label)
    said = [_marker("hollow: the best η₀ is the smallest or largest tried", "o", markerfacecolor="white", color=FAINT)]
    said += [Line2D([], [], color=FAINT, label="thin: not the same η₀ were tried", **thin)] * apart
    _legend(figure, [[*handles.values()], said])
    samples = next(row.samples for rows in chosen.values() for row in rows)
    _headline(figure, model, f"the best of the η₀ tried, after {samples:,.0f} samples")
    return figure


def difference_figure(results: Results, columns: Sequence[tuple[str, Series]]) -> Figure:
    """Draw how far batch sizes are from the smallest, epoch by epoch: a column for each model and series, a row for
    each η₀, over the batch sizes and seeds that all columns have there."""
    sides = _beside(results, columns)
    look = _Look(results, [run for row in sides.values() for side in row for run in side])
    models = {model: [s for m, s in columns if m == model] for model, _ in columns}
    titles = [results.label(model, series, among=models[model]) for model, series in columns]
    if len(models) > 1:
        titles = [f"{MODELS.get(model, model)}:\n{title}" for (model, _), title in zip(columns, titles, strict=True)]
    rows = [
        f"η₀ = {_power(lr0)}: difference\nfrom B = {min(run.batch_size for run in row[0])}, %"
        for lr0, row in sides.items()
    ]
    figure, grid = _panels(titles, rows, heights=2.8)
    for axes, runs in zip(grid, zip(*sides.values(), strict=True), strict=True):
        for ax, lr0, side in zip(axes, sides, runs, strict=True):
            groups = by_batch_size(side)
            for size, seeds in groups.items():
                look.curve(ax, *_difference(seeds, next(iter(groups.values()))), lr0, size)
            _epochs(ax)
    for row in zip(*grid, strict=True):
        _differences(row)
    look.legend(figure)
    said = " and ".join(MODELS.get(model, model) for model in models)
    curves = [seeds for row in sides.values() for side in row for seeds in by_batch_size(side).values()]
    _headline(figure, said, f"training loss, {_seeds(curves)}")
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
    _legend(figure, [[handles[series] for series in found], [handles[s] for s in sides if s not in found]])
    _headline(figure, model, f"B = {size}, after {samples:,.0f} samples")
    return figure


def ramp_figure(results: Results, model: str) -> Figure:
    """Draw runs whose batch size changes over those where it does not, and the differences from the smallest B."""
    ramps = results.ramps(model)
    columns = list(dict.fromkeys(series for series, _, _ in ramps))
    rates = {lr0 for _, lr0, _ in ramps}
    constant = {s: [run for run in results.group(model, s) if run.lr0 in rates] for s in columns}
    look = _Look(results, [run for group in (*constant.values(), *ramps.values()) for run in group])
    rows = ("training loss", "difference from\nthe smallest B, %")
    figure, grid = _panels(_titles(results, model, columns), rows, heights=3.0)
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
                for ax, (x, y) in ((above, mean_curve(runs, "train_loss")), (below, _difference(runs, base))):
                    if name:
                        dash = dashes.get(name, "-")
                        ax.plot(x, y, color=_dark(look.colours[lr0]), linewidth=1.8, linestyle=dash, marker=_dot(x))
                    else:
                        look.curve(ax, x, y, lr0, size)
        dress(above, log=True)
        _epochs(above)
        _epochs(below)
    _differences([below for _, below in grid])
    more = [Line2D([], [], color=INK, linewidth=1.8, linestyle=dashes.get(n, "-"), label=f"ramp {n}") for n in names]
    look.legend(figure, more=more)
    _headline(figure, model, "batch size ramped (dashed) and constant")
    return figure


# --------------------------------------------------------------------------- how things look


def rate_colours(results: Results) -> dict[float, str]:
    """Give each η₀ of the results its colour, from SPECTRUM and as far apart as their number allows."""
    rates = sorted({run.lr0 for run in results.runs})
    ramp = LinearSegmentedColormap.from_list("η₀", SPECTRUM, N=max(len(SPECTRUM), len(rates)))
    gap = (ramp.N - 1) / max(1, len(rates) - 1)
    return {lr0: to_hex(ramp(round(i * gap))) for i, lr0 in enumerate(rates)}


class _Look:
    """Colours by learning rate of all results, opacity and width by batch size, for the runs of one figure."""

    def __init__(self, results: Results, runs: Sequence[Curve]) -> None:
        self.rates = sorted({run.lr0 for run in runs})
        self.sizes = sorted({run.batch_size for run in runs if not run.ramp}) or sorted({r.batch_size for r in runs})
        self.wild = any(run.diverged is not None for run in runs)
        self.colours = {lr0: colour for lr0, colour in rate_colours(results).items() if lr0 in self.rates}
        last = max(1, len(self.sizes) - 1)
        self.alphas = {size: 0.3 + 0.7 * i / last for i, size in enumerate(self.sizes)}
        self.widths = {size: 4.2 - 3.0 * i / last for i, size in enumerate(self.sizes)}

    def curve(self, ax: Axes, x: Sequence[float], y: Sequence[float], lr0: float, size: int) -> None:
        alpha, colour = self.alphas[size], self.colours[lr0]
        style: dict[str, Any] = {"color": colour, "alpha": alpha, "linewidth": self.widths[size]}
        ax.plot(x, y, **style, solid_capstyle="round", marker=_dot([v for v in y if not math.isnan(v)]))
        end = next((i for i, value in enumerate(y) if math.isnan(value)), None)
        if end:  # the last epoch that has a number
            ax.plot(x[end - 1], y[end - 1], "x", color=colour, markersize=9, markeredgewidth=2.2, zorder=6)

    def legend(self, figure: Figure, *, sizes: bool = True, more: Sequence[Line2D] = ()) -> None:
        rates = [Line2D([], [], color=c, linewidth=3, label=f"η₀ = {_power(r)}") for r, c in self.colours.items()]
        rest = [
            Line2D([], [], color=INK, alpha=self.alphas[s], linewidth=self.widths[s], label=f"B = {s}")
            for s in self.sizes
            if sizes
        ]
        rest += more
        if self.wild:
            rest.append(_marker("diverged", "x", color=INK, markersize=8, markeredgewidth=2))
        _legend(figure, [rates, rest])


def _legend(figure: Figure, groups: Sequence[Sequence[Line2D]]) -> None:
    """Put a legend under the panels, each group on rows of its own, and make room for it."""
    inches = 0.55 + 0.075 * max(len(str(handle.get_label())) for group in groups for handle in group)
    fit = max(1, int(figure.get_figwidth() / inches))
    rows = [list(group[i : i + fit]) for group in groups for i in range(0, len(group), fit)]
    columns = max(map(len, rows))
    rows = [row + [_marker("", "")] * (columns - len(row)) for row in rows]
    handles = [handle for column in zip(*rows, strict=True) for handle in column]  # as matplotlib fills a legend
    figure.set_figheight(figure.get_figheight() + 0.23 * len(rows))
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, handlelength=2.4)


def _titles(results: Results, model: str, columns: Sequence[Series]) -> list[str]:
    """Name the columns; with their batch sizes where those differ, because fewer curves look closer."""
    sizes = {series: _sizes(by_batch_size(results.group(model, series))) for series in columns}
    more = {series: f", {sizes[series]}" * (len(set(sizes.values())) > 1) for series in columns}
    return [results.label(model, series) + more[series] for series in columns]


def _panels(columns: Sequence[str], rows: Sequence[str], heights: float) -> tuple[Figure, list[list[Axes]]]:
    """Make a column of panels for each title and a row for each quantity, at most ACROSS columns side by side."""
    blocks = math.ceil(len(columns) / ACROSS)
    across = math.ceil(len(columns) / blocks)
    width = min(3.6, WIDTH / across)
    size = (max(7.6, width * across), heights * len(rows) * blocks + 0.8)
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(len(rows) * blocks, across, squeeze=False)
    found = []
    for i, title in enumerate(columns):
        block, column = divmod(i, across)
        axes = [grid[block * len(rows) + row][column] for row in range(len(rows))]
        for row, ax in enumerate(axes):
            first = grid[row][0]  # a row has one scale, in all blocks
            if ax is not first:
                ax.sharey(first)
                ax.sharex(first)
            if column:
                ax.tick_params(labelleft=False)
            else:
                ax.set_ylabel(rows[row])
            ax.tick_params(labelbottom=row + 1 == len(rows))
        axes[0].set_title(_wrap(title, round(9 * width)), loc="left", fontweight="bold")
        found.append(axes)
    for ax in set(grid.flat).difference(*found):
        ax.set_axis_off()
    return figure, found


def dress(ax: Axes, *, log: bool) -> None:
    """Give axes the look of all figures; `log` for the vertical one."""
    if log:
        ax.set_yscale("log")
        low, high = ax.get_ylim()
        # The coarsest that give four ticks; less than a factor of four is divided evenly, as a linear axis is.
        tried = [LogLocator(subs=subs) for subs in ((1,), (1, 2, 5), (1, 1.5, 2, 3, 5, 7))]
        enough = [ticks for ticks in tried if sum(low <= tick <= high for tick in ticks.tick_values(low, high)) > 3]
        ax.yaxis.set_major_locator(enough[0] if enough else MaxNLocator(5, steps=[1, 2, 5, 10], min_n_ticks=3))
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        ax.yaxis.set_minor_locator(NullLocator())
    ax.grid(color=GRID, linewidth=0.8)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color(FAINT)
    ax.tick_params(which="both", color=FAINT)


def _differences(row: Sequence[Axes]) -> None:
    """Dress panels of differences in percent; where one reaches ten times less than another, for both to be seen the
    scale is logarithmic beyond SMALL, and linear in the shaded part."""
    reach = [far for far in (max(map(abs, ax.dataLim.intervaly)) for ax in row) if 0 < far < math.inf]
    for ax in row:
        ax.axhline(0, color=FAINT, linewidth=1, zorder=1)
        dress(ax, log=False)
        if reach and 10 * min(reach) < max(reach):
            ax.axhspan(-SMALL, SMALL, color=GRID, alpha=0.6, linewidth=0, zorder=0)
            ax.set_yscale("symlog", linthresh=SMALL, linscale=0.7)
            powers = [SMALL * 10**i for i in range(6)]
            ax.yaxis.set_major_locator(FixedLocator([-power for power in powers] + [0, *powers]))
            ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}".replace("-", "−")))
            ax.yaxis.set_minor_locator(NullLocator())


def render(figure: Figure, form: str) -> bytes:
    """Return the figure as PNG or SVG; the same result gives the same bytes."""
    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "invariant-adam"}):
        metadata = {"Date": None} if form == "svg" else None
        figure.savefig(buffer, format=form, dpi=160, facecolor="white", metadata=metadata)
    figure.set_layout_engine("none")  # the other form keeps the places: to find them is half of the work
    return buffer.getvalue()


def _looks(labels: Iterable[tuple[Series, str]]) -> dict[str, dict[str, Any]]:
    """Colour by algorithm; line and marker by what else tells series of one algorithm apart."""
    looks: dict[str, dict[str, Any]] = {}
    for series, label in labels:
        colour = ALGORITHMS[series.algorithm]
        variant = sum(look["color"] == colour for name, look in looks.items() if name != label)
        line, marker = VARIANTS[variant % len(VARIANTS)]
        new = {"color": colour, "linestyle": line, "marker": marker, "linewidth": 2, "markersize": 6}
        looks.setdefault(label, new)  # the same label looks the same in every panel
    return looks


def _marker(label: str, marker: str, **style: Any) -> Line2D:
    return Line2D([], [], linestyle="", marker=marker, label=label, **style)


def _dot(values: Sequence[float]) -> str | None:
    return "o" if len(values) == 1 else None  # a line needs two points


def _difference(runs: Sequence[Curve], base: Sequence[Curve]) -> tuple[list[float], list[float]]:
    """Return the epochs that both have, and by how many percent the training loss of `runs` is above that of `base`."""
    above = dict(zip(*mean_curve(runs, "train_loss"), strict=True))
    below = dict(zip(*mean_curve(base, "train_loss"), strict=True)) if base else {}
    epochs = [epoch for epoch in above if epoch in below]
    return epochs, [100 * (above[epoch] / below[epoch] - 1) for epoch in epochs]


def _seeds(curves: Iterable[Sequence[Curve]]) -> str:
    """Say what curves are means over; each holds its seeds."""
    counts = {len(seeds) for seeds in curves}
    return "one seed" if counts <= {1} else "mean over seeds" + " where there are several" * (1 in counts)


def _several(results: Results, model: str, series: Series, rates: Collection[float] | None = None) -> bool:
    return len({run.batch_size for run in results.group(model, series) if rates is None or run.lr0 in rates}) > 1


def _measured(run: Curve, metric: str) -> bool:
    return any(math.isfinite(value) for value in run.columns[metric])


def _epochs(ax: Axes) -> None:
    _name_below(ax, "epoch")
    ax.xaxis.set_major_locator(MaxNLocator(5, integer=True, steps=[1, 2, 5, 10], min_n_ticks=1))


def _name_below(ax: Axes, name: str) -> None:
    if ax.xaxis.get_tick_params().get("labelbottom", True):  # only the lowest of a column has labels
        ax.set_xlabel(name)


def _batch_sizes(ax: Axes, sizes: Sequence[int]) -> None:
    _name_below(ax, "batch size B")
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_locator(FixedLocator(sizes))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _sizes(sizes: Iterable[int]) -> str:
    return "B = " + ",\u00a0".join(map(str, sorted(sizes)))


def _dark(colour: str) -> tuple[float, float, float]:
    r, g, b = to_rgb(colour)
    return 0.5 * r, 0.5 * g, 0.5 * b


def _wrap(label: str, letters: int) -> str:
    for mark in ("=", "∝"):
        label = label.replace(f" {mark} ", f"\u00a0{mark}\u00a0")  # M = 25 stays in one piece
    lines = label.replace("warm-up ", "warm-up\u00a0").split("\n")
    return "\n".join(part for line in lines for part in textwrap.wrap(line, letters, break_on_hyphens=False))


def _headline(figure: Figure, model: str, text: str) -> None:
    figure.suptitle(f"{MODELS.get(model, model)}: {text}", x=0.01, ha="left", fontsize=12, color=FAINT)


def _power(value: float) -> str:
    """1e-05 as 10⁻⁵, 3e-4 as 3·10⁻⁴.

    >>> _power(1e-5), _power(3e-4)
    ('10⁻⁵', '3·10⁻⁴')
    """
    digits, exponent = f"{value:e}".split("e")
    power = "10" + str(int(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return power if float(digits) == 1 else f"{float(digits):g}·{power}"

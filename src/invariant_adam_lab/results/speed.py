"""The figure of spread against final loss: which optimizer's batch sizes lie closer together at the same speed."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from .curves import METRICS, MODELS, Results, Series
from .measures import final, floor, measure, with_lines
from .style import FAINT, dress, legend_below, power_of_ten, series_looks, sizes_said, wrap


def speed_figure(results: Results, metric: str) -> Figure:
    """Draw the spread against the final loss, a panel for each model: which optimizer lies closer at the same speed.

    A panel is over the most batch sizes that the paper's pair has; a point that lacks some is left to the tables, and
    so is a model of one learning rate where others have several. The order floor, where it was measured, is the shaded
    band below. Where a line turns back, a larger η₀ trains slower.
    """
    panels_of = {model: points(results, model, metric) for model in results.models}
    rates = {model: {p.lr0 for found in drawn.values() for p in found} for model, drawn in panels_of.items() if drawn}
    panels_of = {model: panels_of[model] for model in with_lines(rates)}
    figure = Figure(figsize=(max(6.4, 2.9 * len(panels_of)), 4.1), layout="constrained")
    axes = figure.subplots(1, len(panels_of), sharey=True, squeeze=False)[0]
    labels = {(m, s): results.label(m, s, among=panels_of[m]) for m in panels_of for s in panels_of[m]}
    styles = series_looks((series, label) for (_, series), label in labels.items())
    handles: dict[str, Line2D] = {}
    band = False
    for ax, (model, drawn) in zip(axes, panels_of.items(), strict=True):
        for series, found in drawn.items():
            label = labels[model, series]
            (line,) = ax.plot([p.loss for p in found], [p.spread for p in found], **styles[label], label=label)
            handles.setdefault(label, line)
            look: Any = {"textcoords": "offset points", "fontsize": 7.5, "color": line.get_color()}
            place, side = ((0, -14), "center") if series.algorithm == "invariant" else ((0, 8), "center")
            if series._replace(grow=0.1) in drawn and not series.grow:  # whose own are below
                place, side = (-4, 5), "right"
            for point in found:
                ax.annotate(power_of_ten(point.lr0), (point.loss, point.spread), place, ha=side, **look)
        ours = [series for series in drawn if series.algorithm == "invariant"][:1]
        floors = sorted((p.loss, p.floor) for series in ours for p in drawn[series] if p.floor > 0)
        if floors:
            band = True
            x, y = zip(*floors, strict=True)
            ax.fill_between(x, y, 1e-12, color=FAINT, alpha=0.18, linewidth=0, zorder=0)
        sizes = next(iter(drawn.values()))[0].sizes
        ax.set_xscale("log")
        ticks = MaxNLocator(4, steps=[1, 2, 5, 10], min_n_ticks=2)
        ax.xaxis.set_major_locator(ticks)
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        ax.xaxis.set_minor_locator(NullLocator())
        ax.invert_xaxis()
        ax.margins(x=0.2)
        ax.set_title(f"{MODELS.get(model, model)},\n{sizes_said(sizes)}", loc="left", fontweight="bold")
        ax.set_xlabel("final loss")
    drawn_points = [point for drawn in panels_of.values() for found in drawn.values() for point in found]
    values = [value for point in drawn_points for value in (point.spread, point.floor) if value > 0]
    axes[0].set_yscale("log")
    axes[0].set_ylim(0.4 * min(values), 2.5 * max(values))
    for ax in axes:
        dress(ax, log=True)
    axes[0].set_ylabel("spread over batch sizes")
    more = [Line2D([], [], color=FAINT, alpha=0.3, linewidth=8, label="below the order floor")] * band
    legend_below(figure, [[*handles.values(), *more]])
    said = f"Spread against the last {METRICS[metric]}: lower is closer together, right is trained further"
    figure.suptitle(wrap(said, round(11 * figure.get_figwidth())), x=0.01, ha="left", fontsize=11, color=FAINT)
    return figure


class Point(NamedTuple):
    """A series at one learning rate, at a panel's batch sizes."""

    lr0: float
    loss: float
    spread: float
    floor: float  # nan: not measured
    sizes: list[int]


def points(results: Results, model: str, metric: str) -> dict[Series, list[Point]]:
    """Return what a panel shows: standard and invariant Adam, and invariant Adam grown in."""
    pair = results.paper_pair(model)
    ours = [series for series in pair if series.algorithm == "invariant"]
    grown = [s for s in results.paper(model) if s.grow and s._replace(grow=0.0) in ours]
    spread = {
        (series, lr0): measure(results.group(model, series, lr0), metric=metric)
        for series in (*pair, *grown)
        for lr0 in sorted({run.lr0 for run in results.group(model, series)})
    }
    sizes = max((s.batch_sizes for s in spread.values() if math.isfinite(s.value)), key=len, default=[])
    found: dict[Series, list[Point]] = {}
    for (series, lr0), value in spread.items():
        loss = final(results.group(model, series, lr0), metric)
        if value.batch_sizes == sizes and 0 < value.value < math.inf and math.isfinite(loss):
            least = floor(results, model, series, lr0, metric)
            found.setdefault(series, []).append(Point(lr0, loss, value.value, least, sizes))
    return found

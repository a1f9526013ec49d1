"""How figures look: colours, panels, axes, legends, and a figure as bytes."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

from .curves import MODELS, ONCE, Curve, Results, Series

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


def rate_colours(results: Results, models: Collection[str] = ()) -> dict[float, str]:
    """Give each η₀ of the results its colour, from SPECTRUM and as far apart as their number allows.

    Args:
        results: all runs.
        models: whose η₀, with that of the other models that train at a constant one, or of those that see their data
            once; by default of all.
    """
    once = {model in ONCE for model in models} or {False, True}
    rates = sorted({run.lr0 for run in results.runs if (run.model in ONCE) in once})
    ramp = LinearSegmentedColormap.from_list("η₀", SPECTRUM, N=max(len(SPECTRUM), len(rates)))
    gap = (ramp.N - 1) / max(1, len(rates) - 1)
    return {lr0: to_hex(ramp(round(i * gap))) for i, lr0 in enumerate(rates)}


class Look:
    """Colours by learning rate of all results, opacity and width by batch size, for the runs of one figure."""

    def __init__(self, results: Results, runs: Sequence[Curve]) -> None:
        self.rates = sorted({run.lr0 for run in runs})
        self.sizes = sorted({run.batch_size for run in runs if not run.ramp}) or sorted({r.batch_size for r in runs})
        self.wild = any(run.diverged is not None for run in runs)
        colours = rate_colours(results, {run.model for run in runs})
        self.colours = {lr0: colour for lr0, colour in colours.items() if lr0 in self.rates}
        last = max(1, len(self.sizes) - 1)
        self.alphas = {size: 0.3 + 0.7 * i / last for i, size in enumerate(self.sizes)}
        self.widths = {size: 4.2 - 3.0 * i / last for i, size in enumerate(self.sizes)}

    def curve(self, ax: Axes, x: Sequence[float], y: Sequence[float], lr0: float, size: int) -> None:
        """Draw a curve, and an × where it ends without a number."""
        alpha, colour = self.alphas[size], self.colours[lr0]
        style: dict[str, Any] = {"color": colour, "alpha": alpha, "linewidth": self.widths[size]}
        ax.plot(x, y, **style, solid_capstyle="round", marker=dot([v for v in y if not math.isnan(v)]))
        end = next((i for i, value in enumerate(y) if math.isnan(value)), None)
        if end:  # the last epoch that has a number
            ax.plot(x[end - 1], y[end - 1], "x", color=colour, markersize=9, markeredgewidth=2.2, zorder=6)

    def legend(self, figure: Figure, *, sizes: bool = True, more: Sequence[Line2D] = ()) -> None:
        """Explain colours and batch sizes below the panels; `more` comes with the latter."""
        rates = [Line2D([], [], color=c, linewidth=3, label=f"η₀ = {power_of_ten(r)}") for r, c in self.colours.items()]
        rest = [
            Line2D([], [], color=INK, alpha=self.alphas[s], linewidth=self.widths[s], label=f"B = {s}")
            for s in self.sizes
            if sizes
        ]
        rest += more
        if self.wild:
            rest.append(marker("diverged", "x", color=INK, markersize=8, markeredgewidth=2))
        legend_below(figure, [rates, rest])


def legend_below(figure: Figure, groups: Sequence[Sequence[Line2D]]) -> None:
    """Put a legend under the panels, each group on rows of its own, and make room for it."""
    inches = 0.55 + 0.075 * max(len(str(handle.get_label())) for group in groups for handle in group)
    fit = max(1, int(figure.get_figwidth() / inches))
    rows = [list(group[i : i + fit]) for group in groups for i in range(0, len(group), fit)]
    columns = max(map(len, rows))
    rows = [row + [marker("", "")] * (columns - len(row)) for row in rows]
    handles = [handle for column in zip(*rows, strict=True) for handle in column]  # as matplotlib fills a legend
    figure.set_figheight(figure.get_figheight() + 0.23 * len(rows))
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, handlelength=2.4)


def panels(columns: Sequence[str], rows: Sequence[str], heights: float) -> tuple[Figure, list[list[Axes]]]:
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
        axes[0].set_title(wrap(title, round(9 * width)), loc="left", fontweight="bold")
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


def difference_axes(row: Sequence[Axes]) -> None:
    """Dress panels of differences in percent. Where one reaches ten times as far as another, the scale is logarithmic
    beyond SMALL and linear in the shaded part, so that both can be read."""
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
    figure.set_layout_engine("none")  # the other form reuses the layout, which is half of the work
    return buffer.getvalue()


def series_looks(labels: Iterable[tuple[Series, str]]) -> dict[str, dict[str, Any]]:
    """Colour by algorithm; line and marker by what else tells series of one algorithm apart."""
    looks: dict[str, dict[str, Any]] = {}
    for series, label in labels:
        colour = ALGORITHMS[series.algorithm]
        variant = sum(look["color"] == colour for name, look in looks.items() if name != label)
        line, marker = VARIANTS[variant % len(VARIANTS)]
        new = {"color": colour, "linestyle": line, "marker": marker, "linewidth": 2, "markersize": 6}
        looks.setdefault(label, new)  # the same label looks the same in every panel
    return looks


def marker(label: str, marker: str, **style: Any) -> Line2D:
    """Make an entry of a legend that has a marker and no line."""
    return Line2D([], [], linestyle="", marker=marker, label=label, **style)


def dot(values: Sequence[float]) -> str | None:
    """Return the marker of a line: none, unless it has one point only, which no line would show."""
    return "o" if len(values) == 1 else None


def epoch_axis(ax: Axes) -> None:
    """Let the axis below count epochs."""
    name_below(ax, "epoch")
    ax.xaxis.set_major_locator(MaxNLocator(5, integer=True, steps=[1, 2, 5, 10], min_n_ticks=1))


def name_below(ax: Axes, name: str) -> None:
    """Name the axis below, if its numbers are shown there."""
    if ax.xaxis.get_tick_params().get("labelbottom", True):  # only the lowest of a column has labels
        ax.set_xlabel(name)


def batch_size_axis(ax: Axes, sizes: Sequence[int]) -> None:
    """Let the axis below show batch sizes, those alone."""
    name_below(ax, "batch size B")
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_locator(FixedLocator(sizes))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def sizes_said(sizes: Iterable[int]) -> str:
    """Name batch sizes."""
    return "B = " + ",\u00a0".join(map(str, sorted(sizes)))


def dark(colour: str) -> tuple[float, float, float]:
    """Return a colour at half of its brightness."""
    r, g, b = to_rgb(colour)
    return 0.5 * r, 0.5 * g, 0.5 * b


def wrap(label: str, letters: int) -> str:
    """Break a label into lines, never within M = 25 or a warm-up."""
    for mark in ("=", "∝"):
        label = label.replace(f" {mark} ", f"\u00a0{mark}\u00a0")  # M = 25 stays in one piece
    lines = label.replace("warm-up ", "warm-up\u00a0").split("\n")
    return "\n".join(part for line in lines for part in textwrap.wrap(line, letters, break_on_hyphens=False))


def headline(figure: Figure, model: str, text: str) -> None:
    """Name the model above a figure, and what it is of."""
    figure.suptitle(f"{MODELS.get(model, model)}: {text}", x=0.01, ha="left", fontsize=12, color=FAINT)


def power_of_ten(value: float) -> str:
    """1e-05 as 10⁻⁵, 3e-4 as 3·10⁻⁴.

    >>> power_of_ten(1e-5), power_of_ten(3e-4)
    ('10⁻⁵', '3·10⁻⁴')
    """
    digits, exponent = f"{value:e}".split("e")
    power = "10" + str(int(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return power if float(digits) == 1 else f"{float(digits):g}·{power}"

"""The demo's result -> a figure (PNG, SVG) and one HTML page that needs no network."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from . import record
from .results.page import definitions, frame, table
from .results.style import ALGORITHMS, FAINT, GRID, INK, STYLE, dress, render

CURVES = ("standard", "invariant")
PANELS = (*CURVES, "spread")
LAWS = {"square_root": "√B", "linear": "B", "exponential": "B"}  # what the learning rate is proportional to


def write_report(result: dict[str, Any], out: Path) -> list[Path]:
    """Write the result, its figure and its page under `out`; return what was written, the page last."""
    figure = draw(result)
    return [
        record.write_json(out / "demo.json", result),
        record.write(out / "demo.png", render(figure, "png")),
        record.write(out / "demo.svg", render(figure, "svg")),
        record.write(out / "demo.html", page(result)),
    ]


def draw(result: dict[str, Any], panels: Sequence[str] = PANELS) -> Figure:
    """Draw some of three panels: the training loss of each batch size by either optimizer, and how far apart they are.

    Args:
        result: of `demo`.
        panels: "standard" and "invariant", on the same axes, and "spread".
    """
    with matplotlib.rc_context(STYLE | {"font.size": 11}):
        figure = Figure(figsize=(4.3 * len(panels), 4.3), layout="constrained")
        for ax, name in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            title, below = (_gaps if name == "spread" else _curves)(ax, result, name)
            ax.set_title(title, loc="left", fontweight="bold", fontsize=12, pad=22)
            ax.text(0, 1.03, below, transform=ax.transAxes, color=FAINT)
            dress(ax, log=True)
            ax.tick_params(labelcolor=INK)
            ax.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10], min_n_ticks=1))
            ax.set_xlabel("epoch")
    return figure


def _curves(ax: Axes, result: dict[str, Any], optimizer: str) -> tuple[str, str]:
    """Draw a curve for each batch size; return what stands above them."""
    sizes = result["settings"]["batch_sizes"]
    palette = matplotlib.colormaps["viridis"]  # even in lightness: readable without colour
    for run in (run for run in result["runs"] if run["optimizer"] == optimizer):
        # Small batches wide, large ones narrow on top: where curves coincide, all of them can still be seen.
        rank = sizes.index(run["batch_size"]) / max(1, len(sizes) - 1)
        look = {"color": palette(0.88 * (1 - rank)), "linewidth": 7.0 - 5.4 * rank, "solid_capstyle": "round"}
        ax.plot(*_points(run["losses"]), label=f"{run['batch_size']:,}", **look, marker=_dot(run["losses"]))
    every = [loss for run in result["runs"] for loss in run["losses"]]
    ax.set_ylim(0.8 * min(every), 1.25 * max(every))  # the same for both optimizers
    ax.set_ylabel("training loss")
    ax.legend(title="batch size B", frameon=False, loc="upper right")
    law = LAWS[result["settings"]["rules"][optimizer]]
    return f"{optimizer.capitalize()} Adam, lr ∝ {law}", f"spread {result['spread'][optimizer]:.3g}"


def _gaps(ax: Axes, result: dict[str, Any], _: str) -> tuple[str, str]:
    """Draw how far apart the curves of each kind are after each epoch; return what stands above."""
    at_m = next(run for run in result["runs"] if run["batch_size"] == result["settings"]["micro_batch_size"])
    kinds = {f"{name} Adam": [run for run in result["runs"] if run["optimizer"] == name] for name in CURVES}
    kinds["order floor"] = [at_m, *result["reordered"]]
    looks = dict(
        zip(kinds, ((ALGORITHMS["standard"], "-"), (ALGORITHMS["invariant"], "-"), (FAINT, "--")), strict=True)
    )
    for name, runs in kinds.items():
        gaps = [max(losses) / min(losses) for losses in zip(*(run["losses"] for run in runs), strict=True)]
        colour, dash = looks[name]
        height = [math.log(gap) or math.nan for gap in gaps]  # no difference at all has no place on this axis
        ax.plot(*_points(height), color=colour, linestyle=dash, linewidth=2, label=name, marker=_dot(gaps))
    ax.set_ylabel("largest − smallest log loss")
    ax.legend(frameon=False, loc="best")
    return "How far apart", f"means {result['spread']['standard']:.2g}, {result['spread']['invariant']:.2g}" + (
        f", {result['order_floor']:.2g}"
    )


def _points(values: Sequence[float]) -> tuple[range, Sequence[float]]:
    return range(1, len(values) + 1), values


def _dot(values: Sequence[float]) -> str | None:
    """A single point needs a marker to be seen."""
    return "o" if len(values) == 1 else None


def page(result: dict[str, Any]) -> str:
    """Return the page: the figure, the table, what it shows and with which settings; nothing is fetched."""
    s, spreads = result["settings"], result["spread"]
    largest, smallest = max(s["batch_sizes"]), min(s["batch_sizes"])
    rows = [
        (
            run["optimizer"],
            f"{run['batch_size']:,}",
            f"{run['hyperparameters']['lr']:.3g}",
            f"{run['hyperparameters']['betas'][0]:.5g}",
            f"{run['hyperparameters']['betas'][1]:.7g}",
            f"{run['losses'][-1]:.4f}",
            f"{100 * run['accuracy']:.1f} %",
        )
        for run in result["runs"]
    ]
    head = ("optimizer", "B", "learning rate", "β₁", "β₂", "training loss", "held-out accuracy")
    settings = {
        "learning rate": f"{s['lr']:g} at batch size {smallest}, constant; no weight decay",
        "micro-batch": f"{s['micro_batch_size']} samples",
        "epochs": f"{s['epochs']} of {s['samples_per_epoch']:,} samples",
        "seed": s["seed"],
        "growing in": "yes, by a tenth of what was seen" if s["grow"] else "no",
        "rules": f"invariant Adam {s['rules']['invariant']}, standard Adam {s['rules']['standard']}",
        **result["provenance"],
    }
    body = BODY.format(
        figures="\n".join(_drawing(result, panel) for panel in PANELS),
        verdict=verdict(result),
        invariant=f"{spreads['invariant']:.3g}",
        standard=f"{spreads['standard']:.3g}",
        floor=f"{result['order_floor']:.3g}",
        grown="" if s["grow"] else NOT_GROWN,
        smallest=smallest,
        largest=largest,
        law=LAWS[s["rules"]["standard"]],
        runs=table(head, rows, classes={0: "text"}),
        settings=definitions(settings),
    )
    return frame("Invariant Adam: the demo", body)


def verdict(result: dict[str, Any]) -> str:
    """Say in a few words how the two spreads compare.

    >>> verdict({"ratio": 86.13}), verdict({"ratio": 0.5}), verdict({"ratio": None})
    ('86.1 times smaller', '2 times larger', 'nil')
    """
    ratio = result["ratio"]
    if ratio is None:
        return "nil"
    return f"{ratio:.3g} times smaller" if ratio >= 1 else f"{1 / ratio:.3g} times larger"


LABELS = {
    "standard": "Training loss over epochs at each batch size, standard Adam",
    "invariant": "Training loss over epochs at each batch size, invariant Adam",
    "spread": "Difference of the log loss between batch sizes over epochs: standard Adam, invariant Adam, order floor",
}


def _drawing(result: dict[str, Any], panel: str) -> str:
    """Return a panel as a part of the page: as wide as its place, in the colours of a light or a dark page."""
    svg = render(draw(result, [panel]), "svg").decode()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r'(?<= id=")|(?<=href="#)|(?<=url\(#)', f"{panel}-", svg)  # ids of one page must differ
    head, body = svg.split(">", 1)
    box = re.search(r'viewBox="[^"]*"', head)
    for colour, instead in {"#ffffff": "none", INK: "var(--ink)", FAINT: "var(--faint)", GRID: "var(--line)"}.items():
        body = body.replace(colour, instead)
    body = re.sub(r"stroke: (#[0-9a-f]{6})", r"stroke: color-mix(in srgb, \1, white var(--lighter))", body)
    return f'<svg {box.group() if box else ""} role="img" aria-label="{LABELS[panel]}">{body}'


NOT_GROWN = " It was told not to here, so its large batches part from the others in the first updates."
BODY = """<main>
<h1>Same samples, same trajectory</h1>
<p>A small convolutional network learns 8×8 handwritten digits at batch sizes {smallest} to {largest}. With
standard Adam and a learning rate ∝ {law} the runs of different batch sizes spread by {standard}; with invariant
Adam by <strong>{invariant}</strong>: <strong>{verdict}</strong>. Another order of the same samples moves the curve of
one batch size by {floor}.</p>
<figure class="drawings">
{figures}
</figure>
<h2>How to read it</h2>
<p>Each line is one batch size. All runs start from the same weights and see the same samples in the same
order; an epoch is the same work for every line. <em>Spread</em> is the mean over epochs of the largest
minus the smallest log training loss over the batch sizes: 0.01 is a difference of 1 % in the loss.</p>
<p>The <em>order floor</em> is a yardstick for it: the same measure for three runs at batch size {smallest} whose
micro-batches come in another order inside each block of {largest} samples. Nothing else differs. Where the
spread is below it, the batch size matters less than the order of the samples.</p>
<p>Both optimizers have the same hyperparameters at batch size {smallest}, which is also the micro-batch. There one
update is one micro-batch, the two are the same algorithm, and the two panels share that curve. A larger batch changes
this: standard Adam averages the gradients and squares the average; invariant Adam squares each micro-batch gradient and
averages the squares. Invariant Adam also grows in: its first mini-batches are cut into smaller updates, none larger
than a tenth of what was seen before.{grown} The lines are drawn wide for small batches and narrow for large ones, so
that curves on top of each other stay visible.</p>
<p>The same trajectory is not the best trajectory: the figure says that the batch size stops mattering, not
that any of these learning rates is the right one. With a larger learning rate updates stop being small and
the spread grows.</p>
<h2>Every run</h2>
{runs}
<h2>Settings</h2>
{settings}
<p>Images: Optical Recognition of Handwritten Digits, E. Alpaydin and C. Kaynak, UCI Machine Learning
Repository, doi 10.24432/C50P49, CC BY 4.0.</p>
</main>"""

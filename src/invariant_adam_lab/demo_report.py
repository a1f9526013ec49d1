"""The demo's result -> a figure (PNG, SVG) and one HTML page that needs no network."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from . import record
from .results.page import definitions, frame, table
from .results.style import FAINT, STYLE, dress, render

PANELS = ("standard", "invariant")
LAWS = {"square_root": "√B", "linear": "B", "exponential": "B"}  # what the learning rate is proportional to


def write_report(result: dict[str, Any], out: Path) -> list[Path]:
    """Write the result, its figure and its page under `out`; return what was written, the page last."""
    figure = draw(result)
    svg = render(figure, "svg")
    return [
        record.write_json(out / "demo.json", result),
        record.write(out / "demo.png", render(figure, "png")),
        record.write(out / "demo.svg", svg),
        record.write(out / "demo.html", page(result, svg.decode())),
    ]


def draw(result: dict[str, Any]) -> Figure:
    """Draw the training loss of each batch size: standard Adam beside invariant Adam, on the same axes."""
    sizes = result["settings"]["batch_sizes"]
    palette = matplotlib.colormaps["viridis"]  # even in lightness: readable without colour
    colours = {size: palette(0.88 * (1 - i / max(1, len(sizes) - 1))) for i, size in enumerate(sizes)}
    # Small batches wide, large ones narrow on top: where curves coincide, all of them can still be seen.
    widths = {size: 7.0 - 5.4 * i / max(1, len(sizes) - 1) for i, size in enumerate(sizes)}
    with matplotlib.rc_context(STYLE | {"font.size": 11}):
        figure = Figure(figsize=(10, 4.6), layout="constrained")
        axes = figure.subplots(1, 2, sharex=True, sharey=True)
        for ax, optimizer in zip(axes, PANELS, strict=True):
            for run in result["runs"]:
                if run["optimizer"] == optimizer:
                    size = run["batch_size"]
                    epochs = range(1, len(run["losses"]) + 1)
                    ax.plot(
                        epochs,
                        run["losses"],
                        color=colours[size],
                        linewidth=widths[size],
                        solid_capstyle="round",
                        marker="o" if len(run["losses"]) == 1 else None,
                        label=f"{size:,}",
                    )
            law = LAWS[result["settings"]["rules"][optimizer]]
            title = f"{optimizer.capitalize()} Adam, learning rate ∝ {law}"
            ax.set_title(title, loc="left", fontweight="bold", fontsize=12.5, pad=22)
            ax.text(0, 1.03, f"spread {result['spread'][optimizer]:.3g}", transform=ax.transAxes, color=FAINT)
            dress(ax, log=True)
            ax.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10], min_n_ticks=1))
            ax.set_xlabel("epoch")
            ax.tick_params(labelleft=True)
        axes[0].set_ylabel("training loss")
        axes[1].legend(title="batch size B", frameon=False, loc="upper right")
    return figure


def page(result: dict[str, Any], svg: str) -> str:
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
        "rules": f"invariant Adam {s['rules']['invariant']}, standard Adam {s['rules']['standard']}",
        **result["provenance"],
    }
    body = BODY.format(
        figure=_inline(svg),
        verdict=verdict(result),
        invariant=f"{spreads['invariant']:.3g}",
        standard=f"{spreads['standard']:.3g}",
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


def _inline(svg: str) -> str:
    """Return the drawing alone, as wide as the page: no prologue, metadata or namespace addresses."""
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    head, body = svg.split(">", 1)
    box = re.search(r'viewBox="[^"]*"', head)
    label = "Training loss over epochs for each batch size, standard Adam beside invariant Adam"
    return f'<svg {box.group() if box else ""} role="img" aria-label="{label}">{body}'


BODY = """<main>
<h1>Same samples, same trajectory</h1>
<p>A small convolutional network learns 8×8 handwritten digits at batch sizes {smallest} to {largest}. With
standard Adam and a learning rate ∝ {law} the runs of different batch sizes spread by {standard}; with invariant
Adam by <strong>{invariant}</strong>: <strong>{verdict}</strong>.</p>
<figure class="drawing">
{figure}
</figure>
<h2>How to read it</h2>
<p>Each line is one batch size. All runs start from the same weights and see the same samples in the same
order; an epoch is the same work for every line. <em>Spread</em> is the mean over epochs of the largest
minus the smallest log training loss over the batch sizes: 0.01 is a difference of 1 % in the loss.</p>
<p>Both optimizers are tuned at batch size {smallest}, which is also the micro-batch. There one update is
one micro-batch, the two are the same algorithm, and the two panels share that curve. A larger batch changes
only this: standard Adam averages the gradients and squares the average; invariant Adam squares each
micro-batch gradient and averages the squares. The lines are drawn wide for small batches and narrow for
large ones, so that curves on top of each other stay visible.</p>
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

"""The demo's result -> a figure (PNG, SVG) and one HTML page that needs no network."""

from __future__ import annotations

import html
import io
import re
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from . import record

PANELS = ("standard", "invariant")
LAWS = {"square_root": "√B", "linear": "B", "exponential": "B"}  # what the learning rate goes with
INK, FAINT = "#1d2330", "#8a90a0"


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
    with matplotlib.rc_context({"font.size": 11, "text.color": INK, "axes.labelcolor": INK}):
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
            ax.set_yscale("log")
            ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            ax.yaxis.set_minor_formatter(NullFormatter())
            ax.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10], min_n_ticks=1))
            ax.set_xlabel("epoch")
            ax.grid(color="#e4e6ec", linewidth=0.8)
            ax.set_axisbelow(True)
            ax.spines[["top", "right"]].set_visible(False)
            ax.spines[["left", "bottom"]].set_color(FAINT)
            ax.tick_params(which="both", color=FAINT, labelleft=True)
        axes[0].set_ylabel("training loss")
        axes[1].legend(title="batch size B", frameon=False, loc="upper right")
    return figure


def render(figure: Figure, form: str) -> bytes:
    """Return the figure as PNG or SVG; the same result gives the same SVG."""
    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "invariant-adam"}):
        metadata = {"Date": None} if form == "svg" else None
        figure.savefig(buffer, format=form, dpi=160, facecolor="white", metadata=metadata)
    return buffer.getvalue()


def page(result: dict[str, Any], svg: str) -> str:
    """Return the page: the figure, the table, what it shows and with which settings; nothing is fetched."""
    s, spreads = result["settings"], result["spread"]
    largest, smallest = max(s["batch_sizes"]), min(s["batch_sizes"])
    rows = "\n".join(
        f"<tr><td>{run['optimizer']}</td><td>{run['batch_size']:,}</td>"
        f"<td>{run['hyperparameters']['lr']:.3g}</td>"
        f"<td>{run['hyperparameters']['betas'][0]:.5g}</td><td>{run['hyperparameters']['betas'][1]:.7g}</td>"
        f"<td>{run['losses'][-1]:.4f}</td><td>{100 * run['accuracy']:.1f} %</td></tr>"
        for run in result["runs"]
    )
    settings = {
        "learning rate": f"{s['lr']:g} at batch size {smallest}, constant; no weight decay",
        "micro-batch": f"{s['micro_batch_size']} samples",
        "epochs": f"{s['epochs']} of {s['samples_per_epoch']:,} samples",
        "seed": s["seed"],
        "rules": f"invariant Adam {s['rules']['invariant']}, standard Adam {s['rules']['standard']}",
        **result["provenance"],
    }
    listed = "\n".join(f"<dt>{html.escape(k)}</dt><dd>{html.escape(str(v))}</dd>" for k, v in settings.items())
    return PAGE.format(
        figure=_inline(svg),
        verdict=verdict(result),
        invariant=f"{spreads['invariant']:.3g}",
        standard=f"{spreads['standard']:.3g}",
        smallest=smallest,
        largest=largest,
        law=LAWS[s["rules"]["standard"]],
        rows=rows,
        settings=listed,
    )


def verdict(result: dict[str, Any]) -> str:
    """Say in a few words how the two spreads compare, whichever way it came out.

    >>> verdict({"ratio": 86.13}), verdict({"ratio": 0.5}), verdict({"ratio": None})
    ('86.1 times smaller', '2 times larger', 'nil')
    """
    ratio = result["ratio"]
    if ratio is None:
        return "nil"
    return f"{ratio:.3g} times smaller" if ratio >= 1 else f"{1 / ratio:.3g} times larger"


def _inline(svg: str) -> str:
    """Keep the drawing alone: no prologue, no metadata, no namespace addresses, and as wide as the page."""
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    head, body = svg.split(">", 1)
    box = re.search(r'viewBox="[^"]*"', head)
    label = "Training loss over epochs for each batch size, standard Adam beside invariant Adam"
    return f'<svg {box.group() if box else ""} role="img" aria-label="{label}">{body}'


PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Invariant Adam: the demo</title>
<style>
:root {{ --ink: #1d2330; --faint: #5c6475; --line: #dde0e8; --paper: #fbfbfd; }}
body {{ margin: 0; background: var(--paper); color: var(--ink); font: 17px/1.55 system-ui, sans-serif; }}
main {{ max-width: 62rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }}
h1 {{ font-size: 2rem; line-height: 1.2; margin: 0 0 .6rem; }}
h2 {{ font-size: 1.2rem; margin: 2.4rem 0 .6rem; }}
p {{ max-width: 44rem; }}
figure {{ margin: 1.6rem 0; padding: 1rem; background: #fff; border: 1px solid var(--line); border-radius: 10px; }}
figure svg {{ display: block; width: 100%; height: auto; }}
.table {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
th, td {{ padding: .35rem .9rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }}
th:first-child, td:first-child {{ text-align: left; }}
th {{ font-weight: 600; }}
dl {{ display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1.2rem; }}
dt {{ color: var(--faint); }}
dd {{ margin: 0; }}
</style>
</head>
<body>
<main>
<h1>Same samples, same trajectory</h1>
<p>A small convolutional network learns 8×8 handwritten digits at batch sizes {smallest} to {largest}. With
standard Adam and a learning rate ∝ {law} the runs of different batch sizes spread by {standard}; with invariant
Adam by <strong>{invariant}</strong>: <strong>{verdict}</strong>.</p>
<figure>
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
<div class="table"><table>
<thead><tr><th>optimizer</th><th>B</th><th>learning rate</th><th>β₁</th><th>β₂</th><th>training loss</th><th>held-out
accuracy</th></tr></thead>
<tbody>
{rows}
</tbody>
</table></div>
<h2>Settings</h2>
<dl>
{settings}
</dl>
<p>Images: Optical Recognition of Handwritten Digits, E. Alpaydin and C. Kaynak, UCI Machine Learning
Repository, doi 10.24432/C50P49, CC BY 4.0.</p>
</main>
</body>
</html>
"""

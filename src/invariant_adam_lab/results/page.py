"""HTML pages that need no network: the frame that all share, and a grid's interactive report."""

from __future__ import annotations

import html
import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import record
from .curves import METRICS, MODELS, OF_ONE_PASS, PER_EPOCH, Results, Series, rate
from .measures import SpreadRow, floor, matched, ranges, remarks, spreads
from .style import rate_colours

HERE = Path(__file__).parent


def write(results: Results, out_file: Path) -> Path:
    """Write the report of the results: one file, with everything in it."""
    return record.write(out_file, report(results))


def frame(title: str, body: str, script: str = "") -> str:
    """Return a whole page: light or dark as the reader has it, the style and the script in it."""
    style = (HERE / "page.css").read_text(encoding="utf-8")
    end = f"<script>\n{script}</script>\n" if script else ""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n{body}\n{end}</body>\n</html>\n"
    )


def definitions(entries: Mapping[str, Any]) -> str:
    """Return names and values as a list; a value that is a mapping is spread over its entries."""
    flat: dict[str, Any] = {}
    for name, value in entries.items():
        inner = value.items() if isinstance(value, Mapping) else [("", value)]
        flat |= {" ".join(filter(None, (name, key))): entry for key, entry in inner}
    rows = "\n".join(f"<dt>{html.escape(name)}</dt><dd>{html.escape(_text(v))}</dd>" for name, v in flat.items())
    return f"<dl>\n{rows}\n</dl>"


def _text(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, classes: Mapping[int, str], name: str = "runs") -> str:
    """Return a table; cells are HTML, `classes` are those of its columns."""

    def cells(tag: str, texts: Sequence[str]) -> str:
        places = (f' class="{classes[i]}"' if i in classes else "" for i in range(len(texts)))
        return "<tr>" + "".join(f"<{tag}{c}>{t}</{tag}>" for c, t in zip(places, texts, strict=True)) + "</tr>"

    lines = "\n".join(cells("td", row) for row in rows)
    return (
        f'<div class="table"><table id="{name}">\n<thead>{cells("th", head)}</thead>\n'
        f"<tbody>\n{lines}\n</tbody>\n</table></div>"
    )


def report(results: Results) -> str:
    """Return the report of a grid as HTML."""
    listed = [_folded(name, definitions(grid)) for name, grid in results.grids.items() if grid]
    said = [f"<li>{html.escape(remark)}</li>" for remark in remarks(results)]
    rows = spreads(results)
    body = BODY.format(
        models=html.escape("; ".join(MODELS.get(model, model) for model in results.models)),
        runs=f"{results.made:,}",
        table=_spreads(results, rows),
        ranges=_ranges(results, rows),
        remarks=_folded(f"{len(said)} remarks", "<ul>\n" + "\n".join(said) + "\n</ul>") if said else "<p>None.</p>",
        grids="\n".join(listed) or "<p>The results came without a grid.json.</p>",
        data=_embed(_data(results)),
    )
    return frame("Invariant Adam: the report", body, (HERE / "page.js").read_text(encoding="utf-8"))


def _spreads(results: Results, rows: Sequence[SpreadRow]) -> str:
    return "\n".join(
        _folded(
            MODELS.get(model, model),
            _spreads_of(results, model, [row for row in rows if row.model == model]),
            shown=model == _first(results),
        )
        for model in results.models
    )


def _spreads_of(results: Results, model: str, measured: Sequence[SpreadRow]) -> str:
    order = _order(results, model)
    rows = []
    for row in sorted(measured, key=lambda row: order.index(row.series)):
        s = row.spread
        notes = [*s.notes]
        if math.isfinite(s.finite):
            notes.append(f"without the diverged: {s.finite:.3g}")
        if row.ratio_over:
            notes.append(f"ratio over {row.ratio_over}")
        button = (
            f'<button type="button" data-model="{results.models.index(model)}" '
            f'data-series="{order.index(row.series)}" data-rate="{row.lr0!r}" '
            f'title="Show this learning rate alone">{rate(row.lr0)}</button>'
        )
        sizes = ", ".join(map(str, s.batch_sizes))
        least = floor(results, model, row.series, row.lr0)
        beside = math.nan if row.series == row.series.rival else matched(results, model, row.series, row.lr0).ratio
        ratios = (_say(row.ratio), _say(beside))
        numbers = (_say(s.value), _say(least), *ratios, sizes, str(s.epochs), str(len(s.per_seed)))
        label = html.escape(results.label(model, row.series))
        rows.append((label, button, *numbers, html.escape("; ".join(notes))))
    head = ("optimizer", "η₀", "spread", "floor", "ratio", "at equal loss", "batch sizes", "epochs", "seeds", "remarks")
    return table(head, rows, classes={0: "text", 9: "notes"}, name=f"spreads-{results.models.index(model)}")


def _ranges(results: Results, measured: Sequence[SpreadRow]) -> str:
    rows = [
        (
            html.escape(MODELS.get(row.model, row.model)),
            html.escape(results.label(row.model, row.series)),
            *("none tried" if lr0 is None else rate(lr0) for lr0 in (row.holds_up_to, row.breaks_at)),
        )
        for row in ranges(measured)
    ]
    head = ("model", "optimizer", "η₀ up to which it holds", "η₀ at which it breaks")
    return _folded(f"{len(rows)} optimizers", table(head, rows, classes={0: "text", 1: "text"}, name="critical"))


def _folded(name: str, inside: str, *, shown: bool = False) -> str:
    """Return HTML that the reader opens by its name, because a report of hundreds of runs is long."""
    return f"<details{' open' * shown}>\n<summary>{html.escape(name)}</summary>\n{inside}\n</details>"


def _say(value: float) -> str:
    return "–" if math.isnan(value) else "∞" if math.isinf(value) else f"{value:.3g}"


def _first(results: Results) -> str:
    """The model that the report opens on."""
    return "resnet-bn" if "resnet-bn" in results.models else results.models[0]


def _order(results: Results, model: str) -> list[Series]:
    """The panels of a model: what the paper compares, then the rest."""
    return list(dict.fromkeys([*results.paper_pair(model), *results.series(model)]))


def _data(results: Results) -> dict[str, Any]:
    """What the script draws from: each run's columns, null for what is no number."""
    orders = {model: _order(results, model) for model in results.models}
    shown = [name for name in PER_EPOCH if name not in ("lr", *OF_ONE_PASS)]

    def number(value: float) -> float | None:
        # Seven digits: the spreads of interest are differences of 1e-4 of the loss.
        return float(f"{value:.7g}") if math.isfinite(value) else None

    return {
        "metrics": METRICS,
        "colours": list(rate_colours(results).items()),
        "first": results.models.index(_first(results)),
        "models": [
            {
                "name": MODELS.get(model, model),
                "series": [results.label(model, series) for series in order],
                "ticked": len(results.paper_pair(model)) or len(order),  # so many of them, from the first
            }
            for model, order in orders.items()
        ],
        "runs": [
            {
                "model": results.models.index(run.model),
                "series": orders[run.model].index(run.series),
                "rate": run.lr0,
                "size": run.batch_size,
                "seed": run.seed,
                "ramp": run.ramp,
                "diverged": run.diverged,
                **{name: [number(value) for value in run.columns[name]] for name in shown},
                "seconds": [number(value) for value in itertools.accumulate(run.columns["seconds"])],
            }
            for run in results.runs
            if not run.order
        ],
    }


def _embed(data: Any) -> str:
    """Return JSON that a page can hold: no text in it can end the script."""
    return json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


BODY = """<main class="wide">
<div class="top"><h1>Same samples, same trajectory?</h1><button type="button" id="theme">light or dark</button></div>
<p>{runs} runs of {models}. Each panel is an optimizer; colour is the learning rate η₀, and batch sizes go from pale and
wide (small) to dark and narrow (large). What the paper compares is ticked; tick more. All runs of a seed see the same
samples in the same order. Point at a curve, or move through it with the arrow keys, to read every batch size at that
epoch.</p>
<noscript><p>The curves need JavaScript; the tables below do not.</p></noscript>
<form class="controls" onsubmit="return false" aria-label="What is drawn">
<label>model <select id="model"></select></label>
<label>metric <select id="metric"></select></label>
<label>over <select id="axis"></select></label>
<label>show <select id="show"></select></label>
<label>scale <select id="scale"></select></label>
<label>seeds <select id="seeds"></select></label>
<fieldset id="rates"><legend>learning rate η₀</legend></fieldset>
<fieldset id="sizes"><legend>batch size B</legend></fieldset>
<fieldset id="series"><legend>optimizer</legend></fieldset>
</form>
<div id="panels" class="panels"></div>
<div id="tip" hidden></div>
<div id="spoken" class="spoken" role="status" aria-live="polite"></div>
<h2>Spread over batch sizes</h2>
<p>The mean over epochs of the largest minus the smallest log training loss over the batch sizes, within a seed, then
averaged over seeds: 0.01 is 1 % of the loss. <em>Ratio</em> is the spread of standard Adam with η ∝ √B over the row's,
over the same batch sizes, seeds and epochs; <em>at equal loss</em> is the same where both end at the same training
loss. <em>Floor</em> is the order floor, where it was measured. A run that diverged where another did not makes the
spread infinite.</p>
<div id="spreads">
{table}
</div>
<h2>Where it breaks</h2>
<p>Of the learning rates tried: the largest up to which no spread exceeds 0.01 (of those tried at the optimizer's
largest batch size, which breaks first), and the smallest at which one does.</p>
{ranges}
<h2>Runs to know of</h2>
{remarks}
<h2>Where the numbers come from</h2>
{grids}
</main>
<script type="application/json" id="data">{data}</script>"""

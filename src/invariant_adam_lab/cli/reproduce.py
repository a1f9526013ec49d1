"""The command `reproduce`: a grid of the paper's experiments, from its options to its files and figures."""

from __future__ import annotations

import enum
import importlib.util
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import TextColumn

from . import dry_run as dry_run_of
from .console import count, fail, fail_to_write, print_json, say, stderr, stdout, stop, time_bar
from .experiments import draw, print_spreads
from .options import Device, InPrecision, Json, Where, device_of, numbers, precision_of

if TYPE_CHECKING:
    from ..grids.grid import Grid
    from ..grids.store import Setup
    from ..results.curves import Results
    from ..training.runs import Run


class Model(str, enum.Enum):
    """What `reproduce` trains."""

    resnet_bn = "resnet-bn"
    resnet_ln = "resnet-ln"
    vit = "vit"
    gpt = "gpt"
    gpt2 = "gpt2"


class Preset(str, enum.Enum):
    """How much of it."""

    paper = "paper"
    short = "short"
    tiny = "tiny"
    smoke = "smoke"


class Comparison(str, enum.Enum):
    """Which comparison, by its name in `grids.grid`."""

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

ModelName = Annotated[Model, typer.Argument(help="What to train.")]
PresetName = Annotated[
    Preset,
    typer.Option(
        help="The paper's grid (200 epochs), a short one (10), tiny: small models on a part of the data, or smoke: on "
        "made-up data, a test."
    ),
]
GridName = Annotated[
    Comparison,
    typer.Option(
        metavar="NAME",
        help="The comparison: curves (the paper's), rivals, tuned, rules, micro, ramp or norm; see docs/lab.md.",
    ),
]
Epochs = Annotated[int | None, typer.Option(min=1, metavar="N", help="Passes over the training set; as in the preset.")]
Images = Annotated[int | None, typer.Option(min=1, metavar="N", help="Training samples to use; by default all.")]
Rates = Annotated[
    str | None, typer.Option(metavar="LIST", help="Learning rates η₀ at the largest batch size, as 1e-4,1e-3.")
]
Sizes = Annotated[str | None, typer.Option(metavar="LIST", help="Batch sizes, as 25,100,400.")]
Seeds = Annotated[str | None, typer.Option(metavar="LIST", help="Seeds, as 0,1,2.")]
Algorithms = Annotated[
    str | None,
    typer.Option(
        metavar="LIST",
        help="Some of invariant, standard, accumulate, micro, adama, halflife; each may name its rule, as "
        "standard:linear.",
    ),
]
MicroBatch = Annotated[int | None, typer.Option(min=1, metavar="M", help="Samples in a micro-batch.")]
MaxBatch = Annotated[
    int | None, typer.Option(min=1, metavar="B_MAX", help="Batch size at which η₀ and the betas hold.")
]
Warmup = Annotated[str, typer.Option(metavar="LIST", help="Linear warm-ups in samples; 0 is none.")]
Grow = Annotated[
    str | None,
    typer.Option(
        metavar="LIST",
        help="Grow in: no update is larger than this part of what was seen; 0.1 is usual, 0 is none. By default none; "
        "for gpt2 invariant Adam by 0.1.",
    ),
]
Order = Annotated[
    str,
    typer.Option(
        metavar="LIST",
        help="Orders of micro-batches inside each block of B_MAX samples; 0 is the usual. Others, as 1,2, are runs at "
        "B = M for the order floor.",
    ),
]
Workers = Annotated[int, typer.Option(min=1, metavar="N", help="Processes.", rich_help_panel=HOW)]
Lanes = Annotated[
    int | None,
    typer.Option(
        min=1, metavar="N", help="Runs at once in a process; by default 4 on a GPU, 1 elsewhere.", rich_help_panel=HOW
    ),
]
Shard = Annotated[
    str, typer.Option(metavar="I/N", help="Make the I-th of N parts, about equal in work.", rich_help_panel=HOW)
]
Budget = Annotated[
    float | None,
    typer.Option(min=0, metavar="SECONDS", help="Begin no run that would end after so long.", rich_help_panel=HOW),
]
SquaresBy = Annotated[
    SquareMethod,
    typer.Option(help="One backward for each micro-batch of an update, or one over all of them.", rich_help_panel=HOW),
]
Graphs = Annotated[bool, typer.Option("--graphs/--no-graphs", help="Make updates CUDA graphs.", rich_help_panel=HOW)]
Compiled = Annotated[
    bool,
    typer.Option(
        "--compile/--no-compile",
        help="Compile models: half a minute or more per batch size, then fewer kernels.",
        rich_help_panel=HOW,
    ),
]
DataPath = Annotated[
    Path | None,
    typer.Option(
        "--data",
        metavar="PATH",
        help="Where the dataset is, as data --path takes it; for gpt any text, for gpt2 any text, folder of texts, or "
        "cached tokens of one.",
        rich_help_panel=HOW,
    ),
]
Yes = Annotated[
    bool,
    typer.Option("--yes", "-y", help="Download a dataset without asking, also where no GPU is.", rich_help_panel=HOW),
]
Out = Annotated[
    Path, typer.Option(metavar="FOLDER", help="For all grids; each has a folder in it.", rich_help_panel=RESULT)
]
Figures = Annotated[
    bool, typer.Option("--figures/--no-figures", help="Draw the figures and the page.", rich_help_panel=RESULT)
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run", help="Print the grid, its cost and how to run it on --gpus, and end.", rich_help_panel=RESULT
    ),
]
Gpus = Annotated[
    int, typer.Option(min=1, metavar="N", help="GPUs that the dry run's commands are for.", rich_help_panel=RESULT)
]


def reproduce(
    model: ModelName,
    preset: PresetName = Preset.short,
    grid: GridName = Comparison.curves,
    epochs: Epochs = None,
    images: Images = None,
    lrs: Rates = None,
    batch_sizes: Sizes = None,
    seeds: Seeds = None,
    algorithms: Algorithms = None,
    micro_batch: MicroBatch = None,
    max_batch: MaxBatch = None,
    warmup: Warmup = "0",
    grow: Grow = None,
    order: Order = "0",
    workers: Workers = 1,
    lanes: Lanes = None,
    shard: Shard = "1/1",
    budget: Budget = None,
    engine: SquaresBy = SquareMethod.one_pass,
    graphs: Graphs = True,
    compiled: Compiled = False,
    precision: InPrecision = None,
    device: Where = None,
    path: DataPath = None,
    yes: Yes = False,
    out: Out = Path("runs"),
    figures: Figures = True,
    dry_run: DryRun = False,
    gpus: Gpus = 8,
    as_json: Json = False,
) -> None:
    """Train a grid of algorithms, batch sizes, learning rates and seeds, as in the paper.

    Every run sees the same samples, augmented alike, in the same order. Each
    finished run is a file: stopped and started again, the command goes on, also
    on another machine that shares the folder. The sharpest comparisons come
    first.

    Does everything work? In small, on a CPU, in seconds:
    [cyan]invariant-adam reproduce resnet-bn --preset smoke[/cyan]

    What the paper's grid costs, and how to run it on 8 GPUs:
    [cyan]invariant-adam reproduce vit --preset paper --dry-run[/cyan]
    """
    from ..grids import grid as grids
    from ..grids import store
    from ..results.curves import load
    from ..training.runs import RECIPES

    where = _where(device, preset, dry_run)
    with _refusals(out, path):
        if not out.is_dir() and (out.exists() or out.is_symlink()):
            raise NotADirectoryError(f"{out} is a file")
        choice = grids.Choice(
            epochs,
            images,
            numbers("--lrs", lrs, float),
            numbers("--batch-sizes", batch_sizes, int),
            numbers("--seeds", seeds, int),
            None if algorithms is None else grids.read_algorithms(algorithms, grid.value),
            micro_batch,
            max_batch,
            numbers("--warmup", warmup, int) or (),
            numbers("--grow", grow, float),
            numbers("--order", order, int) or (),
        )
        plan = grids.plan(model.value, preset.value, grid.value, choice)
        digest = _digest(plan, path)
        mine = grids.shard(plan.runs, *_shard(shard))
    setup = store.Setup(
        out,
        plan.name,
        where,
        digest,
        plan.small,
        path,
        engine.value,
        graphs,
        compiled,
        lanes or (4 if where == "cuda" and not RECIPES[model.value].most else 1),
        workers,
        precision_of(precision, where),
        None if budget is None else time.time() + budget,
        importlib.util.find_spec("tensorboard") is not None,
        plan.made_up,
    )
    if dry_run:
        dry_run_of.show(plan, setup, gpus, device is Device.cpu, as_json)
        return
    lines = _begin(plan, mine, setup, shard, no_gpu=device is None and where == "cpu")
    if lines.done < len(mine) and not yes:
        _ask_to_download(plan, setup)
    with _refusals(out, path), _gathering(plan, setup, lines):
        _make(plan, mine, setup, lines)
        result = store.gather(plan, setup, _command())
        made = load(setup.folder) if figures and result["finished"] else None
        written = draw(made, setup.folder / "figures") if made is not None else []
    if as_json:
        print_json(result)
    else:
        _print(result, made, setup)
    if written:
        say(f"drew {len(written)} files into {setup.folder / 'figures'}; open report.html there in a browser")
    raise typer.Exit(1 if lines.failed else 0)


def _where(device: Device | None, preset: Preset, dry_run: bool) -> str:
    """Return the device: a dry run is for GPUs that need not be here, unless it is of small models."""
    if dry_run and (device or preset is not Preset.smoke):
        return (device or Device.cuda).value
    return device_of(device)


def _digest(plan: Grid, path: Path | None) -> str:
    """Return the SHA-256 of what a grid trains on; refuse a `--data` that it would not use."""
    from ..grids.store import digest
    from ..training.data import DataError

    if plan.made_up and path is not None:
        raise DataError("--preset smoke trains on made-up data; leave it out, or choose another preset")
    return digest(plan.model, plan.made_up, path)


def _shard(text: str) -> tuple[int, int]:
    """Read `--shard`: which part, of how many."""
    part, slash, parts = text.partition("/")
    if not slash or not part.isdecimal() or not parts.isdecimal():
        raise ValueError(f"--shard must be I/N with I from 1 to N, got {text!r}")
    return int(part), int(parts)


def _begin(plan: Grid, mine: list[Run], setup: Setup, shard: str, *, no_gpu: bool) -> _Lines:
    """Say what there is to know before the work begins; return who tells of it."""
    if not setup.tensorboard:
        remedy = "pip install 'invariant-adam[tensorboard]'"
        stderr.print(f"TensorBoard is not installed, so that no logs are written for it: {remedy}", markup=False)
    if importlib.util.find_spec("pyarrow") is None:
        remedy = "pip install 'invariant-adam[parquet]'"
        stderr.print(f"pyarrow is not installed, so that no results.parquet is written: {remedy}", markup=False)
    lines = _Lines(mine, setup)
    if plan.made_up:
        say(
            "note: --preset smoke only tests that everything works: small models, made-up data, numbers without meaning"
        )
    if not mine:
        say(f"note: --shard {shard} is empty, as the grid has {count(len(plan.runs), 'run')}")
    if no_gpu and not plan.small and lines.done < len(mine):
        say("note: there is no GPU here, and on a CPU a grid of this size may take days; --preset smoke takes seconds")
    return lines


def _ask_to_download(plan: Grid, setup: Setup) -> None:
    """Ask before a dataset is fetched for a training that a CPU may never end."""
    from ..training.data import at_hand
    from ..training.runs import RECIPES

    dataset = RECIPES[plan.model].dataset
    if setup.device != "cpu" or plan.small or setup.path is not None or at_hand(dataset):
        return
    what = f"{plan.name} trains on {dataset}, which is not on this machine, and runs on the CPU"
    if not sys.stdin.isatty():
        fail(f"{what}: --yes downloads it all the same, --data names its place, --preset smoke needs no data")
    if not typer.confirm(f"{what}. Download it?", err=True):
        stop("; nothing was downloaded.")


def _make(plan: Grid, mine: list[Run], setup: Setup, lines: _Lines) -> None:
    """Make the runs of this command that are not finished."""
    from ..grids.workers import make, prepare

    found = prepare(plan, setup, say) if lines.done < len(mine) else None
    setup.folder.mkdir(parents=True, exist_ok=True)  # an --out that cannot be written is found before hours of work
    with lines.progress:
        make(mine, setup, lines.tell, found)
    lines.sum_up()


@contextmanager
def _gathering(plan: Grid, setup: Setup, lines: _Lines) -> Iterator[None]:
    """Gather the finished runs also where the work is stopped or fails, then say so and end."""
    from ..grids.store import gather
    from ..training.data import DataError

    try:
        yield
    except DataError:  # no run was begun
        raise
    except (KeyboardInterrupt, RuntimeError) as error:
        if setup.folder.exists():
            gather(plan, setup, _command())
        if isinstance(error, KeyboardInterrupt):
            stop(f". {lines.done} of {lines.total} runs are kept; the same command goes on with the rest.")
        fail(error)


@contextmanager
def _refusals(out: Path, path: Path | None) -> Iterator[None]:
    """Say what is refused in the words of the command line, and end."""
    from ..training.data import DataError

    try:
        yield
    except ValueError as error:
        fail(_in_options(error))
    except DataError as error:
        fail(f"--data: {error}" if path else error)
    except OSError as error:
        fail_to_write(out, error, "folder")


def _print(result: dict[str, Any], made: Results | None, setup: Setup) -> None:
    """Print the spreads of what was drawn, and how much of the grid is finished."""
    if made is not None:
        print_spreads(made)
    finished = f"{result['finished']} of {result['runs']} runs of {setup.grid} are finished"
    files = f"{setup.folder / 'results.csv'} and grid.json"
    stdout.print(f"{finished}: {files}", markup=False, soft_wrap=True)


def _command() -> str:
    return " ".join(["invariant-adam", *sys.argv[1:]])


OPTIONS = {
    "lr0": "--lrs",
    "seed": "--seeds",
    "samples": "--images",
    "warmup_samples": "--warmup",
    "grow": "--grow",
    "order": "--order",
    "orders": "--order",
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
        """Count the runs that the budget was too small for, and name the first."""
        if self.skipped:
            runs = count(len(self.skipped), "run")
            say(f"--budget was too small for {runs}, first {self.skipped[0]}; the same command goes on with the rest")

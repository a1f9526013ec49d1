"""The `invariant-adam` command: arguments in, tables out. The work is done in `lab`.

`--json` gives stdout to the result alone; progress and remarks go to stderr.
"""

from __future__ import annotations

import enum
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from . import __version__

if TYPE_CHECKING:
    from .lab.demo import Run
    from .lab.plan import Plan
    from .scaling import Hyperparameters

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
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


bench_app = typer.Typer(no_args_is_help=True, help="Measure speed and memory on this machine.")
app.add_typer(bench_app, name="bench")


@bench_app.command("one-pass")
def bench_one_pass(
    rounds: Annotated[int, typer.Option(min=1, help="Timed rounds per cell; the median counts.")] = 11,
    nets: Annotated[str, typer.Option(help="Which nets, with commas.")] = "mlp,cnn,gpt",
    memory: Annotated[bool, typer.Option(help="Also measure peak memory, each cell in a fresh process.")] = True,
    out: Annotated[Path, typer.Option(help="Where the result goes.")] = Path("runs/bench/one_pass_cpu.json"),
    as_json: Json = False,
) -> None:
    """Compare one pass with the loop, BackPACK, Opacus and vmap(grad) on the CPU.

    Three small nets, M = 1, 4, 16: time over a plain forward and backward, growth of the peak memory, and whether the
    squares equal the loop's. Rivals that are not installed are left out.

    Example: [cyan]invariant-adam bench one-pass --nets mlp --rounds 5[/cyan]
    """
    from .lab import bench_one_pass as bench
    from .lab import record

    chosen = tuple(nets.replace(",", " ").split())
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

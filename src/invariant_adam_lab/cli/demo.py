"""The command `demo`: both optimizers at several batch sizes, on a laptop."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import TextColumn

from .console import fail, fail_to_write, new_table, print_json, stdout, stop, time_bar, wrote
from .options import Json, numbers

if TYPE_CHECKING:
    from ..demo import DemoRun


class StandardRule(str, enum.Enum):
    """What `demo` does to standard Adam's learning rate."""

    square_root = "square_root"
    linear = "linear"


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
    grow: Annotated[
        bool, typer.Option("--grow/--no-grow", help="Whether invariant Adam's first updates are small ones that grow.")
    ] = True,
    out: Annotated[Path, typer.Option(help="Folder for the figure, the page and the finished runs.")] = Path(
        "runs/demo"
    ),
    as_json: Json = False,
) -> None:
    """Train a small CNN at five batch sizes with both optimizers and compare.

    Takes a minute or two on a laptop. Both optimizers have the same hyperparameters at the smallest batch size, where
    they are the same algorithm. The order floor shows what the order of the samples does by itself. Writes a
    figure (PNG, SVG), an HTML page that needs no network, and the numbers. Stopped and started again with the same
    settings, it keeps the runs that were finished.

    Example: [cyan]invariant-adam demo --batch-sizes 4,16,64 --lr 1e-4 --out runs/small[/cyan]
    """
    sizes = numbers("--batch-sizes", batch_sizes, int) or ()
    from .. import demo_report as report
    from ..demo import DivergedError, Settings, all_jobs, check
    from ..demo import demo as train_all

    try:
        settings = check(Settings(sizes, lr, epochs, seed, standard_rule.value, grow))
    except ValueError as error:
        fail(error)
    bars = _Bars(runs=len(all_jobs(settings)))
    try:
        with bars.progress:
            result = train_all(settings, out, bars)
        written = report.write_report(result, out)
    except KeyboardInterrupt:
        stop(f". {bars.done} of {bars.runs} runs are kept; the same command resumes with the rest.")
    except DivergedError as error:
        fail(error)
    except OSError as error:
        fail_to_write(out, error, "folder")
    if as_json:
        print_json(result)
    else:
        _print_demo(result)
    wrote(written)


class _Bars:
    """Draw the demo's progress: one bar over all the work, one line per finished run."""

    def __init__(self, runs: int) -> None:
        self.runs, self.done = runs, 0
        self.progress = time_bar(TextColumn("{task.percentage:.0f} %,"))

    def begin(self, work: int) -> None:
        self.task = self.progress.add_task("training", total=work)

    def advance(self, optimizer: str, batch: int, work: int) -> None:
        self.progress.update(self.task, advance=work, description=f"{optimizer} Adam, B = {batch}")

    def finish(self, run: DemoRun, kept: bool) -> None:
        self.done += 1
        how = "kept from before" if kept else f"{run.seconds:.1f} s"
        what = f"{run.optimizer} Adam, B = {run.batch_size}" + ", another order" * bool(run.order)
        self.progress.console.print(
            f"[{self.done}/{self.runs}] {what}: training loss {run.losses[-1]:.4f} ({how})",
            markup=False,
        )


def _print_demo(result: dict[str, Any]) -> None:
    from ..demo_report import verdict

    table = new_table()
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
    stdout.print(f"  {'order floor':<15} {result['order_floor']:.5f}")
    stdout.print(f"[bold]Invariant Adam's is {verdict(result)}.[/bold]")

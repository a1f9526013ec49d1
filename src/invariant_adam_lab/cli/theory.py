"""What the theory says: `verify` checks it, `scale` applies it."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from .console import fail, new_table, print_json, stdout
from .options import Json, numbers

if TYPE_CHECKING:
    from ..planner import Plan


class Algorithm(str, enum.Enum):
    """What `verify` puts to the test."""

    invariant = "invariant"
    standard = "standard"


def verify(
    kappa: Annotated[int, typer.Option(min=2, help="Micro-batches in one update.")] = 4,
    against: Annotated[
        int | None,
        typer.Option(
            min=1, help="Theorem 2's other number of them; by default half as much again.", show_default=False
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**31 - 1, help="Seed of the data and of the starting weights.")] = 0,
    algorithm: Annotated[
        Algorithm, typer.Option(help='What to test; "standard" (Adam) shows what a failure looks like.')
    ] = Algorithm.invariant,
    as_json: Json = False,
) -> None:
    """Check the paper's theorems numerically, in float64.

    Theorem 1: κ updates of Micro Adam against one of invariant Adam. Theorem 2: invariant Adam at κ against invariant
    Adam at another κ. Both from one state, over the same samples, on a tanh network with noisy data. The difference of
    the two changes of the state, over δ, must vanish with order 1 as the step sizes, all ∝ δ, shrink. Exit code 1 when
    a fitted order is below 0.9.

    Examples: [cyan]invariant-adam verify --kappa 16[/cyan]; [cyan]invariant-adam verify --algorithm standard[/cyan]
    """
    from ..verify import other_kappa, report

    try:
        result = report(algorithm.value, kappa=kappa, against=against or other_kappa(kappa), seed=seed)
    except ValueError as error:
        fail(f"--{error}")
    if as_json:
        print_json(result)
    else:
        _print_claims(result)
    raise typer.Exit(0 if result["passed"] else 1)


def _print_claims(result: dict[str, Any]) -> None:
    from ..verify import FIRST, SECOND, WARM_UP

    kappa, name = result["kappa"], f"{result['algorithm']} Adam"
    statements = {
        WARM_UP: f"{kappa} steps of SGD against one with {kappa} times the learning rate",
        FIRST: f"{kappa} updates of Micro Adam against one update of {name}",
        SECOND: f"{name} at κ′ = {kappa} against {name} at κ″ = {result['against']}",
    }
    deltas = result["deltas"]
    shown = [deltas[i] for i in (0, 5, 11)]
    for theorem, statement in statements.items():
        stdout.print(f"[bold]{theorem}[/bold]: {statement}")
        table = new_table()
        for head in ("rule", "debiased", ""):
            table.add_column(head, no_wrap=True)
        for delta in shown:
            table.add_column(f"δ = {_power(delta)}", justify="right", no_wrap=True)
        table.add_column("order", justify="right", no_wrap=True)
        table.add_column("", no_wrap=True)
        before = None
        for claim in (claim for claim in result["claims"] if claim["theorem"] == theorem):
            group = (claim["rule"], "" if theorem == WARM_UP else "yes" if claim["debiased"] else "no")
            table.add_row(
                *(group if group != before else ("", "")),
                claim["quantity"],
                *(f"{claim['differences'][deltas.index(delta)]:.1e}" for delta in shown),
                f"{claim['order']:.3f}",
                "[green]holds[/green]" if claim["holds"] else "[bold red]fails[/bold red]",
            )
            before = group
        stdout.print(table)
    first, last = result["fitted_over"]
    stdout.print(
        "Under δ: the difference of the two changes of the state, over δ. Order: its power of δ, fitted over "
        f"δ = {_power(first)} … {_power(last)}; 1 by theory, at least {result['threshold']} to pass."
    )
    failed, total = sum(not claim["holds"] for claim in result["claims"]), len(result["claims"])
    stdout.print(
        f"[bold green]All {total} claims hold.[/bold green]"
        if result["passed"]
        else f"[bold red]{failed} of {total} claims fail.[/bold red]"
    )


def _power(delta: float) -> str:
    """2.0**-12 as 2⁻¹²."""
    exponent = len(bin(round(1 / delta))) - 3
    return "2⁻" + str(exponent).translate(str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹"))


class RuleName(str, enum.Enum):
    """The rules for Adam, by their names in `scaling`."""

    exponential = "exponential"
    linear = "linear"
    long_momentum = "long_momentum"
    square_root = "square_root"


def scale(
    lr: Annotated[float | None, typer.Option(help="Learning rate per update, as tuned.")] = None,
    from_batch: Annotated[int | None, typer.Option("--from", help="Batch size it was tuned at, in samples.")] = None,
    to_batches: Annotated[
        str | None, typer.Option("--to", help="Batch sizes to train at, with commas; by default 1 to 32 times --from.")
    ] = None,
    micro_batch: Annotated[
        int | None, typer.Option(help="Samples whose gradient is squared; by default --from.")
    ] = None,
    betas: Annotated[
        tuple[float, float] | None,
        typer.Option(help="EMA coefficients per update, as tuned: two numbers, no comma.", show_default="0.9 0.999"),
    ] = None,
    weight_decay: Annotated[float | None, typer.Option(help="Decoupled weight decay, as tuned.")] = None,
    samples: Annotated[int | None, typer.Option(help="Samples of the whole run.")] = None,
    warmup: Annotated[int | None, typer.Option(help="Samples of the warm-up.")] = None,
    samples_per_second: Annotated[float | None, typer.Option(help="Its speed at --from.")] = None,
    noise_scale: Annotated[float | None, typer.Option(help="Its noise scale in samples, by opt.noise_scale().")] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            "--from-config", metavar="FILE", help="A trainer's arguments as JSON or YAML; options win over it."
        ),
    ] = None,
    rule: Annotated[
        RuleName, typer.Option(help="Scaling rule; square_root is for standard Adam.")
    ] = RuleName.exponential,
    grow: Annotated[
        bool, typer.Option("--grow/--no-grow", help="Whether the first updates are small and grow.")
    ] = True,
    as_json: Json = False,
) -> None:
    """Plan a tuned run at other batch sizes: hyperparameters, updates, time.

    For each batch size the learning rate and betas of an update, its share in the moments, the number of updates, and
    where a larger batch stops paying. The optimizer scales by itself; these are the values that it uses.

    Example: [cyan]invariant-adam scale --lr 3e-4 --betas 0.9 0.95 --from 512 --to 1024,2048 --samples 1000000[/cyan]

    A Trainer's arguments, by json.dump(args.to_dict(), file):
    [cyan]invariant-adam scale --from-config args.json --to 2048[/cyan]
    """
    from ..planner import TunedRun, plan, read_config

    given = {
        "lr": lr, "betas": betas, "weight_decay": weight_decay, "batch": from_batch, "micro_batch": micro_batch,
        "samples": samples, "warmup": warmup, "samples_per_second": samples_per_second, "noise_scale": noise_scale,
    }  # fmt: skip
    try:
        known = read_config(config) if config else {}
        known |= {name: value for name, value in given.items() if value is not None}
        for option, name in (("--lr", "lr"), ("--from", "batch")):
            if name not in known:
                where = f"; {config} does not say it" if config else ""
                raise ValueError(f"{option} is needed{where}: the value at which the run was tuned")
        result = plan(TunedRun(**known), numbers("--to", to_batches, int) or (), rule=rule.value, grow=grow)
    except ValueError as error:
        fail(error)
    if as_json:
        print_json(result.asdict())
    else:
        _print_plan(result)


def _print_plan(p: Plan) -> None:
    tuned, rows = p.tuned, p.rows
    stdout.print(
        f"[bold]Tuned at B = {tuned.batch:,}[/bold]: lr {tuned.lr:g}, betas {tuned.betas[0]:g} {tuned.betas[1]:g}, "
        f"weight decay {tuned.weight_decay:g}. Micro-batch M = {tuned.micro_batch:,}, rule {p.rule}."
    )
    decays = {f"{row.scaled.weight_decay:.3g}" for row in rows} != {f"{tuned.weight_decay:.3g}"}
    table = new_table()
    heads = ("B", "κ", "lr", "β₁", "β₂", *(["decay"] if decays else []), "share of m", "share of v")
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        h = row.scaled
        values = (h.lr, *h.betas, *([h.weight_decay] if decays else []))
        shares = (f"{share:.1%}" for share in row.shares)
        table.add_row(f"{row.batch:,}", f"{row.kappa:,}", *(f"{value:.4g}" for value in values), *shares)
    stdout.print(table)
    columns: dict[str, list[str]] = {
        "updates": ["" if row.updates is None else f"{row.updates:,}" for row in rows],
        "by growing in": [f"+{row.growth_updates}" if row.growth_updates else "" for row in rows],
        "of warm-up": ["" if row.warmup_updates is None else f"{row.warmup_updates:,}" for row in rows],
        "samples needed": ["" if row.needs is None else f"× {row.needs:.2f}" for row in rows],
        "hours": ["" if row.hours is None else f"{row.hours:,.2f}" for row in rows],
    }
    columns = {head: cells for head, cells in columns.items() if any(cells)}
    if columns:
        table = new_table()
        for head in ("B", *columns):
            table.add_column(head, justify="right", no_wrap=True)
        for i, row in enumerate(rows):
            table.add_row(f"{row.batch:,}", *(cells[i] for cells in columns.values()))
        stdout.print(table)
    for warning in p.warnings:
        stdout.print("[bold yellow]warning:[/bold yellow] " + escape(warning))
    for note in p.notes:
        stdout.print("note: " + note, markup=False)

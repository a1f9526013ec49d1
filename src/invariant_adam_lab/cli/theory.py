"""What the theory says: `verify` checks it, `scale` applies it."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from .console import fail, new_table, print_json, stdout
from .options import Json

if TYPE_CHECKING:
    from invariant_adam.scaling import Hyperparameters

    from ..plan import Plan


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
    square_root = "square_root"


def scale(
    lr: Annotated[float, typer.Option(help="Learning rate per update, as tuned.")],
    from_batch: Annotated[int, typer.Option("--from", help="Batch size it was tuned at, in samples.")],
    to_batch: Annotated[int, typer.Option("--to", help="Batch size to train at, in samples.")],
    micro_batch: Annotated[int, typer.Option(help="Samples whose gradient is squared; must divide --to.")],
    betas: Annotated[tuple[float, float], typer.Option(help="EMA coefficients per update, as tuned.")] = (0.9, 0.999),
    weight_decay: Annotated[float, typer.Option(help="Decoupled weight decay, as tuned.")] = 0.0,
    rule: Annotated[
        RuleName, typer.Option(help="Scaling rule; square_root is for standard Adam.")
    ] = RuleName.exponential,
    as_json: Json = False,
) -> None:
    """Give the hyperparameters at another batch size.

    Example: [cyan]invariant-adam scale --lr 3e-4 --betas 0.9 0.95 --from 512 --to 4096 --micro-batch 32[/cyan]
    """
    from ..plan import plan

    try:
        result = plan(
            lr, betas, weight_decay, tuned_batch=from_batch, batch=to_batch, micro_batch=micro_batch, rule=rule.value
        )
    except ValueError as error:
        fail(error)
    if as_json:
        print_json(result.asdict())
    else:
        _print_plan(result)


def _print_plan(p: Plan) -> None:
    stdout.print(
        f"B = {p.tuned_batch:,} → {p.batch:,} samples per update: ρ = {p.rho:g}, "
        f"κ = {p.kappa:,} micro-batches of {p.micro_batch:,}\n"
    )
    table = new_table()
    table.add_column("")
    table.add_column("tuned", justify="right")
    table.add_column(f"[bold]{p.rule}[/bold]", justify="right", style="bold")
    for name in p.others:
        table.add_column(name, justify="right", style="dim")
    columns: list[Hyperparameters | str] = [p.tuned, p.scaled, *p.others.values()]
    for i, name in enumerate(("learning rate", "β₁", "β₂", "weight decay")):
        numbers = [None if isinstance(h, str) else (h.lr, *h.betas, h.weight_decay)[i] for h in columns]
        table.add_row(name, *("not valid" if number is None else f"{number:.6g}" for number in numbers))
    stdout.print(table)
    lives = new_table()
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

"""The `invariant-adam` command: arguments in, tables out. The work is done in the modules beside."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Annotated

import typer

from . import bench, check, demo, experiments, reproduce, scale_up, theory
from .console import help_of, stdout

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
commands = (
    theory.verify,
    theory.scale,
    check.check,
    demo.demo,
    experiments.data,
    experiments.figures,
    reproduce.reproduce,
    scale_up.scale_up,
)
for command in commands:  # in the order of the help text
    app.command(help=help_of(command))(command)
app.add_typer(bench.app, name="bench")


def _show_version(wanted: bool) -> None:
    if wanted:
        stdout.print(f"invariant-adam {library_version()}")
        raise typer.Exit


def library_version() -> str:
    """Read the library's version from its source: importing the library would import torch, which takes seconds."""
    spec = importlib.util.find_spec("invariant_adam")
    assert spec is not None
    assert spec.origin is not None
    found = re.search(r'^__version__ = "(.*)"$', Path(spec.origin).read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None
    return found[1]


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
    [cyan]invariant-adam scale --lr 3e-4 --betas 0.9 0.95 --from 512 --to 1024,2048[/cyan]
    """

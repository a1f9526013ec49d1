"""What all commands share: errors, JSON, tables, progress, files written.

`--json` gives stdout to the result alone; progress and remarks go to stderr.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

stdout, stderr = Console(highlight=False), Console(stderr=True, highlight=False)


def fail(error: object) -> NoReturn:
    """Say what is wrong and end with exit code 2."""
    stderr.print(f"[bold red]error:[/bold red] {escape(str(error))}", soft_wrap=True)
    raise typer.Exit(2)


def fail_to_write(out: Path, error: OSError, kind: str, option: str = "--out") -> NoReturn:
    """Fail because the value of an option, a "file" or a "folder", cannot be written."""
    fail(f"cannot write to {option} {out}: {error}; choose another {kind}")


def stop(rest: str) -> NoReturn:
    """End as Ctrl-C asked, with exit code 130; `rest` says what is kept."""
    stderr.print(f"\nStopped{rest}")
    raise typer.Exit(130) from None


def wrote(paths: Iterable[Path]) -> None:
    """Name the files that were written."""
    for path in paths:
        stderr.print(f"wrote {escape(str(path))}", soft_wrap=True)


def print_json(result: dict[str, Any]) -> None:
    """Print a result as JSON to stdout."""
    sys.stdout.write(json.dumps(result, indent=1) + "\n")


def help_of(command: Callable[..., object]) -> str:
    """Give the help text of a command: its docstring, whose paragraphs the terminal breaks where it must."""
    paragraphs = inspect.cleandoc(command.__doc__ or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def new_table(title: str | None = None) -> Table:
    """Give an empty table in the look of all commands."""
    return Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")


def time_bar(*counts: ProgressColumn) -> Progress:
    """Give a bar with what is being done, `counts` and the time left; it disappears when the work is done."""
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        *counts,
        TimeRemainingColumn(),
        TextColumn("left"),
        console=stderr,
        transient=True,
    )


def say(text: str) -> None:
    """Tell what is being done."""
    stderr.print(text, markup=False, soft_wrap=True)


def count(number: int, what: str) -> str:
    """Write a number of things.

    >>> count(1, "run"), count(1_000, "run")
    ('1 run', '1,000 runs')
    """
    return f"{number:,} {what}{'s' * (number != 1)}"

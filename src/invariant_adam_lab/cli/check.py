"""The command `check`: is the user's own run invariant?"""

from __future__ import annotations

import enum
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from .console import fail, fail_to_write, print_json, stdout, stop, time_bar, wrote
from .options import Json, numbers


class Coupled(str, enum.Enum):
    """What may see each other."""

    micro_batch = "micro-batch"


def check(
    function: Annotated[str, typer.Argument(help="module:function, which gives what is checked.")],
    batch_sizes: Annotated[str | None, typer.Option(help="Batch sizes, with commas.")] = None,
    micro_batch: Annotated[int | None, typer.Option(help="Samples whose gradient is squared.")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate at the tuned batch size.")] = None,
    samples: Annotated[int | None, typer.Option(help="Samples that each run sees.")] = None,
    grow: Annotated[
        bool | None, typer.Option("--grow/--no-grow", help="Make the first updates small ones that grow.")
    ] = None,
    coupled: Annotated[
        Coupled | None, typer.Option(help="Samples of one micro-batch are meant to see each other.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="Where to train, such as cuda.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of weights and order.")] = None,
    plot: Annotated[Path | None, typer.Option(help="File for a figure of the curves.")] = None,
    as_json: Json = False,
) -> None:
    """Check that the batch size does not matter for your own model.

    The function takes no arguments. It returns those of ia.invariance_check,
    as a dict, or as a tuple (make_model, loss_fn, data) with a dict of others
    behind. Options here go before them. Exit code 1 when the run is not
    invariant; what parts it is named.

    Example: [cyan]invariant-adam check my_run:setup --lr 1e-3 --batch-sizes 8,32,128[/cyan]
    """
    sizes = numbers("--batch-sizes", batch_sizes, int)
    given = {
        "batch_sizes": sizes, "micro_batch_size": micro_batch, "lr": lr, "samples": samples, "grow": grow,
        "coupled": coupled.value if coupled else None, "device": device, "seed": seed,
    }  # fmt: skip
    arguments = {**_arguments(function), **{name: value for name, value in given.items() if value is not None}}
    if plot is not None and not plot.parent.is_dir():
        fail(f"--plot {plot}: there is no folder {plot.parent}; make it first")
    import torch

    from invariant_adam import invariance_check

    try:
        torch.empty(0, device=device)
    except (AssertionError, NotImplementedError, RuntimeError) as error:
        fail(f"--device {device}: {str(error).splitlines()[0]}; use --device cpu")
    missing = [name for name in ("make_model", "loss_fn", "data", "batch_sizes", "lr") if name not in arguments]
    if missing:
        fail(f"{function} gives no {', '.join(missing)}; return them from it, or give the options of that name")
    bar = time_bar()
    task = bar.add_task("looking at the model", total=None)

    def progress(done: int, total: int, what: str) -> None:
        bar.update(task, completed=done, total=total, description=what)

    try:
        with bar:
            result = invariance_check(**arguments, progress=progress)
    except KeyboardInterrupt:
        stop(". Nothing is kept.")
    except (TypeError, ValueError, RuntimeError) as error:
        fail(error)
    if as_json:
        print_json({"command": "check", "function": function, **result.asdict()})
    else:
        stdout.print(str(result), markup=False)
    if plot is not None:
        try:
            result.plot(plot)
        except (OSError, ValueError) as error:
            fail_to_write(plot, OSError(str(error)), "file", "--plot")
        wrote([plot])
    raise typer.Exit(0 if result.ok else 1)


def _called(name: str, function: Callable[[], Any]) -> Any:
    """Call the function that a user names."""
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        fail(f"{name} must take no arguments: {error}")
    except ValueError:  # a builtin, which does not tell
        pass
    return function()


def _arguments(function: str) -> dict[str, Any]:
    """Import what `module:function` names, call it, and give the arguments that it returns."""
    module, colon, name = function.partition(":")
    if not (module and colon and name):
        fail(f"{function!r} must be module:function, such as my_run:setup, where my_run.py is in this folder")
    sys.path.insert(0, "")  # as python -m has it
    try:
        imported = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0] and error.name != module:
            raise
        fail(f"there is no module {module!r}, from {Path.cwd()} or installed; name a file of this folder without .py")
    if not callable(getattr(imported, name, None)):
        fail(f"module {module!r} has no function {name!r}; name the one that returns what is checked")
    made = _called(function, getattr(imported, name))
    if isinstance(made, Mapping):
        return dict(made)
    if isinstance(made, tuple) and len(made) in (3, 4):
        others = made[3] if len(made) == 4 else {}
        return {**dict(zip(("make_model", "loss_fn", "data"), made, strict=False)), **others}
    return fail(
        f"{function} must return a dict of the arguments of ia.invariance_check, or (make_model, loss_fn, data), got "
        f"{type(made).__name__}"
    )

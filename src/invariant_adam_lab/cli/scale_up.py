"""The command `scale-up`: tuned at one micro-batch, then trained at larger batches with nothing retuned."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import MofNCompleteColumn

from .console import fail, new_table, print_json, say, stdout, stop, time_bar, wrote
from .options import Json


class Preset(str, enum.Enum):
    """How much `scale-up` trains, on one core: half a minute, a quarter of an hour, and three seeds of that."""

    smoke = "smoke"
    short = "short"
    full = "full"


def scale_up(
    preset: Annotated[Preset, typer.Option(help="How much is trained.")] = Preset.smoke,
    data: Annotated[Path | None, typer.Option(help="A text; by default tiny Shakespeare, found or fetched.")] = None,
    out: Annotated[Path, typer.Option(help="File of the results, a row for each run.")] = Path("runs/scale_up.json"),
    as_json: Json = False,
) -> None:
    """Tune at one batch size, train at 4 and 16 times that, change nothing else.

    A small GPT over characters on one thread of a CPU: the loss on held-out
    text after the same samples, by the rules of InvariantAdam, with and without
    growing in, and by AdamW with its learning rate times √B, times B and
    unchanged. Stopped and started again, it goes on.

    Example: [cyan]invariant-adam scale-up --preset short[/cyan]
    """
    import torch

    from .. import scale_up as experiment
    from ..training import data as lab_data

    chosen = experiment.PRESETS[preset.value]
    runs = list(experiment.cases(chosen))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        text = lab_data.text(data) if data else lab_data.tinyshakespeare(tell=say)[0]
        with time_bar(MofNCompleteColumn()) as progress:
            task = progress.add_task("runs", total=len(runs))

            def on_run(row: dict[str, Any]) -> None:
                progress.update(task, advance=1, description=f"{row['method']}, B = {row['batch']}, lr {row['lr']:g}")

            command = f"invariant-adam scale-up --preset {preset.value}"
            result = experiment.measure(chosen, out, text, command, on_run)
    except (lab_data.DataError, ValueError, OSError) as error:
        fail(error)
    except KeyboardInterrupt:
        stop(f". Finished runs are kept in {out}; the same command goes on.")
    finally:
        torch.set_num_threads(threads)
    if as_json:
        print_json(result)
    else:
        table = new_table("Loss on held-out text at the end: at B₀, and minus that at larger batches")
        head, *lines = experiment.table(result)
        for name in head:
            table.add_column(name, justify="right" if name else "left")
        for line in lines:
            table.add_row(*line)
        stdout.print(table)
    wrote([out])

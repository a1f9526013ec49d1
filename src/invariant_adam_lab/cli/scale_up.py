"""The command `scale-up`: tuned at one micro-batch, then trained at larger batches with nothing retuned."""

from __future__ import annotations

import enum
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import MofNCompleteColumn

from .console import count, fail, new_table, print_json, say, stdout, stop, time_bar, wrote
from .options import Device, Json, device_of, numbers, precision_of, words
from .reproduce import HOW, Budget, Compiled, Lanes, Seeds, Workers

if TYPE_CHECKING:
    from ..scale_up import Case, Make, Preset


class Model(str, enum.Enum):
    """What `scale-up` trains."""

    gpt = "gpt"
    resnet_ln = "resnet-ln"
    gpt2 = "gpt2"


class Amount(str, enum.Enum):
    """How much `scale-up` trains; `gpt` on one core: half a minute, a quarter of an hour, and three seeds of that."""

    smoke = "smoke"
    short = "short"
    full = "full"


ModelName = Annotated[
    Model,
    typer.Option(
        help="gpt, a small GPT over characters, for a CPU; or for a GPU resnet-ln, ResNet-18 with layer norm on "
        "CIFAR-10, and gpt2, GPT-2 124M on a text of yours."
    ),
]
AmountName = Annotated[
    Amount,
    typer.Option(help="How much is trained. Of resnet-ln and gpt2, smoke is a small model on made-up data, a test."),
]
Rates = Annotated[str | None, typer.Option(metavar="LIST", help="Learning rates at B₀, as 1e-4,3e-4.")]
Methods = Annotated[
    str | None,
    typer.Option(
        metavar="LIST",
        help="Methods beside AdamW at B₀: exponential, linear, long_momentum, exponential:grown-in, "
        "long_momentum:grown-in, adam:sqrt, adam:linear, adam:unchanged; of gpt also power-0.0:grown-in and "
        "power-0.5:grown-in.",
    ),
]
Samples = Annotated[int | None, typer.Option(metavar="N", help="Samples of an epoch, a multiple of 16·B₀.")]
Epochs = Annotated[int | None, typer.Option(metavar="N", help="Epochs of a run; those of gpt2 share no sample.")]
WhereRun = Annotated[
    Device | None, typer.Option("--device", help="Where to run; by default gpt on the CPU, others on a GPU if any.")
]
DataPath = Annotated[
    Path | None,
    typer.Option(
        "--data",
        metavar="PATH",
        help="gpt: a text, by default tiny Shakespeare. resnet-ln: CIFAR-10, as data --path takes it, by default found "
        "or fetched. gpt2: a text, a folder of texts, or cached tokens.",
        rich_help_panel=HOW,
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="File of the results, a row for each run; runs/scale_up.json, or with _MODEL in its name."
    ),
]


def scale_up(
    model: ModelName = Model.gpt,
    preset: AmountName = Amount.smoke,
    lrs: Rates = None,
    methods: Methods = None,
    seeds: Seeds = None,
    samples: Samples = None,
    epochs: Epochs = None,
    budget: Budget = None,
    lanes: Lanes = None,
    workers: Workers = 1,
    compiled: Compiled = False,
    device: WhereRun = None,
    data: DataPath = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Tune at one batch size, train at 4 and 16 times that, change nothing else.

    The loss on held-out samples after the same samples, by the rules of
    InvariantAdam, with and without growing in, and by AdamW with its learning
    rate times √B, times B and unchanged. Stopped and started again, it goes on.
    One learning rate is finished before the next begins.

    On one thread of a CPU: [cyan]invariant-adam scale-up --preset short[/cyan]

    On a GPU, begin no run that would end after 200 seconds:
    [cyan]invariant-adam scale-up --model resnet-ln --preset short --budget 200[/cyan]
    """
    import torch

    from .. import record
    from .. import scale_up as experiment
    from ..training.data import DataError

    name, where = model.value, device_of(device or (Device.cpu if model is Model.gpt else None))
    deadline = None if budget is None else time.time() + budget
    out = out or Path(f"runs/scale_up{'' if model is Model.gpt else f'_{name}'}.json")
    lines = _Lines()
    threads = torch.get_num_threads()
    try:
        asked = None if methods is None else tuple(words(methods))
        chosen = experiment.choose(
            experiment.PRESETS[name][preset.value],
            samples=samples,
            epochs=epochs,
            lrs=numbers("--lrs", lrs, float),
            seeds=numbers("--seeds", seeds, int),
            methods=asked,
        )
        title, make = _maker(name, chosen, where, data, deadline, lanes, workers, compiled)
        if model is Model.gpt or chosen.small:
            torch.set_num_threads(1)  # layers this small are faster on one thread
        rows = record.Rows(out, _command(name, preset.value, samples, epochs), title, torch.device(where))
        with lines.progress:
            lines.begin(len(experiment.cases(chosen)))
            result = experiment.measure(chosen, rows, make, lines.tell)
    except typer.Exit:  # an option that was refused; it is a RuntimeError
        raise
    except ValueError as error:
        fail(re.sub(r"^samples\b", "--samples", str(error)))
    except DataError as error:
        fail(f"--data: {error}" if data else error)
    except (RuntimeError, OSError) as error:
        fail(error)
    except KeyboardInterrupt:
        stop(f". Finished runs are kept in {out}; the same command goes on.")
    finally:
        torch.set_num_threads(threads)
    lines.sum_up()
    if as_json:
        print_json(result)
    elif result["rows"]:
        table = new_table("Loss on held-out samples at the end: at B₀, and minus that at larger batches")
        head, *body = experiment.table(result)
        for column in head:
            table.add_column(column, justify="right" if column else "left")
        for line in body:
            table.add_row(*line)
        stdout.print(table)
    if result["rows"]:
        wrote([out])
    raise typer.Exit(1 if lines.failed else 0)


def _command(model: str, preset: str, samples: int | None, epochs: int | None) -> str:
    """Return what makes a file: without the choice of a part, because several parts may make one file."""
    given = {"--model": None if model == "gpt" else model, "--preset": preset, "--samples": samples, "--epochs": epochs}
    return " ".join(["invariant-adam scale-up", *(f"{key} {value}" for key, value in given.items() if value)])


def _maker(
    model: str,
    preset: Preset,
    where: str,
    path: Path | None,
    deadline: float | None,
    lanes: int | None,
    workers: int,
    compiled: bool,
) -> tuple[str, Make]:
    """Return the name of an experiment, which rows must share to be compared, and what makes its runs."""
    import torch

    from .. import scale_up as experiment
    from ..grids import store
    from ..training import data as lab_data
    from ..training.runs import RECIPES

    if model == "gpt":
        for option, given in (("--lanes", lanes), ("--workers", workers > 1), ("--compile", compiled)):
            if given:
                raise ValueError(f"{option} is for --model resnet-ln and gpt2; gpt makes one run after the other")
        text = lab_data.text(path) if path else lab_data.tinyshakespeare(tell=say)[0]
        return "scale-up", experiment.by_loop(text, preset, torch.device(where), deadline)
    if preset.small and path is not None:
        raise lab_data.DataError("--preset smoke trains on made-up data; leave it out, or choose another preset")
    if where == "cpu" and not preset.small:
        say("note: on a CPU a model of this size may take days; --preset smoke takes seconds")
    setup = store.Setup(
        Path(),
        "scale-up",
        where,
        store.digest(model, preset.small, path),
        preset.small,
        path,
        compiled=compiled,
        lanes=lanes or (4 if where == "cuda" and not RECIPES[model].most else 1),
        workers=workers,
        precision=precision_of(None, where),
        deadline=deadline,
        made_up=preset.small,
    )
    return f"scale-up {model}, data {setup.digest[:16]}", experiment.by_lab(model, preset, setup, say)


class _Lines:
    """Draw the progress, and keep what was not made."""

    def __init__(self) -> None:
        self.progress = time_bar(MofNCompleteColumn())
        self.failed = 0
        self.skipped: list[str] = []

    def begin(self, total: int) -> None:
        self.task = self.progress.add_task("runs", total=total)

    def tell(self, kind: str, case: Case, what: Any) -> None:
        name = f"{case.method}, B = {case.batch}, lr {case.lr:g}"
        if kind == "done":
            self.progress.update(self.task, advance=1, description=name)
        elif kind == "skipped":
            self.skipped.append(f"{name}: {what}")
        else:
            self.failed += 1
            self.progress.console.print(f"{name} failed: {what}", markup=False, soft_wrap=True)

    def sum_up(self) -> None:
        """Count the runs that the budget was too small for, and name the first."""
        if self.skipped:
            runs = count(len(self.skipped), "run")
            say(f"--budget was too small for {runs}, first {self.skipped[0]}; the same command goes on with the rest")

"""Grids of runs: which, in which order, on which machine; each finished run is a file, all of them one results.csv.

| grid | question | what is compared |
|---|---|---|
| curves | does the trajectory depend on the batch size? (the paper's figures) | invariant and standard Adam |
| rivals | what else is tried against it? | standard Adam with η ∝ B, AdamA's accumulation, a constant half-life of v |
| tuned | (a) is it as good at the best learning rate? | the same at finer learning rates, for M, 4M and 16M |
| rules | (b) linear or exponential? | both rules |
| micro | (c) what does M do? | M, 4M and 16M at two batch sizes |
| ramp | (d) is a batch that grows in mid-run the same run? | a ramp beside both its batch sizes |
| norm | (e) how much of the spread is batch norm's? | standard Adam with batch norm over B and over M samples |

Presets: "paper" is the paper's grid, "short" 10 epochs of fewer settings, "smoke" small models on made-up data. A grid
goes on where it was stopped, and takes over runs that another grid in the same folder has made.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
import multiprocessing
import queue
import shutil
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch

from . import data, figures, page, record, results, timing, train
from .results import COLUMNS
from .runs import ALGORITHMS, RULES, TASKS, Run, check
from .source import Source, load
from .train import Row

PRESETS = ("paper", "short", "smoke")
PAIR = (("invariant", "linear"), ("standard", "square_root"))
GRIDS: dict[str, tuple[tuple[str, str], ...]] = {
    "curves": PAIR,
    "rivals": (*PAIR, ("standard", "linear"), ("adama", "square_root"), ("halflife", "none")),
    "tuned": PAIR,
    "rules": (("invariant", "linear"), ("invariant", "exponential")),
    "micro": (("invariant", "linear"), ("standard", "square_root")),
    "ramp": PAIR,
    "norm": (*PAIR, ("accumulate", "square_root")),
}
MADE_UP_IMAGES = 120
SECONDS = Path(__file__).with_name("seconds.json")  # measured seconds per epoch, for estimates


class Choice(NamedTuple):
    """What the user may choose of a grid; None: as the preset has it."""

    epochs: int | None = None
    samples: int | None = None
    lrs: tuple[float, ...] | None = None
    batch_sizes: tuple[int, ...] | None = None
    seeds: tuple[int, ...] | None = None
    algorithms: tuple[tuple[str, str], ...] | None = None
    micro_batch_size: int | None = None
    max_batch_size: int | None = None
    warmup_samples: tuple[int, ...] = (0,)


class Grid(NamedTuple):
    """The runs of a grid, the sharpest comparisons first."""

    name: str
    model: str
    grid: str
    preset: str
    runs: list[Run]

    @property
    def small(self) -> bool:
        """Whether its models are small and its data made up."""
        return self.preset == "smoke"


def plan(model: str, preset: str, grid: str = "curves", choice: Choice | None = None) -> Grid:
    """Return the runs of a grid.

    >>> found = plan("vit", "short")
    >>> len(found.runs), found.runs[0].name
    (18, 'vit-invariant-linear-B400-lr0.0001-s0')
    """
    for what, value, names in (("model", model, TASKS), ("preset", preset, PRESETS), ("grid", grid, GRIDS)):
        if value not in names:
            raise ValueError(f"{what} must be one of {', '.join(names)}, got {value!r}")
    choice = choice or Choice()
    for what, value in choice._asdict().items():
        if value == ():
            raise ValueError(f"{what} must name at least one, got none")
    task, small = TASKS[model], preset == "smoke"
    M = choice.micro_batch_size or (5 if small else task.micro_batch_size)
    sizes = task.batch_sizes if preset == "paper" else (5, 10, 20) if small else task.batch_sizes[::2]
    if preset == "short" and sizes[-1] != task.batch_sizes[-1]:
        sizes = (*sizes, task.batch_sizes[-1])
    sizes = tuple(sorted(set(choice.batch_sizes or sizes)))
    largest = choice.max_batch_size or (20 if small else task.batch_sizes[-1])
    lrs = {"paper": (1e-6, 1e-5, 1e-4, 1e-3), "short": (1e-5, 1e-4, 1e-3), "smoke": (1e-3, 1e-2)}[preset]
    if grid == "tuned" and not small:
        lrs = tuple(float(f"{a}e{b}") for b in (-5, -4, -3) for a in (1, 3))
    lrs = choice.lrs or lrs
    seeds = choice.seeds or (tuple(range(3)) if preset == "paper" else (0,))
    common: dict[str, Any] = {
        "max_batch_size": largest,
        "epochs": choice.epochs or {"paper": 200, "short": 10, "smoke": 2}[preset],
        "samples": choice.samples or 0,
        "small": small,
    }
    if choice.samples and choice.samples < largest:
        raise ValueError(
            f"samples must be at least max_batch_size={largest}, the samples of an update at the largest batch size, "
            f"got {choice.samples}"
        )
    runs: dict[Run, None] = {}
    for warmup in choice.warmup_samples:
        for algorithm, rule in choice.algorithms or GRIDS[grid]:
            for micro in _micro_batch_sizes(grid, algorithm, M, largest):
                for batch, ramp in _batch_sizes(grid, algorithm, sizes, micro, micro == M):
                    for lr in lrs:
                        for seed in seeds:
                            run = Run(
                                model, algorithm, rule, batch, micro, lr0=lr, seed=seed, warmup_samples=warmup,
                                ramp=ramp, **common,
                            )  # fmt: skip
                            runs[check(run)] = None
    name = f"{model}-{grid}-{preset}"
    for letter, number in (("e", choice.epochs), ("n", choice.samples)):
        name += f"-{letter}{number}" if number else ""
    return Grid(name, model, grid, preset, sorted(runs, key=_sharpness))


def read_algorithms(text: str, grid: str) -> tuple[tuple[str, str], ...]:
    """Read algorithms with commas between them, each with its rule after a colon, or that of the grid, or its first.

    >>> read_algorithms("invariant,standard:linear", "curves")
    (('invariant', 'linear'), ('standard', 'linear'))
    """
    found = []
    for word in text.replace(",", " ").split():
        name, _, rule = word.partition(":")
        if name not in RULES:
            raise ValueError(f"algorithms must be some of {', '.join(RULES)}, got {name!r}")
        found.append((name, rule or dict(reversed(GRIDS[grid])).get(name, RULES[name][0])))
    return tuple(found)


def _micro_batch_sizes(grid: str, algorithm: str, M: int, largest: int) -> list[int]:
    if grid in ("tuned", "micro") and algorithm == "invariant":
        return [M * k for k in (1, 4, 16) if largest % (M * k) == 0]
    return [M]


def _batch_sizes(grid: str, algorithm: str, sizes: tuple[int, ...], micro: int, all_of: bool) -> list[tuple[int, str]]:
    """Return the batch sizes of an algorithm in a grid, each with its ramp: all, or those that are multiples of M."""
    if algorithm == "micro":
        return [(micro, "")]
    fitting = [size for size in sizes if all_of or size % micro == 0]
    if grid == "micro":
        fitting = [size for size in fitting if size in (sizes[-1], sizes[len(sizes) // 2])]
    if grid == "ramp":
        first, last = fitting[0], fitting[-1]
        if first == last:
            raise ValueError(f"batch_sizes must be two or more for a ramp, got {first}")
        return [(first, ""), (last, ""), (first, f"{first}-{last}")]
    return [(size, "") for size in fitting]


def _sharpness(run: Run) -> tuple[Any, ...]:
    """Where a run comes in its grid: seeds one by one; η₀ near 1e-4 first; then the batch sizes farthest apart."""
    far = -abs(math.log(run.batch_size / math.sqrt(run.max_batch_size * run.micro_batch_size)))
    far = min(far, -math.log(2)) if run.ramp else far
    return (
        run.seed,
        abs(round(math.log10(run.lr0) + 4, 3)),
        run.lr0,
        run.warmup_samples,
        round(far, 6),
        -run.batch_size,
        ALGORITHMS.index(run.algorithm),
        run.rule,
        run.micro_batch_size,
    )


def work(run: Run) -> float:
    """Return the backward passes of an epoch, what its time goes with: the unit of progress and of sharing out."""
    samples = _samples(run)
    each = (
        run.micro_batch_size
        if run.algorithm == "accumulate"
        else math.prod(run.batch_sizes) ** (1 / len(run.batch_sizes))
    )
    return samples / each + samples / 200  # the second: what a sample costs at any batch size


def _samples(run: Run) -> int:
    """The samples of an epoch, about."""
    return run.samples or _whole(run.model, run.small)


def _whole(model: str, small: bool = False) -> int:
    """The samples of a model's training set, about; the data need not be there."""
    images = TASKS[model].dataset == "cifar10"
    return (MADE_UP_IMAGES if images else 40) if small else 50_000 if images else 3_900


def shard(runs: list[Run], part: int, parts: int) -> list[Run]:
    """Return the runs of one of several machines, about equal in work, in their order.

    Args:
        runs: all.
        part: from 1.
        parts: machines.
    """
    if not 1 <= part <= parts:
        raise ValueError(f"--shard must be I/N with I from 1 to N, got {part}/{parts}")
    loads = [0.0] * parts
    mine = set()
    for run in sorted(runs, key=lambda run: -work(run) * run.epochs):
        least = loads.index(min(loads))
        loads[least] += work(run) * run.epochs
        if least == part - 1:
            mine.add(run)
    return [run for run in runs if run in mine]


# ---------------------------------------------------------------- files


class Setup(NamedTuple):
    """How a grid is run: what does not change its numbers, but the device and the data."""

    out: Path
    grid: str  # its name
    device: str
    digest: str  # of the dataset
    small: bool = False
    path: Path | None = None  # of the dataset
    engine: str = "one-pass"
    graphs: bool = True
    compiled: bool = False
    lanes: int = 1  # runs at once in a process
    workers: int = 1  # processes
    precision: str = "float32"
    deadline: float | None = None  # as `time.time` has it: no run begins that would end later
    tensorboard: bool = False

    @property
    def folder(self) -> Path:
        """Where the grid's files are."""
        return self.out / self.grid


def run_id(run: Run, setup: Setup) -> str:
    """Return the name of a run's file: readable, and with a hash of all that its numbers depend on."""
    depends = {**run._asdict(), "dataset": setup.digest, "device": setup.device, "precision": setup.precision}
    return f"{run.name}-{hashlib.sha256(json.dumps(depends, sort_keys=True).encode()).hexdigest()[:10]}"


def digest(model: str, small: bool, path: Path | None) -> str:
    """Return the SHA-256 of a model's dataset without loading it where it is known."""
    if small:
        return "made-up"
    if TASKS[model].dataset == "cifar10":
        return data.CIFAR10_DIGEST
    return data.SHAKESPEARE_DIGEST if path is None else data.text(path).digest()


def finished(run: Run, setup: Setup, *, take: bool = True) -> dict[str, Any] | None:
    """Return what the file of a finished run holds, in this grid or another one of the same folder, or None.

    Args:
        run: settings.
        setup: where, and on which data and device.
        take: write a run that another grid has made into this one's folder.
    """
    name = f"{run_id(run, setup)}.json"
    places = [setup.folder / name, *sorted(path for path in setup.out.glob(f"*/{name}"))]
    for path in places:
        found = record.read_json(path)
        if isinstance(found, dict) and len(found.get("rows", ())) == run.epochs:
            if take and path != places[0]:
                record.write_json(places[0], found)
            return found
    return None


def _store(run: Run, rows: list[Row], setup: Setup, lanes: int | None = None) -> None:
    """Write a finished run; `lanes` is how many there were at its median epoch, if not all: fewer in a grid's tail."""
    device = torch.device(setup.device)
    clean = [{key: value if math.isfinite(value) else None for key, value in row.items()} for row in rows]
    record.write_json(
        setup.folder / f"{run_id(run, setup)}.json",
        {
            "run": run._asdict(),
            "rows": clean,
            "dataset": setup.digest,
            "engine": setup.engine,
            "at_once": (lanes or setup.lanes) * setup.workers,
            "device_type": setup.device,
            "precision": setup.precision,
            "graphs": setup.graphs and device.type == "cuda",
            "compiled": setup.compiled,
            "code": record.source_digest(),
            **record.environment(device),
            "date": record.provenance()["date"],
        },
    )


def gather(grid: Grid, setup: Setup, command: str) -> dict[str, Any]:
    """Write results.csv and grid.json from all finished runs of a grid's folder; return what grid.json holds.

    A grid may be made by several commands, each with a part of it: the runs and the commands of all of them are kept.
    """
    for run in grid.runs:
        finished(run, setup)  # brings a run that another grid has made
    done = dict(_kept(setup))
    lines: list[list[Any]] = []
    for run, found in done.items():
        for row in found["rows"]:
            numbers = {key: math.nan if value is None else value for key, value in row.items()}
            settings = {**run._asdict(), "samples": row["samples"]}
            lines.append([{**settings, **numbers}[column] for column in COLUMNS])
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(COLUMNS)
    lines.sort(key=lambda line: [f"{cell:>24}" for cell in line[:11]])
    writer.writerows(lines)
    record.write(setup.folder / "results.csv", buffer.getvalue())
    before = record.read_json(setup.folder / "grid.json") or {}
    names = {run.name for run in done}
    earlier = (name for name in before.get("missing", ()) if name not in names)
    # By all of its settings: runs that differ in B_max have one name.
    missing = list(dict.fromkeys((*earlier, *(run.name for run in grid.runs if run not in done))))
    result = {
        "commands": list(dict.fromkeys((*before.get("commands", ()), command))),
        "grid": grid.grid,
        "model": grid.model,
        "preset": grid.preset,
        "runs": len(done) + len(missing),
        "finished": len(done),
        "missing": missing,
        "epochs": grid.runs[0].epochs,
        "samples": grid.runs[0].samples or "all",
        "dataset": {"name": "made-up" if grid.small else TASKS[grid.model].dataset, "sha256": setup.digest},
        "devices": sorted({found["device"] for found in done.values()}),
        "precision": setup.precision,
        "seconds": sum(row["seconds"] for found in done.values() for row in found["rows"]),
        **record.provenance(),
    }
    if done:  # what made the runs, which may not be what gathers them
        made = done.values()
        result |= {key: ", ".join(sorted({found[key] for found in made})) for key in ("torch", "python")}
        result["date"] = max(found["date"] for found in made)
    record.write_json(setup.folder / "grid.json", result)
    return result


def _kept(setup: Setup) -> Iterator[tuple[Run, dict[str, Any]]]:
    """The finished runs of a grid's folder that go together: of one dataset, one kind of device, one precision."""
    for path, run, found in _files(setup.folder, "*-lr*.json"):
        if path.stem == run_id(run, setup) and len(found["rows"]) == run.epochs:
            yield run, found


def _files(folder: Path, pattern: str) -> Iterator[tuple[Path, Run, dict[str, Any]]]:
    """The runs that there are files of; what is no run, or one with other settings than runs have here, is left."""
    for path in sorted(folder.glob(pattern)):
        found = record.read_json(path)
        settings = found.get("run") if isinstance(found, dict) and found.get("rows") else None
        if isinstance(settings, dict) and settings.keys() == set(Run._fields):
            yield path, Run(**settings), found


# ---------------------------------------------------------------- cost


Costs = dict[tuple[str, str, int], float]  # (model, algorithm, batch size) -> seconds per sample, of the whole device


def costs(out: Path, device: str) -> tuple[Costs, str]:
    """Return measured costs and where they are from: the runs of a folder, else those that ship with the lab."""
    own = measured(out, device)
    if own:
        return own, f"the runs in {out}"
    shipped = record.read_json(SECONDS) or {"rows": []}
    found_costs = {(row["model"], row["algorithm"], row["batch_size"]): row["seconds"] for row in shipped["rows"]}
    return found_costs, f"runs on {shipped['device']}" if found_costs else ""


def measured(out: Path, device: str) -> Costs:
    """Return the costs of a folder's runs."""
    found_costs: dict[tuple[str, str, int], list[float]] = {}
    for _, run, found in _files(out, "*/*-lr*.json"):
        if found["device_type"] == device and not run.small and not run.ramp:
            key = (run.model, run.algorithm, run.batch_size)
            found_costs.setdefault(key, []).append(cost(found["rows"], found["at_once"]))
    # The least: what else ran on the device only made it longer.
    return {key: min(values) for key, values in found_costs.items()}


def cost(rows: list[Row], at_once: int) -> float:
    """Return the seconds per sample of a finished run, by its median epoch; runs at once share the time."""
    return sorted(row["seconds"] for row in rows)[len(rows) // 2] / rows[0]["samples"] / at_once


def ship(out: Path, device: str, to: Path | None = None, alone: Iterable[dict[str, Any]] = ()) -> Path:
    """Keep the costs of a folder's runs with the lab, or in the file `to`, for the estimates of others.

    Args:
        out: the folder.
        device: the kind of it.
        to: a file.
        alone: seconds per epoch that were measured with nothing else on the device, by model, algorithm and batch size:
            they take the place of what runs took beside others.
    """
    known = measured(out, device)
    for row in alone:
        known[row["model"], row["algorithm"], row["batch_size"]] = row["seconds"] / _whole(row["model"])
    files = [record.read_json(path) or {} for path in out.glob("*/*-lr*.json")]
    devices = sorted({found["device"] for found in files if found.get("device_type") == device})
    names = ("model", "algorithm", "batch_size", "seconds")
    rows = [dict(zip(names, (*key, float(f"{value:.4g}")), strict=True)) for key, value in sorted(known.items())]
    return record.write_json(to or SECONDS, {"unit": "seconds per sample", "device": ", ".join(devices), "rows": rows})


def lender(run: Run, known: Costs) -> tuple[str, str, int] | None:
    """Return what a run's cost is estimated by: its own algorithm at the nearest batch size, or else another one.

    Another one's cost is borrowed, the dearest at the nearest batch size; but accumulation, whose backward passes go
    with M and not with B, neither borrows nor lends.
    """
    of_model = [key for key in known if key[0] == run.model]
    near = [key for key in of_model if key[1] == run.algorithm]
    if not near and run.algorithm != "accumulate":
        near = [key for key in of_model if key[1] != "accumulate"]
    return min(near, key=lambda key: (abs(math.log(key[2] / run.batch_size)), -known[key]), default=None)


def estimate(run: Run, known: Costs) -> float | None:
    """Return the device seconds of a run by the cost of its `lender`, or None."""
    key = lender(run, known)
    if key is None:
        return None
    dearer = work(run) / work(run._replace(batch_size=key[2], ramp=""))
    return known[key] * dearer * _samples(run) * run.epochs


class Pace:
    """How much longer runs take than their estimates say, which are the least: as the slowest of the last did.

    A device that others use as well, or lanes whose updates wait for dearer ones, make it several times as long; and
    a run that is cut off is lost.

    Args:
        last: runs that are looked back at.

    >>> pace = Pace(2)
    >>> pace.took(30.0, 10.0)
    >>> pace.needs(5.0)
    15.0
    """

    def __init__(self, last: int) -> None:
        self._ratios: deque[float] = deque(maxlen=last)

    @property
    def factor(self) -> float:
        """What estimates are multiplied by, at least 1."""
        return max((1.0, *self._ratios))

    def needs(self, estimated: float) -> float:
        """Return the seconds that a run is to be given."""
        return estimated * self.factor

    def took(self, seconds: float, estimated: float) -> None:
        """Hear of a run that is finished; one without an estimate says nothing."""
        if estimated > 0.0:
            self._ratios.append(seconds / estimated)


# ---------------------------------------------------------------- work


Tell = Callable[[str, Run, Any], None]  # ("epoch" | "done" | "skipped" | "error" | "note", run, row or text)


def made_up(model: str) -> data.Images | data.Text:
    """Return data for a model that needs no download."""
    if TASKS[model].dataset == "cifar10":
        return data.synthetic(MADE_UP_IMAGES, MADE_UP_IMAGES // 2)
    words = ["batch", "size", "of", "one", "and", "then", "another", "moment"]
    return data.encode(" ".join(words[(i * i + i // 3) % 8] for i in range(1_500)))


def prepare(grid: Grid, setup: Setup, tell: data.Tell = lambda text: None) -> data.Images | data.Text:
    """Find what a grid trains on before any run is begun, and refuse a grid that it is too little for.

    Args:
        grid: its runs have as many samples and one largest batch size.
        setup: where the dataset is.
        tell: hears where it is looked for.
    """
    found = _find(grid.model, setup, tell)
    count = load(grid.model, torch.device("cpu"), small=setup.small, found=found).count
    run = grid.runs[0]
    if run.samples > count:
        raise ValueError(f"samples must be at most the {count:,} of the training set, got {run.samples}")
    if run.max_batch_size > count:
        raise ValueError(f"max_batch_size must be at most the {count:,} training samples, got {run.max_batch_size}")
    return found


def _find(model: str, setup: Setup, tell: data.Tell = lambda text: None) -> data.Images | data.Text:
    if setup.small:
        return made_up(model)
    if TASKS[model].dataset == "cifar10":
        return data.cifar10(setup.path, tell)[0]
    return data.tinyshakespeare(tell=tell)[0] if setup.path is None else data.text(setup.path)


def serve(setup: Setup, runs: Iterable[Run], tell: Tell, found: data.Images | data.Text | None = None) -> None:
    """Make runs in this process, several at once, and write each when it is finished.

    Args:
        setup: how.
        runs: in the order in which they are begun.
        tell: hears of epochs and ends.
        found: what `prepare` found; None: it is looked for.
    """
    device = torch.device(setup.device)
    sources: dict[str, Source] = {}
    known, _ = costs(setup.out, setup.device)
    writers = _Logs(setup)
    at_once = setup.lanes * setup.workers
    pace = Pace(2 * setup.lanes)
    begun: dict[Run, tuple[float, float, list[int]]] = {}  # when, the estimate, and the lanes in use at each epoch

    def works() -> Iterator[tuple[Run, Any]]:
        for run in runs:
            estimated = (estimate(run, known) or 0.0) * at_once
            needed = pace.needs(estimated)
            if setup.deadline is not None and time.time() + needed > setup.deadline:
                why = "the budget is spent"
                if needed:
                    times = f", {pace.factor:.1f} times its estimate" * (pace.factor > 1.0)
                    why = f"it would need about {max(needed, 1):.0f} s{times}"
                tell("skipped", run, why)
                continue
            if run.model not in sources:
                samples = _find(run.model, setup) if found is None else found
                sources[run.model] = load(
                    run.model, device, small=setup.small, found=samples, precision=setup.precision
                )
            log = writers.open(run)
            begun[run] = time.time(), estimated, []

            def on_epoch(row: Row, run: Run = run, log: Callable[[Row], None] = log) -> None:
                log(row)
                begun[run][-1].append(len(begun))
                tell("epoch", run, row)

            source, engine, graphs = sources[run.model], setup.engine, setup.graphs
            yield (
                run,
                train.train(run, source, engine=engine, graphs=graphs, compiled=setup.compiled, on_epoch=on_epoch),
            )

    fast = timing.fast_math() if device.type == "cuda" else nullcontext()
    with fast, timing.many_graphs() if setup.compiled else nullcontext():
        for run, outcome in train.lanes(works(), setup.lanes, device):
            writers.close(run)
            start, estimated, counts = begun.pop(run)
            if isinstance(outcome, Exception):
                tell("error", run, f"{type(outcome).__name__}: {outcome}")
                continue
            lanes = sorted(counts)[len(counts) // 2]
            _store(run, outcome, setup, lanes)
            pace.took(time.time() - start, estimated)
            least = cost(outcome, lanes * setup.workers) / pace.factor
            known.setdefault((run.model, run.algorithm, run.batch_size), least)
            tell("done", run, outcome[-1])


class _Logs:
    """TensorBoard's files of the runs under way, where it is installed and asked for."""

    def __init__(self, setup: Setup) -> None:
        self.setup, self.writers = setup, dict[Run, Any]()

    def open(self, run: Run) -> Callable[[Row], None]:
        if not self.setup.tensorboard:
            return lambda row: None
        from torch.utils.tensorboard import SummaryWriter

        folder = self.setup.folder / "tensorboard" / run_id(run, self.setup)
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was stopped: the curve would go back and forth
        writer = self.writers[run] = SummaryWriter(str(folder))

        def log(row: Row) -> None:
            for key, value in row.items():
                if key not in ("epoch", "samples"):
                    writer.add_scalar(key, value, int(row["samples"]))

        return log

    def close(self, run: Run) -> None:
        writer = self.writers.pop(run, None)
        if writer is not None:
            writer.close()


def make(runs: list[Run], setup: Setup, tell: Tell, found: data.Images | data.Text | None = None) -> None:
    """Make the runs that are not finished, in this process or in several.

    Args:
        runs: in the order in which they are begun.
        setup: how.
        tell: hears of epochs and ends, in this process.
        found: what `prepare` found, so that one process need not look again.
    """
    todo = [run for run in runs if finished(run, setup) is None]
    if setup.workers == 1 or len(todo) <= 1:
        threads = torch.get_num_threads()
        if setup.small:
            torch.set_num_threads(1)  # layers this small lose more to the hand-over between threads than they gain
        try:
            serve(setup, todo, tell, found)
        finally:
            torch.set_num_threads(threads)
        return
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    tasks, messages = context.Queue(), context.Queue()
    count = min(setup.workers, len(todo))
    for run in [*todo, *[None] * count]:
        tasks.put(run)
    threads = 1 if setup.small else max(1, torch.get_num_threads() // count)
    processes = [
        context.Process(target=_worker, args=(setup, threads, tasks, messages), daemon=True) for _ in range(count)
    ]
    try:
        with _deaf():
            for process in processes:
                process.start()
        alive = count
        while alive:
            try:
                kind, run, what = messages.get(timeout=1.0)
            except queue.Empty:
                if not any(process.is_alive() for process in processes):
                    raise RuntimeError(
                        f"{alive} worker processes ended without a word, exit codes "
                        f"{[process.exitcode for process in processes]}; finished runs are kept"
                    ) from None
                continue
            if kind == "end":
                alive -= 1
            else:
                tell(kind, run, what)
    finally:
        for process in processes:
            if process.is_alive():
                process.join(timeout=5.0 if alive == 0 else 0.0)
            if process.is_alive():
                process.terminate()


@contextmanager
def _deaf() -> Iterator[None]:
    """Let Ctrl-C pass unheard, also by the processes that are started here: whoever started them ends them."""
    if threading.current_thread() is not threading.main_thread():  # where signals are not ours to handle
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _worker(setup: Setup, threads: int, tasks: Any, messages: Any) -> None:
    torch.set_num_threads(threads)
    try:
        serve(setup, iter(tasks.get, None), lambda kind, run, what: messages.put((kind, run, what)))
    except Exception as error:
        messages.put(("error", None, f"{type(error).__name__}: {error}"))
    finally:
        messages.put(("end", None, None))
        messages.close()
        messages.join_thread()


def draw(setup: Setup) -> list[Path]:
    """Draw the figures and the page of a grid; return what was written."""
    found, out = results.load(setup.folder), setup.folder / "figures"
    return [*figures.draw(found, out), page.write(found, out / "report.html")]

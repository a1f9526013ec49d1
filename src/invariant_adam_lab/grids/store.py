"""The files of a grid: one for each finished run; results.csv, the same as results.parquet, and grid.json for all.

A grid resumes where it was stopped, and takes runs that another grid in the same folder has made.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .. import record
from ..results.curves import COLUMNS, NOT_ALWAYS, PER_EPOCH, SETTINGS
from ..training import data, tokens
from ..training.runs import RECIPES, Run
from ..training.train import Row
from .grid import Grid

# Settings that files lack which were written before there were other values of them.
LATER: dict[str, Any] = {"grow": 0.0, "order": 0, "tuned": 0}
# The fields of a run's file that are read, here and in `cost`.
FIELDS = {"run", "rows", "at_once", "device", "device_type", "torch", "python", "date"}


class Setup(NamedTuple):
    """How a grid is run. Only the device, the precision and the data change its numbers."""

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
    deadline: float | None = None  # by `time.time`; no run begins that would end later
    tensorboard: bool = False
    made_up: bool = False  # the dataset

    @property
    def folder(self) -> Path:
        """Where the grid's files are."""
        return self.out / self.grid


def run_id(run: Run, setup: Setup) -> str:
    """Return the name of a run's file: readable, and with a hash of all that its numbers depend on."""
    settings = {name: value for name, value in run._asdict().items() if name not in LATER or value != LATER[name]}
    depends = {**settings, "dataset": setup.digest, "device": setup.device, "precision": setup.precision}
    return f"{run.name}-{hashlib.sha256(json.dumps(depends, sort_keys=True).encode()).hexdigest()[:10]}"


def digest(model: str, made_up: bool, path: Path | None) -> str:
    """Return the SHA-256 of a model's dataset; one that is known is not loaded."""
    if made_up:
        return "made-up"
    if RECIPES[model].dataset == "cifar10":
        return data.CIFAR10_DIGEST
    if RECIPES[model].dataset == "text":
        if path is None:
            raise data.DataError(f"{model} trains on a text of your own; name a file or a folder by --data")
        return tokens.digest(path)
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
        if _run_of(found) == run:
            if take and path != places[0]:
                record.write_json(places[0], found)
            whole: dict[str, Any] = found
            return whole
    return None


def save(run: Run, rows: list[Row], setup: Setup, lanes: int | None = None) -> None:
    """Write a finished run; `lanes` is how many were in use at its median epoch: at a grid's end they are fewer."""
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
            numbers = dict.fromkeys(NOT_ALWAYS, "") | numbers
            settings = {**run._asdict(), "samples": row["samples"]}
            lines.append([{**settings, **numbers}[column] for column in COLUMNS])
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(COLUMNS)
    lines.sort(key=lambda line: [f"{cell:>24}" for cell in line[: len(SETTINGS) + 1]])
    writer.writerows(lines)
    record.write(setup.folder / "results.csv", buffer.getvalue())
    write_parquet(setup.folder / "results.parquet", lines)
    commands, earlier = (_listed(setup.folder / "grid.json", key) for key in ("commands", "missing"))
    names = {run.name for run in done}
    # Compared by all settings: runs that differ only in B_max share a name.
    missing = list(
        dict.fromkeys(
            (*(name for name in earlier if name not in names), *(run.name for run in grid.runs if run not in done))
        )
    )
    result = {
        "commands": list(dict.fromkeys((*commands, command))),
        "grid": grid.grid,
        "model": grid.model,
        "preset": grid.preset,
        "runs": len(done) + len(missing),
        "finished": len(done),
        "missing": missing,
        "epochs": grid.runs[0].epochs,
        "samples": grid.runs[0].samples or "all",
        "dataset": {"name": _dataset(grid, setup), "sha256": setup.digest},
        "devices": sorted({found["device"] for found in done.values()}),
        "precision": setup.precision,
        "seconds": sum(row["seconds"] for found in done.values() for row in found["rows"]),
        **record.provenance(),
    }
    if done:  # the versions that made the runs, which may not be those that gather them
        made = done.values()
        result |= {key: ", ".join(sorted({found[key] for found in made})) for key in ("torch", "python")}
        result["date"] = max(found["date"] for found in made)
    record.write_json(setup.folder / "grid.json", result)
    return result


def write_parquet(path: Path, lines: list[list[Any]]) -> bool:
    """Write the rows of a results.csv as Parquet, with what was not measured as null; False without pyarrow.

    A file of earlier rows is then removed: it would tell another story than results.csv.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        path.unlink(missing_ok=True)
        return False
    texts = ("model", "algorithm", "rule", "ramp")
    whole = ("batch_size", "micro_batch_size", "max_batch_size", "seed", "warmup_samples", "order", "epoch", "samples")
    types = {name: pa.string() for name in texts} | {name: pa.int64() for name in whole}
    columns = {}
    for i, name in enumerate(COLUMNS):
        cells = [None if line[i] == "" and name not in texts else line[i] for line in lines]
        columns[name] = pa.array(cells, types.get(name, pa.float64()))
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), sink)
    record.write(path, sink.getvalue().to_pybytes())
    return True


def _dataset(grid: Grid, setup: Setup) -> str:
    """Return the name of a grid's dataset; `--data` may be any text."""
    if grid.made_up:
        return "made-up"
    known = setup.digest in (data.CIFAR10_DIGEST, data.SHAKESPEARE_DIGEST)
    return RECIPES[grid.model].dataset if known else "a text of the user's"


def _listed(path: Path, key: str) -> list[Any]:
    """Return what a file lists under a key; nothing where it is missing or damaged."""
    found = record.read_json(path)
    listed = found.get(key) if isinstance(found, dict) else None
    return listed if isinstance(listed, list) else []


def _kept(setup: Setup) -> Iterator[tuple[Run, dict[str, Any]]]:
    """Yield the finished runs of a grid's folder that have its dataset, its kind of device and its precision."""
    for path, run, found in files(setup.folder, "*-lr*.json"):
        if path.stem == run_id(run, setup):
            yield run, found


def files(folder: Path, pattern: str) -> Iterator[tuple[Path, Run, dict[str, Any]]]:
    """Yield the finished runs of the files in a folder."""
    for path in sorted(folder.glob(pattern)):
        found = record.read_json(path)
        run = _run_of(found)
        if run is not None:
            yield path, run, found


def _run_of(found: Any) -> Run | None:
    """Return the run of a file, or None where the file is damaged or has other settings than a run."""
    if not isinstance(found, dict) or not found.keys() >= FIELDS:
        return None
    settings, rows = found["run"], found["rows"]
    if not isinstance(settings, dict) or not isinstance(rows, list):
        return None
    settings = LATER | settings
    if settings.keys() != set(Run._fields):
        return None
    least = set(PER_EPOCH).difference(NOT_ALWAYS)
    whole = all(isinstance(row, dict) and least <= row.keys() <= set(PER_EPOCH) for row in rows)
    return Run(**settings) if rows and whole and len(rows) == settings["epochs"] else None

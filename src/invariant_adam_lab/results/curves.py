"""A grid's results.csv -> the curves of its runs, by model, series, learning rate, batch size and seed.

One row of the file is one epoch of one run.
"""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .. import record

METRICS = {
    "train_loss": "training loss",
    "end_train_loss": "training loss, end of epoch",
    "test_loss": "test loss",
    "train_accuracy": "training accuracy",
    "test_accuracy": "test accuracy",
}
SETTINGS = (
    "model", "algorithm", "rule", "batch_size", "micro_batch_size", "max_batch_size", "lr0", "seed", "warmup_samples",
    "ramp", "grow", "order",
)  # fmt: skip
OF_ONE_PASS = ("noise_scale", "peak_memory")  # samples, bytes: of a model that sees its data once
PER_EPOCH = ("epoch", "samples", *METRICS, "lr", "seconds", *OF_ONE_PASS)
COLUMNS = (*SETTINGS, *PER_EPOCH)
NOT_ALWAYS = ("end_train_loss", *OF_ONE_PASS)  # of PER_EPOCH: what older runs, or runs of other models, lack
LATER = ("grow", "order", *NOT_ALWAYS)  # columns that older files lack

NAMES = {
    "invariant": "Invariant Adam",
    "standard": "Standard Adam",
    "accumulate": "Standard Adam, accumulated",
    "micro": "Micro Adam",
    "adama": "AdamA",
    "halflife": "Adam, half-life of v in samples",
}
MODELS = {
    "resnet-bn": "ResNet-18, batch norm",
    "resnet-ln": "ResNet-18, layer norm",
    "vit": "ViT, QK-norm",
    "gpt": "GPT, characters",
    "gpt2": "GPT-2, text",
}
ONCE = ("gpt2",)  # models that see their data once: their η₀ is the highest of a warm-up and a cosine
LAWS = {"linear": "η ∝ B", "exponential": "η ∝ B", "square_root": "η ∝ √B", "none": "η constant"}
SAME_AT_M = ("invariant", "standard", "accumulate", "micro", "adama")  # the same Adam where B = M


class Series(NamedTuple):
    """What runs have in common that differ only in learning rate, batch size and seed."""

    algorithm: str
    rule: str
    micro_batch_size: int  # samples; 0 where the algorithm has no micro-batches
    max_batch_size: int  # samples; the batch size at which the betas hold
    warmup_samples: int
    grow: float = 0.0  # 0: not grown in

    @property
    def law(self) -> str:
        """What the learning rate does as the batch size grows."""
        return LAWS[self.rule]

    @property
    def rival(self) -> Series:
        """What it is compared with, as in the paper: standard Adam, η ∝ √B, not grown in; same warm-up and betas."""
        return self._replace(algorithm="standard", rule="square_root", micro_batch_size=0, grow=0.0)


class Curve(NamedTuple):
    """One training run: its settings, and one number per epoch for each of PER_EPOCH."""

    model: str
    series: Series
    lr0: float
    batch_size: int
    seed: int
    ramp: str  # how the batch size changes during the run; "" where it does not
    order: int  # of micro-batches inside of blocks, a seed; 0: as they come
    columns: dict[str, list[float]]  # nan where a metric was not measured
    source: str  # the file it was read from

    @property
    def diverged(self) -> float | None:
        """The first epoch whose training loss has no logarithm, or None."""
        pairs = zip(self.columns["epoch"], self.columns["train_loss"], strict=True)
        return next((epoch for epoch, loss in pairs if not 0 < loss < math.inf), None)

    @property
    def losses(self) -> dict[float, float]:
        """The training loss by epoch, without an epoch 0 before training."""
        return self.values("train_loss")

    def values(self, metric: str) -> dict[float, float]:
        """A metric by epoch, without an epoch 0 before training; nan where it was not measured."""
        pairs = zip(self.columns["epoch"], self.columns[metric], strict=True)
        return {epoch: value for epoch, value in pairs if epoch > 0}

    @property
    def at(self) -> str:
        """Its place among the runs of its series and learning rate."""
        return f"B = {self.batch_size}, seed {self.seed}" + (
            f", ramp {self.ramp}" * bool(self.ramp) + f", order {self.order}" * bool(self.order)
        )


class Results(NamedTuple):
    """The runs of one grid or several, and what each grid says of itself."""

    runs: list[Curve]
    grids: dict[str, dict[str, Any]]  # grid.json, by the folder's name

    @property
    def made(self) -> int:
        """How many runs were made; one with B = M may be the curve of several series."""
        return len({id(run.columns) for run in self.runs})

    @property
    def models(self) -> list[str]:
        """Every model, in the order of the files."""
        return list(dict.fromkeys(run.model for run in self.runs))

    def series(self, model: str) -> list[Series]:
        """Every series of a model, those of the paper first."""
        found = {run.series for run in self.runs if run.model == model}
        algorithms, rules = list(NAMES), ("square_root", "linear", "exponential", "none")
        return sorted(
            found, key=lambda s: (s.warmup_samples, s.grow, algorithms.index(s.algorithm), rules.index(s.rule), s[2:])
        )

    def paper(self, model: str) -> list[Series]:
        """Every series of invariant Adam with the paper's rule, those of most runs first."""
        paper = [s for s in self.series(model) if (s.algorithm, s.rule) == ("invariant", "linear")]
        return sorted(paper, key=lambda series: -len(self.group(model, series)))

    def paper_pair(self, model: str) -> list[Series]:
        """What the paper compares, as far as it is there, in its order: standard Adam, and invariant Adam at the M of
        most runs."""
        ours = [series for series in self.paper(model) if not series.warmup_samples and not series.grow][:1]
        return [series for s in ours for series in (s.rival, s) if series in self.series(model)]

    def label(self, model: str, series: Series, among: Iterable[Series] = ()) -> str:
        """Name a series by what tells it from the others of its model, or from those of them that are `among`."""
        same = [s for s in tuple(among) or self.series(model) if s.algorithm == series.algorithm]
        parts = [NAMES[series.algorithm]] + ([series.law] if series.algorithm != "micro" else [])
        if len({s.rule for s in same if s.law == series.law}) > 1:
            parts.append(series.rule)
        if len({s.micro_batch_size for s in same}) > 1:
            parts.append(f"M = {series.micro_batch_size}")
        if sum(s._replace(max_batch_size=series.max_batch_size) == series for s in same) > 1:
            parts.append(f"betas at {series.max_batch_size}")
        if series.warmup_samples:
            parts.append(f"warm-up {series.warmup_samples:,}")
        if series.grow:
            parts.append("grown in" + (f", r = {series.grow:g}" if len({s.grow for s in same} - {0.0}) > 1 else ""))
        return ", ".join(parts)

    def group(self, model: str, series: Series, lr0: float | None = None) -> list[Curve]:
        """Return the runs of a series with a constant batch size: by learning rate, batch size, seed."""
        found = (r for r in self.runs if (r.model, r.series, r.ramp, r.order) == (model, series, "", 0))
        chosen = (run for run in found if lr0 is None or run.lr0 == lr0)
        return sorted(chosen, key=lambda run: (run.lr0, run.batch_size, run.seed))

    def orders(self, model: str, series: Series, lr0: float) -> list[Curve]:
        """Return the runs of one micro-batch per update that differ in the order of micro-batches; one of the usual
        order is among them, where it was made."""
        found = [r for r in self.runs if (r.model, r.series, r.lr0, r.ramp) == (model, series, lr0, "")]
        sizes = {run.batch_size for run in found if run.order}
        return sorted((run for run in found if run.batch_size in sizes), key=lambda run: (run.seed, run.order))

    def ramps(self, model: str) -> dict[tuple[Series, float, str], list[Curve]]:
        """Return the runs whose batch size changes, by series, learning rate and ramp; each list holds the seeds."""
        found: dict[tuple[Series, float, str], list[Curve]] = defaultdict(list)
        for run in self.runs:
            if run.model == model and run.ramp:
                found[run.series, run.lr0, run.ramp].append(run)
        return dict(sorted(found.items()))


def by_batch_size(runs: Iterable[Curve]) -> dict[int, list[Curve]]:
    """Group runs by batch size; each list holds the seeds."""
    groups: dict[int, list[Curve]] = defaultdict(list)
    for run in runs:
        groups[run.batch_size].append(run)
    return dict(sorted(groups.items()))


# --------------------------------------------------------------------------- reading


def load(folder: Path) -> Results:
    """Read `folder`/results.csv, or that of each folder in it, with the grid.json beside it.

    Raises:
        ValueError: no file, a missing column or number, a run that is there twice with different numbers, epochs of
            different lengths; it names file and line.
    """
    files = [folder / "results.csv"] if (folder / "results.csv").exists() else sorted(folder.glob("*/results.csv"))
    if not files:
        raise ValueError(
            f"no results.csv in {folder}, nor in a folder in it: `invariant-adam reproduce` writes one; give its folder"
        )
    runs: dict[tuple[Any, ...], Curve] = {}
    for path in files:
        try:
            found = _read(path)
        except (UnicodeDecodeError, csv.Error) as error:
            raise ValueError(f"{path} is damaged: {error}") from None
        for run in found:
            key = run[:7]
            # Grids of one folder share runs: the same numbers are the same run, others are refused.
            if key in runs and repr(run.columns) != repr(runs[key].columns):
                raise ValueError(
                    f"{run.source} and {runs[key].source} have different numbers for {run.model}, "
                    f"{NAMES[run.series.algorithm]}, η₀ = {rate(run.lr0)}, {run.at}; give the folder of one grid"
                )
            runs[key] = run
    if not runs:  # an empty grid does not keep the others of a folder from being drawn
        raise ValueError(f"{files[0]} has no rows: no run of this grid is finished")
    for run in _of_one_micro_batch(list(runs.values())):
        runs.setdefault(run[:7], run)
    per_epoch = {(run.model, run.columns["samples"][-1] / max(1, run.columns["epoch"][-1])) for run in runs.values()}
    for model in {model for model, _ in per_epoch}:
        counts = sorted(samples for name, samples in per_epoch if name == model)
        if len(counts) > 1:
            raise ValueError(
                f"{folder} has runs of {model} with epochs of {' and '.join(f'{n:,.0f}' for n in counts)} samples: "
                "they cannot be compared; give the folder of one grid"
            )
    said = {path.parent.resolve().name: record.read_json(path.with_name("grid.json")) for path in files}
    grids = {name: grid if isinstance(grid, dict) else {} for name, grid in said.items()}
    return Results(list(runs.values()), grids)


def _read(path: Path) -> list[Curve]:
    runs: dict[tuple[str, ...], Curve] = {}
    with path.open(newline="", encoding="utf-8-sig") as file:  # a spreadsheet may have saved it with a byte order mark
        reader = csv.DictReader(file)
        missing = [name for name in COLUMNS if name not in (*(reader.fieldnames or ()), *LATER)]
        if missing:
            raise ValueError(f"{path} lacks the column {missing[0]}: not a results.csv of `invariant-adam reproduce`")
        for row in reader:
            where = f"{path}, line {reader.line_num}"
            if None in row.values():
                raise ValueError(f"{where} is cut off")
            row = dict.fromkeys(LATER, "") | row
            key = tuple(row[name] for name in SETTINGS)
            if key not in runs:
                runs[key] = _run(row, where, str(path))
            values = {name: _number(row, name, where, empty=math.nan) for name in PER_EPOCH}
            values |= {name: _number(row, name, where) for name in ("epoch", "samples", "train_loss")}
            if not 0 <= values["epoch"] < math.inf or not 0 <= values["samples"] < math.inf:
                raise ValueError(f"{where}: epoch and samples must count, got {row['epoch']!r} and {row['samples']!r}")
            columns = runs[key].columns
            if columns["epoch"] and not values["epoch"] > columns["epoch"][-1]:
                raise ValueError(
                    f"{where}: epoch {values['epoch']:g} comes after epoch {columns['epoch'][-1]:g} of the same run; "
                    "the run is there twice, or its rows are out of order"
                )
            for name, value in values.items():
                columns[name].append(value)
    return list(runs.values())


def _of_one_micro_batch(runs: Sequence[Curve]) -> Iterator[Curve]:
    """Yield the runs with B = M once more for every other series that they stand for.

    The mean of one micro-batch's square is the square of its mean, so that at B = M all series of one rule and one
    learning rate are the same run, which is made once.
    """

    def one(series: Series, size: int) -> bool:
        return series.algorithm in SAME_AT_M and series.micro_batch_size in (0, size)

    wanted = dict.fromkeys((run.model, run.series, run.lr0, run.seed) for run in runs if not run.ramp)
    for run in runs:
        if run.ramp or not one(run.series, run.batch_size):
            continue
        for model, series, lr0, seed in wanted:
            alike = series[1] == run.series[1] and series[3:5] == run.series[3:5]  # rule, betas, warm-up
            if (model, lr0, seed) == (run.model, run.lr0, run.seed) and alike and one(series, run.batch_size):
                yield run._replace(series=series)


def _run(row: Mapping[str, str], where: str, source: str) -> Curve:
    algorithm, rule = row["algorithm"], row["rule"] or "none"
    for name, value, known in (("algorithm", algorithm, NAMES), ("rule", rule, LAWS)):
        if value not in known:
            raise ValueError(f"{where}: {name} must be one of {', '.join(known)}, got {value!r}")
    # Standard Adam squares the mean over the whole batch, whatever pieces its gradient was accumulated from.
    micro = 0 if algorithm in ("standard", "halflife") else _whole(row, "micro_batch_size", where)
    warmup, order = (_whole(row, name, where, empty=0.0) for name in ("warmup_samples", "order"))
    grow = _number(row, "grow", where, empty=0.0)
    for name in ("lr0", "batch_size", "max_batch_size"):
        if not 0 < _number(row, name, where) < math.inf:
            raise ValueError(f"{where}: {name} must be a finite number above 0, got {row[name]!r}")
    return Curve(
        row["model"],
        Series(algorithm, rule, micro, _whole(row, "max_batch_size", where), warmup, grow),
        _number(row, "lr0", where),
        _whole(row, "batch_size", where),
        _whole(row, "seed", where),
        row["ramp"].strip(),
        order,
        {name: [] for name in PER_EPOCH},
        source,
    )


def _number(row: Mapping[str, str], name: str, where: str, empty: float | None = None) -> float:
    text = row[name].strip()
    if not text and empty is not None:
        return empty
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{where}: {name} must be a number (nan where a run diverged), got {text!r}") from None


def _whole(row: Mapping[str, str], name: str, where: str, empty: float | None = None) -> int:
    value = _number(row, name, where, empty)
    if not value.is_integer():
        raise ValueError(f"{where}: {name} must be a whole number, got {row[name]!r}")
    return int(value)


def rate(lr0: float) -> str:
    """Write a learning rate.

    >>> rate(1e-5), rate(0.0025), rate(0.01)
    ('1e-5', '2.5e-3', '0.01')
    """
    if lr0 >= 0.01:
        return f"{lr0:g}"
    digits, _, exponent = f"{lr0:e}".partition("e")
    return f"{float(digits):g}e{int(exponent)}"

"""What runs will cost, estimated from finished ones: for dry runs and for --budget."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .. import record
from ..training.runs import Run
from ..training.train import Row
from . import store
from .grid import epoch_samples, training_set, work

SECONDS = Path(__file__).with_name("seconds.json")  # measured seconds per sample, for estimates
Costs = dict[tuple[str, str, int], float]  # (model, algorithm, batch size) -> seconds per sample, of the whole device


def costs(out: Path, device: str, small: bool = False) -> tuple[Costs, str]:
    """Return measured costs and where they are from: the runs of a folder, else those that ship with the lab.

    The costs that ship were measured on a GPU. Of small models nothing is known.
    """
    if small:
        return {}, ""
    own = measured(out, device)
    if own or device != "cuda":
        return own, f"the runs in {out}" if own else ""
    shipped = record.read_json(SECONDS) or {"rows": []}
    found_costs = {(row["model"], row["algorithm"], row["batch_size"]): row["seconds"] for row in shipped["rows"]}
    return found_costs, f"runs on {shipped['device']}" if found_costs else ""


def measured(out: Path, device: str) -> Costs:
    """Return the costs of a folder's runs."""
    found_costs: dict[tuple[str, str, int], list[float]] = {}
    for _, run, found in store.files(out, "*/*-lr*.json"):
        if found["device_type"] == device and not run.small and not run.ramp:
            key = (run.model, run.algorithm, run.batch_size)
            found_costs.setdefault(key, []).append(cost(found["rows"], found["at_once"]))
    # The least, because whatever else ran on the device only added time.
    return {key: min(values) for key, values in found_costs.items()}


def cost(rows: list[Row], at_once: int) -> float:
    """Return the seconds per sample of a finished run, by its median epoch; runs at once share the time.

    Epochs that took none are those that were left when its weights were no numbers any more.

    >>> cost([{"seconds": s, "samples": 2} for s in (8.0, 4.0, 6.0, 0.0, 0.0)], 1)
    3.0
    """
    made = sorted(row["seconds"] for row in rows if row["seconds"])
    return made[len(made) // 2] / rows[0]["samples"] / at_once


def ship(out: Path, device: str, to: Path | None = None, alone: Iterable[dict[str, Any]] = ()) -> Path:
    """Write the costs of a folder's runs into the lab, or into the file `to`, for later estimates.

    Args:
        out: the folder.
        device: its kind, "cuda" or "cpu".
        to: a file.
        alone: seconds per epoch that were measured with nothing else on the device, by model, algorithm and batch size:
            they replace the times of runs that shared it.
    """
    known = measured(out, device)
    for row in alone:
        known[row["model"], row["algorithm"], row["batch_size"]] = row["seconds"] / training_set(row["model"])
    runs = (found for _, _, found in store.files(out, "*/*-lr*.json"))
    devices = sorted({found["device"] for found in runs if found["device_type"] == device})
    names = ("model", "algorithm", "batch_size", "seconds")
    rows = [dict(zip(names, (*key, float(f"{value:.4g}")), strict=True)) for key, value in sorted(known.items())]
    return record.write_json(to or SECONDS, {"unit": "seconds per sample", "device": ", ".join(devices), "rows": rows})


def lender(run: Run, known: Costs) -> tuple[str, str, int] | None:
    """Return what a run's cost is estimated from: its own algorithm at the nearest batch size, or else another one.

    Of others the dearest at the nearest batch size is borrowed. Accumulation neither borrows nor lends, because its
    backward passes depend on M and not on B.
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
    return known[key] * dearer * epoch_samples(run) * run.epochs


class Pace:
    """How much longer runs take than their estimates: as much as the slowest of the last ones did.

    Estimates are the least times. A device that others use, or lanes that wait for slower ones, take several times as
    long; and a run that is cut off is lost.

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
        """Note a finished run; one without an estimate says nothing."""
        if estimated > 0.0:
            self._ratios.append(seconds / estimated)

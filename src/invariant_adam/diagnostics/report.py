"""What a check found, as text and as a figure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ..scaling import RULES
from .coupling import Found
from .runs import Curve, spread

_NORMS = ("BatchNorm", "SyncBatchNorm", "LazyBatchNorm", "BatchRenorm", "NaiveSync", "FrozenBatchNorm")


class Cause(NamedTuple):
    """One thing that breaks invariance."""

    kind: str  # "coupled", "update too large", "not deterministic"
    where: str  # the module's name, "loss" or ""
    text: str
    remedy: str

    @classmethod
    def of(cls, found: list[Found], micro: int) -> list[Cause]:
        """Say what was found in the model."""
        return [_cause(one, micro) for one in found]

    @classmethod
    def nondeterministic(cls, repeat: float, named: list[Cause]) -> Cause:
        """Say that the same run twice is not the same."""
        where = ", ".join(cause.where for cause in named)
        module = f": {where}" if where else ""
        source = (
            f"Random without a seed{module}. "
            if named
            else "No module alone shows it; it may be in loss_fn, in make_model or in the kernels. "
        )
        return cls(
            "not deterministic",
            named[0].where if named else "",
            f"The same run twice, at the same seed and batch size, parts by {repeat:.2g} in log loss. {source}Dropout "
            "whose seed differs from run to run, say: no two runs can agree.",
            "draw from torch's global generator, or from one that make_model seeds; on a GPU, "
            "torch.use_deterministic_algorithms(True)",
        )


def _cause(found: Found, micro: int) -> Cause:
    name = f"'{found.where}'" if found.where else "the model itself"
    if found.kind == "random":
        return Cause("random", f"{name} ({found.what})", "", "")
    if found.kind == "factor":
        return Cause(
            "factor",
            "loss",
            "A sample's gradient is scaled by its neighbours in the micro-batch: the loss has a common divisor, such "
            "as a number of tokens, or is a root of a mean. In a loop of micro-batches that is the same at every batch "
            "size; one pass needs the weights (usual_weight).",
            "",
        )
    if found.kind == "loss":
        place = f"after {name} ({found.what})" if found.where else "in loss_fn, outside of the model"
        return Cause(
            "coupled",
            "loss",
            f"Samples see each other in the loss, {place}: a sample's gradient depends on its neighbours in the "
            f"micro-batch. A loss over pairs is that of {micro} samples, whatever the batch size.",
            'use a loss that is a mean over samples; or, if a loss over micro-batches is meant, coupled="micro-batch"',
        )
    more = f" (and {found.alike} more {found.what})" if found.alike else ""
    if found.what.startswith(_NORMS):
        return Cause(
            "coupled",
            found.where,
            f"Samples see each other in {name}, {found.what}{more}: each is normalised by the statistics of the "
            f"{micro} samples of its micro-batch. With another M, or in a plain mini-batch, it is another model.",
            "use layer, group or instance norm; or freeze the statistics (eval mode); or, if statistics of M samples "
            'are meant (ghost batch norm), coupled="micro-batch"',
        )
    return Cause(
        "coupled",
        found.where,
        f"Samples see each other in {name}, {found.what}{more}: its output for a sample depends on the other samples "
        "of the micro-batch. With another M, or in a plain mini-batch, it is another model.",
        'keep samples apart in it; or, if it is meant to work on micro-batches, coupled="micro-batch"',
    )


@dataclass
class InvarianceResult:
    """What `invariance_check` found; `print(result)` tells it all."""

    micro_batch_size: int
    lr: float
    tuned_batch_size: int
    betas: tuple[float, float]
    rule: str
    growth: float | None
    tolerance: float
    samples: list[int]  # where the losses were measured
    curves: list[Curve]  # one for each batch size
    floors: list[Curve]  # B = M, reordered
    spread: float  # the largest minus the smallest log loss over batch sizes, as a mean over the run
    floor: float  # the same over orders of the samples, at B = M
    repeat: float  # the same over two runs with nothing changed
    causes: list[Cause]
    notes: list[str]

    @property
    def limit(self) -> float:
        """The spread that passes: the tolerance, or twice the order floor up to four times the tolerance."""
        return max(self.tolerance, min(2 * self.floor, 4 * self.tolerance))

    @property
    def ok(self) -> bool:
        """Whether the batch size does not matter."""
        return self.agrees and not self.causes

    @property
    def agrees(self) -> bool:
        """Whether runs are as near to each other as those that differ in the order of the samples alone, and that near.

        An order floor of more than four tolerances says that no two runs agree.
        """
        return self.spread <= self.limit and self.floor <= 4 * self.tolerance

    @property
    def losses(self) -> dict[int, list[float]]:
        """Batch size -> training losses, at `samples`."""
        return {curve.batch: curve.losses for curve in self.curves}

    def spread_at(self, batch: int) -> float:
        """How far the run at one batch size is from that at B = M."""
        return spread([self.curves[0], next(curve for curve in self.curves if curve.batch == batch)])

    def __str__(self) -> str:
        grown = f"grown in (ratio {self.growth:g})" if self.growth else "not grown in"
        lines = [
            f"Invariance check: M = {self.micro_batch_size}, lr = {self.lr:g} at B = {self.tuned_batch_size}, "
            f"{self.samples[-1]:,} samples, {grown}",
            f"{'batch size':>12}{'updates':>10}{'share of m':>12}{'first loss':>12}{'last loss':>12}{'apart':>10}",
        ]
        for curve in self.curves:
            apart = "" if curve.batch == self.micro_batch_size else _number(self.spread_at(curve.batch))
            share = 1 - RULES[self.rule].betas(self.betas, curve.batch / self.tuned_batch_size)[0]
            last = f"{curve.losses[-1]:.4g}" + ("!" if curve.diverged else "")
            lines.append(
                f"{curve.batch:>12,}{curve.updates:>10,}{share:>12.2f}{curve.losses[0]:>12.4g}{last:>12}{apart:>10}"
            )
        lines.append(
            f"spread {_number(self.spread)} (limit {_number(self.limit)}), order floor {_number(self.floor)}, the same "
            f"run twice {_number(self.repeat)}; differences of log loss"
        )
        lines.append("INVARIANT: the batch size does not matter here." if self.ok else "NOT INVARIANT:")
        for cause in self.causes:
            lines += [f"- {cause.text}", f"  Remedy: {cause.remedy}."]
        lines += [f"Note: {note}" for note in self.notes]
        return "\n".join(lines)

    def asdict(self) -> dict[str, Any]:
        """Return the result as JSON holds it."""
        numbers = {
            name: value if math.isfinite(value) else None
            for name, value in (("spread", self.spread), ("floor", self.floor), ("repeat", self.repeat))
        }
        return {
            "ok": self.ok,
            **numbers,
            "limit": self.limit,
            "tolerance": self.tolerance,
            "micro_batch_size": self.micro_batch_size,
            "tuned_batch_size": self.tuned_batch_size,
            "lr": self.lr,
            "betas": list(self.betas),
            "rule": self.rule,
            "growth": self.growth,
            "samples": self.samples,
            "runs": [_json(curve) for curve in self.curves],
            "floor_runs": [_json(curve) for curve in self.floors],
            "causes": [cause._asdict() for cause in self.causes],
            "notes": self.notes,
        }

    def plot(self, path: str | Path | None = None, ax: Any = None) -> Any:
        """Draw the losses of all batch sizes over samples, in front of the order floor; needs matplotlib.

        Args:
            path: a file to write; None: none.
            ax: matplotlib's axes to draw into; None: a new figure's.
        """
        try:
            from matplotlib.figure import Figure
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "plot() needs matplotlib; install it (pip install matplotlib), or print the result instead",
                name="matplotlib",
            ) from error
        if ax is None:
            ax = Figure(figsize=(6.4, 4.0), layout="constrained").add_subplot()
        # Fewer marks where a run was lost.
        same = [list(column) for column in zip(*(c.losses for c in [self.curves[0], *self.floors]), strict=False)]
        ax.fill_between(
            self.samples[: len(same)], [min(c) for c in same], [max(c) for c in same], color="0.85", label="order floor"
        )
        shades = [i / max(1, len(self.curves) - 1) for i in range(len(self.curves))]
        for curve, shade in zip(self.curves, shades, strict=True):
            color = (0.9 * shade, 0.35, 0.8 * (1 - shade))
            ax.plot(self.samples[: len(curve.losses)], curve.losses, color=color, label=f"B = {curve.batch}")
        every = [loss for curve in self.curves for loss in curve.losses]
        if all(math.isfinite(loss) and loss > 0 for loss in every):
            ax.set_yscale("log")
        ax.set(xlabel="samples", ylabel="training loss", title="invariant" if self.ok else "not invariant")
        ax.legend(frameon=False)
        if path is not None:
            ax.figure.savefig(path, dpi=150)
        return ax.figure


def _json(curve: Curve) -> dict[str, Any]:
    losses = [loss if math.isfinite(loss) else None for loss in curve.losses]
    return {"batch_size": curve.batch, "updates": curve.updates, "losses": losses, "diverged": curve.diverged}


def _number(value: float) -> str:
    """Write a difference of log losses."""
    return "0" if value == 0 else f"{value:.2g}"

"""A change of batch size: the scaled hyperparameters, the half-lives of the averages, and warnings."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from invariant_adam.scaling import Hyperparameters, scale

LARGE = 0.5  # an update that replaces this share of m is no longer small


class HalfLife(NamedTuple):
    """How long an EMA takes to forget half of what it held."""

    updates: float
    samples: float


class Plan(NamedTuple):
    """The hyperparameters of a run that was tuned at one batch size, at another."""

    tuned: Hyperparameters
    tuned_batch: int
    batch: int
    micro_batch: int
    rule: str
    scaled: Hyperparameters
    others: dict[str, Hyperparameters | str]  # the other rules; where one is not valid, why
    half_lives: dict[str, tuple[HalfLife, HalfLife]]  # of m and v: at the tuned batch size, at the new one
    warnings: list[str]
    notes: list[str]

    @property
    def kappa(self) -> int:
        """Micro-batches per update."""
        return self.batch // self.micro_batch

    @property
    def rho(self) -> float:
        """How much larger the batch is than the tuned one."""
        return self.batch / self.tuned_batch

    def asdict(self) -> dict[str, Any]:
        """Return the plan as JSON holds it."""
        return {
            "command": "scale",
            "rule": self.rule,
            "kappa": self.kappa,
            "rho": self.rho,
            "micro_batch_size": self.micro_batch,
            "tuned": {"batch_size": self.tuned_batch, **self.tuned._asdict()},
            "scaled": {"batch_size": self.batch, **self.scaled._asdict()},
            "other_rules": {
                rule: {"error": h} if isinstance(h, str) else h._asdict() for rule, h in self.others.items()
            },
            "half_lives": {
                name: {"tuned": tuned._asdict(), "scaled": scaled._asdict()}
                for name, (tuned, scaled) in self.half_lives.items()
            },
            "warnings": self.warnings,
            "notes": self.notes,
        }


def plan(
    lr: float,
    betas: tuple[float, float],
    weight_decay: float,
    *,
    tuned_batch: int,
    batch: int,
    micro_batch: int,
    rule: str = "exponential",
) -> Plan:
    """Scale hyperparameters tuned at `tuned_batch` samples to `batch` samples and say what to look out for.

    >>> p = plan(3e-4, (0.9, 0.95), 0.0, tuned_batch=512, batch=4096, micro_batch=32)
    >>> p.kappa, p.rho, round(p.scaled.lr, 12)
    (128, 8.0, 0.0024)
    >>> [round(h.samples, 2) for h in p.half_lives["m"]]  # the exponential rule keeps memory in samples
    [3368.35, 3368.35]
    """
    for name, value in (("--from", tuned_batch), ("--to", batch), ("--micro-batch", micro_batch)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1 sample, got {value}")
    if batch % micro_batch:
        below, above = batch // micro_batch * micro_batch, -(-batch // micro_batch) * micro_batch
        fitting = f"{below} or {above}" if below else f"{above}"
        raise ValueError(
            f"--micro-batch {micro_batch} does not divide --to {batch}: an update is a whole number of "
            f"micro-batches; use --to {fitting}, or --micro-batch {math.gcd(batch, micro_batch)}"
        )
    tuned = Hyperparameters(lr, betas, weight_decay)
    scaled = scale(*tuned, from_batch=tuned_batch, to_batch=batch, rule=rule)
    others: dict[str, Hyperparameters | str] = {}
    for other in ("exponential", "linear", "square_root"):
        if other != rule:
            try:
                others[other] = scale(*tuned, from_batch=tuned_batch, to_batch=batch, rule=other)
            except ValueError as error:
                others[other] = str(error)
    half_lives = {
        name: (half_life(betas[i], tuned_batch), half_life(scaled.betas[i], batch)) for i, name in enumerate("mv")
    }
    p = Plan(tuned, tuned_batch, batch, micro_batch, rule, scaled, others, half_lives, [], [])
    p.warnings.extend(_warnings(p))
    p.notes.extend(_notes(p))
    return p


def half_life(beta: float, batch: float) -> HalfLife:
    """Return the half-life of an EMA with coefficient β per update of `batch` samples.

    >>> half_life(0.5, 32)
    HalfLife(updates=1.0, samples=32.0)
    """
    updates = math.log(0.5) / math.log(beta) if beta > 0 else 0.0
    return HalfLife(updates, updates * batch)


def _warnings(p: Plan) -> list[str]:
    found = []
    share = p.rho * (1 - p.tuned.betas[0])
    if share >= LARGE:
        limit = math.ceil(LARGE / (1 - p.tuned.betas[0]) * p.tuned_batch - 1e-9)
        found.append(
            f"an update is no longer small: rho*(1-beta1) = {share:.3g}, at or above {LARGE:g}. The theory is about "
            f"small updates, so expect a drift from the run at {p.tuned_batch}; stay below {limit} samples, or tune "
            "with a larger beta1"
        )
    for i, name in enumerate("mv"):
        updates = p.half_lives[name][1].updates
        if updates < 1:
            found.append(
                f"{name} forgets more than half of its history in one update (half-life {updates:.2g} updates at "
                f"batch size {p.batch}); a smaller batch or a larger beta{i + 1} restores the average"
            )
    return found


def _notes(p: Plan) -> list[str]:
    found = []
    if p.kappa == 1:
        found.append("one micro-batch per update: this is standard Adam at this batch size")
    if p.rule == "square_root":
        found.append('rule="square_root" is for standard Adam; invariant Adam takes "exponential" or "linear"')
    elif p.micro_batch < p.tuned_batch:
        found.append(
            f"values tuned with standard Adam at {p.tuned_batch} belong to --micro-batch {p.tuned_batch}; squares of "
            f"{p.micro_batch} samples hold more noise, so steps are shorter: tune with --micro-batch {p.micro_batch}"
        )
    return found

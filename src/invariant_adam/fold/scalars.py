"""The scalars of an update: how much each moment keeps of itself, what a micro-batch adds, what debiases it.

An update of κ̂ expected micro-batches folds each gradient as it comes, with a = 1 − γ′ and b = γ′/κ̂:

    first     m ← a·m + b·g_1        later     m ← m + b·g_k        (v the same with g²)

After κ of them the weights of all gradients and of the old m sum to c = a + bκ, which is 1 when κ = κ̂. The average
is m/c; the division is owed, not done: c is kept beside the moment, enters the next first fold and the step's own
scalars, and no pass over memory is spent on it. P ← P·a/c is the share of the zero that the average began with, so
m/(c(1−P)) is debiased, exactly, for any history of batch sizes. All of it is floats; the moments are elsewhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ..scaling import RULES, check_rho

Counters = dict[str, float]


def rho_at(group: dict[str, Any], kappa: float) -> float:
    """ρ = κM/B₀: how much larger an update of κ micro-batches is than the tuned one."""
    micro = group["micro_batch_size"] or 1
    return float(kappa * micro / (group["tuned_batch_size"] or micro))


def tuned_kappa(group: dict[str, Any]) -> float:
    """B₀/M: the micro-batches of the tuned batch."""
    micro = group["micro_batch_size"] or 1
    return float((group["tuned_batch_size"] or micro) / micro)


def betas_at(group: dict[str, Any], kappa: float) -> tuple[float, float]:
    """β₁′ and β₂′ of an update of κ micro-batches; refused where the rule has none."""
    name, rho = group["rule"], rho_at(group, kappa)
    micro = group["micro_batch_size"] or 1
    check_rho(name, rho, group["betas"], batch=kappa * micro, tuned=group["tuned_batch_size"] or micro)
    return RULES[name].betas(group["betas"], rho)


def fresh() -> Counters:
    """Return the counters of moments that are zero."""
    return {
        "debias1": 1.0,  # P of each moment: the share of the zero it began with
        "debias2": 1.0,
        "norm1": 1.0,  # c of each moment: what it must still be divided by
        "norm2": 1.0,
        "kappa": 0.0,  # micro-batches of the last update
        "noise": 0.0,  # Σ of the squared weights in m: how much of the gradient noise it still holds
    }


def after_adam(betas: tuple[float, float], step: float) -> Counters:
    """Return the counters of moments that standard Adam left after `step` updates."""
    beta1, beta2 = betas
    noise = (1 - beta1) * (1 - beta1 ** (2 * step)) / (1 + beta1)  # γ²(1 + β² + … + β^(2t−2))
    return fresh() | {"debias1": beta1**step, "debias2": beta2**step, "noise": noise}


@dataclass(slots=True)
class Tally:
    """One parameter in the open update: its coefficients, and the micro-batches folded so far."""

    a: tuple[float, float] | None  # what the moments keep of themselves; None: free, chosen when κ is known
    b: tuple[float, float]  # what one micro-batch adds
    keep: tuple[float, float]  # factor of the next fold on the moments: a over the c that is owed, then 1
    kappa: float = 0.0  # micro-batches folded; a ragged one counts n/M

    def copy(self) -> Tally:
        """Return another tally that stands where this one does."""
        return Tally(self.a, self.b, self.keep, self.kappa)


def begin_free() -> Tally:
    """Begin the first update of all: m = v = 0, so any scale will do until κ is known.

    Plain sums are folded, and `close` chooses a. A constant κ is therefore exact with nothing declared.
    """
    return Tally(a=None, b=(1.0, 1.0), keep=(1.0, 1.0))


def begin(counters: Counters, betas: tuple[float, float], kappa: float) -> Tally:
    """Begin an update of `kappa` expected micro-batches, whose own betas are `betas`."""
    return Tally(
        a=betas,
        b=((1 - betas[0]) / kappa, (1 - betas[1]) / kappa),
        keep=(betas[0] / counters["norm1"], betas[1] / counters["norm2"]),
    )


def close(counters: Counters, tally: Tally, betas: tuple[float, float]) -> Counters:
    """Return the counters after an update of `tally.kappa` micro-batches.

    Args:
        counters: those before the update.
        tally: what was folded.
        betas: the betas of an update of exactly `tally.kappa` micro-batches; used where the scale was free.

    >>> tally = begin_free()
    >>> tally.kappa = 2.0  # two gradients summed: m = g₁ + g₂ is 20 times the average 0.1·mean g
    >>> new = close(fresh(), tally, (0.9, 0.999))
    >>> round(new["norm1"], 9), round(new["debias1"], 9)
    (20.0, 0.9)
    """
    kappa = tally.kappa
    # Free: the a for which the plain sums, b = 1, are an average with exactly γ' = 1 - β'.
    a1, a2 = tally.a or (kappa * betas[0] / (1 - betas[0]), kappa * betas[1] / (1 - betas[1]))
    b1, b2 = tally.b
    c1, c2 = a1 + b1 * kappa, a2 + b2 * kappa
    return {
        "debias1": counters["debias1"] * a1 / c1,
        "debias2": counters["debias2"] * a2 / c2,
        "norm1": c1,
        "norm2": c2,
        "kappa": kappa,
        "noise": (a1 / c1) ** 2 * counters["noise"] + (b1 / c1) ** 2 * kappa,
    }


def shares(counters: Counters, tally: Tally, betas: tuple[float, float]) -> tuple[float, float]:
    """Return the shares in m̂ and v̂ of an update of `tally.kappa` micro-batches; see `close` for the arguments."""
    after = close(counters, tally, betas)
    kept = ((tally.a or betas)[i] / (after[f"norm{i + 1}"] if tally.a else 1.0) for i in (0, 1))
    one, two = ((1 - keep) / (1 - after[f"debias{i}"]) for i, keep in enumerate(kept, 1))
    return one, two


def debias(counters: Counters) -> tuple[float, float]:
    """Return x, y with m̂ = m/x and √v̂ = √v/y, so that m̂/(√v̂+ε) = (y/x)·m/(√v + ε·y)."""
    return counters["norm1"] * (1 - counters["debias1"]), math.sqrt(counters["norm2"] * (1 - counters["debias2"]))

"""The paper's theorems, numerically: how fast two ways through the same samples approach each other.

Let η = δη̄ and γᵢ = δγ̄ᵢ, and start both ways in one state (w, m, v), with hyperparameters that are scaled from one
micro-batch to those of an update.

- Theorem 1: κ updates of Micro Adam, one per micro-batch, against one update of invariant Adam over the same κ.
- Theorem 2: updates of κ′ micro-batches against updates of κ″, both of invariant Adam, over as many micro-batches as
  both divide.
- The warm-up, which has no number: κ steps of SGD against one.

They say that the changes of the state, divided by δ, have the same limit as δ → 0. Here the difference is measured at
δ = 2⁻¹ … 2⁻¹² on a tanh network with noisy data, and the order of convergence fitted: 1 where the limits are equal, 0
where they differ. "Debiased" is measured in the middle of the debiasing's transient, the other in the limit of a long
run.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from invariant_adam import reference
from invariant_adam.reference import Gradient, State
from invariant_adam.scaling import Hyperparameters, scale

from .record import provenance

DELTAS = tuple(2.0**-i for i in range(1, 13))
FIT = DELTAS[5:]  # the tail 2⁻⁶ … 2⁻¹²: larger steps still show the next order
THRESHOLD = 0.9

Algorithm = Callable[[State, Sequence[Gradient], Hyperparameters], State]
ALGORITHMS: dict[str, Algorithm] = {"invariant": reference.invariant_adam, "standard": reference.standard_adam}
WARM_UP, FIRST, SECOND = "SGD warm-up", "Theorem 1", "Theorem 2"


class Claim(NamedTuple):
    """One quantity of one theorem under one rule: its differences over δ and the fitted order."""

    theorem: str
    rule: str
    debiased: bool
    quantity: str
    differences: list[float]  # ‖difference of the state updates‖/δ, one for each of DELTAS
    order: float

    @property
    def holds(self) -> bool:
        """Whether the order reaches the threshold; an order that is not a number does not."""
        return self.order >= THRESHOLD


def verify(
    algorithm: Algorithm = reference.invariant_adam, *, kappa: int = 4, against: int = 6, seed: int = 0
) -> list[Claim]:
    """Measure every claim with `algorithm` in the place of invariant Adam.

    Args:
        algorithm: one of `reference`.
        kappa: κ of Theorem 1 and of the warm-up, κ′ of Theorem 2, in micro-batches.
        against: κ″ of Theorem 2, another number of micro-batches.
        seed: of the data and of the starting weights.

    >>> claims = verify(kappa=2, against=3)
    >>> all(claim.holds for claim in claims)
    True
    >>> {claim.quantity for claim in verify(reference.standard_adam, kappa=2, against=3) if not claim.holds}
    {'v'}
    """
    if kappa < 2:
        raise ValueError(f"kappa must be at least 2 (at 1 the algorithms are one and the same), got {kappa}")
    if against < 1 or against == kappa:
        raise ValueError(f"against must be at least 1 and not kappa, which is {kappa}, got {against}")
    start, grads = problem(math.lcm(kappa, against), seed)
    first = grads[:kappa]
    claims = [_claim(WARM_UP, "sgd", False, "w", [_sgd_difference(start.w, first, delta) for delta in DELTAS])]
    one_by_one, at_once, other = _Way(reference.micro_adam, 1), _Way(algorithm, kappa), _Way(algorithm, against)
    for theorem, ways, samples in ((FIRST, (one_by_one, at_once), first), (SECOND, (at_once, other), grads)):
        for rule, debiased in itertools.product(("linear", "exponential"), (False, True)):
            rows = [_differences(ways, start, samples, delta, rule, debiased) for delta in DELTAS]
            claims += [_claim(theorem, rule, debiased, q, [row[q] for row in rows]) for q in ("m", "v", "w")]
    return claims


def other_kappa(kappa: int) -> int:
    """Give a κ″ that is near to κ and meets it soon: half as much again, or twice as much where κ is odd.

    >>> other_kappa(4), other_kappa(5)
    (6, 10)
    """
    return 2 * kappa if kappa % 2 else 3 * kappa // 2


def report(algorithm: str = "invariant", *, kappa: int = 4, against: int = 6, seed: int = 0) -> dict[str, Any]:
    """Return the claims with their settings, as JSON holds them."""
    claims = verify(ALGORITHMS[algorithm], kappa=kappa, against=against, seed=seed)
    return {
        "command": "verify",
        "algorithm": algorithm,
        "kappa": kappa,
        "against": against,
        "seed": seed,
        "deltas": list(DELTAS),
        "fitted_over": [FIT[0], FIT[-1]],
        "threshold": THRESHOLD,
        "passed": all(claim.holds for claim in claims),
        "claims": [claim._asdict() | {"holds": claim.holds} for claim in claims],
        "provenance": provenance(),
    }


def problem(kappa: int, seed: int) -> tuple[State, list[Gradient]]:
    """Return a state in the middle of training and κ micro-batch gradients: a tanh network on noisy data."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def micro_batch() -> Gradient:
        x = randn(4, 3)
        y = torch.sin(2 * x[:, 0]) + x[:, 1] * x[:, 2] + 0.5 * randn(4)

        def grad(w: Tensor) -> Tensor:
            w = w.detach().requires_grad_()
            a, b, c, d = w.split((24, 8, 8, 1))
            output = torch.tanh(F.linear(x, a.view(8, 3), b)) @ c + d
            (g,) = torch.autograd.grad((output - y).square().mean(), w)
            return g

        return grad

    warm_up = [micro_batch() for _ in range(20)]  # so that m and v are what training makes of them
    state = reference.micro_adam(
        reference.start(0.5 * randn(41)), warm_up, Hyperparameters(lr=0.02, betas=(0.9, 0.95), weight_decay=0.0)
    )
    return state, [micro_batch() for _ in range(kappa)]


def _step_sizes(kappa: int, delta: float) -> Hyperparameters:
    """η = δη̄ and γ = δγ̄ of one micro-batch; a mini-batch at δ = 1 would replace all of m, whatever κ is."""
    eta, gamma1, gamma2 = 0.1 / kappa, 1.0 / kappa, 0.5 / kappa
    return Hyperparameters(delta * eta, (1 - delta * gamma1, 1 - delta * gamma2), weight_decay=0.1)


class _Way(NamedTuple):
    """How micro-batches are gone through: an algorithm, and how many of them make an update."""

    algorithm: Algorithm
    kappa: int

    def end(self, state: State, grads: Sequence[Gradient], micro: Hyperparameters, rule: str) -> State:
        """The state after all of `grads`; `micro` are the hyperparameters of one micro-batch."""
        mini = scale(*micro, from_batch=1, to_batch=self.kappa, rule=rule)
        for i in range(0, len(grads), self.kappa):
            state = self.algorithm(state, grads[i : i + self.kappa], mini)
        return state


def _differences(
    ways: Sequence[_Way], start: State, grads: Sequence[Gradient], delta: float, rule: str, debiased: bool
) -> dict[str, float]:
    kappa = max(way.kappa for way in ways)
    micro = _step_sizes(kappa, delta)
    # Time t̄ = κ (one mini-batch at δ = 1) is κ/δ micro-batches: the products are near e^(−γ̄t̄) = e⁻¹, e^(−1/2).
    updates = kappa / delta
    debias = (micro.betas[0] ** updates, micro.betas[1] ** updates) if debiased else (0.0, 0.0)
    one, other = (way.end(start._replace(debias=debias), grads, micro, rule) for way in ways)
    return {q: _norm(getattr(one, q) - getattr(other, q)) / delta for q in ("m", "v", "w")}


def _sgd_difference(w: Tensor, grads: Sequence[Gradient], delta: float) -> float:
    kappa = len(grads)
    micro = _step_sizes(kappa, delta)
    mini = scale(*micro, from_batch=1, to_batch=kappa, rule="sgd")
    small = w
    for grad in grads:
        small = reference.sgd(small, [grad], micro)
    return _norm(small - reference.sgd(w, grads, mini)) / delta


def _norm(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x))


def _claim(theorem: str, rule: str, debiased: bool, quantity: str, differences: list[float]) -> Claim:
    return Claim(theorem, rule, debiased, quantity, differences, fit_order(DELTAS, differences))


def fit_order(deltas: Sequence[float], differences: Sequence[float]) -> float:
    """Return the least-squares slope of log₂(difference) over log₂(δ) on the tail `FIT`.

    >>> round(fit_order(DELTAS, [3 * delta**2 for delta in DELTAS]), 12)
    2.0
    """
    tail = [(d, e) for d, e in zip(deltas, differences, strict=True) if d in FIT]
    if not all(math.isfinite(e) for _, e in tail):
        return math.nan
    if any(e == 0 for _, e in tail):  # no difference at all: nothing to fit, and nothing wrong
        return math.inf
    points = [(math.log2(d), math.log2(e)) for d, e in tail]
    x_mean, y_mean = (sum(p[i] for p in points) / len(points) for i in (0, 1))
    return sum((x - x_mean) * (y - y_mean) for x, y in points) / sum((x - x_mean) ** 2 for x, _ in points)

"""The paper's theorems, numerically: how fast invariant Adam approaches Micro Adam as the steps shrink.

Let η = δη̄ and γᵢ = δγ̄ᵢ, and start two optimizers in one state (w, m, v). Micro Adam takes κ updates, one per
micro-batch; the other algorithm takes one update over the same κ micro-batches, with its hyperparameters scaled
from one micro-batch to κ. The theorems say that both state updates, divided by δ, have the same limit as δ → 0.
Here the difference is measured at δ = 2⁻¹ … 2⁻¹² on a tanh network with noisy data, and the order of convergence
fitted: 1 where the theorem holds, 0 where the limits differ.
"""

from __future__ import annotations

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
THEOREMS = {
    "SGD": "the warm-up: κ small SGD steps against one with κ times the learning rate",
    "Theorem 1": "without debiasing (the limit of a long run): κ updates of Micro Adam against one",
    "Theorem 2": "with debiasing, in the middle of its transient: κ updates of Micro Adam against one",
}


class Claim(NamedTuple):
    """One quantity of one theorem under one rule: its differences over δ and the fitted order."""

    theorem: str
    rule: str
    quantity: str
    differences: list[float]  # ‖difference of the state updates‖/δ, one for each of DELTAS
    order: float

    @property
    def holds(self) -> bool:
        """Whether the order reaches the threshold; an order that is not a number does not."""
        return self.order >= THRESHOLD


def verify(algorithm: Algorithm = reference.invariant_adam, *, kappa: int = 4, seed: int = 0) -> list[Claim]:
    """Measure every claim with `algorithm` in the place of invariant Adam.

    >>> claims = verify(kappa=2)
    >>> all(claim.holds for claim in claims)
    True
    >>> [claim.quantity for claim in verify(reference.standard_adam, kappa=2) if not claim.holds]
    ['v', 'v', 'v', 'v']
    """
    if kappa < 2:
        raise ValueError(f"kappa must be at least 2 (at 1 the algorithms are one and the same), got {kappa}")
    start, grads = problem(kappa, seed)
    claims = [_claim("SGD", "sgd", "w", [_sgd_difference(start.w, grads, delta) for delta in DELTAS])]
    for theorem in ("Theorem 1", "Theorem 2"):
        for rule in ("linear", "exponential"):
            rows = [_adam_differences(algorithm, start, grads, delta, theorem, rule) for delta in DELTAS]
            claims += [_claim(theorem, rule, q, [row[q] for row in rows]) for q in ("m", "v", "w")]
    return claims


def report(algorithm: str = "invariant", *, kappa: int = 4, seed: int = 0) -> dict[str, Any]:
    """Return the claims with their settings, as JSON holds them."""
    claims = verify(ALGORITHMS[algorithm], kappa=kappa, seed=seed)
    return {
        "command": "verify",
        "algorithm": algorithm,
        "kappa": kappa,
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


def _adam_differences(
    algorithm: Algorithm, start: State, grads: Sequence[Gradient], delta: float, theorem: str, rule: str
) -> dict[str, float]:
    kappa = len(grads)
    micro = _step_sizes(kappa, delta)
    # Time t̄ = κ (one mini-batch at δ = 1) is κ/δ micro-batches: the products are near e^(−γ̄t̄) = e⁻¹, e^(−1/2).
    updates = kappa / delta
    debias = (micro.betas[0] ** updates, micro.betas[1] ** updates) if theorem == "Theorem 2" else (0.0, 0.0)
    state = start._replace(debias=debias)
    mini = scale(*micro, from_batch=1, to_batch=kappa, rule=rule)
    small, large = reference.micro_adam(state, grads, micro), algorithm(state, grads, mini)
    return {q: _norm(getattr(small, q) - getattr(large, q)) / delta for q in ("m", "v", "w")}


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


def _claim(theorem: str, rule: str, quantity: str, differences: list[float]) -> Claim:
    return Claim(theorem, rule, quantity, differences, fit_order(DELTAS, differences))


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

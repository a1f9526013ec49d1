"""Hyperparameters at one batch size -> at another, by five rules (floats only, no tensors)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple


class Hyperparameters(NamedTuple):
    """Adam's hyperparameters as they hold at one batch size."""

    lr: float
    betas: tuple[float, float]
    weight_decay: float


class Rule(NamedTuple):
    """What a rule makes of each hyperparameter when the batch is ρ times the tuned one."""

    lr: Callable[[float], float]  # ρ -> factor on the learning rate
    beta: Callable[[float, float], float]  # (β, ρ) -> β of one update
    decay: Callable[[float, float], float]  # (ηλ, ρ) -> share of the weights that decays in one update
    needs_small: bool = False  # valid only while ργ < 1
    power: float = 1.0  # of ρ, in what `beta` gets for β₁

    def betas(self, betas: tuple[float, float], rho: float) -> tuple[float, float]:
        """Return β₁′ and β₂′ of one update."""
        return self.beta(betas[0], rho**self.power), self.beta(betas[1], rho)


def long_momentum(power: float) -> Rule:
    """Return the exponential rule with γ₁′ = 1 − (1−γ₁)^(ρ^power), about ρ^power·γ₁: larger batches keep more of m.

    Averaging with rate γ is stable while step · curvature < 2(2−γ)/γ. The step of one update is ρη, so with ρ^p·γ₁ the
    largest stable η falls as ρ^−(1+p) instead of ρ^−2. The price is delay: m looks ρ^(1−p) times further back.
    """
    return RULES["exponential"]._replace(power=power)


RULES = {
    "linear": Rule(
        lr=lambda rho: rho,
        beta=lambda beta, rho: 1 - rho * (1 - beta),
        decay=lambda d, rho: rho * d,
        needs_small=True,
    ),
    "exponential": Rule(
        lr=lambda rho: rho,
        beta=lambda beta, rho: beta**rho,
        decay=lambda d, rho: -math.expm1(rho * math.log1p(-d)),  # 1 - (1-d)^ρ without cancellation
    ),
    "square_root": Rule(
        lr=math.sqrt,
        beta=lambda beta, rho: 1 - rho * (1 - beta),
        decay=lambda d, rho: math.sqrt(rho) * d,
        needs_small=True,
    ),
    "sgd": Rule(
        lr=lambda rho: rho,
        beta=lambda beta, rho: beta,
        decay=lambda d, rho: rho * d,
    ),
}
RULES["long_momentum"] = long_momentum(0.25)
INVARIANT = ("exponential", "linear", "long_momentum")  # the rules of `InvariantAdam`


def scale(
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    weight_decay: float = 0.0,
    *,
    from_batch: float,
    to_batch: float,
    rule: str = "exponential",
) -> Hyperparameters:
    """Return the hyperparameters at `to_batch` that follow the run tuned at `from_batch`.

    With ρ = to_batch / from_batch and γ = 1 − β:

    =============  ====  ==============  ================
    rule           lr    γ               decay per update
    =============  ====  ==============  ================
    linear         ρη    ργ              1 − ρηλ
    exponential    ρη    1 − (1−γ)^ρ     (1 − ηλ)^ρ
    long_momentum  ρη    see below       (1 − ηλ)^ρ
    square_root    √ρη   ργ              1 − √ρηλ
    sgd            ρη    unchanged       1 − ρηλ
    =============  ====  ==============  ================

    `long_momentum` has the exponential rule's γ₂ and 1 − (1−γ₁)^√√ρ for γ₁: a larger batch keeps more of m, which is
    more stable and reacts later. The theorems are about the other two.

    The returned `weight_decay` is the λ′ for which AdamW's own factor 1 − η′λ′ is the one in the table, so the
    result can be handed to `torch.optim.AdamW` as it is. ε does not scale. `square_root` is for standard Adam.

    Args:
        lr: learning rate η per update at `from_batch`.
        betas: EMA coefficients per update at `from_batch`.
        weight_decay: decoupled decay λ.
        from_batch: samples per update where the hyperparameters hold.
        to_batch: samples per update where they are wanted; larger or smaller.
        rule: "linear", "exponential", "long_momentum", "square_root" or "sgd".

    >>> h = scale(1e-3, (0.9, 0.999), 0.1, from_batch=32, to_batch=128, rule="linear")
    >>> h.lr, round(h.betas[0], 12), h.betas[1], h.weight_decay
    (0.004, 0.6, 0.996, 0.1)
    >>> scale(1e-3, (0.9, 0.999), from_batch=32, to_batch=128).betas[0] == 0.9**4
    True
    """
    check_hyperparameters(lr, betas, 0.0, weight_decay)
    decay = check_decay(lr, weight_decay)
    for name, batch in (("from_batch", from_batch), ("to_batch", to_batch)):
        if not 0 < batch < math.inf:
            raise ValueError(f"{name} must be a positive number of samples, got {batch}")
    if rule not in RULES:
        raise ValueError(f"rule must be one of {', '.join(map(repr, RULES))}, got {rule!r}")
    law = RULES[rule]
    rho = to_batch / from_batch
    check_rho(rule, rho, betas, batch=to_batch, tuned=from_batch)
    new_lr = lr * law.lr(rho)
    new_betas = law.betas(betas, rho)
    # λ' from 1 - η'λ' = 1 - decay; where nothing moves (η = 0) any λ' does, and λ stays.
    share = law.decay(decay, rho)
    check_keep(1 - share, rule, lr, weight_decay, rho)
    new_decay = share / new_lr if new_lr else weight_decay
    return Hyperparameters(new_lr, new_betas, new_decay)


def update_shares(
    betas: tuple[float, float],
    *,
    from_batch: float,
    to_batch: float,
    seen: float = math.inf,
    rule: str = "exponential",
) -> tuple[float, float]:
    """Return the shares in m̂ and v̂ of an update of `to_batch` samples: how far from small it is.

        (1 − β′) / (1 − β′^(n+1)),  n = seen / to_batch

    Args:
        betas: EMA coefficients per update at `from_batch`.
        from_batch: samples per update where the hyperparameters hold.
        to_batch: samples of the update, and of those before it.
        seen: samples before it; 0 for the first update, whose share is 1, inf for the long run.
        rule: as for `scale`.

    >>> update_shares((0.9, 0.99), from_batch=32, to_batch=128, seen=0)
    (1.0, 1.0)
    >>> [round(share, 4) for share in update_shares((0.9, 0.99), from_batch=32, to_batch=128)]
    [0.3439, 0.0394]
    """
    new = scale(0.0, betas, from_batch=from_batch, to_batch=to_batch, rule=rule).betas
    n = seen / to_batch
    one, two = ((1 - beta) / (1 - beta ** (n + 1)) for beta in new)
    return one, two


def check_rho(rule: str, rho: float, betas: tuple[float, float], *, batch: float, tuned: float) -> None:
    """Refuse a ρ at which an EMA of the rule would forget more than everything."""
    if not RULES[rule].needs_small:
        return
    for i, beta in enumerate(betas, 1):
        if not rho * (1 - beta) < 1:
            raise ValueError(
                f'rule="{rule}" needs rho*(1-beta{i}) < 1, got {rho * (1 - beta):.3g} at batch size {batch:g} '
                f'(tuned at {tuned:g}); use rule="exponential"'
            )


def check_decay(lr: float, weight_decay: float) -> float:
    """Return ηλ; refuse a decoupled decay that would flip the sign of the weights in one tuned update."""
    if not lr * weight_decay < 1:
        raise ValueError(
            f"lr*weight_decay must be below 1, got {lr:g}*{weight_decay:g} = {lr * weight_decay:g}: one update "
            "would turn the weights around; lower weight_decay or lr"
        )
    return lr * weight_decay


def check_keep(keep: float, rule: str, lr: float, weight_decay: float, rho: float) -> None:
    """Refuse an update whose decay would flip the sign of the weights at its own batch size."""
    if not keep > 0:
        raise ValueError(
            f'rule="{rule}" decays the weights by a factor of {keep:g} at rho={rho:g} (lr={lr:g}, '
            f'weight_decay={weight_decay:g}), which turns them around; use rule="exponential", or lower weight_decay'
        )


def check_hyperparameters(lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
    """Refuse values for which Adam has no meaning, by name."""
    if not 0 <= lr < math.inf:
        raise ValueError(f"lr must be a finite number of at least 0, got {lr}")
    if len(betas) != 2:
        raise ValueError(f"betas must be two numbers, got {betas}")
    for i, beta in enumerate(betas, 1):
        if not 0 <= beta < 1:
            raise ValueError(f"beta{i} must be in [0, 1), got betas={tuple(betas)}")
    if not 0 <= eps < math.inf:
        raise ValueError(f"eps must be a finite number of at least 0, got {eps}")
    if not 0 <= weight_decay < math.inf:
        raise ValueError(f"weight_decay must be a finite number of at least 0, got {weight_decay}")

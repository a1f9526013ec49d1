"""How small an update is: its share in m̂ and v̂, and its step relative to the weights.

The theorems are about small updates. ργ says how small one is in the long run, and nothing of the first ones: debiasing
makes the first update all that the averages have. The share of an update counts that in. It is 1 for the first update,
about κ over the micro-batches seen soon after, and 1 − β′ in the long run.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .fold import scalars
from .scaling import RULES


class UpdateShare(NamedTuple):
    """How much of the averages, and of the weights, an update is."""

    kappa: float  # its micro-batches
    m: float  # its share in m̂, in (0, 1]
    v: float  # its share in v̂, in (0, 1]
    relative_step: Tensor | None  # |Δw|/|w| without decay, a number on the device; None while the update is open


@torch.no_grad()
def update_share(optimizer: Any) -> UpdateShare:
    """Return how large the open update is so far, or the last one where none is open.

    The averages are Σ of weights times gradients, debiased by the sum of all weights, 1 − P. An update that keeps a of
    an average and adds κ gradients with b each, c = a + bκ, has the share

        (bκ/c) / (1 − P)

    Where parameters differ, the largest shares are given. The relative step is a pass over m, v and w on their device;
    nothing waits for it until you read the number.

    Args:
        optimizer: an `InvariantAdam`, after its first backward.

    >>> from invariant_adam import InvariantAdam
    >>> w = torch.nn.Parameter(torch.ones(4))
    >>> opt = InvariantAdam([w], lr=0.01, betas=(0.9, 0.99))
    >>> for kappa in (1, 1, 2):
    ...     for _ in range(kappa):
    ...         w.sum().backward()
    ...     opt.step()
    ...     share = opt.update_share()
    ...     print(share.kappa, round(share.m, 3), round(share.v, 3), round(share.relative_step.item(), 3))
    1.0 1.0 1.0 0.01
    1.0 0.526 0.503 0.01
    2.0 0.539 0.504 0.021
    """
    queue = optimizer.queue
    if queue.update.tallies:
        found = [scalars.shares(s, t, scalars.betas_at(g, t.kappa)) for g, t, s, _ in queue.histories()]
        return UpdateShare(queue.update.kappa, max(m for m, _ in found), max(v for _, v in found), None)
    groups = [(group, [queue.moments.state[p] for p in group["params"]]) for group in optimizer.param_groups]
    moved = [(group, s) for group, states in groups for s in states if s and s["debias1"] < 1.0]
    if not moved:
        raise RuntimeError("update_share() before the first backward: there is no update yet; call it after one")
    found = queue.shares or [_after_load(group, state) for group, state in moved]
    kappa = optimizer.param_groups[0]["kappa"]
    return UpdateShare(kappa, max(m for m, _ in found), max(v for _, v in found), _relative_step(optimizer))


def _after_load(group: dict[str, Any], state: dict[str, Any]) -> tuple[float, float]:
    """The share of a last update that another process made, as that of one whose size was announced."""
    beta1, beta2 = scalars.betas_at(group, state["kappa"] or scalars.tuned_kappa(group))
    return (1 - beta1) / (1 - state["debias1"]), (1 - beta2) / (1 - state["debias2"])


def _relative_step(optimizer: Any) -> Tensor:
    """|Δw|/|w| of the last update, at the learning rate that the groups have."""
    steps, weights = [], []
    device = None
    for group in optimizer.param_groups:
        for p in group["params"]:
            state = optimizer.queue.moments.state.get(p)
            if not state or state["debias1"] == 1.0:
                continue
            device = device or p.device
            x, y = scalars.debias(state)
            rho = scalars.rho_at(group, state["kappa"] or scalars.tuned_kappa(group))
            size = float(group["lr"]) * RULES[group["rule"]].lr(rho) * y / x
            m, v = state["exp_avg"], state["exp_avg_sq"]
            moved = m / v.sqrt().add_(group["eps"] * y or math.ulp(0.0))
            steps.append(_norm(moved, device) * size)
            weights.append(_norm(p.detach(), device))
    step, weight = (torch.linalg.vector_norm(torch.stack(norms)) for norms in (steps, weights))
    relative: Tensor = step / weight
    return relative


def _norm(t: Tensor, device: torch.device) -> Tensor:
    """The norm of a tensor that may be cut over ranks, in float32 at least, on `device`."""
    norm = torch.linalg.vector_norm(t, dtype=torch.promote_types(t.dtype, torch.float32))
    whole: Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    return whole.to(device)

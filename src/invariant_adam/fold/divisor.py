"""Notices a loss that is divided by κ although nobody said so.

Many trainers divide each micro-batch loss by κ. Then all squares are κ² too small. As long as κ is the same, this
cancels in m̂/√v̂ and nothing shows; when κ changes, v is on two scales at once. So the squares of an update are compared
with those before it when κ has changed, once.
"""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .queue import FoldQueue

_FEW = 16  # parameters that are looked at: the smallest ones
_CHANGE = 4.0  # of κ, at least: a smaller one could be chance


class _Look(NamedTuple):
    """What v was after an update; the sums stay on their device, so that nothing waits for them."""

    kappa: float
    sums: Tensor  # of the v of each parameter
    norms: list[float]  # what they must be divided by
    zeros: list[float]  # the share of the zero that each began with

    def means(self) -> Tensor:
        return self.sums.cpu().double() / torch.tensor(self.norms, dtype=torch.float64)


class DivisorWatch:
    """Compares the squares of two updates of different κ, and warns once if they differ by κ²."""

    def __init__(self) -> None:
        self.params: list[Tensor] = []
        self.looks: list[_Look] = []
        self.done = False

    def look(self, queue: FoldQueue) -> None:
        """Look at v after an update, or after a state was loaded."""
        if self.done or queue.loss_divisor != 1.0 or queue.launcher.captures:
            return
        state, kappa = queue.moments.state, queue.moments.groups[0]["kappa"]
        if not self.params or any(p not in state for p in self.params):
            self.looks = []
            self.params = sorted(state, key=Tensor.numel)[:_FEW]
        if any(state[p]["kappa"] != kappa for p in self.params):  # some came in a part of the micro-batches only
            self.looks = []
            return
        vs = [queue.reducer.local(state[p]["exp_avg_sq"]) for p in self.params]
        sums = torch.stack([norm.to(vs[0].device) for norm in torch._foreach_norm(vs, 1)])  # v >= 0
        counters = ([state[p][key] for p in self.params] for key in ("norm2", "debias2"))
        self.looks = [*self.looks[-2:], _Look(kappa, sums, *counters)]
        if len(self.looks) > 1 and self.looks[-2].kappa:
            self._compare()

    def _compare(self) -> None:
        new, before = self.looks[-1], self.looks[-2]
        change = math.log(before.kappa / new.kappa)
        if abs(change) < math.log(_CHANGE):
            return
        self.done = True
        earlier = self.looks[-3] if len(self.looks) > 2 else None
        now, then = _squares(new, before), _squares(before, earlier)
        jump = now / then if then > 0 < now else 1.0
        if 0.6 < math.log(jump) / (2 * change) < 1.4:
            warnings.warn(
                f"as κ went from {before.kappa:g} to {new.kappa:g}, the squared gradients became {jump:.2g} times "
                f"those of the update before. A loss divided by κ does that (a factor of {math.exp(2 * change):.2g}), "
                "and v is then on two scales. If your loop or trainer divides each loss by κ, say so: InvariantAdam("
                "loss_divisor=kappa), or a function that is asked at each micro-batch. If not, this was chance",
                RuntimeWarning,
                stacklevel=7,  # the line that calls step()
            )


def _squares(look: _Look, before: _Look | None) -> float:
    """Σ of the mean squares of one update: v = r·v_before + (1−r)·squares; the average v̂ where no more is known."""
    zeros = torch.tensor(look.zeros, dtype=torch.float64)
    if before is None:
        return float((look.means() / (1 - zeros)).sum())
    kept = zeros / torch.tensor(before.zeros, dtype=torch.float64)  # NaN, which nothing follows from, at 0/0
    return float(((look.means() - kept * before.means()) / (1 - kept)).sum())

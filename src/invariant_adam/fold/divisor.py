"""Notices a loss that is divided by κ although nobody said so.

Many trainers divide each micro-batch loss by κ. Then all squares are κ² too small. As long as κ is the same, this
cancels in m̂/√v̂ and nothing shows; when κ changes, v is on two scales at once. So once, when κ has changed for good, the
mean square since then is compared with that before.
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
_SOME = 4096  # elements of each, about: the look must cost nothing beside the step
_CHANGE = 4.0  # of κ, at least: a smaller one could be chance
_ENOUGH = 16.0  # micro-batches on each side: the squares of a few are chance, too


class _Look(NamedTuple):
    """What v was after an update; the sums stay on their device, so that nothing waits for them."""

    sums: Tensor  # of the v of each parameter, or a part of it
    norms: list[float]  # what they must be divided by
    zeros: list[float]  # the share of the zero that each began with

    def means(self) -> Tensor:
        return self.sums.cpu().double() / torch.tensor(self.norms, dtype=torch.float64)


class _Stretch(NamedTuple):
    """Updates of one κ, between two looks."""

    kappa: float
    micro_batches: float  # in them
    start: _Look | None  # None: with all that was before
    end: _Look

    def squares(self) -> float:
        """Σ of the mean squares: v = r·v_start + (1−r)·squares; of v̂, where the start is not known."""
        zeros = torch.tensor(self.end.zeros, dtype=torch.float64)
        if self.start is None:
            return float((self.end.means() / (1 - zeros)).sum())
        kept = zeros / torch.tensor(self.start.zeros, dtype=torch.float64)  # NaN, which nothing follows from, at 0/0
        return float(((self.end.means() - kept * self.start.means()) / (1 - kept)).sum())


class DivisorWatch:
    """Compares the squares of updates of different κ, and warns once if they differ by κ²."""

    def __init__(self) -> None:
        self.params: list[Tensor] = []
        self.now: _Stretch | None = None  # of the κ that updates have
        self.before: _Stretch | None = None  # of the κ that they had, if long enough
        self.done = False

    def look(self, queue: FoldQueue, loaded: bool = False) -> None:
        """Look at v after an update; or after a state was `loaded`, whose v is that of a long stretch."""
        if self.done or queue.loss_divisor != 1.0 or queue.launcher.captures:
            return
        state, kappa = queue.moments.state, queue.moments.groups[0]["kappa"]
        if not self.params or any(p not in state for p in self.params):
            self.forget()
            self.params = sorted(state, key=Tensor.numel)[:_FEW]
        if not kappa or any(state[p]["kappa"] != kappa for p in self.params):
            self.forget()  # some parameters came in a part of the micro-batches only
            return
        vs = [_part(queue.reducer.local(state[p]["exp_avg_sq"])) for p in self.params]
        sums = torch.stack([norm.to(vs[0].device) for norm in torch._foreach_norm(vs, 1)])  # v >= 0
        norms, zeros = ([state[p][key] for p in self.params] for key in ("norm2", "debias2"))
        new, now = _Look(sums, norms, zeros), self.now
        if now is None:
            self.now = _Stretch(kappa, _ENOUGH if loaded else kappa, None, new)
        elif now.kappa == kappa:
            self.now = now._replace(micro_batches=now.micro_batches + kappa, end=new)
        else:
            self.before = now if now.micro_batches >= _ENOUGH else self.before
            self.now = _Stretch(kappa, kappa, now.end, new)
        if self.before is not None and self.now.micro_batches >= _ENOUGH:
            self._compare(self.before, self.now)

    def forget(self) -> None:
        """Compare nothing with what came so far: as a run grows in, κ changes just where gradients shrink fastest."""
        self.now = self.before = None

    def _compare(self, before: _Stretch, now: _Stretch) -> None:
        change = math.log(before.kappa / now.kappa)
        if abs(change) < math.log(_CHANGE):
            return
        self.done = True
        was, new = before.squares(), now.squares()
        jump = new / was if was > 0 < new else 1.0
        if 0.75 < math.log(jump) / (2 * change) < 1.25:
            warnings.warn(
                f"as κ went from {before.kappa:g} to {now.kappa:g}, the squared gradients became {jump:.2g} times what "
                f"they were. A loss divided by κ does that (a factor of {math.exp(2 * change):.2g}), and v is then on "
                "two scales. If your loop or trainer divides each loss by κ, say so: InvariantAdam("
                "loss_divisor=kappa), or a function that is asked at each micro-batch. If not, this was chance",
                RuntimeWarning,
                stacklevel=7,  # the line that calls step()
            )


def _part(v: Tensor) -> Tensor:
    """A view of the first rows of a tensor: the same elements each time."""
    return v[: max(1, _SOME * len(v) // v.numel())] if v.numel() > _SOME else v

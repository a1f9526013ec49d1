"""The update that is open: which micro-batches came, what each parameter has of them, and whether they are whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..kernels.adam import Fold
from . import checks, hooks
from .scalars import Tally

# Counts are sums of n/M; two that should be equal may differ by rounding.
_ROUNDING = 1 + 1e-9


@dataclass
class Update:
    """What is folded into an update that no step has closed yet."""

    tallies: dict[Tensor, Tally] = field(default_factory=dict)
    # Tallies that begin alike, by the history they go on from: nearly all parameters share one.
    begun: dict[Any, Tally] = field(default_factory=dict)
    # Weight of each micro-batch, by the autograd task or the fold() call that brought it.
    micro_batches: dict[int, float] = field(default_factory=dict)
    unfinished: set[int] = field(default_factory=set)  # autograd tasks that have not come to their end
    kinds: set[bool] = field(default_factory=set)  # whether gradients came by one pass, plainly, or both
    nested: bool = False  # a gradient came from a backward inside a backward
    expected: float | None = None  # κ as the user declared it
    part: bool = False  # of a mini-batch that is cut to grow in
    # Counted and not folded: small gradients that share a launch at the end of their backward, and those that wait
    # for the step because they are all that their parameter gets.
    queued: dict[Tensor, Fold] = field(default_factory=dict)
    late: dict[Tensor, Fold] = field(default_factory=dict)
    versions: dict[Tensor, int] = field(default_factory=dict)  # of the gradients in `late`, when they came
    elements: int = 0  # in `queued`

    @property
    def kappa(self) -> float:
        """κ, micro-batches so far; a ragged one counts n/M."""
        return max([sum(self.micro_batches.values()), *(tally.kappa for tally in self.tallies.values())])

    def expect(self, kappa: float) -> None:
        """Take the user's word for κ."""
        checks.check_positive("kappa", kappa)
        if self.tallies:
            raise RuntimeError(
                f"expect({kappa:g}) came after {self.kappa:g} micro-batches of this update were folded with another "
                "expectation; call it before the first backward of the update, or drop them with opt.abandon()"
            )
        self.expected = float(kappa)

    def refuse_open(self, what: str, why: str) -> None:
        """Refuse something that must not come in the middle of an update."""
        if self.tallies:
            folded = f"{self.kappa:g} micro-batch{' is' if self.kappa == 1 else 'es are'} folded"
            raise RuntimeError(f"{what} in the middle of an update: {folded} and not stepped, and {why}")

    def count_call(self, weight: float) -> None:
        """Count the micro-batch of a `fold()` call."""
        self.micro_batches[len(self.micro_batches)] = weight

    def count_backward(self, weight: float, finish: Callable[[], None]) -> None:
        """Count the backward that is running, once, whichever of its gradients asks; see `watch_backward`."""
        task = torch._C._current_graph_task_id()
        if task in self.micro_batches:
            return
        # A reentrant checkpoint runs backwards of its own inside the user's; they are no micro-batches.
        nested = hooks.inside_backward()
        self.micro_batches[task] = 0.0 if nested else weight
        self.nested |= nested
        self.watch_backward(finish)

    def watch_backward(self, finish: Callable[[], None]) -> None:
        """Remember the backward that is running, if one is, until it has come to its end; then call `finish`."""
        task = torch._C._current_graph_task_id()
        if task >= 0 and task not in self.unfinished:
            self.unfinished.add(task)

            @hooks.untraced
            def finished() -> None:
                self.unfinished.discard(task)
                finish()

            hooks.when_finished(finished)

    def written_over(self) -> list[Tensor]:
        """Parameters whose gradient was written over while it waited for the step, as one that a user holds may be."""
        return [p for p, f in self.late.items() if f.grad is not None and f.grad._version != self.versions[p]]

    def check_late(self, name: Callable[[Tensor], str]) -> None:
        """Refuse a gradient that is no longer the one that came."""
        for p in self.written_over():
            raise RuntimeError(
                f"the gradient of parameter {name(p)} was written over between its fold and step(), which reads it "
                f"because expect({self.expected:g}) says that it is the whole update. Keep it until step(), or leave "
                "expect() out; drop the update with opt.abandon()"
            )

    def check_whole(self, name: Callable[[Tensor], str]) -> None:
        """Refuse an update with nothing in it, with pieces missing, or with more than there should be.

        Args:
            name: parameter -> its name in messages.
        """
        if not self.tallies:
            raise RuntimeError(
                "step() found no gradient: no backward reached the parameters of this optimizer since the last step; "
                "check that it was built on the parameters the model has now"
            )
        if self.unfinished:
            raise RuntimeError(
                "a backward of this update did not come to its end, so that some parameters were folded and some were "
                "not; drop the update with opt.abandon() and run its micro-batches again"
            )
        self.check_late(name)
        counts = {tally.kappa for tally in self.tallies.values()}
        if len(counts) == 1 and not self.nested and (self.expected is None or counts.pop() <= self.expected):
            return  # as nearly always
        most = max(self.tallies, key=lambda p: self.tallies[p].kappa)
        least = min(self.tallies, key=lambda p: self.tallies[p].kappa)
        if len(self.kinds) > 1 and self.tallies[least].kappa * _ROUNDING < self.tallies[most].kappa:
            raise RuntimeError(
                f"some gradients of this update came by one_pass and some plainly, and parameter {name(least)} has "
                f"{self.tallies[least].kappa:g} micro-batches where {name(most)} has {self.tallies[most].kappa:g}: a "
                "whole mini-batch was taken for one micro-batch. Open one_pass on the module that holds all "
                "parameters; drop the update with opt.abandon()"
            )
        folded, seen = self.tallies[most].kappa, sum(self.micro_batches.values())
        if self.nested and self.expected is None and folded > seen * _ROUNDING:
            raise RuntimeError(
                f"parameter {name(most)} got {folded:g} gradients in {seen:g} backwards that can be told apart: "
                "reentrant activation checkpointing is in use, which delivers the gradient of a layer used twice in "
                "pieces, and squares of pieces are wrong. Drop the update with opt.abandon(); then use "
                "checkpoint(..., use_reentrant=False), or, if no layer is used twice, declare opt.expect(kappa)"
            )
        if self.expected is not None and folded > self.expected * _ROUNDING:
            raise RuntimeError(
                f"parameter {name(most)} got {folded:g} gradients where expect({self.expected:g}) promised at most "
                "that many micro-batches; a second backward over the same micro-batch counts as another one, as does "
                "each piece that reentrant checkpointing delivers. Drop the update with opt.abandon(); then add the "
                "losses and call backward once, or declare the right number"
            )

"""`one_pass(..., into=opt)`: gradients and squares go into the moments as they are made, and are never left in memory.

A parameter used by one layer gets its pair in that layer's backward. Instead of returning it, the Function hands it
to the optimizer here: an operation whose kernel can fold does so while it forms the pair (`Kernel.into`); other pairs
are folded whole, one at a time. Parameters that are shared, reshaped or met by an operation without a rule take the
ordinary way, by `pair.put`.

A compiled graph keeps only what it returns. There the handover is an operator whose result, a number without
meaning, is the "gradient" of a leaf of no dimension, the ticket.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from ..fold import pair
from ..kernels import Serving, cast
from ..kernels.ops import operator
from .exchange import Open
from .weight import Entry

if TYPE_CHECKING:
    from ..optimizer import InvariantAdam
    from .mini_batch import MiniBatch


class Sink:
    """The optimizer that takes the pairs of an open context; `wait` hands a pair over together with others."""

    def __init__(
        self, optimizer: InvariantAdam, mini: MiniBatch, entries: list[Entry], wait: Callable[[Entry, pair.Pair], None]
    ) -> None:
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        missing = [entry.name for entry in entries if id(entry.param) not in held]
        if missing:
            raise ValueError(
                f"into= must hold all trainable parameters of the model, and has not {', '.join(missing[:5])}"
                f"{' and others' if len(missing) > 5 else ''}; add them to the optimizer, "
                "built on the parameters that the model has now, or freeze them"
            )
        if any(entry.taker is None for entry in entries):  # nobody takes its pairs
            raise ValueError(
                'into= needs an optimizer that folds in backward, InvariantAdam(fold="backward"), which is the latest '
                'one built on these parameters; with fold="call" leave into= out and call opt.fold()'
            )
        self.optimizer, self.mini, self.wait = optimizer, mini, wait
        self.passed = False  # a backward came by that was not to accumulate
        self.task: int | None = None  # the latest backward
        self.accumulates = False  # it is to
        # Of the tickets: a backward over all leaves comes by there.
        self.edges = [get_gradient_edge(ticket) for ticket in chain.from_iterable(mini.facts.tickets.values())]
        self.entries = {entry.key: entry for entry in entries}

    def claim(self, key: int) -> Entry | None:
        """The parameter whose pair is made now; None in a backward that parameters are no part of."""
        entry = self.entries.get(key)
        if entry is None or not self.mini.kappa:
            raise RuntimeError(
                "a backward of one_pass(..., into=opt) ran in another context than its forward; call both in one, and "
                "drop the update with opt.abandon()"
            )
        if Serving.noted is not None:
            return entry  # a rehearsal: nothing is made, and nothing counted
        task = torch._C._current_graph_task_id()
        if task != self.task:
            self.task = task
            self.accumulates = any(torch._C._will_engine_execute_node(edge.node) for edge in self.edges)
        if not self.accumulates:
            self.passed = True
            return None  # torch.autograd.grad, or backward(inputs=...): nothing is to accumulate
        if entry.done:
            entry.refuse_second()
        entry.done, entry.arrived = True, 1
        return entry

    def target(self, entry: Entry) -> Any:
        """Where a kernel is to fold the pair of a parameter itself; None where it cannot."""
        if Serving.noted is not None:
            return self.optimizer.queue.outline(entry.param)
        return self.optimizer.queue.target(entry.param, self.mini.kappa, self.mini.scale)

    def fold(self, entry: Entry, dW: Tensor, S: Tensor, borrowed: bool = False) -> None:
        """Fold a pair; at once, where its memory is borrowed (see `pair.put`)."""
        if Serving.noted is not None:
            return
        made = pair.Pair(cast(dW, entry.param.dtype), S, self.mini.kappa, self.mini.scale, borrowed)
        if borrowed:
            pair.put(entry.param, made, entry.taker)
        else:
            self.wait(entry, made)


def sink() -> Sink:
    """The sink of the open context."""
    mini = Open.mini_batch
    if mini is None or mini.sink is None:
        raise RuntimeError("a backward of one_pass(..., into=opt) ran after its context was closed; call it inside")
    return mini.sink


def give(key: int, dW: Tensor, S: Tensor) -> Any:
    """Hand over the pair of the parameter `key`; what is returned is the gradient of the ticket."""
    return _into_pair(dW, S, key) if torch.compiler.is_compiling() else _give(key, dW, S, borrowed=False)


def _give(key: int, dW: Tensor, S: Tensor, borrowed: bool) -> None:
    taker = sink()
    with torch._C.DisableTorchFunctionSubclass():  # looking at a parameter would ask its dispatcher each time
        entry = taker.claim(key)
        if entry is not None:
            taker.fold(entry, dW, S, borrowed)


def ticket_shape(like: Tensor, *_: Any) -> Tensor:
    """The ticket's gradient, as a trace sees it."""
    return like.new_empty((), dtype=torch.float32)


def ticket(like: Tensor) -> Tensor:
    """The ticket's gradient, a number without meaning."""
    make = torch.zeros if torch.is_anomaly_enabled() else torch.empty  # nobody reads it but anomaly detection
    return make((), dtype=torch.float32, device=like.device)


@operator("into_pair(Tensor dW, Tensor S, int key) -> Tensor", ticket_shape, replays=False)
def _into_pair(dW: Tensor, S: Tensor, key: int) -> Tensor:
    _give(key, dW, S, borrowed=True)  # the graph takes their memory back
    return ticket(S)

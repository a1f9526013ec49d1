"""`MiniBatch`: the mini-batch under way in an open context, and what the rules of operations ask of it.

How it is divided, where the batch is in a tensor, and which values have a handle.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..kernels import Serving
from .groups import Groups, UnsupportedUse, without_samples
from .ops.base import Use, copies
from .routing import Routed, behind_a_graph, routed
from .weight import Entry, Handle, Held, Lifted, OnePassParameter, Weight, apart, names_of, same

if TYPE_CHECKING:
    from .into import Sink
    from .model import ModelFacts
    from .ops.batch_norm import Statistics
    from .verify.probe import Probe

# Elements of a vector up to which a compiled graph returns its pair like any gradient, so that it may wait for others
# to share a launch with: what an operator is given must be folded at once.
SMALL = 1 << 16


TABLE = ("embedding", "linear")  # the operations of a table (`Entry.table`)


class Mode(Enum):
    """What happens to an operation on a parameter."""

    WAITING = "no forward has shown the mini-batch yet: refuse it"
    PLAIN = "run it as it is: the mini-batch is one micro-batch, or a check runs its loop"
    OUTSIDE = "follow it outside of the model's forward, where no check has looked: accept what cannot be misread"
    GROUPED = "follow it, group by group, in a forward of the model"
    CHECKING = "follow it in a run of a check: tell the probe, and leave the optimizer alone"


class Place(NamedTuple):
    """Where the batch is in a tensor: a dimension, or rows in any order."""

    axis: int
    routed: Routed | None = None


class Known(NamedTuple):
    """A use of parameters as it was found before, and what it was found from."""

    use: Use
    shape: torch.Size  # of the operation's input
    axes: Any  # that a check has found out, replaced as a whole
    into: bool  # pairs went to the optimizer


class MiniBatch:
    """The mini-batch under way: one object from the opening of a context to its end."""

    def __init__(self, facts: ModelFacts, reduction: str) -> None:
        self.facts = facts
        self.reduction = reduction  # of the loss over samples, "mean" or "sum"
        self.mode = Mode.WAITING
        self.groups = Groups(1, 1, facts.axis)
        self.single = False  # one micro-batch: the square of its gradient is the answer
        self.kappa = 0.0  # micro-batches, of which a ragged one counts n/M; 0 until a forward, or batch_size=, shows B
        self.scale = (1.0, 1.0)  # the factors that make mean g and mean g² of a backward's sums Σ s_k and Σ c_k s_k²
        self.sink: Sink | None = None  # takes pairs as they are made
        self.probe: Probe | None = None  # records what the rules see, in a run of a check
        # Of each batch norm, by its running mean: the statistics of its uses so far.
        self.normed: dict[int, list[Statistics]] = {}

    def divide(self, groups: Groups, mode: Mode) -> None:
        """Begin a mini-batch of these groups."""
        old = self.groups
        if groups.c is not None or old.c is not None or (groups.batch, groups.micro) != (old.batch, old.micro):
            self.groups = groups
        self.single = groups.kappa == 1
        self.mode = Mode.PLAIN if self.single else mode
        self.kappa = groups.batch / self.facts.micro
        self.scale = (1.0, float(groups.kappa)) if self.reduction == "mean" else (1 / groups.kappa, 1 / groups.kappa)
        if groups.factor != 1.0:
            self.scale = (self.scale[0] * groups.factor, self.scale[1] * groups.factor**2)

    def ready(self, name: str) -> None:
        """Refuse to go on where the batch is not known."""
        if self.mode is Mode.WAITING:
            raise UnsupportedUse(
                f"one_pass met {name} on a parameter before the model was called; call the model "
                "itself (its forward shows the batch), or pass batch_size= and check=False. Of a compiled model give "
                "one_pass what torch.compile returned and call that, and keep one_pass itself out of torch.compile"
            )
        if torch.compiler.is_compiling() and not self.facts.findings.passed:
            raise UnsupportedUse(
                "a compiled model must be checked before it is traced: pass the compiled module itself to one_pass"
            )

    # Values and their handles.

    @staticmethod
    def holds(t: Any) -> bool:
        """Whether t is a parameter or a lifted value: has a handle."""
        return isinstance(t, (OnePassParameter, Lifted))

    def handle_of(self, t: Any) -> Handle | None:
        """The handle of a parameter or of a lifted value; None for any other value."""
        if isinstance(t, Lifted):
            return t.handle
        if isinstance(t, OnePassParameter):
            entry: Entry = t.one_pass_entry
            if entry.tied and not entry.table:
                if entry.shared is None:
                    self.share(entry)
                assert entry.shared is not None
                return Handle(apart(t), entry.shared, True, entry, direct=True)
            tracing, kept = torch.compiler.is_compiling(), self.facts.handles
            if not tracing and entry.key in kept:
                companion, handle = kept[entry.key]
                if companion is entry.companion and handle.value is t and handle.dtype == t.dtype:
                    return handle
            # A compiled graph checks before each call what its trace has asked of every parameter: ask little.
            tag = entry.companion if entry.companion.ndim < 4 else entry.shaped(entry.companion)
            handle = Handle(t, tag, False, entry, direct=True)
            # A tag that is no leaf holds the node at the end of its way, which works on the stream where it was made:
            # an update on another stream, as a captured one, would be folded there, its memory given away too early.
            if tag is entry.companion and not tracing:
                kept[entry.key] = entry.companion, handle
            return handle
        return None

    def share(self, entry: Entry) -> None:
        """Make the copies that all uses of a tied parameter draw from."""
        entry.shared = copies(self.groups, Handle(entry.param, entry.shaped(entry.companion), False, entry))

    def grouped(self, h: Handle) -> Tensor:
        """The κ copies of a value, each of which gets its own gradient."""
        self.serve(h, "copies")
        return copies(self.groups, h)

    def weight_of(self, h: Handle | None, plain: Any, name: str, ticket: int | None) -> Weight:
        """A parameter as the operation `name` is given it: by its handle, or as the plain value that has none.

        Where its pair goes to the optimizer it takes the ticket of that number, each parameter of an operation another;
        None for an operation that does not hand pairs over.
        """
        if h is None:
            return Weight(plain)
        self.serve(h, name)
        if not h.grouped:
            single = h.direct and not h.entry.tied  # type: ignore[union-attr]
            checking = self.mode is Mode.CHECKING and Serving.noted is None  # a rehearsal goes the way of an update
            if ticket is not None and self.sink is not None and not checking and single:
                p = h.value
                if not torch.compiler.is_compiling() or p.ndim > 1 or p.numel() >= SMALL:
                    return Weight(p, self.facts.tickets[p.device][ticket], h, True)
        return Weight(h.value, h.tag, h)

    # What an operation does is mostly the same from one mini-batch to the next.

    def recall(self, key: tuple[Any, ...], x: Any) -> Use | None:
        """What `remember` has put down, if looking at x would find it again."""
        known: Known | None = self.facts.uses.get(key)
        if known is None or self.mode is not Mode.GROUPED or type(x) is not Tensor or not x.requires_grad:
            return None
        use, shape, axes, into = known
        if use.groups is not self.groups or axes is not self.facts.findings.axes or into is (self.sink is None):
            return None
        # A sequence may have another length.
        if shape != x.shape and (axes or self.groups.axis_of(x.shape, x.ndim - key[1]) != use.axis):
            return None
        for w in use.weights:
            h = w.handle
            if h is not None:
                if h.entry.tied or h.dtype != h.value.dtype:
                    return None
                h.entry.operations.add(key[0])
        return use if routed(x, self.groups) is None else None

    def remember(self, key: tuple[Any, ...], x: Tensor, use: Use) -> None:
        """Put down what was found. The key: the name of an operation, the dimensions of a row, the ids of the weights.

        Only of parameters that are used once, which `use` holds, so that their ids stay theirs; and not where groups
        have coefficients, which are tensors of this mini-batch, or rows are in another order than the batch's.
        """
        if self.mode is not Mode.GROUPED or self.groups.c is not None or use.routed is not None or not x.requires_grad:
            return
        for w in use.weights:
            h = w.handle
            if w.value is not None and (h is None or not h.direct):
                return
            if h is not None and h.tag is not h.entry.companion:
                if not w.into:
                    return
                h.tag = h.entry.companion  # a ticket has its place; what is kept must hold no node (see `handle_of`)
        self.facts.uses[key] = Known(use, x.shape, self.facts.findings.axes, self.sink is not None)

    def serve(self, h: Handle, name: str, delivers: bool = True) -> None:
        """Tell the probe of a use, by its operation; refuse one of a table that no check has seen."""
        entry = h.entry
        if entry is None:
            return
        if self.probe is not None:
            self.probe.served[entry.name].append(name if h.direct else "a part of it")
            if delivers and not h.grouped:
                self.probe.uses[entry.name] += 1
        elif entry.table and not (h.direct and name in TABLE):
            raise UnsupportedUse(
                f"{entry.name} goes through {name}, which it did not when the model was checked; call the model with "
                "the same options as then, or loop over micro-batches"
            )

    def note(self, held: Held, name: str) -> None:
        """Remember an operation that parameters go through."""
        if not torch.compiler.is_compiling():
            for h in held:
                if h is not None and h.entry is not None:
                    h.entry.operations.add(name)

    # Where the batch is.

    def is_batched(self, t: Tensor, names: str, name: str) -> bool:
        """Whether t comes from the batch rather than being a constant."""
        if t.requires_grad:
            return True  # what depends on parameters alone is lifted
        found = self.facts.findings
        if (names, name) in found.constant:
            return False
        if (names, name) in found.batched:
            return self.groups.axis_of(t.shape) is not None
        axis = found.axes.get((names, name), self.groups.axis)
        return t.ndim > axis and t.shape[axis] == self.groups.batch

    def place(self, x: Tensor, event: int, name: str, held: Held, any_order: bool = False) -> Place | None:
        """Where the batch is in x, whose last `event` dimensions make one row; None for a constant.

        The operation `name` uses the parameters behind `held` on x, perhaps with rows in `any_order`.
        """
        found = routed(x, self.groups) if x.requires_grad and not torch.compiler.is_compiling() else None
        if found is not None:
            return self._place_picked(x, name, held, found, any_order)
        hidden = self.facts.findings.picked and (torch.compiler.is_compiling() or behind_a_graph(x))
        if hidden and self._meets_picked(held, name):
            raise UnsupportedUse(
                f"{names_of(held)} goes through {name} on rows picked from the batch by index, whose places a compiled "
                "graph does not tell; keep what picks and uses them out of torch.compile (torch.compiler.disable), or "
                "loop over micro-batches"
            )
        if not x.requires_grad and not self.is_batched(x, names_of(held), name):
            if self.probe is not None:
                self.probe.saw(names_of(held), name, x)
            return None
        if x.ndim == 0:
            raise without_samples(names_of(held), f"goes through {name} with a scalar of the batch")
        axis = self.groups.axis_of(x.shape, x.ndim - event)
        if self.facts.findings.axes:
            axis = self.facts.findings.axes.get((names_of(held), name), axis)
        # Outside of the model's forward no check has looked: accept what cannot be misread. A checkpoint runs its part
        # of the forward again during backward, where it was checked as well.
        if self.mode is Mode.OUTSIDE and torch._C._current_graph_task_id() < 0:
            sized = [d for d in range(x.ndim - event) if x.shape[d] == self.groups.batch]
            if sized != [self.groups.axis]:
                raise UnsupportedUse(
                    f"{names_of(held)} goes through {name} outside of the model's forward, with an input of shape "
                    f"{tuple(x.shape)} whose batch of {self.groups.batch} cannot be told for sure; move the operation "
                    "into the model"
                )
        if axis is None:
            raise UnsupportedUse(
                f"{names_of(held)} goes through {name} with an input of shape {tuple(x.shape)}, in which no "
                f"dimension is the batch of {self.groups.batch}: rows were dropped, packed or regrouped before it; "
                "loop over micro-batches, or keep the batch in its dimension"
            )
        return self.place_at(x, axis, name, held)

    def _place_picked(self, x: Tensor, name: str, held: Held, found: Routed, any_order: bool) -> Place:
        """`place` of rows that were picked by index. The use is remembered: a compiled graph does not tell of it."""
        site, picked = (names_of(held), name), self.facts.findings.picked
        if site not in picked:
            self.facts.find(picked=picked | {site})
        for h in held:
            if h is not None and h.entry is not None and name not in h.entry.picked:
                h.entry.picked |= {name}
        if not any_order:
            raise UnsupportedUse(
                f"{names_of(held)} goes through {name} on rows picked from the batch by index, which only linear "
                "layers and elementwise products support; apply it before the rows are picked"
            )
        return self.place_at(x, 0, name, held, found)

    def _meets_picked(self, held: Held, name: str) -> bool:
        """Whether the operation `name` on these has met rows that were picked by index.

        A trace guards what it asks: names, of values that several parameters have made, since a graph that knows the
        name of a layer's weight serves no other layer.
        """
        for h in held:
            if h is None:
                continue
            if h.entry is None:
                return (names_of(held), name) in self.facts.findings.picked
            if name in h.entry.picked:
                return True
        return False

    def place_at(self, x: Tensor, axis: int, name: str, held: Held, found: Routed | None = None) -> Place:
        """`place` with the batch dimension, or the rows' places in the batch, known."""
        self.note(held, name)
        if self.probe is not None:
            self.probe.saw(names_of(held), name, x, axis, found)
        return Place(axis, found)


class Watched:
    """The hooks on a parameter (register_hook), until `remove`: they may look at its gradient, and not change it."""

    def __init__(self, mini: MiniBatch, entry: Entry) -> None:
        self.mini, self.name = mini, entry.name
        self.hooks: dict[int, Callable[[Tensor], Tensor | None]] = entry.param._backward_hooks  # type: ignore[assignment]
        self.plain = dict(self.hooks)
        self.hooks.update({key: partial(self._call, hook) for key, hook in self.plain.items()})

    def remove(self) -> None:
        """Leave the hooks as they were, but for those that are gone."""
        self.hooks.update({key: hook for key, hook in self.plain.items() if key in self.hooks})

    def _call(self, hook: Callable[[Tensor], Tensor | None], grad: Tensor) -> Tensor | None:
        version = grad._version
        out = hook(grad)
        if self.mini.mode is Mode.PLAIN:
            return out  # the square is made of what the hook has left
        changed = grad._version != version
        if out is not None and out is not grad and not changed:
            # A capture cannot compare the two, and its replays would not compare at all.
            capturing = grad.is_cuda and torch.cuda.is_current_stream_capturing()
            changed = capturing or not bool(same(out, grad).all())
        if changed:
            raise UnsupportedUse(
                f"{self.name} has a hook (register_hook) that changed its gradient (in a capture: that returned "
                "another tensor), and could not change the squares of its micro-batches; remove it, let it return None "
                "if it only looks, or loop over micro-batches. Drop an update that has begun with opt.abandon()"
            )
        return out

# torch leaves Function.apply and hooks untyped:
# mypy: disable-error-code="no-untyped-call,no-any-return"
"""`Engine`: what is known of one model at one micro-batch size, and what the rules ask of it.

Which parameters are trainable and which are shared, how the mini-batch is divided, and where the batch is in a tensor.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..kernels.gemm_square import wide
from . import batch_norm
from .dispatch import OnePassParameter, expanded
from .groups import Groups, UnsupportedUse, without_samples
from .handles import Entry, Handle, Lifted, apart
from .probe import Probe
from .routing import group_ids


class Place(NamedTuple):
    """Where the batch is in a tensor: a dimension, or the group of each row."""

    axis: int
    ids: Tensor | None = None


class Engine:
    """What is known about one model at one micro-batch size; kept from step to step."""

    def __init__(self, model: nn.Module, micro: int, axis: int) -> None:
        self.model = weakref.ref(model)
        self.micro = micro
        self.axis = axis
        self.entries: dict[int, Entry] = {}
        # Of parameters used once, by the key of the entry, and the companion it was made with. Kept here: an entry that
        # held its handle would be held by it, and the parameters freed late.
        self.handles: dict[int, tuple[Tensor, Handle]] = {}
        self.groups: Groups = Groups(1, 1, axis)
        self.known = False  # whether `groups` is that of the mini-batch under way
        self.outside = True  # no forward of the model is running: what is used now was never checked
        self.single = False  # one group: the square of the gradient is the answer
        self.compilable = False  # a check has passed, so that a compiled graph may rely on `tied`
        self.reduction = "mean"  # of the loss over samples
        self.checked: set[Any] = set()
        self.free: set[tuple[str, str]] = set()  # uses that sizes call batched and the check does not
        self.bound: set[tuple[str, str]] = set()  # the reverse
        self.axes: dict[tuple[str, str], int] = {}  # where the check found the batch elsewhere
        self.probe: Probe | None = None
        self.uses: dict[str, int] = {}
        self.written: set[str] = set()  # buffers that the last run of a check changed
        self.normed: dict[int, list[batch_norm.Use]] = {}  # by the running mean of each batch norm, in this mini-batch
        self.renormed = False  # one of them was used twice
        self.into = False  # whether a sink takes pairs now: a check's own backwards leave theirs
        self.sharded = False  # by FSDP2, which reduces gradients and squares itself: see `distributed.fsdp`
        self.tickets: dict[torch.device, list[Tensor]] = {}
        # As `refresh` found it the last time; the entries hold their parameters, so that an id stays theirs.
        self.structure: list[Any] = []
        self.norms: list[_BatchNorm] = []  # while a context is open
        self.order: list[Entry] = []
        self.subscriptions = -1  # `pair.subscriptions` when the entries asked for their takers
        self.spans = False  # a module is there whose statistics may span micro-batches: look again every time

    def refresh(self, model: nn.Module) -> list[Entry]:
        """The entries of the parameters that are trainable now."""
        structure, self.norms = _structure(model)
        if structure == self.structure and not self.spans:
            return self.order
        self.structure = []
        _refuse_modules(model)
        self.spans = any(issubclass(kind, nn.SyncBatchNorm) for kind in structure if isinstance(kind, type))
        seen: dict[int, Entry] = {}
        known = {entry.name: entry for entry in self.entries.values()}
        self.sharded = any(hasattr(module, "_get_fsdp_state") for module in model.modules())
        for name, p in _parameters(model, self.sharded):
            if not p.requires_grad:
                continue
            key = id(p)
            if key in seen:
                seen[key].tied = True
                continue
            entry = self.entries.get(key)
            fits = entry is not None and entry.param is p and entry.companion.device == p.device
            if entry is None or not fits or entry.companion.dtype != wide(p.dtype):
                entry = Entry(name.removeprefix("_orig_mod."), p)
                # What a check found out before fully_shard replaced the parameters holds for the new ones.
                entry.tied = self.sharded and entry.name in known and known[entry.name].tied
            seen[key] = entry
        if seen.keys() != self.entries.keys() or any(self.entries[k] is not e for k, e in seen.items()):
            self.entries, self.handles = seen, {}
            self.checked.clear()
        if any(entry.param._backward_hooks for entry in seen.values()):  # which may be new, and change gradients
            self.checked.clear()
            self.compilable = False
        self.structure, self.order, self.subscriptions = structure, list(seen.values()), -1
        return self.order

    # What the rules ask.

    def ticket(self, device: torch.device, place: int) -> Tensor:
        """The leaf whose gradient stands for a handover to the sink: one for each parameter of an operation."""
        return self.tickets[device][place]

    def ready(self, name: str) -> None:
        """Refuse to go on where the batch is not known."""
        if not self.known:
            raise UnsupportedUse(
                f"one_pass met {name} on a parameter before the model was called; call the model "
                "itself (its forward shows the batch), or pass batch_size= and check=False"
            )
        if torch.compiler.is_compiling() and not self.compilable:
            raise UnsupportedUse(
                "a compiled model must be checked before it is traced: pass the compiled module itself to one_pass"
            )

    @staticmethod
    def holds(t: Any) -> bool:
        """Whether t is a parameter of this engine or a lifted value: has a handle."""
        return isinstance(t, (OnePassParameter, Lifted))

    def handle_of(self, t: Any) -> Handle | None:
        """The handle of a parameter of this engine or of a lifted value; None for any other
        value."""
        if isinstance(t, Lifted):
            return t.handle
        if isinstance(t, OnePassParameter):
            entry: Entry = t.one_pass_entry
            if entry.tied:
                if entry.shared is None:
                    self.share(entry)
                assert entry.shared is not None
                return Handle(apart(t), entry.shared, True, entry)
            kept = None if torch.compiler.is_compiling() else self.handles.get(entry.key)
            if kept is not None:
                companion, handle = kept
                if companion is entry.companion and handle.value is t and handle.dtype == t.dtype:
                    return handle
            # A compiled graph checks before each call what its trace has asked of every parameter: ask little.
            tag = entry.companion if entry.companion.ndim < 4 else entry.shaped(entry.companion)
            handle = Handle(t, tag, False, entry, direct=True)
            # A tag that is no leaf holds the node at the end of its way, which works on the stream where it was made:
            # an update on another stream, as a captured one, would be folded there, its memory given away too early.
            if tag is entry.companion and not torch.compiler.is_compiling():
                self.handles[entry.key] = entry.companion, handle
            return handle
        return None

    def share(self, entry: Entry) -> None:
        """Make the copies all uses of a tied parameter draw from."""
        direct = Handle(entry.param, entry.shaped(entry.companion), False, entry)
        entry.shared = expanded(self, direct)

    def grouped(self, h: Handle) -> Tensor:
        """The κ copies of a value."""
        if not h.grouped:
            self.count(h)
        return expanded(self, h)

    def count(self, h: Handle | None) -> None:
        """Count a use that delivers squares, while probing."""
        if self.probe is not None and h is not None and h.entry is not None:
            self.uses[h.entry.name] = self.uses.get(h.entry.name, 0) + 1

    def note(self, h: Handle | None, name: str) -> None:
        """Remember the operations a parameter goes through."""
        if h is not None and h.entry is not None and not torch.compiler.is_compiling():
            h.entry.operations.add(name)

    def names(self, held: Iterable[Handle | None]) -> str:
        """The names of the parameters behind some handles."""
        return ", ".join(dict.fromkeys(h.label for h in held if h is not None))

    def axis_of(self, t: Tensor) -> Any:
        """The batch dimension of t by its sizes."""
        return self.groups.axis_of(t.shape, t.ndim)

    def is_batched(self, t: Tensor, names: str, name: str) -> bool:
        """Whether t comes from the batch rather than being a constant."""
        if t.requires_grad:
            return True  # what depends on parameters alone is lifted
        if (names, name) in self.free:
            return False
        if (names, name) in self.bound or (names, name) in self.axes:
            return self.axis_of(t) is not None
        axis = self.groups.axis
        return t.ndim > axis and t.shape[axis] == self.groups.batch

    def place(
        self,
        x: Tensor,
        event: int,
        name: str,
        held: tuple[Handle | None, ...],
        routed: bool = False,
    ) -> Place | None:
        """Where the batch is in x, whose last `event` dimensions are not rows; None for a
        constant."""
        ids = None
        if x.requires_grad and not torch.compiler.is_compiling():
            ids = group_ids(x, self.groups)
        if ids is not None:
            if not routed:
                raise UnsupportedUse(
                    f"{self.names(held)} goes through {name} on rows picked from the batch by "
                    "index, which only linear layers and elementwise products support; apply it "
                    "before the rows are picked"
                )
            for h in held:
                self.note(h, name)
            if self.probe is not None:
                self.probe.rows(self.names(held), name, x, ids, None)
            return Place(0, ids)
        if not x.requires_grad and not self.is_batched(x, self.names(held), name):
            if self.probe is not None:
                self.probe.constant(self.names(held), name, x)
            return None
        if x.ndim == 0:
            raise without_samples(self.names(held), f"goes through {name} with a scalar of the batch")
        axis = self.groups.axis_of(x.shape, x.ndim - event)
        if self.axes:
            axis = self.axes.get((self.names(held), name), axis)
        # A checkpoint runs its part of the forward again during backward, where it was checked as well.
        if self.outside and self.probe is None and torch._C._current_graph_task_id() < 0:
            self._only_place(x, x.ndim - event, name, held)
        if axis is None:
            raise UnsupportedUse(
                f"{self.names(held)} goes through {name} with an input of shape {tuple(x.shape)}, "
                f"in which no dimension is the batch of {self.groups.batch}: rows were dropped, "
                "packed or regrouped before it; loop over micro-batches, or keep the batch in its "
                "dimension"
            )
        return self.place_at(x, axis, event, name, held)

    def _only_place(self, x: Tensor, leading: int, name: str, held: tuple[Handle | None, ...]) -> None:
        """Outside of the model's forward, where no check has looked: accept what cannot be misread."""
        batch, axis = self.groups.batch, self.groups.axis
        if leading <= axis or [d for d in range(leading) if x.shape[d] == batch] != [axis]:
            raise UnsupportedUse(
                f"{self.names(held)} goes through {name} outside of the model's forward, with an input of shape "
                f"{tuple(x.shape)} whose batch of {batch} cannot be told for sure; move the operation into the model"
            )

    def place_at(self, x: Tensor, axis: int, event: int, name: str, held: tuple[Handle | None, ...]) -> Place:
        """`place` with the batch dimension known."""
        for h in held:
            self.note(h, name)
        if self.probe is not None:
            self.probe.rows(self.names(held), name, x, None, axis)
        return Place(axis)

    def compare(self, *args: Any) -> None:
        """While probing: have the fallback's result compared with the plain operation's."""
        if self.probe is not None:
            self.probe.compare(*args)


def _parameters(model: nn.Module, sharded: bool) -> Iterable[tuple[str, Tensor]]:
    if not sharded:
        return model.named_parameters(remove_duplicate=False)
    from . import exchange

    for source in exchange.sources:
        found = source(model)
        if found is not None:
            return found
    raise UnsupportedUse("FSDP2: call invariant_adam.distributed.prepare(model, opt) first")


def _structure(model: nn.Module) -> tuple[list[Any], list[_BatchNorm]]:
    """What `Engine.refresh` depends on: the kinds of all modules, their parameters and what these are.

    And the batch norms, each once.
    """
    found: list[Any] = []
    norms: dict[int, _BatchNorm] = {}
    left: list[nn.Module | None] = [model]
    while left:
        module = left.pop()
        if module is None:
            continue
        found.append(type(module))
        for p in module._parameters.values():
            if p is not None:
                found += (id(p), p.requires_grad, p.dtype, p.device, *(p._backward_hooks or ()))
        left.extend(module._modules.values())
        if isinstance(module, _BatchNorm):
            norms[id(module)] = module
    return found, list(norms.values())


def _refuse_modules(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if (
            isinstance(module, nn.parallel.DistributedDataParallel)
            and module not in __import__("invariant_adam.one_pass.exchange", fromlist=["x"]).trusted
        ):
            raise UnsupportedUse(
                "the model is wrapped in DistributedDataParallel, which reduces gradients but not their squares; "
                "call invariant_adam.distributed.prepare(model, opt) first"
            )
        if isinstance(module, nn.SyncBatchNorm) and module.training:
            raise UnsupportedUse(
                f"{name} is a SyncBatchNorm, whose statistics span workers and micro-batches; use "
                "BatchNorm (one_pass gives each micro-batch its own statistics, as the loop does) "
                "or GroupNorm"
            )

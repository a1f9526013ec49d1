# torch leaves Function.apply and hooks untyped:
# mypy: disable-error-code="no-untyped-call,no-any-return"
"""`one_pass`: open a model for one backward over a mini-batch, and leave its pairs.

On entry every trainable parameter's class is swapped for one whose operations come through
`dispatch`; on leaving it is swapped back, and (mean g, mean g²) is handed over by `pair.put`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from itertools import chain
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves

from ..checks import need_torch
from ..kernels.gemm_square import wide
from . import batch_norm, pair
from .check import verify
from .dispatch import OnePassParameter, State, expanded
from .groups import Groups, UnsupportedUse
from .handles import Entry, Handle, Lifted
from .into import Sink
from .probe import Probe
from .routing import group_ids

if TYPE_CHECKING:
    from ..optimizer import InvariantAdam


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
        self.order: list[Entry] = []
        self.subscriptions = -1  # `pair.subscriptions` when the entries asked for their takers
        self.spans = False  # a module is there whose statistics may span micro-batches: look again every time

    def refresh(self, model: nn.Module) -> list[Entry]:
        """The entries of the parameters that are trainable now."""
        structure = _structure(model)
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
            self.entries = seen
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
            entry: Entry = t.one_pass_entry  # type: ignore[attr-defined]
            if entry.tied:
                if entry.shared is None:
                    self.share(entry)
                assert entry.shared is not None
                return Handle(t.detach(), entry.shared, True, entry)
            return Handle(t, entry.shaped(entry.companion), False, entry, direct=True)
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
        if (names, name) in self.bound:
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


class one_pass:  # noqa: N801 - a context manager, used like a function
    """One backward over a mini-batch leaves on every parameter p the pair of its micro-batches.

        p.grad = mean_k g_k,   p.grad_sq = mean_k g_k²,   k = 1 … κ = B/M

    Args:
        model: the module whose forward runs inside the context; a compiled module is passed as it is.
        micro_batch_size: M, in samples. Samples k·M … (k+1)·M − 1 of the mini-batch are micro-batch k.
        reduction: how the loss reduces over samples. "mean" divides by the mini-batch; "sum" does not, and g_k is then
            the gradient of micro-batch k's sum.
        batch_dim: the dimension of the batch in the model's inputs.
        batch_size: B, in samples; by default read from the model's inputs.
        weights: the weight of each sample (B,) or token (B, T) in a loss that is a weighted mean over the mini-batch,
            Σ w l / Σ w: a mask of 0 and 1 for a loss averaged over tokens that are not padding. Micro-batch k then
            counts W_k/W in both means.
        ragged: what to do when M does not divide B: "weight" counts the last micro-batch n/M, "refuse" raises.
        into: an `InvariantAdam(fold="backward")` of all these parameters: pairs go into its moments as they are made,
            in the epilogue of a linear layer's weight gradient on a GPU, and neither gradient nor square is ever in
            memory. Same numbers; `opt.step()` follows as always.
        check: run the model a few times more when it first meets a shape of input, to establish that the rows each
            parameter sees stay with their samples, and that gradients and squares equal the loop's.

    >>> import torch
    >>> net, x = torch.nn.Linear(3, 1), torch.randn(8, 3)
    >>> with one_pass(net, micro_batch_size=2):
    ...     net(x).square().mean().backward()
    >>> tuple(net.weight.grad_sq.shape), net.weight.grad_kappa
    ((1, 3), 4.0)
    """

    def __init__(
        self,
        model: nn.Module,
        micro_batch_size: int,
        *,
        reduction: Literal["mean", "sum"] = "mean",
        batch_dim: int = 0,
        batch_size: int | None = None,
        weights: Tensor | None = None,
        ragged: Literal["weight", "refuse"] = "weight",
        into: InvariantAdam | None = None,
        check: bool = True,
    ) -> None:
        if not isinstance(micro_batch_size, int) or micro_batch_size < 1:
            raise ValueError(f"micro_batch_size must be an integer >= 1, got {micro_batch_size!r}")
        if reduction not in ("mean", "sum"):
            raise ValueError(f'reduction must be "mean" or "sum", got {reduction!r}')
        if ragged not in ("weight", "refuse"):
            raise ValueError(f'ragged must be "weight" or "refuse", got {ragged!r}')
        if batch_dim < 0:
            raise ValueError(f"batch_dim must be >= 0, got {batch_dim}")
        if weights is not None and reduction == "sum":
            raise ValueError('weights= describes a weighted mean; it has no meaning with reduction="sum"')
        if hasattr(model, "_orig_mod"):
            need_torch("one_pass on a compiled model", "pass the model uncompiled")
        self.model, self.micro, self.reduction = model, micro_batch_size, reduction
        self.batch_size, self.weights, self.ragged, self.check = batch_size, weights, ragged, check
        self.into = into
        engines = _engines.setdefault(model, {})
        key = (micro_batch_size, batch_dim)
        if key not in engines:
            engines[key] = Engine(model, micro_batch_size, batch_dim)
        self.engine = engines[key]
        self.armed: list[Entry] = []

    def __enter__(self) -> one_pass:
        if State.engine is not None:
            raise RuntimeError("one_pass is already open; close it before opening another")
        engine = self.engine
        entries = engine.refresh(self.model)
        if self.into is not None:
            _bind(self.into)
        self.undo: list[Any] = []
        for entry in entries:
            if entry.param.grad is not None and pair.peek(entry.param) is None:
                raise RuntimeError(
                    f"{entry.name} has a gradient from outside one_pass; consume it (fold, step) "
                    "or clear it (zero_grad) first"
                )
            entry.refuse_hooks(called=self.into is None)
            if type(entry.param) is not nn.Parameter:
                raise UnsupportedUse(
                    f"{entry.name} is a {type(entry.param).__name__}; one_pass follows torch.nn.Parameter only"
                )
        try:
            self._open(entries)
        except BaseException:
            self._restore()
            Sink.open = None
            for entry in self.armed:
                entry.param.grad, entry.before = entry.before, None
            self.armed = []
            raise
        State.engine = engine
        return self

    def _open(self, entries: list[Entry]) -> None:
        engine = self.engine
        if engine.subscriptions != pair.subscriptions:
            for entry in entries:
                entry.taker = pair.taker_of(entry.param)
            engine.subscriptions = pair.subscriptions
        for entry in entries:
            p = entry.param
            self.armed.append(entry)
            entry.before = p.grad
            p.grad = None
            entry.companion.grad = None
            entry.arrived, entry.fired, entry.shared, entry.done = 0, 0, None, False
            entry.operations.clear()
            p.one_pass_entry = entry  # type: ignore[attr-defined]
            p.__class__ = OnePassParameter
            pair.arm(p)
            entry.watcher = None if entry.taker is None else self._arrived
        self.undo.append(self.model.register_forward_pre_hook(self._before_forward, with_kwargs=True))
        self.undo.append(self.model.register_forward_hook(self._after_forward, always_call=True))
        self._patch()
        engine.known = engine.single = engine.into = False
        engine.outside = True
        engine.reduction = self.reduction
        if self.into is not None:
            Sink.open = Sink(self.into, entries)
            for device in {entry.param.device for entry in entries} - engine.tickets.keys():
                engine.tickets[device] = [torch.zeros((), device=device, requires_grad=True) for _ in range(2)]
            tickets = chain.from_iterable(engine.tickets.values())
            Sink.open.edges = [get_gradient_edge(ticket) for ticket in tickets]
        self.forwards = 0
        if self.batch_size is not None:
            self._divide(self.batch_size)

    def _patch(self) -> None:
        """Give batch norms their ghost forward, as their modes are now."""
        for patch in [undo for undo in self.undo if isinstance(undo, batch_norm.Patch)]:
            patch.remove()
            self.undo.remove(patch)
        norms = [(name, module) for name, module in self.model.named_modules() if isinstance(module, _BatchNorm)]
        self.modes = [(module, module.training) for _, module in norms]
        self.undo.extend(batch_norm.patches(norms, self.engine))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        State.engine = None
        self.engine.normed = {}
        self._restore()
        try:
            if kind is None:
                self._harvest()
        finally:
            Sink.open, self.engine.into = None, False
            for ticket in chain.from_iterable(self.engine.tickets.values()):
                ticket.grad = None
            for entry in self.armed:
                if not entry.done:
                    entry.param.grad = entry.before
                entry.companion.grad = entry.shared = entry.before = None
            self.armed = []

    def _restore(self) -> None:
        for handle in self.undo:
            handle.remove()
        for entry in self.armed:
            entry.param.__class__ = nn.Parameter
            entry.watcher = None
            del entry.param.one_pass_entry  # type: ignore[attr-defined]
            pair.disarm(entry.param)

    def _arrived(self, entry: Entry) -> None:
        """Hand the pair over as soon as both halves have arrived, so that the optimizer frees it in
        backward."""
        with torch._C.DisableTorchFunctionSubclass():
            if entry.param.grad is not None and (self.engine.single or entry.companion.grad is not None):
                self._put(entry)

    def __deepcopy__(self, memo: dict[int, Any]) -> one_pass:
        return self  # a model copied inside the context takes the hooks along; they know their own model

    def _after_forward(self, module: nn.Module, *_: Any) -> None:
        if module is self.model:
            self.engine.outside = True

    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """See the mini-batch before the model does."""
        engine = self.engine
        if module is not self.model:
            return
        engine.outside = False
        if not torch.is_grad_enabled() or engine.probe is not None or torch.compiler.is_compiling():
            return
        with torch._C.DisableTorchFunctionSubclass():  # each p.grad would ask the dispatcher
            again = any(e.companion.grad is not None or e.done or e.param.grad is not None for e in self.armed)
        if again:
            self._harvest()  # a backward has run since the last forward: this is another mini-batch
            for entry in self.armed:
                entry.before = entry.param.grad
                entry.param.grad = entry.companion.grad = None
                entry.arrived, entry.fired, entry.done = 0, 0, False
            self.forwards = 0
        if any(module.training is not mode for module, mode in self.modes):
            self._patch()
        self.forwards += 1
        division = engine.groups, engine.single
        self._divide(self.batch_size or _batch_size(args, kwargs, engine.axis))
        if self.forwards > 1 and (engine.single or (engine.groups, engine.single) != division):
            engine.groups, engine.single = division
            raise UnsupportedUse(
                "the model was called twice before a backward, on mini-batches of other sizes or of one micro-batch; "
                "call it once per backward, evaluate under torch.no_grad(), or open one_pass for each mini-batch"
            )
        for entry in self.armed:
            entry.shared = None
        if engine.single:
            return
        engine.into = False
        if self.check and engine.sharded:
            if not engine.compilable:
                raise UnsupportedUse(
                    "the check runs the model many times, which ranks of FSDP2 could only do in step; have it made "
                    "before fully_shard, by one backward in one_pass on the plain model, or pass check=False"
                )
        elif self.check:
            verify(engine, module, args, kwargs, additive=self.weights is None)
            engine.outside = False  # the check has run forwards of its own
        if self.check:
            for entry in self.armed:
                entry.shared = None
                if entry.tied:
                    engine.share(entry)
        if self.forwards == 1:
            engine.normed = {}
        engine.into = self.into is not None

    def _divide(self, batch: int) -> None:
        engine = self.engine
        micro = min(self.micro, batch)
        n = batch % micro
        if n and self.ragged == "refuse":
            raise ValueError(
                f"micro_batch_size={self.micro} does not divide the mini-batch of {batch} "
                f"samples; drop the last "
                f'{n}, or pass ragged="weight" to count them as {n}/{self.micro} of a micro-batch'
            )
        if (n or batch < self.micro) and self.reduction == "sum":
            raise ValueError(
                f"a ragged micro-batch ({batch} samples, micro_batch_size={self.micro}) has no "
                f"sum comparable with "
                'the others\'; use reduction="mean"'
            )
        c = None
        kappa = -(-batch // micro)
        if self.weights is not None or n:
            device = self.armed[0].param.device if self.armed else None
            if self.weights is None:
                w = torch.ones(batch, dtype=torch.float64, device=device)
            else:
                if self.weights.shape[0] != batch:
                    raise ValueError(f"weights has {self.weights.shape[0]} rows for a mini-batch of {batch} samples")
                w = self.weights.detach().to(device, torch.float64).reshape(batch, -1).sum(1)
            ids = torch.arange(batch, device=device) // micro
            W = torch.zeros(kappa, dtype=torch.float64, device=device).index_add(0, ids, w)
            # W/(κ W_k); a group of no weight has no gradient either.
            c = torch.where(W > 0, W.sum() / (kappa * W), 0.0)
        same = engine.groups.batch == batch and engine.groups.micro == micro and engine.groups.c is None
        if c is not None or not same:
            engine.groups = Groups(batch, micro, engine.axis, c)
        engine.known, engine.single = True, kappa == 1
        if Sink.open is not None:
            Sink.open.kappa = batch / self.micro
            Sink.open.scale = engine.groups.scale(self.reduction)

    def _harvest(self) -> None:
        """Hand over what the backward left."""
        engine = self.engine
        wrong = []
        modules = {entry.module for entry in self.armed if entry.done}
        if not modules and Sink.open is not None and Sink.open.passed:
            raise UnsupportedUse(
                "into= found no backward but torch.autograd.grad(...) or backward(inputs=...), which leave no way into "
                "the optimizer; call loss.backward(), with the other parameters frozen (requires_grad_(False))"
            )
        for entry in self.armed:
            if engine.into and entry.reached and not entry.done and entry.module in modules and entry.is_empty():
                wrong.append(f"{entry.name}: no square, while others of its module have one: a compiled graph lost it")
            if not entry.done and entry.is_empty():
                continue  # no gradient, no square: the optimizer skips it
            through = ", ".join(sorted(entry.operations)) or "an operation that torch does not show"
            if not engine.known:
                wrong.append(f"{entry.name}: a gradient without a forward of the model")
                continue
            if engine.single:
                continue
            # A compiled graph does not count what it delivers: count forwards and backwards.
            times = entry.arrived or entry.fired * max(1, self.forwards)
            if entry.companion.grad is None and not entry.done:
                wrong.append(f"{entry.name}: a gradient without a square (by backward(inputs=...)? freeze the others)")
            elif times == 0:
                wrong.append(f"{entry.name}: a gradient without a square (through {through})")
            elif times > 1:
                wrong.append(
                    f"{entry.name}: squared {times} times in parts, without their cross terms (through {through})"
                )
        if wrong:
            raise UnsupportedUse(
                "one_pass cannot square these parameters exactly:\n  "
                + "\n  ".join(wrong)
                + "\nA custom autograd.Function hides its parameters: write it with torch "
                "operations. A parameter used by several forwards or several reentrant "
                "checkpoints needs one forward, or use_reentrant=False, and check=True."
            )
        for entry in self.armed:
            if entry.param.grad is not None and not entry.done:
                self._put(entry)

    def _put(self, entry: Entry) -> None:
        engine = self.engine
        groups = engine.groups
        p = entry.param
        grad, square = p.grad, entry.companion.grad
        assert grad is not None
        if entry.done:
            raise UnsupportedUse(f"{entry.name}: a second square arrived after its pair was folded")
        scale = (1.0, 1.0)
        if engine.single:
            square = grad.detach().to(entry.companion.dtype).square()
        else:
            assert square is not None
            square, scale = entry.shaped(square), groups.scale(self.reduction)
        p.grad = entry.before
        entry.companion.grad = None
        entry.done = True
        pair.put(p, pair.Pair(grad, square, groups.batch / self.micro, scale), entry.taker)


def _bind(into: InvariantAdam) -> None:
    """Have the sink look for parameters that were unfrozen, and refuse those that another optimizer has taken over."""
    from ..optimizer import InvariantAdam

    if not isinstance(into, InvariantAdam):
        raise TypeError(f"into= must be an InvariantAdam, got {type(into).__name__}")
    into._bind()


def _parameters(model: nn.Module, sharded: bool) -> Iterable[tuple[str, Tensor]]:
    if not sharded:
        return model.named_parameters(remove_duplicate=False)
    from ..distributed.fsdp import unsharded_parameters

    return unsharded_parameters(model)


def _batch_size(args: Any, kwargs: Any, axis: int) -> int:
    sizes = [t.shape[axis] for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.ndim > axis]
    found = set(sizes) - {1} or set(sizes)
    if len(found) != 1:
        raise ValueError(
            f"the model's inputs have sizes {sizes} in dimension {axis}, so the mini-batch cannot "
            "be told from them; pass batch_size="
        )
    return int(found.pop())


def _structure(model: nn.Module) -> list[Any]:
    """What `Engine.refresh` depends on: the kinds of all modules, their parameters and what these are."""
    found: list[Any] = []
    left = [model]
    while left:
        module = left.pop()
        found.append(type(module))
        for p in module._parameters.values():
            if p is not None:
                found += (id(p), p.requires_grad, p.dtype, p.device, *(p._backward_hooks or ()))
        left.extend(child for child in module._modules.values() if child is not None)
    return found


def _refuse_modules(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.parallel.DistributedDataParallel) and not hasattr(module, "one_pass_may"):
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


# Model -> (M, batch_dim) -> what is known. The engine holds the model weakly.
_engines: weakref.WeakKeyDictionary[nn.Module, dict[tuple[int, int], Engine]] = weakref.WeakKeyDictionary()

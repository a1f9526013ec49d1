"""`one_pass`: open a model for one backward over a mini-batch, and leave its pairs.

On entry every trainable parameter's class is swapped for one whose operations come through `dispatch`. On leaving it is
swapped back, and (mean g, mean g²) is handed over by `pair.put`.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from ..fold import guards, hooks, pair
from ..kernels import make_ready
from ..unwrap import unwrap
from .exchange import Open
from .groups import UnsupportedUse, divided
from .into import Sink
from .mini_batch import MiniBatch, Mode, Watched
from .model import facts_of
from .ops import batch_norm
from .tracing import Tuples
from .verify.check import verify
from .verify.loss import Watch
from .verify.probe import leaves
from .weight import Entry, OnePassParameter

_GRAPH = 16  # times as many elements may wait where a compiled graph has made them at once


class one_pass:  # noqa: N801 - a context manager, used like a function
    """One backward over a mini-batch makes for every parameter p the pair of its micro-batches.

        p.grad = mean_k g_k,   p.grad_sq = mean_k g_k²,   k = 1 … κ = B/M

    An `InvariantAdam(fold="backward")` that owns p folds the pair as soon as it is complete; otherwise it stays on p.

    Args:
        model: the module whose forward runs inside the context; a compiled module is passed as it is.
        micro_batch_size: M, in samples. Samples k·M … (k+1)·M − 1 of the mini-batch are micro-batch k.
        reduction: how the loss reduces over samples. "mean" divides by the mini-batch; "sum" does not, and g_k is then
            the gradient of micro-batch k's sum.
        batch_dim: the dimension of the batch in the model's inputs.
        batch_size: B, in samples; by default read from the model's inputs.
        weights: the weight of each sample (B,) or token (B, T) in a loss that is a weighted mean over the mini-batch,
            Σ w l / Σ w: a mask of 0 and 1 for a loss averaged over tokens that are not padding. Micro-batch k then
            counts W_k/W in both means, which depends on the others of its update: give `usual_weight` too.
        usual_weight: n̄, the weight of a usual micro-batch, one number for the whole run: about the tokens of M samples.
            g_k is then the gradient of Σ w l / n̄ over micro-batch k, whatever else is in the update, and the update
            does not depend on the batch size. Reads Σ w, so give `weights` on the CPU where nothing should wait.
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
        usual_weight: float | None = None,
        ragged: Literal["weight", "refuse"] = "weight",
        into: Optimizer | None = None,
        check: bool = True,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
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
        if usual_weight is not None and (weights is None or not usual_weight > 0):
            raise ValueError(f"usual_weight must be positive and needs weights=, got {usual_weight!r}")
        self.model, self.reduction, self.ragged, self.check = model, reduction, ragged, check
        self.batch_size, self.weights, self.usual_weight = batch_size, weights, usual_weight
        self.into = None if into is None else unwrap(into)
        self.facts = facts_of(model, micro_batch_size, batch_dim)
        self.mini = MiniBatch(self.facts, reduction)  # another one each time the context opens
        self.armed: list[Entry] = []
        self.undo: list[Any] = []  # each with a `remove`
        self.patched: list[nn.Module] = []  # batch norms with another forward
        # Pairs that are complete and not handed over; and how many elements they have, and may have.
        self.waiting: list[tuple[Entry, pair.Pair | None]] = []
        self.elements = self.room = 0

    def __enter__(self) -> one_pass:
        if not Open.lock.acquire(blocking=False):
            raise RuntimeError(
                "one_pass is already open, in this thread or in another; close it before opening another, and train "
                "models that are to run at the same time in processes of their own"
            )
        try:
            self._open()
        except BaseException as error:
            self.__exit__(type(error))
            raise
        Open.mini_batch = self.mini
        return self

    def _open(self) -> None:
        mini = self.mini = MiniBatch(self.facts, self.reduction)
        tickets, entries = self.facts.tickets, self.facts.refresh(self.model)
        if self.into is not None:
            self.into.queue.bind()  # looks for parameters that were unfrozen, and refuses those another has taken over
        self.facts.find_takers()
        guards.watch(self.model)
        self.elements = 0
        takers = {entry.taker for entry in entries}
        self.room = min((getattr(taker, "room", 0) for taker in takers), default=0)
        if any(getattr(taker, "part", False) for taker in takers):
            self.undo.append(_Uncompiled())
        for entry in entries:
            p = entry.param
            grad, watched = p.grad, p._backward_hooks
            if grad is not None and pair.peek(p) is None:
                raise RuntimeError(
                    f"{entry.name} has a gradient from outside one_pass; consume (fold, step) or clear it (zero_grad)"
                )
            if watched or len(p._post_accumulate_grad_hooks or ()) != entry.hooks:
                entry.refuse_hooks(called=self.into is None)
            if type(p) is not nn.Parameter:
                raise UnsupportedUse(f"{entry.name} is a {type(p).__name__}; one_pass follows torch.nn.Parameter only")
            if watched:
                self.undo.append(Watched(mini, entry))
            self.armed.append(entry)
            entry.before = grad
            if grad is not None:
                p.grad = None
            entry.companion.grad = None
            entry.begin()
            entry.operations.clear()
            p.one_pass_entry = entry  # type: ignore[attr-defined]
            p.__class__ = OnePassParameter
            entry.watcher = None if entry.taker is None else self._arrived
        if getattr(self.model, "_compiled_call_impl", None) is not None:
            self.undo.append(_AroundGraph(self))
        else:
            self.undo.append(self.model.register_forward_pre_hook(self.before_forward, with_kwargs=True))
            self.undo.append(self.model.register_forward_hook(self.after_forward, always_call=True))
        self.undo.append(Tuples())
        self._patch()
        devices = {entry.companion.device for entry in entries}
        for device in devices:
            make_ready(device)
        if len(devices) == 1 or self.into is not None:
            self.undo.append(_CallingThread())
        if self.into is not None:
            self.undo.append(_Uncut())
            for device in devices - tickets.keys():
                tickets[device] = [torch.zeros((), device=device, requires_grad=True) for _ in range(2)]
            mini.sink = Sink(self.into, mini, entries, self.wait)
        self.forwards = 0
        self.watch: Watch | None = None  # where this mini-batch is one that the model is checked on
        if self.batch_size is not None:
            self._divide(self.batch_size, Mode.OUTSIDE)

    def _patch(self) -> None:
        """Give batch norms their ghost forward, as their modes are now."""
        self._unpatch()
        self.modes = [(module, module.training) for module in self.facts.norms]
        for module in batch_norm.patch(self.model, self.mini):
            self.patched.append(module)  # one by one: the next may be refused

    def _unpatch(self) -> None:
        while self.patched:
            del self.patched.pop().forward

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        Open.mini_batch = None
        try:
            self.mini.normed, self.facts.norms, self.facts.modules = {}, [], []
            self._unpatch()
            while self.undo:
                self.undo.pop().remove()
            for entry in self.armed:
                entry.param.__class__ = nn.Parameter
                entry.watcher = None
                del entry.param.one_pass_entry  # type: ignore[attr-defined]
            if kind is None:
                self._harvest()
        finally:
            self.mini.sink = None  # which knows us: no cycle is left for Python to look for
            for ticket in chain.from_iterable(self.facts.tickets.values()):
                ticket.grad = None
            for entry in self.armed:
                if not entry.done:
                    entry.param.grad, entry.companion.grad = entry.before, None
                entry.before = None
                if entry.tied:
                    entry.restart()
            self.armed, self.waiting = [], []
            Open.lock.release()

    def _arrived(self, entry: Entry) -> None:
        """Have the pair handed over whose square has arrived, so that the optimizer frees it in backward."""
        if entry.companion.grad is None and not self.mini.single:
            return
        if entry.done or entry.waits:
            entry.refuse_second()
        entry.waits = True
        self.wait(entry)

    def wait(self, entry: Entry, made: pair.Pair | None = None) -> None:
        """Hand a pair over together with others, at the end of the backward at the latest.

        The pair of the parameter is what has come to its leaves, or `made`.
        """
        if not self.waiting:
            hooks.when_finished(self._hand_over)
        self.waiting.append((entry, made))
        self.elements += entry.size
        if self.elements > self.room:
            # What a compiled graph returns, and does not count, is in memory as a whole: more of it may wait.
            graph = not entry.arrived and not self.mini.single
            if not graph or self.elements > self.room * _GRAPH:
                self._hand_over(ended=False)

    def _hand_over(self, ended: bool = True) -> None:
        """Give the pairs that wait to their takers; a gradient that comes after its square may still do so."""
        waiting, self.waiting, self.elements = self.waiting, [], 0
        lists: dict[pair.Taker | None, tuple[list[Tensor], list[pair.Pair]]] = defaultdict(lambda: ([], []))
        with torch._C.DisableTorchFunctionSubclass():
            for entry, made in waiting:
                p = entry.param
                found = made or self._take(entry)
                if found is None:
                    entry.waits = not ended
                    if not ended:
                        self.waiting.append((entry, None))
                    continue
                params, pairs = lists[entry.taker]
                params.append(p)
                pairs.append(pair.joined(p, found) if pair.is_there(p) else found)
                entry.waits, entry.done = False, True
        for taker, (params, pairs) in lists.items():
            assert taker is not None  # where nobody takes them, they stay on the leaves
            taker(params, pairs)

    def __deepcopy__(self, memo: dict[int, Any]) -> one_pass:
        return self  # a model copied inside the context takes the hooks along; they know their own model

    def after_forward(self, module: nn.Module, _: Any, output: Any) -> None:
        """See that the model's forward has ended; a hook of the model's."""
        if self.watch is not None and module is self.model:
            self.watch.made |= {t.grad_fn for t in leaves(output) if isinstance(t, Tensor)}
        if module is self.model and self.mini.mode is Mode.GROUPED:
            self.mini.mode = Mode.OUTSIDE

    def before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """See the mini-batch before the model does; a hook of the model's."""
        mini, facts = self.mini, self.facts
        if module is not self.model:
            return
        if mini.mode is Mode.OUTSIDE:
            mini.mode = Mode.GROUPED
        if not torch.is_grad_enabled() or mini.probe is not None or torch.compiler.is_compiling():
            return
        with torch._C.DisableTorchFunctionSubclass():  # each p.grad would ask the dispatcher
            again = any(e.done or e.companion.grad is not None or e.param.grad is not None for e in self.armed)
        if again:
            self._harvest()  # a backward has run since the last forward: this is another mini-batch
            for entry in self.armed:
                entry.before = entry.param.grad
                entry.param.grad = entry.companion.grad = None
                entry.begin()
            self.forwards = 0
        if any(module.training is not mode for module, mode in self.modes):
            self._patch()
        self.forwards += 1
        before = mini.groups, mini.mode
        self._divide(_batch_size(args, kwargs, facts.axis, self.batch_size, self.check), Mode.GROUPED)
        if self.forwards > 1 and (mini.single or mini.groups is not before[0]):
            mini.divide(*before)
            raise UnsupportedUse(
                "the model was called twice before a backward, on mini-batches of other sizes or of one micro-batch; "
                "call it once per backward, evaluate under torch.no_grad(), or open one_pass for each mini-batch"
            )
        if mini.single:
            return
        if self.check and not facts.sharded:
            known = facts.findings
            verify(mini, module, args, kwargs, additive=self.weights is None)
            if facts.findings is not known and self.watch is None and self.weights is None:
                self.watch = Watch(mini)
                self.undo.append(self.watch)
        elif self.check and not facts.findings.passed:
            raise UnsupportedUse(
                "the check runs the model many times, which ranks of FSDP2 could only do in step; have it made before "
                "fully_shard, by one backward in one_pass on the plain model, or pass check=False"
            )
        for entry in self.armed:
            if entry.tied:
                entry.restart()
                if self.check and not entry.table:
                    mini.share(entry)
        if self.forwards == 1:
            mini.normed = {}

    def _divide(self, batch: int, mode: Mode) -> None:
        device = self.armed[0].param.device if self.armed else None
        how = self.weights, self.usual_weight, self.ragged, self.reduction, device
        self.mini.divide(divided(batch, self.facts.micro, self.facts.axis, *how), mode)
        if self.mini.single:
            for entry in self.armed:
                entry.listen()

    def _harvest(self) -> None:
        """Hand over what the backward left, unless a square of it is missing or wrong."""
        mini, sink = self.mini, self.mini.sink
        if self.waiting:
            self.waiting = []
            raise RuntimeError(
                "a backward in one_pass did not come to its end; what it left is dropped. Let its error out of the "
                "context, and drop the update with opt.abandon() if step() asks for it"
            )
        modules = {entry.module for entry in self.armed if entry.done}
        if not modules and sink is not None and sink.passed:
            raise UnsupportedUse(
                "into= found no backward but torch.autograd.grad(...) or backward(inputs=...), which leave no way into "
                "the optimizer; call loss.backward(), with the other parameters frozen (requires_grad_(False))"
            )
        wrong = []
        for entry in self.armed:
            if entry.done and entry.arrived == 1 and mini.kappa:
                continue  # as nearly always
            what = self._fault(entry, modules)
            if what:
                wrong.append(f"{entry.name}: {what}")
        if wrong:
            raise UnsupportedUse(
                "one_pass cannot square these parameters exactly:\n  " + "\n  ".join(wrong) + "\nA custom "
                "autograd.Function hides its parameters: write it with torch operations. A parameter used by several "
                "forwards or several reentrant checkpoints needs one forward, or use_reentrant=False, and check=True."
            )
        for entry in self.armed:
            found = None if entry.done else self._take(entry)
            if found is not None:
                entry.done = True
                pair.put(entry.param, found, entry.taker)

    def _fault(self, entry: Entry, modules: set[str]) -> str:
        """What is wrong with the gradient and the square that a parameter has after a backward; "" if nothing is.

        `modules` are those of which the optimizer has a pair already.
        """
        mini, square = self.mini, entry.companion.grad
        if not entry.done and entry.param.grad is None and square is None:  # the optimizer skips it
            if mini.sink is not None and entry.reached and entry.module in modules and not mini.single:
                return "no square, while others of its module have one: a compiled graph lost it; leave into= out"
            return ""
        if not mini.kappa:
            return "a gradient, but no forward of the model ran inside one_pass: put both inside"
        if mini.single:
            return ""  # the square is made of the gradient
        if square is None and not entry.done:
            return (
                "a gradient without a square (by backward(inputs=...)? freeze the others; in a named tuple that "
                "torch.compile did not look into? pass a list)"
            )
        # A compiled graph does not count what it delivers: count forwards and backwards.
        times = entry.arrived or entry.fired * max(1, self.forwards)
        if times == 0:
            return f"a gradient without a square (through {entry.through})"
        if times > 1:
            return f"squared {times} times in parts, without their cross terms (through {entry.through})"
        return ""

    def _take(self, entry: Entry) -> pair.Pair | None:
        """Take what has come to a parameter and its companion; None where no gradient has."""
        p, companion, mini = entry.param, entry.companion, self.mini
        grad, square = p.grad, companion.grad
        if grad is None:
            return None
        if mini.single:
            if grad.is_sparse:
                grad = grad.to_dense()  # its pieces are summed before the square
            square = grad.detach().to(companion.dtype).square()
        else:
            assert square is not None
            companion.grad = None
            square = square if entry.places is None else entry.shaped(square)
            square = mini.groups.bounded(square, grad) if entry.table else square
        p.grad = entry.before
        return pair.Pair(grad, square, mini.kappa, mini.scale)


class _Uncompiled:
    """Compiled models run as they are written, until `remove`.

    torch.compile makes a graph for the first size of input that it meets, and at the second one for all sizes, which is
    slower. The few updates that grow in have many sizes, and the graph is to be that of the whole mini-batch.
    """

    def __init__(self) -> None:
        self.stance: Any = torch.compiler.set_stance("force_eager")

    def remove(self) -> None:
        self.stance.__exit__(None, None, None)


class _Uncut:
    """torch.compile makes CUDA graphs of a whole graph or of nothing of it, until `remove`.

    It would cut a graph at the operators that take pairs. What is joined before a cut (torch.cat, torch.stack) and used
    behind it then comes from memory that nobody has written, seen in torch 2.11: other numbers, and not a word. The
    setting is that of a thread from torch 2.13 on; in another one the operators refuse (see `kernels.ops`).
    """

    def __init__(self) -> None:
        from torch._inductor import config

        self.patch = config.patch(graph_partition=False)
        self.patch.__enter__()

    def remove(self) -> None:
        self.patch.__exit__(None, None, None)


class _AroundGraph:
    """A model compiled in place (`model.compile()`) is called between our two hooks, until `remove`.

    Hooks that are registered run inside of its graph, where a trace would have to look into them.
    """

    def __init__(self, context: one_pass) -> None:
        self.model = context.model
        self.compiled: Any = self.model._compiled_call_impl

        def call(*args: Any, **kwargs: Any) -> Any:
            context.before_forward(context.model, args, kwargs)
            output = None
            try:
                output = self.compiled(*args, **kwargs)
            finally:
                context.after_forward(context.model, args, output)
            return output

        self.model._compiled_call_impl = call

    def remove(self) -> None:
        self.model._compiled_call_impl = self.compiled


class _CallingThread:
    """Backwards run in the thread that calls them, until `remove`.

    torch has a thread for each GPU, so that several work at once. With one GPU that only takes Python's Functions and
    hooks to another core, and an update that waits for the host is longer by a sixth and more (docs/speed_tables.md).
    With into= a backward is compiled in it too (see `_Uncut`).
    """

    def __init__(self) -> None:
        self.mode = torch.autograd.set_multithreading_enabled(False)

    def remove(self) -> None:
        self.mode.__exit__(None, None, None)


def _batch_size(args: Any, kwargs: Any, axis: int, given: int | None, check: bool) -> int:
    if given is not None and not check:
        return given
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.ndim > axis]
    sizes = [t.shape[axis] for t in tensors]
    if given is not None:
        if sizes and given not in sizes:
            raise ValueError(
                f"batch_size={given}, and the inputs have sizes {sizes} in dimension {axis}; leave batch_size out, or, "
                "if a sample is not one row of the inputs, pass check=False"
            )
        return given
    found = set(sizes) - {1} or set(sizes)
    # What has a size of 1 is spread over the batch, unless all others are vectors: then the batch may be one sample.
    vectors = all(t.ndim == axis + 1 for t in tensors if t.shape[axis] != 1)
    unclear = found != {1} and vectors and any(t.ndim > axis + 1 for t in tensors)
    if len(found) != 1 or unclear:
        raise ValueError(
            f"the inputs have sizes {sizes} in dimension {axis}, which do not tell the mini-batch; pass batch_size="
        )
    return int(found.pop())

"""`capture`: a whole update, from forward to step, as one CUDA graph.

A graph repeats launches with the arguments they were captured with, and an update's scalars change from update to
update. So the launches of a captured update read them from the device, one row of slots each. A `Recorder` stands in
the queue's launcher during the capture and notes what came when. Before each replay the optimizer goes through the same
update again with a `Replay` there, which launches nothing and fills the rows. So counters, schedules and debiasing
advance on the host exactly as in an eager update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import ceil
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from .fold.launcher import Launcher, Step
from .fold.moments import KEYS
from .fold.pair import Pair
from .fold.queue import FoldQueue, is_coupled
from .fold.scalars import Tally
from .fold.update import Update
from .kernels import adam as kernels
from .optimizer import InvariantAdam
from .unwrap import unwrap

WIDTH = 8  # numbers in a row of slots: see `kernels.adam`
_ROWS = 1 << 14  # launches of one update at most
_BUFFERS = 4  # updates that the host may be ahead
_BLANK = (0.0,) * 4


class Row(NamedTuple):
    """A launch of a captured update: whose scalars its row of slots holds, the same for all of them."""

    dtype: torch.dtype
    places: Sequence[int]  # of the arrivals whose keep and gain they are
    params: Sequence[Tensor]  # whose size, eps and decay

    def numbers(self, folds: list[tuple[float, ...]], steps: dict[Tensor, tuple[float, ...]]) -> list[float]:
        """Keep and gain of its folds, size, eps and decay of its steps."""
        found: list[float] = []
        for each in ([folds[place] for place in self.places], [steps[p] for p in self.params]):
            if any(scalars != each[0] for scalars in each):
                raise RuntimeError(
                    "parameters that shared a launch when the update was captured need different scalars now: some of "
                    "them took part in an update since, and others did not; capture it again"
                )
            found += each[0] if each else _BLANK
        return found


class Recorder(Launcher):
    """Notes what a captured update does, in order, and has each launch read its scalars from the device."""

    captures = True

    def __init__(self, device: torch.device) -> None:
        self.arrivals: list[tuple[Tensor, Pair]] = []
        self.rows: list[Row] = []
        self.update: Update | None = None  # as it was at the step
        # Made before the capture, since what a graph allocates inside it may share its memory with others.
        dtypes = (torch.float32, torch.float64)
        self._tables = {dtype: torch.zeros(_ROWS, WIDTH, dtype=dtype, device=device) for dtype in dtypes}

    def arrive(self, p: Tensor, tally: Tally, pair: Pair) -> int:
        """Note a gradient, but for its values; return its place."""
        if tally.a is None:
            raise RuntimeError(
                f"a parameter of shape {tuple(p.shape)} gets its first gradient of all in the update that is captured, "
                "where its moments have no scale yet; let each parameter take part in the updates before"
            )
        if self.update is not None:
            raise RuntimeError(_TWICE)
        self.arrivals.append((p, pair._replace(grad=p, grad_sq=None)))
        return len(self.arrivals) - 1

    def slots(self, moment: Tensor, places: Sequence[int] = (), params: Sequence[Tensor] = ()) -> Tensor:
        """Return the row that a launch on `moment` and its like is to read."""
        if len(self.rows) == _ROWS:
            raise RuntimeError(f"a captured update can have at most {_ROWS} launches of folds and steps; capture less")
        self.rows.append(Row(moment.dtype, places, params))
        return self._tables[moment.dtype][len(self.rows) - 1]

    def finish(self, update: Update) -> bool:
        """Note the step; a capture runs nothing, so that the update has not happened."""
        if self.update is not None:
            raise RuntimeError(_TWICE)
        self.update = update
        return False

    def fill(self, numbers: list[list[float]], copy: Callable[[Tensor, list[list[float]]], None]) -> None:
        """Give each launch its row."""
        for dtype in {row.dtype for row in self.rows}:
            copy(self._tables[dtype][: len(numbers)], numbers)


class Replay(Launcher):
    """Goes through a recorded update again and launches nothing: it collects the scalars of the launches."""

    captures = True

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.numbers: list[list[float]] = []  # a row for each launch
        self._folds: list[tuple[float, ...]] = []
        self._steps: dict[Tensor, tuple[float, ...]] = {}

    def count(self, queue: FoldQueue) -> None:
        """Count the gradients of the recorded update, which the graph will make again."""
        recorded = self.recorder.update
        assert recorded is not None
        expected = recorded.expected if queue.update.expected is None else queue.update.expected
        queue.update = Update(expected=expected, micro_batches=recorded.micro_batches)
        for p, pair in self.recorder.arrivals:
            (fold,) = queue.count([p], [queue.tally(p)], [pair])
            self._folds.append((*fold.keep, *fold.gain))

    def step(self, params: list[Tensor], weights: list[Tensor], ms: list[Tensor], vs: list[Tensor], step: Step) -> None:
        """Note the scalars of a step."""
        self._steps |= dict.fromkeys(params, (step.size, step.eps, step.decay, 0.0))

    def finish(self, update: Update) -> bool:
        """Make the rows; refused, before the update counts, where they do not fit the launches any more."""
        self.numbers = [row.numbers(self._folds, self._steps) for row in self.recorder.rows]
        return True


_KEPT = (
    "a loss or another output of an earlier backward is still held, and with it nodes of autograd that work on the "
    "stream it was made on, which cannot be captured: delete it first (del loss), or keep loss.detach()"
)
_TWICE = "the captured function closes more than one update; call opt.step() in it once, as the last of the optimizer"


class Captured:
    """An update on a CUDA graph: call it to train on what now stands in the inputs.

    Args:
        optimizer: the optimizer that `update` steps.
        update: runs forward, backward and `optimizer.step()`.
        stream: where it is captured; None on a CPU.
    """

    def __init__(
        self, optimizer: InvariantAdam, update: Callable[[], Any], stream: torch.cuda.Stream | None = None
    ) -> None:
        self.optimizer, self._stream = optimizer, stream
        device = next(optimizer.queue.moments.params()).device
        self._recorder = Recorder(device)
        self.graph: Any = torch.cuda.CUDAGraph() if device.type == "cuda" else None
        self._feed = _Feed()
        optimizer.queue.launcher = self._recorder
        try:
            # Without its way back, at whose end are the nodes on whose stream an eager update between replays
            # would be folded.
            self.output = tree_map_only(Tensor, Tensor.detach, self._record(update))
        except BaseException as error:
            optimizer.queue.reset()
            optimizer.zero_grad()
            if isinstance(error, RuntimeError) and "CUDA error" in str(error) and "captur" in str(error):
                raise RuntimeError(
                    f"torch could not capture the update ({str(error).splitlines()[0]}), and nothing of it was done. "
                    f"Either {_KEPT}. Or update() asks the device for a value (.item(), .cpu(), print) or copies from "
                    "the host: do that outside of it"
                ) from error
            raise
        finally:
            optimizer.queue.launcher = Launcher()
        if self._recorder.update is None:
            optimizer.queue.reset()
            raise RuntimeError("the captured function did not call opt.step(), so that no update was captured")
        self._held = self._holding()
        self._baked = _baked(optimizer)

    def _record(self, update: Callable[[], Any]) -> Any:
        shelf = _Shelf(self.optimizer)
        with torch.cuda.graph(self.graph, stream=self._stream), kernels.tables_on(shelf.place):
            output = update()
        shelf.fill()
        self._shelf = shelf  # the graph reads it
        return output

    def _replay(self) -> None:
        self.graph.replay()

    def __call__(self) -> Any:
        """Run the update again; returns what `update` returned when captured, detached, with its new contents."""
        optimizer, queue = self.optimizer, self.optimizer.queue
        assert self._recorder.update is not None
        if queue.update.tallies or queue.update.expected not in (None, self._recorder.update.kappa):
            raise RuntimeError(
                "an update is open (a backward, a fold() or an expect() of another size came before): a captured "
                f"update is a whole one, of {self._recorder.update.kappa:g} micro-batches; close it with opt.step(), "
                "or drop it with opt.abandon()"
            )
        if self._holding() != self._held:
            raise RuntimeError(
                "the parameters or the moments are in another place than when the update was captured (a checkpoint "
                "was loaded, the model moved, a group added), or were frozen or unfrozen since; capture it again"
            )
        if _baked(optimizer) != self._baked:
            raise RuntimeError(
                f"the captured update has {self._baked} in it, now {_baked(optimizer)} is asked for; capture it again"
            )
        _refuse_step_hooks(optimizer)
        queue.launcher = replay = Replay(self._recorder)
        try:
            replay.count(queue)
            optimizer.step()
        except BaseException:
            queue.reset()
            raise
        finally:
            queue.launcher = Launcher()
        self._recorder.fill(replay.numbers, self._feed)
        self._replay()
        return self.output

    def _holding(self) -> list[int]:
        """Where everything is that the graph writes to, and what of it is to be trained."""
        moments, found = self.optimizer.queue.moments, []
        for p in moments.params():
            state = moments.state.get(p, {})  # a frozen one has none
            found += [p.data_ptr(), p.requires_grad, *(state[key].data_ptr() for key in KEYS if key in state)]
        return found


class CapturedSizes:
    """An update that takes its batch: each size of batch is a graph of its own, from the third time that it comes.

    Args:
        optimizer: the optimizer that `update` steps.
        update: batch -> forward, backward and `optimizer.step()`.
    """

    def __init__(self, optimizer: InvariantAdam, update: Callable[..., Any]) -> None:
        self.optimizer, self.update = optimizer, update
        self._stream: torch.cuda.Stream | None = None  # of all graphs: no two of them run at once
        self._came: dict[Any, int] = {}
        self._graphs: dict[Any, tuple[list[Any], Captured]] = {}  # inputs that stay where they are, and what reads them

    def __call__(self, *batch: Any) -> Any:
        """Train on a batch; returns what `update` returned, detached."""
        leaves, structure = tree_flatten(batch)
        size = tuple((x.shape, x.dtype) if isinstance(x, Tensor) else x for x in leaves)
        if size not in self._graphs:
            self._came[size] = self._came.get(size, 0) + 1
            if self._came[size] < 3:
                return tree_map_only(Tensor, Tensor.detach, self._directly(*batch))
            inputs = [x.clone() if isinstance(x, Tensor) else x for x in leaves]
            whole = tree_unflatten(inputs, structure)
            self._graphs[size] = inputs, self._captured(lambda: self.update(*whole))
        inputs, captured = self._graphs[size]
        for here, there in zip(inputs, leaves, strict=True):
            if isinstance(here, Tensor):
                here.copy_(there)
        return captured()

    def _directly(self, *batch: Any) -> Any:
        with aside(next(self.optimizer.queue.moments.params()).device, self._stream) as self._stream:
            return self.update(*batch)  # kernels are made here

    def _captured(self, update: Callable[[], Any]) -> Captured:
        _refuse(self.optimizer)
        _refuse_kept(list(self.optimizer.queue.moments.params()))
        return Captured(self.optimizer, update, self._stream)


def capture(optimizer: InvariantAdam, update: Callable[..., Any], *, by_size: bool = False) -> Callable[..., Any]:
    """Capture an update in a CUDA graph, so that the host's part of a step is one launch.

    `update` runs forward, backward (κ of them, or one in `one_pass`) and `optimizer.step()`, on inputs that stay where
    they are: copy each new mini-batch into them, then call what `capture` returns. The first three updates are made
    here, so have the first mini-batch in place. The learning rate, the betas, ε, decoupled decay and sample-based
    schedules may change between calls; κ may not. On a CPU, where there is nothing to capture, calls run `update`.

    With `by_size`, `update` takes the batch, and so does what is returned. The batch is copied by it, nothing is run
    before the first call, and each size of batch becomes a graph of its own when it comes for the third time. So κ may
    change, among few sizes: each graph has memory of its own. `BatchGrowth(powers_of_two=True)` keeps them few.

    Args:
        optimizer: the optimizer that `update` steps.
        update: the update; whatever it does beside launching on the GPU happens in the first three calls only.
        by_size: whether `update` takes the batch, whose size may change.

    >>> net, x = torch.nn.Linear(3, 1), torch.zeros(8, 3)
    >>> opt = InvariantAdam(net.parameters(), micro_batch_size=8)
    >>> def update():
    ...     net(x).square().mean().backward()
    ...     opt.step()
    >>> train = capture(opt, update)
    >>> for _ in range(2):
    ...     _ = x.copy_(torch.randn(8, 3))
    ...     train()
    >>> opt.samples_seen
    40
    """
    optimizer = unwrap(optimizer)
    _refuse(optimizer)
    params = list(optimizer.queue.moments.params())
    if by_size:
        return CapturedSizes(optimizer, update) if params[0].is_cuda else update
    if not params[0].is_cuda:
        for _ in range(3):
            update()
        return update
    if torch.cuda.current_stream(params[0].device) == torch.cuda.default_stream(params[0].device):
        _refuse_kept(params)  # the capture will be on another stream, see `aside`
    with aside(params[0].device) as stream:  # kernels are made here
        for _ in range(2):
            update()
    captured = Captured(optimizer, update, stream)
    captured()
    return captured


@contextmanager
def aside(device: torch.device, stream: torch.cuda.Stream | None = None) -> Iterator[torch.cuda.Stream]:
    """Work on a stream that a graph can be captured on: the one given, the current one, or, where that is the default
    stream, a new one.

    Not on the one that torch captures all graphs on unless told otherwise: the library of matrix products has a
    workspace for each stream that it is called on, which all these graphs would share. Replayed at the same time, they
    would write over each other's sums.
    """
    here = torch.cuda.current_stream(device)
    if stream is None:
        stream = torch.cuda.Stream(device) if here == torch.cuda.default_stream(device) else here
    stream.wait_stream(here)
    try:
        with torch.cuda.stream(stream):
            yield stream
    finally:  # what was begun there is still at work on the weights, whatever went wrong
        here.wait_stream(stream)


def _refuse(optimizer: InvariantAdam) -> None:
    devices = {p.device for p in optimizer.queue.moments.params()}
    if len(devices) > 1:
        raise ValueError(f"capture needs all parameters on one device, got {', '.join(sorted(map(str, devices)))}")
    if optimizer.queue.reducer.several:
        raise ValueError(
            "the optimizer is prepared for several ranks, which agree on each update on the host; run it uncaptured"
        )
    if optimizer.queue.nonfinite.raises:
        raise ValueError(
            'on_nonfinite="raise" asks the device at every step, which a graph cannot; use "skip" and read '
            "opt.nonfinite now and then"
        )
    if torch.is_autocast_enabled(devices.pop().type) and torch.is_autocast_cache_enabled():
        raise RuntimeError(
            "capture inside an open autocast, which keeps the casts of the weights that its first forward made, so "
            "that no update would see what the one before did; open it in update(), around the forward alone"
        )
    _refuse_step_hooks(optimizer)
    optimizer.queue.update.refuse_open("capture", "it is not in the graph. Close it with opt.step(), or opt.abandon()")


def _refuse_step_hooks(optimizer: InvariantAdam) -> None:
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        raise ValueError(
            "the optimizer has step hooks, and a replay would call them all before the graph runs, those for after the "
            "step too; remove them, or use opt.register_update_hook, whose hooks come before the weights move anyway"
        )


def _refuse_kept(params: Sequence[Tensor]) -> None:
    """Refuse parameters whose nodes of autograd outlive their backward.

    A parameter holds its node weakly, so that one that is marked and left is still marked when somebody else holds it.
    """

    def mark_of(p: Tensor) -> dict[str, bool]:
        with torch.enable_grad():
            return p.view_as(p).grad_fn.next_functions[0][0].metadata  # type: ignore[union-attr,return-value]

    trained = [p for p in params if p.requires_grad]
    for p in trained:
        mark_of(p)["kept"] = True
    kept = sum(mark_of(p).pop("kept", False) for p in trained)
    if kept:
        raise RuntimeError(f"capture with {kept} of {len(trained)} parameters in use: {_KEPT}")


def _baked(optimizer: InvariantAdam) -> dict[str, Any]:
    """What is in the launches themselves, not in their slots."""
    norm, groups = optimizer.max_micro_norm, optimizer.param_groups
    coupled = [(group["weight_decay"], group["maximize"]) if is_coupled(group) else None for group in groups]
    baked = {"max_micro_norm": norm, "weight_decay and maximize of each group": coupled}
    if any(coupled) or norm is not None:
        baked["loss_divisor"] = optimizer.queue.divisor
    return baked


class _Feed:
    """Copies rows to the device from pinned memory, which is not written over before it was read."""

    def __init__(self) -> None:
        self._pinned: dict[torch.dtype, list[tuple[Tensor, Any]]] = {}
        self._turn = 0

    def __call__(self, table: Tensor, rows: list[list[float]]) -> None:
        values = torch.tensor(rows, dtype=table.dtype)
        if not table.is_cuda:
            table.copy_(values)
            return
        if table.dtype not in self._pinned:
            new = [(torch.empty_like(values, pin_memory=True), torch.cuda.Event()) for _ in range(_BUFFERS)]
            self._pinned[table.dtype] = new
        self._turn += 1
        buffer, read = self._pinned[table.dtype][self._turn % _BUFFERS]
        read.synchronize()
        buffer.copy_(values)
        table.copy_(buffer, non_blocking=True)
        read.record(torch.cuda.current_stream(table.device))


class _Shelf:
    """Room on the device for the tables of a graph's launches, which are written when its capture is over.

    During a capture nothing can be copied from the host, and what is allocated may share its memory with others.
    """

    def __init__(self, optimizer: InvariantAdam) -> None:
        params = list(optimizer.queue.moments.params())
        blocks = sum(ceil(p.numel() / 1024) for p in params)
        # A launch over all parameters takes five addresses, a size and the blocks of each; there are κ and a step.
        kappa = max(optimizer.param_groups[0]["kappa"], optimizer.queue.update.expected or 0.0)
        room = (ceil(kappa) + 2) * (8 * blocks + 64 * len(params) + 256) + (1 << 20)
        self._bytes = torch.empty(room, dtype=torch.uint8, device=params[0].device)
        self._used = 0
        self._tables: list[tuple[Tensor, Tensor]] = []

    def place(self, table: Tensor, device: torch.device) -> Tensor:
        size = table.numel() * table.element_size()
        start, self._used = self._used, self._used + ceil(size / 16) * 16
        if self._used > len(self._bytes):
            raise RuntimeError(
                f"the tables of a captured update need more than the {len(self._bytes)} bytes set aside for κ = the "
                "last update's; make the updates before it like the one that is captured, or opt.expect(kappa)"
            )
        room = self._bytes[start : start + size].view(table.dtype).view(table.shape)
        self._tables.append((room, table))
        return room

    def fill(self) -> None:
        for room, table in self._tables:
            room.copy_(table)

"""Ranks that close each update together: `GroupReducer`, what the ways of reducing have in common.

At `step()` every rank reduces what it folded, in a way of its own (`reduce`), and then one small sum over the ranks
carries the counts of all parameters. The same sum tells what the ranks must know of each other: that one refuses (then
all do, instead of waiting for it), and that their hyperparameters are the same.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from math import prod
from operator import is_
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..fold.moments import KEYS, Moments, whole
from ..fold.queue import FoldQueue
from ..fold.reducer import Reducer
from ..fold.update import Update
from .wire import broadcast_first, in_pieces, lost_rank_named

ALIGNED = 4  # elements: each piece begins at a multiple of 16 bytes, where kernels load that many at a time


class GroupReducer(Reducer):
    """The ranks of one or more process groups, whose micro-batches make one update.

    Args:
        groups: the process groups, one for each dimension of their mesh; none where there is no other rank.
    """

    several = True
    pieces = True
    even = False  # all ranks bring as many micro-batches, and each counts those of all

    def __init__(self, groups: list[dist.ProcessGroup]) -> None:
        self.groups = groups
        self.size = prod(group.size() for group in groups)
        self.alone = self.size == 1  # there is nobody to send to, and no collective is started
        self.on_cpu = all(any(d.type == "cpu" for d in group._device_types) for group in groups)
        self.update: Update | None = None  # the one under way
        self.reduced: Update | None = None  # the one that is reduced, stepped or not
        self.outdated = False  # the optimizer got parameters after `prepare`
        self.late = False  # a gradient came after the moments were reduced
        self.buffers: list[Tensor] = []  # of the model, which are to be the first rank's after each step

    def before_fold(self, queue: FoldQueue, p: Tensor) -> None:  # noqa: D102 - as Reducer has it
        if queue.update is self.reduced:
            raise RuntimeError(
                "a gradient came after the ranks had closed the update in a step() that raised; step() again, or drop "
                "the update with opt.abandon() on all ranks, before the next backward"
            )
        self._begin_update(queue)

    def _begin_update(self, queue: FoldQueue) -> None:
        if self.outdated:
            raise RuntimeError(
                "parameters were added to the optimizer after distributed.prepare(), which has not made them the same "
                "on all ranks; call prepare(model, opt) again, on every rank, before the next backward"
            )
        if queue.update is self.update:
            return
        if not self._there():
            raise RuntimeError(
                "the process group that distributed.prepare() was given has been destroyed; call prepare(model, opt) "
                "again, on every rank of the new one, before the next backward"
            )
        self.update = queue.update
        queue.bind()  # moments for what was unfrozen since the last update
        self.open(queue)

    def _there(self) -> bool:
        """Whether the process groups still are."""
        return dist.is_initialized() and all(g in dist.distributed_c10d._world.pg_group_ranks for g in self.groups)

    def add_parameters(self, queue: FoldQueue) -> None:  # noqa: D102
        if queue.update.tallies:
            raise RuntimeError(
                f"add_param_group() in the middle of an update that {self.size} ranks share; call it after step(), on "
                "all of them, and prepare(model, opt) again"
            )
        self.outdated = True

    def open(self, queue: FoldQueue) -> None:
        """Begin an update."""

    def reduce(self, queue: FoldQueue) -> None:
        """Bring what all ranks folded into everyone's moments."""

    def reduce_again(self, queue: FoldQueue) -> None:
        """Do it once more, for gradients that came after it."""

    def reduce_update(self, queue: FoldQueue, check: Callable[[], None]) -> None:  # noqa: D102
        if queue.update is self.reduced:
            return
        error: Exception | None = None
        try:
            check()
            if queue.update.tallies:
                queue.update.check_whole(queue.moments.name)
        except Exception as e:  # told to all ranks first
            error = e
        own, total = self._close(queue, failed=error is not None)
        if error is not None:
            raise error
        self._refuse(own, total)

    def _close(self, queue: FoldQueue, failed: bool) -> tuple[_News, _News]:
        """Make the update all ranks'; return what this rank tells the others of it, and the sum over the ranks."""
        with lost_rank_named("closing an update"):
            self._begin_update(queue)  # unless a gradient did
            queue.flush()
            self.reduce(queue)
            params, tallies, nonfinite = list(queue.moments.params()), queue.update.tallies, queue.nonfinite
            ranks = self.size if self.even else 1
            own = _News(
                failed,
                self.late,
                nonfinite.new if nonfinite.raises else 0,
                _digest(queue),
                sum(queue.update.micro_batches.values()),
                [tallies[p].kappa / ranks if p in tallies else 0.0 for p in params],
            )
            failing, late, stop, digest, seen, *counts = self.sum([*own[:5], *own.counts], params[0].device)
            total = _News(failing, late, stop, digest, seen, counts)
            if total.late:
                self.reduce_again(queue)
            self.reduced = queue.update
            for p, kappa in zip(params, total.counts, strict=True):
                if kappa:
                    tallies[p].kappa = kappa
                elif p in tallies:
                    # No rank had a gradient, but its moments were made ready for one: what they lost is owed back.
                    tally, state = tallies.pop(p), queue.moments.state[p]
                    state["norm1"], state["norm2"] = tally.a or (state["norm1"], state["norm2"])
            if total.seen:
                queue.update.micro_batches = {0: total.seen}
        return own, total

    def _refuse(self, own: _News, total: _News) -> None:
        """Refuse an update that another rank refuses, or that the ranks do not mean alike."""
        if total.failed:
            raise RuntimeError(
                f"{total.failed:g} of {self.size} ranks refused this update or gave it up; their own errors say why. "
                "No weight has moved: call opt.abandon() on this rank too, or stop"
            )
        if total.digest != own.digest * self.size:
            raise RuntimeError(
                "the ranks disagree on lr, betas or another hyperparameter, on samples_seen or expect(kappa): set them "
                "alike on every rank (kappa counts the micro-batches of all ranks). No weight has moved; drop the "
                "update with opt.abandon()"
            )
        pairs = zip(total.counts, own.counts, strict=True)
        if self.even and any(abs(k - n * self.size) > 1e-9 * k for k, n in pairs):
            raise RuntimeError(
                "the ranks brought unequal numbers of micro-batches, or unequal weights of ragged ones, and FSDP2 has "
                "averaged them as equals; give every rank as many samples in each backward. No weight has moved, but "
                "the moments hold them: go back to the last checkpoint"
            )
        if total.nonfinite and not own.nonfinite:
            raise RuntimeError(
                f'{total.nonfinite:g} gradient elements were not finite on other ranks, and on_nonfinite="raise"; the '
                "weights have not moved"
            )

    def sum(self, values: list[float], device: torch.device) -> list[float]:
        """Add up over the ranks, exactly for whole numbers."""
        if self.alone:
            return values
        total = self.tensor(values, device)
        for group in self.groups:
            dist.all_reduce(total, group=group)
        result: list[float] = total.tolist()
        return result

    def tensor(self, values: list[float], device: torch.device) -> Tensor:
        """Numbers to be summed; on the CPU where the groups can, so as not to wait for the device."""
        return torch.tensor(values, dtype=torch.float64, device="cpu" if self.on_cpu else device)

    def abandon_update(self, queue: FoldQueue) -> None:  # noqa: D102
        if queue.update is not self.reduced and not self.outdated and self._there():  # else nobody is to be told
            self._close(queue, failed=True)

    def drop_update(self, queue: FoldQueue) -> None:  # noqa: D102
        if queue.update.tallies and not self.alone and self._there():
            raise RuntimeError(
                f"load_state_dict() in the middle of an update that {self.size} ranks share: what is on its way would "
                "be counted in the next one. Drop it first with opt.abandon(), on all of them"
            )

    def local(self, t: Tensor) -> Tensor:  # noqa: D102
        local: Tensor = getattr(t, "_local_tensor", t)  # what to_local() returns in no_grad, after asking more
        return local

    def gradient(self, p: Tensor, grad: Tensor) -> Tensor:  # noqa: D102
        if getattr(grad, "placements", None) != getattr(p, "placements", None):
            # A sum that is still spread over ranks must be added up before it is squared.
            grad = grad.redistribute(placements=p.placements)  # type: ignore[attr-defined]
        return self.local(grad)

    def weight(self, p: Tensor) -> Tensor:  # noqa: D102
        return self.local(p)

    def after_step(self, queue: FoldQueue) -> None:  # noqa: D102
        with lost_rank_named("exchanging weights"):
            if self.buffers:
                broadcast_first(self.buffers, self.groups[0])
            self.gather_weights(queue)

    def gather_weights(self, queue: FoldQueue) -> None:
        """Give every rank the weights that others have moved."""


class Bucket:
    """Parameters that travel together, and this rank's pieces of their moments, side by side in one buffer.

    Args:
        index: its place among the buckets.
        params: of one device and dtype.
        reducer: says how much room each takes, and the dtype of their moments.
    """

    def __init__(self, index: int, params: list[Tensor], reducer: BucketReducer[Any]) -> None:
        self.index, self.params, self.dtype = index, params, reducer.kinds[params[0]][0]
        self.places: dict[Tensor, slice] = {}
        self.size = 0
        for p in params:
            size = reducer.room(p)
            self.places[p] = slice(self.size, self.size + size)
            self.size += -(-size // ALIGNED) * ALIGNED
        self.moments: Tensor  # (2, size): all m, all v
        self.views: list[Tensor] = []  # into it

    def attach(self, moments: Moments, reducer: BucketReducer[Any]) -> None:
        """Move the moments into one buffer, unless they are there already (a loaded state is not)."""
        if self.views and all(map(is_, self.views, (moments.state[p][key] for p in self.params for key in KEYS))):
            return
        self.moments = torch.zeros(2, self.size, dtype=self.dtype, device=self.params[0].device)
        self.views = []
        for p, place in self.places.items():
            for key, row in zip(KEYS, self.moments, strict=True):
                piece = reducer.piece(p, moments.state[p][key])
                view = row[place.start : place.start + piece.numel()]
                view = view.as_strided(piece.shape, piece.stride()).copy_(piece)
                moments.state[p][key] = reducer.whole(p, view)
                self.views.append(moments.state[p][key])


B = TypeVar("B", bound=Bucket)


class BucketReducer(GroupReducer, Generic[B]):
    """Ranks that send bucket after bucket, all in the same order.

    Args:
        group: the ranks; None where there is no other.
    """

    # Bytes of one moment in a bucket: large enough for the wire's full speed, small enough to begin early.
    bucket_bytes = 25 << 20
    bucket: type[B]

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        super().__init__([] if group is None else [group])
        self.group = group
        self.buckets: list[B] = []
        self.bucket_of: dict[Tensor, B] = {}
        self.kinds: dict[Tensor, tuple[torch.dtype, ...]] = {}  # what the parameters of a bucket share
        self.begun = 0  # buckets on their way

    def open(self, queue: FoldQueue) -> None:  # noqa: D102
        params = [p for p in queue.moments.params() if p.requires_grad]
        kinds: dict[Tensor, Any] = {p: (queue.moments.dtype_of(p), p.dtype, p.device) for p in params}
        if kinds != self.kinds:
            self.kinds = kinds
            self.buckets = [self.bucket(i, params, self) for i, params in enumerate(self._divide())]
            self.bucket_of = {p: bucket for bucket in self.buckets for p in bucket.params}
        for bucket in self.buckets:
            bucket.attach(queue.moments, self)
        self.begun = 0

    def _divide(self) -> Iterator[list[Tensor]]:
        """Divide the parameters: the last come first, roughly the order in which a backward reaches them."""
        filling: dict[Any, list[Tensor]] = defaultdict(list)
        for p, kind in reversed(self.kinds.items()):
            filling[kind].append(p)
            if sum(self.local(q).numel() for q in filling[kind]) * kind[0].itemsize >= self.bucket_bytes:
                yield filling.pop(kind)
        yield from filling.values()

    def room(self, p: Tensor) -> int:
        """Elements of a moment of `p` that a rank has."""
        return self.local(p).numel()

    def piece(self, p: Tensor, moment: Tensor) -> Tensor:
        """This rank's piece of a moment of `p`, as `p` itself is cut; a loaded one may be cut otherwise."""
        return self.local(moment if hasattr(p, "device_mesh") else whole(moment))

    def whole(self, p: Tensor, piece: Tensor) -> Tensor:
        """The moment of `p` of which this rank has `piece`."""
        if not hasattr(p, "device_mesh"):
            return piece
        return in_pieces(piece, p.device_mesh, p.placements, p.shape, p.stride())  # type: ignore[attr-defined]

    def send_next(self, queue: FoldQueue) -> None:
        """Send the next bucket."""
        raise NotImplementedError

    def send_rest(self, queue: FoldQueue) -> None:
        """Send all buckets that are not on their way."""
        while self.begun < len(self.buckets):
            self.send_next(queue)


class _News(NamedTuple):
    """What a rank tells the others of its update, or the sum of it over the ranks."""

    failed: float  # it refuses the update
    late: float  # a gradient came after its moments were reduced
    nonfinite: float  # elements, where they are to stop the run
    digest: float  # of the hyperparameters
    seen: float  # micro-batches
    counts: list[float]  # micro-batches of each parameter


_ALIKE = (
    "eps", "weight_decay", "maximize", "decoupled_weight_decay", "micro_batch_size", "tuned_batch_size", "rule",
    "samples_seen",
)  # fmt: skip


def _digest(queue: FoldQueue) -> int:
    """A number that differs between ranks whose hyperparameters do; sums of it are exact."""
    values = [(float(g["lr"]), *map(float, g["betas"]), *(g[key] for key in _ALIKE)) for g in queue.moments.groups]
    return zlib.crc32(repr((queue.update.expected, queue.divisor, values)).encode())

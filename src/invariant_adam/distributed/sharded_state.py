"""Whole weights on every rank, moments in pieces (ZeRO-1): `ShardedState`.

The moments of each parameter are cut along its first dimension, a piece per rank. Each backward's gradients and squares
are reduce-scattered, bucket by bucket while it runs, and folded where they arrive; after the step the weights, each
moved by the rank that has its moments, are gathered. Nothing but a bucket or two is alive beside the pieces. A bucket's
pieces of the moments lie as what arrives for them does, so that packing, squaring and folding are each an operation or
two on a whole bucket, not on each of its parameters.

Ranks may bring any number of micro-batches. A backward announces itself (one number, summed over the ranks), and a rank
that has come to `step()` sends zeros for as long as another announces one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from ..fold import hooks
from ..fold.moments import KEYS
from ..fold.pair import ONES, Pair
from ..fold.queue import FoldQueue
from ..fold.scalars import Tally
from ..kernels import adam as kernels
from .group import ALIGNED, Bucket, BucketReducer
from .wire import all_gather, broadcast_first, in_pieces, scatter_sum

_IN_FLIGHT = 2  # buckets that may be on the wire at once


class GradientBucket(Bucket):
    """Parameters that travel together: to each rank its piece of one after the other, padded to the same size."""

    def __init__(self, index: int, params: list[Tensor], reducer: ShardedState) -> None:
        super().__init__(index, params, reducer)
        self.ranks = reducer.size
        self.arrived: dict[Tensor, Pair] = {}
        # Elements that are left out after each.
        self.gaps = {p: (place.start - place.stop) % ALIGNED for p, place in self.places.items()}

    def pack(self, count: Tensor, guard: bool) -> Tensor:
        """Take what has arrived, and zeros for what has not, as (ranks, 2, size): what goes to each, g and g².

        Args:
            count: where the elements are counted that are not finite and left out.
            guard: whether to leave them out here.
        """
        arrived, self.arrived = self.arrived, {}
        rows = torch.empty(self.ranks, 2, self.size, dtype=self.dtype, device=self.params[0].device)
        if not arrived:
            return rows.zero_()
        found = [arrived.get(p) or Pair(p.new_zeros(p.shape), None, 0.0) for p in self.params]
        grads = squares = [x.grad for x in found]
        paired = any(x.grad_sq is not None for x in found)
        if paired:
            squares = [x.grad.to(self.dtype).square() if x.grad_sq is None else x.grad_sq for x in found]
        self._lay([*grads, *squares], rows.view(self.ranks, -1))
        g, s = rows[:, 0], rows[:, 1]
        if guard:  # one rank's would be all ranks'; of one alone the fold leaves them out
            kernels.guard([g], [s] if paired else None, count)
        if not paired:
            torch.mul(g, g, out=s)
        self._scale(arrived, g, s)
        return rows

    def _lay(self, tensors: list[Tensor], rows: Tensor) -> None:
        """Write to each rank its rows of one tensor after the other, the list of all parameters once or more."""
        if len({t.dtype for t in tensors}) > 1:
            tensors = [t.to(self.dtype) for t in tensors]
        gap = tensors[0].new_zeros(self.ranks * ALIGNED)
        pieces = []
        for i, t in enumerate(tensors):
            p = self.params[i % len(self.params)]
            if t.numel():
                pieces.append((t if t.ndim else t.expand(self.ranks)).contiguous())  # every rank has what cannot be cut
            if self.gaps[p]:
                pieces.append(gap[: self.ranks * self.gaps[p]])
        if pieces:
            torch._chunk_cat(pieces, 0, self.ranks, out=rows)

    def _scale(self, arrived: dict[Tensor, Pair], g: Tensor, s: Tensor) -> None:
        """Put the factors on what was packed: at once where all have the same."""
        kinds = {x.scale for x in arrived.values()}
        if len(kinds) == 1:
            places = [(slice(None), kinds.pop())]
        else:
            places = [(self.places[p], x.scale) for p, x in arrived.items()]
        for place, scale in places:
            for rows, factor in zip((g, s), scale, strict=True):
                if factor != 1.0:
                    rows[:, place].mul_(factor)

    def gather(self, pieces: list[Tensor]) -> Tensor:
        """Lay pieces of all parameters as their moments lie."""
        own = torch.zeros(self.size, dtype=pieces[0].dtype, device=pieces[0].device)
        into = [own[at.start :][: piece.numel()] for at, piece in zip(self.places.values(), pieces, strict=True)]
        torch._foreach_copy_(into, [piece.reshape(-1) for piece in pieces])
        return own

    def spread(self, rows: Tensor) -> None:
        """Give the parameters the values that the ranks have of them.

        Args:
            rows: (ranks, size), what `gather` made on each.
        """
        into, values = [], []
        for p, place in self.places.items():
            w, n, size = p.detach(), p.numel(), place.stop - place.start
            if not p.ndim or not w.is_contiguous():
                into.append(w)
                values.append(rows[:, place].reshape(-1)[:n].view(p.shape))
            elif n:
                whole, rest = divmod(n, size)
                into.append(w.view(-1)[: whole * size].view(whole, size))
                values.append(rows[:whole, place])
                if rest:
                    into.append(w.view(-1)[whole * size :])
                    values.append(rows[whole, place.start : place.start + rest])
        torch._foreach_copy_(into, values)


class ShardedState(BucketReducer[GradientBucket]):
    """Moments in pieces, one per rank, of weights that all ranks hold.

    Args:
        group: the ranks.
        squares_dtype: what squares travel in; None for the moments' own.
    """

    kernels_fold = False
    bucket = GradientBucket
    group: dist.ProcessGroup

    def __init__(self, group: dist.ProcessGroup, squares_dtype: torch.dtype | None = None) -> None:
        super().__init__(group)
        self.rank, self.squares_dtype = group.rank(), squares_dtype
        self.meshes: dict[str, DeviceMesh] = {}
        self.round: int | None = None  # the autograd task whose gradients come, -1 outside of one; None: none do
        self.flying: list[tuple[GradientBucket, list[Callable[[], Tensor]]]] = []
        self.announced: list[Any] = []

    # ---------------------------------------------------------------- pieces

    def room(self, p: Tensor) -> int:  # noqa: D102
        return -(-p.shape[0] // self.size) * prod(p.shape[1:]) if p.ndim else 1

    def open(self, queue: FoldQueue) -> None:  # noqa: D102
        super().open(queue)
        for bucket in self.buckets:  # of an update that was dropped
            bucket.arrived = {}
        self.flying, self.announced, self.round = [], [], None

    def piece(self, p: Tensor, moment: Tensor) -> Tensor:  # noqa: D102
        if isinstance(moment, DTensor):
            if moment.device_mesh == self._mesh(p.device.type) and moment.placements == (Shard(0),):
                return self.local(moment)
            moment = moment.full_tensor()
        return moment[self._rows(p)].contiguous() if p.ndim else moment

    def whole(self, p: Tensor, piece: Tensor) -> Tensor:  # noqa: D102
        if not p.ndim:
            return piece
        mesh, stride = self._mesh(p.device.type), torch.empty(p.shape, device="meta").stride()
        return in_pieces(piece, mesh, [Shard(0)], p.shape, stride)

    def _mesh(self, device: str) -> DeviceMesh:
        if device not in self.meshes:
            self.meshes[device] = DeviceMesh.from_group(self.group, device)
        return self.meshes[device]

    def _rows(self, p: Tensor) -> slice:
        size = -(-p.shape[0] // self.size)
        return slice(min(self.rank * size, p.shape[0]), min((self.rank + 1) * size, p.shape[0]))

    def weight(self, p: Tensor) -> Tensor:  # noqa: D102
        return p.detach()[self._rows(p)] if p.ndim and not self.alone else p

    # ---------------------------------------------------------------- gradients -> pieces of the moments

    def send(self, queue: FoldQueue, params: list[Tensor], tallies: list[Tally], pairs: list[Pair]) -> bool:  # noqa: D102
        task = torch._C._current_graph_task_id()
        queue.update.tallies |= zip(params, tallies, strict=True)
        for p, tally, x in zip(params, tallies, pairs, strict=True):
            bucket = self.bucket_of[p]
            # In a backward inside a backward a parameter may come twice, even after its bucket was sent.
            again = p in bucket.arrived or bucket.index < self.begun
            if self.round is not None and (self.round != task or again):
                self._end_round(queue)
            if self.round is None:
                self._begin_round(queue, task)
            sign = 1.0 if x.signed else queue.sign(p)
            grad, square = x.grad, x.grad_sq
            if x.borrowed:
                grad, square = grad.clone(), None if square is None else square.clone()
            if not p.ndim and not self.alone:  # sent to every rank, but to be counted once
                kernels.guard([grad], None if square is None else [square], queue.nonfinite.counter(grad.device))
            factors = (x.kappa * sign * x.scale[0], x.kappa * sign**2 * x.scale[1])
            bucket.arrived[p] = Pair(grad, square, x.kappa, factors, signed=True)
            queue.update.kinds.add(x.grad_sq is not None)
            tally.kappa += x.kappa
            while self.begun < len(self.buckets):
                bucket = self.buckets[self.begun]
                if len(bucket.arrived) < len(bucket.params):
                    break
                self.send_next(queue)
        if not queue.in_backward:
            self._end_round(queue)
        return True

    def reduce(self, queue: FoldQueue) -> None:  # noqa: D102
        if self.round is not None:
            self._end_round(queue)
        while self.sum([0.0], next(queue.moments.params()).device)[0]:  # another rank has a backward more
            self._end_round(queue)
        while self.flying:
            self._land(queue)

    def _begin_round(self, queue: FoldQueue, task: int) -> None:
        self.round = task
        if not self.alone:
            number = self.tensor([1.0], self.buckets[0].params[0].device)
            self.announced.append((number, dist.all_reduce(number, group=self.group, async_op=True)))
        if task >= 0:
            hooks.when_finished(lambda: self._end_round(queue) if self.round == task else None)

    def _end_round(self, queue: FoldQueue) -> None:
        with torch.no_grad():
            self.send_rest(queue)
        self.round, self.begun = None, 0

    def send_next(self, queue: FoldQueue) -> None:  # noqa: D102
        bucket = self.buckets[self.begun]
        rows = bucket.pack(queue.nonfinite.counter(bucket.params[0].device), guard=not self.alone)
        self.begun += 1
        narrow = self.squares_dtype
        if self.alone:
            waits = [rows.detach]  # the sum of one
        elif narrow is None:
            waits = [scatter_sum(rows.view(self.size, -1), self.group)]
        else:
            waits = [scatter_sum(rows[:, 0], self.group), scatter_sum(rows[:, 1].to(narrow), self.group, bucket.dtype)]
        self.flying.append((bucket, waits))
        if len(self.flying) > _IN_FLIGHT:
            self._land(queue)

    def _land(self, queue: FoldQueue) -> None:
        """Fold the bucket that was sent first into this rank's pieces of the moments."""
        bucket, waits = self.flying.pop(0)
        landed = [wait() for wait in waits]
        grads, squares = landed if len(landed) == 2 else landed[0].view(2, -1)
        tallies = queue.update.tallies
        alike: dict[Any, list[Tensor]] = defaultdict(list)
        for p in bucket.params:
            tally = tallies.get(p)
            if tally is None:  # no gradient on this rank, but perhaps on another
                tally = tallies[p] = queue.begin(p)
            alike[tally.keep, tally.b].append(p)
            tally.keep = ONES
        for (keep, gain), params in alike.items():
            lists = [[x] for x in (grads, squares, *bucket.moments)]
            if len(alike) > 1:
                lists = [[x[bucket.places[p]] for p in params] for (x,) in lists]
            kernels.fold(*lists, keep=keep, gain=gain, count=queue.nonfinite.counter(grads.device))

    # ---------------------------------------------------------------- weights -> everyone

    def gather_weights(self, queue: FoldQueue) -> None:  # noqa: D102
        if self.alone:
            return
        landing = []
        for bucket in self.buckets:
            own = bucket.gather([self.weight(p).detach() for p in bucket.params])
            rows = own.new_empty(self.size, bucket.size)
            landing.append((bucket, rows, all_gather(rows.view(-1), own, group=self.group, async_op=True)))
        for bucket, rows, work in landing:
            work.wait()
            bucket.spread(rows)
        # What every rank has of its own was summed in another order on each; the first's is everyone's.
        broadcast_first([queue.moments.state[p][key] for p in self.kinds if not p.ndim for key in KEYS], self.group)

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
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from ..fold import hooks
from ..fold.moments import KEYS, Moments
from ..fold.pair import ONES, Pair
from ..fold.scalars import Tally
from ..kernels import adam as kernels
from .group import GroupReducer, divide
from .wire import all_gather, in_pieces, scatter_sum, scatter_sum_narrow

if TYPE_CHECKING:
    from ..fold.queue import FoldQueue

# Bytes of gradients that travel together; their squares come on top.
BUCKET_BYTES = 25 << 20
_IN_FLIGHT = 2  # buckets that may be on the wire at once
_ALIGNED = 4  # elements: each piece begins at a multiple of 16 bytes, where kernels load that many at a time


class GradientBucket:
    """Parameters that travel together: to each rank its piece of one after the other, padded to the same size.

    Args:
        index: its place among the buckets.
        params: of one device and dtype.
        ranks: how many they are cut for.
        dtype: of the moments, and of what travels.
    """

    def __init__(self, index: int, params: list[Tensor], ranks: int, dtype: torch.dtype) -> None:
        self.index, self.params, self.ranks, self.dtype = index, params, ranks, dtype
        self.arrived: dict[Tensor, Pair] = {}
        self.places: dict[Tensor, slice] = {}
        self.gaps: dict[Tensor, int] = {}  # elements that are left out after each
        self.views: list[dict[str, Tensor]] = []  # the moments of each parameter
        self.moments: Tensor  # (2, size): their memory
        start = 0
        for p in params:
            size = -(-p.shape[0] // ranks) * (p.numel() // p.shape[0]) if p.numel() and p.ndim else p.numel()
            self.places[p], self.gaps[p] = slice(start, start + size), -size % _ALIGNED
            start += size + self.gaps[p]
        self.size = start

    def attach(self, moments: Moments, reducer: ShardedState) -> None:
        """Move this rank's pieces of the moments into one buffer, unless they are there already."""
        states = [moments.state[p] for p in self.params]
        if self.views and all(s[k] is view[k] for s, view in zip(states, self.views, strict=True) for k in view):
            return
        self.moments = torch.zeros(2, self.size, dtype=self.dtype, device=self.params[0].device)
        self.views = []
        for p, state in zip(self.params, states, strict=True):
            start, views = self.places[p].start, {}
            for key, row in zip(KEYS, self.moments, strict=True):
                piece = reducer.piece(p, state[key])
                view = row[start : start + piece.numel()].view(piece.shape)
                views[key] = state[key] = reducer.whole(p, view.copy_(piece))
            self.views.append(views)

    def pack(self, count: Tensor, guard: bool) -> Tensor:
        """Take what has arrived, and zeros for what has not, as (ranks, 2, size): what goes to each, g and g².

        Args:
            count: where the elements are counted that are not finite and left out.
            guard: whether to leave them out here.
        """
        arrived, self.arrived = self.arrived, {}
        device = self.params[0].device
        if not arrived:
            return torch.zeros(self.ranks, 2, self.size, dtype=self.dtype, device=device)
        rows = torch.empty(self.ranks, 2, self.size, dtype=self.dtype, device=device)
        found = [arrived.get(p) for p in self.params]
        grads = [p.new_zeros(p.shape) if x is None else x.grad for p, x in zip(self.params, found, strict=True)]
        paired = any(x.grad_sq is not None for x in arrived.values())
        squares = grads
        if paired:
            squares = [
                g.to(self.dtype).square() if x is None or x.grad_sq is None else x.grad_sq
                for g, x in zip(grads, found, strict=True)
            ]
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
        gap = tensors[0].new_zeros(self.ranks * _ALIGNED)
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
        starts = [place.start for place in self.places.values()]
        into = [own[i : i + piece.numel()] for i, piece in zip(starts, pieces, strict=True)]
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
            if not p.ndim:
                into.append(w)
                values.append(rows[0, place.start])
            elif not w.is_contiguous():
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


class ShardedState(GroupReducer):
    """Moments in pieces, one per rank, of weights that all ranks hold.

    Args:
        group: the ranks.
        squares_dtype: what squares travel in; None for the moments' own.
        bucket_bytes: bytes of gradients that travel together.
    """

    kernels_fold = False

    def __init__(
        self,
        group: dist.ProcessGroup,
        squares_dtype: torch.dtype | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        super().__init__([group])
        self.group, self.rank = group, group.rank()
        self.squares_dtype = squares_dtype
        self.bucket_bytes = bucket_bytes
        self.buckets: list[GradientBucket] = []
        self.bucket_of: dict[Tensor, GradientBucket] = {}
        self.kinds: dict[Tensor, Any] = {}
        self.meshes: dict[str, DeviceMesh] = {}
        self.round: int | None = None  # the autograd task whose gradients come, -1 outside of one; None: none do
        self.begun = 0  # buckets of this round on their way
        self.flying: list[tuple[GradientBucket, Any]] = []
        self.announced: list[Any] = []

    # ---------------------------------------------------------------- pieces

    def open(self, queue: FoldQueue) -> None:  # noqa: D102 - as GroupReducer has it
        params = [p for p in queue.moments.params() if p.requires_grad]
        kinds = {p: (p.device, p.dtype, queue.moments.dtype_of(p)) for p in params}
        if kinds != self.kinds:
            self.kinds = kinds
            parted = divide(params, kinds, lambda p: p.numel() * kinds[p][2].itemsize, self.bucket_bytes)
            self.buckets = [GradientBucket(i, ps, self.size, kinds[ps[0]][2]) for i, ps in enumerate(parted)]
            self.bucket_of = {p: bucket for bucket in self.buckets for p in bucket.params}
        for bucket in self.buckets:
            bucket.attach(queue.moments, self)
        self.round, self.begun = None, 0

    def piece(self, p: Tensor, moment: Tensor) -> Tensor:
        """This rank's piece of a moment of `p`, which may be that already."""
        if isinstance(moment, DTensor):
            if moment.device_mesh == self._mesh(p.device.type) and moment.placements == (Shard(0),):
                return self.local(moment)
            moment = moment.full_tensor()
        return moment[self._rows(p)] if p.ndim else moment

    def whole(self, p: Tensor, piece: Tensor) -> Tensor:
        """The moment of `p` of which this rank has `piece`."""
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

    def send(  # noqa: D102
        self, queue: FoldQueue, params: list[Tensor], tallies: list[Tally], pairs: list[Pair]
    ) -> bool:
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
                self._send(queue)
        if not queue.in_backward:
            self._end_round(queue)
        return True

    def reduce(self, queue: FoldQueue) -> None:  # noqa: D102
        if self.round is not None:
            self._end_round(queue)
        while self._announce(0.0):  # another rank has a backward more
            self._send_rest(queue)
        while self.flying:
            self._land(queue)
        self.announced.clear()

    def drop_update(self, queue: FoldQueue) -> None:  # noqa: D102 - as Reducer has it
        super().drop_update(queue)
        for bucket in self.buckets:
            bucket.arrived = {}
        self.flying, self.announced, self.round, self.begun = [], [], None, 0

    def _begin_round(self, queue: FoldQueue, task: int) -> None:
        self.round = task
        self.announced.append(self._announce(1.0, wait=False))
        if task >= 0:
            hooks.when_finished(lambda: self._end_round(queue) if self.round == task else None)

    def _end_round(self, queue: FoldQueue) -> None:
        with torch.no_grad():
            self._send_rest(queue)
        self.round = None

    def _announce(self, value: float, wait: bool = True) -> Any:
        """Say that a round comes (1) or not (0); return how many ranks have one."""
        if self.alone:
            return value
        cpu = any(d.type == "cpu" for d in self.group._device_types)
        number = torch.tensor(value, device="cpu" if cpu else self.buckets[0].params[0].device)
        work = dist.all_reduce(number, group=self.group, async_op=True)
        if not wait:
            return number, work
        work.wait()
        return number.item()

    def _send_rest(self, queue: FoldQueue) -> None:
        while self.begun < len(self.buckets):
            self._send(queue)
        self.begun = 0

    def _send(self, queue: FoldQueue) -> None:
        """Send the next bucket; all ranks take them in the same order."""
        bucket = self.buckets[self.begun]
        rows = bucket.pack(queue.nonfinite.counter(bucket.params[0].device), guard=not self.alone)
        self.begun += 1
        narrow = self.squares_dtype
        if self.alone:
            landing = rows.view(-1).detach  # the sum of one
        elif narrow is None:
            landing = scatter_sum(rows.view(self.size, -1), self.group)
        else:
            first = scatter_sum(rows[:, 0].contiguous(), self.group)
            second = scatter_sum_narrow(rows[:, 1].to(narrow), bucket.dtype, self.group)

            def landing() -> Tensor:
                return torch.cat([first(), second()])

        self.flying.append((bucket, landing))
        if len(self.flying) > _IN_FLIGHT:
            self._land(queue)

    def _land(self, queue: FoldQueue) -> None:
        """Fold the bucket that was sent first into this rank's pieces of the moments."""
        bucket, landing = self.flying.pop(0)
        grads, squares = landing().view(2, -1)
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
        scalars = [queue.moments.state[p][key] for p in self.kinds if not p.ndim for key in KEYS]
        if scalars:
            together = torch.stack(scalars)
            dist.broadcast(together, dist.get_global_rank(self.group, 0), group=self.group)
            torch._foreach_copy_(scalars, list(together))

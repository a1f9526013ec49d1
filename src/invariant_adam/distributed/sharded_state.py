"""Whole weights on every rank, moments in pieces (ZeRO-1): `ShardedState`.

The moments of each parameter are cut along its first dimension, a piece per rank. Each backward's gradients and squares
are reduce-scattered, bucket by bucket while it runs, and folded where they arrive; after the step the weights, each
moved by the rank that has its moments, are gathered. Nothing but a bucket or two is alive beside the pieces.

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

from .. import folding, hooks
from ..kernels import adam as kernels
from ..ranks import ONES, Team
from .wire import all_gather, scatter_sum, scatter_sum_narrow

if TYPE_CHECKING:
    from ..optimizer import InvariantAdam

# Bytes of gradients that travel together; their squares come on top.
BUCKET_BYTES = 25 << 20
_IN_FLIGHT = 2  # buckets that may be on the wire at once


class Bucket:
    """Parameters that travel together: to each rank its piece of one after the other, padded to the same size."""

    def __init__(self, params: list[Tensor], ranks: int, dtype: torch.dtype) -> None:
        self.params = params
        self.dtype = dtype
        self.filled: set[Tensor] = set()
        self.buffer: Tensor | None = None  # (ranks, 2, size): what goes to each, gradients and squares
        self.places: dict[Tensor, slice] = {}
        start = 0
        for p in params:
            rows = -(-p.shape[0] // ranks) if p.ndim else 1
            size = rows * (p.numel() // p.shape[0]) if p.ndim and p.shape[0] else rows
            self.places[p] = slice(start, start + size)
            start += size
        self.size = start

    def fill(self, p: Tensor, rows: Tensor, values: Tensor) -> None:
        """Write the elements of `values` where the ranks that hold them will get them.

        Args:
            p: the parameter.
            rows: (ranks, size) of this bucket.
            values: of the shape of `p`.
        """
        place = self.places[p]
        if not p.ndim:
            rows[:, place] = values  # too small to cut: every rank has it
            return
        flat, size = values.reshape(-1), place.stop - place.start
        whole, rest = divmod(flat.numel(), size)
        rows[:whole, place] = flat[: whole * size].view(whole, size)
        if rest:
            rows[whole, place.start : place.start + rest] = flat[whole * size :]

    def read(self, p: Tensor, rows: Tensor) -> Tensor:
        """Read back what `fill` wrote."""
        place = self.places[p]
        return rows[:, place].reshape(-1)[: p.numel()].view(p.shape)


class ShardedState(Team):
    """Moments in pieces, one per rank, of weights that all ranks hold.

    Args:
        group: the ranks.
        squares_dtype: what squares travel in; None for the moments' own.
        bucket_bytes: bytes of gradients that travel together.
    """

    takes_kernels = False

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
        self.buckets: list[Bucket] = []
        self.bucket_of: dict[Tensor, Bucket] = {}
        self.kinds: dict[Tensor, Any] = {}
        self.meshes: dict[str, DeviceMesh] = {}
        self.round: int | None = None  # the autograd task whose gradients come, -1 outside of one; None: none do
        self.begun = 0  # buckets of this round on their way
        self.flying: list[tuple[Bucket, Any]] = []
        self.announced: list[Any] = []

    # ---------------------------------------------------------------- pieces

    def open(self, optimizer: InvariantAdam) -> None:  # noqa: D102 - as Team has it
        params = [p for p in optimizer._params() if p.requires_grad]
        kinds = {p: (p.device, p.dtype, optimizer._moment_dtype(p)) for p in params}
        if kinds != self.kinds:
            self.kinds = kinds
            filling: dict[Any, list[Tensor]] = defaultdict(list)
            full = []
            for p in reversed(params):
                kind = kinds[p]
                filling[kind].append(p)
                if sum(q.numel() for q in filling[kind]) * kind[2].itemsize >= self.bucket_bytes:
                    full.append((kind[2], filling.pop(kind)))
            full += [(kind[2], rest) for kind, rest in filling.items()]
            self.buckets = [Bucket(params, self.size, dtype) for dtype, params in full]
            self.bucket_of = {p: bucket for bucket in self.buckets for p in bucket.params}
        for p in params:
            state = optimizer.state[p]
            for key in ("exp_avg", "exp_avg_sq"):
                state[key] = self._cut(p, state[key].to(p.device, kinds[p][2]))
        self.round, self.begun = None, 0

    def _cut(self, p: Tensor, moment: Tensor) -> Tensor:
        """This rank's piece of a moment, unless it is that already."""
        if not p.ndim:
            return moment
        mesh = self._mesh(p.device.type)
        if isinstance(moment, DTensor):
            if moment.device_mesh == mesh and moment.placements == (Shard(0),):
                return moment
            moment = moment.full_tensor()
        rows = self._rows(p)
        piece = moment[rows].clone(memory_format=torch.contiguous_format)
        whole = torch.empty(p.shape, device="meta")
        return DTensor.from_local(piece, mesh, [Shard(0)], run_check=False, shape=p.shape, stride=whole.stride())

    def _mesh(self, device: str) -> DeviceMesh:
        if device not in self.meshes:
            self.meshes[device] = DeviceMesh.from_group(self.group, device)
        return self.meshes[device]

    def _rows(self, p: Tensor) -> slice:
        size = -(-p.shape[0] // self.size)
        return slice(min(self.rank * size, p.shape[0]), min((self.rank + 1) * size, p.shape[0]))

    def weight(self, p: Tensor) -> Tensor:  # noqa: D102
        return p.detach()[self._rows(p)] if p.ndim else p

    # ---------------------------------------------------------------- gradients -> pieces of the moments

    def absorb(  # noqa: D102
        self, optimizer: InvariantAdam, params: list[Tensor], parts: list[folding.Part], arrivals: list[Any]
    ) -> bool:
        task = torch._C._current_graph_task_id()
        optimizer._update.parts |= zip(params, parts, strict=True)
        for p, part, x in zip(params, parts, arrivals, strict=True):
            bucket = self.bucket_of[p]
            if self.round is not None and (self.round != task or p in bucket.filled):
                self._end_round(optimizer)
            if self.round is None:
                self._begin_round(optimizer, task)
            sign = 1.0 if x.signed else optimizer._sign(p)
            kernels.guard([x.grad], None if x.square is None else [x.square], optimizer._counter(x.grad.device))
            grad = x.grad.to(bucket.dtype)
            square = grad.square() if x.square is None else x.square
            rows = self._buffer(bucket)
            bucket.fill(p, rows[:, 0], grad * (x.kappa * sign * x.scale[0]))
            bucket.fill(p, rows[:, 1], square * (x.kappa * sign**2 * x.scale[1]))
            bucket.filled.add(p)
            optimizer._update.kinds.add(x.square is not None)
            part.kappa += x.kappa
            while self.begun < len(self.buckets):
                bucket = self.buckets[self.begun]
                if len(bucket.filled) < len(bucket.params):
                    break
                self._send(optimizer)
        if optimizer._fold_in == "call":
            self._end_round(optimizer)
        return True

    def reduce(self, optimizer: InvariantAdam) -> None:  # noqa: D102
        if self.round is not None:
            self._end_round(optimizer)
        while self._announce(0.0):  # another rank has a backward more
            self._send_rest(optimizer)
        while self.flying:
            self._land(optimizer)
        self.announced.clear()

    def _begin_round(self, optimizer: InvariantAdam, task: int) -> None:
        self.round = task
        self.announced.append(self._announce(1.0, wait=False))
        if task >= 0:
            hooks.when_finished(lambda: self._end_round(optimizer) if self.round == task else None)

    def _end_round(self, optimizer: InvariantAdam) -> None:
        with torch.no_grad():
            self._send_rest(optimizer)
        self.round = None

    def _announce(self, value: float, wait: bool = True) -> Any:
        """Say that a round comes (1) or not (0); return how many ranks have one."""
        cpu = any(d.type == "cpu" for d in self.group._device_types)
        number = torch.tensor(value, device="cpu" if cpu else self.buckets[0].params[0].device)
        work = dist.all_reduce(number, group=self.group, async_op=True)
        if not wait:
            return number, work
        work.wait()
        return number.item()

    def _buffer(self, bucket: Bucket) -> Tensor:
        if bucket.buffer is None:
            like = bucket.params[0]
            bucket.buffer = torch.zeros(self.size, 2, bucket.size, dtype=bucket.dtype, device=like.device)
        return bucket.buffer

    def _send_rest(self, optimizer: InvariantAdam) -> None:
        while self.begun < len(self.buckets):
            self._send(optimizer)
        self.begun = 0

    def _send(self, optimizer: InvariantAdam) -> None:
        """Send the next bucket; all ranks take them in the same order."""
        bucket = self.buckets[self.begun]
        rows, bucket.buffer = self._buffer(bucket), None
        bucket.filled.clear()
        self.begun += 1
        narrow = self.squares_dtype
        if narrow is None:
            landing = scatter_sum(rows.view(self.size, -1), self.group)
        else:
            first = scatter_sum(rows[:, 0].contiguous(), self.group)
            second = scatter_sum_narrow(rows[:, 1].to(narrow), bucket.dtype, self.group)

            def landing() -> Tensor:
                return torch.cat([first(), second()])

        self.flying.append((bucket, landing))
        if len(self.flying) > _IN_FLIGHT:
            self._land(optimizer)

    def _land(self, optimizer: InvariantAdam) -> None:
        """Fold the bucket that was sent first into this rank's pieces of the moments."""
        bucket, landing = self.flying.pop(0)
        grads, squares = landing().view(2, -1)
        parts = optimizer._update.parts
        alike: dict[Any, list[tuple[Tensor, ...]]] = defaultdict(list)
        for p in bucket.params:
            if p not in parts:  # no gradient on this rank, but perhaps on another
                parts[p] = optimizer._begin(p)
            part, state = parts[p], optimizer.state[p]
            m, v = self.local(state["exp_avg"]), self.local(state["exp_avg_sq"])
            start = bucket.places[p].start
            if m.numel():
                g, s = (x[start : start + m.numel()].view(m.shape) for x in (grads, squares))
                alike[part.keep, part.b].append((g, s, m, v))
            part.keep = ONES
        for (keep, gain), folds in alike.items():
            lists = [list(tensors) for tensors in zip(*folds, strict=True)]
            kernels.fold(*lists, keep=keep, gain=gain, count=optimizer._counter(lists[0][0].device))

    # ---------------------------------------------------------------- weights -> everyone

    def moved(self, optimizer: InvariantAdam) -> None:  # noqa: D102
        super().moved(optimizer)
        landing = []
        for bucket in self.buckets:
            own = torch.zeros(bucket.size, dtype=bucket.params[0].dtype, device=bucket.params[0].device)
            for p in bucket.params:
                piece, start = self.weight(p), bucket.places[p].start
                own[start : start + piece.numel()] = piece.reshape(-1)
            rows = own.new_empty(self.size, bucket.size)
            landing.append((bucket, rows, all_gather(rows.view(-1), own, group=self.group, async_op=True)))
        for bucket, rows, work in landing:
            work.wait()
            for p in bucket.params:
                p.detach().copy_(bucket.read(p, rows) if p.ndim else rows[0, bucket.places[p].start])
        # What every rank has of its own was summed in another order on each; the first's is everyone's.
        scalars = [optimizer.state[p][key] for p in self.kinds if not p.ndim for key in ("exp_avg", "exp_avg_sq")]
        if scalars:
            together = torch.stack(scalars)
            dist.broadcast(together, dist.get_global_rank(self.group, 0), group=self.group)
            torch._foreach_copy_(scalars, list(together))

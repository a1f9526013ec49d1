"""Every rank holds the whole model and both moments (no wrapper, or DistributedDataParallel): `Replicated`.

The ranks' moments are equal when an update begins. Each folds its own micro-batches into them, and then they are
added up in place, bucket by bucket:

    rank 0   m ← a·m + b·Σ g        others   m ← 0·m + b·Σ g        all   m ← Σ over ranks

Only rank 0 keeps the past, so that it counts once, and is rounded once, whatever the number of ranks. That is 2P
numbers per rank and update for any number of micro-batches, and no gradient is ever kept or sent.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..fold import scalars
from ..fold.ranks import ONES, Team, in_pieces, in_touch, whole
from ..one_pass.exchange import trust

if TYPE_CHECKING:
    from ..optimizer import InvariantAdam

# Bytes of moments that travel together: large enough for the wire's full speed, small enough to begin early.
BUCKET_BYTES = 50 << 20

_ROUNDING = 1 - 1e-9
_ALIGNED = 4  # elements: each moment begins at a multiple of 16 bytes, where kernels load that many at a time


class Bucket:
    """Parameters whose moments lie side by side in one buffer: all m, then all v."""

    def __init__(self, params: list[Tensor]) -> None:
        self.params = params
        self.ready: set[Tensor] = set()
        self.work: Any = None  # the sum that is under way
        self.ours = False  # the moments are all ranks', and nothing was folded since
        self.views: list[dict[str, Tensor]] = []
        self.buffer: Tensor

    def attach(self, optimizer: InvariantAdam, team: Team) -> None:
        """Move the moments into one buffer, unless they are there already (a loaded state is not)."""
        states = [optimizer.state[p] for p in self.params]
        if self.views and all(s[k] is view[k] for s, view in zip(states, self.views, strict=True) for k in view):
            return
        for p, state in zip(self.params, states, strict=True):
            for key in ("exp_avg", "exp_avg_sq"):
                moment = state[key] if hasattr(p, "device_mesh") else whole(state[key])  # in pieces, of a sharded state
                state[key] = moment.to(p.device, optimizer._moment_dtype(p))
        pieces = {key: [team.local(state[key]) for state in states] for key in ("exp_avg", "exp_avg_sq")}
        first = pieces["exp_avg"][0]
        self.buffer = first.new_zeros(2 * sum(_room(t) for t in pieces["exp_avg"]))
        self.views = [{} for _ in states]
        start = 0
        for key, tensors in pieces.items():
            for state, views, t in zip(states, self.views, tensors, strict=True):
                view = self.buffer[start : start + t.numel()].as_strided(t.shape, t.stride(), start)
                start += _room(t)
                view.copy_(t)
                views[key] = state[key] = _as(state[key], view)


class Replicated(Team):
    """Moments that are the same on all ranks, added up over them once per update.

    The sum of a bucket begins in the last backward of the update, as soon as all of its parameters are folded, where
    that backward is known: inside `last_backward(opt)`, or by `opt.expect(kappa)` when the ranks share κ evenly.
    Otherwise it begins at `step()`. A rank that goes on folding after it began is summed a second time: the result is
    the same, the traffic twice as much.
    """

    def __init__(self, group: dist.ProcessGroup | None, bucket_bytes: int = BUCKET_BYTES) -> None:
        super().__init__([] if group is None else [group])
        self.group = group
        self.bucket_bytes = bucket_bytes
        self.share = 1.0 if group is None or group.rank() == 0 else 0.0
        self.buckets: list[Bucket] = []
        self.bucket_of: dict[Tensor, Bucket] = {}
        self.kinds: dict[Tensor, tuple[torch.device, torch.dtype]] = {}
        self.begun = 0  # buckets of this update whose sum has begun

    def open(self, optimizer: InvariantAdam) -> None:  # noqa: D102 - as Team has it
        if self.group is not None:
            params = [p for p in optimizer._params() if p.requires_grad]
            kinds = {p: (p.device, optimizer._moment_dtype(p)) for p in params}
            if kinds != self.kinds:
                self.kinds = kinds
                self._divide(optimizer, params)
            for bucket in self.buckets:
                bucket.attach(optimizer, self)
                bucket.ready.clear()
                bucket.ours = False
        self.begun, self.late = 0, False

    def _divide(self, optimizer: InvariantAdam, params: list[Tensor]) -> None:
        """Divide the parameters into buckets, last first: roughly the order in which a backward reaches them."""
        filling: dict[Any, list[Tensor]] = defaultdict(list)
        size: dict[Any, int] = defaultdict(int)
        full: list[list[Tensor]] = []
        for p in reversed(params):
            kind = self.kinds[p]
            filling[kind].append(p)
            size[kind] += 2 * self.local(p).numel() * kind[1].itemsize
            if size[kind] >= self.bucket_bytes:
                full.append(filling.pop(kind))
                size[kind] = 0
        self.buckets = [Bucket(params) for params in [*full, *filling.values()]]
        self.bucket_of = {p: bucket for bucket in self.buckets for p in bucket.params}

    def begin(self, part: scalars.Part) -> scalars.Part:  # noqa: D102
        part.keep = (part.keep[0] * self.share, part.keep[1] * self.share)
        return part

    def _hurries(self, optimizer: InvariantAdam) -> bool:
        """Whether what is complete is sent at once."""
        return not self.alone and not self.late and (self.last or optimizer._update.expected is not None)

    def before(self, optimizer: InvariantAdam, p: Tensor) -> None:  # noqa: D102
        super().before(optimizer, p)
        bucket = self.bucket_of.get(p)
        if bucket is not None and bucket.work is not None:
            self._wait(bucket)
            self._keep_once(optimizer, bucket)
            self.late = True

    def after(self, optimizer: InvariantAdam, params: list[Tensor]) -> None:  # noqa: D102
        update = optimizer._update
        if not self._hurries(optimizer):
            return
        for p in params:
            if self.last or update.parts[p].kappa >= (update.expected or 0.0) / self.size * _ROUNDING:
                self.bucket_of[p].ready.add(p)
        while self.begun < len(self.buckets) and len(self._next.ready) == len(self._next.params):
            if any(p in update.queue for p in self._next.params):
                optimizer._flush_queue()  # which comes back here, and sends
            else:
                self._launch(optimizer)

    def finish_last(self, optimizer: InvariantAdam) -> None:  # noqa: D102
        if self.update is optimizer._update and self.agreed is not self.update and not self.late:
            while self.begun < len(self.buckets):
                self._launch(optimizer)

    def reduce(self, optimizer: InvariantAdam) -> None:  # noqa: D102
        self._finish(optimizer)

    def again(self, optimizer: InvariantAdam) -> None:  # noqa: D102
        for bucket in self.buckets:
            self._keep_once(optimizer, bucket)
        self.begun = 0
        self._finish(optimizer)

    @property
    def _next(self) -> Bucket:
        return self.buckets[self.begun]

    def _finish(self, optimizer: InvariantAdam) -> None:
        while self.begun < len(self.buckets):
            self._launch(optimizer)
        for bucket in self.buckets:
            self._wait(bucket)

    def _launch(self, optimizer: InvariantAdam) -> None:
        """Begin the sum of the next bucket; all ranks take them in the same order."""
        bucket, parts = self._next, optimizer._update.parts
        for p in bucket.params:
            if p not in parts:  # no gradient on this rank, but perhaps on another
                parts[p] = optimizer._begin(p)
            part, state = parts[p], optimizer.state[p]
            for key, keep in zip(("exp_avg", "exp_avg_sq"), part.keep, strict=True):
                if keep != 1.0:
                    self.local(state[key]).mul_(keep)
            part.keep = ONES
        if not self.alone:
            with in_touch("adding up moments"):
                bucket.work = dist.all_reduce(bucket.buffer, group=self.group, async_op=True)
        bucket.ready.clear()
        bucket.ours = True
        self.begun += 1

    def _wait(self, bucket: Bucket) -> None:
        if bucket.work is not None:
            bucket.work.wait()
            bucket.work = None

    def _keep_once(self, optimizer: InvariantAdam, bucket: Bucket) -> None:
        """Have moments that are all ranks' again counted once in the next sum."""
        if bucket.ours:
            bucket.ours = False
            for p in bucket.params:
                optimizer._update.parts[p].keep = (self.share, self.share)


def _room(t: Tensor) -> int:
    return -(-t.numel() // _ALIGNED) * _ALIGNED


def _as(moment: Tensor, local: Tensor) -> Tensor:
    """A moment like `moment` whose piece on this rank is `local`."""
    if not hasattr(moment, "device_mesh"):
        return local
    mesh, placements = moment.device_mesh, moment.placements  # type: ignore[attr-defined]
    return in_pieces(local, mesh, placements, moment.shape, moment.stride())


def silence(model: nn.parallel.DistributedDataParallel) -> list[Tensor]:
    """Keep DDP from reducing gradients: the moments are reduced instead, and the gradients are gone by then.

    Each of its forwards is made one of `no_sync`, so that its reducer neither copies, sends nor leaves a gradient. It
    then no longer makes the buffers of all ranks the first's either; that is done after each step instead.
    """
    if getattr(model, "_comm_hooks", None):
        raise ValueError(
            "DistributedDataParallel has a communication hook (register_comm_hook), which would never run: moments are "
            "reduced, not gradients. Leave it out"
        )
    if model.static_graph:
        raise ValueError(
            "DistributedDataParallel(static_graph=True) asks for reductions of its own, which are switched off here; "
            "leave it out: parameters without a gradient need nothing"
        )

    def no_sync(module: nn.Module, _: Any) -> None:
        module.require_backward_grad_sync = False  # type: ignore[assignment]

    model.register_forward_pre_hook(no_sync)
    trust(model)
    return [b for b in model.module.buffers() if b.numel()] if model.broadcast_buffers else []

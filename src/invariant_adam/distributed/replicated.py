"""Every rank holds the whole model and both moments (no wrapper, or DistributedDataParallel): `Replicated`.

The ranks' moments are equal when an update begins. Each folds its own micro-batches into them, and then they are
added up in place, bucket by bucket:

    rank 0   m ← a·m + b·Σ g        others   m ← 0·m + b·Σ g        all   m ← Σ over ranks

Only rank 0 keeps the past, so that it counts once, and is rounded once, whatever the number of ranks. That is 2P
numbers per rank and update for any number of micro-batches, and no gradient is ever kept or sent.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ..fold.moments import KEYS
from ..fold.pair import ONES
from ..fold.queue import FoldQueue
from ..fold.scalars import Tally
from ..one_pass import exchange
from .group import Bucket, BucketReducer
from .wire import lost_rank_named

_ROUNDING = 1 - 1e-9


class MomentBucket(Bucket):
    """Parameters whose moments are added up together."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.ready: set[Tensor] = set()
        self.work: Any = None  # the sum that is under way
        self.ours = False  # the moments are all ranks', and nothing was folded since


class Replicated(BucketReducer[MomentBucket]):
    """Moments that are the same on all ranks, added up over them once per update.

    The sum of a bucket begins in the last backward of the update, as soon as all of its parameters are folded, where
    that backward is known: inside `last_backward(opt)`, or by `opt.expect(kappa)` when the ranks share κ evenly.
    Otherwise it begins at `step()`. A rank that goes on folding after it began is summed a second time: the result is
    the same, the traffic twice as much.
    """

    bucket = MomentBucket

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        super().__init__(group)
        self.share = 1.0 if group is None or group.rank() == 0 else 0.0

    def open(self, queue: FoldQueue) -> None:  # noqa: D102
        self.late = False
        if self.group is not None:
            super().open(queue)
        for bucket in self.buckets:
            bucket.ready.clear()
            bucket.ours = False

    def begin(self, tally: Tally) -> Tally:  # noqa: D102
        tally.keep = (tally.keep[0] * self.share, tally.keep[1] * self.share)
        return tally

    def before_fold(self, queue: FoldQueue, p: Tensor) -> None:  # noqa: D102
        super().before_fold(queue, p)
        bucket = self.bucket_of.get(p)
        if bucket is not None and bucket.work is not None:
            self._wait(bucket)
            self._keep_once(queue, bucket)
            self.late = True

    def after_fold(self, queue: FoldQueue, params: list[Tensor]) -> None:  # noqa: D102
        update = queue.update
        if self.alone or self.late or not (self.last_backward or update.expected is not None):
            return  # nothing is sent before step()
        for p in params:
            if self.last_backward or update.tallies[p].kappa >= (update.expected or 0.0) / self.size * _ROUNDING:
                self.bucket_of[p].ready.add(p)
        while self.begun < len(self.buckets):
            bucket = self.buckets[self.begun]
            if len(bucket.ready) < len(bucket.params):
                break
            if any(p in update.queued for p in bucket.params):
                queue.flush_queued()  # which comes back here, and sends
            else:
                self.send_next(queue)

    def end_last_backward(self, queue: FoldQueue) -> None:  # noqa: D102
        if self.update is queue.update and self.reduced is not self.update and not self.late:
            self.send_rest(queue)

    def reduce(self, queue: FoldQueue) -> None:  # noqa: D102
        self.send_rest(queue)
        for bucket in self.buckets:
            self._wait(bucket)

    def reduce_again(self, queue: FoldQueue) -> None:  # noqa: D102
        for bucket in self.buckets:
            self._keep_once(queue, bucket)
        self.begun = 0
        self.reduce(queue)

    def send_next(self, queue: FoldQueue) -> None:  # noqa: D102
        bucket, tallies = self.buckets[self.begun], queue.update.tallies
        for p in bucket.params:
            if p not in tallies:  # no gradient on this rank, but perhaps on another
                tallies[p] = queue.begin(p)
            tally, state = tallies[p], queue.moments.state[p]
            for key, keep in zip(KEYS, tally.keep, strict=True):
                if keep != 1.0:
                    self.local(state[key]).mul_(keep)
            tally.keep = ONES
        if not self.alone:
            with lost_rank_named("adding up moments"):
                bucket.work = dist.all_reduce(bucket.moments, group=self.group, async_op=True)
        bucket.ready.clear()
        bucket.ours = True
        self.begun += 1

    def _wait(self, bucket: MomentBucket) -> None:
        if bucket.work is not None:
            bucket.work.wait()
            bucket.work = None

    def _keep_once(self, queue: FoldQueue, bucket: MomentBucket) -> None:
        """Have moments that are all ranks' again counted once in the next sum."""
        if bucket.ours:
            bucket.ours = False
            for p in bucket.params:
                queue.update.tallies[p].keep = (self.share, self.share)


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
    exchange.trusted.add(model)
    return [b for b in model.module.buffers() if b.numel()] if model.broadcast_buffers else []

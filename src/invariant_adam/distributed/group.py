"""Ranks that close each update together: `GroupReducer`, what the ways of reducing have in common.

At `step()` every rank reduces what it folded, in a way of its own (`reduce`), and then one small sum over the ranks
carries the counts of all parameters. The same sum tells what the ranks must know of each other: that one refuses (then
all do, instead of waiting for it), and that their hyperparameters are the same.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..fold.reducer import Reducer
from .wire import broadcast_first, lost_rank_named

if TYPE_CHECKING:
    from ..fold.queue import FoldQueue
    from ..fold.update import Update


class Outdated(Reducer):
    """The reducer of an optimizer that got parameters after `prepare`."""

    def before_fold(self, queue: FoldQueue, p: Tensor) -> None:  # noqa: D102 - as Reducer has it
        raise RuntimeError(
            "parameters were added to the optimizer after distributed.prepare(), which has not made them the same on "
            "all ranks; call prepare(model, opt) again, on every rank, before the next backward"
        )

    def reduce_update(self, queue: FoldQueue, check: Callable[[], None]) -> None:  # noqa: D102
        self.before_fold(queue, next(queue.moments.params()))


class GroupReducer(Reducer):
    """The ranks of one or more process groups, whose micro-batches make one update.

    Args:
        groups: the process groups, one for each dimension of their mesh; none where there is no other rank.
    """

    gradients_wait = False  # the moments are reduced before the weights move
    several = True
    even = False  # whether all ranks must bring as many micro-batches

    def __init__(self, groups: list[dist.ProcessGroup]) -> None:
        self.groups = groups
        self.size = prod(group.size() for group in groups)
        self.alone = self.size == 1  # there is nobody to send to, and no collective is started
        self.update: Update | None = None  # the one under way
        self.reduced: Update | None = None  # the one that is reduced, stepped or not
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
        if queue.update is self.update:
            return
        if not self._there():
            raise RuntimeError(
                "the process group that distributed.prepare() was given has been destroyed; call prepare(model, opt) "
                "again, on every rank of the new one, before the next backward"
            )
        self.update = queue.update
        self.open(queue)

    def _there(self) -> bool:
        """Whether the process groups still are."""
        return dist.is_initialized() and all(g in dist.distributed_c10d._world.pg_group_ranks for g in self.groups)

    def with_new_parameters(self, queue: FoldQueue) -> Reducer:  # noqa: D102
        if queue.update.tallies:
            raise RuntimeError(
                f"add_param_group() in the middle of an update that {self.size} ranks share; call it after step(), on "
                "all of them, and prepare(model, opt) again"
            )
        return Outdated()

    def open(self, queue: FoldQueue) -> None:
        """Begin an update."""

    def reduce(self, queue: FoldQueue) -> None:
        """Bring what all ranks folded into everyone's moments."""

    def reduce_again(self, queue: FoldQueue) -> None:
        """Do it once more, for gradients that came after it."""

    def count(self, queue: FoldQueue, p: Tensor) -> float:
        """Micro-batches of `p` that this rank brought."""
        tally = queue.update.tallies.get(p)
        return 0.0 if tally is None else tally.kappa

    def reduce_update(self, queue: FoldQueue, check: Callable[[], None]) -> None:  # noqa: D102
        if queue.update is self.reduced:
            return
        with lost_rank_named("closing an update"):
            self._begin_update(queue)  # unless a gradient did
            error: Exception | None = None
            try:
                check()
                if queue.update.tallies:
                    queue.update.check_whole(queue.moments.name)
            except Exception as e:  # told to all ranks first
                error = e
            queue.flush()
            self.reduce(queue)
            own, total = self._sum_counts(queue, failed=error is not None)
            if total.late:
                self.reduce_again(queue)
            self.reduced = queue.update
            for p, kappa in zip(queue.moments.params(), total.counts, strict=True):
                self._take_count(queue, p, kappa)
            if total.seen:
                queue.update.micro_batches = {0: total.seen}
        if error is not None:
            raise error
        self._refuse(own, total)

    def _sum_counts(self, queue: FoldQueue, failed: bool) -> tuple[_News, _News]:
        """What this rank tells the others, and its sum over the ranks."""
        params, nonfinite = list(queue.moments.params()), queue.nonfinite
        own = _News(
            float(failed),
            float(self.late),
            float(nonfinite.new if nonfinite.raises else 0),
            float(_digest(queue)),
            sum(queue.update.micro_batches.values()),
            [self.count(queue, p) for p in params],
        )
        summed = self.sum([*own[:5], *own.counts], params[0].device)
        failing, late, stop, digest, seen, *counts = summed
        return own, _News(failing, late, stop, digest, seen, counts)

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

    def _take_count(self, queue: FoldQueue, p: Tensor, kappa: float) -> None:
        """Make the micro-batches of `p` those of all ranks."""
        tallies = queue.update.tallies
        tally = tallies.get(p)
        if kappa:
            assert tally is not None
            tally.kappa = kappa
        elif tally is not None:
            # No rank had a gradient of it, but its moments were made ready for one: what they lost is owed back.
            del tallies[p]
            if tally.a is not None:
                queue.moments.state[p]["norm1"], queue.moments.state[p]["norm2"] = tally.a

    def sum(self, values: list[float], device: torch.device) -> list[float]:
        """Add up over the ranks, exactly for whole numbers; on the CPU where the group can, so as not to wait."""
        if self.alone:
            return values
        cpu = all(any(d.type == "cpu" for d in group._device_types) for group in self.groups)
        total = torch.tensor(values, dtype=torch.float64, device="cpu" if cpu else device)
        for group in self.groups:
            dist.all_reduce(total, group=group)
        result: list[float] = total.tolist()
        return result

    def abandon_update(self, queue: FoldQueue) -> None:  # noqa: D102
        def gives_up() -> None:
            raise _Abandoned

        if not self._there():
            return  # nobody is left to be told
        with suppress(_Abandoned):
            self.reduce_update(queue, gives_up)

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


def divide(params: list[Tensor], kinds: dict[Tensor, Any], size: Callable[[Tensor], int], limit: int) -> list[Any]:
    """Divide parameters into buckets of one kind and about `limit` bytes.

    The last come first: that is roughly the order in which a backward reaches them.

    Args:
        params: the parameters.
        kinds: what those of a bucket must share.
        size: parameter -> bytes.
        limit: bytes at which a bucket is full.
    """
    filling: dict[Any, list[Tensor]] = defaultdict(list)
    full: list[list[Tensor]] = []
    for p in reversed(params):
        bucket = filling[kinds[p]]
        bucket.append(p)
        if sum(map(size, bucket)) >= limit:
            full.append(filling.pop(kinds[p]))
    return [*full, *filling.values()]


class _News(NamedTuple):
    """What a rank tells the others of its update, or the sum of it over the ranks."""

    failed: float  # it refuses the update
    late: float  # a gradient came after its moments were reduced
    nonfinite: float  # elements, where they are to stop the run
    digest: float  # of the hyperparameters
    seen: float  # micro-batches
    counts: list[float]  # micro-batches of each parameter


class _Abandoned(Exception):  # noqa: N818 - no error
    pass


_ALIKE = (
    "eps", "weight_decay", "maximize", "decoupled_weight_decay", "micro_batch_size", "tuned_batch_size", "rule",
    "samples_seen",
)  # fmt: skip


def _digest(queue: FoldQueue) -> int:
    """A number that differs between ranks whose hyperparameters do; sums of it are exact."""
    values = [(float(g["lr"]), *map(float, g["betas"]), *(g[key] for key in _ALIKE)) for g in queue.moments.groups]
    return zlib.crc32(repr((queue.update.expected, queue.loss_divisor, values)).encode())

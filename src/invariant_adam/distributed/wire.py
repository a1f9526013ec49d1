"""What travels between ranks: collectives, the error when one of them fails, and tensors that are cut over ranks."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

# torch 2.13 has other names for them, and warns of the old ones.
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def scatter_sum(rows: Tensor, group: dist.ProcessGroup, dtype: torch.dtype | None = None) -> Callable[[], Tensor]:
    """Sum row r over the ranks for rank r; returns what waits for it.

    Args:
        rows: (ranks, n).
        group: the ranks.
        dtype: what rows in few bits are added up in: each rank gets the others' rows and adds them itself. A
            reduce-scatter would add in the dtype that travels, and in bfloat16 lose a little more with every rank.
    """
    rows = rows.contiguous()
    if dtype is None:
        out = rows.new_empty(rows.shape[1])
        work = reduce_scatter(out, rows.view(-1), group=group, async_op=True)
    else:
        out = torch.empty_like(rows)
        work = dist.all_to_all_single(out, rows, group=group, async_op=True)

    def wait() -> Tensor:
        work.wait()
        return out if dtype is None else out.sum(0, dtype=dtype)

    return wait


def broadcast_first(tensors: list[Tensor], group: dist.ProcessGroup) -> None:
    """Give every rank the values of the group's first, in one broadcast for each kind of tensor."""
    first = dist.get_global_rank(group, 0)
    kinds: dict[Any, list[Tensor]] = defaultdict(list)
    for t in tensors:
        kinds[t.device, t.dtype].append(t)
    for alike in kinds.values():
        together = torch.cat([t.detach().reshape(-1) for t in alike])
        dist.broadcast(together, first, group=group)
        for t, values in zip(alike, together.split([t.numel() for t in alike]), strict=True):
            t.detach().copy_(values.view(t.shape))


class LostRankError(RuntimeError):
    """Another rank has died, or has not answered within the process group's timeout."""


# gloo's failures are plain RuntimeErrors.
_TRANSPORT = re.compile("gloo|NCCL|connection|timed out", re.IGNORECASE)


@contextmanager
def lost_rank_named(doing: str) -> Iterator[None]:
    """Say what was going on, and how to go on, when a collective in this context fails.

    A rank that dies closes its connections, so that the others fail at once; one that hangs lets them run into the
    process group's timeout. Either way those that are left cannot finish the update.

    Args:
        doing: what the collective is for, in words that follow "while".
    """
    try:
        yield
    except RuntimeError as error:
        transport = isinstance(error, dist.DistError) or _TRANSPORT.search(str(error))
        if isinstance(error, LostRankError) or not transport or not dist.is_initialized():
            raise
        raise LostRankError(
            f"rank {dist.get_rank()} of {dist.get_world_size()} lost touch with another rank while {doing}: that one "
            "has died or no longer answers, and its own error says why. No rank can go on without it: stop them all "
            f"and start again from the latest checkpoint, as torchrun --max-restarts does. The transport says: {error}"
        ) from error


def in_pieces(piece: Tensor, mesh: Any, placements: Any, shape: torch.Size, stride: tuple[int, ...]) -> Tensor:
    """The tensor of which this rank has `piece`, in a buffer with others perhaps."""
    made = DTensor.from_local(torch.empty_like(piece), mesh, placements, run_check=False, shape=shape, stride=stride)
    # Only now: made of a view, a DTensor takes its place in the buffer for its own, and torch cannot save or copy it.
    made._local_tensor = piece
    return made

"""Collectives under one name in all versions of torch, and a sum over ranks of numbers that travel in fewer bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 has other names for them, and warns of the old ones.
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def scatter_sum(rows: Tensor, group: dist.ProcessGroup) -> Callable[[], Tensor]:
    """Sum row r over the ranks for rank r; returns what waits for it.

    Args:
        rows: (ranks, n), contiguous.
        group: the ranks.
    """
    out = rows.new_empty(rows.shape[1])
    work = reduce_scatter(out, rows.reshape(-1), group=group, async_op=True)

    def wait() -> Tensor:
        work.wait()
        return out

    return wait


def scatter_sum_narrow(rows: Tensor, dtype: torch.dtype, group: dist.ProcessGroup) -> Callable[[], Tensor]:
    """`scatter_sum` of rows in few bits, added up in `dtype`: each rank gets the others' rows and adds them itself.

    A reduce-scatter would add in the dtype that travels, and in bfloat16 lose a little more with every rank.
    """
    rows = rows.contiguous()
    out = torch.empty_like(rows)
    work = dist.all_to_all_single(out, rows, group=group, async_op=True)

    def wait() -> Tensor:
        work.wait()
        return out.sum(0, dtype=dtype)

    return wait

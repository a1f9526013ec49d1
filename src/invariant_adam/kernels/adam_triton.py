"""The Triton twins of `adam.fold` and `adam.step`: one pass over memory each, many tensors in one launch.

    fold    reads g, m, v and writes m, v:  20 bytes per parameter in float32
    step    reads w, m, v and writes w:     16 bytes

A launch covers a list of tensors by two small tables on the device: their addresses, and for each block the tensor it
works on and where in it. Moments and weights stay where they are, so the tables are made once and found again by
their addresses. Scalars are ordinary arguments, which Triton does not specialise on: no recompilation when they change.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 4096, 8
LIMIT = math.sqrt(torch.finfo(torch.float32).max) / 1024  # as in `adam.guard`
DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _fold_block(g, s, m, v, at, inside, count, keep1, keep2, gain1, gain2, limit, HAS_S: tl.constexpr):
    """m ← keep₁m + gain₁g, v ← keep₂v + gain₂g² on one block; what would poison them counts as zero.

    `inside` is None for a block that is full: without a mask the loads are 16 bytes wide whatever the tensor's size.
    """
    x = tl.load(g + at, mask=inside).to(tl.float32)
    good = tl.abs(x) < limit  # NaN is not below anything
    if HAS_S:
        square = tl.load(s + at, mask=inside)
        good = good & (tl.abs(square) < limit * limit)
        square = tl.where(good, square, 0.0)
        x = tl.where(good, x, 0.0)
    else:
        x = tl.where(good, x, 0.0)
        square = x * x
    tl.store(m + at, keep1 * tl.load(m + at, mask=inside) + gain1 * x, mask=inside)
    tl.store(v + at, keep2 * tl.load(v + at, mask=inside) + gain2 * square, mask=inside)
    bad = good == 0
    if inside is not None:
        bad = bad & inside
    bad_here = tl.sum(bad.to(tl.int32), 0)
    if bad_here > 0:
        tl.atomic_add(count, bad_here.to(tl.int64))


@triton.jit
def _fold(
    tensors, blocks, sizes, count, keep1, keep2, gain1, gain2, limit,
    G: tl.constexpr, HAS_S: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """One block of one tensor; tensors is (n, 4): the addresses of g, g², m, v."""
    tensor = tl.load(blocks + 2 * tl.program_id(0))
    first = tl.load(blocks + 2 * tl.program_id(0) + 1).to(tl.int64) * SIZE
    n = tl.load(sizes + tensor)
    g = tl.multiple_of(tl.load(tensors + 4 * tensor).to(tl.pointer_type(G)), 16)
    s = tl.multiple_of(tl.load(tensors + 4 * tensor + 1).to(tl.pointer_type(tl.float32)), 16)
    m = tl.multiple_of(tl.load(tensors + 4 * tensor + 2).to(tl.pointer_type(tl.float32)), 16)
    v = tl.multiple_of(tl.load(tensors + 4 * tensor + 3).to(tl.pointer_type(tl.float32)), 16)
    at = first + tl.arange(0, SIZE)
    if first + SIZE <= n:
        _fold_block(g, s, m, v, at, None, count, keep1, keep2, gain1, gain2, limit, HAS_S)
    else:
        _fold_block(g, s, m, v, at, at < n, count, keep1, keep2, gain1, gain2, limit, HAS_S)


@triton.jit
def _fold_one(g, s, m, v, n, count, keep1, keep2, gain1, gain2, limit, HAS_S: tl.constexpr, SIZE: tl.constexpr):
    """One block of the only tensor."""
    first = tl.program_id(0).to(tl.int64) * SIZE
    at = first + tl.arange(0, SIZE)
    if first + SIZE <= n:
        _fold_block(g, s, m, v, at, None, count, keep1, keep2, gain1, gain2, limit, HAS_S)
    else:
        _fold_block(g, s, m, v, at, at < n, count, keep1, keep2, gain1, gain2, limit, HAS_S)


@triton.jit
def _step_block(w, m, v, at, inside, size, eps, keep, W: tl.constexpr):
    """w ← keep·w − size·m/(√v + eps) on one block."""
    x = tl.load(w + at, mask=inside).to(tl.float32)
    move = tl.load(m + at, mask=inside) / (tl.sqrt(tl.load(v + at, mask=inside)) + eps)
    tl.store(w + at, (keep * x - size * move).to(W), mask=inside)


@triton.jit
def _step(tensors, blocks, sizes, size, eps, keep, W: tl.constexpr, SIZE: tl.constexpr):
    """One block of one tensor; tensors is (n, 3): the addresses of w, m, v."""
    tensor = tl.load(blocks + 2 * tl.program_id(0))
    first = tl.load(blocks + 2 * tl.program_id(0) + 1).to(tl.int64) * SIZE
    n = tl.load(sizes + tensor)
    w = tl.multiple_of(tl.load(tensors + 3 * tensor).to(tl.pointer_type(W)), 16)
    m = tl.multiple_of(tl.load(tensors + 3 * tensor + 1).to(tl.pointer_type(tl.float32)), 16)
    v = tl.multiple_of(tl.load(tensors + 3 * tensor + 2).to(tl.pointer_type(tl.float32)), 16)
    at = first + tl.arange(0, SIZE)
    if first + SIZE <= n:
        _step_block(w, m, v, at, None, size, eps, keep, W)
    else:
        _step_block(w, m, v, at, at < n, size, eps, keep, W)


def serves(tensors: list[Tensor], *moments: list[Tensor]) -> bool:
    """Whether these kernels can take the lists: dense tensors of equal layout and alignment, float32 moments."""
    for t, *others in zip(tensors, *moments, strict=True):
        if t.dtype not in DTYPES or not (t.is_contiguous() or t.is_contiguous(memory_format=torch.channels_last)):
            return False
        for x in others:
            if x.dtype != torch.float32 or x.stride() != t.stride() or x.data_ptr() % 16:
                return False
        if t.data_ptr() % 16:
            return False
    return True


def fold(
    grads: list[Tensor],
    squares: list[Tensor] | None,
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    *,
    keep: tuple[float, float],
    gain: tuple[float, float],
    count: Tensor,
) -> None:
    """Fold as `adam.fold` does, non-finite elements left out and counted in the same pass."""
    scalars = (count, *keep, *gain, LIMIT)
    has = squares is not None
    if len(grads) == 1:
        g, s = grads[0], (squares or grads)[0]
        grid = (triton.cdiv(g.numel(), BLOCK),)
        if g.numel():
            _fold_one[grid](
                g, s, exp_avgs[0], exp_avg_sqs[0], g.numel(), *scalars, HAS_S=has, SIZE=BLOCK, num_warps=WARPS
            )
        return
    blocks, sizes, n = _blocks(tuple(g.numel() for g in grads), grads[0].device)
    tensors = _addresses(_pointers(grads, squares or grads, exp_avgs, exp_avg_sqs), grads[0].device)
    if n:
        g_type: Any = DTYPES[grads[0].dtype]
        _fold[(n,)](tensors, blocks, sizes, *scalars, G=g_type, HAS_S=has, SIZE=BLOCK, num_warps=WARPS)


def step(
    params: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    *,
    size: float,
    eps: float,
    keep: float,
) -> None:
    """Step as `adam.step` does."""
    blocks, sizes, n = _blocks(tuple(p.numel() for p in params), params[0].device)
    tensors = _addresses(_pointers(params, exp_avgs, exp_avg_sqs), params[0].device)
    if n:
        w_type: Any = DTYPES[params[0].dtype]
        _step[(n,)](tensors, blocks, sizes, size, eps, keep, W=w_type, SIZE=BLOCK, num_warps=WARPS)


def _pointers(*lists: list[Tensor]) -> tuple[int, ...]:
    return tuple(t.data_ptr() for row in zip(*lists, strict=True) for t in row)


@lru_cache(maxsize=64)
def _addresses(pointers: tuple[int, ...], device: torch.device) -> Tensor:
    return _upload(torch.tensor(pointers, dtype=torch.int64), device)


@lru_cache(maxsize=64)
def _blocks(numels: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor, int]:
    """For each block of `BLOCK` elements, the tensor it is of and its place there; and the sizes of the tensors."""
    counts = torch.tensor([triton.cdiv(n, BLOCK) for n in numels], dtype=torch.int64)
    tensor = torch.repeat_interleave(torch.arange(len(numels)), counts)
    place = torch.arange(len(tensor)) - torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    table = torch.stack([tensor, place], 1).to(torch.int32)
    return _upload(table, device), _upload(torch.tensor(numels, dtype=torch.int64), device), len(tensor)


def _upload(table: Tensor, device: torch.device) -> Tensor:
    # From pinned memory, so that the host does not wait; the copy keeps its source alive until it is done.
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table.to(device)

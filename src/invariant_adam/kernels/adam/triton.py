"""`fold`, `step` and `fold_step` in Triton: one pass over memory each, many tensors in one launch.

    fold        reads g, m, v and writes m, v:        20 bytes per parameter in float32
    step        reads w, m, v and writes w:           16 bytes
    fold_step   reads g, m, v, w and writes m, v, w:  28 bytes

Two small tables on the device tell a launch of its tensors: their addresses, and for each block its tensor and its
place there. Moments and weights stay where they are, so a table is made once and found again by the addresses. Triton
does not compile anew for other values of a float, so scalars are ordinary arguments.

`put_tile` folds for kernels that make a gradient tile by tile.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, reduce
from itertools import chain
from operator import attrgetter, or_
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import Launch, cdiv
from . import Fold
from .torch import Factors, Tensors, lie_alike, limit_of

BLOCK, WARPS = 4096, 8
BLOCK_BOTH, WARPS_BOTH = 512, 4  # of fold_step, which has more in flight
LIMIT = limit_of(torch.float32)  # as in `guard`
DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
# Finds room for the tables of a graph that is being captured: see `tables_on`.
room_for: Callable[[Tensor, torch.device], Tensor] | None = None


@triton.jit
def _fold_block(g, s, m, v, at, inside, keep1, keep2, gain1, gain2, limit, HAS_S: tl.constexpr):
    """m ← keep₁m + gain₁g and v ← keep₂v + gain₂g² of one block, not stored yet; and where g is bad, and left out.

    `inside` is None for a full block: without a mask the loads are 16 bytes wide whatever the tensor's size. Everything
    is read before anything is written, because a read cannot pass a write.
    """
    x = tl.load(g + at, mask=inside).to(tl.float32)
    first, second = tl.load(m + at, mask=inside), tl.load(v + at, mask=inside)
    good = tl.abs(x) < limit  # NaN is not below anything
    if HAS_S:
        square = tl.load(s + at, mask=inside)
        good = good & (tl.abs(square) < limit * limit)
        square = tl.where(good, square, 0.0)
        x = tl.where(good, x, 0.0)
    else:
        x = tl.where(good, x, 0.0)
        square = x * x
    bad = good == 0
    if inside is not None:
        bad = bad & inside
    return keep1 * first + gain1 * x, keep2 * second + gain2 * square, bad


@triton.jit
def _count(bad, count):
    """Count what was left out."""
    here = tl.sum(bad.to(tl.int32), 0)
    if here > 0:
        tl.atomic_add(count, here.to(tl.int64))


@triton.jit
def _moved(x, first, second, size, eps, decay, W: tl.constexpr):
    """decay·w − size·m/(√v + eps)."""
    return (decay * x.to(tl.float32) - size * (first / (tl.sqrt(second) + eps))).to(W)


@triton.jit
def _step_and_store(w, m, v, at, inside, size, eps, decay, W: tl.constexpr):
    first, second = tl.load(m + at, mask=inside), tl.load(v + at, mask=inside)
    tl.store(w + at, _moved(tl.load(w + at, mask=inside), first, second, size, eps, decay, W), mask=inside)


@triton.jit
def _fold_step_and_store(
    w, g, s, m, v, at, inside, count, keep1, keep2, gain1, gain2, limit, size, eps, decay,
    W: tl.constexpr, HAS_S: tl.constexpr,
):  # fmt: skip
    x = tl.load(w + at, mask=inside)
    first, second, bad = _fold_block(g, s, m, v, at, inside, keep1, keep2, gain1, gain2, limit, HAS_S)
    tl.store(m + at, first, mask=inside)
    tl.store(v + at, second, mask=inside)
    tl.store(w + at, _moved(x, first, second, size, eps, decay, W), mask=inside)
    _count(bad, count)


@triton.jit
def _fold_scalars(slots, keep1, keep2, gain1, gain2):
    if slots is not None:
        keep1, keep2, gain1, gain2 = tl.load(slots), tl.load(slots + 1), tl.load(slots + 2), tl.load(slots + 3)
    return keep1, keep2, gain1, gain2


@triton.jit
def put_tile(
    D, S, at, total, squares, inside, slots, count, keep1, keep2, gain1, gain2, limit, INTO: tl.constexpr
):  # fmt: skip
    """Store the sums of a tile, or fold them into the moments D and S; what is not finite is left out and counted."""
    if INTO:
        m, v = D + at, S + at
        keep1, keep2, gain1, gain2 = _fold_scalars(slots, keep1, keep2, gain1, gain2)
        good = (tl.abs(total) < limit) & (tl.abs(squares) < limit * limit)  # NaN is not below anything
        tl.store(m, keep1 * tl.load(m, mask=inside) + gain1 * tl.where(good, total, 0.0), mask=inside)
        tl.store(v, keep2 * tl.load(v, mask=inside) + gain2 * tl.where(good, squares, 0.0), mask=inside)
        bad = tl.sum(tl.sum((inside & (good == 0)).to(tl.int32), 1), 0)
        if bad > 0:
            tl.atomic_add(count, bad.to(tl.int64))
    else:
        tl.store(D + at, total, mask=inside)
        tl.store(S + at, squares, mask=inside)


# The arguments of `put_tile` from `slots` to `limit`, where it only stores.
NOTHING_TO_FOLD = {
    "slots": None, "count": None, "keep1": 0.0, "keep2": 0.0, "gain1": 0.0, "gain2": 0.0, "limit": LIMIT,
}  # fmt: skip


def put_arguments(into: Fold | None) -> tuple[Any, ...]:
    """The same, in order, for what is folded."""
    if into is None:
        return tuple(NOTHING_TO_FOLD.values())
    return into.slots, into.count, *into.keep, *into.gain, LIMIT


@triton.jit
def _fold_and_store(g, s, m, v, at, inside, count, keep1, keep2, gain1, gain2, limit, HAS_S: tl.constexpr):
    first, second, bad = _fold_block(g, s, m, v, at, inside, keep1, keep2, gain1, gain2, limit, HAS_S)
    tl.store(m + at, first, mask=inside)
    tl.store(v + at, second, mask=inside)
    _count(bad, count)


@triton.jit
def _fold_at(
    g, s, m, v, first, n, count, keep1, keep2, gain1, gain2, limit, HAS_S: tl.constexpr, SIZE: tl.constexpr
):  # fmt: skip
    """The block of a tensor of n elements that begins at `first`."""
    at = first + tl.arange(0, SIZE)
    if first + SIZE <= n:
        _fold_and_store(g, s, m, v, at, None, count, keep1, keep2, gain1, gain2, limit, HAS_S)
    else:
        _fold_and_store(g, s, m, v, at, at < n, count, keep1, keep2, gain1, gain2, limit, HAS_S)


@triton.jit
def _step_scalars(slots, size, eps, decay):
    if slots is not None:
        size, eps, decay = tl.load(slots + 4), tl.load(slots + 5), tl.load(slots + 6)
    return size, eps, decay


@triton.jit
def _place(tensors, blocks, sizes, N: tl.constexpr, SIZE: tl.constexpr):
    """The row of addresses of this block's tensor, where in it the block begins, and the tensor's size."""
    tensor = tl.load(blocks + 2 * tl.program_id(0))
    first = tl.load(blocks + 2 * tl.program_id(0) + 1).to(tl.int64) * SIZE
    return tensors + N * tensor, first, tl.load(sizes + tensor)


@triton.jit
def _pointer(row, i: tl.constexpr, T: tl.constexpr):
    return tl.multiple_of(tl.load(row + i).to(tl.pointer_type(T)), 16)


@triton.jit
def _fold(
    tensors, blocks, sizes, slots, count, keep1, keep2, gain1, gain2, limit,
    G: tl.constexpr, HAS_S: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """One block of one tensor; tensors is (n, 4): the addresses of g, g², m, v."""
    keep1, keep2, gain1, gain2 = _fold_scalars(slots, keep1, keep2, gain1, gain2)
    row, first, n = _place(tensors, blocks, sizes, 4, SIZE)
    g, s = _pointer(row, 0, G), _pointer(row, 1, tl.float32)
    m, v = _pointer(row, 2, tl.float32), _pointer(row, 3, tl.float32)
    _fold_at(g, s, m, v, first, n, count, keep1, keep2, gain1, gain2, limit, HAS_S, SIZE)


@triton.jit
def _fold_one(g, s, m, v, n, slots, count, keep1, keep2, gain1, gain2, limit, HAS_S: tl.constexpr, SIZE: tl.constexpr):
    """One block of the only tensor."""
    keep1, keep2, gain1, gain2 = _fold_scalars(slots, keep1, keep2, gain1, gain2)
    first = tl.program_id(0).to(tl.int64) * SIZE
    _fold_at(g, s, m, v, first, n, count, keep1, keep2, gain1, gain2, limit, HAS_S, SIZE)


@triton.jit
def _step(tensors, blocks, sizes, slots, size, eps, decay, W: tl.constexpr, SIZE: tl.constexpr):
    """One block of one tensor; tensors is (n, 3): the addresses of w, m, v."""
    size, eps, decay = _step_scalars(slots, size, eps, decay)
    row, first, n = _place(tensors, blocks, sizes, 3, SIZE)
    w, m, v = _pointer(row, 0, W), _pointer(row, 1, tl.float32), _pointer(row, 2, tl.float32)
    at = first + tl.arange(0, SIZE)
    if first + SIZE <= n:
        _step_and_store(w, m, v, at, None, size, eps, decay, W)
    else:
        _step_and_store(w, m, v, at, at < n, size, eps, decay, W)


@triton.jit
def _fold_step(
    tensors, blocks, sizes, slots, count, keep1, keep2, gain1, gain2, limit, size, eps, decay,
    W: tl.constexpr, G: tl.constexpr, HAS_S: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """One block of one tensor; tensors is (n, 5): the addresses of w, g, g², m, v."""
    keep1, keep2, gain1, gain2 = _fold_scalars(slots, keep1, keep2, gain1, gain2)
    size, eps, decay = _step_scalars(slots, size, eps, decay)
    row, first, n = _place(tensors, blocks, sizes, 5, SIZE)
    w, g, s = _pointer(row, 0, W), _pointer(row, 1, G), _pointer(row, 2, tl.float32)
    m, v = _pointer(row, 3, tl.float32), _pointer(row, 4, tl.float32)
    at = first + tl.arange(0, SIZE)
    if first + SIZE <= n:
        _fold_step_and_store(
            w, g, s, m, v, at, None, count, keep1, keep2, gain1, gain2, limit, size, eps, decay, W, HAS_S
        )
    else:
        _fold_step_and_store(
            w, g, s, m, v, at, at < n, count, keep1, keep2, gain1, gain2, limit, size, eps, decay, W, HAS_S
        )


def serves(tensors: Tensors, *moments: Tensors) -> bool:
    """Whether these kernels take the lists: dense aligned tensors of one layout each, moments in float32."""
    return (
        set(map(_dtype, tensors)) <= DTYPES.keys()
        and set(map(_dtype, chain(*moments))) <= {torch.float32}
        and lie_alike(tensors, *moments)
        and not reduce(or_, map(Tensor.data_ptr, chain(tensors, *moments)), 0) % 16
    )


_dtype = attrgetter("dtype")


def fold(
    grads: Tensors, squares: Tensors | None, exp_avgs: Tensors, exp_avg_sqs: Tensors, *,
    keep: Factors, gain: Factors, count: Tensor, slots: Tensor | None = None,
) -> None:  # fmt: skip
    """Fold as `torch.fold` does; elements that are not finite are left out and counted in the same pass."""
    scalars = (slots, count, *keep, *gain, LIMIT)
    has = squares is not None
    if len(grads) == 1:
        g, s = grads[0], (squares or grads)[0]
        if g.numel():
            _start_fold_one(g.numel(), has)(g, s, exp_avgs[0], exp_avg_sqs[0], *scalars)
        return
    tables, n = _tables(grads, squares or grads, exp_avgs, exp_avg_sqs)
    if n:
        _start_fold(n, grads[0].dtype, has)(*tables, *scalars)


def step(
    params: Tensors, exp_avgs: Tensors, exp_avg_sqs: Tensors, *,
    size: float, eps: float, decay: float, slots: Tensor | None = None,
) -> None:  # fmt: skip
    """Step as `torch.step` does."""
    tables, n = _tables(params, exp_avgs, exp_avg_sqs)
    if n:
        _start_step(n, params[0].dtype)(*tables, slots, size, eps, decay)


def fold_step(
    params: Tensors, grads: Tensors, squares: Tensors | None, exp_avgs: Tensors, exp_avg_sqs: Tensors, *,
    keep: Factors, gain: Factors, size: float, eps: float, decay: float, count: Tensor, slots: Tensor | None = None,
) -> None:  # fmt: skip
    """Fold and step as `torch.fold_step` does, in one launch."""
    tables, n = _tables(params, grads, squares or grads, exp_avgs, exp_avg_sqs, block=BLOCK_BOTH)
    if n:
        start = _start_fold_step(n, params[0].dtype, grads[0].dtype, squares is not None)
        start(*tables, slots, count, *keep, *gain, LIMIT, size, eps, decay)


# The launches: over one tensor of so many elements, or over so many blocks.
@lru_cache(maxsize=4096)
def _start_fold_one(numel: int, has: bool) -> Launch:
    return Launch(_fold_one, (cdiv(numel, BLOCK),), n=numel, HAS_S=has, SIZE=BLOCK, num_warps=WARPS)


@lru_cache(maxsize=256)
def _start_fold(n: int, g: torch.dtype, has: bool) -> Launch:
    return Launch(_fold, (n,), G=DTYPES[g], HAS_S=has, SIZE=BLOCK, num_warps=WARPS)


@lru_cache(maxsize=256)
def _start_step(n: int, w: torch.dtype) -> Launch:
    return Launch(_step, (n,), W=DTYPES[w], SIZE=BLOCK, num_warps=WARPS)


@lru_cache(maxsize=256)
def _start_fold_step(n: int, w: torch.dtype, g: torch.dtype, has: bool) -> Launch:
    fixed = {"W": DTYPES[w], "G": DTYPES[g], "HAS_S": has, "SIZE": BLOCK_BOTH, "num_warps": WARPS_BOTH}
    return Launch(_fold_step, (n,), **fixed)


def _tables(*lists: Tensors, block: int = BLOCK) -> tuple[tuple[Tensor, Tensor, Tensor], int]:
    """Addresses, blocks and sizes of a launch over `lists`, and how many blocks it has."""
    device = lists[0][0].device
    pointers = tuple(map(Tensor.data_ptr, chain.from_iterable(zip(*lists, strict=True))))
    numels = tuple(map(Tensor.numel, lists[0]))
    if room_for is not None:  # a graph must own what it reads
        tables = (torch.tensor(pointers, dtype=torch.int64), *_cut(numels, block))
        address, blocks, sizes = (room_for(t, device) for t in tables)
    else:
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        address, (blocks, sizes) = _addresses(pointers, device, stream), _blocks(numels, block, device, stream)
    return (address, blocks, sizes), blocks.shape[0]


# Tables are kept by stream: the memory of a dropped one goes back to the stream that it was made on, and another stream
# may have yet to read it.
@lru_cache(maxsize=256)
def _addresses(pointers: tuple[int, ...], device: torch.device, stream: int) -> Tensor:
    # Gradients are elsewhere in each update, so the host must not wait; the copy keeps the pinned memory alive.
    table = torch.tensor(pointers, dtype=torch.int64)
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table.to(device)


@lru_cache(maxsize=256)
def _blocks(numels: tuple[int, ...], block: int, device: torch.device, stream: int) -> tuple[Tensor, Tensor]:
    blocks, sizes = _cut(numels, block)
    return blocks.to(device), sizes.to(device)


def _cut(numels: tuple[int, ...], block: int) -> tuple[Tensor, Tensor]:
    """The tensor of each block and the block's place there, and the sizes of the tensors."""
    counts = torch.tensor([cdiv(n, block) for n in numels], dtype=torch.int64)
    tensor = torch.repeat_interleave(torch.arange(len(numels)), counts)
    place = torch.arange(len(tensor)) - torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    return torch.stack([tensor, place], 1).to(torch.int32), torch.tensor(numels, dtype=torch.int64)

# ruff: noqa: RUF005, B007 - tuples of a kernel grow by +, and each name is of one type
# mypy: disable-error-code="assignment,var-annotated"
"""The pair of a depthwise convolution in Triton: sums of products, as each output channel sees one input channel.

For a tap (y, x) of output channel o, a group's part of dW is Σ_r G[r, o] X[at(r) + tap, o // MULT] over its output
positions r. Blocks leave the sums of a part of a group's rows in a workspace, (κ, pieces, KH, KW, O). A second kernel
adds the pieces, squares the groups' sums, and stores both or folds them into moments: the same result every time.

There are two kernels for the first half. `_window_sums` walks along rows of the image: a thread keeps KW inputs and KW
sums of a few channels in registers, and each step loads one output gradient and as many inputs as the stride is wide
for KW products. `_tap_sums` takes every stride, dilation and size; it loads an input for each product.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import chip
from ..adam.triton import put_arguments, put_tile
from ..launch import Launch, cdiv, next_power_of_2
from .triton import below, sizes

if TYPE_CHECKING:
    from .torch import Geometry
    from .triton import Task


@triton.jit
def _window_sums(
    G, X, partial, IMAGES, ROWS, CHUNK,
    OUT: tl.constexpr, XW: tl.constexpr, MULT: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    H: tl.constexpr, W: tl.constexpr, HO: tl.constexpr, WO: tl.constexpr,
    SY: tl.constexpr, SX: tl.constexpr, PY: tl.constexpr, PX: tl.constexpr, DY: tl.constexpr, DX: tl.constexpr,
    LANES: tl.constexpr, BC: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """The sums of a chunk of a group's ROWS rows of output positions, for all taps.

    A lane has one row of taps and, with LANES // KH - 1 others, a share of the chunk's rows. Lanes of neighbouring rows
    and taps read the same inputs: they come from the cache.
    """
    chunks = tl.cdiv(ROWS, CHUNK)
    k, chunk = tl.program_id(1) // chunks, tl.program_id(1) % chunks
    o, lane = tl.program_id(0) * BC + tl.arange(0, BC), tl.arange(0, LANES)
    slots: tl.constexpr = LANES // KH
    slot, tap = lane // KH, lane % KH
    first = chunk * CHUNK
    end = tl.minimum(first + CHUNK, ROWS)
    exists = (slot < slots)[:, None] & (o < OUT)[None, :]
    total = ()
    for t in tl.static_range(KW):
        total = total + (tl.zeros((LANES, BC), tl.float32),)
    for begin in tl.range(first, end, slots):
        row = begin + slot
        y = row % HO * SY + tap * DY - PY
        seen = exists & ((row < end) & below(y, H))[:, None]
        across, wide = tl.where(seen, W, 0), tl.where(seen, WO, 0)  # of rows of X and of G
        line = (k * IMAGES + row // HO) * H + y
        here = G + ((k * ROWS + row) * WO).to(tl.int64)[:, None] * OUT + o[None, :]
        there = X + (line * W - PX).to(tl.int64)[:, None] * XW + (o // MULT)[None, :]
        window = ()
        for t in tl.static_range(KW - SX):
            if t >= PX and t < PX + W:
                window = window + (tl.load(there + t * XW, mask=seen, other=0.0).to(tl.float32),)
            else:
                window = window + (tl.zeros((LANES, BC), tl.float32),)
        there += (KW - SX) * XW
        for x in tl.range(0, WO, STEP):
            gradients = ()
            for i in tl.static_range(STEP):
                gradients = gradients + (tl.load(here + i * OUT, mask=x + i < wide, other=0.0),)
                for j in tl.static_range(i * SX, (i + 1) * SX):
                    inside = x * SX + (j + KW - SX - PX) < across
                    window = window + (tl.load(there + j * XW, mask=inside, other=0.0).to(tl.float32),)
            for i in tl.static_range(STEP):
                g = gradients[i].to(tl.float32)
                added = ()
                for t in tl.static_range(KW):
                    v = tl.fma(g, window[i * SX + t], total[t])
                    if WO % STEP > 0 and i >= WO % STEP:  # past the end of a row no product counts, 0 · ∞ neither
                        v = tl.where(x + i < wide, v, total[t])
                    added = added + (v,)
                total = added
            window = window[STEP * SX :]
            here += STEP * OUT
            there += STEP * SX * XW
    piece = tl.program_id(1) * slots + slot
    at = ((piece * KH + tap) * KW).to(tl.int64)[:, None] * OUT + o[None, :]
    for t in tl.static_range(KW):
        tl.store(partial + at + t * OUT, total[t], mask=exists)


@triton.jit
def _tap_sums(
    G, X, partial, OUT, R, IMAGES, CHUNK, XW,
    MULT: tl.constexpr, KW: tl.constexpr,
    H: tl.constexpr, W: tl.constexpr, HO: tl.constexpr, WO: tl.constexpr,
    SY: tl.constexpr, SX: tl.constexpr, PY: tl.constexpr, PX: tl.constexpr, DY: tl.constexpr, DX: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """The sums of a chunk of a group's R output positions, for a row of taps: G is read once for it.

    Tiles are (taps, positions, channels); the inputs of neighbouring taps are mostly the same, and in the cache.
    """
    chunks = tl.cdiv(R, CHUNK)
    k, chunk = tl.program_id(2) // chunks, tl.program_id(2) % chunks
    o, taps = tl.program_id(0) * BC + tl.arange(0, BC), tl.arange(0, BT)
    dy, dx = tl.program_id(1) * DY - PY, taps * DX - PX
    total = tl.zeros((BT, BK, BC), tl.float32)
    first = chunk * CHUNK
    end = tl.minimum(first + CHUNK, R)
    for r in tl.range(first, end, BK):
        rows = r + tl.arange(0, BK)
        place = rows % (HO * WO)
        y, x = place // WO * SY + dy, (place % WO * SX)[None, :] + dx[:, None]
        pixel = (((k * IMAGES + rows // (HO * WO)) * H + y) * W)[None, :] + x
        seen = (rows < end) & below(y, H)
        inside = seen[None, :] & below(x, W) & (taps < KW)[:, None]
        here = G + (k * R + rows).to(tl.int64)[:, None] * OUT + o[None, :]
        g = tl.load(here, mask=seen[:, None] & (o < OUT)[None, :], other=0.0)
        there = X + pixel.to(tl.int64)[:, :, None] * XW + (o // MULT)[None, None, :]
        v = tl.load(there, mask=inside[:, :, None] & (o < OUT)[None, None, :], other=0.0)
        total += g.to(tl.float32)[None, :, :] * v.to(tl.float32)
    row = (k * chunks + chunk) * tl.num_programs(1) + tl.program_id(1)
    at = (row * KW + taps).to(tl.int64)[:, None] * OUT + o[None, :]
    tl.store(partial + at, tl.sum(total, 1), mask=(taps < KW)[:, None] & (o < OUT)[None, :])


@triton.jit
def _finish_taps(
    partial, C, D, S, slots, count, keep1, keep2, gain1, gain2, limit, OUT, KAPPA, PIECES, s0, s2, s3,
    KH: tl.constexpr, KW: tl.constexpr, K: tl.constexpr, P: tl.constexpr, E: tl.constexpr, INTO: tl.constexpr,
):  # fmt: skip
    """Add up the pieces of E numbers, always in the same order, and square the sums of groups; C (κ,) weighs these."""
    e = tl.program_id(0) * E + tl.arange(0, E)
    inside = e < KH * KW * OUT
    total, squares = tl.zeros((E,), tl.float32), tl.zeros((E,), tl.float32)
    for first in range(0, KAPPA, K):
        k = first + tl.arange(0, K)
        share = tl.zeros((K, E), tl.float32)
        for begin in range(0, PIECES, P):
            piece = begin + tl.arange(0, P)
            here = (k[:, None] * PIECES + piece[None, :]).to(tl.int64)[:, :, None] * (KH * KW * OUT) + e[None, None, :]
            mask = ((k < KAPPA)[:, None] & (piece < PIECES)[None, :])[:, :, None] & inside[None, None, :]
            share += tl.sum(tl.load(partial + here, mask=mask, other=0.0), 1)
        total += tl.sum(share, 0)
        if C is not None:
            squares += tl.sum(tl.load(C + k, mask=k < KAPPA, other=0.0)[:, None] * share * share, 0)
        else:
            squares += tl.sum(share * share, 0)
    tap = e // OUT
    at = e % OUT * s0 + tap // KW * s2 + tap % KW * s3
    put_tile(
        D, S, at[None, :], total[None, :], squares[None, :], inside[None, :],
        slots, count, keep1, keep2, gain1, gain2, limit, INTO,
    )  # fmt: skip


def slides(geo: Geometry) -> bool:
    """Whether `_window_sums` takes it: registers hold a row of neighbouring taps.

    Taps left of the image are in a row's first window only.

    >>> from .torch import Geometry
    >>> taps = (2, 2), (3, 3), (1, 1), False, (0, 0), 64
    >>> slides(Geometry((64, 1, 7, 7), *taps)), slides(Geometry((64, 1, 31, 31), *taps))
    (True, False)
    """
    (kh, kw), stride = geo.weight[2:], geo.stride[1]
    return kh <= 16 and stride <= kw <= 9 and geo.dilation[1] == 1 and geo.padding[1] <= kw - stride


def depthwise(task: Task, D: Tensor, S: Tensor) -> None:
    """Make the pair where each output channel sees one input channel: D and S have the weight's shape."""
    G, X, _, _, c, _, launches, into = task
    key = (D.stride(), into is not None)
    p = launches.get(key)
    if p is None:
        p = launches[key] = _depthwise(task, D)
    partial = torch.empty(p.partial, device=G.device)
    p.start(G, X, partial)
    p.finish(partial, c, D, S, *put_arguments(into))


class DepthwiseLaunches(NamedTuple):
    """The two kernels as they start for a task."""

    start: Launch
    finish: Launch
    partial: tuple[int, ...]  # the shape of what passes between them


def _depthwise(task: Task, D: Tensor) -> DepthwiseLaunches:
    geo, kappa = task.geo, task.kappa
    out, _, kh, kw = geo.weight
    start, pieces = (_windows if task.config.way == "window" else _tiles)(task)
    s0, _, s2, s3 = D.stride()
    at_once = min(128, next_power_of_2(pieces))
    finish = Launch(
        _finish_taps, (cdiv(kh * kw * out, 32),), OUT=out, KAPPA=kappa, PIECES=pieces, s0=s0, s2=s2, s3=s3,
        KH=kh, KW=kw, K=128 // at_once, P=at_once, E=32, INTO=task.into is not None, num_warps=4,
    )  # fmt: skip
    return DepthwiseLaunches(start, finish, (kappa, pieces, kh, kw, out))


def _windows(task: Task) -> tuple[Launch, int]:
    """The launch of `_window_sums`, and into how many pieces it cuts a group."""
    G, X, geo, kappa = task[:4]
    out, _, kh, kw = geo.weight
    images, high, wide = len(G) // kappa, *G.shape[2:]
    bc = min(32, max(16, next_power_of_2(out)))
    lanes = 512 // bc  # four channels for each thread
    slots, across = lanes // kh, cdiv(out, bc)
    # Enough blocks for the chip, of at least four rows for each lane.
    wanted = cdiv(4 * chip.of(G.device).multiprocessors, across * kappa)
    chunk = cdiv(images * high, max(1, min(wanted, images * high // (4 * slots))))
    chunks = cdiv(images * high, chunk)
    step = min((8, 7, 6, 5, 4, 3, 2, 1), key=lambda n: cdiv(wide, n) * (n + 1))  # positions at a time: few are wasted
    start = Launch(
        _window_sums, (across, kappa * chunks), IMAGES=images, ROWS=images * high, CHUNK=chunk, OUT=out,
        **sizes(G.shape, X.shape, geo), MULT=out // geo.groups, KH=kh, KW=kw, LANES=lanes, BC=bc, STEP=step,
        num_warps=4,
    )  # fmt: skip
    return start, chunks * slots


def _tiles(task: Task) -> tuple[Launch, int]:
    """The launch of `_tap_sums`, and into how many pieces it cuts a group."""
    G, X, geo, kappa = task[:4]
    out, _, kh, kw = geo.weight
    images = len(G) // kappa
    rows = images * G.shape[2] * G.shape[3]
    bc, taps = min(64, max(16, next_power_of_2(out))), next_power_of_2(kw)
    bk = max(1, 8192 // (taps * bc))  # 64 numbers of a tile for each thread
    across = cdiv(out, bc)
    # Enough blocks for the chip, of at least 512 rows each.
    wanted = cdiv(8 * chip.of(G.device).multiprocessors, across * kh * kappa)
    chunk = cdiv(rows, max(1, min(wanted, rows // 512)))
    chunks = cdiv(rows, chunk)
    start = Launch(
        _tap_sums, (across, kh, kappa * chunks), OUT=out, R=rows, IMAGES=images, CHUNK=chunk,
        **sizes(G.shape, X.shape, geo), MULT=out // geo.groups, KW=kw, BT=taps, BK=bk, BC=bc, num_warps=4,
    )  # fmt: skip
    return start, chunks

"""The pair of a depthwise convolution in Triton: sums of products, as each output channel sees one input channel.

For a tap (y, x) of output channel o, a group's part of dW is Σ_r G[r, o] X[at(r) + tap, o // MULT] over its output
positions r. Blocks leave the sums of a part of a group's rows in a workspace, (κ, pieces, KH, KW, O). A second kernel
adds the pieces, squares the groups' sums, and stores both or folds them into moments: the same result every time.
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
    from .triton import Task


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
    start, pieces = _tiles(task)
    s0, _, s2, s3 = D.stride()
    at_once = min(128, next_power_of_2(pieces))
    finish = Launch(
        _finish_taps, (cdiv(kh * kw * out, 32),), OUT=out, KAPPA=kappa, PIECES=pieces, s0=s0, s2=s2, s3=s3,
        KH=kh, KW=kw, K=128 // at_once, P=at_once, E=32, INTO=task.into is not None, num_warps=4,
    )  # fmt: skip
    return DepthwiseLaunches(start, finish, (kappa, pieces, kh, kw, out))


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

"""`row_sums` and `norm_sums` in Triton: blocks sum chunks of a group's rows, and the chunks are added in order.

The block that comes last of those with the same channels adds them, which saves a launch; where blocks cannot tell
(see `chip`), a second kernel does.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import chip
from ..batch_norm.triton import leave_sums, row_launches, spot
from ..launch import Launch, cdiv, counters, next_power_of_2
from ..ops import FLOATS


@triton.jit
def _sum_rows(
    G, X, mean, rstd, partial, arrived, coefficients, sums, pairs, C, R, TILES, CHUNK, KAPPA, CHUNKS,
    BR: tl.constexpr, BC: tl.constexpr, CH: tl.constexpr, KB: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """Σ g x̂, where there is an X, and Σ g of a chunk; mean and rstd are per row."""
    column = tl.program_id(0) % tl.cdiv(C, BC)
    k, c, first, end, piece = spot(tl.program_id(0), C, TILES, CHUNK, BC)
    total, products = tl.zeros((BR, BC), tl.float32), tl.zeros((BR, BC), tl.float32)
    for i in tl.range(first, end):
        rows = i * BR + tl.arange(0, BR)
        inside = (rows < R)[:, None] & (c < C)[None, :]
        row = k.to(tl.int64) * R + rows
        at = row[:, None] * C + c[None, :]
        g = tl.load(G + at, mask=inside, other=0.0).to(tl.float32)
        total += g
        if X is not None:
            mu = tl.load(mean + row, mask=rows < R, other=0.0).to(tl.float32)
            scale = tl.load(rstd + row, mask=rows < R, other=0.0).to(tl.float32)
            x = tl.load(X + at, mask=inside, other=0.0).to(tl.float32)
            products += g * ((x - mu[:, None]) * scale[:, None])
    leave_sums(partial, piece, c, C, products, total)
    if LAST:
        tl.debug_barrier()  # every thread has written its part before one says so
        if tl.atomic_add(arrived + column, 1, sem="acq_rel") == KAPPA * CHUNKS - 1:
            tl.store(arrived + column, 0)  # for the next kernel
            _add_chunks(X, partial, coefficients, sums, pairs, column, C, KAPPA, CHUNKS, CH, KB, BC)


@triton.jit
def _finish(
    partial, X, coefficients, sums, pairs, C, KAPPA, CHUNKS, CH: tl.constexpr, KB: tl.constexpr, BC: tl.constexpr
):  # fmt: skip
    _add_chunks(X, partial, coefficients, sums, pairs, tl.program_id(0), C, KAPPA, CHUNKS, CH, KB, BC)


@triton.jit
def _add_chunks(
    X, partial, coefficients, sums, pairs, column, C, KAPPA, CHUNKS,
    CH: tl.constexpr, KB: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """The sums of all groups in some channels, where they are asked for, and the pairs: of e, if there is an X, and a.

    `partial` is read past the nearest cache: other blocks wrote it.
    """
    c = column * BC + tl.arange(0, BC)
    de, se = tl.zeros((BC,), tl.float32), tl.zeros((BC,), tl.float32)
    da, sa = tl.zeros((BC,), tl.float32), tl.zeros((BC,), tl.float32)
    chunk = tl.arange(0, CH)[:, None, None]
    for first in range(0, KAPPA, KB):
        k = first + tl.arange(0, KB)
        mask = (k < KAPPA)[:, None] & (c < C)[None, :]
        there = partial + (k[None, :, None] * CHUNKS + chunk).to(tl.int64) * (2 * C) + c[None, None, :]
        inside = (chunk < CHUNKS) & mask[None, :, :]
        a = tl.sum(tl.load(there + C, mask=inside, other=0.0, cache_modifier=".cg"), 0)
        scale = 1.0
        if coefficients is not None:
            scale = tl.load(coefficients + k, mask=k < KAPPA, other=0.0).to(tl.float32)[:, None]
        da += tl.sum(a, 0)
        sa += tl.sum(scale * a * a, 0)
        at = k[:, None] * (2 * C) + c[None, :]
        if sums is not None:
            tl.store(sums + at + C, a, mask=mask)
        if X is not None:
            e = tl.sum(tl.load(there, mask=inside, other=0.0, cache_modifier=".cg"), 0)
            de += tl.sum(e, 0)
            se += tl.sum(scale * e * e, 0)
            if sums is not None:
                tl.store(sums + at, e, mask=mask)
    if X is not None:
        tl.store(pairs + c, de, mask=c < C)
        tl.store(pairs + C + c, se, mask=c < C)
        pairs += 2 * C
    tl.store(pairs + c, da, mask=c < C)
    tl.store(pairs + C + c, sa, mask=c < C)


class SumLaunch:
    """The kernels as they start for rows (κ, R, C)."""

    def __init__(self, shape: torch.Size, device: torch.device) -> None:
        kappa, _, channels = shape
        p = row_launches(channels, shape.numel(), kappa, device)
        self.columns = p.blocks // (p.chunks * kappa)
        self.room = (kappa, p.chunks, 2, channels)
        chunks = next_power_of_2(p.chunks)
        last = {"KAPPA": kappa, "CHUNKS": p.chunks, "CH": chunks}
        self.fused = chip.of(device).publishes
        together = max(1, 4096 // (chunks * p.tile["BC"]))  # groups
        self.sum_rows = Launch(_sum_rows, (p.blocks,), **p.tile, **last, R=p.rows, KB=together, LAST=self.fused)
        self.finish = Launch(_finish, (cdiv(channels, 16),), C=channels, **last, KB=8, BC=16, num_warps=4)


# Shape and device -> the launches, which a layer needs in every update.
_known: dict[tuple[Any, ...], SumLaunch] = {}


def serves(G: Tensor) -> bool:
    """Whether the kernels take these rows: in memory one after another, at most 32 bits a number."""
    return G.dtype in FLOATS and G.numel() > 0 and G.is_contiguous()


def norm_sums(
    G: Tensor, X: Tensor | None, mean: Tensor | None, rstd: Tensor | None, c: Tensor | None = None,
    shares: bool = True,
) -> tuple[Tensor | None, Tensor]:  # fmt: skip
    """e and a (κ, 2, C), if asked for, and their pairs (4, C), in float32; without X the pair of a (2, C) alone."""
    shape = G.shape
    p = _known.get((shape, G.get_device()))
    if p is None:
        p = _known[shape, G.get_device()] = SumLaunch(shape, G.device)
    partial = torch.empty(p.room, dtype=torch.float32, device=G.device)
    pairs = torch.empty((2 if X is None else 4, shape[2]), dtype=torch.float32, device=G.device)
    each = torch.empty((shape[0], 2, shape[2]), dtype=torch.float32, device=G.device) if shares else None
    if X is not None:
        mean, rstd = mean.contiguous(), rstd.contiguous()  # type: ignore[union-attr]
    p.sum_rows(G, X, mean, rstd, partial, counters(G, p.columns), c, each, pairs)
    if not p.fused:
        p.finish(partial, X, c, each, pairs)
    return each, pairs


def row_sums(G: Tensor, c: Tensor | None = None, shares: bool = True) -> tuple[Tensor | None, Tensor]:
    """a (κ, C), if asked for, and its pair (2, C), in float32."""
    each, pairs = norm_sums(G, None, None, None, c, shares)
    return None if each is None else each[:, 1], pairs

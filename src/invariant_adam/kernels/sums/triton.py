"""`row_sums` and `norm_sums` in Triton: blocks sum chunks of a group's rows, and the chunks are added in order."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..batch_norm.triton import RowLaunches, leave_sums, row_launches, spot
from ..launch import Launch
from ..ops import FLOATS


@triton.jit
def _sum_rows(G, X, mean, rstd, partial, C, R, TILES, CHUNK, BR: tl.constexpr, BC: tl.constexpr):
    """Σ g x̂, where there is an X, and Σ g of a chunk; mean and rstd are per row."""
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


def serves(G: Tensor) -> bool:
    """Whether the kernels take these rows: in memory one after another, at most 32 bits a number."""
    return G.dtype in FLOATS and G.numel() > 0 and G.is_contiguous()


def norm_sums(
    G: Tensor, X: Tensor | None, mean: Tensor | None, rstd: Tensor | None, c: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """e and a (κ, 2, C) and their pairs (4, C), in float32."""
    kappa = G.shape[0]
    p, sum_rows = _launches(G.shape[2], G.numel(), kappa, G.device)
    partial, each, pairs = p.empty(kappa, p.chunks, 2), p.empty(kappa, 2), p.empty(4)
    mean, rstd = (None if t is None else t.contiguous() for t in (mean, rstd))
    sum_rows(G, X, mean, rstd, partial)
    p.finish_gradients(partial, c, each, pairs)
    return each, pairs


@lru_cache(maxsize=1024)
def _launches(channels: int, numel: int, kappa: int, device: torch.device) -> tuple[RowLaunches, Launch]:
    p = row_launches(channels, numel, kappa, device)
    return p, Launch(_sum_rows, (p.blocks,), **p.tile, R=p.rows)


def row_sums(G: Tensor, c: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """a (κ, C) and its pair (2, C), in float32."""
    each, pairs = norm_sums(G, None, None, None, c)
    return each[:, 1], pairs[2:]

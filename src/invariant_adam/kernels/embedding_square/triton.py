"""`embedding_square` in Triton: tokens sorted, then sums and squares over segments.

The κ × R places come group by group, so a stable sort by token also puts each token's groups in order: a *run* of
places has the same token, a *segment* of it the same group. Both may have any length. Blocks walk chunks of CHUNK
sorted places at the same time:

    walk     sums each segment, adds it and its square to its run, and stores the runs that lie in the chunk
    join     adds up the segments that cross chunks: what they left in the chunk where they began and in those after
    finish   adds up the runs that cross chunks

Every sum has one place and a fixed order: no atomics, the same result every time. G is the only tensor of places × D,
and what a chunk leaves behind is read only where it was written.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import Launch, cdiv, next_power_of_2
from ..ops import FLOATS, operator, pair_of

CHUNK = 32  # sorted places that a block walks
COLUMNS = 256  # at most, of a block that walks: 16 bytes a thread in bfloat16
AHEAD = 64  # chunks added at a time where a segment or run goes on


@triton.jit
def _place(tokens, order, i, N, R):
    """The token and group of sorted place i; token −1 outside."""
    inside = (i >= 0) & (i < N)
    return tl.load(tokens + i, mask=inside, other=-1), tl.load(order + i, mask=inside, other=0).to(tl.int32) // R


@triton.jit
def _row(G, order, i, w, W):
    """G at sorted place i."""
    return tl.load(G + tl.load(order + i).to(tl.int64) * W + w, mask=w < W, other=0.0).to(tl.float32)


@triton.jit
def _weight(C, group):
    weight = 1.0
    if C is not None:
        weight = tl.load(C + group)
    return weight


@triton.jit
def _walk(G, C, tokens, order, D, S, lead, trail, runs, N, R, W, CHUNK: tl.constexpr, BW: tl.constexpr):
    """Sum one chunk of some columns. What began in an earlier chunk, or goes on in the next, is left behind.

    lead (chunks, W): the sum of a segment that began earlier; trail (chunks, W): of one that begins here and goes on.
    runs (chunks, 2, 2, W): total and squares of the segments of a run that began earlier, then of one that begins here
    and goes on; lead and trail are not in them.
    """
    chunk = tl.program_id(0)
    first = chunk * CHUNK
    end = tl.minimum(first + CHUNK, N)
    w = tl.program_id(1) * BW + tl.arange(0, BW)
    inside = w < W
    base = chunk.to(tl.int64) * W
    token, group = _place(tokens, order, first, N, R)
    earlier, other = _place(tokens, order, first - 1, N, R)
    # Where the run and the segment began; first − 1 stands for any place before.
    run = first - (earlier == token).to(tl.int32)
    segment = first - ((earlier == token) & (other == group)).to(tl.int32)
    part, total, squares = tl.zeros((BW,), tl.float32), tl.zeros((BW,), tl.float32), tl.zeros((BW,), tl.float32)
    row = _row(G, order, first, w, W)
    for step in range(end - first):
        i = first + step
        after, other = _place(tokens, order, i + 1, N, R)
        next_row = _row(G, order, tl.minimum(i + 1, end - 1), w, W)  # on its way while this one is added
        part += row
        if (after != token) | (other != group):
            if segment < first:
                tl.store(lead + base + w, part, mask=inside)
            else:
                total += part
                squares += _weight(C, group) * part * part
            part = tl.zeros((BW,), tl.float32)
            segment = i + 1
        if after != token:
            if run < first:
                tl.store(runs + 4 * base + w, total, mask=inside)
                tl.store(runs + 4 * base + W + w, squares, mask=inside)
            else:
                at = token.to(tl.int64) * W + w
                tl.store(D + at, total, mask=inside)
                tl.store(S + at, squares, mask=inside)
            total, squares = tl.zeros((BW,), tl.float32), tl.zeros((BW,), tl.float32)
            run = i + 1
        token, group, row = after, other, next_row
    if run < end:  # it goes on
        slot = 4 * base + 2 * W * (run >= first).to(tl.int32) + w
        tl.store(runs + slot, total, mask=inside)
        tl.store(runs + slot + W, squares, mask=inside)
    if segment < end:
        if segment < first:
            tl.store(lead + base + w, part, mask=inside)
        else:
            tl.store(trail + base + w, part, mask=inside)


@triton.jit
def _join(
    tokens, order, C, lead, trail, runs, N, R, W, CHUNK: tl.constexpr, BW: tl.constexpr, AHEAD: tl.constexpr
):  # fmt: skip
    """Complete the segment that begins in this chunk (not the last) and goes on; add it to its run here."""
    chunk = tl.program_id(0)
    token, group = _place(tokens, order, chunk * CHUNK + CHUNK - 1, N, R)
    after, next_group = _place(tokens, order, chunk * CHUNK + CHUNK, N, R)
    earlier, earlier_group = _place(tokens, order, chunk * CHUNK - 1, N, R)
    goes_on = (after == token) & (next_group == group)
    if goes_on & ((earlier != token) | (earlier_group != group)):
        w = tl.program_id(1) * BW + tl.arange(0, BW)
        inside = w < W
        part = tl.load(trail + chunk.to(tl.int64) * W + w, mask=inside)
        ahead, more = chunk + 1, 1
        while more > 0:
            chunks = ahead + tl.arange(0, AHEAD)
            of, at = _place(tokens, order, chunks * CHUNK, N, R)
            same = (of == token) & (at == group)
            row = chunks.to(tl.int64)[:, None] * W
            part += tl.sum(tl.load(lead + row + w[None, :], mask=same[:, None] & inside[None, :], other=0.0), 0)
            more = tl.min(same.to(tl.int32), 0)
            ahead += AHEAD
        slot = runs + (4 * chunk.to(tl.int64) + 2 * (earlier != token).to(tl.int32)) * W + w
        tl.store(slot, tl.load(slot, mask=inside) + part, mask=inside)
        squares = tl.load(slot + W, mask=inside) + _weight(C, group) * part * part
        tl.store(slot + W, squares, mask=inside)


@triton.jit
def _finish(tokens, D, S, runs, N, W, CHUNK: tl.constexpr, BW: tl.constexpr, AHEAD: tl.constexpr):
    """Complete the run that begins in this chunk (not the last) and goes on."""
    chunk = tl.program_id(0)
    first, end = chunk * CHUNK, chunk * CHUNK + CHUNK
    token, after = tl.load(tokens + end - 1), tl.load(tokens + end)
    earlier = tl.load(tokens + first - 1, mask=first > 0, other=-1)
    if (after == token) & (earlier != token):
        w = tl.program_id(1) * BW + tl.arange(0, BW)
        inside = w < W
        slot = runs + (4 * chunk.to(tl.int64) + 2) * W + w
        total = tl.load(slot, mask=inside)
        squares = tl.load(slot + W, mask=inside)
        ahead, more = chunk + 1, 1
        while more > 0:
            chunks = ahead + tl.arange(0, AHEAD)
            same = tl.load(tokens + chunks * CHUNK, mask=chunks * CHUNK < N, other=-1) == token
            at = runs + 4 * chunks.to(tl.int64)[:, None] * W + w[None, :]
            mask = same[:, None] & inside[None, :]
            total += tl.sum(tl.load(at, mask=mask, other=0.0), 0)
            squares += tl.sum(tl.load(at + W, mask=mask, other=0.0), 0)
            more = tl.min(same.to(tl.int32), 0)
            ahead += AHEAD
        out = token.to(tl.int64) * W + w
        tl.store(D + out, total, mask=inside)
        tl.store(S + out, squares, mask=inside)


def serves(ids: Tensor, G: Tensor, rows: int) -> bool:
    """Whether the kernels take these operands: at least one place, at most 32 bits a number, indices of 31 bits."""
    return G.dtype in FLOATS and G.numel() > 0 and ids.numel() < 1 << 30 and rows < 1 << 31


def embedding_square(ids: Tensor, G: Tensor, rows: int, c: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """dW (V, D) and S (V, D) in float32, for ids (κ, R), G (κ, R, D), V = `rows`; c (κ,) weighs the squares."""
    places, width = ids.numel(), G.shape[-1]
    G = G.contiguous()
    c = None if c is None else c.to(torch.float32)
    tokens, order = torch.sort(ids.reshape(-1).to(torch.int32), stable=True)
    D, S = (torch.zeros(rows, width, dtype=torch.float32, device=G.device) for _ in range(2))
    chunks = cdiv(places, CHUNK)
    lead, trail = (torch.empty(chunks, width, dtype=torch.float32, device=G.device) for _ in range(2))
    runs = torch.empty(chunks, 2, 2, width, dtype=torch.float32, device=G.device)
    walk, join, finish = _launches(places, ids.shape[1], width)
    walk(G, c, tokens, order, D, S, lead, trail, runs)
    if chunks > 1:
        join(tokens, order, c, lead, trail, runs)
        finish(tokens, D, S, runs)
    return D, S


@lru_cache(maxsize=256)
def _launches(places: int, rows: int, width: int) -> tuple[Launch, Launch, Launch]:
    """The three kernels as they start for so many places, of so many rows per group."""
    chunks, bw = cdiv(places, CHUNK), min(COLUMNS, max(32, next_power_of_2(width)))
    walk = Launch(
        _walk, (chunks, cdiv(width, bw)), N=places, R=rows, W=width, CHUNK=CHUNK, BW=bw, num_warps=1
    )  # fmt: skip
    bw = min(bw, 64)
    grid, how = (chunks - 1, cdiv(width, bw)), {"CHUNK": CHUNK, "BW": bw, "AHEAD": AHEAD, "num_warps": 4}
    join = Launch(_join, grid, N=places, R=rows, W=width, **how)
    return walk, join, Launch(_finish, grid, N=places, W=width, **how)


embedding_square_op = operator(
    "embedding_square(Tensor ids, Tensor G, SymInt rows, Tensor? c) -> (Tensor, Tensor)",
    lambda ids, G, rows, c: pair_of(G, (rows, G.shape[-1])),
)(embedding_square)

"""Ghost batch norm in Triton, for inputs that are contiguous, or whose channels are last in memory.

Either way memory holds (κ, images, C, places): `places` are those of a plane where channels come before them. Where
channels are last there is one, and each place of a sample counts as an image. The images and places of a group are its
R rows.

Each group's rows are cut into tiles: several planes, or a part of one. Chunks of tiles, enough of them for the chip,
are summed by a block each, for some channels. A second kernel adds the chunks in order and finishes what is per
channel: statistics, running statistics, pairs. The large tensors are read twice and written once in each direction.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import chip
from ..launch import Launch, cdiv, next_power_of_2
from ..ops import FLOATS

ROWS, CHANNELS, WARPS = 64, 64, 4  # of a block's tile where channels are last
NUMBERS, PLACES = 4096, 512  # of a tile where places are last, at most; of them in one plane
CHUNKS = 32  # at most, of a group's tiles


@triton.jit
def spot(pid, C, TILES, CHUNK, BC: tl.constexpr):
    """A block's group, channels, first tile and end; its place among the chunks."""
    columns, chunks = tl.cdiv(C, BC), tl.cdiv(TILES, CHUNK)
    piece = pid // columns
    first = piece % chunks * CHUNK
    return piece // chunks, pid % columns * BC + tl.arange(0, BC), first, tl.minimum(first + CHUNK, TILES), piece


@triton.jit
def _start(k, C, IMAGES, HW, ALIGN: tl.constexpr):
    """Where a group begins."""
    return k.to(tl.int64) * IMAGES * C * _known(HW, ALIGN)


@triton.jit
def _known(HW, ALIGN: tl.constexpr):
    """HW, of which the compiler then knows what divides it: it loads as many numbers at once."""
    return HW // ALIGN * ALIGN


@triton.jit
def _tile(i, c, C, IMAGES, HW, SPLIT, ALIGN: tl.constexpr, BP: tl.constexpr, BR: tl.constexpr):
    """Which numbers of a group's tile there are, and where they are in their group.

    A tile has BR/BP planes of BP places; or a plane has SPLIT tiles.
    """
    places, t = _known(HW, ALIGN), tl.arange(0, BR)
    image, place = i // SPLIT * (BR // BP) + t // BP, i % SPLIT * BP + t % BP
    inside = ((image < IMAGES) & (place < places))[:, None] & (c < C)[None, :]
    return inside, (image * (C * places) + place)[:, None] + (c * places)[None, :]


@triton.jit
def leave_sums(partial, piece, c, C, one, other):
    """Leave the two sums of a chunk."""
    here = partial + piece.to(tl.int64) * (2 * C) + c
    tl.store(here, tl.sum(one, 0), mask=c < C)
    tl.store(here + C, tl.sum(other, 0), mask=c < C)


@triton.jit
def _sum_statistics(
    X, partial, C, TILES, CHUNK, IMAGES, HW, SPLIT,
    ALIGN: tl.constexpr, BP: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Σ (x − s) and Σ (x − s)² of a chunk, s the group's first row: no cancellation where the mean is large."""
    k, c, first, end, piece = spot(tl.program_id(0), C, TILES, CHUNK, BC)
    X += _start(k, C, IMAGES, HW, ALIGN)
    shift = tl.load(X + c * HW, mask=c < C, other=0.0).to(tl.float32)
    total, squares = tl.zeros((BR, BC), tl.float32), tl.zeros((BR, BC), tl.float32)
    for i in tl.range(first, end):
        inside, at = _tile(i, c, C, IMAGES, HW, SPLIT, ALIGN, BP, BR)
        x = tl.load(X + at, mask=inside, other=0.0).to(tl.float32)
        x = tl.where(inside, x - shift[None, :], 0.0)
        total += x
        squares += x * x
    leave_sums(partial, piece, c, C, total, squares)


@triton.jit
def _gather(partial, k, c, KAPPA, CHUNKS, C, CH: tl.constexpr):
    """The two sums of some groups and channels, each (groups, channels)."""
    chunk = tl.arange(0, CH)[:, None, None]
    at = (k[None, :, None] * CHUNKS + chunk).to(tl.int64) * (2 * C) + c[None, None, :]
    mask = (chunk < CHUNKS) & (k < KAPPA)[None, :, None] & (c < C)[None, None, :]
    one = tl.sum(tl.load(partial + at, mask=mask, other=0.0), 0)
    return one, tl.sum(tl.load(partial + at + C, mask=mask, other=0.0), 0)


@triton.jit
def _gather_group(partial, k, c, CHUNKS, C, CH: tl.constexpr):
    """The two sums of one group and some channels."""
    chunk = tl.arange(0, CH)[:, None]
    at = (k * CHUNKS + chunk).to(tl.int64) * (2 * C) + c[None, :]
    mask = (chunk < CHUNKS) & (c < C)[None, :]
    one = tl.sum(tl.load(partial + at, mask=mask, other=0.0), 0)
    return one, tl.sum(tl.load(partial + at + C, mask=mask, other=0.0), 0)


@triton.jit
def _finish_statistics(
    X, partial, mean, rstd, running_mean, running_var, tracked, C, IMAGES, HW, KAPPA, CHUNKS,
    eps, keep, gain, decay, unbias, CH: tl.constexpr, KB: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """μ and r of all groups, and the running statistics after them; decay is log₂ of their ratio."""
    R = IMAGES * HW
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    add_mean, add_var = tl.zeros((BC,), tl.float32), tl.zeros((BC,), tl.float32)
    for first in range(0, KAPPA, KB):
        k = first + tl.arange(0, KB)
        mask = (k < KAPPA)[:, None] & (c < C)[None, :]
        total, squares = _gather(partial, k, c, KAPPA, CHUNKS, C, CH)
        shift = tl.load(X + (k.to(tl.int64)[:, None] * R * C + (c * HW)[None, :]), mask=mask, other=0.0).to(tl.float32)
        off = total / R
        var = tl.maximum(squares / R - off * off, 0.0)
        at = k[:, None] * C + c[None, :]
        tl.store(mean + at, shift + off, mask=mask)
        tl.store(rstd + at, tl.rsqrt(var + eps), mask=mask)
        after = tl.maximum(KAPPA - 1 - k, 0)
        weight = tl.where(after == 0, 1.0, tl.exp2(after.to(tl.float32) * decay))
        weight = tl.where(k < KAPPA, gain * weight, 0.0)[:, None]
        add_mean += tl.sum(weight * (shift + off), 0)
        add_var += tl.sum(weight * var * unbias, 0)
    if running_mean is not None:
        tl.store(running_mean + c, keep * tl.load(running_mean + c, mask=c < C).to(tl.float32) + add_mean, mask=c < C)
        tl.store(running_var + c, keep * tl.load(running_var + c, mask=c < C).to(tl.float32) + add_var, mask=c < C)
    if tracked is not None:  # noqa: SIM102 - this is known at compile time
        if tl.program_id(0) == 0:
            tl.store(tracked, tl.load(tracked) + KAPPA - 1)  # the module has counted one group


@triton.jit
def _per_channel(mean, rstd, w, k, c, C):
    """μ, r and w of this block's channels."""
    at = k * C + c
    scale = 1.0
    if w is not None:
        scale = tl.load(w + c, mask=c < C, other=0.0).to(tl.float32)
    return tl.load(mean + at, mask=c < C, other=0.0), tl.load(rstd + at, mask=c < C, other=0.0), scale


@triton.jit
def _normalise(
    X, Y, mean, rstd, w, b, C, TILES, CHUNK, IMAGES, HW, SPLIT,
    ALIGN: tl.constexpr, BP: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    k, c, first, end, _ = spot(tl.program_id(0), C, TILES, CHUNK, BC)
    mu, r_k, scale = _per_channel(mean, rstd, w, k, c, C)
    _normalise_rows(X, Y, mu, r_k * scale, b, k, c, first, end, C, IMAGES, HW, SPLIT, ALIGN, BP, BR, BC)


@triton.jit
def _finish_and_normalise(
    X, partial, mean, rstd, running_mean, running_var, tracked, Y, w, b,
    C, TILES, CHUNK, IMAGES, HW, SPLIT, KAPPA, CHUNKS, eps, keep, gain, decay, unbias, CH: tl.constexpr,
    KB: tl.constexpr, BF: tl.constexpr, ALIGN: tl.constexpr, BP: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """`_finish_statistics` by the first blocks, `_normalise` by the others, which finish what they need themselves."""
    finishing = tl.cdiv(C, BF)
    if tl.program_id(0) < finishing:
        _finish_statistics(
            X, partial, mean, rstd, running_mean, running_var, tracked, C, IMAGES, HW, KAPPA, CHUNKS,
            eps, keep, gain, decay, unbias, CH, KB, BF,
        )  # fmt: skip
    else:
        k, c, first, end, _ = spot(tl.program_id(0) - finishing, C, TILES, CHUNK, BC)
        total, squares = _gather_group(partial, k, c, CHUNKS, C, CH)
        shift = tl.load(X + _start(k, C, IMAGES, HW, ALIGN) + c * HW, mask=c < C, other=0.0).to(tl.float32)
        R = IMAGES * HW
        off = total / R
        scale = tl.rsqrt(tl.maximum(squares / R - off * off, 0.0) + eps)
        if w is not None:
            scale *= tl.load(w + c, mask=c < C, other=0.0).to(tl.float32)
        _normalise_rows(X, Y, shift + off, scale, b, k, c, first, end, C, IMAGES, HW, SPLIT, ALIGN, BP, BR, BC)


@triton.jit
def _normalise_rows(
    X, Y, mu, scale, b, k, c, first, end, C, IMAGES, HW, SPLIT,
    ALIGN: tl.constexpr, BP: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """(x − μ) scale + b of a chunk."""
    offset = tl.zeros((BC,), tl.float32)
    if b is not None:
        offset = tl.load(b + c, mask=c < C, other=0.0).to(tl.float32)
    X += _start(k, C, IMAGES, HW, ALIGN)
    Y += _start(k, C, IMAGES, HW, ALIGN)
    for i in tl.range(first, end):
        inside, at = _tile(i, c, C, IMAGES, HW, SPLIT, ALIGN, BP, BR)
        x = tl.load(X + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(Y + at, (x - mu[None, :]) * scale[None, :] + offset[None, :], mask=inside)


@triton.jit
def _sum_gradients(
    G, X, partial, mean, rstd, C, TILES, CHUNK, IMAGES, HW, SPLIT,
    ALIGN: tl.constexpr, BP: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Σ g x̂ and Σ g of a chunk."""
    k, c, first, end, piece = spot(tl.program_id(0), C, TILES, CHUNK, BC)
    mu, r_k, _ = _per_channel(mean, rstd, None, k, c, C)
    X += _start(k, C, IMAGES, HW, ALIGN)
    G += _start(k, C, IMAGES, HW, ALIGN)
    total, products = tl.zeros((BR, BC), tl.float32), tl.zeros((BR, BC), tl.float32)
    for i in tl.range(first, end):
        inside, at = _tile(i, c, C, IMAGES, HW, SPLIT, ALIGN, BP, BR)
        g = tl.load(G + at, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(X + at, mask=inside, other=0.0).to(tl.float32)
        total += g
        products += g * ((x - mu[None, :]) * r_k[None, :])
    leave_sums(partial, piece, c, C, products, total)


@triton.jit
def _finish_gradients(
    partial, coefficients, sums, pairs, C, KAPPA, CHUNKS, CH: tl.constexpr, KB: tl.constexpr, BC: tl.constexpr
):  # fmt: skip
    """The sums of all groups, and the pairs of w and b."""
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    dw, sw = tl.zeros((BC,), tl.float32), tl.zeros((BC,), tl.float32)
    db, sb = tl.zeros((BC,), tl.float32), tl.zeros((BC,), tl.float32)
    for first in range(0, KAPPA, KB):
        k = first + tl.arange(0, KB)
        mask = (k < KAPPA)[:, None] & (c < C)[None, :]
        e, a = _gather(partial, k, c, KAPPA, CHUNKS, C, CH)
        if sums is not None:
            at = k[:, None] * (2 * C) + c[None, :]
            tl.store(sums + at, e, mask=mask)
            tl.store(sums + at + C, a, mask=mask)
        dw += tl.sum(e, 0)
        db += tl.sum(a, 0)
        if coefficients is not None:
            scale = tl.load(coefficients + k, mask=k < KAPPA, other=0.0).to(tl.float32)[:, None]
            sw += tl.sum(scale * e * e, 0)
            sb += tl.sum(scale * a * a, 0)
        else:
            sw += tl.sum(e * e, 0)
            sb += tl.sum(a * a, 0)
    tl.store(pairs + c, dw, mask=c < C)
    tl.store(pairs + C + c, sw, mask=c < C)
    tl.store(pairs + 2 * C + c, db, mask=c < C)
    tl.store(pairs + 3 * C + c, sb, mask=c < C)


@triton.jit
def _finish_and_input_gradient(
    partial, coefficients, sums, pairs, G, X, DX, mean, rstd, w,
    C, TILES, CHUNK, IMAGES, HW, SPLIT, KAPPA, CHUNKS, CH: tl.constexpr,
    KB: tl.constexpr, BF: tl.constexpr, ALIGN: tl.constexpr, BP: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """`_finish_gradients` by the first blocks, dx by the others, which finish what they need themselves."""
    finishing = tl.cdiv(C, BF)
    if tl.program_id(0) < finishing:
        _finish_gradients(partial, coefficients, sums, pairs, C, KAPPA, CHUNKS, CH, KB, BF)
    else:
        k, c, first, end, _ = spot(tl.program_id(0) - finishing, C, TILES, CHUNK, BC)
        e, a = _gather_group(partial, k, c, CHUNKS, C, CH)
        e, a = e / (IMAGES * HW), a / (IMAGES * HW)
        _input_gradient(G, X, DX, mean, rstd, w, e, a, k, c, first, end, C, IMAGES, HW, SPLIT, ALIGN, BP, BR)


@triton.jit
def _input_gradient(
    G, X, DX, mean, rstd, w, e, a, k, c, first, end, C, IMAGES, HW, SPLIT,
    ALIGN: tl.constexpr, BP: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """w r (g − a − x̂ e) of a chunk."""
    mu, r_k, scale = _per_channel(mean, rstd, w, k, c, C)
    scale = r_k * scale
    X += _start(k, C, IMAGES, HW, ALIGN)
    G += _start(k, C, IMAGES, HW, ALIGN)
    DX += _start(k, C, IMAGES, HW, ALIGN)
    for i in tl.range(first, end):
        inside, at = _tile(i, c, C, IMAGES, HW, SPLIT, ALIGN, BP, BR)
        g = tl.load(G + at, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(X + at, mask=inside, other=0.0).to(tl.float32)
        hat = (x - mu[None, :]) * r_k[None, :]
        tl.store(DX + at, (g - a[None, :] - hat * e[None, :]) * scale[None, :], mask=inside)


class RowLaunches:
    """How κ groups of (images, C, places) are divided among blocks: about eight for each multiprocessor."""

    def __init__(self, channels: int, images: int, places: int, kappa: int, device: torch.device) -> None:
        self.rows, self.channels, self.device = images * places, channels, device  # rows per group
        self.unbias = self.rows / max(self.rows - 1, 1)
        wanted = 8 * chip.of(device).multiprocessors
        if places == 1:
            bp, br, bc = 1, ROWS, min(CHANNELS, next_power_of_2(channels))
        else:
            bp = min(PLACES, next_power_of_2(places))
            br = bp if bp < places else min(NUMBERS, next_power_of_2(images) * bp)
            bc = min(NUMBERS // br, next_power_of_2(channels))
            while bc > 1 and cdiv(channels, bc) * CHUNKS * kappa < wanted:  # as many chunks as there may be
                bc //= 2
            if bp < places:  # more of a plane, where there are fewer channels than in a full tile
                bp = br = min(NUMBERS // bc, next_power_of_2(places))
        split = cdiv(places, bp)  # tiles in a plane
        tiles, columns = cdiv(images, br // bp) * split, cdiv(channels, bc)  # tiles per group
        chunk = cdiv(tiles, max(1, min(cdiv(wanted, columns * kappa), CHUNKS, tiles // 4)))  # at least four tiles
        self.chunks = chunks = cdiv(tiles, chunk)  # per group
        self.blocks = columns * chunks * kappa
        where = {"IMAGES": images, "HW": places}
        self.tile = {"C": channels, "TILES": tiles, "CHUNK": chunk, "BR": br, "BC": bc, "num_warps": WARPS}
        tile = self.tile | where | {"SPLIT": split, "BP": bp, "ALIGN": min(16, places & -places)}
        # The tile of a finishing kernel: chunks × groups × channels.
        last = {"C": channels, "KAPPA": kappa, "CHUNKS": chunks, "CH": next_power_of_2(chunks), "KB": 8, "BC": 16}
        grid = (cdiv(channels, 16),)
        self.sum_statistics = Launch(_sum_statistics, (self.blocks,), **tile)
        self.finish_statistics = Launch(_finish_statistics, grid, **last, **where, num_warps=4)
        self.normalise = Launch(_normalise, (self.blocks,), **tile)
        self.sum_gradients = Launch(_sum_gradients, (self.blocks,), **tile)
        both, grid = last | tile | {"BF": 16}, (grid[0] + self.blocks,)
        self.finish_and_normalise = Launch(_finish_and_normalise, grid, **both)
        self.finish_and_input_gradient = Launch(_finish_and_input_gradient, grid, **both)

    def empty(self, *shape: int) -> Tensor:
        """Room for float32 numbers (*shape, C)."""
        return torch.empty(*shape, self.channels, dtype=torch.float32, device=self.device)


@lru_cache(maxsize=1024)
def row_launches(channels: int, numel: int, kappa: int, device: torch.device, places: int = 1) -> RowLaunches:
    """The launches for κ groups of `numel` numbers in all."""
    return RowLaunches(channels, numel // (kappa * channels * places), places, kappa, device)


def _launches(x: Tensor, kappa: int) -> RowLaunches:
    shape, numel = x.shape, x.numel()
    places = numel // (shape[0] * shape[1]) if x.is_contiguous() else 1
    return row_launches(shape[1], numel, kappa, x.device, places)


def serves(x: Tensor, kappa: int) -> bool:
    """Whether the kernels take this input: contiguous or channels last in memory, at most 32 bits a number."""
    return x.dtype in FLOATS and 0 < x.numel() < kappa << 31 and (x.is_contiguous() or channels_last(x))


def channels_last(x: Tensor) -> bool:
    """Whether the channels of an input are last in memory."""
    return x.is_contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x.movedim(1, -1).is_contiguous()


def like(g: Tensor, x: Tensor) -> Tensor:
    """g, in memory as x is."""
    if x.is_contiguous():
        return g.contiguous()
    return g if channels_last(g) else g.movedim(1, -1).contiguous().movedim(-1, 1)


def statistics(
    x: Tensor, kappa: int, eps: float, running_mean: Tensor | None, running_var: Tensor | None,
    keep: float, gain: float, ratio: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """μ and r (κ, C) in float32, and the running statistics updated in place."""
    p = _launches(x, kappa)
    partial, mean, rstd = p.empty(kappa, p.chunks, 2), p.empty(kappa), p.empty(kappa)
    p.sum_statistics(x, partial)
    scalars = _scalars(p, eps, keep, gain, ratio)
    p.finish_statistics(x, partial, mean, rstd, running_mean, running_var, None, *scalars)
    return mean, rstd


def forward(
    x: Tensor, kappa: int, eps: float, running_mean: Tensor | None, running_var: Tensor | None,
    keep: float, gain: float, ratio: float, tracked: Tensor | None, w: Tensor | None, b: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """μ, r and y: `statistics`, then `normalise`, in one launch less."""
    p = _launches(x, kappa)
    partial, mean, rstd, y = p.empty(kappa, p.chunks, 2), p.empty(kappa), p.empty(kappa), torch.empty_like(x)
    p.sum_statistics(x, partial)
    scalars = _scalars(p, eps, keep, gain, ratio)
    p.finish_and_normalise(x, partial, mean, rstd, running_mean, running_var, tracked, y, w, b, *scalars)
    return mean, rstd, y


def _scalars(p: RowLaunches, eps: float, keep: float, gain: float, ratio: float) -> tuple[float, ...]:
    decay = math.log2(ratio) if ratio > 0 else -1e30
    return float(eps), float(keep), float(gain), decay, p.unbias


def normalise(x: Tensor, mean: Tensor, rstd: Tensor, w: Tensor | None, b: Tensor | None) -> Tensor:
    """y, like x."""
    y = torch.empty_like(x)
    _launches(x, mean.shape[0]).normalise(x, y, mean, rstd, w, b)
    return y


def backward(
    g: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, w: Tensor | None, c: Tensor | None, shares: bool = True
) -> tuple[Tensor, Tensor | None, Tensor]:
    """dx like x, the sums (κ, 2, C) if asked for, and the pairs (4, C), in float32."""
    kappa = mean.shape[0]
    p = _launches(x, kappa)
    g = like(g, x)
    partial, sums, pairs = p.empty(kappa, p.chunks, 2), p.empty(kappa, 2) if shares else None, p.empty(4)
    dx = torch.empty_like(x)
    p.sum_gradients(g, x, partial, mean, rstd)
    p.finish_and_input_gradient(partial, c, sums, pairs, g, x, dx, mean, rstd, w)
    return dx, sums, pairs

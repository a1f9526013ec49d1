"""`conv_square` in Triton for 2-d convolutions: dW and the squares of its groups' parts in one implicit GEMM.

For κ groups of m images, with output gradients G and inputs X in channels-last memory, each tap (y, x) of the weight is

    dW[:, y, x, :] = Σ_k P_k        S[:, y, x, :] = Σ_k c_k P_k²        P_k = Σ_r G_kᵀ[:, r] X_k[at(r) + tap, :]

over the R = m·H_out·W_out output positions r of a group: a product of matrices whose second factor has shifted rows,
zeros outside the image. A block owns a tile of output channels × (input channels of one tap); narrow inputs share a
tile among neighbouring taps. The loop over groups is that of `gemm_square`.

Where the rows of a step are a box of the image (`box`), Hopper's tile loads fetch it shifted by the tap, with zeros for
what is outside. For a stride of s, X is seen as (images, H/s, s, W/s, s·I): what a tap meets is a box of that.
Elsewhere rows are gathered by address.

Tiles rarely fill the chip evenly. Those of the last round are cut into pieces of their groups (`divide`). Their sums go
through a workspace, and a second, small kernel adds them in order: the same result every time. Where tiles and groups
together are too few for the chip, groups are cut too; the second kernel then makes the squares.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import chip
from ..adam import Fold
from ..adam.triton import put_arguments, put_tile
from ..gemm_square.triton import round_tf32
from ..launch import Launch, Tiles, cdiv, next_power_of_2
from ..ops import pair_of
from .torch import Geometry


class ConvConfig(NamedTuple):
    """A way to a convolution's pair, and how its kernel runs."""

    bm: int = 128  # output channels
    bn: int = 128  # input channels, or columns of taps × input channels
    bk: int = 64  # output positions
    warps: int = 8
    stages: int = 3
    boxes: bool = True  # whether inputs are loaded as boxes, where they can be
    pieces: int = 0  # into how many the tiles of the last round are cut; 0: as `divide` says
    way: str = "implicit"  # see `ways`


@triton.jit
def _place(tile, CO, CI: tl.constexpr, TAPS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, FLAT: tl.constexpr):
    """The channel group, first row and first column of a tile, and its tap."""
    across = tl.cdiv(TAPS * CI, BN) if FLAT else TAPS * tl.cdiv(CI, BN)
    down = tl.cdiv(CO, BM)
    column, row, j = tile % across, tile // across % down, tile // (across * down)
    if FLAT:
        n, tap = column * BN, 0
    else:  # the taps of the same channels are neighbours: they read the same rows
        n, tap = column // TAPS * BN, column % TAPS
    return j, row * BM, n, tap


@triton.jit
def _columns(rn, tap, CI: tl.constexpr, TAPS: tl.constexpr, FLAT: tl.constexpr):
    """The taps and input channels of columns, and which of them there are."""
    if FLAT:
        return rn // CI, rn % CI, rn < TAPS * CI
    return tap + tl.zeros_like(rn), rn, rn < CI


@triton.jit
def _conv_square(
    G, X, C, D, S, partial, CO, R, KAPPA, IMAGES, STEPS, GW, whole, rest, size, parts, s0, s1, s2, s3,
    slots, count, keep1, keep2, gain1, gain2, limit,
    CI: tl.constexpr, XW: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    H: tl.constexpr, W: tl.constexpr, HO: tl.constexpr, WO: tl.constexpr,
    SY: tl.constexpr, SX: tl.constexpr, PY: tl.constexpr, PX: tl.constexpr, DY: tl.constexpr, DX: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BI: tl.constexpr, BY: tl.constexpr, BX: tl.constexpr,
    FLAT: tl.constexpr, HAS_C: tl.constexpr, DESCRIPTORS: tl.constexpr, BOXES: tl.constexpr, STRIPS: tl.constexpr,
    SPLIT: tl.constexpr, PRECISION: tl.constexpr, INTO: tl.constexpr,
):  # fmt: skip
    """G is (κ, R, GW), X is (κ, IMAGES, H, W, XW), by descriptor or address; CO and CI channels per channel group."""
    pid = tl.program_id(0)
    tile, piece, first, last, begin, end = pid, 0, 0, KAPPA, 0, STEPS
    if SPLIT:  # a block has a part of one group's rows, and leaves its product
        tile, piece = pid % rest, pid // rest
        first = piece // parts
        last = first + 1
        begin = piece % parts * size
        end = tl.minimum(begin + size, STEPS)
    elif pid >= whole:
        tile = whole + (pid - whole) % rest
        piece = (pid - whole) // rest
        first = piece * size
        last = tl.minimum(first + size, KAPPA)
    j, m, n, tap = _place(tile, CO, CI, KH * KW, BM, BN, FLAT)
    across = tl.arange(0, BN)
    taps, channels, exists = _columns(n + across, tap, CI, KH * KW, FLAT)
    rm, rk = m + tl.arange(0, BM), tl.arange(0, BK)
    if FLAT:
        down, right = taps // KW * DY - PY, taps % KW * DX - PX
        shift = (down * W + right) * XW + j * CI + channels
        down = tl.where(exists, down, 1 << 29)  # outside of every image
    else:
        dy, dx = tap // KW * DY - PY, tap % KW * DX - PX
        shift = (dy * W + dx) * XW + j * CI + n + across
        # A tap's offset as whole strides and what is left; the padding is added first, so that all are positive.
        oy, ox = (dy + SY * PY) % SY, (dx + SX * PX) % SX
        sy, sx = (dy + SY * PY) // SY - PY, (dx + SX * PX) // SX - PX
    total, squares = tl.zeros((BM, BN), tl.float32), tl.zeros((BM, BN), tl.float32)
    for k in tl.range(first, last, flatten=True):
        product = tl.zeros((BM, BN), tl.float32)
        for step in tl.range(begin, end):
            rows = step * BK + rk
            if BOXES:  # outside of the image are zeros; past the group's end, where G has them, whatever follows
                x0 = step % tl.cdiv(WO, BX) * BX
                y0 = step // tl.cdiv(WO, BX) % tl.cdiv(HO, BY) * BY
                i0 = step // (tl.cdiv(WO, BX) * tl.cdiv(HO, BY)) * BI
                v = X.load([k * IMAGES + i0, y0 + sy, oy, x0 + sx, ox * XW + j * CI + n]).reshape(BK, BN)
            if STRIPS:
                g = G.load([(k * IMAGES + i0) * HO + y0, x0, j * CO + m]).reshape(BK, BM)
            elif DESCRIPTORS:
                g = G.load([k, step * BK, j * CO + m]).reshape(BK, BM)
            else:  # as its transpose: see `_gemm_square`
                here = G + (k * R + rows).to(tl.int64)[None, :] * GW + (j * CO + rm)[:, None]
                g = tl.load(here, mask=(rows < R)[None, :] & (rm < CO)[:, None], other=0.0)
            if not BOXES:
                place = rows % (HO * WO)
                y, x = place // WO * SY, place % WO * SX
                pixel = ((k * IMAGES + rows // (HO * WO)) * H + y) * W + x
                there = X + pixel.to(tl.int64)[:, None] * XW + shift[None, :]
                y = tl.where(rows < R, y, -(1 << 30))  # outside, too
                if FLAT:  # few tests for each number: a row is a number of its own here
                    inside = below(y[:, None] + down[None, :], H) & below(x[:, None] + right[None, :], W)
                else:
                    inside = (below(y + dy, H) & below(x + dx, W))[:, None] & exists[None, :]
                v = tl.load(there, mask=inside, other=0.0)
            if PRECISION == "tf32" and g.dtype == tl.float32:
                g, v = round_tf32(g), round_tf32(v)
            if STRIPS or DESCRIPTORS:
                g = g.trans()
            product = tl.dot(g, v, product, input_precision=PRECISION)
        if SPLIT:
            total = product
        elif HAS_C:
            total += product
            squares += tl.load(C + k) * product * product
        else:
            total += product
            squares += product * product
    if SPLIT:
        here = partial + (piece * rest + tile).to(tl.int64) * (BM * BN)
        tl.store(here + tl.arange(0, BM)[:, None] * BN + across[None, :], total)
    elif partial is None:  # no tile is cut
        _deliver(
            total, squares, tile, D, S, CO, s0, s1, s2, s3, slots, count, keep1, keep2, gain1, gain2, limit,
            CI, KH, KW, BM, BN, FLAT, INTO,
        )  # fmt: skip
    elif last - first < KAPPA:  # the sums of a piece stay in the workspace
        here = partial + (piece * rest + tile - whole).to(tl.int64) * (2 * BM * BN)
        here += tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
        tl.store(here, total)
        tl.store(here + BM * BN, squares)
    else:
        _deliver(
            total, squares, tile, D, S, CO, s0, s1, s2, s3, slots, count, keep1, keep2, gain1, gain2, limit,
            CI, KH, KW, BM, BN, FLAT, INTO,
        )  # fmt: skip


@triton.jit
def below(i, size: tl.constexpr):
    """0 ≤ i < size, in one comparison."""
    return i.to(tl.uint32, bitcast=True) < size


@triton.jit
def _deliver(
    total, squares, tile, D, S, CO, s0, s1, s2, s3, slots, count, keep1, keep2, gain1, gain2, limit,
    CI: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, FLAT: tl.constexpr, INTO: tl.constexpr,
):  # fmt: skip
    """Store the sums of a whole tile, or fold them into the moments."""
    j, m, n, tap = _place(tile, CO, CI, KH * KW, BM, BN, FLAT)
    taps, channels, exists = _columns(n + tl.arange(0, BN), tap, CI, KH * KW, FLAT)
    rm = m + tl.arange(0, BM)
    at = (j * CO + rm)[:, None] * s0 + (channels * s1 + taps // KW * s2 + taps % KW * s3)[None, :]
    mask = (rm < CO)[:, None] & exists[None, :]
    put_tile(D, S, at, total, squares, mask, slots, count, keep1, keep2, gain1, gain2, limit, INTO)


@triton.jit
def _finish(
    partial, C, D, S, CO, KAPPA, whole, rest, pieces, parts, s0, s1, s2, s3,
    slots, count, keep1, keep2, gain1, gain2, limit,
    CI: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    K: tl.constexpr, P: tl.constexpr, E: tl.constexpr,
    FLAT: tl.constexpr, HAS_C: tl.constexpr, SPLIT: tl.constexpr, INTO: tl.constexpr,
):  # fmt: skip
    """Add up the pieces of E numbers of one tile, always in the same order, K·P of them at once."""
    j, m, n, tap = _place(whole + tl.program_id(0), CO, CI, KH * KW, BM, BN, FLAT)
    e = tl.program_id(1) * E + tl.arange(0, E)
    rm, rn = m + e // BN, n + e % BN
    taps, channels, exists = _columns(rn, tap, CI, KH * KW, FLAT)
    total, squares = tl.zeros((E,), tl.float32), tl.zeros((E,), tl.float32)
    if SPLIT:  # products of parts of groups: squared when they are those of groups
        for first in range(0, KAPPA, K):
            k = first + tl.arange(0, K)
            product = tl.zeros((K, E), tl.float32)
            for begin in range(0, parts, P):
                part = begin + tl.arange(0, P)
                piece = k[:, None] * parts + part[None, :]
                here = partial + (piece * rest + tl.program_id(0)).to(tl.int64)[:, :, None] * (BM * BN)
                mask = (k < KAPPA)[:, None] & (part < parts)[None, :]
                product += tl.sum(tl.load(here + e[None, None, :], mask=mask[:, :, None], other=0.0), 1)
            total += tl.sum(product, 0)
            if HAS_C:
                product *= tl.load(C + k, mask=k < KAPPA, other=0.0)[:, None] * product
            else:
                product *= product
            squares += tl.sum(product, 0)
    else:
        for first in range(0, pieces, K):
            piece = first + tl.arange(0, K)
            here = partial + (piece * rest + tl.program_id(0)).to(tl.int64)[:, None] * (2 * BM * BN) + e[None, :]
            mask = (piece < pieces)[:, None]
            total += tl.sum(tl.load(here, mask=mask, other=0.0), 0)
            squares += tl.sum(tl.load(here + BM * BN, mask=mask, other=0.0), 0)
    at = (j * CO + rm) * s0 + channels * s1 + taps // KW * s2 + taps % KW * s3
    mask = (rm < CO) & exists
    if INTO:
        put_tile(
            D, S, at[None, :], total[None, :], squares[None, :], mask[None, :],
            slots, count, keep1, keep2, gain1, gain2, limit, INTO,
        )  # fmt: skip
    else:
        tl.store(D + at, total, mask=mask)
        tl.store(S + at, squares, mask=mask)


class Task(NamedTuple):
    """A convolution's pair to be made, as float32 or folded into moments."""

    G: Tensor  # (κ·m, O, H_out, W_out) in channels-last memory
    X: Tensor  # (κ·m, I, H, W) in channels-last memory; of more channels than the weight's the last are left alone,
    # and where it has fewer, the missing ones are the next pixels'
    geo: Geometry
    kappa: int  # groups
    c: Tensor | None  # (κ,) float32, weighs the squares
    config: ConvConfig
    launches: dict[Any, Any]  # of tasks like this one; they differ in addresses, in `c` and in `into`
    into: Fold | None = None  # the moments that the pair is folded into; None: it is returned

    def room(self) -> tuple[Tensor, Tensor]:
        """Where the pair goes, of the weight's shape: the moments, or new memory."""
        if self.into is not None:
            return self.into.exp_avg, self.into.exp_avg_sq
        return pair_of(self.G, self.geo.weight, self.geo.channels_last)


def implicit(task: Task, D: Tensor, S: Tensor) -> None:
    """Make a pair by the implicit GEMM: D and S have the shape of the weight, and the same strides."""
    G, X, _, _, c, _, launches, into = task
    # The hardware's tile loads (Hopper on) need 16-byte rows and addresses; other loads go by address, masked.
    tf32 = G.dtype == torch.float32 and torch.backends.cudnn.allow_tf32
    how = (c is not None, into is not None, tf32)
    key = (G.data_ptr() % 16 == 0, X.data_ptr() % 16 == 0, D.stride(), how)
    p = launches.get(key)
    if p is None:
        p = launches[key] = ConvLaunches(task, D, *how)
    partial = None if p.partial is None else torch.empty(p.partial, device=G.device)
    fold = put_arguments(into)
    g, x = G if p.of_g is None else p.of_g.of(G), X if p.of_x is None else p.of_x.of(X)
    p.start(g, x, c, D, S, partial, *(put_arguments(None) if p.split else fold))
    if p.finish is not None:
        p.finish(partial, c, D, S, *fold)


class ConvLaunches:
    """The kernel as it starts for a task like this one, and the one that adds up pieces, if there are any."""

    def __init__(self, task: Task, D: Tensor, weighted: bool, into: bool, tf32: bool) -> None:
        G, X, geo, kappa, _, config = task[:6]
        (n, wide, height, width), (high, across) = X.shape, G.shape[2:]
        images = n // kappa
        (out, inner, kh, kw), (bm, bn, bk) = geo.weight, config[:3]
        out //= geo.groups
        rows = images * high * across
        flat = inner < bn
        columns = cdiv(kh * kw * inner, bn) if flat else kh * kw * cdiv(inner, bn)
        tiles = geo.groups * cdiv(out, bm) * columns
        odd = [t.shape[1] // geo.groups * t.element_size() % 16 or t.data_ptr() % 16 for t in (G, X)]  # bytes
        loads = [chip.of(G.device).tile_loads and not rest for rest in odd]
        fits = config.boxes and all(loads) and not flat and boxed(geo, X)
        load = box(bk, images, high, across) if fits else None
        steps = cdiv(rows, bk)
        self.of_g: Tiles | None = None  # how G and X are loaded; None: by address
        self.of_x: Tiles | None = None
        by, strips = (1, 1, 1), False
        if load is not None:
            by, strips = load
            steps = cdiv(images, by[0]) * cdiv(high, by[1]) * cdiv(across, by[2])
            sy, sx = geo.stride
            strided = X.permute(0, 2, 3, 1).view(n, height // sy, sy, width // sx, sx * wide)
            self.of_x = Tiles(strided, [*by[:2], 1, by[2], bn])
        if loads[0]:
            g = G.permute(0, 2, 3, 1)
            self.of_g = Tiles(g.flatten(0, 1) if strips else g.view(kappa, rows, -1), [1, bk, bm])
        whole, size, parts = divide(tiles, kappa, rows, config, chip.of(G.device).multiprocessors)
        rest, pieces, split = tiles - whole, cdiv(kappa, size), parts > 0
        if split:
            size = cdiv(steps, parts)
            parts = cdiv(steps, size)
            pieces = kappa * parts
        self.split = split  # the first kernel leaves products only: the second folds
        self.partial = (rest * pieces, 1 if split else 2, bm, bn) if split or pieces > 1 else None
        common = {
            "CO": out, "KAPPA": kappa, "whole": whole, "rest": rest, "parts": parts,
            **dict(zip(("s0", "s1", "s2", "s3"), D.stride(), strict=True)), "CI": inner, "KH": kh, "KW": kw,
            "BM": bm, "BN": bn, "FLAT": flat, "HAS_C": weighted, "SPLIT": split,
        }  # fmt: skip
        self.start = Launch(
            _conv_square, (whole + rest * pieces,), **common, **sizes(G.shape, X.shape, geo),
            R=rows, IMAGES=images, STEPS=steps, GW=G.shape[1], size=size, BK=bk, BI=by[0], BY=by[1], BX=by[2],
            DESCRIPTORS=loads[0], BOXES=load is not None, STRIPS=strips, PRECISION=chip.precision(G.device, tf32),
            INTO=into and not split, num_warps=config.warps,
            num_stages=chip.stages(G.device, (bm + bn) * bk * G.element_size(), config.stages),
        )  # fmt: skip
        self.finish: Launch | None = None
        if self.partial is not None:
            at_once = min(32, next_power_of_2(max(1, parts)))
            how = {"pieces": pieces, "K": 32 // at_once, "P": at_once, "E": 128, "INTO": into, "num_warps": 4}
            self.finish = Launch(_finish, (rest, bm * bn // 128), **common, **how)


def sizes(g: torch.Size, x: torch.Size, geo: Geometry) -> dict[str, int]:
    """Arguments of kernels: the sizes of images of shapes g and x, and where taps are in them."""
    names = ("XW", "H", "W", "HO", "WO", "SY", "SX", "PY", "PX", "DY", "DX")
    return dict(zip(names, (*x[1:], *g[2:], *geo.stride, *geo.padding, *geo.dilation), strict=True))


def boxed(geo: Geometry, X: Tensor) -> bool:
    """Whether boxes of this input can be loaded: 16 bits a number, whole strides, all channels in a pixel."""
    whole = all(size % stride == 0 for size, stride in zip(X.shape[-2:], geo.stride, strict=True))
    return whole and X.element_size() == 2 and X.shape[-3] >= geo.weight[1] * geo.groups


def box(bk: int, images: int, height: int, width: int) -> tuple[tuple[int, int, int], bool] | None:
    """The images, rows and columns of a box of `bk` output positions, and whether it is a strip, a part of a row.

    Sides are powers of two. Boxes of whole rows or whole images follow each other in memory; strips do not, and what
    sticks out at the end of a row is wasted. None where that would be more than a sixth.

    >>> box(64, 25, 32, 32), box(64, 25, 4, 4), box(64, 8, 56, 56), box(64, 8, 14, 14)
    (((1, 2, 32), False), ((4, 4, 4), False), ((1, 1, 64), True), None)
    """
    if width <= bk and bk % width == 0:
        rest = bk // width
        if height % rest == 0:
            return (1, rest, width), False
        if rest % height == 0:
            return (rest // height, height, width), False
    if width % bk == 0 or images * height == 1:  # past the end of a group there are zeros
        return (1, 1, bk), False
    return ((1, 1, bk), True) if 6 * -(-width // bk) * bk <= 7 * width else None


@lru_cache(maxsize=1024)
def divide(tiles: int, kappa: int, rows: int, config: ConvConfig, multiprocessors: int) -> tuple[int, int, int]:
    """How many tiles stay whole, how many groups a piece of the others has, and into how many parts a group is cut.

    Measured in the time of one group of a tile: a round of pieces takes their size, plus about 600 rows for begin and
    end; their sums pass through memory (10 rows for each piece) and a second kernel adds them (the launch, as long as
    11e6 products of a block). Where no tile stays whole, a piece may be a part of a group's rows, at least 256 of them.
    No parts (0): groups stay whole.

    >>> divide(132, 32, 1024, ConvConfig(), 132), divide(9, 32, 25600, ConvConfig(64, 64, warps=4), 132)
    ((132, 32, 0), (0, 1, 3))
    """
    bm, bn = config.bm, config.bn
    places = multiprocessors * max(1, 128 * 128 // (bm * bn))  # that fit by their registers
    rest = tiles % places
    alone = rest == tiles
    if not rest or kappa == 1:
        return tiles, kappa, 0

    def length(pieces: int) -> float:
        if pieces == 1:
            return kappa + 600 / rows
        size = -(-kappa // pieces) if pieces < kappa else kappa / pieces
        rounds = -(-rest * pieces // places)
        return rounds * (size + 600 / rows) + (10 * rest * pieces + 11e6 / (bm * bn)) / rows

    most = max(1, min(rows // 256, 2 * places // (rest * kappa))) if alone else 1
    pieces = config.pieces or min([*range(1, kappa + 1), *range(2 * kappa, kappa * most + 1, kappa)], key=length)
    if pieces == 1:
        return tiles, kappa, 0
    return tiles - rest, -(-kappa // pieces), pieces // kappa if alone else 0


@triton.jit
def _pack(X, room, H, W, high, wide, side, C: tl.constexpr, PIXEL: tl.constexpr, SIZE: tl.constexpr):
    """room[n, y, x, c] = X[n, y, x - side, c], and zeros where X has nothing."""
    n, y = tl.program_id(0) // high, tl.program_id(0) % high
    e = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    x, c = e // PIXEL - side, e % PIXEL
    here = X + ((n * H + y).to(tl.int64) * W + x) * C + c
    value = tl.load(here, mask=(x >= 0) & (x < tl.where(y < H, W, 0)) & (c < C), other=0.0)
    tl.store(room + tl.program_id(0).to(tl.int64) * wide * PIXEL + e, value, mask=e < wide * PIXEL)


@lru_cache(maxsize=256)
def _packing(shape: torch.Size, high: int, wide: int, pixel: int, side: int) -> Launch:
    n, channels, height, width = shape
    size = min(1024, next_power_of_2(wide * pixel))
    return Launch(
        _pack, (n * high, cdiv(wide * pixel, size)),
        H=height, W=width, high=high, wide=wide, side=side, C=channels, PIXEL=pixel, SIZE=size, num_warps=4,
    )  # fmt: skip


def pack(X: Tensor, high: int, wide: int, pixel: int, side: int = 0) -> Tensor:
    """Images (N, C, H, W) in channels-last memory as (N, high, wide, pixel), `side` pixels of zeros before each row."""
    room = torch.empty(X.shape[0], high, wide, pixel, dtype=X.dtype, device=X.device)
    _packing(X.shape, high, wide, pixel, side)(X, room)
    return room

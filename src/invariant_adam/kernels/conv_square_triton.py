"""The Triton twin of `conv_square` for 2-d convolutions: dW and the squares of its groups' parts in one implicit GEMM.

For κ groups of m images, with output gradients G and inputs X in channels-last memory, each tap (y, x) of the weight is

    dW[:, y, x, :] = Σ_k P_k        S[:, y, x, :] = Σ_k c_k P_k²        P_k = Σ_r G_kᵀ[:, r] X_k[at(r) + tap, :]

over the R = m·H_out·W_out output positions r of a group: a product of matrices whose second factor is read from
shifted rows, zeros outside the image. A block owns a tile of output channels × (input channels of one tap); narrow
inputs share a tile among neighbouring taps. The loop over groups is that of `gemm_square_triton`.

Where the rows of a step are a box of the image (`box`), Hopper's tile loads fetch it shifted by the tap, with zeros for
what is outside. For a stride of s, X is seen as (images, H/s, s, W/s, s·I): what a tap meets is a box of that. Else
rows are gathered by address.

Tiles rarely fill the chip evenly. Those of the last round are cut into pieces of their groups (`divide`), whose sums
go through a workspace and are added up in order by a second, small kernel: the same result every time.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from . import tuning
from .adam import Target
from .adam_triton import LIMIT
from .conv_square import Geometry
from .gemm_square_triton import _fold_tile, _has_tile_loads, _multiprocessors, _round_tf32, _stages
from .launch import cdiv, next_power_of_2
from .ops import operator

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Config(NamedTuple):
    """A way to run the kernel."""

    bm: int = 128  # output channels
    bn: int = 128  # input channels, or columns of taps × input channels
    bk: int = 64  # output positions
    warps: int = 8
    stages: int = 3
    boxes: bool = True  # whether inputs are loaded as boxes, where they can be
    pieces: int = 0  # into how many the tiles of the last round are cut; 0: as `divide` says


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
def _columns(n, tap, CI: tl.constexpr, TAPS: tl.constexpr, BN: tl.constexpr, FLAT: tl.constexpr):
    """The taps and input channels of a tile's columns, and which of them there are."""
    rn = n + tl.arange(0, BN)
    if FLAT:
        return rn // CI, rn % CI, rn < TAPS * CI
    return tap + tl.zeros_like(rn), rn, rn < CI


@triton.jit
def _conv_square(
    G, X, C, D, S, partial, CO, R, KAPPA, IMAGES, STEPS, GW, XW, whole, rest, size, s0, s1, s2, s3,
    slots, count, keep1, keep2, gain1, gain2, limit,
    CI: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    H: tl.constexpr, W: tl.constexpr, HO: tl.constexpr, WO: tl.constexpr,
    SY: tl.constexpr, SX: tl.constexpr, PY: tl.constexpr, PX: tl.constexpr, DY: tl.constexpr, DX: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BI: tl.constexpr, BY: tl.constexpr, BX: tl.constexpr,
    FLAT: tl.constexpr, HAS_C: tl.constexpr, DESCRIPTORS: tl.constexpr, BOXES: tl.constexpr, STRIPS: tl.constexpr,
    PRECISION: tl.constexpr, INTO: tl.constexpr,
):  # fmt: skip
    """G is (κ, R, GW), X is (κ, IMAGES, H, W, XW), by descriptor or address; CO and CI channels per channel group."""
    pid = tl.program_id(0)
    tile, piece, first, last = pid, 0, 0, KAPPA
    if pid >= whole:
        tile = whole + (pid - whole) % rest
        piece = (pid - whole) // rest
        first = piece * size
        last = tl.minimum(first + size, KAPPA)
    j, m, n, tap = _place(tile, CO, CI, KH * KW, BM, BN, FLAT)
    taps, channels, exists = _columns(n, tap, CI, KH * KW, BN, FLAT)
    rm, rk = m + tl.arange(0, BM), tl.arange(0, BK)
    across = tl.arange(0, BN)
    if FLAT:
        down, right = taps // KW * DY - PY, taps % KW * DX - PX
        shift = (down * W + right) * XW + j * CI + channels
    else:
        dy, dx = tap // KW * DY - PY, tap % KW * DX - PX
        shift = (dy * W + dx) * XW + j * CI + n + across
        # A tap's offset as whole strides and what is left; the padding is added first, so that all are positive.
        oy, ox = (dy + SY * PY) % SY, (dx + SX * PX) % SX
        sy, sx = (dy + SY * PY) // SY - PY, (dx + SX * PX) // SX - PX
    total = tl.zeros((BM, BN), tl.float32)
    squares = tl.zeros((BM, BN), tl.float32)
    for k in tl.range(first, last, flatten=True):
        product = tl.zeros((BM, BN), tl.float32)
        for step in tl.range(0, STEPS):
            rows = step * BK + rk
            if BOXES:  # outside of the image are zeros; past the group's end, where G has them, whatever follows
                x0 = step % tl.cdiv(WO, BX) * BX
                y0 = step // tl.cdiv(WO, BX) % tl.cdiv(HO, BY) * BY
                i0 = step // (tl.cdiv(WO, BX) * tl.cdiv(HO, BY)) * BI
                v = X.load([k * IMAGES + i0, y0 + sy, oy, x0 + sx, ox * XW + j * CI + n]).reshape(BK, BN)
            if STRIPS:
                g = G.load([k, i0, y0, x0, j * CO + m]).reshape(BK, BM)
            elif DESCRIPTORS:
                g = G.load([k, step * BK, j * CO + m]).reshape(BK, BM)
            else:
                here = G + (k * R + rows).to(tl.int64)[:, None] * GW + (j * CO + rm)[None, :]
                g = tl.load(here, mask=(rows < R)[:, None] & (rm < CO)[None, :], other=0.0)
            if not BOXES:
                place = rows % (HO * WO)
                y, x = place // WO * SY, place % WO * SX
                pixel = ((k * IMAGES + rows // (HO * WO)) * H + y) * W + x
                there = X + pixel.to(tl.int64)[:, None] * XW + shift[None, :]
                if FLAT:
                    yy, xx = y[:, None] + down[None, :], x[:, None] + right[None, :]
                    inside = (rows < R)[:, None] & exists[None, :] & (yy >= 0) & (yy < H) & (xx >= 0) & (xx < W)
                else:
                    yy, xx = y + dy, x + dx
                    inside = ((rows < R) & (yy >= 0) & (yy < H) & (xx >= 0) & (xx < W))[:, None] & exists[None, :]
                v = tl.load(there, mask=inside, other=0.0)
            if PRECISION == "tf32" and g.dtype == tl.float32:
                g, v = _round_tf32(g), _round_tf32(v)
            product = tl.dot(g.trans(), v, product, input_precision=PRECISION)
        total += product
        if HAS_C:
            squares += tl.load(C + k) * product * product
        else:
            squares += product * product
    _leave(
        total, squares, tile, piece, last - first < KAPPA, partial, D, S, CO, whole, rest, s0, s1, s2, s3,
        slots, count, keep1, keep2, gain1, gain2, limit, CI, KH, KW, BM, BN, FLAT, INTO,
    )  # fmt: skip


@triton.jit
def _leave(
    total, squares, tile, piece, cut, partial, D, S, CO, whole, rest, s0, s1, s2, s3,
    slots, count, keep1, keep2, gain1, gain2, limit,
    CI: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, FLAT: tl.constexpr, INTO: tl.constexpr,
):  # fmt: skip
    """Leave the sums of a piece in the workspace, those of a whole tile where they belong."""
    if partial is not None:  # it is None when no tile is cut, which is known when the kernel is compiled
        if cut:
            here = partial + (piece * rest + tile - whole).to(tl.int64) * (2 * BM * BN)
            here += tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
            tl.store(here, total)
            tl.store(here + BM * BN, squares)
        else:
            _deliver(
                total, squares, tile, D, S, CO, s0, s1, s2, s3, slots, count, keep1, keep2, gain1, gain2, limit,
                CI, KH, KW, BM, BN, FLAT, INTO,
            )  # fmt: skip
    else:
        _deliver(
            total, squares, tile, D, S, CO, s0, s1, s2, s3, slots, count, keep1, keep2, gain1, gain2, limit,
            CI, KH, KW, BM, BN, FLAT, INTO,
        )  # fmt: skip


@triton.jit
def _deliver(
    total, squares, tile, D, S, CO, s0, s1, s2, s3, slots, count, keep1, keep2, gain1, gain2, limit,
    CI: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, FLAT: tl.constexpr, INTO: tl.constexpr,
):  # fmt: skip
    """Store the sums of a whole tile, or fold them into the moments."""
    j, m, n, tap = _place(tile, CO, CI, KH * KW, BM, BN, FLAT)
    taps, channels, exists = _columns(n, tap, CI, KH * KW, BN, FLAT)
    rm = m + tl.arange(0, BM)
    at = (j * CO + rm)[:, None] * s0 + (channels * s1 + taps // KW * s2 + taps % KW * s3)[None, :]
    mask = (rm < CO)[:, None] & exists[None, :]
    if INTO:
        _fold_tile(D + at, S + at, total, squares, mask, slots, count, keep1, keep2, gain1, gain2, limit)
    else:
        tl.store(D + at, total, mask=mask)
        tl.store(S + at, squares, mask=mask)


@triton.jit
def _finish(
    partial, D, S, CO, whole, rest, pieces, s0, s1, s2, s3, slots, count, keep1, keep2, gain1, gain2, limit,
    CI: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BF: tl.constexpr, FLAT: tl.constexpr, INTO: tl.constexpr,
):  # fmt: skip
    """Add up the pieces of BF rows of one tile, in their order."""
    j, m, n, tap = _place(whole + tl.program_id(0), CO, CI, KH * KW, BM, BN, FLAT)
    taps, channels, exists = _columns(n, tap, CI, KH * KW, BN, FLAT)
    rows = tl.program_id(1) * BF + tl.arange(0, BF)
    place = rows[:, None] * BN + tl.arange(0, BN)[None, :]
    total = tl.zeros((BF, BN), tl.float32)
    squares = tl.zeros((BF, BN), tl.float32)
    for piece in range(pieces):
        here = partial + (piece * rest + tl.program_id(0)).to(tl.int64) * (2 * BM * BN) + place
        total += tl.load(here)
        squares += tl.load(here + BM * BN)
    at = (j * CO + m + rows)[:, None] * s0 + (channels * s1 + taps // KW * s2 + taps % KW * s3)[None, :]
    mask = (m + rows < CO)[:, None] & exists[None, :]
    if INTO:
        _fold_tile(D + at, S + at, total, squares, mask, slots, count, keep1, keep2, gain1, gain2, limit)
    else:
        tl.store(D + at, total, mask=mask)
        tl.store(S + at, squares, mask=mask)


def serves(G: Tensor, X: Tensor, geo: Geometry) -> bool:
    """Whether the kernel takes this convolution: 2-d, not transposed, at most 32 bits a number and 2³¹ pixels."""
    return (
        len(geo.stride) == 2
        and not geo.transposed
        and G.dtype in DTYPES
        and max(t.numel() // t.shape[2] for t in (G, X)) < 1 << 31
        and G.numel() > 0
    )


def is_depthwise(geo: Geometry) -> bool:
    """Whether each output channel sees one input channel of several."""
    return geo.groups > 1 and geo.weight[1] == 1


def conv_square(
    G: Tensor,
    X: Tensor,
    geo: Geometry,
    c: Tensor | None = None,
    *,
    into: Target | None = None,
    config: Config | None = None,
) -> tuple[Tensor, Tensor]:
    """dW and S in float32, of G (κ, m, O, H_out, W_out) and X (κ, m, I, H, W); c (κ,) weighs the squares.

    Both have the weight's shape, in memory as `geo.channels_last` says. With `into`, they are folded into its moments,
    of any strides, which are returned; a depthwise convolution has but a small pair, and does not fold it.
    """
    kappa, images = G.shape[:2]
    G, X = (t.flatten(0, 1).contiguous(memory_format=torch.channels_last) for t in (G, X))
    c = None if c is None else c.to(torch.float32)
    if is_depthwise(geo):
        assert into is None
        return _depthwise(G, X, geo, c, kappa)
    out, inner, kh, kw = geo.weight
    out //= geo.groups
    rows = images * G.shape[2] * G.shape[3]
    if config is None:
        key = (geo, G.shape, kappa, G.dtype, G.device)
        if key not in _configs:
            _configs[key] = _best(G, X, geo, c, kappa)
        config = _configs[key]
    flat = inner < config.bn
    across = cdiv(kh * kw * inner, config.bn) if flat else kh * kw * cdiv(inner, config.bn)
    tiles = geo.groups * cdiv(out, config.bm) * across
    # The hardware's tile loads (Hopper on) ask for 16-byte rows and addresses; others go by address, masked.
    aligned = [
        _has_tile_loads(G.device) and t.shape[1] * t.element_size() % 16 == 0 and t.data_ptr() % 16 == 0 for t in (G, X)
    ]
    load = None
    if config.boxes and all(aligned) and not flat and boxed(geo, X):
        load = box(config.bk, images, *G.shape[2:])
    whole, size = divide(tiles, kappa, rows, config, _multiprocessors(G.device))
    rest, pieces = tiles - whole, cdiv(kappa, size)
    partial = torch.empty(rest * pieces, 2, config.bm, config.bn, device=G.device) if pieces > 1 else None
    if into is None:
        D, S = (_empty(geo.weight, geo.channels_last, G.device) for _ in range(2))
        fold: tuple[Any, ...] = (None, None, 0.0, 0.0, 0.0, 0.0, LIMIT)
    else:
        D, S = into.exp_avg, into.exp_avg_sq
        fold = (into.slots, into.count, *into.keep, *into.gain, LIMIT)
    operands: list[Any] = [G, X]
    steps = cdiv(rows, config.bk)
    by, strips = (1, 1, 1), False
    if load is not None:
        by, strips = load
        steps = cdiv(images, by[0]) * cdiv(G.shape[2], by[1]) * cdiv(G.shape[3], by[2])
        n, wide, height, width = X.shape
        sy, sx = geo.stride
        strided = X.permute(0, 2, 3, 1).view(n, height // sy, sy, width // sx, sx * wide)
        operands[1] = TensorDescriptor.from_tensor(strided, [*by[:2], 1, by[2], config.bn])
    if strips:
        operands[0] = TensorDescriptor.from_tensor(_images(G, kappa), [1, *by, config.bm])
    elif aligned[0]:
        operands[0] = TensorDescriptor.from_tensor(_images(G, kappa).flatten(1, 3), [1, config.bk, config.bm])
    shape = {"CI": inner, "KH": kh, "KW": kw, "BM": config.bm, "BN": config.bn, "FLAT": flat, "INTO": into is not None}
    taps = {
        "HO": G.shape[2], "WO": G.shape[3], "SY": geo.stride[0], "SX": geo.stride[1],
        "PY": geo.padding[0], "PX": geo.padding[1], "DY": geo.dilation[0], "DX": geo.dilation[1],
        "BK": config.bk, "BI": by[0], "BY": by[1], "BX": by[2], "STRIPS": strips, "HAS_C": c is not None,
        "num_warps": config.warps,
        "num_stages": _stages(G.device, (config.bm + config.bn) * config.bk * G.element_size(), config.stages),
    }  # fmt: skip
    _conv_square[(whole + rest * pieces,)](
        *operands, c, D, S, partial, out, rows, kappa, images, steps, G.shape[1], X.shape[1], whole, rest, size,
        *D.stride(), *fold, **shape, **taps, H=X.shape[2], W=X.shape[3],
        DESCRIPTORS=aligned[0], BOXES=load is not None,
        PRECISION="tf32" if torch.backends.cudnn.allow_tf32 else "ieee",
    )  # fmt: skip
    if pieces > 1:
        few = min(8, config.bm)
        _finish[(rest, config.bm // few)](
            partial, D, S, out, whole, rest, pieces, *D.stride(), *fold, **shape, BF=few, num_warps=4
        )
    return D, S


# (geometry, shape of G, κ, dtype, device) -> its best configuration: what a layer asks for in every update.
_configs: dict[tuple[Any, ...], Config] = {}


def _best(G: Tensor, X: Tensor, geo: Geometry, c: Tensor | None, kappa: int) -> Config:
    """The configuration that is best for these operands: see `tuning`."""
    key = (*geo.weight, geo.groups, *geo.stride, *geo.padding, *geo.dilation)
    places = (G.shape[0] // kappa, *G.shape[2:])
    return tuning.best(
        "conv_square",
        (*key, *G.shape[2:], places[0], kappa, str(G.dtype)),
        G.device,
        choose(geo, places, G.dtype),
        lambda: candidates(geo, places, G.dtype),
        lambda config: conv_square(_apart(G, kappa), _apart(X, kappa), geo, c, config=config),
    )


def boxed(geo: Geometry, X: Tensor) -> bool:
    """Whether boxes can be loaded of this input: 16 bits a number, whole strides."""
    whole = all(size % stride == 0 for size, stride in zip(X.shape[-2:], geo.stride, strict=True))
    return whole and X.element_size() == 2


def box(bk: int, images: int, height: int, width: int) -> tuple[tuple[int, int, int], bool] | None:
    """The images, rows and columns that `bk` output positions are a box of, and whether they are but a strip of a row.

    Sides are powers of two. Boxes of whole rows or whole images follow each other in memory; strips do not, and waste
    what sticks out at the end of a row. None where that would be more than a sixth.

    >>> box(64, 25, 32, 32), box(64, 25, 4, 4), box(64, 8, 56, 56), box(64, 8, 14, 14)
    (((1, 2, 32), False), ((4, 4, 4), False), ((1, 1, 64), True), None)
    """
    if width <= bk and bk % width == 0:
        rest = bk // width
        if height % rest == 0:
            return (1, rest, width), False
        if rest % height == 0:
            return (rest // height, height, width), False
    if width % bk == 0:
        return (1, 1, bk), False
    return ((1, 1, bk), True) if 6 * -(-width // bk) * bk <= 7 * width else None


def _images(t: Tensor, kappa: int) -> Tensor:
    """(κ·m, C, H, W) in channels-last memory as (κ, m, H, W, C)."""
    return _apart(t.permute(0, 2, 3, 1), kappa)


def _apart(t: Tensor, kappa: int) -> Tensor:
    return t.view(kappa, -1, *t.shape[1:])


def _empty(shape: tuple[int, ...], channels_last: bool, device: torch.device) -> Tensor:
    format = torch.channels_last if channels_last else torch.contiguous_format
    return torch.empty(shape, dtype=torch.float32, device=device, memory_format=format)


def _shapes(G: Tensor, X: Tensor, c: Tensor | None, weight: list[int], *rest: Any) -> tuple[Tensor, Tensor]:
    channels_last: bool = rest[-1]
    return _empty(tuple(weight), channels_last, G.device), _empty(tuple(weight), channels_last, G.device)


@operator(
    "conv_square(Tensor G, Tensor X, Tensor? c, int[] weight, int[] stride, int[] padding, int[] dilation, int groups, "
    "bool channels_last) -> (Tensor, Tensor)",
    _shapes,
)
def conv_square_op(
    G: Tensor,
    X: Tensor,
    c: Tensor | None,
    weight: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    channels_last: bool,
) -> tuple[Tensor, Tensor]:
    """`conv_square` as an operator that `torch.compile` takes as it is."""
    shape, taps = tuple(weight), (tuple(stride), tuple(padding), tuple(dilation))
    return conv_square(G, X, Geometry(shape, *taps, False, (0, 0), groups, channels_last), c)


def choose(geo: Geometry, places: tuple[int, ...], dtype: torch.dtype) -> Config:
    """The configuration for a convolution; `places`: the images of a group, the height and width of the output."""
    out, inner, rows = geo.weight[0] // geo.groups, geo.weight[1], math.prod(places)
    bk = 64 if rows >= 64 else 32 if rows >= 32 else 16
    if dtype == torch.float32:
        bk = min(bk, 32)
    elif bk == 64 and box(64, *places) is None and box(32, *places) is not None:
        bk = 32
    bm = 128 if out > 64 else max(16, next_power_of_2(out))
    bn = 128 if inner > 64 else 64
    return Config(bm, bn, bk, warps=8 if bm * bn > 64 * 128 else 4, stages=4)


def candidates(geo: Geometry, places: tuple[int, ...], dtype: torch.dtype) -> list[Config]:
    """What else may be best. No steps of 128 rows with three stages: they came out wrong on an H200."""
    base = choose(geo, places, dtype)
    out, inner = geo.weight[0] // geo.groups, geo.weight[1]
    small = [(64, 64), (64, 128), (128, 64)] if min(out, inner) >= 64 else [(base.bm, 64), (base.bm, 128)]
    found = [base._replace(bm=m, bn=n, warps=4) for m, n in small]
    if out > 64 and inner > 64:
        found += [base._replace(bm=128, bn=128, warps=8, stages=s) for s in (3, 4)]
    by_address = [config._replace(boxes=False, stages=3, bk=max(base.bk, 64)) for config in (base, *found)]
    rows = math.prod(places)
    return list(dict.fromkeys(found + ([] if rows < 64 or dtype == torch.float32 else by_address)))


@lru_cache(maxsize=1024)
def divide(tiles: int, kappa: int, rows: int, config: Config, multiprocessors: int) -> tuple[int, int]:
    """How many tiles stay whole, and into pieces of how many groups the others are cut.

    Whole rounds of tiles keep the chip busy; what is left over would not. Measured in the time of one group of a tile:
    a round of pieces takes their size, plus about 600 rows for begin and end; their sums pass through memory (10 rows
    for each piece) and a second kernel adds them (the launch, as long as 11e6 products of a block).

    >>> divide(132, 32, 1024, Config(), 132), divide(9, 32, 25600, Config(64, 64, warps=4), 132)
    ((132, 32), (0, 1))
    """
    bm, bn = config.bm, config.bn
    places = multiprocessors * max(1, 128 * 128 // (bm * bn))  # that fit by their registers
    rest = tiles % places
    if not rest or kappa == 1:
        return tiles, kappa
    if config.pieces:
        size = -(-kappa // config.pieces)
        return (tiles, kappa) if size >= kappa else (tiles - rest, size)

    def length(pieces: int) -> float:
        size = -(-kappa // pieces)
        rounds = -(-rest * pieces // places)
        if pieces == 1:
            return size + 600 / rows
        return rounds * (size + 600 / rows) + (10 * rest * pieces + 11e6 / (bm * bn)) / rows

    best = min(range(1, kappa + 1), key=length)
    if best == 1:
        return tiles, kappa
    return tiles - rest, -(-kappa // best)


@triton.jit
def _depthwise_sums(
    G, X, partial, OUT, R, IMAGES, CHUNK, XW,
    MULT: tl.constexpr, KW: tl.constexpr,
    H: tl.constexpr, W: tl.constexpr, HO: tl.constexpr, WO: tl.constexpr,
    SY: tl.constexpr, SX: tl.constexpr, PY: tl.constexpr, PX: tl.constexpr, DY: tl.constexpr, DX: tl.constexpr,
    BC: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Σ_r G[r, o] X[at(r) + tap, o // MULT] over a chunk of a group's rows, for one tap."""
    chunks = tl.cdiv(R, CHUNK)
    tap, k, chunk = tl.program_id(1), tl.program_id(2) // chunks, tl.program_id(2) % chunks
    o = tl.program_id(0) * BC + tl.arange(0, BC)
    dy, dx = tap // KW * DY - PY, tap % KW * DX - PX
    total = tl.zeros((BK, BC), tl.float32)
    first = chunk * CHUNK
    for r in tl.range(first, tl.minimum(first + CHUNK, R), BK):
        rows = r + tl.arange(0, BK)
        place = rows % (HO * WO)
        y, x = place // WO * SY + dy, place % WO * SX + dx
        pixel = ((k * IMAGES + rows // (HO * WO)) * H + y) * W + x
        inside = (rows < tl.minimum(first + CHUNK, R)) & (y >= 0) & (y < H) & (x >= 0) & (x < W)
        mask = inside[:, None] & (o < OUT)[None, :]
        g = tl.load(G + (k * R + rows).to(tl.int64)[:, None] * OUT + o[None, :], mask=mask, other=0.0)
        there = X + pixel.to(tl.int64)[:, None] * XW + (o // MULT)[None, :]
        total += g.to(tl.float32) * tl.load(there, mask=mask, other=0.0).to(tl.float32)
    at = ((k * chunks + chunk) * tl.num_programs(1) + tap).to(tl.int64) * OUT + o
    tl.store(partial + at, tl.sum(total, 0), mask=o < OUT)


def _depthwise(G: Tensor, X: Tensor, geo: Geometry, c: Tensor | None, kappa: int) -> tuple[Tensor, Tensor]:
    """One input channel per channel group: no product of matrices, but sums of products."""
    out, _, kh, kw = geo.weight
    images = G.shape[0] // kappa
    rows = images * G.shape[2] * G.shape[3]
    bc = min(64, max(16, next_power_of_2(out)))
    across = cdiv(out, bc)
    # Enough blocks for the chip, of at least 1024 rows each.
    wanted = cdiv(8 * _multiprocessors(G.device), across * kh * kw * kappa)
    chunk = cdiv(rows, max(1, min(wanted, rows // 1024)))
    chunks = cdiv(rows, chunk)
    partial = torch.empty(kappa, chunks, kh * kw, out, dtype=torch.float32, device=G.device)
    _depthwise_sums[(across, kh * kw, kappa * chunks)](
        G, X, partial, out, rows, images, chunk, X.shape[1],
        MULT=out // geo.groups, KW=kw, H=X.shape[2], W=X.shape[3], HO=G.shape[2], WO=G.shape[3],
        SY=geo.stride[0], SX=geo.stride[1], PY=geo.padding[0], PX=geo.padding[1],
        DY=geo.dilation[0], DX=geo.dilation[1], BC=bc, BK=32, num_warps=4,
    )  # fmt: skip
    each = partial.sum(1)  # (κ, taps, O)
    squares = each.square() if c is None else each.square() * c[:, None, None]
    results = []
    for sums in (each.sum(0), squares.sum(0)):
        weight = _empty(geo.weight, geo.channels_last, G.device)
        results.append(weight.copy_(sums.t().reshape(geo.weight)))
    return results[0], results[1]

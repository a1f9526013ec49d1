"""`gemm_square` in Triton: dW and the sum of squared group products in one GEMM.

A block owns a tile of both outputs. Its loop over rows is that of a plain weight gradient. At the end of each group it
adds the accumulator to one float32 tile and its square to another, and clears it: the operations of the plain product,
and no κ × o × i tensor. At the end the block stores both tiles, or folds them into the moments; then neither dW nor S
is ever in memory.

Tiles rarely fill the chip evenly. Those of the last round are cut into pieces of their groups (`divide`). Each piece
leaves its sums in a workspace, and the block that comes last adds them in a fixed order: the same result every time.
"""

from __future__ import annotations

import heapq
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import chip, tuning
from ..adam import Fold
from ..adam.triton import NOTHING_TO_FOLD, put_arguments, put_tile
from ..launch import Launch, Tiles, cdiv, counters, next_power_of_2
from ..ops import FLOATS, operator, pair_of

# Columns of one operand from which on it pays to copy the other for tile loads, as the gradient of GPT-2's logits:
# 50,257 columns, no multiple of 8, beside 768.
WIDE = 512


class GemmConfig(NamedTuple):
    """A way to run the kernel."""

    bm: int = 128
    bn: int = 128
    bk: int = 64
    warps: int = 8
    stages: int = 4
    band: int = 8  # tile rows that neighbouring blocks share columns over
    split: bool = True  # whether the last round's tiles may be cut


@triton.jit
def _gemm_square(
    G, X, C, D, S, partial, arrived, M, N, R, KAPPA, whole, rest, size,
    slots, count, keep1, keep2, gain1, gain2, limit,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BAND: tl.constexpr,
    HAS_C: tl.constexpr, DESCRIPTORS: tl.constexpr, PRECISION: tl.constexpr, CUT: tl.constexpr, INTO: tl.constexpr,
):  # fmt: skip
    """G is (κ, R, M), X is (κ, R, N), by descriptor or address; C (κ,), D and S (M, N)."""
    tile, piece, first, last = tl.program_id(0), 0, 0, KAPPA
    if CUT:  # noqa: SIM102 - CUT is known at compile time
        if tile >= whole:  # long pieces first: the short ones fill what they leave
            piece = (tile - whole) // rest
            tile = whole + (tile - whole) % rest
            first = piece * size
            last = tl.minimum(first + size, KAPPA)
    # Neighbouring tiles share rows of G and X in the cache: walk them in bands of tile rows.
    across, down = tl.cdiv(N, BN), tl.cdiv(M, BM)
    band = tile // (BAND * across)
    height = tl.minimum(down - BAND * band, BAND)
    m = (BAND * band + tile % (BAND * across) % height) * BM
    n = (tile % (BAND * across) // height) * BN
    rm, rn, rk = m + tl.arange(0, BM), n + tl.arange(0, BN), tl.arange(0, BK)
    total, squares = tl.zeros((BM, BN), tl.float32), tl.zeros((BM, BN), tl.float32)
    for k in tl.range(first, last, flatten=True):
        product = tl.zeros((BM, BN), tl.float32)
        for r in tl.range(0, R, BK):
            if DESCRIPTORS:  # rows past the group's end come as zeros
                g = G.load([k, r, m]).reshape(BK, BM)
                x = X.load([k, r, n]).reshape(BK, BN)
            else:  # G transposed: turned after its load, it would wait in registers where there is no wgmma
                rows = (k * R + r + rk).to(tl.int64)
                inside = r + rk < R
                g = tl.load(G + rows[None, :] * M + rm[:, None], mask=inside[None, :] & (rm < M)[:, None], other=0.0)
                x = tl.load(X + rows[:, None] * N + rn[None, :], mask=inside[:, None] & (rn < N)[None, :], other=0.0)
            if PRECISION == "tf32" and g.dtype == tl.float32:
                g, x = round_tf32(g), round_tf32(x)
            if DESCRIPTORS:
                g = g.trans()
            product = tl.dot(g, x, product, input_precision=PRECISION)
        total += product
        if HAS_C:
            squares += tl.load(C + k) * product * product
        else:
            squares += product * product
    at = rm.to(tl.int64)[:, None] * N + rn[None, :]
    inside = (rm < M)[:, None] & (rn < N)[None, :]
    complete = True
    if CUT:  # noqa: SIM102 - CUT is known at compile time
        if last - first < KAPPA:
            total, squares, complete = _gather(
                total, squares, partial, arrived, tile - whole, piece, last - first, KAPPA, size, BM, BN
            )
    if complete:
        put_tile(D, S, at, total, squares, inside, slots, count, keep1, keep2, gain1, gain2, limit, INTO)


@triton.jit
def round_tf32(x):
    """Round to the nearest tf32: tensor cores only cut bits off, which would make all squares too small."""
    return (x.to(tl.int32, bitcast=True) + 0x1000).to(tl.float32, bitcast=True)


@triton.jit
def _gather(total, squares, partial, arrived, cut, piece, groups, KAPPA, size, BM: tl.constexpr, BN: tl.constexpr):
    """Leave a piece's sums in the workspace; the piece of a tile that comes last returns those of the whole tile."""
    pieces = tl.cdiv(KAPPA, size)
    place = tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
    there = partial + (cut * pieces).to(tl.int64) * (2 * BM * BN) + place
    here = there + piece * (2 * BM * BN)
    tl.store(here, total)
    tl.store(here + BM * BN, squares)
    tl.debug_barrier()  # every thread has written its part before one says so
    seen = tl.atomic_add(arrived + cut, groups, sem="acq_rel") + groups
    complete = seen == KAPPA
    if complete:
        tl.store(arrived + cut, 0)  # for the next kernel
        total, squares = tl.zeros((BM, BN), tl.float32), tl.zeros((BM, BN), tl.float32)
        for _ in range(pieces):
            total += tl.load(there, cache_modifier=".cg")
            squares += tl.load(there + BM * BN, cache_modifier=".cg")
            there += 2 * BM * BN
    return total, squares, complete


def serves(G: Tensor) -> bool:
    """Whether the kernel takes these operands, numbers of at most 32 bits.

    It takes 16 rows at a time, and zeros for those that a group lacks: that costs less than to walk over all groups'
    products in memory, as plain torch does.
    """
    return G.dtype in FLOATS


def gemm_square(
    G: Tensor, X: Tensor, c: Tensor | None = None, *, into: Fold | None = None, config: GemmConfig | None = None
) -> tuple[Tensor, Tensor]:
    """dW (o, i) and S (o, i) in float32, of G (κ, R, o) and X (κ, R, i); c (κ,) weighs the squares.

    With `into`, both are folded into its moments, (o, i) and contiguous, which are returned.
    """
    G, X = G.contiguous(), X.contiguous()
    c = None if c is None else c.to(torch.float32)
    dtype, odd = G.dtype, (G.data_ptr() & 15 > 0, X.data_ptr() & 15 > 0)
    tf32 = dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32
    how = (odd, c is not None, into is not None, tf32)
    key = (G.shape, X.shape, dtype, G.get_device(), config, how)
    p = _known.get(key)
    if p is None:
        p = _known[key] = GemmLaunch(G, X, config or _best(G, X, c), *how)
    partial = arrived = None
    if p.cut is not None:
        partial = torch.empty(p.cut.partials, 2, p.config.bm, p.config.bn, device=G.device)
        arrived = counters(G, p.cut.rest)
    D, S = pair_of(G, (G.shape[2], X.shape[2])) if into is None else (into.exp_avg, into.exp_avg_sq)
    g, x = (G, X) if p.loads is None else (p.loads[0].of(p.copied(0, G)), p.loads[1].of(p.copied(1, X)))
    if into is None:
        p.start(g, x, c, D, S, partial, arrived)
    else:
        p.start(g, x, c, D, S, partial, arrived, *put_arguments(into))
    return D, S


class GemmLaunch:
    """The kernel as it starts for operands like G and X."""

    def __init__(
        self, G: Tensor, X: Tensor, config: GemmConfig, odd: tuple[bool, bool], weighted: bool, into: bool, tf32: bool
    ) -> None:
        (kappa, rows, m), n, size, here = G.shape, X.shape[2], G.element_size(), chip.of(G.device)
        bm, bn, bk = config[:3]
        self.config, tiles = config, cdiv(m, bm) * cdiv(n, bn)
        self.cut = _cut(tiles, kappa, rows, here.multiprocessors) if config.split and here.publishes else None
        cut = self.cut or Cut(tiles, 0, kappa, 0)
        # The hardware's tile loads (Hopper on) need 16-byte rows and addresses. An operand without them is copied where
        # the other is wide enough; if not, loads go by address, masked.
        self.copies = odd[0] or m * size % 16 > 0, odd[1] or n * size % 16 > 0
        loads = here.tile_loads and (n >= WIDE or not self.copies[0]) and (m >= WIDE or not self.copies[1])
        like = (_room(t)[..., : t.shape[2]] if copy else t for t, copy in zip((G, X), self.copies, strict=True))
        g, x = like if loads else (G, X)
        self.loads = (Tiles(g, [1, bk, bm]), Tiles(x, [1, bk, bn])) if loads else None
        self.start = Launch(
            _gemm_square, (cut.whole + cut.partials,), whole=cut.whole, rest=cut.rest, size=cut.size,
            M=m, N=n, R=rows, KAPPA=kappa, BM=bm, BN=bn, BK=bk, BAND=config.band, HAS_C=weighted, DESCRIPTORS=loads,
            PRECISION=chip.precision(G.device, tf32), CUT=self.cut is not None, INTO=into,
            num_warps=config.warps, num_stages=chip.stages(G.device, (bm + bn) * bk * size, config.stages),
            **({} if into else NOTHING_TO_FOLD),
        )  # fmt: skip

    def copied(self, which: int, operand: Tensor) -> Tensor:
        """G or X as tile loads take it."""
        return even_rows(operand) if self.copies[which] else operand


EVEN = 16  # numbers: a multiple of it is one that Triton knows as such, so that stores are of 16 bytes
COPIED = 4096  # numbers of a row that a block copies


@triton.jit
def _copy_rows(T, room, N, WIDE, SIZE: tl.constexpr):
    """room[r, :N] = T[r], rows of N numbers into rows of WIDE."""
    r, e = tl.program_id(0).to(tl.int64), tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    tl.store(room + r * WIDE + e, tl.load(T + r * N + e, mask=e < N, other=0.0), mask=e < WIDE)


@lru_cache(maxsize=256)
def _copying(rows: int, n: int) -> Launch:
    wide = cdiv(n, EVEN) * EVEN
    size = min(COPIED, next_power_of_2(wide))
    return Launch(_copy_rows, (rows, cdiv(wide, size)), N=n, WIDE=wide, SIZE=size, num_warps=8)


def _room(t: Tensor) -> Tensor:
    """Room for t (κ, R, n) in even rows."""
    return torch.empty(*t.shape[:2], cdiv(t.shape[2], EVEN) * EVEN, dtype=t.dtype, device=t.device)


def even_rows(t: Tensor) -> Tensor:
    """A copy of t (κ, R, n), contiguous, in rows of whole 16 bytes; torch's own takes twice as long for odd rows."""
    room = _room(t)
    _copying(t.shape[0] * t.shape[1], t.shape[2])(t, room)
    return room[..., : t.shape[2]]


# What a launch depends on -> the launch, which a layer needs in every update.
_known: dict[tuple[Any, ...], GemmLaunch] = {}


def _best(G: Tensor, X: Tensor, c: Tensor | None) -> GemmConfig:
    """The configuration that is best for these operands: see `tuning`."""
    (kappa, rows, m), n, dtype = G.shape, X.shape[2], G.dtype
    return tuning.best(
        "gemm_square", (m, n, rows, kappa, str(dtype)), G.device, choose(m, n, rows, dtype),
        lambda: candidates(m, n, rows, dtype), lambda config: gemm_square(G, X, c, config=config),
    )  # fmt: skip


@operator(
    "gemm_square(Tensor G, Tensor X, Tensor? c, int kappa) -> (Tensor, Tensor)",
    lambda G, X, c, kappa: pair_of(G, (G.shape[1], X.shape[1])),
)
def gemm_square_op(G: Tensor, X: Tensor, c: Tensor | None, kappa: int) -> tuple[Tensor, Tensor]:
    """`gemm_square` as an operator, of the rows of all groups one after the other.

    The other products of a graph take them so too. What is asked for in two shapes is written twice.
    """
    return gemm_square(G.unflatten(0, (kappa, -1)), X.unflatten(0, (kappa, -1)), c)


def choose(m: int, n: int, rows: int, dtype: torch.dtype) -> GemmConfig:
    """The configuration for a shape: mostly the measured best of `benchmarks/gemm_square.py --tune`."""
    bk = 64 if rows >= 64 else 32 if rows >= 32 else 16
    if dtype == torch.float32:
        bk = min(bk, 32)
    few = m * n <= 128 * 128 * 144  # about as many tiles as multiprocessors: a deeper pipeline is worth its memory
    return GemmConfig(bm=128 if m > 64 else 64, bn=128 if n > 64 else 64, bk=bk, stages=5 if few else 4)


def candidates(m: int, n: int, rows: int, dtype: torch.dtype) -> list[GemmConfig]:
    """What else may be best for a shape."""
    base = choose(m, n, rows, dtype)
    found = [base._replace(stages=s, band=b, split=cut) for s in (4, 5) for b in (4, 8, 16) for cut in (False, True)]
    if rows >= 128 and dtype != torch.float32:
        found.append(base._replace(bk=128, stages=3))
    return found


class Cut(NamedTuple):
    """Tiles of the last round, cut into pieces of their groups."""

    whole: int  # tiles that are not cut
    rest: int  # tiles that are
    size: int  # groups of a piece; the last of a tile may have fewer
    partials: int  # pieces of all tiles


def divide(tiles: int, kappa: int, rows: int, multiprocessors: int) -> int:
    """How many groups a piece of a tile of the last round has; κ for no cut.

    Blocks start in order, each when a multiprocessor becomes free. A piece of s groups takes the time of s and a fixed
    time, that of about 600 rows (measured) for its begin and end, and of 600 more where its sums pass through memory.

    >>> divide(132, 32, 1024, 132), divide(144, 32, 1024, 132), divide(108, 32, 1024, 132)
    (32, 3, 28)
    """
    rest = tiles % multiprocessors
    fixed = 600 / rows

    def length(size: int) -> float:
        free = [0.0] * multiprocessors
        for start in range(0, kappa, size):
            took = min(size, kappa - start) + (fixed if size == kappa else 2 * fixed)
            for _ in range(rest):
                heapq.heapreplace(free, free[0] + took)
        return max(free)

    if not rest or kappa == 1:
        return kappa
    # Few pieces before many: each pays the fixed time.
    sizes = [kappa, *range(kappa - 1, (kappa - 1) // 2, -1), *(-(-kappa // q) for q in range(3, 17))]
    best = min(sizes, key=length)
    return best if length(best) < 0.97 * length(kappa) else kappa


@lru_cache(maxsize=256)
def _cut(tiles: int, kappa: int, rows: int, multiprocessors: int) -> Cut | None:
    size = divide(tiles, kappa, rows, multiprocessors)
    rest = tiles % multiprocessors
    return None if size >= kappa else Cut(tiles - rest, rest, size, rest * cdiv(kappa, size))

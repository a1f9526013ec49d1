"""The Triton twin of `gemm_square`: dW and the sum of squared group products in one GEMM.

For κ groups of R rows, G (κ, R, o) and X (κ, R, i):

    dW = Σ_k G_kᵀ X_k        S = Σ_k c_k (G_kᵀ X_k)²

A block owns a tile of both outputs. Its loop over rows is that of a plain weight gradient; at the end of each group the
accumulator is added to one float32 tile, its square to another, and it is cleared. Same operations as the plain
product, and no κ × o × i tensor.

Where there are fewer tiles than multiprocessors, or a few more, the groups of a tile are cut into parts, summed by
atomic additions.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple, Optional

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor


class Config(NamedTuple):
    """A way to run the kernel."""

    bm: int = 128
    bn: int = 128
    bk: int = 64
    warps: int = 8
    stages: int = 4
    parts: int = 0  # into how many the groups of a tile are cut; 0: as many as fill the chip


@triton.jit
def _gemm_square(
    G, X, C, D, S, M, N, R, KAPPA,
    PARTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    HAS_C: tl.constexpr, DESCRIPTORS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """G is (κ, R, M), X is (κ, R, N), by descriptor or address; C (κ,), D and S (M, N)."""
    tile = tl.program_id(0)
    first, last = KAPPA * tl.program_id(1) // PARTS, KAPPA * (tl.program_id(1) + 1) // PARTS
    # Neighbouring tiles share rows of G and X in the cache: walk them in bands of 8 tile rows.
    across, down = tl.cdiv(N, BN), tl.cdiv(M, BM)
    band = tile // (8 * across)
    height = tl.minimum(down - 8 * band, 8)
    m = (8 * band + tile % (8 * across) % height) * BM
    n = (tile % (8 * across) // height) * BN
    rm, rn, rk = m + tl.arange(0, BM), n + tl.arange(0, BN), tl.arange(0, BK)
    total = tl.zeros((BM, BN), tl.float32)
    squares = tl.zeros((BM, BN), tl.float32)
    for k in tl.range(first, last, flatten=True):
        product = tl.zeros((BM, BN), tl.float32)
        for r in tl.range(0, R, BK):
            if DESCRIPTORS:  # rows past the group's end come as zeros
                g = G.load([k, r, m]).reshape(BK, BM)
                x = X.load([k, r, n]).reshape(BK, BN)
            else:
                rows = (k * R + r + rk).to(tl.int64)
                inside = (r + rk < R)[:, None]
                g = tl.load(G + rows[:, None] * M + rm[None, :], mask=inside & (rm < M)[None, :], other=0.0)
                x = tl.load(X + rows[:, None] * N + rn[None, :], mask=inside & (rn < N)[None, :], other=0.0)
            product = tl.dot(g.trans(), x, product, input_precision=PRECISION)
        total += product
        if HAS_C:
            squares += tl.load(C + k) * product * product
        else:
            squares += product * product
    at = rm.to(tl.int64)[:, None] * N + rn[None, :]
    inside = (rm < M)[:, None] & (rn < N)[None, :]
    if PARTS == 1:
        tl.store(D + at, total, mask=inside)
        tl.store(S + at, squares, mask=inside)
    else:
        tl.atomic_add(D + at, total, mask=inside, sem="relaxed")
        tl.atomic_add(S + at, squares, mask=inside, sem="relaxed")


def serves(G: Tensor, X: Tensor) -> bool:
    """Whether the kernel takes these operands: at least 16 rows per group, of one dtype of at most 32 bits."""
    return G.shape[1] >= 16 and G.dtype == X.dtype and G.dtype in (torch.bfloat16, torch.float16, torch.float32)


def gemm_square(G: Tensor, X: Tensor, c: Tensor | None = None, config: Config | None = None) -> tuple[Tensor, Tensor]:
    """dW (o, i) and S (o, i) in float32, of G (κ, R, o) and X (κ, R, i); c (κ,) weighs the squares."""
    G, X = G.contiguous(), X.contiguous()
    c = None if c is None else c.to(torch.float32)
    kappa, rows, m = G.shape
    n = X.shape[2]
    config = config or choose(m, n, rows, G.dtype)
    tiles = triton.cdiv(m, config.bm) * triton.cdiv(n, config.bn)
    parts = min(kappa, config.parts or _parts(tiles, _multiprocessors(G.device)))
    make = torch.empty if parts == 1 else torch.zeros
    D, S = (make(m, n, dtype=torch.float32, device=G.device) for _ in range(2))
    # The hardware's tile loads (Hopper on) ask for 16-byte rows and addresses; others go by address, masked.
    aligned = _has_tile_loads(G.device) and all(
        t.shape[2] * t.element_size() % 16 == 0 and t.data_ptr() % 16 == 0 for t in (G, X)
    )
    operands: list[Any] = [G, X]
    if aligned:
        operands = [TensorDescriptor.from_tensor(t, [1, config.bk, b]) for t, b in ((G, config.bm), (X, config.bn))]
    _gemm_square[(tiles, parts)](
        *operands, c, D, S, m, n, rows, kappa, PARTS=parts,
        BM=config.bm, BN=config.bn, BK=config.bk, HAS_C=c is not None, DESCRIPTORS=aligned,
        PRECISION="tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee",
        num_warps=config.warps,
        num_stages=_stages(G.device, (config.bm + config.bn) * config.bk * G.element_size(), config.stages),
    )  # fmt: skip
    return D, S


@torch.library.custom_op("invariant_adam::gemm_square", mutates_args=())
def gemm_square_op(G: Tensor, X: Tensor, c: Optional[Tensor]) -> tuple[Tensor, Tensor]:  # noqa: UP045 - the schema's
    """`gemm_square` as an operator that `torch.compile` takes as it is."""
    return gemm_square(G, X, c)


@gemm_square_op.register_fake
def _(G: Tensor, X: Tensor, c: Optional[Tensor]) -> tuple[Tensor, Tensor]:  # noqa: UP045
    out = G.new_empty(G.shape[2], X.shape[2], dtype=torch.float32)
    return out, torch.empty_like(out)


def choose(m: int, n: int, rows: int, dtype: torch.dtype) -> Config:
    """The configuration for a shape: the measured best of `benchmarks/gemm_square.py --tune`."""
    bk = 64 if rows >= 64 else 32 if rows >= 32 else 16
    if dtype == torch.float32:
        bk = min(bk, 32)
    return Config(bm=128 if m > 64 else 64, bn=128 if n > 64 else 64, bk=bk)


def _parts(tiles: int, multiprocessors: int) -> int:
    """Into how many parts to cut the groups of each tile.

    A part takes its share of a tile's time and, to be added to memory, 0.06 of it more (measured); all parts take as
    many rounds as the multiprocessors need to get through them.

    >>> _parts(36, 132), _parts(108, 132), _parts(144, 132), _parts(1024, 132)
    (3, 1, 4, 1)
    """

    def cost(parts: int) -> float:
        return -(-tiles * parts // multiprocessors) * (1 / parts + (0.06 if parts > 1 else 0.0))

    return min(range(1, 9), key=cost)


@lru_cache
def _has_tile_loads(device: torch.device) -> bool:
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (9, 0)


@lru_cache
def _stages(device: torch.device, stage_bytes: int, wanted: int) -> int:
    """As many pipeline stages as fit into shared memory."""
    if device.type != "cuda":
        return wanted
    memory: int = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 48 << 10)
    return max(1, min(wanted, (memory - 1024) // stage_bytes))


@lru_cache
def _multiprocessors(device: torch.device) -> int:
    count: int = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
    return count

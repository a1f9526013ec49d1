"""The fused weight gradient and square against float64, on the GPU or interpreted on the CPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from invariant_adam.kernels.adam import Fold

triton_twin = pytest.importorskip("invariant_adam.kernels.gemm_square.triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
TOLERANCE = {torch.float16: 1e-2, torch.float32: 1e-5}
if DEVICE == "cuda":  # the interpreter multiplies bfloat16 as the integers it keeps them in
    TOLERANCE[torch.bfloat16] = 1e-2


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("kappa", "rows", "m", "n"),
    [
        (1, 16, 8, 8),
        (3, 64, 128, 64),
        (5, 100, 72, 136),
        (4, 33, 30, 17),
        (2, 17, 200, 5),
        (7, 16, 257, 129),
        (6, 8, 100, 72),  # of a group's last rows there are too few
        (4, 3, 40, 136),
        (2, 40, 515, 520),
        (2, 40, 520, 515),
        (2, 40, 513, 515),  # copied for tile loads
    ],
)
@pytest.mark.parametrize("weighted", [False, True])
def test_products_and_squares(kappa, rows, m, n, weighted, dtype):
    generator = torch.Generator().manual_seed(kappa * rows)
    G, X = (torch.randn(kappa, rows, w, generator=generator).to(DEVICE, dtype) for w in (m, n))
    c = torch.rand(kappa, generator=generator, dtype=torch.float64).to(DEVICE) if weighted else None
    D, S = triton_twin.gemm_square(G, X, c)
    products = G.double().transpose(1, 2) @ X.double()
    scale = 1 if c is None else c.double()[:, None, None]
    for got, want in ((D, products.sum(0)), (S, (scale * products.square()).sum(0))):
        assert got.dtype == torch.float32
        assert (got.double() - want).norm() / want.norm() < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("rows", "n"), [(3, 5), (4, 16), (2, 4097), (1, 9000)])
@pytest.mark.parametrize("moved", [0, 1])  # numbers, from an even address
def test_rows_are_copied_into_even_ones(rows, n, moved, dtype):
    t = torch.randn(2 * rows * n + moved).to(DEVICE, dtype)[moved:].view(2, rows, n)
    t[0, 0, 0], t[-1, -1, -1] = torch.nan, torch.inf
    found = triton_twin.even_rows(t)
    assert torch.equal(found.nan_to_num(), t.nan_to_num())
    assert bool(found[0, 0, 0].isnan())
    assert all(found.stride(d) * found.element_size() % 16 == 0 for d in (0, 1))


@pytest.mark.gpu
def test_tf32_is_rounded_not_cut_off():
    G, X = (torch.randn(6, 256, w, device=DEVICE) for w in (192, 136))
    products = G.double().transpose(1, 2) @ X.double()
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        got = triton_twin.gemm_square(G, X)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    for tensor, want in zip(got, (products.sum(0), products.square().sum(0)), strict=True):
        assert 1e-6 < (tensor.double() - want).norm() / want.norm() < 1e-3


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_pieces_add_up_to_the_whole_tile(monkeypatch, size):
    """Tiles cut into pieces of any size, the last one shorter: nothing lost, nothing twice, the same every time."""
    monkeypatch.setattr(triton_twin, "divide", lambda *_: size)
    monkeypatch.setattr(triton_twin, "_known", {})
    triton_twin._cut.cache_clear()
    G, X = (torch.randn(5, 32, w, device=DEVICE) for w in (130, 20))
    try:
        D, S = triton_twin.gemm_square(G, X)
        again = triton_twin.gemm_square(G, X)
    finally:
        triton_twin._cut.cache_clear()
    products = G.double().transpose(1, 2) @ X.double()
    for got, want, twice in zip((D, S), (products.sum(0), products.square().sum(0)), again, strict=True):
        assert (got.double() - want).norm() / want.norm() < 1e-5
        assert torch.equal(got, twice)


@given(st.integers(1, 400), st.integers(1, 64), st.integers(3, 2048))
def test_cuts_cover_every_group_of_every_tile_once(tiles, kappa, rows):
    cut = triton_twin._cut(tiles, kappa, rows, 132)
    if cut is None:
        return
    pieces = range(0, kappa, cut.size)
    assert 0 < cut.rest <= tiles == cut.whole + cut.rest
    assert 1 < len(pieces) <= kappa
    assert cut.partials == cut.rest * len(pieces)
    blocks = [(cut.whole + i % cut.rest, i // cut.rest) for i in range(cut.partials)]  # as the kernel reckons
    assert len(set(blocks)) == cut.partials
    assert {tile for tile, _ in blocks} == set(range(cut.whole, tiles))


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("slots", [False, True])
def test_folds_into_moments(cut, slots):
    G, X = (torch.randn(6, 20, w, device=DEVICE) for w in (130, 140))
    X[2, 3, 7] = torch.nan  # column 7 of the gradient: left out of both moments, and counted
    m, v = torch.randn(130, 140, device=DEVICE), torch.rand(130, 140, device=DEVICE)
    keep, gain, count = (0.9, 0.99), (-0.5, 0.25), torch.zeros((), dtype=torch.int64, device=DEVICE)
    products = G.double().transpose(1, 2) @ X.double()
    want = [
        a * old.double() + b * new
        for a, b, old, new in zip(keep, gain, (m, v), (products.sum(0), products.square().sum(0)), strict=True)
    ]
    for w, old, a in zip(want, (m, v), keep, strict=True):
        w[:, 7] = a * old[:, 7].double()
    device_side = torch.tensor([*keep, *gain], device=DEVICE) if slots else None
    if slots:
        keep, gain = (0.0, 0.0), (0.0, 0.0)
    into = Fold(m, v, keep, gain, count, device_side)
    triton_twin.gemm_square(G, X, into=into, config=triton_twin.GemmConfig(bm=64, bn=64, bk=16, split=cut))
    for got, w in zip((m, v), want, strict=True):
        assert (got.double() - w).norm() / w.norm() < 1e-5
    assert count.item() == 130

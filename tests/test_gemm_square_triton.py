"""The fused weight gradient and square against float64, on the GPU or interpreted on the CPU."""

from __future__ import annotations

import pytest
import torch

triton_twin = pytest.importorskip("invariant_adam.kernels.gemm_square_triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
TOLERANCE = {torch.float16: 1e-2, torch.float32: 1e-5}
if DEVICE == "cuda":  # the interpreter multiplies bfloat16 as the integers it keeps them in
    TOLERANCE[torch.bfloat16] = 1e-2


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("kappa", "rows", "m", "n"),
    [(1, 16, 8, 8), (3, 64, 128, 64), (5, 100, 72, 136), (4, 33, 30, 17), (2, 17, 200, 5), (7, 16, 257, 129)],
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

"""The weight gradient of a matrix product and the sum of its squared micro-batch parts.

For κ groups of R rows, G (κ, R, o) and X (κ, R, i):

    dW = Σ_k G_kᵀ X_k        S = Σ_k c_k (G_kᵀ X_k)²

`c` is None (all ones) or one coefficient per group. S is float32 at least. No path holds all κ
products at once.
"""

from __future__ import annotations

import contextlib
from types import ModuleType

import torch
from torch import Tensor

# The Triton twin, where there is a GPU for it; a constant, so that compiled code need not ask.
fused: ModuleType | None = None
if torch.cuda.is_available():
    with contextlib.suppress(ImportError):
        from . import gemm_square_triton as fused

# Bytes of per-group products alive at a time where they are formed in batches.
CHUNK_BYTES = 8 << 20
# Rows per group up to which the square is expanded into pairs of rows; above, forming each product is cheaper.
PAIR_ROWS = 2


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype squares are summed in: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def method(rows: int) -> str:
    """The name of the path that `gemm_square` takes for `rows` rows per group."""
    return "square" if rows == 1 else "pairs" if rows <= PAIR_ROWS else "products"


def takes_fused(G: Tensor) -> bool:
    """Whether the Triton twin serves these output gradients."""
    return fused is not None and G.is_cuda and method(G.shape[1]) == "products" and fused.serves(G)


def gemm_square(G: Tensor, X: Tensor, c: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """dW (o, i) and S (o, i) of G (κ, R, o) and X (κ, R, i); c (κ,) weighs the squares."""
    _, rows, out = G.shape
    X = X.to(G.dtype)
    how = method(rows)
    if how == "products":
        if fused is not None and takes_fused(G):
            call = fused.gemm_square_op if torch.compiler.is_compiling() else fused.gemm_square
            dW, S = call(G, X, c)
            return dW, S
        return _products(G, X, c)
    flat_g, flat_x = G.reshape(-1, out), X.reshape(-1, X.shape[-1])
    dW = flat_g.t() @ flat_x
    acc = wide(G.dtype)
    if how == "square":
        left, right = flat_g.to(acc).square(), flat_x.to(acc).square()
        if c is not None:
            left = left * c.to(acc)[:, None]
        return dW, left.t() @ right
    return dW, _pairs(G, X, c).to(acc)


def _pairs(G: Tensor, X: Tensor, c: Tensor | None) -> Tensor:
    """S by (Σ_a G_aᵀX_a)² = Σ_{a≤b} w_ab (G_a⊙G_b)ᵀ(X_a⊙X_b), w = 1 on the diagonal and 2 off it.

    In float64: where the rows of a group cancel, the terms do too, and in float32 what is left of them would be
    rounding, negative as often as not.
    """
    kappa, rows, out = G.shape
    pairs = [(a, b) for a in range(rows) for b in range(a, rows)]
    step = max(1, (CHUNK_BYTES >> 2) // max(1, 8 * len(pairs) * (out + X.shape[2])))
    S = torch.zeros(out, X.shape[2], dtype=torch.float64, device=G.device)
    for lo in range(0, kappa, step):
        g, x = G[lo : lo + step].double(), X[lo : lo + step].double()
        weighted = g if c is None else g * c[lo : lo + step].double()[:, None, None]
        left = torch.cat([weighted[:, a] * g[:, b] * (1 if a == b else 2) for a, b in pairs])
        right = torch.cat([x[:, a] * x[:, b] for a, b in pairs])
        S = S + left.t() @ right
    return S.clamp_min(0.0)


def _products(G: Tensor, X: Tensor, c: Tensor | None) -> tuple[Tensor, Tensor]:
    kappa, _, out = G.shape
    inner = X.shape[-1]
    acc = wide(G.dtype)
    if G.device.type == "cpu" and not torch.compiler.is_compiling():
        dW = torch.zeros(out, inner, dtype=acc)
        S = torch.zeros_like(dW)
        product = torch.empty(out, inner, dtype=G.dtype)
        scales = [1.0] * kappa if c is None else c.tolist()
        for k in range(kappa):
            torch.mm(G[k].t(), X[k], out=product)
            g = product.to(acc)
            dW.add_(g)
            S.addcmul_(g, g, value=scales[k])
        return dW.to(G.dtype), S
    dW = torch.zeros(out, inner, dtype=acc, device=G.device)
    S = torch.zeros_like(dW)
    step = max(1, min(kappa, CHUNK_BYTES // max(1, out * inner * acc.itemsize)))
    for lo in range(0, kappa, step):
        g = torch.bmm(G[lo : lo + step].transpose(1, 2), X[lo : lo + step]).to(acc)
        dW = dW + g.sum(0)
        sq = g.square()
        S = S + (sq.sum(0) if c is None else torch.einsum("k,koi->oi", c[lo : lo + step].to(acc), sq))
    return dW.to(G.dtype), S


def gemm_groups(G: Tensor, X: Tensor) -> Tensor:
    """All κ products G_kᵀX_k (κ, o, i): for a weight used more than once, whose uses add before
    squaring."""
    return torch.bmm(G.transpose(1, 2), X.to(G.dtype))


def sum_square(t: Tensor, c: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Σ_k t_k and Σ_k c_k t_k² of per-group gradients t (κ, ...)."""
    squares = t.to(wide(t.dtype)).square()
    if c is not None:
        squares = squares * c.to(squares.dtype).view(-1, *[1] * (t.ndim - 1))
    return t.sum(0), squares.sum(0)

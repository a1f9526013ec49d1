"""`gemm_square` in plain torch, for every device."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import cast

CHUNK_BYTES = 8 << 20  # of groups' products alive at a time
CACHE_BYTES = 1 << 18  # of all groups' products, up to which a CPU forms them at once: in its cache, by fewer calls
PAIR_ROWS = 2  # rows per group up to which a square is made from pairs of rows; above, each product is formed


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype squares are summed in: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def method(rows: int) -> str:
    """The name of the way that `gemm_square` takes for `rows` rows per group."""
    return "square" if rows == 1 else "pairs" if rows <= PAIR_ROWS else "products"


def gemm_square(G: Tensor, X: Tensor, c: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """dW (o, i) and S (o, i) of G (κ, R, o) and X (κ, R, i), of one dtype; c (κ,) weighs the squares."""
    how, acc = method(G.shape[1]), wide(G.dtype)
    if how == "products":
        return _products(G, X, c, acc)
    flat_g, flat_x = G.reshape(-1, G.shape[2]), X.reshape(-1, X.shape[2])
    dW = flat_g.t() @ flat_x
    if how == "pairs":
        return dW, _pairs(G, X, c).to(acc)
    left, right = cast(flat_g, acc).square(), cast(flat_x, acc).square()
    if c is not None:
        left = left * c.to(acc)[:, None]
    return dW, left.t() @ right


def _pairs(G: Tensor, X: Tensor, c: Tensor | None) -> Tensor:
    """S by (Σ_a G_aᵀX_a)² = Σ_{a≤b} w_ab (G_a⊙G_b)ᵀ(X_a⊙X_b), w = 1 on the diagonal and 2 off it.

    In float64: where the rows of a group cancel, so do the terms, and float32 would leave rounding errors of any sign.
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


def _products(G: Tensor, X: Tensor, c: Tensor | None, acc: torch.dtype) -> tuple[Tensor, Tensor]:
    (kappa, _, out), inner = G.shape, X.shape[2]
    here = G.is_cpu and not torch.compiler.is_compiling()
    if here and c is None and kappa * out * inner * acc.itemsize <= CACHE_BYTES:
        g = cast(torch.bmm(G.transpose(1, 2), X), acc)
        return cast(g.sum(0), G.dtype), g.square().sum(0)
    dW = torch.zeros(out, inner, dtype=acc, device=G.device)
    S = torch.zeros_like(dW)
    if here:
        product = torch.empty(out, inner, dtype=G.dtype)
        scales = [1.0] * kappa if c is None else c.tolist()
        for k in range(kappa):
            torch.mm(G[k].t(), X[k], out=product)
            g = product.to(acc)
            dW.add_(g)
            S.addcmul_(g, g, value=scales[k])
        return dW.to(G.dtype), S
    step = max(1, min(kappa, CHUNK_BYTES // max(1, out * inner * acc.itemsize)))
    for lo in range(0, kappa, step):
        g = torch.bmm(G[lo : lo + step].transpose(1, 2), X[lo : lo + step]).to(acc)
        dW = dW + g.sum(0)
        sq = g.square()
        S = S + (sq.sum(0) if c is None else torch.einsum("k,koi->oi", c[lo : lo + step].to(acc), sq))
    return dW.to(G.dtype), S


def gemm_groups(G: Tensor, X: Tensor) -> Tensor:
    """All κ products G_kᵀX_k (κ, o, i): those of a weight's several uses are added before they are squared."""
    return torch.bmm(G.transpose(1, 2), X.to(G.dtype))


def gemm_rows(G: Tensor, X: Tensor, rows: Tensor, rounded: bool) -> Tensor:
    """Some rows of each product G_kᵀX_k (κ, n, i), named by `rows` (κ, n); no product is formed as a whole.

    They are float32 at least, and `rounded` to the dtype of G on the way, or not.
    """
    (kappa, R, out), n, X, acc = G.shape, rows.shape[1], X.to(G.dtype), wide(G.dtype)

    def product(g: Tensor, x: Tensor) -> Tensor:
        if rounded or g.dtype == acc:
            return (g.mT @ x).to(acc)
        return torch.bmm(g.mT, x, out_dtype=acc) if g.is_cuda else g.mT.to(acc) @ x.to(acc)

    if n >= out:
        return torch.stack([product(G[k : k + 1], X[k : k + 1])[0, rows[k]] for k in range(kappa)])
    some = max(CHUNK_BYTES, G.numel() * G.element_size() // 8)  # bytes that are picked at a time: little beside G
    room = max(1, some // max(1, R * G.element_size()))  # columns
    step, width = max(1, room // n), min(n, room)
    found = []
    for lo in range(0, kappa, step):
        g, x, at = (t[lo : lo + step] for t in (G, X, rows))
        each = [product(g.gather(2, part[:, None].expand(-1, R, -1)), x) for part in at.split(width, 1)]
        found.append(each[0] if len(each) == 1 else torch.cat(each, 1))
    return found[0] if len(found) == 1 else torch.cat(found)


def sum_square(t: Tensor, c: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Σ_k t_k and Σ_k c_k t_k² of per-group gradients t (κ, ...)."""
    squares = cast(t, wide(t.dtype)).square()
    if c is not None:
        squares = squares * c.to(squares.dtype).view(-1, *[1] * (t.ndim - 1))
    return t.sum(0), squares.sum(0)

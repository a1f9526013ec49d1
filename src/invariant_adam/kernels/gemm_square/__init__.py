"""The weight gradient of a matrix product and the sum of its squared micro-batch parts.

For κ groups of R rows, G (κ, R, o) and X (κ, R, i):

    dW = Σ_k G_kᵀ X_k        S = Σ_k c_k (G_kᵀ X_k)²

`c` is None (all ones) or one coefficient per group. S is float32 at least. No path holds all κ products at once.
"""

from __future__ import annotations

from torch import Tensor
from torch.compiler import is_compiling

from .. import Serving, cast, twin
from . import torch as plain
from .torch import gemm_groups, method, sum_square, wide

__all__ = ["fused", "gemm_groups", "gemm_rows", "gemm_square", "method", "sum_square", "takes_fused", "wide"]

fused = twin(__name__)  # a constant, so that compiled code need not ask


def takes_fused(G: Tensor) -> bool:
    """Whether Triton serves these output gradients."""
    if fused is None or not Serving.fused or not G.is_cuda:
        return False
    return method(G.shape[1]) == "products" and fused.serves(G)


def gemm_square(G: Tensor, X: Tensor, c: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """dW (o, i) and S (o, i) of G (κ, R, o) and X (κ, R, i); c (κ,) weighs the squares."""
    X = cast(X, G.dtype)
    if not takes_fused(G):
        return plain.gemm_square(G, X, c)
    if is_compiling():
        return fused.gemm_square_op(G.flatten(0, 1), X.flatten(0, 1), c, G.shape[0])
    return fused.gemm_square(G, X, c)


def gemm_rows(G: Tensor, X: Tensor, rows: Tensor) -> Tensor:
    """Some rows of each product G_kᵀX_k (κ, n, i), named by `rows` (κ, n), in float32 at least.

    They are rounded where `gemm_square` rounds the products that it squares: they serve as the cross terms 2 U_k∘E_k of
    (U_k + E_k)², and where the two cancel, another rounding of U_k would leave anything, negative squares too.
    """
    return plain.gemm_rows(G, X, rows, rounded=method(G.shape[1]) == "products" and not takes_fused(G))

"""Sums of rows, the gradients of biases and of norm weights, and the sum of their squared micro-batch parts.

For output gradients G (κ, R, C) of κ groups of R rows, and rows X of the same shape that a layer norm scales by its
weight after x̂ = (x − μ_r) q_r per row:

    a_k = Σ_r G_k      (bias)          e_k = Σ_r G_k x̂_k      (weight)          S = Σ_k c_k a_k², Σ_k c_k e_k²

On a GPU each is one read of its operands. A compiled graph has the plain formulas, fused with what makes the operands.
"""

from __future__ import annotations

from torch import Tensor
from torch.compiler import is_compiling

from .. import Serving, twin
from . import torch as plain

fused = twin(__name__)  # a constant, so that compiled code need not ask


def takes_fused(G: Tensor) -> bool:
    """Whether Triton serves these rows."""
    return fused is not None and Serving.fused and G.is_cuda and not is_compiling() and fused.serves(G)


def row_sums(G: Tensor, c: Tensor | None = None, shares: bool = True) -> tuple[Tensor | None, Tensor]:
    """The sums of each group (κ, C), if asked for, and the pair (2, C): their sum and the sum of their squares."""
    return (fused if takes_fused(G) else plain).row_sums(G, c, shares)


def norm_sums(
    G: Tensor, X: Tensor, mean: Tensor, rstd: Tensor, c: Tensor | None = None, shares: bool = True
) -> tuple[Tensor | None, Tensor]:
    """The sums e and a of each group (κ, 2, C), if asked for, and the pairs (4, C) of weight and bias.

    mean and rstd are (κ, R).
    """
    return (fused if takes_fused(G) and fused.serves(X) else plain).norm_sums(G, X, mean, rstd, c, shares)

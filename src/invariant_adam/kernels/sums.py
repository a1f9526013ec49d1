"""Sums of rows, the gradients of biases and of norm weights, and the sum of their squared micro-batch parts.

For output gradients G (κ, R, C) of κ groups of R rows, and rows X of the same shape that a layer norm scales by its
weight after x̂ = (x − μ_r) q_r per row:

    a_k = Σ_r G_k      (bias)          e_k = Σ_r G_k x̂_k      (weight)          S = Σ_k c_k a_k², Σ_k c_k e_k²

On a GPU each is one read of its operands; a compiled graph fuses the plain formulas with what makes the operands.
"""

from __future__ import annotations

import contextlib
from types import ModuleType

import torch
from torch import Tensor

from .gemm_square import sum_square

# The Triton twin, where there is a GPU for it.
fused: ModuleType | None = None
if torch.cuda.is_available():
    with contextlib.suppress(ImportError):
        from . import sums_triton as fused


def takes_fused(G: Tensor) -> bool:
    """Whether the Triton twin serves these rows."""
    return fused is not None and G.is_cuda and not torch.compiler.is_compiling() and fused.serves(G)


def row_sums(G: Tensor, c: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The sums of each group (κ, C), and the pair (2, C): their sum and the sum of their squares."""
    if fused is not None and takes_fused(G):
        each, pair = fused.row_sums(G, c)
        return each, pair
    each = G[:, 0] if G.shape[1] == 1 else G.sum(1)
    total, squares = sum_square(each, c)
    return each, torch.stack([total.to(squares.dtype), squares])


def norm_sums(G: Tensor, X: Tensor, mean: Tensor, rstd: Tensor, c: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The sums e and a of each group (κ, 2, C), and the pairs (4, C) of weight and bias; mean and rstd are (κ, R)."""
    if fused is not None and takes_fused(G) and fused.serves(X):
        each, pairs = fused.norm_sums(G, X, mean, rstd, c)
        return each, pairs
    hat = (X - mean[..., None]) * rstd[..., None]
    each = torch.stack([(G * hat).sum(1), G.sum(1).to(hat.dtype)], 1)
    total, squares = sum_square(each, c)
    return each, torch.stack([total.to(squares.dtype), squares], 1).flatten(0, 1)

"""`row_sums` and `norm_sums` in plain torch, for every device."""

from __future__ import annotations

import torch
from torch import Tensor

from ..gemm_square import sum_square


def row_sums(G: Tensor, c: Tensor | None = None, shares: bool = True) -> tuple[Tensor, Tensor]:
    """a (κ, C) and its pair (2, C)."""
    each = G[:, 0] if G.shape[1] == 1 else G.sum(1)
    total, squares = sum_square(each, c)
    return each, torch.stack([total.to(squares.dtype), squares])


def norm_sums(
    G: Tensor, X: Tensor, mean: Tensor, rstd: Tensor, c: Tensor | None = None, shares: bool = True
) -> tuple[Tensor, Tensor]:
    """e and a (κ, 2, C) and their pairs (4, C)."""
    hat = (X - mean[..., None]) * rstd[..., None]
    each = torch.stack([(G * hat).sum(1), G.sum(1).to(hat.dtype)], 1)
    total, squares = sum_square(each, c)
    return each, torch.stack([total.to(squares.dtype), squares], 1).flatten(0, 1)

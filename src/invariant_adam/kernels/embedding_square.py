"""The gradient of an embedding table and the sum of its squared micro-batch parts.

For ids (κ, R) and G (κ, R, D), group k's gradient of row v is the sum of G over the places where
ids = v. Repeated tokens within a group add before they are squared; a table of κ × V rows is never
formed. On a GPU a Triton kernel does it, in eager mode and in compiled graphs.
"""

from __future__ import annotations

import contextlib
from types import ModuleType

import torch
from torch import Tensor

from .gemm_square import wide

# The Triton twin, where there is a GPU for it; a constant, so that compiled code need not ask.
fused: ModuleType | None = None
if torch.cuda.is_available():
    with contextlib.suppress(ImportError):
        from . import embedding_square_triton as fused


def takes_fused(ids: Tensor, G: Tensor, rows: int) -> bool:
    """Whether the Triton twin serves these operands."""
    return fused is not None and G.is_cuda and fused.serves(ids, G, rows)


def embedding_square(ids: Tensor, G: Tensor, rows: int, c: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """dW (V, D) and S (V, D) for ids (κ, R), G (κ, R, D) and a table of `rows` = V rows."""
    if fused is not None and takes_fused(ids, G, rows):
        call = fused.embedding_square_op if torch.compiler.is_compiling() else fused.embedding_square
        dW, S = call(ids, G, rows, c)
        return dW, S
    kappa, width = ids.shape[0], G.shape[-1]
    acc = wide(G.dtype)
    key = (ids + rows * torch.arange(kappa, device=ids.device)[:, None]).reshape(-1)
    # Sort and number the runs: shapes stay static, where torch.unique would break a compiled graph.
    key, order = torch.sort(key)
    segment = torch.cat([key.new_zeros(1), (key[1:] != key[:-1]).to(key.dtype)]).cumsum(0)
    total = G.new_zeros(key.numel(), width, dtype=acc).index_add(0, segment, G.reshape(-1, width)[order].to(acc))
    key_of = key.new_zeros(key.numel()).index_put((segment,), key)  # segments past the last stay 0
    row = key_of % rows
    zero = G.new_zeros(rows, width, dtype=acc)
    squares = total.square()
    if c is not None:
        squares = squares * c.to(acc)[key_of // rows, None]
    return zero.index_add(0, row, total).to(G.dtype), zero.index_add(0, row, squares)


def embedding_groups(ids: Tensor, G: Tensor, rows: int) -> Tensor:
    """All κ gradients (κ, V, D)."""
    kappa, width = ids.shape[0], G.shape[-1]
    key = (ids + rows * torch.arange(kappa, device=ids.device)[:, None]).reshape(-1)
    table = G.new_zeros(kappa * rows, width).index_add(0, key, G.reshape(-1, width))
    return table.view(kappa, rows, width)

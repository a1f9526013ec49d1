"""`embedding_square` in plain torch, for every device."""

from __future__ import annotations

import torch
from torch import Tensor

from ..gemm_square import wide

CHUNK = 1 << 24  # pairs of places that are compared at a time


def embedding_square(ids: Tensor, G: Tensor, rows: int, c: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """dW (V, D) and S (V, D) for ids (κ, R), G (κ, R, D) and a table of `rows` = V rows; c (κ,) weighs the squares."""
    width, acc = G.shape[-1], wide(G.dtype)
    # Sort and number the runs: shapes stay static, where torch.unique would break a compiled graph.
    key, order = torch.sort(_keys(ids, rows))
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
    table = G.new_zeros(kappa * rows, width).index_add(0, _keys(ids, rows), G.reshape(-1, width))
    return table.view(kappa, rows, width)


def embedding_rows(ids: Tensor, G: Tensor, tokens: Tensor) -> Tensor:
    """Group k's gradient of the rows that `tokens` (κ, n) name, (κ, n, D): Σ_r [ids_kr = token] G_kr."""
    room, acc = max(1, CHUNK // max(1, ids.shape[1])), wide(G.dtype)
    found = []
    for k in range(ids.shape[0]):
        for part in tokens[k].split(room):
            found.append((part[:, None] == ids[k]).to(acc) @ G[k].to(acc))
    return torch.cat(found).view(*tokens.shape, G.shape[-1])


def _keys(ids: Tensor, rows: int) -> Tensor:
    """Each place's row in a table of κ × V rows."""
    return (ids + rows * torch.arange(ids.shape[0], device=ids.device)[:, None]).reshape(-1)

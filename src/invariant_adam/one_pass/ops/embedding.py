# ruff: noqa: D102 - forward and backward
"""Rows of a table, named by ids; repeated tokens of one micro-batch add up before they are squared."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels.embedding_square import embedding_groups, embedding_rows, embedding_square
from ...kernels.gemm_square import wide
from ..dispatch import dispatch
from ..groups import Groups, UnsupportedUse, join
from ..mini_batch import MiniBatch
from ..weight import Entry, Link, names_of
from . import base
from .lookup import rows

EMBEDDING = base.Kernel(embedding_square, embedding_groups)


class Embedding(base.Squaring):
    """Rows of the table w (V, D) named by ids; the settings are the padding's id."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, use: base.Use, w: Tensor, tag: Any) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.use, ctx.rows = use, w.shape[0]
        return base.owned(F.embedding(ids, w))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (ids,) = ctx.saved_tensors
        groups, axis, padding = ctx.use.groups, ctx.use.axis, ctx.use.settings
        if padding is not None:
            g = g.masked_fill((ids == padding)[..., None], 0)
        rows = zip(groups.split(ids, axis, 0), groups.split(g, axis, 1), strict=True)
        operands = [(i, G, ctx.rows) for i, G in rows]
        return base.returned(ctx, None, base.deliver(groups, base.wanted(ctx, 0), EMBEDDING, operands))


class Linked(base.Squaring):
    """`Embedding` of a table that has later uses, with a `Link` to them; and with those of its earlier uses."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, use: base.Use, w: Tensor, tag: Any, *links: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(ids, *links[1::2])
        ctx.use, ctx.rows = use, w.shape[0]
        y = base.owned(F.embedding(ids, w))
        return y, torch.zeros((), dtype=wide(w.dtype), device=y.device).expand(ids.numel(), y.shape[-1])

    @staticmethod
    def backward(ctx: Any, g: Tensor, later: Tensor) -> Any:
        ids, *earlier = ctx.saved_tensors
        groups, axis, padding = ctx.use.groups, ctx.use.axis, ctx.use.settings
        base.refuse_penalty("a table that is also the head", ctx.use)
        if padding is not None:
            g = g.masked_fill((ids == padding)[..., None], 0)
        Is, Gs = groups.split(ids, axis, 0), groups.split(g, axis, 1)
        owed = [v for t in earlier for v in (_rows(groups, Is, Gs, t), None)]
        pair: base.Gradients = base.NOTHING
        if base.wanted(ctx, 0) is not None:
            Hs = groups.split(later, 0, 1)
            each = zip(groups.stretches, Is, Gs, Hs, strict=True)
            made = [_with_cross_terms(i, G, H, ctx.rows, groups.coefficients(s)) for s, i, G, H in each]
            pair = made[0] if len(made) == 1 else (made[0][0] + made[1][0], made[0][1] + made[1][1])
        # The pair is not counted: that of the table's last use is.
        return (*base.returned(ctx, None, pair)[:4], *owed)


def _with_cross_terms(ids: Tensor, G: Tensor, later: Tensor, rows: int, c: Tensor | None) -> tuple[Tensor, Tensor]:
    """`embedding_square` plus 2 Σ_k c_k E_k∘U_k, U_k the `later` uses' share at each place (κ, R, D).

    The second may be negative: `Groups.bounded` looks after the sum, which is complete when all uses have come.
    """
    dW, S = embedding_square(ids, G, rows, c)
    cross = 2 * G.to(S.dtype) * later.to(S.dtype)
    if c is not None:
        cross = cross * c.to(S.dtype)[:, None, None]
    return dW, S.index_add(0, ids.flatten(), cross.flatten(0, 1))  # Σ over a token's places of U_k∘g is U_k∘E_k


def _rows(groups: Groups, Is: list[Tensor], Gs: list[Tensor], tokens: Tensor) -> Tensor:
    """Each micro-batch's share of the table at the rows of other tokens: (n, D) for tokens (n,)."""
    each = zip(Is, Gs, groups.split(tokens, 0, 0), strict=True)
    return join([embedding_rows(ids, G, at).flatten(0, 1) for ids, G, at in each])


def _of_table(mini: MiniBatch, entry: Entry, ids: Tensor, use: base.Use) -> Tensor:
    again = not torch.compiler.is_compiling() and torch._C._current_graph_task_id() >= 0  # a checkpoint's second run
    if not again and entry.headed and mini.probe is None:
        raise UnsupportedUse(
            f"{entry.name} goes through embedding after linear, which it did not when the model was checked; call the "
            "model once per backward, with the same options as then, or loop over micro-batches"
        )
    if again and len(entry.links) > 1:
        raise UnsupportedUse(
            f"{entry.name} goes through several embeddings inside of checkpoints; take the embeddings out of them"
        )
    links = () if again else entry.links
    y, rows = base.call(Linked, ids, use, *[t for link in links for t in link])
    if not again:
        tokens = ids.movedim(use.axis, 0).reshape(-1)
        entry.links = (*links, Link(rows, tokens))
    return y  # type: ignore[no-any-return]


def _line(seen: base.Seen) -> base.Line:
    rows = seen.per_group(seen.x.numel())
    return base.Line(rows, "embedding_square", 3 * rows * seen.groups.kappa * seen.shape[1] * seen.itemsize)


def _padding(index: int | None, rows: int) -> int | None:
    return index if index is None or index >= 0 else index + rows


@base.operation("embedding", line=_line)
def embedding(
    mini: MiniBatch, func: Any, input: Tensor, weight: Any, padding_idx: int | None = None, max_norm: Any = None,
    norm_type: float = 2.0, scale_grad_by_freq: bool = False, sparse: bool = False,
) -> Any:  # fmt: skip
    """Rows of a table."""
    if max_norm is not None or scale_grad_by_freq:
        option = "max_norm" if max_norm is not None else "scale_grad_by_freq"
        raise UnsupportedUse(
            f"{names_of((mini.handle_of(weight),))} goes through embedding with {option}, which depends on the "
            "whole mini-batch; leave it out or loop over micro-batches"
        )
    if not mini.holds(weight):
        return NotImplemented
    use = base.use_of(mini, "embedding", input, 0, (weight,), _padding(padding_idx, weight.shape[0]))
    if use is None:
        h = mini.handle_of(weight)
        if h is None or padding_idx is not None:
            return NotImplemented
        return rows(mini, "embedding", h, input, lambda t: F.embedding(input, t))
    table = base.table_of(use.weights[0])
    return base.call(Embedding, input, use) if table is None else _of_table(mini, table, input, use)


@base.operation("embedding_bag")
def embedding_bag(
    mini: MiniBatch, func: Any, input: Tensor, weight: Any, offsets: Any = None, max_norm: Any = None,
    norm_type: float = 2, scale_grad_by_freq: bool = False, mode: str = "mean", sparse: bool = False,
    per_sample_weights: Any = None, include_last_offset: bool = False, padding_idx: int | None = None,
) -> Any:  # fmt: skip
    """An embedding reduced over the second dimension of its ids (B, N)."""
    if offsets is not None or input.ndim != 2:
        raise UnsupportedUse(
            f"{names_of((mini.handle_of(weight),))} goes through embedding_bag with offsets; pad the bags to ids of "
            "shape (batch, length) with padding_idx"
        )
    if mini.holds(input) or not mini.holds(weight):
        return NotImplemented
    padding = _padding(padding_idx, weight.shape[0])
    rows = dispatch(F.embedding, (input, weight, padding, max_norm, norm_type, scale_grad_by_freq), {})
    kept = torch.ones_like(input, dtype=torch.bool) if padding is None else input != padding
    if mode == "max":
        rows = rows.masked_fill(~kept[..., None], -torch.inf).amax(1)
        y = rows.masked_fill(~kept.any(1, keepdim=True), 0)
    else:
        scale = kept.to(rows.dtype)
        if per_sample_weights is not None:
            scale = scale * per_sample_weights
        y = (rows * scale[..., None]).sum(1)
        if mode == "mean":
            y = y / kept.sum(1, keepdim=True).clamp(min=1)
    options = {"mode": mode, "per_sample_weights": per_sample_weights, "padding_idx": padding_idx}
    return base.as_called(y, func, input, weight, **options)

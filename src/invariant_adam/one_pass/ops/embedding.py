# ruff: noqa: D102 - forward and backward
"""Rows of a table, named by ids; repeated tokens of one micro-batch add up before they are squared."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels.embedding_square import embedding_groups, embedding_square
from ..dispatch import dispatch
from ..groups import UnsupportedUse
from ..mini_batch import MiniBatch
from ..weight import names_of
from . import base

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
    return NotImplemented if use is None else base.call(Embedding, input, use)


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

"""Attention.

`nn.MultiheadAttention` is handled whole, because inside it the data is (T, B, E), the batch second. Its projections are
products (see `linear`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..dispatch import dispatch, own_copies
from ..groups import UnsupportedUse
from ..mini_batch import MiniBatch
from ..weight import Handle, lift, names_of
from . import base
from .linear import linear_with, products


def _rows(mini: MiniBatch, weight: Any, sizes: list[int]) -> list[Any]:
    """A packed weight's rows apart. Disjoint rows share no element, so their squares need no cross terms."""
    h = mini.handle_of(weight)
    if h is None:
        return [None] * len(sizes) if weight is None else list(weight.split(sizes))
    tags = torch.split(h.tag, sizes, dim=1 if h.grouped else 0)
    entries = [h.entry, *[None] * (len(sizes) - 1)]  # only the first piece counts as the use of the parameter
    pieces = zip(torch.split(h.value, sizes), tags, entries, strict=True)
    return [lift(value, Handle(value, tag, h.grouped, entry, label=h.label)) for value, tag, entry in pieces]


def _project(
    mini: MiniBatch, query: Tensor, key: Tensor, value: Tensor, weight: Any, bias: Any, separate: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v (T, B, E) from packed or separate projections."""
    E = query.shape[-1]

    def apply(x: Tensor, w: Any, b: Any) -> Tensor:
        return linear_with(mini, "multi_head_attention", x, w, b, axis=1)  # type: ignore[no-any-return]

    def parted(y: Tensor, n: int) -> Iterable[Tensor]:  # each alone in memory, as torch has them
        return y.unflatten(-1, (n, E)).movedim(-2, 0).contiguous()  # type: ignore[no-any-return]

    if separate is None and query is key and key is value:
        q, k, v = parted(apply(query, weight, bias), 3)
    elif separate is None and key is value:
        w, b = _rows(mini, weight, [E, 2 * E]), _rows(mini, bias, [E, 2 * E])
        q, (k, v) = apply(query, w[0], b[0]), parted(apply(key, w[1], b[1]), 2)
    else:
        w, b = separate or _rows(mini, weight, [E, E, E]), _rows(mini, bias, [E, E, E])
        q, k, v = map(apply, (query, key, value), w, b)
    return q, k, v


def _met(mini: MiniBatch, x: Any) -> Any:
    """A value of parameters alone (T, B, E), repeated for each sample, as one that each micro-batch has its copy of."""
    h = mini.handle_of(x)
    if h is None or x.shape[1] != mini.groups.batch:
        return x
    copies = own_copies(mini, "add", h, 1, x.shape)  # (groups, T, samples, E) per stretch
    return torch.cat([own.transpose(1, 2).flatten(0, 1) for own in copies]).transpose(0, 1)


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -math.inf)


@base.operation("multi_head_attention_forward", "multi_head_attention", line=products)
def multi_head_attention(
    mini: MiniBatch, func: Any, query: Tensor, key: Tensor, value: Tensor, embed_dim_to_check: int, num_heads: int,
    in_proj_weight: Any, in_proj_bias: Any, bias_k: Any, bias_v: Any, add_zero_attn: bool, dropout_p: float,
    out_proj_weight: Any, out_proj_bias: Any, training: bool = True, key_padding_mask: Any = None,
    need_weights: bool = True, attn_mask: Any = None, use_separate_proj_weight: bool = False, q_proj_weight: Any = None,
    k_proj_weight: Any = None, v_proj_weight: Any = None, static_k: Any = None, static_v: Any = None,
    average_attn_weights: bool = True, is_causal: bool = False,
) -> Any:  # fmt: skip
    """Self- and cross-attention with packed or separate projections."""
    names = names_of([mini.handle_of(t) for t in (in_proj_weight, q_proj_weight, out_proj_weight)])
    if query.ndim != 3:
        raise UnsupportedUse(f"{names} goes through attention without a batch dimension; add one")
    extra = bias_k is not None or add_zero_attn or static_k is not None or static_v is not None
    held = [mini.holds(t) for t in (query, key, value)]
    if extra or all(held):
        raise UnsupportedUse(
            f"{names} goes through attention with add_bias_kv, add_zero_attn, static keys or all inputs made from "
            "parameters alone; leave them out, or loop over micro-batches"
        )
    if any(held):  # a learned query, or memory
        one = key is value
        query, key = _met(mini, query), _met(mini, key)
        value = key if one else _met(mini, value)
    for t in (query, key, value):
        if t.shape[1] % mini.groups.batch:
            raise UnsupportedUse(
                f"{names} goes through attention with an input of {t.shape[1]} sequences for a batch of "
                f"{mini.groups.batch} samples; keep every sample's sequences together"
            )
    length, rows, E = query.shape
    source, width = key.shape[0], E // num_heads
    separate = (q_proj_weight, k_proj_weight, v_proj_weight) if use_separate_proj_weight else None
    q, k, v = _project(mini, query, key, value, in_proj_weight, in_proj_bias, separate)
    # (T, B, E) -> (B·H, T, E/H), and from here on what torch does, number for number.
    q, k, v = (t.reshape(len(t), rows * num_heads, width).transpose(0, 1) for t in (q, k, v))
    if is_causal and key_padding_mask is None and not need_weights:
        mask = None
    else:
        mask = _additive(attn_mask, query.dtype)
        mask = mask[None] if mask is not None and mask.ndim == 2 else mask
        is_causal = is_causal and key_padding_mask is None
    padding = _additive(key_padding_mask, query.dtype)
    if padding is not None:
        padding = padding.view(rows, 1, 1, source).expand(-1, num_heads, -1, -1).reshape(-1, 1, source)
        mask = padding if mask is None else mask + padding
    p = dropout_p if training else 0.0
    if need_weights:
        scaled = q * math.sqrt(1.0 / float(width))
        scores = torch.bmm(scaled, k.mT) if mask is None else torch.baddbmm(mask, scaled, k.mT)
        weights = scores.softmax(-1)
        if p > 0.0:
            weights = F.dropout(weights, p)
        out = torch.bmm(weights, v).transpose(0, 1)
        weights = weights.view(rows, num_heads, length, source)
        weights = weights.mean(1) if average_attn_weights else weights
    else:
        if mask is not None:
            mask = mask[None] if mask.shape[0] == 1 else mask.view(rows, num_heads, -1, source)
        q, k, v = (t.view(rows, num_heads, -1, width) for t in (q, k, v))
        out, weights = F.scaled_dot_product_attention(q, k, v, mask, p, is_causal), None
        out = out.permute(2, 0, 1, 3)
    out = out.contiguous().view(length, rows, E)  # torch's next product has its rows side by side, whatever made them
    return linear_with(mini, "multi_head_attention", out, out_proj_weight, out_proj_bias, axis=1), weights


@base.operation("scaled_dot_product_attention")
def scaled_dot_product_attention(
    mini: MiniBatch, func: Any, query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    """Attention with a learned bias for a mask, in plain operations: the fused kernels do not differentiate it."""
    if any(mini.holds(t) for t in (query, key, value)):
        return NotImplemented
    given = query, key, value, attn_mask
    if enable_gqa:
        times = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(times, -3), value.repeat_interleave(times, -3)
    scores = query @ key.transpose(-1, -2)
    scores = scores * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    scores = dispatch(torch.add, (scores, attn_mask), {})
    y = F.dropout(scores.softmax(-1), dropout_p) @ value
    if dropout_p:  # which has drawn its numbers
        return y
    return base.as_called(y, func, *given, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)

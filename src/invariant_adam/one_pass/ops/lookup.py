# ruff: noqa: D102 - forward and backward
"""Rows of a table that are named by constants, as those of a relative position bias.

The same places of every micro-batch name the same rows, so that one addition serves all κ gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...kernels import cast
from ...kernels.gemm_square import wide
from ..mini_batch import MiniBatch
from ..weight import Handle, apart, lift
from . import base


class Rows(base.Squaring):
    """κ copies without memory of `found`, the rows of w (V, ...) that an index names: (κ, *index.shape, ...)."""

    @staticmethod
    def forward(ctx: Any, index: Tensor, use: base.Use, w: Tensor, tag: Tensor, found: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.use, ctx.shape = use, w.shape
        return found.unsqueeze(0).expand(use.groups.kappa, *found.shape)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (index,) = ctx.saved_tensors
        V, *tail = ctx.shape
        places = index.reshape(-1) % V  # an index may count from the end
        G = g.reshape(g.shape[0], places.shape[0], *tail)
        G = cast(G, wide(G.dtype))
        shares = G.new_zeros(G.shape[0], V, *tail).index_add_(1, places, G)
        return base.returned(ctx, None, base.deliver_sums(ctx.use.groups, base.wanted(ctx, 0), [shares]))


def rows(mini: MiniBatch, name: str, table: Handle, index: Any, find: Callable[[Tensor], Tensor]) -> Any:
    """The rows that an integer tensor names and `find` finds in a table; left to `fallback` where it is batched."""
    if mini.holds(index) or index.dtype not in (torch.int64, torch.int32):
        return NotImplemented
    if mini.is_batched(index, table.label, name):
        return NotImplemented
    mini.note((table,), name)
    if mini.probe is not None:
        mini.probe.saw(table.label, name, index)
    if table.direct:
        mini.serve(table, f"a value of {name}", delivers=False)
    # A compiled graph returns so small a pair, which may then wait for others to be folded with.
    weight = mini.weight_of(table, None, "copies", None if torch.compiler.is_compiling() else 0)
    found, use = find(apart(table.value)), base.Use(mini.groups, 0, None, (weight,))
    tag = base.call(Rows, index, use, found.detach() if found.requires_grad else found)
    return lift(found, Handle(found, tag, True, None, label=table.label))


@base.operation("index_select")
def index_select(mini: MiniBatch, func: Any, input: Any, dim: Any, index: Any) -> Any:
    """Rows along the first dimension; others are left to `fallback`."""
    h = mini.handle_of(input)
    if h is None or dim != 0 or not h.value.ndim:
        return NotImplemented
    return rows(mini, "index_select", h, index, lambda t: func(t, 0, index))

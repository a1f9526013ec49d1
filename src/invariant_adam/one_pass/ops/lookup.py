# ruff: noqa: D102 - forward and backward
"""Rows of a table that are named by constants, as those of a relative position bias; or by experts, as their biases.

The same places of every micro-batch name the same rows, so that one addition serves all κ gradients. A vector that
names the expert of each row comes from the batch. It fits where the rows that it meets were picked by index: their
groups are known, and so those of the names.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ...kernels import cast
from ...kernels.gemm_square import wide
from ..groups import UnsupportedUse
from ..mini_batch import MiniBatch
from ..routing import Routed
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


class Chosen(base.Squaring):
    """The rows `found` of w (V, ...) that a vector of indices names, one for each of the rows they meet."""

    @staticmethod
    def forward(ctx: Any, index: Tensor, use: base.Use, w: Tensor, tag: Tensor, found: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.use, ctx.shape = use, w.shape
        return found.view_as(found)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (index,) = ctx.saved_tensors
        groups, (V, *tail) = ctx.use.groups, ctx.shape
        G = cast(g, wide(g.dtype))
        places = ctx.use.routed.ids * V + index % V
        shares = G.new_zeros(groups.kappa * V, *tail).index_add_(0, places, G).view(groups.kappa, V, *tail)
        return base.returned(ctx, None, base.deliver_at_once(groups, ctx.use.weights[0], base.SUMS, shares))


class Looked(Handle):
    """Rows that a vector of indices names, of which nobody knows yet what they meet.

    Met by rows that were picked by index, each has the group of the row that it meets. Otherwise the indices must be
    constants, and the rows are as any value made of parameters alone.
    """

    def __init__(self, mini: MiniBatch, name: str, table: Handle, index: Tensor, value: Tensor) -> None:
        super().__init__(value, value, True, None, label=table.label)
        del self.tag  # it is made where it is asked for
        self.mini, self.name, self.table, self.index = mini, name, table, index

    @cached_property
    def tag(self) -> Tensor:  # type: ignore[override]
        """κ copies: of constants."""
        mini, site = self.mini, (self.label, self.name)
        if site in mini.facts.findings.chosen:
            raise UnsupportedUse(
                f"{self.label} goes through {self.name} with an index that comes from the batch, and its rows then "
                "meet others than those that were picked by index; if these are experts of transformers, "
                'model.set_experts_implementation("eager") is exact; else loop over micro-batches'
            )
        if mini.probe is not None:
            mini.probe.saw(self.label, self.name, self.index)
        return _copies(mini, self.table, self.index, self.value)

    @property
    def names_rows(self) -> bool:
        """Whether the indices name the row of each: one alone may as well be a constant, which meets one row today."""
        return len(self.index) > 1 or (self.label, self.name) in self.mini.facts.findings.chosen

    def meeting(self, routed: Routed) -> Tensor:
        """The rows, beside as many that were picked by index."""
        mini, site = self.mini, (self.label, self.name)
        if site not in mini.facts.findings.chosen:
            mini.facts.find(chosen=mini.facts.findings.chosen | {site})
        weight = mini.weight_of(self.table, None, "copies", None)
        use = base.Use(mini.groups, 0, routed, (weight,))
        return base.call(Chosen, self.index, use, self.value.detach())  # type: ignore[no-any-return]


def rows(mini: MiniBatch, name: str, table: Handle, index: Any, find: Callable[[Tensor], Tensor]) -> Any:
    """The rows that an integer tensor names and `find` finds in a table; left to `fallback` where it is batched."""
    if mini.holds(index) or index.dtype not in (torch.int64, torch.int32):
        return NotImplemented
    chosen = (table.label, name) in mini.facts.findings.chosen
    if not chosen and mini.is_batched(index, table.label, name):
        return NotImplemented
    if chosen and torch.compiler.is_compiling():
        raise UnsupportedUse(
            f"{table.label} goes through {name} with an index that comes from the batch and meets rows that were "
            "picked by index, whose places a compiled graph does not tell; keep both out of torch.compile "
            "(torch.compiler.disable), or loop over micro-batches"
        )
    mini.note((table,), name)
    if table.direct:
        mini.serve(table, f"a value of {name}", delivers=False)
    found = find(apart(table.value))
    if index.ndim == 1 and table.direct and not torch.compiler.is_compiling():
        return lift(found, Looked(mini, name, table, index, found))
    if mini.probe is not None:
        mini.probe.saw(table.label, name, index)
    return lift(found, Handle(found, _copies(mini, table, index, found), True, None, label=table.label))


def _copies(mini: MiniBatch, table: Handle, index: Tensor, found: Tensor) -> Tensor:
    """The κ copies of rows that constants name."""
    # A compiled graph returns so small a pair, which may then wait for others to be folded with.
    weight = mini.weight_of(table, None, "copies", None if torch.compiler.is_compiling() else 0)
    use = base.Use(mini.groups, 0, None, (weight,))
    return base.call(Rows, index, use, found.detach() if found.requires_grad else found)  # type: ignore[no-any-return]


@base.operation("index_select")
def index_select(mini: MiniBatch, func: Any, input: Any, dim: Any, index: Any) -> Any:
    """Rows along the first dimension; others are left to `fallback`."""
    h = mini.handle_of(input)
    if h is None or dim != 0 or not h.value.ndim:
        return NotImplemented
    return rows(mini, "index_select", h, index, lambda t: func(t, 0, index))

# ruff: noqa: D102 - forward and backward
"""Batched products, of experts that all see every row or of heads: y_e = x_e w_e, the batch along the rows of each x_e.

For x (E, n, i) and w (E, i, o), micro-batch k has the share s_k[e] = Σ x_rᵀ g_r over its rows r of x_e.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...kernels import cast
from ...kernels import gemm_square as kernels
from ..groups import Groups
from ..mini_batch import MiniBatch
from . import base

ROWS = 1  # the dimension of x along which the batch is


def batched_square(X: Tensor, G: Tensor, c: Tensor | None) -> tuple[Tensor, Tensor]:
    """`gemm_square` for each e: dW and S (E, i, o) of X (E, κ, R, i) and G (E, κ, R, o)."""
    made = [kernels.gemm_square(x, g, c) for x, g in zip(X, G, strict=True)]
    dW, S = (torch.stack(each) for each in zip(*made, strict=True))
    return dW, S


def batched_shares(X: Tensor, G: Tensor) -> Tensor:
    """Every group's share (κ, E, i, o)."""
    return (X.mT @ G).transpose(0, 1)


BATCHED = base.Kernel(batched_square, batched_shares)


class Batched(base.Squaring):
    """y = x w, x (E, n, i) and w (E, i, o)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, use: base.Use, w: Tensor, tag: Any) -> Tensor:
        small = base.reduced(w, x)
        ctx.save_for_backward(x, w, small)
        ctx.use = use
        return base.owned(torch.bmm(x, w if small is None else small))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w, small = ctx.saved_tensors
        groups, weight, dx = ctx.use.groups, base.wanted(ctx, 0), None
        base.refuse_penalty("bmm", ctx.use)
        if ctx.needs_input_grad[0]:
            with base.unfollowed():
                dx = cast(torch.bmm(g, cast(w if small is None else small, g.dtype).mT), x.dtype)
        if weight is None:
            return base.returned(ctx, dx, base.NOTHING)
        operands = zip(*(_rows(groups, t) for t in (cast(x, g.dtype), g)), strict=True)
        return base.returned(ctx, dx, base.deliver(groups, weight, BATCHED, operands))


def _rows(groups: Groups, t: Tensor) -> list[Tensor]:
    """Per stretch, t (E, n, i) as (E, κ, R, i)."""
    times = t.shape[ROWS] // groups.batch
    return [t[:, s.first * times : s.last * times].unflatten(ROWS, (s.hi - s.lo, -1)) for s in groups.stretches]


def _line(seen: base.Seen) -> base.Line:
    """The operands and the squares, of one e at a time."""
    rows = seen.per_group(seen.x.shape[ROWS])
    return base.Line(rows, f"gemm_square ({kernels.method(rows)}) each", 2 * seen.square)


@base.operation("bmm", line=_line)
def bmm(mini: MiniBatch, func: Any, input: Any, mat2: Any, *, out_dtype: Any = None) -> Any:
    """y = x w where w is a parameter and the rows of each x_e are whole samples; others are left to the fallback.

    A value made of parameters may have been repeated for each sample, along e: it is taken only where e cannot be that.
    """
    n, batch, handle = input.shape[ROWS], mini.groups.batch, mini.handle_of(mat2)
    if out_dtype is not None or mini.holds(input) or not input.requires_grad or not n or n % batch:
        return NotImplemented
    if handle is None or (handle.entry is None and input.shape[0] % batch == 0):
        return NotImplemented
    use = base.use_of(mini, "bmm", input, 1, (mat2,), axis=ROWS)
    return NotImplemented if use is None else base.call(Batched, base.autocast(input), use)

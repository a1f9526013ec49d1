# ruff: noqa: D102 - forward and backward
"""Batched products, of experts that all see every row or of heads: y_e = x_e w_e + b_e, the batch along x_e's rows.

For x (E, n, i), w (E, i, o) and b (E, 1, o), micro-batch k has the shares s_k[e] = Σ x_rᵀ g_r and Σ g_r over its rows r
of x_e.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...kernels import cast
from ...kernels import gemm_square as kernels
from ..groups import Groups
from ..mini_batch import MiniBatch, Mode
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
    """y = x w + b, x (E, n, i), w (E, i, o) and b (E, 1, o) or None."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, use: base.Use, w: Tensor, tag: Any, b: Any = None, tag_b: Any = None) -> Tensor:
        small = base.reduced(w, x)
        ctx.save_for_backward(x, w, small)
        ctx.use = use
        if b is None:
            return base.owned(torch.bmm(x, w if small is None else small))
        return base.owned(torch.baddbmm(cast(b, x.dtype), x, w if small is None else small))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w, small = ctx.saved_tensors
        groups, weight, dx, pairs = ctx.use.groups, base.wanted(ctx, 0), None, [base.NOTHING] * len(ctx.use.weights)
        base.refuse_penalty("bmm", ctx.use)
        if ctx.needs_input_grad[0]:
            with base.unfollowed():
                dx = cast(torch.bmm(g, cast(w if small is None else small, g.dtype).mT), x.dtype)
        G = _rows(groups, g)
        if weight is not None:
            operands = zip(_rows(groups, cast(x, g.dtype)), G, strict=True)
            pairs[0] = base.deliver(groups, weight, BATCHED, operands)
        if len(pairs) > 1 and (bias := base.wanted(ctx, 1)) is not None:
            pairs[1] = base.deliver_sums(groups, bias, [t.sum(2, keepdim=True).transpose(0, 1) for t in G])
        return base.returned(ctx, dx, *pairs)


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
    """y = x w where w is a parameter and the rows of each x_e are whole samples; others are left to the fallback."""
    if out_dtype is not None or not _is_batched(mini, input, mat2):
        return NotImplemented
    use = base.use_of(mini, "bmm", input, 1, (mat2,), axis=ROWS)
    return NotImplemented if use is None else base.call(Batched, base.autocast(input), use)


@base.operation("baddbmm", line=_line)
def baddbmm(
    mini: MiniBatch, func: Any, input: Any, batch1: Any, batch2: Any, *, beta: float = 1, alpha: float = 1
) -> Any:
    """y = b + x w, as `bmm`."""
    shape = (*batch2.shape[:1], 1, *batch2.shape[2:])
    if (beta, alpha) != (1, 1) or input.shape != shape or not _is_batched(mini, batch1, batch2):
        return NotImplemented
    use = base.use_of(mini, "baddbmm", batch1, 1, (batch2, input), axis=ROWS)
    return NotImplemented if use is None else base.call(Batched, base.autocast(batch1), use)


def _is_batched(mini: MiniBatch, x: Any, w: Any) -> bool:
    """Whether the rows of each x_e are whole samples.

    A value that is no parameter itself may have been repeated for each sample, along e: it is taken only where e cannot
    be that.
    """
    n, batch, handle = x.shape[ROWS], mini.groups.batch, mini.handle_of(w)
    if mini.holds(x) or not x.requires_grad or not n or n % batch:
        return False
    if mini.mode is Mode.OUTSIDE and torch._C._current_graph_task_id() < 0:  # no check has looked: see `mini.place`
        return False
    return (handle is not None and handle.own) or x.shape[0] % batch != 0

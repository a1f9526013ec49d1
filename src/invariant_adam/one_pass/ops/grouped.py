# ruff: noqa: D102 - forward and backward
"""Grouped products, of experts: y_r = x_r w_e for the rows r of expert e, offs[e-1] ≤ r < offs[e].

The rows of one expert come from any micro-batch. Micro-batch k has the share s_k[e] = Σ x_rᵀ g_r over its rows there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ...kernels import gemm_square as kernels
from ..groups import UnsupportedUse
from ..mini_batch import MiniBatch
from ..weight import names_of
from . import base

STEP = 16  # rows per group: more are filled up to a multiple, since a kernel is set up for each shape


def _by_expert(kappa: int, ids: Tensor, offs: Tensor, *rows: Tensor) -> Iterator[tuple[Any, ...]]:
    """Each expert that has rows, with those as (κ, R, width): zeros fill each group up to the R rows of the largest.

    `ids` (n,) names the group of each row. Experts come one at a time. The host waits for the device once.
    """
    n = torch.arange(len(ids), device=offs.device, dtype=offs.dtype)
    # A cell is an expert with a group; rows past the last offset are of no expert.
    cells, order = (torch.searchsorted(offs, n, right=True) * kappa + ids).sort()
    every = torch.arange((len(offs) + 1) * kappa, device=offs.device)
    starts, ends = (torch.searchsorted(cells, every, right=right) for right in (False, True))
    slots = torch.empty_like(order)  # of each row among those of its cell
    slots[order] = n - starts[cells]
    largest = (ends - starts).view(-1, kappa).amax(1)[:-1]
    lo = 0
    for e, (hi, most) in enumerate(torch.stack((offs, largest), 1).tolist()):
        if hi > lo:
            R = most if most <= STEP else -(-most // STEP) * STEP
            to = ids[lo:hi] * R + slots[lo:hi]
            filled = (t.new_zeros(kappa * R, t.shape[1]).index_copy(0, to, t[lo:hi]) for t in rows)
            yield e, *(t.view(kappa, R, -1) for t in filled)
        lo = hi


def grouped_square(
    kappa: int, ids: Tensor, offs: Tensor, left: Tensor, right: Tensor, flip: bool, c: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`gemm_square` for each expert: dW and S (experts, l, r) of left (n, l) and right (n, r), (experts, r, l) flipped.

    An expert without rows has zeros, as in the gradient of the torch function.
    """
    dW = left.new_zeros(len(offs), left.shape[1], right.shape[1])
    S = torch.zeros_like(dW, dtype=kernels.wide(dW.dtype))
    for e, a, b in _by_expert(kappa, ids, offs, left, right):
        dW[e], S[e] = kernels.gemm_square(a, b, c)
    return (dW.mT, S.mT) if flip else (dW, S)


def grouped_shares(kappa: int, ids: Tensor, offs: Tensor, left: Tensor, right: Tensor, flip: bool) -> Tensor:
    """`gemm_groups` for each expert."""
    shares = left.new_zeros(kappa, len(offs), left.shape[1], right.shape[1])
    for e, a, b in _by_expert(kappa, ids, offs, left, right):
        shares[:, e] = kernels.gemm_groups(a, b)
    return shares.mT if flip else shares


GROUPED = base.Kernel(grouped_square, grouped_shares)


class Grouped(base.Squaring):
    """y = x w by expert, x (n, i) and w (experts, i, o); the settings are the torch function that was called."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, use: base.Use, w: Tensor, tag: Any, offs: Tensor) -> Tensor:
        ctx.save_for_backward(x, w, offs)
        ctx.use = use
        return use.settings(x, w, offs=offs)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w, offs = ctx.saved_tensors
        groups, ids, grouped_mm = ctx.use.groups, ctx.use.routed.ids, ctx.use.settings
        base.refuse_penalty("grouped_mm", ctx.use)
        if g.stride(0) < g.shape[1] or g.stride(1) != 1:  # grouped_mm does not take every layout
            g = g.contiguous()
        dx = grouped_mm(g, w.mT, offs=offs) if ctx.needs_input_grad[0] else None
        pair, weight = base.NOTHING, base.wanted(ctx, 0)
        if weight is not None:
            flip = w.stride(1) == 1  # w is a transposed parameter: dW and S are made as that lies
            left, right = (g, x) if flip else (x, g)
            pair = base.deliver_at_once(groups, weight, GROUPED, groups.kappa, ids, offs, left, right, flip)
        return base.returned(ctx, dx, pair)


def _line(seen: base.Seen) -> base.Line:
    """The operands of one expert, where all are used alike, and its product."""
    rows = seen.per_group(seen.x.shape[0])
    experts, *matrix = seen.shape
    operands = rows * seen.groups.kappa * sum(matrix) * seen.itemsize
    return base.Line(rows, "gemm_square per expert", (operands + 2 * seen.square) // experts)


@base.operation("grouped_mm", "_grouped_mm", "grouped_mm_fallback", "grouped_mm_fallback.default", line=_line)
def grouped_mm(
    mini: MiniBatch, func: Any, x: Any, w: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None
) -> Any:
    """y = x w by expert, of torch and of transformers; other forms and options go through the fallback."""
    if x.ndim != 2 or w.ndim != 3 or offs is None or bias is not None or out_dtype is not None or not mini.holds(w):
        return NotImplemented
    use = base.use_of(mini, "grouped_mm", x, 1, (w,), func, any_order=True)
    if use is None or use.routed is None:
        # Rows sorted by expert look like rows in batch order while all go to one expert: a check may not see it.
        raise UnsupportedUse(
            f"{names_of([mini.handle_of(w)])} goes through grouped_mm on rows of shape {tuple(x.shape)} whose places "
            "in the batch are not known; sort them by x[index] of a differentiable x (an input: x.requires_grad_()), "
            "apply only elementwise operations after that, keep the experts out of torch.compile, or loop over "
            "micro-batches"
        )
    return base.call(Grouped, x, use, offs)

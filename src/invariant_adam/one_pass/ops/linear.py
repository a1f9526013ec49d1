# ruff: noqa: D102 - forward and backward
"""Products with a matrix, y = x wᵀ + b and x w + b: rows are the vectors of x, in batch order or in any."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels import cast
from ...kernels import gemm_square as kernels
from ...kernels.ops import operator
from ..dispatch import dispatch
from ..groups import join
from ..into import sink, ticket, ticket_shape
from ..mini_batch import MiniBatch
from . import base


def _fold(key: int, G: Tensor, X: Tensor, c: Tensor | None) -> None:
    """Fold the pair of the parameter `key` from the operands of `gemm_square`, in its epilogue where that can."""
    taker = sink()
    with torch._C.DisableTorchFunctionSubclass():
        entry = taker.claim(key)
        if entry is None:
            return
        p = entry.param
        target = taker.target(entry) if kernels.takes_fused(G) and p.is_contiguous() else None
        if target is not None:
            kernels.fused.gemm_square(G, X.to(G.dtype), c, into=target)
            return
        dW, S = kernels.gemm_square(G, X, c)
        if dW.shape != p.shape:
            dW, S = dW.view(p.shape), S.view(p.shape)
        taker.fold(entry, dW, S)


@operator("into_products(Tensor G, Tensor X, Tensor? c, int kappa, int key) -> Tensor", ticket_shape, replays=False)
def _into_products(G: Tensor, X: Tensor, c: Tensor | None, kappa: int, key: int) -> Tensor:
    _fold(key, G.unflatten(0, (kappa, -1)), X.unflatten(0, (kappa, -1)), c)
    return ticket(G)


def _into(key: int, G: Tensor, X: Tensor, c: Tensor | None) -> Any:
    if torch.compiler.is_compiling():
        return _into_products(G.flatten(0, 1), X.flatten(0, 1), c, G.shape[0], key)
    return _fold(key, G, X, c)


GEMM = base.Kernel(kernels.gemm_square, kernels.gemm_groups, _into)


def _by_group(kappa: int, ids: Tensor, *rows: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The rows of each group, of tensors whose rows are in any order: `ids` (n,) names the group of each."""
    order, sizes = torch.argsort(ids, stable=True), torch.bincount(ids, minlength=kappa).tolist()
    return zip(*(t[order].split(sizes) for t in rows), strict=True)


def routed_square(kappa: int, ids: Tensor, left: Tensor, right: Tensor, c: Tensor | None) -> tuple[Tensor, Tensor]:
    """`gemm_square` for rows in any order."""
    dW = left.new_zeros(left.shape[1], right.shape[1])
    S = dW.to(kernels.wide(dW.dtype))
    for k, (a, b) in enumerate(_by_group(kappa, ids, left, right)):
        if len(a):
            d, s = kernels.gemm_square(a[None], b[None], None if c is None else c[k : k + 1])
            dW, S = dW + d, S + s
    return dW, S


def routed_shares(kappa: int, ids: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """`gemm_groups` for rows in any order."""
    return torch.stack([a.t() @ b for a, b in _by_group(kappa, ids, left, right)])


def _vectors(use: base.Use, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The group of each vector of rows in any order, which may be sequences of vectors; and these tensors' vectors."""
    ids, x = use.routed.ids, tensors[0]
    if x.ndim > 2:
        ids = ids.repeat_interleave(x.shape[1:-1].numel())
    return (ids, *(t.reshape(-1, t.shape[-1]) for t in tensors))


ROUTED = base.Kernel(routed_square, routed_shares)


def _product(ctx: Any, x: Tensor, use: base.Use, w: Tensor, b: Any, *others: Tensor) -> Tensor:
    """The model's own product; and what its backward needs, `others` last."""
    small = base.reduced(w, x)
    ctx.save_for_backward(x, w, small, *others)
    ctx.use = use
    if small is not None:
        w, b = small, b if b is None else b.to(x.dtype)
    if not use.settings:
        return base.owned(F.linear(x, w, b))
    return base.owned(x @ w if b is None else torch.addmm(b, x, w))  # x @ w + b is float32 under autocast


def _gradients(ctx: Any, x: Tensor, w: Tensor, small: Tensor | None, g: Tensor) -> tuple[Any, ...]:
    use, groups, flip, needs = ctx.use, ctx.use.groups, ctx.use.settings, ctx.needs_input_grad
    if g.ndim > 2 and not torch.compiler.is_compiling() and not g.is_contiguous():
        g = g.contiguous()  # or matmul would make many small products of it, and the squares a copy of their own
    dx, pair, pair_b = None, base.NOTHING, base.NOTHING
    if needs[0]:
        if small is not None and small.dtype == g.dtype and not torch.is_grad_enabled():
            dx = g @ (small.t() if flip else small)
        else:
            with base.unfollowed():
                wg = cast(w, g.dtype)
                dx = g @ (wg.t() if flip else wg)
        dx = cast(dx, x.dtype)
    weight, bias = base.wanted(ctx, 0), base.wanted(ctx, 1)
    if use.routed is not None:
        ids, x, g = _vectors(use, x, g)
        if weight is not None:
            left, right = (x.to(g.dtype), g) if flip else (g, x.to(g.dtype))
            pair = base.deliver_at_once(groups, weight, ROUTED, groups.kappa, ids, left, right)
        if bias is not None:
            shares = g.new_zeros(groups.kappa, g.shape[-1]).index_add(0, ids, g)
            pair_b = base.deliver_at_once(groups, bias, base.SUMS, shares)
        return base.returned(ctx, dx, pair, pair_b)
    Gs = groups.split(g, use.axis, 1)
    if weight is not None:
        Xs = groups.split(x, use.axis, 1)
        pair = base.deliver(groups, weight, GEMM, zip(Xs, Gs, strict=True) if flip else zip(Gs, Xs, strict=True))
    if bias is not None:
        pair_b = base.deliver_rows(groups, bias, Gs)
    return base.returned(ctx, dx, pair, pair_b)


class Linear(base.Squaring):
    """y = x wᵀ + b, or x w + b where the settings are True; x (..., i), or (n, ..., i) with rows in any order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, use: base.Use, w: Tensor, tag: Any, b: Any, tag_b: Any) -> Tensor:
        return _product(ctx, x, use, w, b)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w, small = ctx.saved_tensors
        return _gradients(ctx, x, w, small, g)


class Head(base.Squaring):
    """y = x wᵀ + b of a table w, with the `Link`s of its embeddings one after the other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, use: base.Use, w: Tensor, tag: Any, b: Any, tag_b: Any, *links: Tensor) -> Tensor:
        return _product(ctx, x, use, w, b, *links[1::2])

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w, small, *tokens = ctx.saved_tensors
        found = [v for t in tokens for v in (_rows(ctx.use, g, x, t), None)]
        return (*_gradients(ctx, x, w, small, g)[: -len(found)], *found)


def _rows(use: base.Use, g: Tensor, x: Tensor, tokens: Tensor) -> Tensor:
    """Each micro-batch's share of the weight, G_kᵀX_k, at the rows of its tokens: (n, D) for tokens (n,)."""
    named = use.groups.split(tokens, 0, 0)
    if use.routed is None:
        each = zip(*(use.groups.split(t, use.axis, 1) for t in (g, x)), named, strict=True)
        return join([kernels.gemm_rows(G, X, at).flatten(0, 1) for G, X, at in each])
    groups = _by_group(use.groups.kappa, *_vectors(use, g, x))
    own = [at[i : i + 1] for at in named for i in range(len(at))]
    return torch.cat([kernels.gemm_rows(G[None], X[None], at)[0] for (G, X), at in zip(groups, own, strict=True)])


def products(seen: base.Seen) -> base.Line:
    """What `explain` prints for a product: of the vectors of x with a matrix, to which a vector may be added."""
    rows = seen.per_group(seen.x.numel() // seen.x.shape[-1])
    if len(seen.shape) == 1:
        return base.by_sums(seen)._replace(rows=rows)
    if len(seen.shape) != 2:
        return base.by_copies(seen)._replace(rows=rows)
    how = "products" if seen.ids is not None else kernels.method(rows)
    work = {"square": 1.0, "pairs": (rows + 1) / 2}.get(how)
    operands = rows * seen.groups.kappa * sum(seen.shape) * seen.itemsize
    return base.Line(rows, f"gemm_square ({how})", 2 * seen.square if work is None else int(work * operands))


def linear_with(
    mini: MiniBatch, name: str, x: Any, weight: Any, bias: Any, flip: bool = False, axis: int | None = None
) -> Any:
    """y = x wᵀ + b (x w + b with `flip`), the batch of x at `axis` or found."""
    if weight.ndim != 2 or x.ndim < 2:
        return NotImplemented
    use = base.use_of(mini, name, x, 1, (weight, bias), flip, axis=axis, any_order=True)
    if use is None:
        return NotImplemented
    x, shape, tracing = base.autocast(x), x.shape, torch.compiler.is_compiling()
    if rows := tracing and use.axis == 0 and x.ndim > 2:  # a graph's products take rows: as these, x is kept too
        x = x.flatten(0, -2)
    table = base.table_of(use.weights[0])
    if table is None or not table.links:
        y = base.call(Linear, x, use)
    else:
        links, table.headed = [t for link in table.links for t in link], True
        if tracing:
            table.links = ()  # or the graph would return them
        y = base.call(Head, x, use, *links)
    return y.unflatten(0, shape[:-1]) if rows else y


@base.operation("linear", line=products)
def linear(mini: MiniBatch, func: Any, input: Tensor, weight: Any, bias: Any = None) -> Any:
    """y = x wᵀ + b."""
    return linear_with(mini, "linear", input, weight, bias)


@base.operation("matmul", "__matmul__", "mm", line=products)
def matmul(mini: MiniBatch, func: Any, input: Any, other: Any) -> Any:
    """y = x w for w (i, o); other products go through the fallback."""
    return linear_with(mini, "matmul", input, other, None, flip=True)


@base.operation("addmm", line=products)
def addmm(mini: MiniBatch, func: Any, input: Any, mat1: Any, mat2: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    """y = b + x w."""
    if beta != 1 or alpha != 1 or input.ndim != 1:
        return NotImplemented
    return linear_with(mini, "addmm", mat1, mat2, input, flip=True)


@base.operation("bilinear")
def bilinear(mini: MiniBatch, func: Any, input1: Tensor, input2: Tensor, weight: Any, bias: Any = None) -> Any:
    """y_o = x₁ᵀ W_o x₂ + b_o: a linear layer of the outer product of its inputs."""
    outer = (input1[..., :, None] * input2[..., None, :]).flatten(-2)
    y = dispatch(F.linear, (outer, dispatch(Tensor.flatten, (weight, 1), {}), bias), {})
    return base.as_called(y, func, input1, input2, weight, bias)

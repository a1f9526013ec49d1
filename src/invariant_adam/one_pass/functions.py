# ruff: noqa: D102 - forward and backward
"""The operations as autograd Functions whose parameter gradients come with their squares.

Each Function takes a parameter `w` together with a `tag`, and is in one of two modes:

    one use   w is the parameter, tag its companion:
              backward returns dW for w and Σ_k c_k s_k² for the tag
    grouped   w is a detached value, tag its stride-0 expansion over the κ groups:
              backward returns all s_k for the tag, so that the uses of a shared parameter add up before `Expand`
              squares them

There are no side effects in backward beyond counting arrivals, which compiled graphs leave out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from ..kernels import batch_norm, sums
from ..kernels.conv_square import Geometry, conv_backward, conv_groups, conv_square
from ..kernels.embedding_square import embedding_groups, embedding_square
from ..kernels.gemm_square import gemm_groups, gemm_square, sum_square
from . import into
from .groups import Groups, UnsupportedUse
from .handles import Handle

NOTHING: tuple[Any, ...] = (None,) * 5  # the gradients of x, w, its tag, b and its tag where none is wanted


def deliver(
    groups: Groups,
    handle: Handle,
    parts: Iterable[tuple[Any, ...]],
    both: Callable[..., tuple[Tensor, Tensor]],
    each: Callable[..., Tensor],
) -> tuple[Tensor | None, Tensor]:
    """The gradients of w and of its tag, from the arguments of a kernel for each part."""
    if handle.grouped:
        shares = [each(*args) for args in parts]
        return None, shares[0] if len(shares) == 1 else torch.cat(shares)
    if handle.into and both in (gemm_square, conv_square) and len(groups.parts) == 1:
        (args,) = parts
        hand: Callable[..., Any] = into.products if both is gemm_square else into.convolution
        return None, hand(handle, *args, groups.c)
    if not handle.into:
        handle.arrive()
    dW: Any = None
    S: Any = None
    for part, args in zip(groups.parts, parts, strict=True):
        d, s = both(*args, groups.coefficients(part))
        dW, S = (d, s) if dW is None else (dW + d, S + s)
    return (None, into.give(handle, dW, S)) if handle.into else (dW, S)


def owned(y: Tensor) -> Tensor:
    """y as no view of anything: autograd forbids writing in place over a view that a Function returns."""
    return torch.ops.aten._unsafe_view(y, y.shape)  # type: ignore[no-any-return]


def _same(t: Tensor) -> Tensor:
    return t


def deliver_sums(groups: Groups, handle: Handle, sums: list[Tensor]) -> tuple[Tensor | None, Tensor]:
    """`deliver` for shares that are already formed, (groups, *w.shape) per part."""
    return deliver(groups, handle, [(t,) for t in sums], sum_square, _same)


def deliver_rows(groups: Groups, handle: Handle, rows: list[Tensor]) -> tuple[Tensor | None, Tensor]:
    """`deliver` for a gradient that is the sum of a group's rows, (groups, rows, *w.shape) per part."""
    if not all(t.ndim == 3 and sums.takes_fused(t) for t in rows):
        return deliver_sums(groups, handle, [t[:, 0] if t.shape[1] == 1 else t.sum(1) for t in rows])
    made = [sums.row_sums(t, groups.coefficients(p)) for p, t in zip(groups.parts, rows, strict=True)]
    return deliver_made(handle, [each for each, _ in made], added([pair for _, pair in made]))


def deliver_places(groups: Groups, handle: Handle, images: list[Tensor]) -> tuple[Tensor | None, Tensor]:
    """`deliver_rows` for images (groups, samples, C, *spatial), whose samples and places are the rows."""
    last = [t.movedim(2, -1) for t in images]
    if all(t.is_contiguous() and sums.takes_fused(t) for t in last):
        return deliver_rows(groups, handle, [t.flatten(1, -2) for t in last])
    return deliver_sums(groups, handle, [t.flatten(3).sum((1, 3)) for t in images])


def added(parts: Sequence[Tensor]) -> Tensor:
    """The sum of one tensor per part."""
    return parts[0] if len(parts) == 1 else torch.stack(list(parts)).sum(0)


def deliver_made(handle: Handle, each: list[Tensor], pair: Tensor) -> tuple[Tensor | None, Tensor]:
    """`deliver` for a pair (2, *w.shape) that a kernel has made, and the shares (groups, *w.shape) of each part."""
    if handle.grouped:
        return None, each[0] if len(each) == 1 else torch.cat(each)
    return hand_over(handle, *pair.unbind(0))


def hand_over(handle: Handle, dW: Tensor, S: Tensor) -> tuple[Tensor | None, Tensor]:
    """`deliver` for a pair of the parameter's shape."""
    if handle.into:
        return None, into.give(handle, dW, S)
    handle.arrive()
    return dW, S


def deliver_both(
    hw: Handle | None,
    hb: Handle | None,
    each: Sequence[Tensor],
    pairs: Sequence[Tensor],
    shape: tuple[int, ...] = (-1,),
) -> tuple[Any, Any, Any, Any]:
    """The gradients of w, its tag, b and its tag, from the shares (groups, 2, C) and pairs (4, C) of each part."""
    rows = added(pairs).unbind(0)
    grads: list[Any] = [None] * 4
    for place, handle in enumerate((hw, hb)):
        if handle is None:
            continue
        if handle.grouped:
            shares = [t[:, place].unflatten(1, shape).to(handle.square_dtype) for t in each]
            grads[2 * place + 1] = join(shares)
            continue
        dW, S = rows[2 * place : 2 * place + 2]
        if len(shape) > 1:
            dW, S = dW.view(shape), S.view(shape)
        grad, grads[2 * place + 1] = hand_over(handle, dW, S)
        grads[2 * place] = cast(grad, handle)
    return grads[0], grads[1], grads[2], grads[3]


def wanted(ctx: Any, w: int, b: int) -> tuple[Any, Any]:
    """The handles of w and b whose tags, the inputs of these numbers, want gradients."""
    return ctx.hw if ctx.needs_input_grad[w] else None, ctx.hb if ctx.needs_input_grad[b] else None


class Expand(Function):
    """w -> its κ copies (κ, *w.shape) without memory; backward squares what comes back for each."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, tag: Tensor, groups: Groups, handle: Handle) -> Tensor:
        ctx.groups, ctx.handle = groups, handle
        return w.detach().unsqueeze(0).expand(groups.kappa, *w.shape)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        ctx.handle.arrive()
        dW, S = sum_square(g, ctx.groups.c)
        return dW, S, None, None


class Linear(Function):
    """y = x wᵀ + b, or x w + b with `flip`; x (..., i), its batch at `axis`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor,
        tag_w: Tensor,
        b: Any,
        tag_b: Any,
        groups: Groups,
        axis: int,
        flip: bool,
        hw: Handle,
        hb: Any,
    ) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.groups, ctx.axis, ctx.flip, ctx.hw, ctx.hb = groups, axis, flip, hw, hb
        return owned(x @ w if b is None else x @ w + b) if flip else owned(F.linear(x, w, b))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = ctx.saved_tensors
        groups, axis = ctx.groups, ctx.axis
        dx, dW, S, db, Sb = NOTHING
        if ctx.needs_input_grad[0]:
            wg = w.to(g.dtype)
            dx = (g @ (wg.t() if ctx.flip else wg)).to(x.dtype)
        Gs = groups.split(g, axis, 1)
        if ctx.needs_input_grad[2]:
            Xs = groups.split(x, axis, 1)
            pairs = zip(Xs, Gs, strict=True) if ctx.flip else zip(Gs, Xs, strict=True)
            dW, S = deliver(groups, ctx.hw, pairs, gemm_square, gemm_groups)
        if ctx.hb is not None and ctx.needs_input_grad[4]:
            db, Sb = deliver_rows(groups, ctx.hb, Gs)
        return (dx, cast(dW, ctx.hw), S, cast(db, ctx.hb), Sb) + (None,) * 5


def cast(grad: Tensor | None, handle: Handle) -> Tensor | None:
    """A gradient in the dtype of what it is the gradient of."""
    return grad if grad is None or grad.dtype == handle.dtype else grad.to(handle.dtype)


def call(function: type[Function], x: Tensor, *args: Any) -> Any:
    """`function.apply(x, *args)` without what it does for functorch, where that is not at work."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return function.apply(x, *args)
    return super(Function, function).apply(torch._C._functorch.unwrap_if_dead(x), *args)  # type: ignore[misc]


def plain(w: Any) -> Any:
    """A parameter as it is to be saved: in a backward each use of it would ask its dispatcher.

    Such a backward goes with `refuse_penalty`.
    """
    return w if w is None or torch.compiler.is_compiling() else w.detach()


def refuse_penalty(name: str, *handles: Handle | None) -> None:
    """Refuse a backward that is to be differentiated again, where it takes weights or statistics for constants."""
    if not torch.compiler.is_compiling() and torch.is_grad_enabled():
        names = ", ".join(h.label for h in handles if h is not None) or "a value"
        raise UnsupportedUse(
            f"{names} goes through {name} in a backward with create_graph=True (a penalty on gradients, perhaps), and "
            "what that owes to the weights would be lost; leave it out, or loop over micro-batches. Drop an update "
            "that is open with opt.abandon()"
        )


class RoutedLinear(Function):
    """`Linear` for rows in any order: `ids` (n,) names each row's group."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor,
        tag_w: Tensor,
        b: Any,
        tag_b: Any,
        ids: Tensor,
        groups: Groups,
        flip: bool,
        hw: Handle,
        hb: Any,
    ) -> Tensor:
        ctx.save_for_backward(x, w, ids)
        ctx.groups, ctx.flip, ctx.hw, ctx.hb = groups, flip, hw, hb
        ctx.group_ids = ids  # read by routing.group_ids further down the graph
        return owned(x @ w if b is None else x @ w + b) if flip else owned(F.linear(x, w, b))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w, ids = ctx.saved_tensors
        groups = ctx.groups
        dx, dW, S, db, Sb = NOTHING
        if ctx.needs_input_grad[0]:
            wg = w.to(g.dtype)
            dx = (g @ (wg.t() if ctx.flip else wg)).to(x.dtype)
        left, right = (x.to(g.dtype), g) if ctx.flip else (g, x.to(g.dtype))
        if ctx.needs_input_grad[2]:
            order = torch.argsort(ids, stable=True)
            sizes = torch.bincount(ids, minlength=groups.kappa).tolist()
            lefts, rights = left[order].split(sizes), right[order].split(sizes)
            if ctx.hw.grouped:
                S = torch.stack([a.t() @ b for a, b in zip(lefts, rights, strict=True)])
            else:
                ctx.hw.arrive()
                for k, (a, b) in enumerate(zip(lefts, rights, strict=True)):
                    if len(a):
                        c = None if groups.c is None else groups.c[k : k + 1]
                        d, s = gemm_square(a[None], b[None], c)
                        dW, S = (d, s) if dW is None else (dW + d, S + s)
                if dW is None:
                    dW = torch.zeros_like(w)
                    S = torch.zeros_like(w, dtype=ctx.hw.square_dtype)
        if ctx.hb is not None and ctx.needs_input_grad[4]:
            sums = g.new_zeros(groups.kappa, g.shape[-1]).index_add(0, ids, g)
            if ctx.hb.grouped:
                Sb = sums
            else:
                ctx.hb.arrive()
                db, Sb = sum_square(sums, groups.c)
        return (dx, cast(dW, ctx.hw), S, cast(db, ctx.hb), Sb) + (None,) * 5


class Conv(Function):
    """Any convolution; x (B·r, C, *spatial)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor,
        tag_w: Any,
        b: Any,
        tag_b: Any,
        groups: Groups,
        geo: Geometry,
        hw: Any,
        hb: Any,
    ) -> Tensor:
        weight = w.to(x.dtype)  # autocast knows conv2d, but not the one below: the weights follow x
        ctx.save_for_backward(x, w if torch.compiler.is_compiling() else weight.detach())
        ctx.groups, ctx.geo, ctx.hw, ctx.hb = groups, geo, hw, hb
        b = None if b is None else b.to(x.dtype)
        return torch.convolution(
            x,
            weight,
            b,
            geo.stride,
            geo.padding,
            geo.dilation,
            geo.transposed,
            geo.output_padding,
            geo.groups,
        )

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = ctx.saved_tensors
        groups, geo = ctx.groups, ctx.geo
        dx, dW, S, db, Sb = NOTHING
        if ctx.needs_input_grad[0]:
            refuse_penalty("a convolution", ctx.hw, ctx.hb)
            same = x.dtype == g.dtype == w.dtype  # as nearly always: a cast that casts nothing takes its time, too
            xs, ws = (x, w) if same else (x.to(g.dtype), w.to(g.dtype))
            dx = conv_backward(g, xs, ws, geo, [True, False, False])[0]
            dx = dx if same else dx.to(x.dtype)
        Gs = groups.stack(g, 0)
        if ctx.hw is not None and ctx.needs_input_grad[2]:
            args = [(G, X, geo) for G, X in zip(Gs, groups.stack(x, 0), strict=True)]
            dW, S = deliver(groups, ctx.hw, args, conv_square, conv_groups)
        if ctx.hb is not None and ctx.needs_input_grad[4]:
            db, Sb = deliver_places(groups, ctx.hb, Gs)
        return (dx, cast(dW, ctx.hw), S, cast(db, ctx.hb), Sb) + (None,) * 4


class Embedding(Function):
    """Rows of the table w (V, D) named by ids, their batch at `axis`."""

    @staticmethod
    def forward(
        ctx: Any,
        ids: Tensor,
        w: Tensor,
        tag: Tensor,
        padding: Any,
        groups: Groups,
        axis: int,
        handle: Handle,
    ) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.padding, ctx.groups, ctx.axis, ctx.handle = padding, groups, axis, handle
        ctx.rows, ctx.dtype = w.shape[0], w.dtype
        return owned(F.embedding(ids, w))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (ids,) = ctx.saved_tensors
        groups = ctx.groups
        if ctx.padding is not None:
            g = g.masked_fill((ids == ctx.padding)[..., None], 0)
        args = [
            (i, G, ctx.rows) for i, G in zip(groups.split(ids, ctx.axis, 0), groups.split(g, ctx.axis, 1), strict=True)
        ]
        dW, S = deliver(groups, ctx.handle, args, embedding_square, embedding_groups)
        return (None, None if dW is None else dW.to(ctx.dtype), S) + (None,) * 4


class LayerNorm(Function):
    """Layer norm over the last dimensions, its normalised input recomputed in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Any,
        tag_w: Any,
        b: Any,
        tag_b: Any,
        groups: Groups,
        axis: int,
        shape: tuple[int, ...],
        eps: float,
        hw: Any,
        hb: Any,
    ) -> Tensor:
        y, mean, rstd = torch.native_layer_norm(x, shape, w, b, eps)
        ctx.save_for_backward(x, w, b, mean, rstd)
        ctx.groups, ctx.axis, ctx.shape, ctx.hw, ctx.hb = groups, axis, shape, hw, hb
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w, b, mean, rstd = ctx.saved_tensors
        groups, event = ctx.groups, len(ctx.shape)
        dx, dW, S, db, Sb = NOTHING
        if ctx.needs_input_grad[0]:
            dx = torch.ops.aten.native_layer_norm_backward(g, x, ctx.shape, mean, rstd, w, b, [True, False, False])[0]
        hw, hb = wanted(ctx, 2, 4)
        if hw is None and hb is None:
            return (dx,) + (None,) * 10
        Gs, Xs = ([t.flatten(2) for t in groups.split(y, ctx.axis, event)] for y in (g, x))
        if all(sums.takes_fused(t) for t in (*Gs, *Xs)):
            means, rstds = ([t.flatten(1) for t in groups.split(y, ctx.axis, event)] for y in (mean, rstd))
            rows = zip(groups.parts, Gs, Xs, means, rstds, strict=True)
            made = [sums.norm_sums(G, X, mu, r, groups.coefficients(p)) for p, G, X, mu, r in rows]
            dW, S, db, Sb = deliver_both(hw, hb, [each for each, _ in made], [pairs for _, pairs in made], ctx.shape)
            return (dx, dW, S, db, Sb) + (None,) * 6
        if hw is not None:
            t = g * ((x - mean) * rstd)
            dW, S = deliver_sums(groups, hw, [p.sum(1) for p in groups.split(t, ctx.axis, event)])
            dW = cast(dW, hw)
        if hb is not None:
            db, Sb = deliver_sums(groups, hb, [p.sum(1) for p in groups.split(g, ctx.axis, event)])
            db = cast(db, hb)
        return (dx, dW, S, db, Sb) + (None,) * 6


class Affine(Function):
    """y = x w + b with w, b (C,) along dimension 1 of x (B·r, C, *spatial): the end of every
    channel norm."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Any,
        tag_w: Any,
        b: Any,
        tag_b: Any,
        groups: Groups,
        hw: Any,
        hb: Any,
    ) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.groups, ctx.hw, ctx.hb = groups, hw, hb
        shape = (1, -1) + (1,) * (x.ndim - 2)
        if w is None:
            return x + b.view(shape)  # type: ignore[no-any-return]
        if b is None:
            return x * w.view(shape)  # type: ignore[no-any-return]
        return torch.addcmul(b.view(shape), x, w.view(shape))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = ctx.saved_tensors
        groups = ctx.groups
        dx, dW, S, db, Sb = NOTHING
        if ctx.needs_input_grad[0]:
            dx = g if w is None else g * w.view((1, -1) + (1,) * (x.ndim - 2))
        if ctx.hw is not None and ctx.needs_input_grad[2]:
            dW, S = deliver_places(groups, ctx.hw, groups.stack(_spatial(g * x), 0))
        if ctx.hb is not None and ctx.needs_input_grad[4]:
            db, Sb = deliver_places(groups, ctx.hb, groups.stack(_spatial(g), 0))
        return (dx, cast(dW, ctx.hw), S, cast(db, ctx.hb), Sb) + (None,) * 3


class GhostNorm(Function):
    """x (B·r, C, *spatial) normalised by the μ and r (κ, C) of its groups, times w plus b.

    μ and r are constants to autograd: what they owe to x is in the kernel's dx. `made` holds the result where it was
    made together with them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        mean: Tensor,
        rstd: Tensor,
        w: Any,
        tag_w: Any,
        b: Any,
        tag_b: Any,
        groups: Groups,
        hw: Any,
        hb: Any,
        made: tuple[Tensor] | None,
    ) -> Tensor:
        ctx.save_for_backward(x, mean, rstd, plain(w))
        ctx.groups, ctx.hw, ctx.hb = groups, hw, hb
        if made is not None:
            return made[0]
        parts = zip(groups.pieces(x), groups.cut(mean), groups.cut(rstd), strict=True)
        return join([batch_norm.normalise(xs, mu, r, w, b) for xs, mu, r in parts])

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, mean, rstd, w = ctx.saved_tensors
        groups = ctx.groups
        parts = zip(groups.parts, groups.pieces(g), groups.pieces(x), groups.cut(mean), groups.cut(rstd), strict=True)
        hw, hb = wanted(ctx, 4, 6)
        if ctx.needs_input_grad[0]:
            refuse_penalty("batch norm", ctx.hw, ctx.hb)
        shares = any(h is not None and h.grouped for h in (hw, hb))
        made = [batch_norm.backward(gs, xs, mu, r, w, groups.coefficients(p), shares) for p, gs, xs, mu, r in parts]
        dx, each, pairs = zip(*made, strict=True)
        grads = deliver_both(hw, hb, each, pairs)
        return (join(dx) if ctx.needs_input_grad[0] else None, None, None, *grads, None, None, None, None)


def join(parts: Sequence[Tensor]) -> Tensor:
    """The parts of a mini-batch as one."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _spatial(t: Tensor) -> Tensor:
    """(B, C) as (B, C, 1), so that every channel tensor has a spatial dimension."""
    return t.unsqueeze(-1) if t.ndim == 2 else t

# ruff: noqa: D102 - forward and backward
"""Norms of each sample, times a weight plus a bias, whose gradients are sums over rows.

Layer, RMS, group and instance norm, and one that a model writes out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...kernels import cast, sums
from ...kernels.gemm_square import wide
from ..groups import UnsupportedUse
from ..mini_batch import MiniBatch
from ..weight import names_of
from . import base


class LayerNorm(base.Squaring):
    """Layer norm over the last dimensions, its normalised input recomputed in backward; the settings are (shape, ε)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, use: base.Use, w: Any, tag: Any, b: Any, tag_b: Any) -> Tensor:
        shape, eps = use.settings
        y, mean, rstd = torch.native_layer_norm(x, shape, w, b, eps)
        ctx.save_for_backward(x, w, b, mean, rstd)
        ctx.use = use
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w, b, mean, rstd = ctx.saved_tensors
        groups, axis, (shape, _) = ctx.use.groups, ctx.use.axis, ctx.use.settings
        event, dx, given = len(shape), None, x.dtype
        x = cast(x, g.dtype)  # autocast may have computed in another dtype than the input's
        if ctx.needs_input_grad[0]:
            with base.unfollowed():
                dx = torch.ops.aten.native_layer_norm_backward(g, x, shape, mean, rstd, w, b, [True, False, False])[0]
            dx = cast(dx, given)
        weight, bias = base.wanted(ctx, 0), base.wanted(ctx, 1)
        if weight is None and bias is None:
            return base.returned(ctx, dx, base.NOTHING, base.NOTHING)
        if sums.fused is not None:
            Gs, Xs = groups.split(g, axis, event), groups.split(x, axis, event)
            if event > 1:
                Gs, Xs = ([t.flatten(2) for t in each] for each in (Gs, Xs))
            if all(sums.takes_fused(t) for t in (*Gs, *Xs)):
                means, rstds = groups.split(mean, axis, 0), groups.split(rstd, axis, 0)
                rows = zip(groups.stretches, Gs, Xs, means, rstds, strict=True)
                shares = any(v is not None and v.handle.grouped for v in (weight, bias))
                made = [sums.norm_sums(G, X, mu, r, groups.coefficients(s), shares) for s, G, X, mu, r in rows]
                pairs = base.deliver_both(weight, bias, [each for each, _ in made], [pair for _, pair in made], shape)
                return base.returned(ctx, dx, *pairs)
        pair = pair_b = base.NOTHING
        if weight is not None:
            t = g * ((x - mean) * rstd)
            pair = base.deliver_sums(groups, weight, [p.sum(1) for p in groups.split(t, axis, event)])
        if bias is not None:
            pair_b = base.deliver_sums(groups, bias, [p.sum(1) for p in groups.split(g, axis, event)])
        return base.returned(ctx, dx, pair, pair_b)


class RMSNorm(base.Squaring):
    """RMS norm over the last dimensions; the settings are (shape, ε)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, use: base.Use, w: Tensor, tag: Any) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.use = use
        return torch.rms_norm(x, use.settings[0], w, use.settings[1])

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = ctx.saved_tensors
        groups, axis, (shape, eps) = ctx.use.groups, ctx.use.axis, ctx.use.settings
        event, acc, dx, pair = len(shape), wide(g.dtype), None, base.NOTHING
        X, g = x.to(acc), g.to(acc)
        dims = tuple(range(-event, 0))
        r = (X.square().mean(dims, keepdim=True) + (torch.finfo(acc).eps if eps is None else eps)).rsqrt()
        normal = X * r
        if ctx.needs_input_grad[0]:
            gw = g * w
            dx = (r * (gw - normal * (gw * normal).mean(dims, keepdim=True))).to(x.dtype)
        weight = base.wanted(ctx, 0)
        if weight is not None:
            pair = base.deliver_rows(groups, weight, groups.split(g * normal, axis, event))
        return base.returned(ctx, dx, pair)


class Channels(NamedTuple):
    """A norm of each sample (B·r, C, *spatial), scaled and shifted by channel."""

    own: Callable[[Tensor, Any, Any], Tensor]  # x, w, b -> y, as the model calls it
    groups: int  # of channels, which are normalised together
    eps: float
    running: tuple[Tensor, Tensor] | None = None  # the mean and variance (C,) that it takes instead of x's own


class ChannelNorm(base.Squaring):
    """Group and instance norm, and batch norm with its running statistics; the settings are `Channels`.

    With x̂ = (x − μ) r and means over what is normalised together,

        dx = r (g w − mean(g w) − x̂ mean(g w x̂)),

    without the means where μ and r are constants.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, use: base.Use, w: Any, tag: Any, b: Any, tag_b: Any) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.use = use
        return base.owned(use.settings.own(x, w, b))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = ctx.saved_tensors
        groups, how, acc = ctx.use.groups, ctx.use.settings, wide(g.dtype)
        X, g = x.to(acc), g.to(acc)
        parted = X.unflatten(1, (how.groups, -1))  # (N, groups, C / groups, *spatial)
        mean: Any
        if how.running is None:
            var, mean = torch.var_mean(parted, tuple(range(2, parted.ndim)), correction=0)
        else:
            mean, var = (t[None].to(acc) for t in how.running)
        r = (var + how.eps).rsqrt()[:, :, None]
        centred = parted - mean.view(*mean.shape, *(1,) * (parted.ndim - 2))

        def over_places(t: Tensor) -> Tensor:  # (N, groups, C / groups)
            return t.flatten(3).sum(3) if t.ndim > 3 else t

        parts = g.unflatten(1, (how.groups, -1))
        sums_b = over_places(parts)
        sums_w = over_places(parts * centred) * r
        dx, pair, pair_b = None, base.NOTHING, base.NOTHING
        if ctx.needs_input_grad[0]:
            scale = torch.ones_like(r) if w is None else w.to(acc).view(1, how.groups, -1)

            def spread(t: Tensor) -> Tensor:
                return t.reshape(*t.shape, *(1,) * (parts.ndim - 3))

            dx = parts * spread(r * scale)
            if how.running is None:
                n = parted[0, 0].numel()
                along = (scale * sums_w).sum(2, keepdim=True) / n
                level = (scale * sums_b).sum(2, keepdim=True) / n
                dx = dx - centred * spread(r * r * along) - spread(r * level)
            dx = dx.flatten(1, 2).to(x.dtype)
        weight, bias = base.wanted(ctx, 0), base.wanted(ctx, 1)
        if weight is not None:
            shares = groups.stack(sums_w.flatten(1), 0)
            pair = base.deliver_sums(groups, weight, [t.sum(1) for t in shares])
        if bias is not None:
            shares = groups.stack(sums_b.flatten(1), 0)
            pair_b = base.deliver_sums(groups, bias, [t.sum(1) for t in shares])
        return base.returned(ctx, dx, pair, pair_b)


class Affine(base.Squaring):
    """y = x w + b with w, b (C,) along dimension 1 of x (B·r, C, *spatial), where a model writes out a norm."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, use: base.Use, w: Tensor, tag: Any, b: Tensor, tag_b: Any) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.use = use
        shape = (1, -1) + (1,) * (x.ndim - 2)
        return torch.addcmul(b.view(shape), x, w.view(shape))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = ctx.saved_tensors
        groups = ctx.use.groups
        dx, pair, pair_b = None, base.NOTHING, base.NOTHING
        if ctx.needs_input_grad[0]:
            dx = (g * w.view((1, -1) + (1,) * (x.ndim - 2))).to(x.dtype)
        weight, bias = base.wanted(ctx, 0), base.wanted(ctx, 1)
        if weight is not None:
            pair = base.deliver_places(groups, weight, groups.stack(g * x, 0))
        if bias is not None:
            pair_b = base.deliver_places(groups, bias, groups.stack(g, 0))
        return base.returned(ctx, dx, pair, pair_b)


def _vectors(seen: base.Seen) -> base.Line:
    return base.by_sums(seen)._replace(rows=seen.per_group(seen.x.numel() // seen.x.shape[-1]))


@base.operation("layer_norm", line=_vectors)
def layer_norm(
    mini: MiniBatch, func: Any, input: Tensor, normalized_shape: Any, weight: Any = None, bias: Any = None,
    eps: float = 1e-5,
) -> Any:  # fmt: skip
    """Layer norm over the last dimensions."""
    shape = tuple(normalized_shape)
    use = base.use_of(mini, "layer_norm", input, len(shape), (weight, bias), (shape, eps))
    return NotImplemented if use is None else base.call(LayerNorm, input, use)


@base.operation("rms_norm", line=_vectors)
def rms_norm(
    mini: MiniBatch, func: Any, input: Tensor, normalized_shape: Any, weight: Any = None, eps: Any = None
) -> Any:
    """RMS norm over the last dimensions."""
    shape = tuple(normalized_shape)
    use = base.use_of(mini, "rms_norm", input, len(shape), (weight,), (shape, eps)) if mini.holds(weight) else None
    return NotImplemented if use is None else base.call(RMSNorm, input, use)


@base.operation("group_norm", line=base.by_sums)
def group_norm(
    mini: MiniBatch, func: Any, input: Tensor, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Any:
    """Group norm: per sample, then a channel's scale and shift."""

    def own(x: Tensor, w: Any, b: Any) -> Tensor:
        return torch.group_norm(x, num_groups, w, b, eps, torch.backends.cudnn.enabled)

    how = Channels(own, num_groups, eps)
    use = base.use_of(mini, "group_norm", input, input.ndim - 1, (weight, bias), how)
    return NotImplemented if use is None else base.call(ChannelNorm, input, use)


@base.operation("addcmul")
def addcmul(mini: MiniBatch, func: Any, input: Any, tensor1: Any, tensor2: Any, *, value: Any = 1) -> Any:
    """A bias plus x times a weight, both along the last dimension of x, where a model writes out a norm."""
    vectors = all(isinstance(v, Tensor) and v.ndim == 1 for v in (input, tensor2))
    if value != 1 or not vectors or not mini.holds(input) or not mini.holds(tensor2) or tensor1.ndim < 2:
        return NotImplemented
    first = not mini.groups.axis and tensor1.shape[0] == mini.groups.batch  # or else after time, perhaps
    if not first or not tensor1.shape[-1] == len(input) == len(tensor2):
        return NotImplemented
    x = tensor1.movedim(-1, 1)
    use = base.use_of(mini, "addcmul", x, x.ndim - 1, (tensor2, input))
    return NotImplemented if use is None else base.call(Affine, x, use).movedim(1, -1)


@base.operation("instance_norm", line=base.by_sums)
def instance_norm(
    mini: MiniBatch, func: Any, input: Tensor, running_mean: Any = None, running_var: Any = None, weight: Any = None,
    bias: Any = None, use_input_stats: bool = True, momentum: float = 0.1, eps: float = 1e-5,
) -> Any:  # fmt: skip
    """Instance norm: per sample, then a channel's scale and shift."""
    if use_input_stats and running_mean is not None:
        raise UnsupportedUse(
            f"{names_of((mini.handle_of(weight), mini.handle_of(bias)))} goes through instance_norm in train mode, and "
            "its running statistics would differ from the loop's; set track_running_stats=False"
        )

    def own(x: Tensor, w: Any, b: Any) -> Tensor:
        how = use_input_stats, momentum, eps, torch.backends.cudnn.enabled
        return torch.instance_norm(x, w, b, running_mean, running_var, *how)

    how = Channels(own, input.shape[1], eps, None if use_input_stats else (running_mean, running_var))
    use = base.use_of(mini, "instance_norm", input, input.ndim - 1, (weight, bias), how)
    return NotImplemented if use is None else base.call(ChannelNorm, input, use)

# ruff: noqa: D102 - forward and backward
"""Norms of each sample, times a weight plus a bias, whose gradients are sums over rows.

Layer, RMS, group and instance norm, and one that a model writes out.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels import sums
from ..dispatch import dispatch
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
        event, dx = len(shape), None
        if ctx.needs_input_grad[0]:
            dx = torch.ops.aten.native_layer_norm_backward(g, x, shape, mean, rstd, w, b, [True, False, False])[0]
        weight, bias = base.wanted(ctx, 0), base.wanted(ctx, 1)
        if weight is None and bias is None:
            return base.returned(ctx, dx, base.NOTHING, base.NOTHING)
        Gs, Xs = ([t.flatten(2) for t in groups.split(y, axis, event)] for y in (g, x))
        if all(sums.takes_fused(t) for t in (*Gs, *Xs)):
            means, rstds = ([t.flatten(1) for t in groups.split(y, axis, event)] for y in (mean, rstd))
            rows = zip(groups.stretches, Gs, Xs, means, rstds, strict=True)
            made = [sums.norm_sums(G, X, mu, r, groups.coefficients(s)) for s, G, X, mu, r in rows]
            pairs = base.deliver_both(weight, bias, [each for each, _ in made], [pair for _, pair in made], shape)
            return base.returned(ctx, dx, *pairs)
        pair = pair_b = base.NOTHING
        if weight is not None:
            t = g * ((x - mean) * rstd)
            pair = base.deliver_sums(groups, weight, [p.sum(1) for p in groups.split(t, axis, event)])
        if bias is not None:
            pair_b = base.deliver_sums(groups, bias, [p.sum(1) for p in groups.split(g, axis, event)])
        return base.returned(ctx, dx, pair, pair_b)


class Affine(base.Squaring):
    """y = x w + b with w, b (C,) along dimension 1 of x (B·r, C, *spatial): the end of every channel norm."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, use: base.Use, w: Any, tag: Any, b: Any, tag_b: Any) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.use = use
        shape = (1, -1) + (1,) * (x.ndim - 2)
        if w is None:
            return x + b.view(shape)  # type: ignore[no-any-return]
        if b is None:
            return x * w.view(shape)  # type: ignore[no-any-return]
        return torch.addcmul(b.view(shape), x, w.view(shape))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = ctx.saved_tensors
        groups = ctx.use.groups
        dx, pair, pair_b = None, base.NOTHING, base.NOTHING
        if ctx.needs_input_grad[0]:
            dx = g if w is None else g * w.view((1, -1) + (1,) * (x.ndim - 2))
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
    if use is None:
        return NotImplemented
    if torch.is_autocast_enabled(input.device.type) and input.dtype != torch.float64:
        input = input.float()  # as autocast does for layer norm
    return base.call(LayerNorm, input, use)


@base.operation("rms_norm")
def rms_norm(
    mini: MiniBatch, func: Any, input: Tensor, normalized_shape: Any, weight: Any = None, eps: Any = None
) -> Any:
    """RMS norm: the normalised input times a vector."""
    if mini.holds(input) or not mini.holds(weight):
        return NotImplemented
    return dispatch(torch.mul, (F.rms_norm(input, tuple(normalized_shape), None, eps), weight), {})


@base.operation("group_norm", line=base.by_sums)
def group_norm(
    mini: MiniBatch, func: Any, input: Tensor, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Any:
    """Group norm: per sample, then a channel's scale and shift."""
    use = base.use_of(mini, "group_norm", input, input.ndim - 1, (weight, bias))
    return NotImplemented if use is None else base.call(Affine, F.group_norm(input, num_groups, None, None, eps), use)


@base.operation("addcmul")
def addcmul(mini: MiniBatch, func: Any, input: Any, tensor1: Any, tensor2: Any, *, value: Any = 1) -> Any:
    """A bias plus x times a weight, both along the last dimension of x: the end of a norm that a model writes out."""
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
    use = base.use_of(mini, "instance_norm", input, input.ndim - 1, (weight, bias))
    if use is None:
        return NotImplemented
    x = F.instance_norm(input, running_mean, running_var, None, None, use_input_stats, momentum, eps)
    return base.call(Affine, x, use)

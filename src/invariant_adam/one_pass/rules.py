# torch leaves Function.apply and hooks untyped:
# mypy: disable-error-code="no-untyped-call,no-any-return"
"""One rule per operation: which rows belong to which group, and which Function computes the
squares.

A rule gets the engine, the torch function and its arguments; it returns the result, or
NotImplemented to leave the case to the fallback.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.conv_square import Geometry
from .batch_norm import ghost_statistics
from .dispatch import dispatch, rule
from .functions import Affine, Conv, Embedding, GhostNorm, LayerNorm, Linear, RoutedLinear, call
from .groups import UnsupportedUse
from .handles import Handle, apart, lift
from .into import SMALL

if TYPE_CHECKING:
    from .engine import Engine


def autocast(x: Tensor) -> Tensor:
    """x as autocast would hand it to a matrix product: a Function has to ask, and then saves the
    small copy."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and x.is_floating_point() and x.dtype != torch.float64:
        return x.to(torch.get_autocast_dtype(kind))
    return x


def parts(engine: Engine, h: Handle | None, plain: Any, ticket: int | None = 0) -> tuple[Any, Any]:
    """(w, tag) as the Functions take them; `ticket` for one that hands its pair over by `deliver`, each its own."""
    if h is None:
        return plain, None
    if not h.grouped:
        engine.count(h)
        h.into = engine.into and h.direct and ticket is not None and not _waits(h.value)
        if h.into and ticket is not None:
            return h.value, engine.ticket(h.value.device, ticket)
    return h.value, h.tag


def _waits(p: Tensor) -> bool:
    """Whether the pair of a parameter is to be returned like a gradient, though a sink is open: see `into.SMALL`."""
    return torch.compiler.is_compiling() and p.ndim < 2 and p.numel() < SMALL


def _varies(*tensors: tuple[Any, Handle | None]) -> bool:
    """Whether a tensor that should be a parameter, and so have a handle, comes from the batch."""
    return any(h is None and isinstance(t, Tensor) and t.requires_grad for t, h in tensors)


def linear_with(
    engine: Engine,
    name: str,
    x: Tensor,
    weight: Any,
    bias: Any,
    flip: bool = False,
    axis: Any = None,
) -> Any:
    """y = x wᵀ + b (x w + b with `flip`), the batch of x at `axis` or found."""
    hw, hb = engine.handle_of(weight), engine.handle_of(bias)
    if engine.holds(x) or weight.ndim != 2 or x.ndim < 2 or _varies((weight, hw), (bias, hb)):
        return NotImplemented
    if axis is None:
        place = engine.place(x, 1, name, (hw, hb), routed=True)
        if place is None:
            return NotImplemented
    else:
        place = engine.place_at(x, axis, 1, name, (hw, hb))
    w, tag_w = parts(engine, hw, weight, 0 if place.ids is None else None)
    b, tag_b = parts(engine, hb, bias, 1 if place.ids is None else None)
    x = autocast(x)
    if place.ids is not None:
        return RoutedLinear.apply(x, w, tag_w, b, tag_b, place.ids, engine.groups, flip, hw, hb)
    return call(Linear, x, w, tag_w, b, tag_b, engine.groups, place.axis, flip, hw, hb)


@rule("linear")
def linear(engine: Engine, func: Any, input: Tensor, weight: Any, bias: Any = None) -> Any:
    """y = x wᵀ + b."""
    return linear_with(engine, "linear", input, weight, bias)


@rule("matmul", "__matmul__", "mm")
def matmul(engine: Engine, func: Any, input: Any, other: Any) -> Any:
    """y = x w for w (i, o); other products go through the fallback."""
    return linear_with(engine, "matmul", input, other, None, flip=True)


@rule("addmm")
def addmm(
    engine: Engine,
    func: Any,
    input: Any,
    mat1: Any,
    mat2: Any,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> Any:
    """y = b + x w."""
    if beta != 1 or alpha != 1 or input.ndim != 1:
        return NotImplemented
    return linear_with(engine, "addmm", mat1, mat2, input, flip=True)


@rule("bilinear")
def bilinear(engine: Engine, func: Any, input1: Tensor, input2: Tensor, weight: Any, bias: Any = None) -> Any:
    """y_o = x₁ᵀ W_o x₂ + b_o: a linear layer of the outer product of its inputs."""
    outer = (input1[..., :, None] * input2[..., None, :]).flatten(-2)
    return dispatch(F.linear, (outer, dispatch(Tensor.flatten, (weight, 1), {}), bias), {})


def _sizes(value: Any, n: int) -> tuple[int, ...]:
    return (value,) * n if isinstance(value, int) else tuple(value) * (n if len(value) == 1 else 1)


def _convolve(
    engine: Engine,
    name: str,
    x: Tensor,
    weight: Any,
    bias: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    groups: int,
    transposed: bool = False,
    output_padding: Any = 0,
) -> Any:
    hw, hb = engine.handle_of(weight), engine.handle_of(bias)
    if engine.holds(x) or _varies((weight, hw), (bias, hb)):
        return NotImplemented
    n = weight.ndim - 2
    if x.ndim != n + 2:
        raise UnsupportedUse(
            f"{engine.names((hw, hb))} goes through {name} with an input of shape {tuple(x.shape)} "
            "without a batch dimension; add one"
        )
    if engine.place(x, n + 1, name, (hw, hb)) is None:
        return NotImplemented
    dilation = _sizes(dilation, n)
    x = autocast(x)
    if padding == "valid":
        padding = 0
    elif padding == "same":
        total = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
        x = F.pad(x, [v for t in reversed(total) for v in (t // 2, t - t // 2)])
        padding = 0
    w, tag_w = parts(engine, hw, weight)
    b, tag_b = parts(engine, hb, bias, 1)
    geo = Geometry(
        tuple(weight.shape),
        _sizes(stride, n),
        _sizes(padding, n),
        dilation,
        transposed,
        _sizes(output_padding, n),
        groups,
        n == 2 and weight.is_contiguous(memory_format=torch.channels_last) and not weight.is_contiguous(),
    )
    return call(Conv, x, w, tag_w, b, tag_b, engine.groups, geo, hw, hb)


@rule("conv1d", "conv2d", "conv3d")
def convolution(
    engine: Engine,
    func: Any,
    input: Tensor,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    """A convolution of any stride, padding, dilation and grouping."""
    return _convolve(engine, func.__name__, input, weight, bias, stride, padding, dilation, groups)


@rule("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def transposed_convolution(
    engine: Engine,
    func: Any,
    input: Tensor,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Any:
    """A transposed convolution."""
    return _convolve(
        engine,
        func.__name__,
        input,
        weight,
        bias,
        stride,
        padding,
        dilation,
        groups,
        True,
        output_padding,
    )


@rule("embedding")
def embedding(
    engine: Engine,
    func: Any,
    input: Tensor,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: Any = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """Rows of a table; repeated tokens of one micro-batch add before squaring."""
    h = engine.handle_of(weight)
    if max_norm is not None or scale_grad_by_freq:
        option = "max_norm" if max_norm is not None else "scale_grad_by_freq"
        raise UnsupportedUse(
            f"{engine.names((h,))} goes through embedding with {option}, which depends on the "
            "whole mini-batch; leave it out or loop over micro-batches"
        )
    if h is None or engine.holds(input):
        return NotImplemented
    place = engine.place(input, 0, "embedding", (h,))
    if place is None:
        return NotImplemented
    if padding_idx is not None and padding_idx < 0:
        padding_idx += weight.shape[0]
    w, tag = parts(engine, h, weight)
    return Embedding.apply(input, w, tag, padding_idx, engine.groups, place.axis, h)


@rule("embedding_bag")
def embedding_bag(
    engine: Engine,
    func: Any,
    input: Tensor,
    weight: Any,
    offsets: Any = None,
    max_norm: Any = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Any = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Any:
    """An embedding reduced over the second dimension of its ids (B, N)."""
    h = engine.handle_of(weight)
    if offsets is not None or input.ndim != 2:
        raise UnsupportedUse(
            f"{engine.names((h,))} goes through embedding_bag with offsets; pad the bags to ids of "
            "shape (batch, length) with padding_idx"
        )
    if engine.holds(input) or h is None:
        return NotImplemented
    if padding_idx is not None and padding_idx < 0:
        padding_idx += weight.shape[0]
    rows = dispatch(F.embedding, (input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq), {})
    kept = torch.ones_like(input, dtype=torch.bool) if padding_idx is None else input != padding_idx
    if mode == "max":
        rows = rows.masked_fill(~kept[..., None], -torch.inf).amax(1)
        return rows.masked_fill(~kept.any(1, keepdim=True), 0)
    scale = kept.to(rows.dtype)
    if per_sample_weights is not None:
        scale = scale * per_sample_weights
    total = (rows * scale[..., None]).sum(1)
    return total if mode == "sum" else total / kept.sum(1, keepdim=True).clamp(min=1)


@rule("layer_norm")
def layer_norm(
    engine: Engine,
    func: Any,
    input: Tensor,
    normalized_shape: Any,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
) -> Any:
    """Layer norm over the last dimensions."""
    hw, hb = engine.handle_of(weight), engine.handle_of(bias)
    shape = tuple(normalized_shape)
    if engine.holds(input) or _varies((weight, hw), (bias, hb)):
        return NotImplemented
    place = engine.place(input, len(shape), "layer_norm", (hw, hb))
    if place is None:
        return NotImplemented
    w, tag_w = parts(engine, hw, weight)
    b, tag_b = parts(engine, hb, bias, 1)
    kind = input.device.type
    if torch.is_autocast_enabled(kind) and input.dtype != torch.float64:
        input = input.float()  # as autocast does for layer norm
    return call(LayerNorm, input, w, tag_w, b, tag_b, engine.groups, place.axis, shape, eps, hw, hb)


@rule("rms_norm")
def rms_norm(
    engine: Engine,
    func: Any,
    input: Tensor,
    normalized_shape: Any,
    weight: Any = None,
    eps: Any = None,
) -> Any:
    """RMS norm: the normalised input times a vector."""
    if engine.holds(input) or not engine.holds(weight):
        return NotImplemented
    return dispatch(torch.mul, (F.rms_norm(input, tuple(normalized_shape), None, eps), weight), {})


def _channel_affine(engine: Engine, x: Tensor, weight: Any, bias: Any) -> Any:
    hw, hb = engine.handle_of(weight), engine.handle_of(bias)
    w, tag_w = parts(engine, hw, weight)
    b, tag_b = parts(engine, hb, bias, 1)
    return call(Affine, x, w, tag_w, b, tag_b, engine.groups, hw, hb)


def _channel_place(
    engine: Engine, name: str, x: Tensor, weight: Any, bias: Any
) -> tuple[Handle | None, Handle | None] | None:
    """The handles, where x is a batch of channel tensors that a channel norm's rule can serve."""
    held = (engine.handle_of(weight), engine.handle_of(bias))
    if engine.holds(x) or _varies((weight, held[0]), (bias, held[1])):
        return None
    return None if engine.place(x, x.ndim - 1, name, held) is None else held


@rule("group_norm")
def group_norm(
    engine: Engine,
    func: Any,
    input: Tensor,
    num_groups: int,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
) -> Any:
    """Group norm: per sample, then a channel's scale and shift."""
    if _channel_place(engine, "group_norm", input, weight, bias) is None:
        return NotImplemented
    return _channel_affine(engine, F.group_norm(input, num_groups, None, None, eps), weight, bias)


@rule("addcmul")
def addcmul(engine: Engine, func: Any, input: Any, tensor1: Any, tensor2: Any, *, value: Any = 1) -> Any:
    """A bias plus x times a weight, both along the last dimension of x: the end of a norm that a model writes out."""
    vectors = all(isinstance(v, Tensor) and v.ndim == 1 for v in (input, tensor2))
    if value != 1 or not vectors or not engine.holds(input) or not engine.holds(tensor2) or tensor1.ndim < 2:
        return NotImplemented
    if engine.groups.axis or tensor1.shape[0] != engine.groups.batch:  # the batch is elsewhere, after time perhaps
        return NotImplemented
    x = tensor1.movedim(-1, 1)
    if (
        x.shape[1] != len(input)
        or len(input) != len(tensor2)
        or not _channel_place(engine, "addcmul", x, tensor2, input)
    ):
        return NotImplemented
    return _channel_affine(engine, x, tensor2, input).movedim(1, -1)


@rule("instance_norm")
def instance_norm(
    engine: Engine,
    func: Any,
    input: Tensor,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """Instance norm: per sample, then a channel's scale and shift."""
    if use_input_stats and running_mean is not None:
        held = (engine.handle_of(weight), engine.handle_of(bias))
        raise UnsupportedUse(
            f"{engine.names(held)} goes through instance_norm with track_running_stats=True in "
            "train mode, whose running statistics would differ from the loop's; set "
            "track_running_stats=False"
        )
    if _channel_place(engine, "instance_norm", input, weight, bias) is None:
        return NotImplemented
    x = F.instance_norm(input, running_mean, running_var, None, None, use_input_stats, momentum, eps)
    return _channel_affine(engine, x, weight, bias)


@rule("batch_norm")
def batch_norm(
    engine: Engine,
    func: Any,
    input: Tensor,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """Batch norm: in train mode each micro-batch has its own statistics, as in the loop."""
    held = _channel_place(engine, "batch_norm", input, weight, bias)
    if held is None:
        return NotImplemented
    if not training:
        x = F.batch_norm(input, running_mean, running_var, None, None, False, 0.0, eps)
        return _channel_affine(engine, x, weight, bias)
    hw, hb = held
    entry = next((h.entry for h in held if h is not None and h.entry is not None), None)
    tracked, cumulative = (None, False) if entry is None else (entry.tracked, entry.cumulative)
    w, tag_w = parts(engine, hw, weight)
    b, tag_b = parts(engine, hb, bias, 1)
    mean, rstd, made = ghost_statistics(
        engine, input, running_mean, running_var, tracked, momentum, cumulative, eps, w, b
    )
    return call(GhostNorm, input, mean, rstd, w, tag_w, b, tag_b, engine.groups, hw, hb, made)


@rule(
    "add",
    "sub",
    "subtract",
    "mul",
    "multiply",
    "div",
    "divide",
    "true_divide",
    "rsub",
    "__add__",
    "__radd__",
    "__sub__",
    "__rsub__",
    "__mul__",
    "__rmul__",
    "__truediv__",
    "__rtruediv__",
    "__rdiv__",
)
def elementwise(engine: Engine, func: Any, *args: Any, **kwargs: Any) -> Any:
    """A parameter against the batch, element by element: each group meets its own copy."""
    if len(args) != 2 or not (isinstance(args[0], Tensor) and isinstance(args[1], Tensor)):
        return NotImplemented
    first, second = engine.handle_of(args[0]), engine.handle_of(args[1])
    if (first is None) == (second is None):
        return NotImplemented
    h, x = (first, args[1]) if first is not None else (second, args[0])
    assert h is not None
    if h.value.ndim > x.ndim:
        return NotImplemented
    place = engine.place(x, 0, func.__name__, (h,), routed=True)
    if place is None:
        return NotImplemented
    axis = place.axis
    under = axis - (x.ndim - h.value.ndim)  # the parameter's dimension under the batch
    if under >= 0 and h.value.shape[under] != 1:
        return NotImplemented
    groups = engine.groups
    copies = engine.grouped(h)
    copies = copies.reshape(copies.shape[0], *(1,) * (x.ndim - h.value.ndim), *h.value.shape)
    copies = copies.movedim(axis + 1, 1)
    if place.ids is not None:
        own = copies[place.ids].squeeze(1)
        return func(own, x, **kwargs) if first is not None else func(x, own, **kwargs)
    out = []
    for part, xs in zip(groups.parts, groups.stack(x, axis), strict=True):
        p = copies[part.lo : part.hi]
        out.append(func(p, xs, **kwargs) if first is not None else func(xs, p, **kwargs))
    return groups.merge(out, axis)


@rule("expand", "repeat")
def expand(engine: Engine, func: Any, input: Any, *sizes: Any) -> Any:
    """A parameter spread over the batch (class tokens, queries): remember the copies before the
    spread."""
    h = engine.handle_of(input)
    if len(sizes) == 1 and not isinstance(sizes[0], int):
        sizes = tuple(sizes[0])
    axis, batch = engine.groups.axis, engine.groups.batch
    source = axis - (len(sizes) - input.ndim)
    if h is None or axis >= len(sizes) or sizes[axis] != batch or (source >= 0 and input.shape[source] != 1):
        return NotImplemented
    engine.note(h, func.__name__)
    base = engine.grouped(h)

    def spread(copies: Tensor, rows: int) -> Tensor:
        to = (*sizes[:axis], rows, *sizes[axis + 1 :])
        return torch.func.vmap(lambda t: func(t, *to))(copies)

    def resize(lo: int, hi: int, rows: int) -> Tensor:
        return spread(base[lo:hi], rows)

    value = func(apart(h.value), *sizes)
    return lift(value, Handle(value, spread(base, batch), True, None, resize, h.label))


@rule("__iter__")
def iterate(engine: Engine, func: Any, input: Any) -> Any:
    """The rows of a parameter, one by one."""
    return iter(dispatch(Tensor.unbind, (input, 0), {}))


@rule("expand_as")
def expand_as(engine: Engine, func: Any, input: Any, other: Tensor) -> Any:
    """`expand` to the shape of another tensor."""
    return dispatch(Tensor.expand, (input, *other.shape), {})

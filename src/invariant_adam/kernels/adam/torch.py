"""Invariant Adam's passes over memory in plain torch, for every device.

Each function takes lists of tensors that share a device and all scalars; each list has one dtype. The scalars are
Python floats: a changed learning rate is a changed argument, and costs neither a host sync nor a recompilation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from itertools import chain

import torch
from torch import Tensor

Tensors = list[Tensor]
Factors = tuple[float, float]  # on m and g, on v and g²
_PART = 1 << 24  # elements copied or allocated at a time on an accelerator, where tensors share launches


def guard(grads: Tensors, squares: Tensors | None, count: Tensor) -> None:
    """Set to zero in place, and count, the elements that would leave a moment non-finite.

    These are NaNs, infinities, and values so large that sums of their squares would overflow. On the CPU one norm per
    tensor tells whether there is anything to do, usually not. Elsewhere the host would wait for that norm: there is no
    such test.

    >>> g, count = torch.tensor([1.0, math.nan, 1e30]), torch.tensor(0)
    >>> guard([g], None, count)
    >>> g.tolist(), count.item()
    ([1.0, 0.0, 0.0], 2)
    """
    for i, g in enumerate(grads):
        square = None if squares is None else squares[i]
        wide, limit = wide_of(g.dtype), limit_of(g.dtype)
        if g.is_cpu:
            fine = torch.linalg.vector_norm(g, dtype=wide).item() < limit
            if fine and (square is None or square.sum().item() < limit**2):
                continue
        bad = (g.abs() < limit).logical_not_()  # NaN is not below anything
        if square is not None:
            bad |= (square < limit**2).logical_not_()
            square.masked_fill_(bad, 0.0)
        g.masked_fill_(bad, 0.0)
        count += bad.sum()


@cache
def wide_of(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which `dtype` is squared."""
    return torch.promote_types(dtype, torch.float32)


@cache
def limit_of(dtype: torch.dtype) -> float:
    """The magnitude below which sums of squares of `dtype` do not overflow: 1.8e16 in float32."""
    return math.sqrt(torch.finfo(wide_of(dtype)).max) / 1024


def lie_alike(tensors: Tensors, *others: Tensors) -> bool:
    """Whether the tensors are dense, and those of `others` have their elements in the same order."""
    if all(map(Tensor.is_contiguous, chain(tensors, *others))):
        return True  # as nearly always
    strides = list(map(Tensor.stride, tensors))
    return (all(map(Tensor.is_contiguous, tensors)) or all(map(_is_dense, tensors))) and all(
        list(map(Tensor.stride, xs)) == strides or all(map(_lies_like, tensors, xs)) for xs in others
    )


def _is_dense(t: Tensor) -> bool:
    return t.is_contiguous() or t.is_contiguous(memory_format=torch.channels_last)


def _lies_like(a: Tensor, b: Tensor) -> bool:
    # Strides of sides of size 1 mean nothing: the weight of a 1 × 1 convolution is both contiguous and channels last.
    return a.stride() == b.stride() or all(
        n == 1 or s == t for n, s, t in zip(a.shape, a.stride(), b.stride(), strict=True)
    )


def clip(grads: Tensors, max_norm: float, divisor: float = 1.0) -> Tensors:
    """Return `grads` scaled so that their common norm times `divisor` is at most `max_norm`; may write over them.

    Gradients of 16 bits come back in float32, where a small factor does not round to zero.

    >>> [round(x.item(), 5) for x in clip([torch.tensor([3.0]), torch.tensor([4.0])], 1.0)]
    [0.6, 0.8]
    """
    device = grads[0].device
    wide = [g.to(wide_of(g.dtype)) for g in grads]
    norms = [torch.linalg.vector_norm(g).to(device, torch.float32) for g in wide]
    norm = torch.linalg.vector_norm(torch.stack(norms)) * divisor
    factor = (max_norm / (norm + 1e-6)).clamp_(max=1.0)  # as torch.nn.utils.clip_grad_norm_ has it
    return [g.mul_(factor.to(g.device, g.dtype)) for g in wide]


def fold(
    grads: Tensors, squares: Tensors | None, exp_avgs: Tensors, exp_avg_sqs: Tensors, *,
    keep: Factors, gain: Factors, count: Tensor, slots: Tensor | None = None,
) -> None:  # fmt: skip
    """Fold a micro-batch's gradients, or the pairs of a one-pass mini-batch, into the moments in place.

        m ← keep₁·m + gain₁·g        v ← keep₂·v + gain₂·g²

    Args:
        grads: g, in the parameters' dtype.
        squares: what stands for g² (the mean of a one-pass mini-batch's squares); None to square `grads`.
        exp_avgs: m.
        exp_avg_sqs: v.
        keep: factors on m and v; 1 after the first micro-batch of an update.
        gain: factors on g and g².
        count: counts the elements that `guard` leaves out.
        slots: keep and gain on the device, in place of the floats (see the package).

    >>> g, m, v = torch.tensor([3.0]), torch.tensor([1.0]), torch.tensor([1.0])
    >>> fold([g], None, [m], [v], keep=(0.5, 0.25), gain=(0.5, 0.75), count=torch.tensor(0))
    >>> m.item(), v.item()
    (2.0, 7.0)
    """
    for part in _parts(grads):
        g, m, v = grads[part], exp_avgs[part], exp_avg_sqs[part]
        sq = None if squares is None else squares[part]
        guard(g, sq, count)
        if g[0].dtype != m[0].dtype:  # squared in the moments' precision: a bfloat16 product would keep 8 bits
            g = [x.to(y.dtype) for x, y in zip(g, m, strict=True)]
        if slots is not None:
            keep1, keep2, gain1, gain2 = slots[:4].unbind()
            torch._foreach_mul_(m, keep1)
            torch._foreach_add_(m, torch._foreach_mul(g, gain1))
            torch._foreach_mul_(v, keep2)
            torch._foreach_add_(v, torch._foreach_mul(torch._foreach_mul(g, g) if sq is None else sq, gain2))
            continue
        if keep[0] != 1.0:
            torch._foreach_mul_(m, keep[0])
        torch._foreach_add_(m, g, alpha=gain[0])
        if keep[1] != 1.0:
            torch._foreach_mul_(v, keep[1])
        if sq is None:
            torch._foreach_addcmul_(v, g, g, value=gain[1])
        else:
            torch._foreach_add_(v, sq, alpha=gain[1])


def step(
    params: Tensors, exp_avgs: Tensors, exp_avg_sqs: Tensors, *,
    size: float, eps: float, decay: float, slots: Tensor | None = None,
) -> None:  # fmt: skip
    """Move the weights in place: w ← decay·w − size·m / (√v + eps).

    `size` and `eps` contain debiasing, normalisation and the learning rate, so m and v are read once and not written.

    >>> w, m, v = torch.tensor([1.0]), torch.tensor([2.0]), torch.tensor([4.0])
    >>> step([w], [m], [v], size=0.25, eps=0.0, decay=0.5)
    >>> w.item()
    0.25
    """
    for part in _parts(params):
        m, v = exp_avgs[part], exp_avg_sqs[part]
        # In the moments' precision, rounded to the weights' once.
        w = [x.to(y.dtype) for x, y in zip(params[part], m, strict=True)]
        denominators = torch._foreach_sqrt(v)
        if slots is None:
            torch._foreach_add_(denominators, eps)
            if decay != 1.0:
                torch._foreach_mul_(w, decay)
            torch._foreach_addcdiv_(w, m, denominators, value=-size)
        else:
            torch._foreach_add_(denominators, slots[5])
            torch._foreach_mul_(w, slots[6])
            torch._foreach_sub_(w, torch._foreach_mul(torch._foreach_div(m, denominators), slots[4]))
        if w[0] is not params[part][0]:
            torch._foreach_copy_(params[part], w)


def fold_step(
    params: Tensors, grads: Tensors, squares: Tensors | None, exp_avgs: Tensors, exp_avg_sqs: Tensors, *,
    keep: Factors, gain: Factors, size: float, eps: float, decay: float, count: Tensor, slots: Tensor | None = None,
) -> None:  # fmt: skip
    """`fold`, then `step`: torch's own fused kernel where that is the same, else part by part of the lists.

    A part is still in the cache when `step` comes to it.

    >>> w, g, m, v = torch.tensor([1.0]), torch.tensor([3.0]), torch.tensor([1.0]), torch.tensor([1.0])
    >>> scalars = {"keep": (0.5, 0.25), "gain": (0.5, 0.75), "size": 0.25, "eps": 0.0, "decay": 1.0}
    >>> fold_step([w], [g], None, [m], [v], **scalars, count=torch.tensor(0))
    >>> round(w.item(), 4)  # 1 − 0.25·2/√7
    0.811
    """
    if squares is None and slots is None and size and _is_average(keep, gain):
        lists = (params, grads, exp_avgs, exp_avg_sqs)
        if params[0].is_cpu and len({x.dtype for xs in lists for x in xs}) == 1 and lie_alike(*lists):
            guard(grads, None, count)
            # After infinitely many steps Adam debiases nothing more: here `size` and `eps` do that.
            torch._fused_adamw_(
                *lists, [], [torch.tensor(math.inf)] * len(params), lr=size, beta1=keep[0], beta2=keep[1],
                weight_decay=(1 - decay) / size, eps=eps, amsgrad=False, maximize=False,
            )  # fmt: skip
            return
    for part in _parts(params):
        m, v = exp_avgs[part], exp_avg_sqs[part]
        sq = None if squares is None else squares[part]
        fold(grads[part], sq, m, v, keep=keep, gain=gain, count=count, slots=slots)
        step(params[part], m, v, size=size, eps=eps, decay=decay, slots=slots)


def _is_average(keep: Factors, gain: Factors) -> bool:
    """Whether a fold is one of Adam's, m ← β₁m + (1−β₁)g and the like, as in an update of the κ that was expected."""
    return all(0 <= k < 1 and abs(k + g - 1) < 1e-15 for k, g in zip(keep, gain, strict=True))


def _parts(tensors: Tensors) -> Iterator[slice]:
    """Cut a list so that temporaries stay small: on the CPU, where they must fit the cache, one tensor at a time."""
    limit = 1 if tensors[0].device.type == "cpu" else _PART
    start = elements = 0
    for i, t in enumerate(tensors):
        elements += t.numel()
        if elements >= limit:
            yield slice(start, i + 1)
            start, elements = i + 1, 0
    if start < len(tensors):
        yield slice(start, len(tensors))

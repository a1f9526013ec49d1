"""Invariant Adam's passes over memory in plain torch, for every device: `guard`, `clip`, `fold`, `step`, `fold_step`.

Each takes lists of tensors that share a device, a dtype per list and all scalars. The scalars are Python floats:
a changed learning rate is a changed argument, so it costs neither a host sync nor a recompilation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

# Elements that may be copied or allocated at a time on an accelerator, where launches are worth sharing.
_PART = 1 << 24


def guard(grads: list[Tensor], squares: list[Tensor] | None, count: Tensor) -> None:
    """Set to zero in place, and count, the elements that would leave a moment non-finite.

    These are NaNs, infinities, and values so large that sums of their squares would overflow. On the CPU one norm per
    tensor finds the usual case, where there is nothing to do; elsewhere looking at it would stop the host, so no branch
    is taken.

    >>> g, count = torch.tensor([1.0, math.nan, 1e30]), torch.tensor(0)
    >>> guard([g], None, count)
    >>> g.tolist(), count.item()
    ([1.0, 0.0, 0.0], 2)
    """
    for i, g in enumerate(grads):
        square = None if squares is None else squares[i]
        wide, limit = _limit(g.dtype)
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
def _limit(dtype: torch.dtype) -> tuple[torch.dtype, float]:
    """The dtype in which `dtype` is squared, and the magnitude up to which sums of squares are safe in it."""
    wide = torch.promote_types(dtype, torch.float32)
    return wide, math.sqrt(torch.finfo(wide).max) / 1024  # 1.8e16 in float32


def clip(grads: list[Tensor], max_norm: float, divisor: float = 1.0) -> list[Tensor]:
    """Return `grads` scaled so that their common norm times `divisor` is at most `max_norm`; may write over them.

    Gradients of 16 bits come back in float32, where a small factor does not round to zero.

    >>> [round(x.item(), 5) for x in clip([torch.tensor([3.0]), torch.tensor([4.0])], 1.0)]
    [0.6, 0.8]
    """
    device = grads[0].device
    wide = [g.to(_limit(g.dtype)[0]) for g in grads]
    norms = [torch.linalg.vector_norm(g).to(device, torch.float32) for g in wide]
    norm = torch.linalg.vector_norm(torch.stack(norms)) * divisor
    factor = (max_norm / (norm + 1e-6)).clamp_(max=1.0)  # as torch.nn.utils.clip_grad_norm_ has it
    return [g.mul_(factor.to(g.device, g.dtype)) for g in wide]


def fold(
    grads: list[Tensor],
    squares: list[Tensor] | None,
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    *,
    keep: tuple[float, float],
    gain: tuple[float, float],
    count: Tensor,
    slots: Tensor | None = None,
) -> None:
    """Fold one micro-batch, or the pair of a one-pass mini-batch, into the moments in place.

        m ← keep₁·m + gain₁·g        v ← keep₂·v + gain₂·g²

    Args:
        grads: g, in the parameters' dtype.
        squares: what stands for g² (a one-pass mini-batch's mean of squares); None to square `grads`.
        exp_avgs: m.
        exp_avg_sqs: v.
        keep: factors on m and v; 1 after the first micro-batch of an update.
        gain: factors on g and g².
        count: where the elements are counted that `guard` leaves out.
        slots: keep and gain on the device, in place of the floats (see `adam`).

    >>> g, m, v = torch.tensor([3.0]), torch.tensor([1.0]), torch.tensor([1.0])
    >>> fold([g], None, [m], [v], keep=(0.5, 0.25), gain=(0.5, 0.75), count=torch.tensor(0))
    >>> m.item(), v.item()
    (2.0, 7.0)
    """
    for part in _parts(grads):
        guard(grads[part], None if squares is None else squares[part], count)
        m, v = exp_avgs[part], exp_avg_sqs[part]
        # The square is taken in the moments' precision: a bfloat16 product would keep 8 bits of it.
        g = (
            grads[part]
            if grads[0].dtype == m[0].dtype
            else [x.to(y.dtype) for x, y in zip(grads[part], m, strict=True)]
        )
        sq = None if squares is None else squares[part]
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
    params: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    *,
    size: float,
    eps: float,
    decay: float,
    slots: Tensor | None = None,
) -> None:
    """Move the weights in place: w ← decay·w − size·m / (√v + eps).

    Debiasing, normalisation and the learning rate are all inside `size` and `eps`, so that m and v are read once
    and never written.

    >>> w, m, v = torch.tensor([1.0]), torch.tensor([2.0]), torch.tensor([4.0])
    >>> step([w], [m], [v], size=0.25, eps=0.0, decay=0.5)
    >>> w.item()
    0.25
    """
    for part in _parts(params):
        m, v = exp_avgs[part], exp_avg_sqs[part]
        # The arithmetic is done in the moments' precision and rounded to the weights' once.
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
    params: list[Tensor],
    grads: list[Tensor],
    squares: list[Tensor] | None,
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    *,
    keep: tuple[float, float],
    gain: tuple[float, float],
    size: float,
    eps: float,
    decay: float,
    count: Tensor,
    slots: Tensor | None = None,
) -> None:
    """`fold`, then `step`, on one part of the lists after the other, so that a part is still in the cache.

    >>> w, g, m, v = torch.tensor([1.0]), torch.tensor([3.0]), torch.tensor([1.0]), torch.tensor([1.0])
    >>> scalars = {"keep": (0.5, 0.25), "gain": (0.5, 0.75), "size": 0.25, "eps": 0.0, "decay": 1.0}
    >>> fold_step([w], [g], None, [m], [v], **scalars, count=torch.tensor(0))
    >>> round(w.item(), 4)  # 1 − 0.25·2/√7
    0.811
    """
    for part in _parts(params):
        m, v = exp_avgs[part], exp_avg_sqs[part]
        sq = None if squares is None else squares[part]
        fold(grads[part], sq, m, v, keep=keep, gain=gain, count=count, slots=slots)
        step(params[part], m, v, size=size, eps=eps, decay=decay, slots=slots)


def _parts(tensors: list[Tensor]) -> Iterator[slice]:
    """Cut a list so that temporaries stay small: one tensor at a time on the CPU, where the cache is what counts."""
    limit = 1 if tensors[0].device.type == "cpu" else _PART
    start = elements = 0
    for i, t in enumerate(tensors):
        elements += t.numel()
        if elements >= limit:
            yield slice(start, i + 1)
            start, elements = i + 1, 0
    if start < len(tensors):
        yield slice(start, len(tensors))

"""The handover between the one-pass engine and the optimizer: a pair on each parameter.

One backward over a mini-batch of κ micro-batches leaves on every parameter

    p.grad        mean_k g_k      the mean gradient, as any backward leaves it
    p.grad_sq     mean_k g_k²     float32 at least, of the parameter's shape
    p.grad_kappa  κ               micro-batches in the mean; a ragged one counts n/M

The engine calls `arm` when it opens, `put` for each parameter once its square exists, and `disarm` when it
closes. The optimizer calls `take`. An optimizer that folds during backward also calls `subscribe`: it is then
handed each pair at once, so that no more than one parameter's pair is alive.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

# Parameter -> what to call when its pair is complete.
_subscribers = WeakTensorKeyDictionary()
_ONES = (1.0, 1.0)


class Pair(NamedTuple):
    """The mean gradient and the mean squared micro-batch gradient of κ micro-batches."""

    grad: Tensor
    grad_sq: Tensor
    kappa: float
    scale: tuple[float, float] = _ONES  # factors still to be put on grad and grad_sq
    borrowed: bool = False  # the memory of both is soon another's: they cannot wait


def arm(p: Tensor) -> None:
    """Say that the next gradient of `p` is that of a whole mini-batch, not a micro-batch's."""
    p.grad_armed = True  # type: ignore[attr-defined]


def disarm(p: Tensor) -> None:
    """Take `arm` back."""
    if is_armed(p):
        del p.grad_armed  # type: ignore[attr-defined]


def is_armed(p: Tensor) -> bool:
    """Whether `p` is inside an open one-pass context."""
    return hasattr(p, "grad_armed")


def subscribe(p: Tensor, taker: Callable[[Tensor], None] | None) -> None:
    """Have `taker(p)` called whenever `put` completes the pair of `p`; the latest taker, or None, wins."""
    if taker is not None:
        _subscribers[p] = taker
    elif p in _subscribers:
        del _subscribers[p]


def has_taker(p: Tensor) -> bool:
    """Whether an optimizer wants the pair of `p` as soon as it is complete."""
    return p in _subscribers


def put(
    p: Tensor,
    grad: Tensor,
    grad_sq: Tensor,
    kappa: float,
    scale: tuple[float, float] = _ONES,
    *,
    borrowed: bool = False,
) -> None:
    """Leave a pair on `p`, averaged with the pair that is already there.

    Args:
        p: the parameter.
        grad: mean_k g_k, or what `scale[0]` makes it of.
        grad_sq: mean_k g_k², or what `scale[1]` makes it of.
        kappa: κ, micro-batches in the means.
        scale: factors that an optimizer that takes the pair at once puts on it in passing.
        borrowed: whether the caller will write over both afterwards, as a compiled graph does.
    """
    taker = _subscribers.get(p)
    before = peek(p)
    if taker is None or before is not None:  # it stays for all to read
        # Not in place: a layer may have cut the pairs of its weight and its bias from one tensor.
        grad = grad if scale[0] == 1.0 else grad * scale[0]
        grad_sq = grad_sq if scale[1] == 1.0 else grad_sq * scale[1]
        scale = _ONES
    if before is not None:
        total = before.kappa + kappa
        grad = (before.grad * (before.scale[0] * before.kappa) + grad * kappa) / total
        grad_sq = (before.grad_sq * (before.scale[1] * before.kappa) + grad_sq * kappa) / total
        kappa, borrowed = total, False
    p.grad, p.grad_sq, p.grad_kappa = grad, grad_sq, kappa  # type: ignore[attr-defined]
    grad_sq.made_with = grad._version, scale, borrowed  # type: ignore[attr-defined]
    if taker is not None:
        taker(p)


def is_there(p: Tensor) -> bool:
    """Whether there is a square on `p`: cheaper than `peek`, which looks whether it makes a pair."""
    return hasattr(p, "grad_sq")


def peek(p: Tensor) -> Pair | None:
    """The pair on `p`, or None where there is no square."""
    grad_sq = getattr(p, "grad_sq", None)
    if grad_sq is None:
        return None
    kappa = getattr(p, "grad_kappa", None)
    if p.grad is None or kappa is None or not kappa > 0 or grad_sq.shape != p.shape:
        raise RuntimeError(
            f"a parameter of shape {tuple(p.shape)} has grad_sq of shape {tuple(grad_sq.shape)} with "
            f"grad={'None' if p.grad is None else 'set'} and grad_kappa={kappa}; a pair needs all three, "
            "with grad_kappa > 0 and one shape: leave them by invariant_adam.one_pass, or clear them with "
            "the optimizer's zero_grad()"
        )
    version, scale, borrowed = getattr(grad_sq, "made_with", (p.grad._version, _ONES, False))
    if version != p.grad._version:
        raise RuntimeError(
            f"p.grad of a parameter of shape {tuple(p.shape)} was changed in place after one_pass left it (clipped? "
            "unscaled by a GradScaler?), and p.grad_sq was not: they do not belong together. Use bfloat16 instead of "
            "a GradScaler, and no clipping with one_pass; clear the pair with the optimizer's zero_grad()"
        )
    return Pair(p.grad, grad_sq, float(kappa), scale, borrowed)


def take(p: Tensor, *, scaled: bool = True) -> Pair | None:
    """Remove the pair from `p` and return it.

    Args:
        p: the parameter.
        scaled: whether the means are wanted; else what `scale` makes them of, which saves a pass over memory.
    """
    pair = peek(p)
    if pair is None:
        return None
    clear(p)
    p.grad = None
    if scaled and pair.scale != _ONES:
        grad, grad_sq = (t * factor for t, factor in zip(pair[:2], pair.scale, strict=True))
        pair = pair._replace(grad=grad, grad_sq=grad_sq, scale=_ONES, borrowed=False)
    return pair


def clear(p: Tensor) -> None:
    """Remove the square from `p`, whether or not it makes a pair; `p.grad` stays."""
    for name in ("grad_sq", "grad_kappa"):
        if hasattr(p, name):
            delattr(p, name)

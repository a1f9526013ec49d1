"""The handover between the one-pass engine and the optimizer: a pair on each parameter.

One backward over a mini-batch of κ micro-batches leaves on every parameter

    p.grad        mean_k g_k      the mean gradient, as any backward leaves it
    p.grad_sq     mean_k g_k²     float32 at least, of the parameter's shape
    p.grad_kappa  κ               micro-batches in the mean; a ragged one counts n/M

The engine swaps the class of each parameter while it is open (`is_armed`), and calls `put` for it once its square
exists. The optimizer calls `take`. An optimizer that folds during backward calls `subscribe` instead: it is then
handed pairs as they are made, never left on the parameter, as many at a time as it has room for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

# Parameter -> what to call when its pair, and perhaps others', are complete.
_subscribers = WeakTensorKeyDictionary()
ONES = (1.0, 1.0)


class Pair(NamedTuple):
    """A gradient as it arrives: of one micro-batch, or the mean of κ with the mean of their squares."""

    grad: Tensor
    grad_sq: Tensor | None  # None: `grad` is one micro-batch's, and its own square is meant
    kappa: float  # micro-batches; a ragged one counts n/M
    scale: tuple[float, float] = ONES  # factors still to be put on grad and grad_sq
    borrowed: bool = False  # the memory of both is soon another's: they cannot wait
    signed: bool = False  # `maximize` and `loss_divisor` are in it already

    def means(self) -> Pair:
        """The pair with its factors put on it."""
        if self.scale == ONES:
            return self
        # Not in place: a layer may have cut the pairs of its weight and its bias from one tensor.
        (a, b), square = self.scale, self.grad_sq
        square = square if square is None or b == 1.0 else square * b
        return Pair(self.grad if a == 1.0 else self.grad * a, square, self.kappa)


Taker = Callable[[list[Tensor], list[Pair]], None]


def is_armed(p: Tensor) -> bool:
    """Whether `p` is inside an open one-pass context, where its class has `grad_armed`.

    Its next gradient is then that of a whole mini-batch, not a micro-batch's.
    """
    return hasattr(p, "grad_armed")


def subscribe(p: Tensor, taker: Taker | None) -> None:
    """Have `taker([p], [pair])` called whenever a pair of `p` is complete; the latest taker, or None, wins.

    A taker with a number `room` gets pairs in lists: they wait for each other, up to so many elements, until the
    backward is done.
    """
    global subscriptions
    subscriptions += 1
    _subscribers[p] = taker


# Calls of `subscribe` so far: while it stays the same, so do every `taker_of` and every owner.
subscriptions = 0


def taker_of(p: Tensor) -> Taker | None:
    """What an optimizer wants called with the pair of `p` as soon as it is complete."""
    taker: Taker | None = _subscribers.get(p)
    return taker


def put(p: Tensor, new: Pair, taker: Taker | None) -> None:
    """Hand a pair of `p` to its taker, or leave it on `p`; averaged with the pair that is already there.

    Args:
        p: the parameter.
        new: the pair. A taker puts its factors on it in passing, and looks out for borrowed memory.
        taker: what `taker_of(p)` says.
    """
    new = joined(p, new)
    if taker is not None:
        taker([p], [new])
        return
    grad, grad_sq, kappa = new.means()[:3]
    assert grad_sq is not None
    p.grad = grad
    leave(p, grad_sq, kappa, ONES)


def leave(p: Tensor, grad_sq: Tensor, kappa: float, scale: tuple[float, float]) -> None:
    """Put the square beside the gradient that is on `p`, and remember that they belong together."""
    assert p.grad is not None
    p.grad_sq, p.grad_kappa = grad_sq, kappa  # type: ignore[attr-defined]
    grad_sq.made_with = p.grad, p.grad._version, scale  # type: ignore[attr-defined]


def joined(p: Tensor, new: Pair) -> Pair:
    """A pair of `p`, averaged with the one that is taken off `p`, if any."""
    found = take(p) if is_there(p) else None
    if found is None:
        return new
    before, new, total = found.means(), new.means(), found.kappa + new.kappa
    assert before.grad_sq is not None
    assert new.grad_sq is not None
    grad = (before.grad * before.kappa + new.grad * new.kappa) / total
    return Pair(grad, (before.grad_sq * before.kappa + new.grad_sq * new.kappa) / total, total)


def is_there(p: Tensor) -> bool:
    """Whether there is a square on `p`: cheaper than `peek`, which looks whether it makes a pair.

    One whose gradient is gone (model.zero_grad() knows of no square) or another one is as good as gone itself.
    """
    grad_sq = getattr(p, "grad_sq", None)
    return grad_sq is not None and (not hasattr(grad_sq, "made_with") or grad_sq.made_with[0] is p.grad)


def peek(p: Tensor) -> Pair | None:
    """The pair on `p`, or None where there is no square."""
    if not is_there(p):
        return None
    grad_sq: Tensor = p.grad_sq  # type: ignore[attr-defined]
    kappa = getattr(p, "grad_kappa", None)
    if p.grad is None or kappa is None or not kappa > 0 or grad_sq.shape != p.shape:
        raise RuntimeError(
            f"a parameter of shape {tuple(p.shape)} has grad_sq of shape {tuple(grad_sq.shape)} with "
            f"grad={'None' if p.grad is None else 'set'} and grad_kappa={kappa}; a pair needs all three, "
            "with grad_kappa > 0 and one shape: leave them by invariant_adam.one_pass, or clear them with "
            "the optimizer's zero_grad()"
        )
    _, version, scale = getattr(grad_sq, "made_with", (None, p.grad._version, ONES))
    if version != p.grad._version:
        raise RuntimeError(
            f"p.grad of a parameter of shape {tuple(p.shape)} was changed in place after one_pass left it (clipped? "
            "unscaled by a GradScaler?), and p.grad_sq was not: they do not belong together. Use bfloat16 instead of "
            "a GradScaler, and no clipping with one_pass; clear the pair with the optimizer's zero_grad()"
        )
    return Pair(p.grad, grad_sq, float(kappa), scale)


def take(p: Tensor) -> Pair | None:
    """Remove the pair from `p` and return it."""
    pair = peek(p)
    if pair is not None:
        clear(p)
        p.grad = None
    return pair


def clear(p: Tensor) -> None:
    """Remove the square from `p`, whether or not it makes a pair; `p.grad` stays."""
    for name in ("grad_sq", "grad_kappa"):
        if hasattr(p, name):
            delattr(p, name)

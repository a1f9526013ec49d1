"""Autograd hooks: which optimizer takes the gradients of a parameter, and when a backward has ended."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.utils.weak import WeakTensorKeyDictionary

from . import pair
from .moments import Moments


@runtime_checkable
class Owner(Protocol):
    """What can own parameters: it takes a gradient the moment a backward has left it (see `queue.FoldQueue`)."""

    moments: Moments
    in_backward: bool  # whether it wants `on_grad` called during backward

    def on_grad(self, p: Tensor) -> None:
        """Take the gradient off `p`, and the square that may be beside it."""

    def on_pairs(self, params: list[Tensor], pairs: list[pair.Pair]) -> None:
        """Take pairs of a one-pass mini-batch."""

    @property
    def room(self) -> int:
        """Elements of pairs that may wait for each other in a backward."""

    def on_taken(self, p: Tensor) -> None:
        """Note that `p` has another owner now."""


F = TypeVar("F", bound=Callable[..., Any])


def untraced(hook: F) -> F:
    """Have torch.compile pass over a hook and all that it calls, where it is at work on what called backward.

    As `torch.compiler.disable` does by a wrapper, whose time each parameter would pay in each backward.
    """
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

    set_code_exec_strategy(hook.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    return hook


# Parameter -> (weak reference to its owner, handle of the hook).
_owners = WeakTensorKeyDictionary()


def owner(p: Tensor) -> Owner | None:
    """Return the live owner of `p`."""
    reference, _ = _owners.get(p, (None, None))
    found: Owner | None = reference and reference()
    return found


def own(p: Tensor, holder: Owner) -> None:
    """Make `holder` the owner of `p`, in place of the one before.

    A parameter has one owner, since two would fight for one gradient. It is held weakly, so that a deleted optimizer
    leaves gradients alone.

    Args:
        p: the parameter.
        holder: its owner from now on.
    """
    reference, hook = weakref.ref(holder), holder.in_backward

    @untraced
    def on_grad(p: Tensor) -> None:
        holder = reference()
        # Armed: half of a pair, whose square is still to come. None: torch calls hooks for an undefined gradient, too.
        if holder is not None and not pair.is_armed(p) and p.grad is not None:
            holder.on_grad(p)

    before = owner(p)
    if before is not None:
        before.on_taken(p)
    _, handle = _owners.get(p, (None, None))
    if handle is not None:
        handle.remove()
    _owners[p] = (reference, p.register_post_accumulate_grad_hook(on_grad) if hook else None)
    pair.subscribe(p, _takers.setdefault(holder, _Taker(reference)) if hook else None)


class _Taker:
    """Hands pairs to a holder, while it lives."""

    def __init__(self, reference: weakref.ref[Owner]) -> None:
        self.reference = reference

    @property
    def room(self) -> int:
        holder = self.reference()
        return 0 if holder is None else holder.room

    @untraced
    def __call__(self, params: list[Tensor], pairs: list[pair.Pair]) -> None:
        holder = self.reference()
        if holder is not None:
            with torch._C.DisableTorchFunctionSubclass():  # inside one_pass each p.grad would ask its dispatcher
                holder.on_pairs(params, pairs)


# One for each holder, so that pairs with the same way may go together.
_takers: weakref.WeakKeyDictionary[Owner, _Taker] = weakref.WeakKeyDictionary()


def folds(p: Tensor) -> bool:
    """Whether a live owner folds the gradients of `p` during backward."""
    _, handle = _owners.get(p, (None, None))
    return handle is not None and owner(p) is not None


def when_finished(function: Callable[[], None]) -> None:
    """Have `function()` called when the backward that is running has come to its end; never, if it fails."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def inside_backward() -> bool:
    """Whether the hook that asks runs in a backward called from a backward (reentrant checkpointing)."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is BackwardCFunction.apply.__code__:
            return True
        frame = frame.f_back
    return False

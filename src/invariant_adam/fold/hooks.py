"""Autograd hooks: which optimizer takes the gradients of a parameter, and when a backward has ended."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.utils.weak import WeakTensorKeyDictionary

from . import pair

if TYPE_CHECKING:
    from .queue import FoldQueue

F = TypeVar("F", bound=Callable[..., Any])


def untraced(hook: F) -> F:
    """Have torch.compile pass over a hook and all that it calls, where it is at work on what called backward.

    As `torch.compiler.disable` does by a wrapper, whose time each parameter would pay in each backward.
    """
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

    set_code_exec_strategy(hook.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    return hook


class Taker:
    """Hands gradients and pairs to a queue, while it lives: held weakly, a deleted optimizer leaves gradients alone."""

    def __init__(self, queue: FoldQueue) -> None:
        self.queue = weakref.ref(queue)

    @untraced
    def on_grad(self, p: Tensor) -> None:
        """Hand over the gradient that a backward has just left on `p`."""
        queue = self.queue()
        # Armed: half of a pair, whose square is still to come. None: torch calls hooks for an undefined gradient, too.
        if queue is not None and not pair.is_armed(p) and p.grad is not None:
            queue.on_grad(p)

    @untraced
    def __call__(self, params: list[Tensor], pairs: list[pair.Pair]) -> None:
        """Hand over pairs of a one-pass mini-batch."""
        queue = self.queue()
        if queue is not None:
            with torch._C.DisableTorchFunctionSubclass():  # inside one_pass each p.grad would ask its dispatcher
                queue.on_pairs(params, pairs)

    @property
    def room(self) -> int:
        """Elements of pairs that may wait for each other in a backward."""
        queue = self.queue()
        return 0 if queue is None else queue.room

    @property
    def part(self) -> bool:
        """Whether the open update is a part of a mini-batch that is cut to grow in."""
        queue = self.queue()
        return queue is not None and queue.update.part


# Parameter -> (the taker of its owner, handle of the hook; None where the owner folds by call).
_owners = WeakTensorKeyDictionary()


def owner(p: Tensor) -> FoldQueue | None:
    """The queue that folds the gradients of `p`, if it lives."""
    taker, _ = _owners.get(p, (None, None))
    return None if taker is None else taker.queue()


def folds(p: Tensor) -> bool:
    """Whether a live owner folds the gradients of `p` during backward."""
    queue = owner(p)
    return queue is not None and queue.in_backward


def own(p: Tensor, queue: FoldQueue) -> None:
    """Have the gradients of `p` come to `queue`: a parameter has one owner, since two would fight for one gradient."""
    _, handle = _owners.get(p, (None, None))
    if handle is not None:
        handle.remove()
    taker = queue.taker if queue.in_backward else None
    _owners[p] = (queue.taker, None if taker is None else _register(p, taker.on_grad))
    pair.subscribe(p, taker)


def _register(p: Tensor, hook: Callable[[Tensor], None]) -> Any:
    """Register a hook for the gradients of `p`; of a frozen parameter, for those that it gets once it is unfrozen."""
    if p.requires_grad:
        return p.register_post_accumulate_grad_hook(hook)
    p.requires_grad_(True)  # torch refuses a hook on a frozen tensor, and keeps one when it is frozen
    try:
        return p.register_post_accumulate_grad_hook(hook)
    finally:
        p.requires_grad_(False)


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

"""Autograd hooks: which optimizer folds a parameter's gradient during backward, and what that takes from others."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.utils.weak import WeakTensorKeyDictionary

from .one_pass import pair


class Folder(Protocol):
    """What can own parameters: something that takes a gradient the moment a backward has left it."""

    def on_grad(self, p: Tensor) -> None:
        """Take the gradient or the pair off `p`."""

    def on_taken(self, p: Tensor) -> None:
        """Note that `p` has another owner now."""


# Parameter -> (weak reference to its owner, handle of the hook).
_owners = WeakTensorKeyDictionary()


def owner(p: Tensor) -> Folder | None:
    """Return the live owner of `p`."""
    reference, _ = _owners.get(p, (None, None))
    found: Folder | None = reference and reference()
    return found


def own(p: Tensor, folder: Folder, *, hook: bool) -> None:
    """Make `folder` the owner of `p`, in place of the one before.

    A parameter has one owner, since two would fight for one gradient. It is held weakly, so that a deleted optimizer
    leaves gradients alone.

    Args:
        p: the parameter.
        folder: its owner from now on.
        hook: whether it wants `on_grad` called during backward.
    """
    reference = weakref.ref(folder)

    def on_grad(p: Tensor) -> None:
        folder = reference()
        if folder is not None:
            # Inside one_pass each p.grad would ask its dispatcher.
            with torch._C.DisableTorchFunctionSubclass():
                folder.on_grad(p)

    before = owner(p)
    if before is not None:
        before.on_taken(p)
    _, handle = _owners.get(p, (None, None))
    if handle is not None:
        handle.remove()
    _owners[p] = (reference, p.register_post_accumulate_grad_hook(on_grad) if hook else None)
    pair.subscribe(p, on_grad if hook else None)


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


def watch_clipping() -> None:
    """Make torch's gradient clipping refuse parameters whose gradients are folded away before it runs.

    It would find no gradient, clip nothing and say nothing. The inner function is wrapped where torch has one, so that
    a `clip_grad_norm_` imported by name is covered as well.
    """
    module = torch.nn.utils.clip_grad
    inner = "_clip_grads_with_norm_" if hasattr(module, "_clip_grads_with_norm_") else "clip_grad_norm_"
    for function in (getattr(module, inner), module.clip_grad_value_):
        if not hasattr(function, "_refuses_folded"):
            refusing = _refusing(function)
            for place in (module, torch.nn.utils):
                for name, value in list(vars(place).items()):
                    if value is function:  # under each name it has
                        setattr(place, name, refusing)


def _refusing(function: Any) -> Any:
    @functools.wraps(function)
    def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            if any(p.grad is None and folds(p) for p in parameters):
                raise RuntimeError(
                    'gradient clipping cannot act on parameters of InvariantAdam(fold="backward"): their gradients are '
                    "folded and gone. Remove it (trainers: max_grad_norm=0, gradient_clip_val=None) and give "
                    "InvariantAdam max_micro_norm, which clips each micro-batch and so does not depend on the batch "
                    'size; or use fold="call", where p.grad stands until opt.fold()'
                )
        return function(parameters, *args, **kwargs)

    clip._refuses_folded = True  # type: ignore[attr-defined]
    return clip

"""Autograd hooks: which optimizer folds a parameter's gradient during backward, and what that takes from others."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from . import pair


class Folder(Protocol):
    """What can own parameters: something that takes a gradient the moment a backward has left it."""

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
    try:
        from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
    except ImportError:  # before torch 2.7
        return torch.compiler.disable(hook)  # type: ignore[no-any-return]
    set_code_exec_strategy(hook.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    return hook


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

    @untraced
    def on_grad(p: Tensor) -> None:
        folder = reference()
        # Armed: half of a pair, whose square is still to come. None: torch calls hooks for an undefined gradient, too.
        if folder is not None and not pair.is_armed(p) and p.grad is not None:
            folder.on_grad(p)

    before = owner(p)
    if before is not None:
        before.on_taken(p)
    _, handle = _owners.get(p, (None, None))
    if handle is not None:
        handle.remove()
    _owners[p] = (reference, p.register_post_accumulate_grad_hook(on_grad) if hook else None)
    pair.subscribe(p, _takers.setdefault(folder, _Taker(reference)) if hook else None)


class _Taker:
    """Hands pairs to a folder, while it lives."""

    def __init__(self, reference: weakref.ref[Folder]) -> None:
        self.reference = reference

    @property
    def room(self) -> int:
        folder = self.reference()
        return 0 if folder is None else folder.room

    @untraced
    def __call__(self, params: list[Tensor], pairs: list[pair.Pair]) -> None:
        folder = self.reference()
        if folder is not None:
            with torch._C.DisableTorchFunctionSubclass():  # inside one_pass each p.grad would ask its dispatcher
                folder.on_pairs(params, pairs)


# One for each folder, so that pairs with the same way may go together.
_takers: weakref.WeakKeyDictionary[Folder, _Taker] = weakref.WeakKeyDictionary()


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


def watch() -> None:
    """Make what would find no gradient, do nothing and say nothing refuse parameters whose gradients are folded."""
    _watch_clipping()
    _watch_scaling()
    _watch_rivals()


def _watch_clipping() -> None:
    module = torch.nn.utils.clip_grad
    inner = "_clip_grads_with_norm_" if hasattr(module, "_clip_grads_with_norm_") else "clip_grad_norm_"
    for function in (getattr(module, inner), module.clip_grad_value_):
        cells = [cell for cell in function.__closure__ or () if callable(cell.cell_contents)]
        if any(hasattr(cell.cell_contents, "_refuses_folded") for cell in cells) or hasattr(
            function, "_refuses_folded"
        ):
            continue
        if len(cells) == 1:  # torch's no_grad around it; what that calls is replaced for names imported before, too
            cells[0].cell_contents = _refusing(cells[0].cell_contents)
            continue
        refusing = _refusing(function)
        for place in (module, torch.nn.utils):
            for name, value in list(vars(place).items()):
                if value is function:  # under each name it has
                    setattr(place, name, refusing)


def _watch_scaling() -> None:
    plain: Any = torch.amp.GradScaler.unscale_
    if hasattr(plain, "_refuses_folded"):
        return

    @functools.wraps(plain)
    def unscale_(self: Any, optimizer: Any) -> Any:
        if self.is_enabled():
            getattr(optimizer, "_step_supports_amp_scaling", None)  # refuses where gradients are folded
        return plain(self, optimizer)

    unscale_._refuses_folded = True  # type: ignore[attr-defined]
    torch.amp.GradScaler.unscale_ = unscale_  # type: ignore[method-assign]


@functools.cache
def _watch_rivals() -> None:
    register_optimizer_step_pre_hook(_refuse_rival)


def _refuse_rival(optimizer: Any, *_: Any) -> None:
    """Refuse the step of an optimizer whose gradients another one folds; not of one that has the other inside."""
    if torch.compiler.is_compiling() or hasattr(optimizer, "on_grad"):
        return
    for index, group in enumerate(optimizer.param_groups):
        for place, p in enumerate(group["params"]):
            if p.grad is not None or not p.requires_grad or not folds(p):
                continue
            holder = owner(p)
            if not any(value is holder for value in vars(optimizer).values()):
                raise RuntimeError(
                    f"{type(optimizer).__name__}.step() would do nothing: parameter {place} of its group {index} "
                    f'belongs to a live {type(holder).__name__}(fold="backward"), which folds its gradients away; '
                    "delete that optimizer (del opt), or give each parameter to one of the two"
                )


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

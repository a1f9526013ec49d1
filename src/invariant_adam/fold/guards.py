"""The one place that patches torch: what would find no gradient, do nothing and say nothing refuses instead.

With fold="backward" a gradient is gone as soon as its backward has made it. Three functions of torch look for it later:
`clip_grad_norm_` and `clip_grad_value_`, `GradScaler.unscale_`, and the `step()` of another optimizer on the same
parameters. `install` makes them refuse parameters whose gradients are folded, while an optimizer that folds in backward
lives; with the last one torch's own functions come back. INVARIANT_ADAM_GUARDS=0 in the environment leaves torch alone.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from . import hooks
from .queue import FoldQueue

_guarded: weakref.WeakSet[FoldQueue] = weakref.WeakSet()
_undo: list[Callable[[], None]] = []


def install(queue: FoldQueue) -> None:
    """Guard the parameters of `queue` for as long as it lives, if it folds in backward."""
    if not queue.in_backward or os.environ.get("INVARIANT_ADAM_GUARDS") == "0":
        return
    _guarded.add(queue)
    weakref.finalize(queue, _release).atexit = False
    if not _undo:
        clip = torch.nn.utils.clip_grad
        _undo.append(_replace_inner(clip._clip_grads_with_norm_))  # what clip_grad_norm_ calls with the parameters
        _undo.append(_replace_inner(clip.clip_grad_value_))
        _undo.append(_replace_unscale())
        _undo.append(register_optimizer_step_pre_hook(_refuse_rival).remove)


def _release() -> None:
    """Give torch its own functions back if no optimizer is left that needs the guards."""
    if not list(_guarded):  # the dead are still counted while they die
        while _undo:
            _undo.pop()()


def _replace_inner(function: Any) -> Callable[[], None]:
    """Make a clipping function refuse; return what undoes it.

    The function is torch's `no_grad` around another one. That one is replaced, where the wrapper holds it, so that the
    name a script imported before this optimizer was built refuses as well.
    """
    (cell,) = (cell for cell in function.__closure__ if callable(cell.cell_contents))
    inner = cell.cell_contents

    @functools.wraps(inner)
    def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            if any(p.grad is None and hooks.folds(p) for p in parameters):
                raise RuntimeError(
                    'gradient clipping cannot act on parameters of InvariantAdam(fold="backward"): their gradients are '
                    "folded and gone. Remove it (trainers: max_grad_norm=0, gradient_clip_val=None) and give "
                    "InvariantAdam max_micro_norm, which clips each micro-batch and so does not depend on the batch "
                    'size; or use fold="call", where p.grad stands until opt.fold()'
                )
        return inner(parameters, *args, **kwargs)

    cell.cell_contents = clip
    return functools.partial(setattr, cell, "cell_contents", inner)


def _replace_unscale() -> Callable[[], None]:
    """Make `GradScaler.unscale_` ask the optimizer first; return what undoes it."""
    scaler: Any = torch.amp.GradScaler
    plain = scaler.unscale_

    @functools.wraps(plain)
    def unscale_(self: Any, optimizer: Any) -> Any:
        if self.is_enabled():
            # torch's own question to an optimizer; ours refuses to answer where gradients are folded.
            getattr(optimizer, "_step_supports_amp_scaling", None)
        return plain(self, optimizer)

    scaler.unscale_ = unscale_
    return functools.partial(setattr, scaler, "unscale_", plain)


def _refuse_rival(optimizer: Any, *_: Any) -> None:
    """Refuse the step of an optimizer whose gradients another one folds.

    An optimizer that shares the other's parameter groups is a wrapper around it, and no rival.
    """
    if torch.compiler.is_compiling() or isinstance(getattr(optimizer, "queue", None), FoldQueue):
        return  # an InvariantAdam refuses for itself
    for index, group in enumerate(optimizer.param_groups):
        for place, p in enumerate(group["params"]):
            if p.grad is not None or not p.requires_grad or not hooks.folds(p):
                continue
            queue = hooks.owner(p)
            if queue is None or any(group is own for own in queue.moments.groups):
                continue
            raise RuntimeError(
                f"{type(optimizer).__name__}.step() would do nothing: parameter {place} of its group {index} "
                'belongs to a live InvariantAdam(fold="backward"), which folds its gradients away; delete that '
                "optimizer (del opt), or give each parameter to one of the two"
            )

"""The one place that patches torch: what would find no gradient, do nothing and say nothing refuses instead.

With fold="backward" a gradient is gone as soon as its backward has made it. Three functions of torch look for it later:
`clip_grad_norm_` and `clip_grad_value_`, `GradScaler.unscale_`, and the `step()` of another optimizer on the same
parameters. `install` makes them refuse parameters whose gradients are folded, while an optimizer that folds in backward
lives; with the last one torch's own functions come back. INVARIANT_ADAM_GUARDS=0 in the environment leaves torch alone.
`clip_grad_norm_(..., inf)` clips nothing, it asks for a norm: it gets NaN, which is not known, and a warning.

`watch` is a hook on a model that this package was shown, by one_pass or distributed.prepare.
"""

from __future__ import annotations

import functools
import math
import os
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from . import hooks, pair
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
        for function in (clip.clip_grad_norm_, clip._clip_grads_with_norm_, clip.clip_grad_value_):
            _undo.append(_replace_inner(function))
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
        if torch.compiler.is_compiling():
            return inner(parameters, *args, **kwargs)
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        folded = next((p for p in parameters if p.grad is None and hooks.folds(p)), None)
        if folded is None:
            return inner(parameters, *args, **kwargs)
        if (args[0] if args else kwargs.get("max_norm")) != math.inf:
            raise RuntimeError(
                'gradient clipping cannot act on parameters of InvariantAdam(fold="backward"): their gradients are '
                "folded and gone. Remove it (transformers: max_grad_norm=0; lightning: gradient_clip_val=None) and "
                "give InvariantAdam max_micro_norm, which clips each micro-batch and so does not depend on the batch "
                'size; or use fold="call", where p.grad stands until opt.fold()'
            )
        _warn_of_norm()
        return torch.full((), math.nan, device=folded.device)

    cell.cell_contents = clip
    return functools.partial(setattr, cell, "cell_contents", inner)


@functools.cache
def _warn_of_norm() -> None:
    """Warn once: the callers are trainers that ask for the norm at each step, in order to log it."""
    warnings.warn(
        'clip_grad_norm_(..., inf) asks for the norm of gradients that InvariantAdam(fold="backward") has folded away: '
        'it returns NaN. To log norms use fold="call", where p.grad stands until opt.fold()',
        RuntimeWarning,
        stacklevel=4,  # the line that asks; torch's no_grad is in between
    )


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


_watched: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def watch(model: nn.Module) -> None:
    """Have the model refuse to train on a mini-batch of several micro-batches outside of one pass, from now on."""
    if model not in _watched and os.environ.get("INVARIANT_ADAM_GUARDS") != "0":
        _watched.add(model)
        model.register_forward_pre_hook(_refuse_mini_batch, with_kwargs=True)


def _refuse_mini_batch(model: nn.Module, args: Any, kwargs: Any) -> None:
    """Refuse inputs of a whole multiple of M samples; a function, so that a model with it can be copied and pickled.

    Inputs are taken for samples where all have the same first size, and none has M anywhere: not the tokens of a
    packed batch, not a batch in another dimension.
    """
    if torch.compiler.is_compiling() or not (model.training and torch.is_grad_enabled()):
        return
    p = next((p for p in model.parameters() if p.requires_grad), None)
    queue = None if p is None or pair.is_armed(p) else hooks.owner(p)  # armed: one pass is open
    size = None if queue is None or queue.weight != 1.0 else queue.moments.groups[0]["micro_batch_size"]
    if size is None:
        return
    shapes = [t.shape for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.ndim]
    firsts = {shape[0] for shape in shapes}
    if len(firsts) != 1 or any(size in shape for shape in shapes):
        return
    samples = firsts.pop()
    if samples > size and samples % size == 0:
        raise RuntimeError(
            f"{type(model).__name__} got {samples} samples in training, and its InvariantAdam has micro_batch_size="
            f"{size}: the backward would count as one micro-batch, and v would be that of another M. Give it {size} at "
            f"a time, or all in `with one_pass(model, {size})`; or tune with micro_batch_size={samples}. Is a sample "
            "more than one row here? INVARIANT_ADAM_GUARDS=0 in the environment switches this off"
        )


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

"""What `InvariantAdam` refuses, before anything changes: each error names the argument, the value and the remedy."""

from __future__ import annotations

import math
import warnings
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..scaling import check_hyperparameters
from .scalars import Tally


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Refuse a value that is not one of `choices`."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def check_positive(name: str, value: float) -> None:
    """Refuse zero, negative numbers, infinities and NaN."""
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be a positive finite number, got {value}")


def check_sizes(micro: int | None, tuned: int | None) -> None:
    """Refuse batch sizes that are not whole, or a tuned batch size in an unknown unit."""
    for name, value in (("micro_batch_size", micro), ("tuned_batch_size", tuned)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"{name} must be a whole number of samples, at least 1, or None; got {value!r}")
    if micro is None and tuned is not None:
        raise ValueError(
            f"tuned_batch_size={tuned} is in samples, so micro_batch_size is needed too: the samples in one backward"
        )


def check_state_dtype(dtype: torch.dtype) -> None:
    """Refuse moments of fewer than 32 bits."""
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"state_dtype must be torch.float32 or torch.float64, got {dtype}: with fewer bits an EMA at beta2 = 0.999 "
            "rounds its own updates away"
        )


_UNSUPPORTED = {
    "amsgrad": "the maximum of v over updates depends on the batch size",
    "capturable": "the scalars of an update are computed on the host",
    "differentiable": "the moments are updated in place",
}


def check_adamw_options(options: dict[str, Any]) -> None:
    """Let AdamW's speed hints pass; refuse what would change the algorithm, and unknown names."""
    for name, value in options.items():
        if name in _UNSUPPORTED and value:
            raise ValueError(f"{name}={value!r} is not supported: {_UNSUPPORTED[name]}; leave it out")
        if name not in _UNSUPPORTED and name not in ("foreach", "fused"):
            raise TypeError(f"InvariantAdam got an unexpected argument {name}={value!r}")


def as_float(lr: float | Tensor) -> float:
    """Return the learning rate as a float; refuse a tensor that would stop the host to read."""
    if isinstance(lr, Tensor) and (lr.device.type != "cpu" or lr.numel() != 1):
        raise ValueError(
            f"lr is a tensor of shape {tuple(lr.shape)} on {lr.device}; give a float or a 0-d tensor on the CPU: a "
            "changed float costs no sync and no recompilation here"
        )
    return float(lr)


def check_group(groups: list[dict[str, Any]], *, gradients: bool) -> None:
    """Refuse the last of `groups` if its hyperparameters or parameters do not fit.

    Args:
        groups: all parameter groups, the new one last.
        gradients: whether its parameters may have gradients already.
    """
    first, group, index = groups[0], groups[-1], len(groups) - 1
    check_adamw_options({name: group[name] for name in _UNSUPPORTED if name in group})
    run = ("fold", "loss_divisor", "max_micro_norm", "on_nonfinite", "state_dtype")
    for key in ("micro_batch_size", "tuned_batch_size", "rule", *(name for name in run if name in group)):
        if key in run or group[key] != first[key]:
            raise ValueError(
                f"group {index} asks for {key}={group[key]!r}, but it is the same for the whole run: give it to "
                "InvariantAdam, not to a group"
            )
    check_hyperparameters(as_float(group["lr"]), group["betas"], group["eps"], group["weight_decay"])
    for i, p in enumerate(group["params"]):
        if not p.is_floating_point():
            raise ValueError(
                f"parameter {i} of group {index} has dtype {p.dtype}; only real floating point is supported: hold a "
                "complex parameter as a real one (torch.view_as_real)"
            )
        if p.grad is not None and not gradients:
            raise ValueError(
                f"parameter {i} of group {index} has a gradient already, which the first fold would take in; call "
                "model.zero_grad() before building InvariantAdam"
            )


def check_state(state_dict: dict[str, Any], optimizer: Optimizer) -> None:
    """Refuse a checkpoint that does not fit the optimizer."""
    for key in ("state", "param_groups"):
        if key not in state_dict:
            raise ValueError(f"the state dict has no {key!r}; load what an optimizer's state_dict() returned")
    groups, own = state_dict["param_groups"], optimizer.param_groups
    lengths, own_lengths = ([len(g["params"]) for g in x] for x in (groups, own))
    if lengths != own_lengths:
        raise ValueError(
            f"the state dict has groups of {lengths} parameters, the optimizer of {own_lengths}; build the optimizer "
            "with the same parameter groups as the run that saved it"
        )
    for group, mine in zip(groups, own, strict=True):
        size = group.get("micro_batch_size", mine["micro_batch_size"])
        if size != mine["micro_batch_size"]:
            raise ValueError(
                f"the checkpoint was made with micro_batch_size={size}, the optimizer with {mine['micro_batch_size']}: "
                f"v is at the scale of one micro-batch; build the optimizer with {size} (the batch size is free, the "
                "micro-batch size is not)"
            )
        if group.get("amsgrad"):
            raise ValueError("the state dict is of Adam with amsgrad=True, which InvariantAdam does not have")
    ids, params = (chain.from_iterable(g["params"] for g in x) for x in (groups, own))
    for i, p in zip(ids, params, strict=True):
        state = state_dict["state"].get(i)
        if not state:
            continue
        if not {"step", "exp_avg", "exp_avg_sq"} <= state.keys():
            raise ValueError(
                f"the state of parameter {i} has {sorted(map(str, state))}, not step, exp_avg, exp_avg_sq: it is the "
                "state of another optimizer; only those of InvariantAdam, Adam and AdamW can be loaded"
            )
        for key in ("exp_avg", "exp_avg_sq"):
            if state[key].shape != p.shape or not state[key].is_floating_point():
                raise ValueError(
                    f"{key} of parameter {i} is {state[key].dtype} of shape {tuple(state[key].shape)}, the parameter "
                    f"{p.dtype} of shape {tuple(p.shape)}; the checkpoint is of another model"
                )


def refuse_capture(p: Tensor) -> None:
    """Refuse to be captured in a CUDA graph."""
    if p.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a fold was captured in a CUDA graph: its scalars change from update to update and a replay would repeat "
            "old ones; capture the whole update with invariant_adam.capture(opt, update), or the forward and backward "
            'alone with fold="call", and call opt.fold() and opt.step() outside'
        )


def refuse_scaled(optimizer: Any) -> None:
    """Refuse a step that `GradScaler.step` calls with gradients it believes to be scaled still."""
    if getattr(optimizer, "grad_scale", None) is not None:
        raise RuntimeError(
            "GradScaler.step found gradients that were not unscaled, or were folded before its last update(). "
            "Per micro-batch: scaler.scale(loss).backward(); scaler.unscale_(opt); opt.fold(); scaler.update(). Then "
            "opt.step(), not scaler.step(opt). If scaled gradients were folded, drop them with opt.abandon()"
        )


def refuse_scaler() -> None:
    """Refuse a GradScaler where gradients are folded during backward."""
    raise RuntimeError(
        'GradScaler cannot work with InvariantAdam(fold="backward"): the scaled gradients are folded before it can '
        'unscale them. Use bfloat16, which needs no scaler, or fold="call" with, per micro-batch, '
        "scaler.scale(loss).backward(); scaler.unscale_(opt); opt.fold(); scaler.update()"
    )


def refuse_ranks() -> None:
    """Refuse to train on several ranks that know nothing of each other."""
    group = torch.distributed
    if group.is_available() and group.is_initialized() and group.get_world_size() > 1:
        raise RuntimeError(
            f"a process group of {group.get_world_size()} ranks is up, and this InvariantAdam knows of one only: the "
            "ranks would drift apart in silence. Call invariant_adam.distributed.prepare(model, opt) on every rank "
            "before the first backward, and opt.abandon() now"
        )


def unfolded(name: str, in_backward: bool, lost: int) -> str:
    """Say why a gradient stands on a parameter at `step()`, where none should.

    Args:
        name: of the parameter.
        in_backward: whether gradients are folded by hooks.
        lost: how many parameters had no hook.
    """
    found = f"step() found a gradient on parameter {name} that was never folded: "
    if not in_backward:
        return found + "call opt.fold() after each micro-batch's backward, before step()"
    if lost:
        return found + (
            f"the fold hooks of {lost} parameters were missing (the parameters were copied or replaced after the "
            "optimizer was built) and are registered now; call opt.abandon() and run the micro-batches of this update "
            "again"
        )
    return found + (
        "it was assigned after the backward, by hand or by a wrapper such as DistributedDataParallel; drop the "
        'update with opt.abandon(), and unwrap the model or use InvariantAdam(fold="call") and opt.fold()'
    )


class FirstUpdateWarning(UserWarning):
    """The first update of a run is larger than the tuned batch, and nobody chose that: see `BatchGrowth`."""


def warn_of_first_update(kappa: float, rho: float) -> None:
    """Warn, on one rank, of a first update of κ micro-batches, ρ > 1 times the tuned batch."""
    group = torch.distributed
    if group.is_available() and group.is_initialized() and group.get_rank():
        return
    warnings.warn(
        f"the first update has {kappa:g} micro-batches, {rho:g} times the tuned batch, and its share in the averages "
        "is 1, so runs of different batch sizes separate here. Grow in with ia.BatchGrowth(opt), in a trainer by "
        "grow=True; if you mean it, say so by ratio=math.inf or grow=False",
        FirstUpdateWarning,
        stacklevel=8,  # the line that calls step()
    )


def surprise(tally: Tally, beta: float) -> str | None:
    """Say that an update is so unlike the one before that m forgets far more or less than β₁′; None: it is not."""
    if tally.a is None:
        return None
    got = tally.a[0] / (tally.a[0] + tally.b[0] * tally.kappa)
    if abs(got - beta) <= 0.1:
        return None
    return (
        f"an update of {tally.kappa:g} micro-batches came where the one before let another size expect: m keeps "
        f"{got:.2g} of its past instead of {beta:.2g}. Announce the size with opt.expect(kappa) before its first "
        "backward"
    )


def check_ragged(samples: int, size: int | None) -> None:
    """Refuse a ragged micro-batch of a size that is unknown or too large."""
    if size is None:
        raise ValueError(
            f"ragged(samples={samples}) needs to know the size of a full micro-batch; give micro_batch_size to "
            "InvariantAdam"
        )
    if not 0 < samples <= size:
        raise ValueError(
            f"ragged(samples={samples}) must be between 1 and micro_batch_size={size}: the square of a larger "
            "micro-batch is on another scale; split it"
        )

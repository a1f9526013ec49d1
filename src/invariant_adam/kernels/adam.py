"""Invariant Adam's passes over memory, by the fastest code that can take the tensors at hand.

`adam_torch` runs everywhere. On a CUDA device with Triton, `adam_triton` serves `fold` and `step` in its place, from
the same signatures; the same tests judge both.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType

from torch import Tensor

from . import adam_torch
from .adam_torch import clip, guard

__all__ = ["clip", "fold", "guard", "step"]


@cache
def _triton() -> ModuleType | None:
    try:
        from . import adam_triton
    except ImportError:
        return None
    return adam_triton


def _serving(tensors: list[Tensor], *moments: list[Tensor]) -> ModuleType:
    if tensors[0].is_cuda:  # looked for only here: others need not wait for Triton's import
        triton = _triton()
        if triton is not None and triton.serves(tensors, *moments):
            return triton
    return adam_torch


def fold(
    grads: list[Tensor],
    squares: list[Tensor] | None,
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    *,
    keep: tuple[float, float],
    gain: tuple[float, float],
    count: Tensor,
) -> None:
    """Fold gradients into the moments: m ← keep₁·m + gain₁·g, v ← keep₂·v + gain₂·g² (see `adam_torch.fold`)."""
    serving = _serving(grads, exp_avgs, exp_avg_sqs, squares or exp_avgs)
    serving.fold(grads, squares, exp_avgs, exp_avg_sqs, keep=keep, gain=gain, count=count)


def step(
    params: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    *,
    size: float,
    eps: float,
    keep: float,
) -> None:
    """Move the weights: w ← keep·w − size·m / (√v + eps) (see `adam_torch.step`)."""
    serving = _serving(params, exp_avgs, exp_avg_sqs)
    serving.step(params, exp_avgs, exp_avg_sqs, size=size, eps=eps, keep=keep)

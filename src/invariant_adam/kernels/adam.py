"""Invariant Adam's passes over memory, by the fastest code that can take the tensors at hand.

`adam_torch` runs everywhere. On a CUDA device with Triton, `adam_triton` serves `fold`, `step` and `fold_step` in its
place, from the same signatures; the same tests judge both.

Scalars are Python floats. Where a captured graph repeats a launch, they come from the device instead: `slots` is a row
of eight numbers in the dtype of the moments, (keep₁, keep₂, gain₁, gain₂, size, eps, decay, unused), and wins over the
floats.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import NamedTuple

from torch import Tensor

from . import adam_torch
from .adam_torch import clip, guard
from .ops import operator

__all__ = ["Fold", "clip", "fold", "fold_step", "guard", "step"]


class Fold(NamedTuple):
    """A gradient as it is folded: m ← keep₁·m + gain₁·g, v ← keep₂·v + gain₂·g²."""

    exp_avg: Tensor
    exp_avg_sq: Tensor
    keep: tuple[float, float]
    gain: tuple[float, float]
    count: Tensor  # type: ignore[assignment]  # of elements left out because they are not finite
    slots: Tensor | None = None  # keep and gain on the device, in place of the floats
    grad: Tensor | None = None  # None: the kernel that makes the gradient folds it as it goes
    square: Tensor | None = None
    param: Tensor | None = None
    place: int = -1  # its row in a Recorder


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


def _aligned(tensors: list[Tensor]) -> list[Tensor]:
    """The tensors, those that a kernel could not load 16 bytes at a time copied: cut from others, they are small."""
    return [t.clone() if t.data_ptr() % 16 else t for t in tensors]


def fold(
    grads: list[Tensor],
    squares: list[Tensor] | None,
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    *,
    keep: tuple[float, float],
    gain: tuple[float, float],
    count: Tensor,
    slots: Tensor | None = None,
) -> None:
    """Fold gradients into the moments: m ← keep₁·m + gain₁·g, v ← keep₂·v + gain₂·g² (see `adam_torch.fold`)."""
    serving = _serving(grads, exp_avgs, exp_avg_sqs, *([squares] if squares else []))
    if serving is adam_torch and grads[0].is_cuda:
        grads, squares = _aligned(grads), squares and _aligned(squares)
        serving = _serving(grads, exp_avgs, exp_avg_sqs, *([squares] if squares else []))
    serving.fold(grads, squares, exp_avgs, exp_avg_sqs, keep=keep, gain=gain, count=count, slots=slots)


def step(
    params: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    *,
    size: float,
    eps: float,
    decay: float,
    slots: Tensor | None = None,
) -> None:
    """Move the weights: w ← decay·w − size·m / (√v + eps) (see `adam_torch.step`)."""
    serving = _serving(params, exp_avgs, exp_avg_sqs)
    serving.step(params, exp_avgs, exp_avg_sqs, size=size, eps=eps, decay=decay, slots=slots)


def fold_step(
    params: list[Tensor],
    grads: list[Tensor],
    squares: list[Tensor] | None,
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    *,
    keep: tuple[float, float],
    gain: tuple[float, float],
    size: float,
    eps: float,
    decay: float,
    count: Tensor,
    slots: Tensor | None = None,
) -> None:
    """`fold`, then `step`, in one pass over memory where the kernels can: each tensor is read and written once."""
    serving = _serving(grads, exp_avgs, exp_avg_sqs, *([squares] if squares else []))
    if serving is not adam_torch:
        serving = _serving(params, exp_avgs)
    serving.fold_step(
        params, grads, squares, exp_avgs, exp_avg_sqs, keep=keep, gain=gain, size=size, eps=eps, decay=decay,
        count=count, slots=slots,
    )  # fmt: skip


@operator(
    "fold_step(Tensor(a!)[] params, Tensor(b!)[] grads, Tensor(c!)[] squares, Tensor(d!)[] exp_avgs, "
    "Tensor(e!)[] exp_avg_sqs, float[] scalars, Tensor(f!) count) -> ()",
    lambda *_: None,
)
def fold_step_op(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    squares: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    scalars: Sequence[float],
    count: Tensor,
) -> None:
    """`fold_step` as an operator that `torch.compile` takes as it is; scalars in the order of `slots`, seven of them.

    `squares` is empty where gradients are to be squared. Both may be written over.
    """
    keep1, keep2, gain1, gain2, size, eps, decay = scalars
    fold_step(
        list(params), list(grads), list(squares) or None, list(exp_avgs), list(exp_avg_sqs),
        keep=(keep1, keep2), gain=(gain1, gain2), size=size, eps=eps, decay=decay, count=count,
    )  # fmt: skip

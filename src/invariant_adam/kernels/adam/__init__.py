"""Invariant Adam's passes over memory: `fold`, `step` and `fold_step`, with `guard` and `clip` for gradients.

On a CUDA device with Triton, `triton` serves the lists of tensors that it can take, and on a CPU with a C compiler
`native` does; `torch` serves all others.

The scalars are Python floats. A captured graph repeats its launches with the same floats, so there they come from the
device: `slots` is a row of eight numbers in the dtype of the moments, (keep₁, keep₂, gain₁, gain₂, size, eps, decay,
unused), and takes the place of the floats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

from torch import Tensor, device

from .. import twin
from . import native
from . import torch as plain
from .torch import Factors, Tensors, clip, guard

__all__ = ["Fold", "clip", "fold", "fold_step", "guard", "step", "tables_on"]


class Fold(NamedTuple):
    """A gradient as it is folded: m ← keep₁·m + gain₁·g, v ← keep₂·v + gain₂·g²."""

    exp_avg: Tensor
    exp_avg_sq: Tensor
    keep: Factors
    gain: Factors
    count: Tensor  # type: ignore[assignment]  # counts the elements that are left out because they are not finite
    slots: Tensor | None = None  # keep and gain on the device, in place of the floats
    grad: Tensor | None = None  # None: the kernel that makes the gradient folds it as it goes
    square: Tensor | None = None  # what stands for g²; None: g is squared
    param: Tensor | None = None
    place: int = -1  # its row in a Recorder


@cache
def _triton() -> ModuleType | None:
    return twin(__name__, anywhere=True)


def _serving(tensors: Tensors, *moments: Tensors) -> ModuleType:
    if tensors[0].is_cuda:  # only then is Triton imported, which takes long
        triton = _triton()
        if triton is not None and triton.serves(tensors, *moments):
            return triton
    elif tensors[0].is_cpu and native.serves(tensors, *moments):
        return native
    return plain


@contextmanager
def tables_on(place: Callable[[Tensor, device], Tensor]) -> Iterator[None]:
    """Let `place` find room for the tables of Triton's launches, while a graph is captured.

    Args:
        place: takes a table on the host and a device, returns the table's room there, which it fills later.
    """
    triton: Any = _triton() or SimpleNamespace()  # without Triton nobody asks
    triton.room_for = place
    try:
        yield
    finally:
        triton.room_for = None


def _prepared(tensors: Tensors, moments: Tensors) -> Tensors:
    """The tensors as a kernel takes them, copied where need be.

    On a GPU it loads 16 bytes at a time, which small parts of other tensors may not allow. On a CPU all of a pass have
    one dtype.
    """
    if tensors[0].is_cuda:
        return [t.clone() if t.data_ptr() % 16 else t for t in tensors]
    return [t.to(m.dtype) for t, m in zip(tensors, moments, strict=True)]


# The scalars are those of the functions of `torch`, which say what they are.
def fold(grads: Tensors, squares: Tensors | None, exp_avgs: Tensors, exp_avg_sqs: Tensors, **scalars: Any) -> None:
    """Fold gradients into the moments: m ← keep₁·m + gain₁·g, v ← keep₂·v + gain₂·g² (see `torch.fold`)."""
    serving = _serving(grads, exp_avgs, exp_avg_sqs, squares or [])
    if serving is plain and (grads[0].is_cuda or grads[0].dtype != exp_avgs[0].dtype):
        grads, squares = _prepared(grads, exp_avgs), squares and _prepared(squares, exp_avgs)
        serving = _serving(grads, exp_avgs, exp_avg_sqs, squares or [])
    serving.fold(grads, squares, exp_avgs, exp_avg_sqs, **scalars)


def step(params: Tensors, exp_avgs: Tensors, exp_avg_sqs: Tensors, **scalars: Any) -> None:
    """Move the weights: w ← decay·w − size·m / (√v + eps) (see `torch.step`)."""
    _serving(params, exp_avgs, exp_avg_sqs).step(params, exp_avgs, exp_avg_sqs, **scalars)


def fold_step(
    params: Tensors, grads: Tensors, squares: Tensors | None, exp_avgs: Tensors, exp_avg_sqs: Tensors, **scalars: Any
) -> None:
    """`fold`, then `step`; in one pass over memory where Triton serves both (see `torch.fold_step`)."""
    serving = _serving(grads, exp_avgs, exp_avg_sqs, squares or [])
    if serving is not plain:
        serving = _serving(params, exp_avgs)
    serving.fold_step(params, grads, squares, exp_avgs, exp_avg_sqs, **scalars)

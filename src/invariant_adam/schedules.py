"""Schedules in samples, not steps: a learning rate and a weight average that do not move when the batch size does."""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from .optimizer import InvariantAdam

# Nodes and weights of Gauss-Legendre quadrature on [-1, 1], exact for polynomials up to degree 15.
_NODES = (0.1834346424956498, 0.5255324099163290, 0.7966664774136267, 0.9602898564975363)
_WEIGHTS = (0.3626837833783620, 0.3137066458778873, 0.2223810344533745, 0.1012285362903763)

Schedule = Callable[[float], float]  # samples -> factor on the learning rate


class WarmupCosine:
    """A linear warm-up and half a cosine, as a function of samples; made by `warmup_cosine`."""

    def __init__(self, warmup: float, total: float, floor: float) -> None:
        self.warmup, self.total, self.floor = warmup, total, floor

    def __call__(self, samples: float) -> float:
        """Return the factor on the learning rate after `samples` samples."""
        if samples < self.warmup:
            return samples / self.warmup
        done = min(1.0, (samples - self.warmup) / (self.total - self.warmup))
        return self.floor + (1 - self.floor) * (1 + math.cos(math.pi * done)) / 2

    def mean(self, start: float, stop: float) -> float:
        """Return the mean of the factor from `start` to `stop` in closed form: each piece's mean by its length."""
        marks = [start, *(x for x in (self.warmup, self.total) if start < x < stop), stop]
        return sum((b - a) * self._mean_of_piece(a, b) for a, b in pairwise(marks)) / (stop - start)

    def _mean_of_piece(self, a: float, b: float) -> float:
        if b <= self.warmup:
            return (a + b) / (2 * self.warmup)
        if a >= self.total:
            return self.floor
        length = self.total - self.warmup
        middle, half = math.pi * ((a + b) / 2 - self.warmup) / length, math.pi * (b - a) / (2 * length)
        # The mean of a cosine over [x-h, x+h] is cos(x)·sin(h)/h: no difference of nearly equal integrals.
        return self.floor + (1 - self.floor) * max(0.0, 1 + math.cos(middle) * math.sin(half) / half) / 2


def warmup_cosine(warmup: float, total: float, *, floor: float = 0.0) -> WarmupCosine:
    """Return a schedule that rises linearly to 1 and falls along a cosine to `floor`.

    Args:
        warmup: samples of the rise; 0 for none.
        total: samples after which the factor stays at `floor`.
        floor: last factor, relative to the learning rate.

    >>> schedule = warmup_cosine(warmup=1_000, total=11_000, floor=0.1)
    >>> [round(schedule(s), 3) for s in (0, 500, 1_000, 6_000, 11_000, 20_000)]
    [0.0, 0.5, 1.0, 0.55, 0.1, 0.1]
    """
    if not 0 <= warmup < total < math.inf:
        raise ValueError(f"warmup_cosine needs 0 <= warmup < total samples, got warmup={warmup}, total={total}")
    if not 0 <= floor <= 1:
        raise ValueError(f"floor is a factor on the learning rate in [0, 1], got {floor}")
    return WarmupCosine(float(warmup), float(total), float(floor))


def mean_factor(schedule: Schedule, start: float, stop: float) -> float:
    """Return the mean of `schedule` over the samples from `start` to `stop`.

    Exact where the schedule has a `mean(start, stop)` of its own; otherwise by quadrature, exact for polynomials up to
    degree 15 and close where a smooth schedule bends within one update.

    >>> round(mean_factor(lambda s: s**2, 0, 3), 12)
    3.0
    """
    if stop <= start:
        return schedule(start)
    own = getattr(schedule, "mean", None)
    if own is not None:
        return float(own(start, stop))
    middle, half = (start + stop) / 2, (stop - start) / 2
    pairs = zip(_NODES, _WEIGHTS, strict=True)
    return sum(w * (schedule(middle - half * x) + schedule(middle + half * x)) for x, w in pairs) / 2


class SampleLambdaLR(LRScheduler):
    """Set each group's learning rate to its initial one times a function of the samples seen.

    An update that consumes the samples from s to s + B gets the mean of the schedule over them, so the sum of the
    learning rates over a stretch of samples is the same at every batch size:

        η_update = η · 1/B ∫_s^{s+B} schedule(x) dx

    The optimizer asks for it inside its own `step()`, where κ is known. `scheduler.step()` is not needed; a trainer
    that calls it does no harm.

    Args:
        optimizer: an `InvariantAdam` that was given `micro_batch_size`, else there are no samples to count.
        lr_lambda: samples -> factor, such as `warmup_cosine(...)`; or one for each parameter group.

    >>> opt = InvariantAdam(torch.nn.Linear(2, 1).parameters(), lr=1.0, micro_batch_size=10)
    >>> scheduler = SampleLambdaLR(opt, lambda samples: samples / 100)
    >>> opt.param_groups[0]["params"][0].sum().backward()
    >>> opt.step()  # samples 0 to 10
    >>> [round(lr, 12) for lr in scheduler.get_last_lr()]
    [0.05]
    """

    def __init__(self, optimizer: InvariantAdam, lr_lambda: Schedule | Sequence[Schedule]) -> None:
        if not isinstance(optimizer, InvariantAdam):
            raise TypeError(
                f"SampleLambdaLR needs an InvariantAdam, which counts samples, got {type(optimizer).__name__}; use "
                "torch's LambdaLR for optimizers that count steps"
            )
        if optimizer.micro_batch_size is None:
            raise ValueError(
                "SampleLambdaLR counts samples, and this InvariantAdam does not know them; give it micro_batch_size"
            )
        groups = len(optimizer.param_groups)
        self.lr_lambdas = list(lr_lambda) if isinstance(lr_lambda, Sequence) else [lr_lambda] * groups
        if len(self.lr_lambdas) != groups:
            raise ValueError(
                f"lr_lambda has {len(self.lr_lambdas)} schedules for {groups} parameter groups; give one, or one each"
            )
        for group in optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"] = group["lr"].clone()  # one each, where groups shared it
        self._span = (optimizer.samples_seen, optimizer.samples_seen)
        super().__init__(optimizer)
        optimizer.register_update_hook(self._on_update)

    # The optimizer holds the schedule, not the other way round: a cycle would keep a replaced optimizer alive, and
    # its hooks on the parameters.
    @property  # type: ignore[override]
    def optimizer(self) -> InvariantAdam:
        """The optimizer whose learning rates are set."""
        found = self._optimizer()
        if found is None:
            raise RuntimeError("the optimizer of this schedule is gone; build a schedule for the new one")
        return found

    @optimizer.setter
    def optimizer(self, optimizer: InvariantAdam) -> None:
        self._optimizer = weakref.ref(optimizer)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_optimizer": self.optimizer}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.optimizer = state["_optimizer"]
        self.optimizer.register_update_hook(self._on_update)  # copies of optimizers come without hooks

    def get_lr(self) -> list[float | Tensor]:
        """Return the learning rates of the update at hand, the last one between updates."""
        if len(self.optimizer.param_groups) != len(self.base_lrs):
            raise RuntimeError(
                f"the optimizer has {len(self.optimizer.param_groups)} parameter groups, the schedule was built for "
                f"{len(self.base_lrs)}; add groups first, then build the schedule"
            )
        bases = zip(self.base_lrs, self.lr_lambdas, strict=True)
        return [float(base) * mean_factor(schedule, *self._span) for base, schedule in bases]

    def _on_update(self, optimizer: InvariantAdam, start: int, stop: int) -> None:
        self._span = (start, stop)
        self._apply()

    def step(self, epoch: int | None = None) -> None:
        """Do nothing: the optimizer's own `step()` has moved the schedule already."""
        self._apply()

    def _apply(self) -> None:
        self._last_lr = self.get_lr()
        for group, lr in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr

    def state_dict(self) -> dict[str, Any]:
        """Return where the schedule stands. The functions themselves are code, and are not saved."""
        return {"base_lrs": [float(lr) for lr in self.base_lrs], "span": list(self._span)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where another run stopped; its schedule functions are given anew."""
        if len(state_dict["base_lrs"]) != len(self.base_lrs):
            raise ValueError(
                f"the schedule was saved for {len(state_dict['base_lrs'])} parameter groups, this one has "
                f"{len(self.base_lrs)}; build the optimizer with the same groups"
            )
        self.base_lrs = list(state_dict["base_lrs"])
        self._on_update(self.optimizer, *state_dict["span"])


class InvariantEMA(AveragedModel):
    """An exponential moving average of the weights whose half-life is in samples.

    `decay` is what the average keeps per tuned batch; an update of ρ tuned batches keeps decay^ρ, so the average at a
    given sample is the same at every batch size. Call `update_parameters(model)` after `optimizer.step()`: each call
    accounts for all samples since the one before.

    Args:
        model: the model to average.
        optimizer: the `InvariantAdam` that trains it.
        decay: share of the average that is kept per `tuned_batch_size` samples, in [0, 1).
        use_buffers: average the buffers too (running statistics); otherwise they are copied.

    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> opt = InvariantAdam(model.parameters(), micro_batch_size=4)
    >>> ema = InvariantEMA(model, opt, decay=0.5)
    >>> ema.update_parameters(model)  # the first call copies
    >>> for _ in range(2):
    ...     model.weight.sum().backward()
    >>> opt.step()
    >>> _ = torch.nn.init.constant_(model.weight, 8.0)
    >>> _ = torch.nn.init.constant_(ema.module.weight, 0.0)
    >>> ema.update_parameters(model)  # two tuned batches: the average keeps 0.5² of itself
    >>> ema.module.weight.tolist()
    [[6.0, 6.0]]
    """

    samples: Tensor

    def __init__(
        self, model: nn.Module, optimizer: InvariantAdam, decay: float = 0.999, *, use_buffers: bool = False
    ) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"decay must be in [0, 1), got {decay}")
        super().__init__(model, multi_avg_fn=self._average, use_buffers=use_buffers)
        self.register_buffer("samples", torch.tensor(optimizer.samples_seen, dtype=torch.int64))
        self.decay = decay
        self._optimizer: weakref.ref[InvariantAdam] | None = weakref.ref(optimizer)
        self._keep = decay

    def update_parameters(self, model: nn.Module) -> None:
        """Average in the weights of `model`, by the samples seen since the last call."""
        optimizer = None if self._optimizer is None else self._optimizer()
        if optimizer is None:
            raise RuntimeError(
                "this InvariantEMA has no optimizer to count samples with (deleted, or lost in unpickling); "
                "build an InvariantEMA with the optimizer and load_state_dict() the old one's state"
            )
        seen, before = optimizer.samples_seen, int(self.samples)
        if seen < before:
            raise RuntimeError(
                f"the optimizer has seen {seen} samples, this average {before}: the average was loaded, the optimizer "
                "was not; load the optimizer's state too, or set ema.samples.fill_(opt.samples_seen) to begin a new run"
            )
        tuned = optimizer.tuned_batch_size or optimizer.micro_batch_size or 1
        self._keep = self.decay ** ((seen - before) / tuned)
        self.samples.fill_(seen)
        super().update_parameters(model)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_optimizer": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> InvariantEMA:
        twin = self.__class__.__new__(self.__class__)
        memo[id(self)] = twin
        # A copy of a weak reference is the reference itself: the same run, averaged twice.
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin

    @torch.no_grad()
    def _average(self, averages: Any, weights: Any, _: Any) -> None:
        for average, weight in zip(averages, weights, strict=True):
            if average.is_floating_point():
                average.lerp_(weight, 1 - self._keep)
            else:
                average.copy_(weight)  # counters among the buffers

"""Accelerate with `InvariantAdam`: `InvariantAccelerator`, whose `backward` is one micro-batch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from accelerate import Accelerator
from torch import Tensor, nn

from ..growth import BatchGrowth
from ..one_pass import one_pass as opened
from ..one_pass.exchange import Open
from ..optimizer import InvariantAdam
from ..unwrap import unwrap
from .window import GrowingWindow, OwnLosses, autocast_outside, follow_parameters


class InvariantAccelerator(Accelerator):
    """An `Accelerator` that prepares `InvariantAdam` as it prepares other optimizers.

    It divides each loss by `gradient_accumulation_steps`, which may change at any time; the optimizer is told. It joins
    the ranks, keeps FSDP2 from adding gradients up, and refuses to clip what is folded. The optimizer's own methods are
    those of `unwrap(optimizer)`: what is set on Accelerate's wrapper has no effect.

    Args:
        args: what `Accelerator` takes.
        grow: cut the first windows of `gradient_accumulation_steps` micro-batches into updates that grow (see
            `invariant_adam.BatchGrowth`): `backward` steps inside of them. False: a large first update is meant; None:
            it is not chosen, and a warning tells of it. For one pass cut batches by `BatchGrowth.split` instead.
        kwargs: what `Accelerator` takes.

    >>> import torch
    >>> accelerator, model = InvariantAccelerator(cpu=True, gradient_accumulation_steps=2), torch.nn.Linear(3, 1)
    >>> model, opt = accelerator.prepare(model, InvariantAdam(model.parameters(), micro_batch_size=8))
    >>> for x in torch.randn(4, 8, 3):
    ...     with accelerator.accumulate(model):
    ...         accelerator.backward(model(x).square().mean(), samples=len(x))
    ...         opt.step()
    ...         opt.zero_grad()
    >>> unwrap(opt).samples_seen
    32
    """

    def __init__(self, *args: Any, grow: bool | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.grow = grow
        self.invariant_adams: list[InvariantAdam] = []
        self._growths: list[GrowingWindow] = []  # one for each of them
        self._losses: dict[nn.Module, OwnLosses] = {}  # of models that were in one pass

    def prepare_optimizer(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Wrap an optimizer; remember ours."""
        wrapped = super().prepare_optimizer(optimizer, *args, **kwargs)
        if isinstance(optimizer, InvariantAdam):
            if self.scaler is not None:
                raise ValueError('mixed_precision="fp16" scales what InvariantAdam squares; use mixed_precision="bf16"')
            self.invariant_adams.append(unwrap(wrapped))
            if self.grow is not None:
                growth = BatchGrowth(wrapped, 0.1 if self.grow else math.inf)
                self._growths += [GrowingWindow(growth)] if self.grow else []
        return wrapped

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """Prepare models, optimizers and loaders; join the ranks of each `InvariantAdam` and its model."""
        known = len(self.invariant_adams)
        prepared = super().prepare(*args, **kwargs)
        models = [one for one in (prepared if isinstance(prepared, tuple) else (prepared,)) if _is_model(one)]
        for opt in self.invariant_adams[known:]:
            follow_parameters(opt)
            if self.num_processes > 1:
                from .. import distributed

                distributed.prepare(_model_of(opt, models), opt)
        return prepared

    def backward(self, loss: Tensor, *, samples: int | None = None, **kwargs: Any) -> None:
        """Run the backward of a micro-batch, whose loss is its own mean.

        Args:
            loss: as it is: it is divided here.
            samples: how many the micro-batch has. Fewer than M count for less; inside of `one_pass` there may be more.
            kwargs: for `Tensor.backward`.
        """
        ours = self.invariant_adams
        if ours and samples is None:
            raise TypeError(
                "backward() was not told how many samples the micro-batch has, and a short one would count for too "
                "much; call accelerator.backward(loss, samples=len(batch))"
            )
        if self.grow and Open.mini_batch is not None:
            raise ValueError(
                "grow=True cuts windows between backwards, and one pass is one backward; leave grow out and cut the "
                "batch: for part in invariant_adam.BatchGrowth(opt).split(batch)"
            )
        for opt in ours:
            opt.loss_divisor = self.gradient_accumulation_steps
        for growing in self._growths:
            size = growing.growth.optimizer.micro_batch_size
            growing.begin(self.gradient_accumulation_steps, (samples or 1) / size if size else 1.0)
        with _weighted(ours, samples):
            super().backward(loss, **kwargs)
            for opt in ours:
                if not opt.queue.in_backward:
                    opt.fold()
        for growing in self._growths:
            growing.end(last=self.sync_gradients)

    @contextmanager
    def one_pass(self, model: nn.Module, optimizer: Any, **options: Any) -> Iterator[None]:
        """Take all micro-batches of a batch in one backward: `invariant_adam.one_pass`, under any mixed precision.

        The loss of a model of Hugging Face is then that of `OwnMeans`, unless `weights` are among the options.

        Args:
            model: the prepared model.
            optimizer: its prepared `InvariantAdam`, which knows `micro_batch_size`; gradients go into it.
            options: for `invariant_adam.one_pass`.
        """
        opt = unwrap(optimizer)
        if opt.micro_batch_size is None:
            raise ValueError("one_pass needs to know M; give InvariantAdam micro_batch_size")
        if model not in self._losses:
            self._losses[model] = OwnLosses(model, opt.micro_batch_size)
        own = nullcontext() if "weights" in options else self._losses[model].of(None, "loop over micro-batches")
        with own, autocast_outside(model, self), opened(model, opt.micro_batch_size, into=opt, **options):
            yield

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Keep replicas from reducing; let FSDP2 reduce each micro-batch, whose sum could not be squared."""
        kept: AbstractContextManager[None] = nullcontext() if self.is_fsdp2 else super().no_sync(model)
        return kept

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """Refuse: gradients are folded by now."""
        return self._clip("clip_grad_norm_", parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> Any:
        """Refuse: gradients are folded by now."""
        return self._clip("clip_grad_value_", parameters, clip_value)

    def _clip(self, name: str, *args: Any) -> Any:
        if self.invariant_adams:
            raise RuntimeError(
                f"{name}() finds no gradient: each micro-batch was folded in its backward; remove the call and give "
                "InvariantAdam max_micro_norm, which clips each micro-batch"
            )
        return getattr(super(), name)(*args)


def _weighted(optimizers: list[InvariantAdam], samples: int | None) -> AbstractContextManager[None]:
    """Count a short micro-batch by its samples; one pass does that by itself."""
    sizes = {opt.micro_batch_size for opt in optimizers} - {None, samples}
    if samples is None or not sizes or Open.mini_batch is not None:
        return nullcontext()
    if len(optimizers) > 1:
        raise ValueError(
            f"a micro-batch of {samples} samples where the {len(optimizers)} optimizers expect {sizes}; use "
            "drop_last=True, so that all have micro_batch_size samples"
        )
    return optimizers[0].ragged(samples)


def _is_model(prepared: Any) -> bool:
    return isinstance(prepared, nn.Module)


def _model_of(opt: InvariantAdam, models: list[nn.Module]) -> nn.Module:
    """The model that has the parameters of an optimizer."""
    first = opt.param_groups[0]["params"][0]
    for model in models:
        if any(p is first for p in model.parameters()):
            return model
    raise ValueError(
        "prepare() was given an InvariantAdam without its model, whose ranks it must join; prepare both in one call"
    )

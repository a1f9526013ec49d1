"""Lightning with `InvariantAdam`: a callback under whose eyes each batch is one micro-batch, or several in one pass."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader, IterableDataset

from ..growth import BatchGrowth
from ..one_pass import one_pass as opened
from ..optimizer import InvariantAdam
from ..unwrap import unwrap
from .window import GrowingWindow, OwnLosses, batch_size


class InvariantAdamCallback(Callback):
    """Let a Lightning `Trainer` train with the `InvariantAdam` of `configure_optimizers`.

    The trainer divides each loss by `accumulate_grad_batches`, which may change at any time; the optimizer is told. It
    is also told how large the coming update is, how many samples a short batch has, and who the other ranks are.

    With `automatic_optimization = False`, when to step and what to divide by is your `training_step`'s. It may cut a
    batch into micro-batches of M samples, a `manual_backward` each; a batch of fewer samples counts by them. There may
    be several optimizers.

    Args:
        one_pass: the name of the submodule that `training_step` calls, "" for the module itself: take all micro-batches
            of a batch in one backward. None: a batch is a micro-batch. The loss is then a mean over samples; where
            samples differ in their tokens, `OwnMeans` (in `invariant_adam.integrations.window`) makes it one. That is
            done for the loss of a model of Hugging Face.
        samples: batch -> its samples; by default the size of its first tensor's first dimension.
        grow: cut the first windows of `accumulate_grad_batches` micro-batches into updates that grow (see
            `invariant_adam.BatchGrowth`); the trainer's steps are windows as ever. False: a large first update is
            meant; None: it is not chosen, and a warning tells of it.
    """

    def __init__(
        self,
        *,
        one_pass: str | None = None,
        samples: Callable[[Any], int] = batch_size,
        grow: bool | None = None,
    ) -> None:
        self.one_pass, self.samples, self.grow = one_pass, samples, grow
        self._growing: GrowingWindow | None = None
        self._last = False  # the batch at hand is the window's last
        self._open: ExitStack | None = None  # what the batch at hand has opened
        self._losses: OwnLosses | None = None  # of the model, in one pass

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse what cannot be exact, before a sample is seen."""
        if trainer.gradient_clip_val:
            raise ValueError(
                f"gradient_clip_val={trainer.gradient_clip_val} finds no gradient: each micro-batch is folded in its "
                "backward; set it to None, and give InvariantAdam max_micro_norm, which clips each micro-batch"
            )
        if str(trainer.precision).startswith("16"):
            raise ValueError(f'precision="{trainer.precision}" scales what InvariantAdam squares; use "bf16-mixed"')
        if self.one_pass is not None and not pl_module.automatic_optimization:
            raise ValueError(
                f"one_pass={self.one_pass!r} with automatic_optimization=False: this callback does not know which "
                "backward is a mini-batch's; leave one_pass out here, and open invariant_adam.one_pass(..., "
                "into=self.optimizers()) in training_step"
            )
        if self.grow and (self.one_pass is not None or not pl_module.automatic_optimization):
            raise ValueError(
                f"grow=True with one_pass={self.one_pass!r} and automatic_optimization="
                f"{pl_module.automatic_optimization}: this callback cuts windows between backwards of one micro-batch; "
                "leave grow out, set automatic_optimization=False, and cut the batch in training_step: for part in "
                "invariant_adam.BatchGrowth(self.optimizers()).split(batch)"
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Join the ranks."""
        for opt in self._optimizers(trainer):
            if opt.micro_batch_size is None:
                raise ValueError("InvariantAdam needs micro_batch_size, to tell short batches from whole ones")
            if self.one_pass is not None:
                self._losses = OwnLosses(pl_module.get_submodule(self.one_pass), opt.micro_batch_size)
            if self.grow is not None:
                growth = BatchGrowth(opt, 0.1 if self.grow else math.inf)
                self._growing = GrowingWindow(growth) if self.grow else None
            if trainer.world_size > 1:
                from .. import distributed

                assert trainer.strategy.model is not None
                distributed.prepare(trainer.strategy.model, opt)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Announce the update; open what its next micro-batches need."""
        opts, n = self._optimizers(trainer), self.samples(batch)
        self._open = ExitStack()
        if not pl_module.automatic_optimization:
            for opt in opts:
                if n < (opt.micro_batch_size or 1):
                    self._open.enter_context(opt.ragged(n))
            return
        (opt,) = opts
        M = opt.micro_batch_size
        assert M is not None
        done = batch_idx % trainer.accumulate_grad_batches
        batches = int(min(trainer.accumulate_grad_batches - done, trainer.num_training_batches - batch_idx))
        self._last = batches == 1
        if self._growing is not None:
            if not done:
                self._growing.restart()
            self._growing.begin(batches + done, n / M)
        elif not opt.kappa:
            size = max(n, M)
            coming = n if batches == 1 else (batches - 1) * size + self._last_of(trainer, batch_idx + batches, size)
            opt.expect(coming * trainer.world_size / M)
        if self._losses is not None and self.one_pass is not None:
            self._open.enter_context(self._losses.of(n, "leave one_pass out"))
            self._open.enter_context(opened(pl_module.get_submodule(self.one_pass), M, into=opt))
        elif n != M:
            self._open.enter_context(opt.ragged(n))

    def _last_of(self, trainer: Trainer, stop: int, size: int) -> int:
        """Return the samples of the batch before number `stop`: an epoch's last one may be short, if its loader tells.

        Args:
            size: of a whole batch, samples.
        """
        loader = trainer.train_dataloader
        if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
            return size
        if stop != len(loader) or loader.batch_size != size or loader.drop_last or self.samples is not batch_size:
            return size
        return len(loader.sampler) - (stop - 1) * size  # type: ignore[arg-type]

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Any) -> None:
        """Say what the loss was divided by."""
        if pl_module.automatic_optimization:
            self._optimizers(trainer)[0].loss_divisor = trainer.accumulate_grad_batches

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Fold what the backward left."""
        for opt in self._optimizers(trainer):
            gradients = (p.grad is not None for group in opt.param_groups for p in group["params"])
            if not opt.queue.in_backward and any(gradients):
                opt.fold()
        if pl_module.automatic_optimization:
            self._close()
            if self._growing is not None:
                self._growing.end(self._last)

    def on_train_batch_end(self, *_: Any) -> None:
        """Close what a `training_step` has left open that returned None."""
        self._close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Close the model after an error, without taking what half a backward has left."""
        if self._open is not None:
            self._open.__exit__(type(exception), exception, exception.__traceback__)
            self._open = None

    def _close(self) -> None:
        if self._open is not None:
            opened, self._open = self._open, None
            opened.close()

    def _optimizers(self, trainer: Trainer) -> list[InvariantAdam]:
        """Return ours: in manual optimization there may be several, and others beside them."""
        if len(trainer.optimizers) == 1:
            return [unwrap(trainer.optimizers[0])]
        ours = [opt for opt in trainer.optimizers if isinstance(opt, InvariantAdam)]
        if not ours:
            names = [type(opt).__name__ for opt in trainer.optimizers]
            raise TypeError(
                f"configure_optimizers gave {names}, of which none is an InvariantAdam; leave the callback out"
            )
        return ours

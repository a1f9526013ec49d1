"""Hugging Face's `Trainer` with `InvariantAdam`: `InvariantTrainer`, and a mixin for trainers of your own.

A training step of the trainer is one micro-batch, or with `one_pass=True` several of them. What the trainer does to
losses and gradients of a window is undone or left out here: each micro-batch's loss is its own mean, no gradient is
accumulated, and clipping is per micro-batch.
"""

from __future__ import annotations

import json
import math
import tempfile
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel, Trainer
from transformers.trainer_callback import ExportableState, TrainerCallback, TrainerControl
from transformers.trainer_utils import get_last_checkpoint

from ..growth import BatchGrowth
from ..one_pass import UnsupportedUse
from ..one_pass import one_pass as opened
from ..optimizer import InvariantAdam
from ..schedules import SampleLambdaLR
from ..unwrap import unwrap
from .window import Counting, OwnLosses, Window, autocast_outside, batch_size, follow_parameters

_STATE = "trainer_state.json"

if TYPE_CHECKING:
    _Trainer = Trainer
else:
    _Trainer = object


class InvariantAdamMixin(_Trainer):
    """Make a `Trainer` train with `InvariantAdam`; put it first: `class Mine(InvariantAdamMixin, SFTTrainer)`.

    All else is read from `TrainingArguments`: `learning_rate`, `adam_beta1`, `adam_beta2`, `adam_epsilon` and
    `weight_decay` are those of one update at `tuned_batch_size`, and so are the steps of the schedule and its warm-up.
    `max_grad_norm` clips each micro-batch. Accumulation and the number of processes may be anything.

    The loss of each micro-batch is its own mean: `num_items_in_batch` is None for models and loss functions.

    Args:
        args: what the trainer takes.
        tuned_batch_size: B₀, samples per update at which the training arguments hold. None: one micro-batch.
        micro_batch_size: M, samples. None: `per_device_train_batch_size`. Smaller ones need `one_pass`.
        one_pass: take all micro-batches of a training step in one backward (see `invariant_adam.one_pass`).
        grow: cut the first windows into updates that grow (see `invariant_adam.BatchGrowth`); the trainer's steps are
            windows as ever. False: a large first update is meant; None: it is not chosen, and a warning tells of it.
        kwargs: what the trainer takes.
    """

    def __init__(
        self,
        *args: Any,
        tuned_batch_size: int | None = None,
        micro_batch_size: int | None = None,
        one_pass: bool = False,
        grow: bool | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        own = self.args.per_device_train_batch_size
        self.micro_batch_size: int = own if micro_batch_size is None else micro_batch_size
        self.tuned_batch_size = tuned_batch_size
        self.one_pass, self.grow = one_pass, grow
        self.window = Window()
        self._total: float | None = None  # samples of the whole run
        self._resumed: Path | None = None  # a checkpoint, to be made one of this batch size
        self._passed = 0  # batches that the window which is next must leave out
        self._losses: OwnLosses | None = None  # of the model, in one pass
        self._everyone_logs = False  # the next log is the trainer's own, on all ranks: they may ask each other
        self._refuse()
        self.add_callback(_Events(self))
        self.add_callback(InvariantProgress())

    def _refuse(self) -> None:
        """Refuse what cannot be exact, before a sample is seen."""
        args: Any = self.args
        M, per_device = self.micro_batch_size, args.per_device_train_batch_size
        if M < 1:
            raise ValueError(f"micro_batch_size must be at least 1 sample, got {M}")
        if not self.one_pass and per_device != M:
            raise ValueError(
                f"micro_batch_size={M}, and a training step has per_device_train_batch_size={per_device} samples; make "
                "them equal and choose the batch size by gradient_accumulation_steps, or set one_pass=True, which "
                "takes several micro-batches in one step"
            )
        if per_device % M:
            raise ValueError(f"per_device_train_batch_size={per_device} is no multiple of micro_batch_size={M}")
        if self.one_pass and args.max_grad_norm:
            raise ValueError(
                f"max_grad_norm={args.max_grad_norm} clips each micro-batch gradient, and one pass never has them "
                "apart; set max_grad_norm=0, or one_pass=False"
            )
        if self.is_fsdp_enabled and int(transformers.__version__.split(".")[0]) < 5:
            raise ValueError(
                f"FSDP is supported with transformers 5, and this is {transformers.__version__}; update it"
            )
        if self.is_fsdp_enabled and (self.one_pass or args.max_grad_norm):
            raise ValueError(
                f"one_pass={self.one_pass} and max_grad_norm={args.max_grad_norm} with FSDP: a sharded model cannot be "
                "checked for one pass, and no rank has a whole gradient to clip; set one_pass=False and "
                "max_grad_norm=0, or use DDP"
            )
        if args.optim not in ("adamw_torch", "adamw_torch_fused") or args.optim_args:
            asked = getattr(args.optim, "value", args.optim)
            raise ValueError(
                f"optim={asked!r} with optim_args={args.optim_args!r} asks for another optimizer; leave them at their "
                "defaults, or pass optimizers=(InvariantAdam(...), None)"
            )
        if getattr(self, "loss_is_scaled_for_ga", None):
            raise ValueError(
                "loss_is_scaled_for_ga=True says that compute_loss() divides by what a whole window has, and a "
                "micro-batch's loss must be its own mean; return that mean and set loss_is_scaled_for_ga=None"
            )
        if getattr(args, "train_sampling_strategy", "") == "group_by_length" or getattr(args, "group_by_length", False):
            raise ValueError(
                "grouping by length orders the samples by the batch size, which then decides what is seen; use "
                "another train_sampling_strategy"
            )
        refused = {
            "fp16": (args.fp16, "a gradient scaler would scale what is squared; use bf16=True"),
            "auto_find_batch_size": (args.auto_find_batch_size, "it changes the micro-batch; find the size before"),
            "split_batches": (args.accelerator_config.split_batches, "it cuts micro-batches; set it to False"),
            "deepspeed": (self.is_deepspeed_enabled, "it keeps the gradients to itself; use DDP or FSDP2"),
            "n_gpu > 1": (args.n_gpu > 1, "DataParallel adds gradients before they are squared; start with torchrun"),
        }
        for name, (asked, why) in refused.items():
            if asked:
                raise ValueError(f"{name} cannot be used with InvariantAdam: {why}")
        group = torch.distributed
        if group.is_available() and group.is_initialized() and group.get_world_size() != args.world_size:
            raise ValueError(
                f"a process group of {group.get_world_size()} ranks is up, and TrainingArguments knows of "
                f"{args.world_size}: each would train alone; on CPUs set use_cpu=True"
            )
        apart = self.get_total_train_batch_size(args) // (per_device * args.gradient_accumulation_steps)
        if apart != args.world_size:
            raise ValueError(
                f"{args.world_size} processes see {apart} different batches: tensor, context and sequence parallelism "
                "are not supported here; use DDP or FSDP2"
            )

    @property
    def invariant_adam(self) -> InvariantAdam:
        """The optimizer, without the wrapper that Accelerate puts around it."""
        return unwrap(self.optimizer)

    # ---------------------------------------------------------------- optimizer, schedule, processes

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator; folded gradients cannot be clipped, and must not be added up before they are."""
        super().create_accelerator_and_postprocess()
        accelerator: Any = self.accelerator
        accelerator.clip_grad_norm_ = lambda *_, **__: None  # None: there is no norm to log
        if self.is_fsdp_enabled:
            accelerator.no_sync = lambda model: nullcontext()

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Build an `InvariantAdam` from the training arguments, unless the trainer was given one."""
        norm = self.args.max_grad_norm or None
        self.optimizer_cls_and_kwargs = (
            InvariantAdam,
            {
                "lr": self.args.learning_rate,
                "betas": (self.args.adam_beta1, self.args.adam_beta2),
                "eps": self.args.adam_epsilon,
                "micro_batch_size": self.micro_batch_size,
                "tuned_batch_size": self.tuned_batch_size,
                "max_micro_norm": norm,
                "fold": "call" if norm else "backward",  # the norm is over all parameters
            },
        )
        super().create_optimizer(*args, **kwargs)
        opt = self.invariant_adam
        for name, mine, asked in (
            ("micro_batch_size", opt.micro_batch_size, self.micro_batch_size),
            ("tuned_batch_size", opt.tuned_batch_size, self.tuned_batch_size),
            ("max_micro_norm", opt.max_micro_norm, norm),
        ):
            if mine != asked:
                raise ValueError(
                    f"the InvariantAdam that was given has {name}={mine}, and the trainer {asked} (max_micro_norm is "
                    "max_grad_norm); make them equal"
                )
        if self.grow is not None:
            few = bool(self.one_pass and self.args.torch_compile)  # each size is compiled once
            self.window.growth = BatchGrowth(opt, 0.1 if self.grow else math.inf, powers_of_two=few)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Build the schedule of the training arguments, in samples: one of its steps is B₀ samples."""
        if self.lr_scheduler is not None:
            return super().create_scheduler(num_training_steps, optimizer)
        opt = unwrap(optimizer or self.optimizer)
        if self.is_fsdp_enabled:
            follow_parameters(opt)
        size = opt.tuned_batch_size or self.micro_batch_size
        total = self._total or num_training_steps * self.get_total_train_batch_size(self.args)
        steps = torch.optim.SGD([torch.zeros(1)], lr=self.args.learning_rate)  # what reads the schedule in steps
        schedule = super().create_scheduler(math.ceil(total / size), steps)
        self.lr_scheduler = None
        if not isinstance(schedule, LambdaLR):  # by a metric
            return super().create_scheduler(num_training_steps, optimizer)
        if self._resumed is None:
            self.progress.start = opt.samples_seen
        factor: Callable[[float], float] = schedule.lr_lambdas[0]  # type: ignore[assignment]
        start = self.progress.start
        in_samples: Any = SampleLambdaLR(opt, lambda samples: factor((samples - start) / size))
        self.lr_scheduler = in_samples
        return in_samples

    # ---------------------------------------------------------------- windows and micro-batches

    def get_train_dataloader(self) -> Any:
        """Return the trainer's own, whose batches know how many samples they have."""
        collate = self.data_collator
        self.data_collator = Counting(collate)
        try:
            return super().get_train_dataloader()
        finally:
            self.data_collator = collate

    def get_batch_samples(self, epoch_iterator: Iterator[Any], *args: Any) -> tuple[list[Any], None]:
        """Return the batches of a window; the optimizer is told how large the update will be."""
        for _ in range(self._passed):
            next(epoch_iterator, None)
        self._passed = 0
        batches, _ = super().get_batch_samples(epoch_iterator, *args)
        everyone = [self.window.open(batches, self.micro_batch_size)]
        if self.args.world_size > 1:
            everyone = self.accelerator.gather(torch.tensor(everyone, device=self.args.device)).tolist()
        self.window.announce(self.invariant_adam, everyone)
        return batches, None

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Fold the micro-batches of a step; return its share of the window's mean loss."""
        n = self.window.take()
        if not self.one_pass and n > self.micro_batch_size:
            raise ValueError(
                f"a training step has {n} samples, and micro_batch_size={self.micro_batch_size}; set one_pass=True"
            )
        # The trainer divides by these. It must not: a factor would be squared.
        steps, self.current_gradient_accumulation_steps = self.current_gradient_accumulation_steps, 1
        try:
            pieces = self.window.cut(self.invariant_adam, inputs, n)
            return torch.stack([self._fold(model, *piece) for piece in pieces]).sum()
        finally:
            self.current_gradient_accumulation_steps = steps

    def _fold(self, model: nn.Module, inputs: dict[str, Any], n: int) -> Tensor:
        """Fold the micro-batches of `n` samples; return their share of the window's mean loss."""
        opt = self.invariant_adam
        with ExitStack() as stack:
            if self.one_pass:
                stack.enter_context(self._in_one_pass(model, inputs, n))
            elif n < self.micro_batch_size:
                stack.enter_context(opt.ragged(n))
            loss = super().training_step(model, inputs, None)
            if not opt.queue.in_backward:
                opt.fold()
        return loss * (n / self.window.samples)

    @contextmanager
    def _in_one_pass(self, model: nn.Module, inputs: dict[str, Any], n: int) -> Iterator[None]:
        """Open the model for `n` samples, and have its loss be the mean of its micro-batches' own means."""
        if batch_size(inputs) != n:
            raise ValueError(
                f"one_pass=True cannot tell the {n} samples apart in a batch of {batch_size(inputs)} rows: packing and "
                "padding-free collators join them; turn those off, or set one_pass=False"
            )
        if self._losses is None:
            names = [name for name in ("compute_loss_func", "label_smoother") if getattr(self, name) is not None]
            self._losses = OwnLosses(model, self.micro_batch_size, [(self, name) for name in names])
        remedy = "give the trainer a compute_loss_func, or set one_pass=False"
        try:
            with (
                self._losses.of(n, remedy, inputs.get("labels")),
                autocast_outside(model, self.accelerator),
                opened(model, self.micro_batch_size, into=self.invariant_adam),
            ):
                yield
        except UnsupportedUse as error:
            raise UnsupportedUse(f"{error}. With a Trainer, {remedy}") from error

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log κ, ρ, the samples seen and the noise scale beside the loss, and what was left out of the moments."""
        if "loss" in logs:
            opt = self.invariant_adam
            kappa, samples = opt.param_groups[0]["kappa"], opt.samples_seen
            rho = kappa * self.micro_batch_size / (opt.tuned_batch_size or self.micro_batch_size)
            logs.update(kappa=kappa, rho=rho, samples_seen=samples)
            # On a GPU a step does not ask, and the trainer leaves a NaN out of the loss that it logs.
            nonfinite = opt.nonfinite
            opt.queue.nonfinite.report(samples)
            everyone, self._everyone_logs = self._everyone_logs, False
            if self.args.world_size > 1 and everyone:
                nonfinite = int(self.accelerator.reduce(torch.tensor(nonfinite, device=self.args.device), "sum"))
            if nonfinite:
                logs["nonfinite"] = nonfinite
            # Of sharded moments each rank has a part.
            noise = _noise_scale(opt) if everyone or not self.is_fsdp_enabled else None
            if noise is not None:
                logs["noise_scale"] = noise
        super().log(logs, *args, **kwargs)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Log, save and evaluate as the trainer does, on all ranks; a user, or a callback, may log on one of them."""
        self._everyone_logs = self.control.should_log  # which it does first
        try:
            super()._maybe_log_save_evaluate(*args, **kwargs)
        finally:
            self._everyone_logs = False

    # ---------------------------------------------------------------- going on at another batch size

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train, or go on from a checkpoint, at whatever batch size: no sample is lost, and none is seen twice."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = get_last_checkpoint(self.args.output_dir)  # type: ignore[no-untyped-call]
            if resume_from_checkpoint is None:
                raise ValueError(f"output_dir={self.args.output_dir!r} has no checkpoint to resume from")
        self._passed, self._losses = 0, None  # of another model perhaps
        if not resume_from_checkpoint:
            self.progress.epoch = self.progress.samples = 0
            return super().train(None, *args, **kwargs)
        with tempfile.TemporaryDirectory() as folder:
            self._resumed = _mirror(Path(resume_from_checkpoint), Path(folder), self.args.train_batch_size)
            try:
                return super().train(folder, *args, **kwargs)
            finally:
                self._resumed = None

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Load the weights again, by `from_pretrained`, where the checkpoint has them under other names.

        Some models are saved under older names than they have. The trainer would leave those weights as they are.
        """
        folder = self.state.best_model_checkpoint if self._resumed is None else self._resumed.parent
        if not load_result.unexpected_keys or folder is None:
            super()._issue_warnings_after_load(load_result)
            return
        if not isinstance(self.model, PreTrainedModel):
            raise ValueError(
                f"the checkpoint has {load_result.unexpected_keys}, which the model does not: give its own"
            )
        saved = type(self.model).from_pretrained(folder, config=self.model.config, dtype=self.model.dtype)
        self.model.load_state_dict(saved.state_dict())

    def set_initial_training_values(self, *args: Any, **kwargs: Any) -> Any:
        """Learn how long the run is; make the checkpoint that is loaded next one of this batch size."""
        values: Any = super().set_initial_training_values(*args, **kwargs)
        updates, examples, self._total = values[1:4]  # updates and samples per epoch, samples in all
        if self._resumed is not None:
            dataloader = kwargs.get("dataloader", args[-1] if len(args) == 2 else args[1])
            self._place(self._resumed, updates, examples, hasattr(dataloader, "__len__"))
        return values

    def _place(self, state: Path, updates: int, examples: int, sized: bool) -> None:
        """Write the place where a checkpoint stands in the trainer's words, which are updates of this run.

        The trainer leaves out whole windows of the epoch, and the next window what is left of them.
        """
        saved = json.loads(state.read_text(encoding="utf-8"))
        progress = self.progress
        vars(progress).update(saved["stateful_callbacks"][InvariantProgress.__name__]["args"])
        accumulation = self.args.gradient_accumulation_steps
        step = self.get_total_train_batch_size(self.args) // accumulation  # samples, on all ranks
        if sized and progress.samples >= examples:
            progress.epoch, progress.samples = progress.epoch + 1, 0
        if progress.samples % step:
            raise ValueError(
                f"the checkpoint stands at sample {progress.samples} of its epoch, which is no whole number of steps "
                f"of {step} samples (per_device_train_batch_size × processes); resume with a product that divides it"
            )
        if progress.epoch and not sized:
            raise ValueError(
                f"the checkpoint stands in epoch {progress.epoch} of a dataset without a length, which cannot be found "
                "again; give the dataset a __len__"
            )
        windows, self._passed = divmod(progress.samples // step, accumulation)
        if self.args.ignore_data_skip:
            windows = self._passed = 0
        saved["global_step"] = progress.epoch * updates + windows
        state.write_text(json.dumps(saved), encoding="utf-8")

    @property
    def progress(self) -> InvariantProgress:
        """Where the run is in its data; the trainer saves it, and may replace it when it loads a checkpoint."""
        return next(c for c in self.callback_handler.callbacks if isinstance(c, InvariantProgress))


class InvariantTrainer(InvariantAdamMixin, Trainer):
    """Hugging Face's `Trainer` with `InvariantAdam`; see `InvariantAdamMixin` for what it takes beside."""


class InvariantProgress(TrainerCallback, ExportableState):
    """Where a run is in its data: part of each checkpoint.

    Args:
        epoch: passes over the data that are finished.
        samples: seen in this pass, on all ranks.
        start: samples that the optimizer had seen when the schedule began.
    """

    def __init__(self, epoch: int = 0, samples: int = 0, start: int = 0) -> None:
        self.epoch, self.samples, self.start = epoch, samples, start

    def state(self) -> dict[str, Any]:
        """Return what the trainer saves."""
        return {"args": dict(vars(self)), "attributes": {}}


class _Events(TrainerCallback):
    """What must happen between the trainer's own methods."""

    def __init__(self, trainer: InvariantAdamMixin) -> None:
        self._trainer = weakref.ref(trainer)  # a cycle would keep the optimizer, and its hooks, alive
        self._epochs = 0  # begun in this run
        self._before = 0  # samples seen before this epoch

    @property
    def trainer(self) -> InvariantAdamMixin:
        """The trainer whose events these are."""
        found = self._trainer()
        assert found is not None
        return found

    def on_train_begin(self, args: Any, state: Any, control: TrainerControl, **kwargs: Any) -> None:
        """Join the ranks; find the place in the data."""
        trainer = self.trainer
        if args.world_size > 1:
            from .. import distributed

            distributed.prepare(trainer.model_wrapped, trainer.invariant_adam)
        self._epochs, self._before = 0, trainer.invariant_adam.samples_seen - trainer.progress.samples

    def on_epoch_begin(self, args: Any, state: Any, control: TrainerControl, **kwargs: Any) -> None:
        """Begin to count another pass over the data."""
        if self._epochs:
            self.trainer.progress.epoch += 1
            self._before = self.trainer.invariant_adam.samples_seen
        self._epochs += 1

    def on_step_end(self, args: Any, state: Any, control: TrainerControl, **kwargs: Any) -> None:
        """Count an update."""
        self.trainer.progress.samples = self.trainer.invariant_adam.samples_seen - self._before

    def on_epoch_end(self, args: Any, state: Any, control: TrainerControl, **kwargs: Any) -> TrainerControl:
        """Close the update that the trainer left open: it would go into the first one of the next epoch.

        A dataset without a length may end within a window, a callback may stop there, and a run that went on at another
        batch size has its windows elsewhere than the trainer thinks.
        """
        trainer = self.trainer
        if not trainer.invariant_adam.kappa:
            return control
        trainer.invariant_adam.step()
        state.global_step += 1
        ended: TrainerControl = trainer.callback_handler.on_step_end(args, state, control)
        return ended


def _mirror(checkpoint: Path, folder: Path, train_batch_size: int) -> Path:
    """Make `folder` look like a checkpoint, with a state of its own; return that.

    Args:
        train_batch_size: of this run; transformers 4 would take the checkpoint's.
    """
    state = checkpoint / _STATE
    if not state.is_file():
        raise ValueError(
            f"resume_from_checkpoint={str(checkpoint)!r} has no {_STATE}: it is no checkpoint of a Trainer"
        )
    saved = json.loads(state.read_text(encoding="utf-8"))
    if InvariantProgress.__name__ not in saved["stateful_callbacks"]:
        raise ValueError(
            f"{str(checkpoint)!r} was not written by a trainer with InvariantAdamMixin, so that its place in the data "
            "is not known in samples; load its weights with from_pretrained() and begin a new run"
        )
    for path in checkpoint.iterdir():
        if path.name != _STATE:
            (folder / path.name).symlink_to(path.resolve(), target_is_directory=path.is_dir())
    mirrored = folder / _STATE
    mirrored.write_text(json.dumps(saved | {"train_batch_size": train_batch_size}), encoding="utf-8")
    return mirrored


def _noise_scale(opt: InvariantAdam) -> float | None:
    """The noise scale in samples, once there are enough micro-batches to tell."""
    try:
        noise = opt.noise_scale().batch
    except RuntimeError:  # a single micro-batch so far, or beta1 = 0
        return None
    return noise if math.isfinite(noise) else None

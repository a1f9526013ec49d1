"""Hugging Face's real Trainer on the models of `plain_loop`, and its comparison with the plain loop."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import transformers
from plain_loop import DECAY, HYPERPARAMETERS, TUNED, M, assert_equal_runs, optimizer_of, train_plainly
from transformers import TrainingArguments

from invariant_adam.integrations.transformers import InvariantTrainer

transformers.utils.logging.set_verbosity_error()
NEW = transformers.__version__ >= "5"  # older ones log four digits of a loss
DIGITS = 1e-5 if NEW else 1e-4


def arguments(folder, accumulation=1, **changed):
    options = {
        "output_dir": str(folder),
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "per_device_train_batch_size": M,
        "gradient_accumulation_steps": accumulation,
        "num_train_epochs": 3,
        "learning_rate": HYPERPARAMETERS["lr"],
        "adam_beta2": HYPERPARAMETERS["betas"][1],
        "adam_epsilon": HYPERPARAMETERS["eps"],
        "weight_decay": DECAY,
        "max_grad_norm": 0.0,
        "lr_scheduler_type": "constant",
        "logging_strategy": "no",
        "save_strategy": "no",
    }
    return TrainingArguments(**{**options, **changed})


class InOrder:
    """Samples in the order of the dataset."""

    def _get_train_sampler(self, *_):
        return torch.utils.data.SequentialSampler(self.train_dataset)


class OrderedTrainer(InOrder, InvariantTrainer):
    pass


def trained(model, args, data, cls=OrderedTrainer, resume=None, **options):
    trainer = cls(model=model, args=args, train_dataset=data, **{"tuned_batch_size": TUNED, **options})
    trainer.train(resume)
    return trainer


def assert_is_plain(trainer, build, data, plan, loss=None, announced=(), **options):
    """Hold a trainer against the loop over the windows of `plan`; return the losses of the loop's updates."""
    model = build()
    opt = optimizer_of(model, **options)
    losses = train_plainly(model, opt, data, plan, loss, announced)
    assert_equal_runs(trainer.model, trainer.invariant_adam, model, opt)
    return losses


def logged(trainer):
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


def summed(outputs, labels, num_items_in_batch=None):
    """A loss function as the documentation of Trainer has it."""
    targets = F.pad(labels, (0, 1), value=-100)[:, 1:].flatten()
    logits = outputs["logits"].flatten(0, 1)
    if num_items_in_batch is None:
        return F.cross_entropy(logits, targets)
    return F.cross_entropy(logits, targets, reduction="sum") / num_items_in_batch

"""Hugging Face's real Trainer against the loop of the guide: w and v after the same samples."""

import math
from contextlib import nullcontext

import pytest
import torch

pytest.importorskip("accelerate")

from plain_loop import (
    TUNED,
    M,
    Sentences,
    Stream,
    assert_equal_runs,
    gpt2,
    grown,
    llama,
    optimizer_of,
    train_plainly,
    windows,
)
from trainer_runs import DIGITS, NEW, InOrder, arguments, assert_is_plain, logged, summed, trained
from transformers import Trainer, TrainerCallback

import invariant_adam as ia
from invariant_adam.integrations.transformers import InvariantAdamMixin, InvariantTrainer


# Whole windows; windows of 4, 4, 4 and 3 micro-batches with the last of 2 samples, and unequal numbers of tokens.
@pytest.mark.parametrize(("samples", "unequal"), [(48, False), (58, True)])
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("build", [llama, gpt2])
def test_it_is_the_plain_loop(tmp_path, build, accumulation, samples, unequal):
    data = Sentences(samples, unequal)
    trainer = trained(build(), arguments(tmp_path, accumulation, logging_strategy="steps", logging_steps=1), data)
    losses = assert_is_plain(trainer, build, data, windows(range(samples), accumulation) * 3)
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert [log["loss"] for log in logs] == pytest.approx(losses, abs=DIGITS)
    assert trainer.state.global_step == len(losses)
    last = len(windows(range(samples), accumulation)[-1]) - (0.5 if samples == 58 else 0)
    assert (logs[-1]["kappa"], logs[-1]["rho"]) == (last, last * M / TUNED)
    assert logs[-1]["samples_seen"] == 3 * samples
    assert not any("grad_norm" in log for log in logs)


def test_gradients_that_are_no_numbers_are_logged(tmp_path):
    """Trainer leaves a NaN out of the loss that it logs, and on a GPU no step asks how many gradients are none."""
    model, seen = llama(), []
    last = model.lm_head.weight

    def nan_once(module, grads):
        seen.append(module)
        return (grads[0] * math.nan,) if len(seen) == 3 else None

    model.lm_head.register_full_backward_pre_hook(nan_once)
    with pytest.warns(RuntimeWarning, match="gradient elements were not finite"):
        trainer = trained(model, arguments(tmp_path, 1, logging_strategy="steps", logging_steps=1), Sentences(32))
    logs = [log.get("nonfinite", 0) for log in trainer.state.log_history if "loss" in log]
    assert logs[:2] == [0, 0]
    assert logs[2] >= last.numel()
    assert bool(last.isfinite().all())


@pytest.mark.parametrize("how", [{}, {"max_grad_norm": 0.2}, {"per_device_train_batch_size": 2 * M, "one_pass": True}])
def test_growing_in_is_the_plain_loop_over_the_same_cuts(tmp_path, how):
    data, once = Sentences(58, unequal=True), "one_pass" in how
    clipped = {"max_micro_norm": 0.2, "fold": "call"} if "max_grad_norm" in how else {}
    options = {key: how.pop(key) for key in ("one_pass",) if key in how}
    args = arguments(tmp_path, 4 if once else 8, logging_strategy="steps", logging_steps=1, **how)
    trainer = trained(llama(), args, data, grow=True, micro_batch_size=M, **options)
    plan, sizes = grown(windows(range(58), 8) * 3)
    assert max(map(len, sizes)) > 4
    assert {size for window in sizes for size in window} > {1, 2, 3}
    losses = assert_is_plain(trainer, llama, data, plan, **clipped)
    assert trainer.state.global_step == len(sizes)  # windows, as ever
    updates = iter(zip(plan, losses, strict=True))
    for window, log in zip(sizes, logged(trainer), strict=True):
        parts = [(sum(map(len, update)), loss) for update, loss in (next(updates) for _ in window)]
        mean = sum(n * loss for n, loss in parts) / sum(n for n, _ in parts)
        assert log == pytest.approx(mean, abs=DIGITS)
    assert trainer.state.log_history[-2]["kappa"] == pytest.approx(sum(map(len, plan[-1])) / M)


def test_clipping_is_that_of_each_micro_batch(tmp_path):
    data, plan = Sentences(40), windows(range(40), 4) * 4
    trainer = trained(llama(), arguments(tmp_path, 4, max_grad_norm=0.2, num_train_epochs=4), data)
    assert_is_plain(trainer, llama, data, plan, max_micro_norm=0.2, fold="call")


@pytest.mark.parametrize("accumulation", [1, 4])
def test_a_loss_function_of_ones_own(tmp_path, accumulation):
    data = Sentences(58, unequal=True)
    trainer = trained(
        gpt2(),
        arguments(tmp_path, accumulation, logging_strategy="steps", logging_steps=1),
        data,
        compute_loss_func=summed,
    )
    losses = assert_is_plain(trainer, gpt2, data, windows(range(58), accumulation) * 3)
    assert logged(trainer) == pytest.approx(losses, abs=DIGITS)


class Doubled(InOrder, Trainer):
    """A trainer as people write them."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        loss = 2 * outputs.loss
        return (loss, outputs) if return_outputs else loss


class Above(InvariantAdamMixin, Doubled):
    pass


class Below(InOrder, InvariantTrainer):
    compute_loss = Doubled.compute_loss


@pytest.mark.parametrize("cls", [Above, Below])
def test_a_trainer_of_ones_own(tmp_path, cls):
    data = Sentences(58, unequal=True)
    trainer = trained(llama(), arguments(tmp_path, 4), data, cls)
    plan = windows(range(58), 4) * 3
    assert_is_plain(trainer, llama, data, plan, lambda model, batch: 2 * model(**batch).loss)


def test_label_smoothing(tmp_path):
    data = Sentences(58, unequal=True)
    trainer = trained(llama(), arguments(tmp_path, 4, label_smoothing_factor=0.1), data)

    def smoothed(model, batch):
        labels = batch.pop("labels")
        return trainer.label_smoother(model(**batch), labels, shift_labels=True)

    assert_is_plain(trainer, llama, data, windows(range(58), 4) * 3, smoothed)


@pytest.mark.parametrize("accumulation", [1, 4])
def test_a_dataset_without_a_length_leaves_nothing_for_the_next_epoch(tmp_path, accumulation):
    data = Sentences(58)
    epoch = windows(range(58), accumulation)
    args = arguments(tmp_path, accumulation, max_steps=3 * len(epoch), logging_strategy="steps", logging_steps=1)
    trainer = trained(llama(), args, Stream(data))
    losses = assert_is_plain(trainer, llama, data, epoch * 3)
    assert trainer.state.global_step == len(losses)
    assert logged(trainer) == pytest.approx(losses, abs=DIGITS)


class Stop(TrainerCallback):
    """Stops in the middle of the third window of four micro-batches."""

    def __init__(self):
        self.steps = 0

    def on_substep_end(self, args, state, control, **kwargs):
        self.steps += 1
        control.should_training_stop |= state.global_step == 2 and self.steps == 8
        return control


def test_a_stop_within_a_window_ends_the_update_there(tmp_path):
    data, order = Sentences(64), range(64)
    trainer = trained(llama(), arguments(tmp_path, 4, save_strategy="epoch"), data, callbacks=[Stop()])
    first = windows(order, 4)[:2] + windows(order[32:40], 4)
    assert_is_plain(trainer, llama, data, first, announced={2: 4})
    again = trained(llama(), arguments(tmp_path, 4, num_train_epochs=1), data, resume=str(tmp_path / "checkpoint-3"))
    assert_is_plain(again, llama, data, first + windows(order[40:], 4), announced={2: 4})


@pytest.mark.parametrize(
    ("changed", "samples"),
    [({"gradient_checkpointing": True}, 58), ({"dataloader_drop_last": True}, 56), ({"dataloader_num_workers": 1}, 58)],
    ids=["checkpointing", "drop last", "workers"],
)
def test_options_of_the_trainer_change_nothing(tmp_path, changed, samples):
    data = Sentences(58)
    trainer = trained(llama(), arguments(tmp_path, 4, **changed), data)
    assert_is_plain(trainer, llama, data, windows(range(samples), 4) * 3)


# ---------------------------------------------------------------- schedules


@pytest.mark.parametrize("accumulation", [1, 4])
def test_the_schedule_is_in_samples(tmp_path, accumulation):
    data = Sentences(64)
    args = arguments(tmp_path, accumulation, lr_scheduler_type="linear", warmup_steps=6, num_train_epochs=2)
    trainer = trained(llama(), args, data)
    model = llama()
    opt = optimizer_of(model)
    total = 2 * 64 / TUNED  # steps of the tuned batch size
    ia.SampleLambdaLR(opt, lambda s: min(s / TUNED / 6, (total - s / TUNED) / (total - 6)))
    train_plainly(model, opt, data, windows(range(64), accumulation) * 2)
    assert_equal_runs(trainer.model, trainer.invariant_adam, model, opt)


def test_batch_sizes_share_the_sum_of_learning_rates(tmp_path):
    data, sums = Sentences(64), []
    for accumulation in (1, 2, 4):
        args = arguments(
            tmp_path,
            accumulation,
            lr_scheduler_type="cosine",
            warmup_steps=4,
            num_train_epochs=1,
            logging_strategy="steps",
            logging_steps=1,
        )
        logs = trained(llama(), args, data).state.log_history
        sums.append(math.fsum(log["learning_rate"] * log["rho"] for log in logs if "loss" in log))
    assert sums == pytest.approx([sums[0]] * 3, rel=1e-4)


def test_a_second_call_of_train_begins_its_schedule_again(tmp_path):
    data = Sentences(32)
    trainer = trained(llama(), arguments(tmp_path, 2, lr_scheduler_type="linear", num_train_epochs=1), data)
    trainer.train()
    model = llama()
    opt = optimizer_of(model)
    scheduler = ia.SampleLambdaLR(opt, lambda s: 1 - (s % 32) / 32)
    train_plainly(model, opt, data, windows(range(32), 2) * 2)
    assert trainer.lr_scheduler.get_last_lr() == pytest.approx(scheduler.get_last_lr())
    assert_equal_runs(trainer.model, trainer.invariant_adam, model, opt)


def test_a_schedule_by_a_metric_stays_one(tmp_path):
    args = arguments(tmp_path, 2, lr_scheduler_type="reduce_lr_on_plateau", num_train_epochs=1, eval_strategy="epoch")
    data = Sentences(16)
    trainer = trained(llama(), args, data, eval_dataset=data)
    assert isinstance(trainer.lr_scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
    assert_is_plain(trainer, llama, data, windows(range(16), 2))


# ---------------------------------------------------------------- what is refused, and what may be given


BY_LENGTH = {"train_sampling_strategy": "group_by_length"} if NEW else {"group_by_length": True}


@pytest.mark.parametrize(
    ("changed", "options", "match"),
    [
        ({}, {"micro_batch_size": 2}, "micro_batch_size=2, and a training step has per_device_train_batch_size=4"),
        ({}, {"micro_batch_size": 3, "one_pass": True}, "is no multiple of micro_batch_size=3"),
        ({"max_grad_norm": 1.0}, {"one_pass": True}, r"max_grad_norm=1.0 clips each micro-batch gradient"),
        ({}, {"micro_batch_size": 0}, "micro_batch_size must be at least 1 sample, got 0"),
        ({"optim": "sgd"}, {}, "asks for another optimizer"),
        (BY_LENGTH, {}, "grouping by length orders the samples by the batch size"),
        ({"auto_find_batch_size": True}, {}, "auto_find_batch_size cannot be used"),
        ({"accelerator_config": {"split_batches": True}}, {}, "split_batches cannot be used"),
    ],
)
def test_what_cannot_be_exact_is_refused(tmp_path, changed, options, match):
    with pytest.raises(ValueError, match=match):
        InvariantTrainer(model=llama(), args=arguments(tmp_path, 2, **changed), train_dataset=Sentences(8), **options)


def test_several_devices_of_one_process_are_refused(tmp_path):
    args = arguments(tmp_path)
    args._n_gpu = 2  # what two GPUs and no torchrun make it
    with pytest.raises(ValueError, match="n_gpu > 1 cannot be used with InvariantAdam: DataParallel adds gradients"):
        InvariantTrainer(model=llama(), args=args, train_dataset=Sentences(8), micro_batch_size=4)


def test_a_loss_over_a_whole_window_is_refused(tmp_path):
    class Scaled(InvariantTrainer):
        loss_is_scaled_for_ga = True

    with pytest.raises(ValueError, match="loss_is_scaled_for_ga=True"):
        Scaled(model=llama(), args=arguments(tmp_path), train_dataset=Sentences(8))


def test_an_optimizer_may_be_given(tmp_path):
    data, model = Sentences(40), llama()
    trainer = trained(model, arguments(tmp_path, 2), data, optimizers=(optimizer_of(model, rule="linear"), None))
    assert_is_plain(trainer, llama, data, windows(range(40), 2) * 3, rule="linear")


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda model: torch.optim.AdamW(model.parameters()), TypeError, "got AdamW"),
        (
            lambda model: ia.InvariantAdam(model.parameters()),
            ValueError,
            "has micro_batch_size=None, and",
        ),
    ],
)
def test_another_optimizer_is_refused(tmp_path, make, error, match):
    model = llama()
    with pytest.raises(error, match=match):
        trained(model, arguments(tmp_path), Sentences(8), optimizers=(make(model), None))


class Batches(InvariantTrainer):
    """Builds its DataLoader itself."""

    def get_train_dataloader(self):
        return torch.utils.data.DataLoader(self.train_dataset, batch_size=self.larger)


@pytest.mark.parametrize(("larger", "context"), [(4, nullcontext()), (5, pytest.raises(ValueError, match="5 samples"))])
def test_a_data_loader_of_ones_own(tmp_path, larger, context):
    data = Sentences(58)
    cls = type("Own", (Batches,), {"larger": larger})
    with context:
        trainer = trained(llama(), arguments(tmp_path, 4), data, cls)
        assert_is_plain(trainer, llama, data, windows(range(58), 4) * 3)


def packed(samples):
    """Join sequences in one row, as padding-free collators do."""
    joined = {key: torch.cat([sample[key] for sample in samples])[None] for key in ("input_ids", "labels")}
    joined["labels"][0, :: samples[0]["input_ids"].numel()] = -100
    return joined | {"position_ids": torch.cat([torch.arange(len(s["input_ids"])) for s in samples])[None]}


def test_packed_samples_are_counted_as_samples(tmp_path):
    data = Sentences(58)
    trainer = trained(llama(), arguments(tmp_path, 4), data, data_collator=packed)

    def loss(model, batch):
        rows = [{"input_ids": x, "labels": y} for x, y in zip(batch["input_ids"], batch["labels"], strict=True)]
        return model(**packed(rows)).loss

    assert_is_plain(trainer, llama, data, windows(range(58), 4) * 3, loss)


def test_packed_samples_that_cannot_be_counted_are_refused(tmp_path):
    class Own(InvariantTrainer):
        def get_train_dataloader(self):
            return torch.utils.data.DataLoader(self.train_dataset, batch_size=M, collate_fn=packed)

    with pytest.raises(ValueError, match="several sequences packed into one row"):
        trained(llama(), arguments(tmp_path, 4), Sentences(16), Own)
    args = arguments(tmp_path, 1, per_device_train_batch_size=16)
    with pytest.raises(ValueError, match="cannot tell the 16 samples apart in a batch of 1 rows"):
        trained(llama(), args, Sentences(16), data_collator=packed, micro_batch_size=M, one_pass=True)

"""Checkpoints of the real Trainer: a run goes on at any batch size, without losing or repeating a sample."""

import math

import pytest

pytest.importorskip("accelerate")

from plain_loop import (
    TUNED,
    M,
    Sentences,
    Stream,
    assert_equal_runs,
    llama,
    neox,
    optimizer_of,
    train_plainly,
    windows,
)
from trainer_runs import arguments, assert_is_plain, trained
from transformers import Trainer

import invariant_adam as ia
from invariant_adam.integrations.transformers import InvariantTrainer

pytestmark = pytest.mark.slow


def orders(tmp_path, data, epochs=2):
    """Return the order in which Trainer shuffles the samples of each epoch."""
    data.asked.clear()
    trained(llama(), arguments(tmp_path, 1, num_train_epochs=epochs), data, InvariantTrainer)
    asked, n = data.asked[:], len(data)
    assert [sorted(asked[i * n : (i + 1) * n]) for i in range(epochs)] == [list(range(n))] * epochs
    return [asked[i * n : (i + 1) * n] for i in range(epochs)]


# Of 15 micro-batches an epoch, the last of 2 samples. At the end of an epoch, and within a window of the second.
@pytest.mark.parametrize(
    ("before", "saved", "after"),
    [(4, 2, 4), (4, 2, 1), (1, 3, 4), (4, 3, 5), (1, 15, 4), (4, 4, 2), (4, 6, 3), (2, 11, 4)],
)
def test_a_run_goes_on_at_any_batch_size(tmp_path, before, saved, after):
    data = Sentences(58)
    first, second = orders(tmp_path, data)
    schedule = {"lr_scheduler_type": "linear", "num_train_epochs": 2}
    trained(
        llama(),
        arguments(tmp_path, before, save_strategy="steps", save_steps=saved, **schedule),
        data,
        InvariantTrainer,
    )
    checkpoint = tmp_path / f"checkpoint-{saved}"
    files = {path.name: path.read_bytes() for path in checkpoint.iterdir()}
    trainer = trained(llama(), arguments(tmp_path, after, **schedule), data, InvariantTrainer, resume=str(checkpoint))
    done, plan = (windows(first, before) + windows(second, before))[:saved], []
    seen = sum(len(micro) for window in done for micro in window)
    for epoch, order in ((0, first), (1, second)):
        rest = order[max(0, min(58, seen - 58 * epoch)) :]
        plan += windows(rest, after)
    model = llama()
    opt = optimizer_of(model)
    ia.SampleLambdaLR(opt, lambda s: max(0.0, 1 - s / TUNED / math.ceil(116 / TUNED)))
    train_plainly(model, opt, data, done + plan)
    assert_equal_runs(trainer.model, trainer.invariant_adam, model, opt)
    assert {path.name: path.read_bytes() for path in checkpoint.iterdir()} == files


def test_a_model_that_is_saved_under_other_names_goes_on(tmp_path):
    data, once = Sentences(40), {"num_train_epochs": 1}
    trained(neox(), arguments(tmp_path, 2, save_strategy="steps", save_steps=2, **once), data)
    trainer = trained(neox(), arguments(tmp_path, 3, **once), data, resume=str(tmp_path / "checkpoint-2"))
    assert_is_plain(trainer, neox, data, windows(range(16), 2) + windows(range(16, 40), 3))


def test_a_run_that_went_on_goes_on_again(tmp_path):
    data = Sentences(64)
    trained(llama(), arguments(tmp_path, 2, max_steps=3, save_strategy="steps", save_steps=3), data)
    more = arguments(tmp_path, 3, max_steps=3, save_strategy="steps", save_steps=1)
    trained(llama(), more, data, resume=str(tmp_path / "checkpoint-3"))
    # Six micro-batches were two updates of three: the third one ends at the ninth.
    trainer = trained(llama(), arguments(tmp_path, 4, num_train_epochs=1), data, resume=True)
    order = range(64)
    plan = windows(order[:24], 2) + windows(order[24:36], 3) + windows(order[36:], 4)
    assert_is_plain(trainer, llama, data, plan)


def test_callbacks_may_be_restored(tmp_path):
    data, restoring = Sentences(64), {"restore_callback_states_from_checkpoint": True, "num_train_epochs": 1}
    trained(llama(), arguments(tmp_path, 2, save_strategy="steps", save_steps=3, **restoring), data)
    trainer = trained(llama(), arguments(tmp_path, 4, **restoring), data, resume=str(tmp_path / "checkpoint-3"))
    assert_is_plain(trainer, llama, data, windows(range(24), 2) + windows(range(24, 64), 4))
    assert trainer.progress.samples == 64


def test_a_dataset_without_a_length_goes_on(tmp_path):
    data = Sentences(58)
    trained(llama(), arguments(tmp_path, 2, max_steps=5, save_strategy="steps", save_steps=3), Stream(data))
    args = arguments(tmp_path, 4, max_steps=4)
    trainer = trained(llama(), args, Stream(data), resume=str(tmp_path / "checkpoint-3"))
    plan = windows(range(24), 2) + windows(range(24, 58), 4)
    assert_is_plain(trainer, llama, data, plan)


def test_a_place_that_cannot_be_reached_is_refused(tmp_path):
    data = Sentences(64)
    trained(llama(), arguments(tmp_path, 3, max_steps=1, save_strategy="steps", save_steps=1), data)
    args = arguments(tmp_path, 1, per_device_train_batch_size=8)
    with pytest.raises(ValueError, match="stands at sample 12 of its epoch, which is no whole number of steps of 8"):
        trained(llama(), args, data, micro_batch_size=M, one_pass=True, resume=str(tmp_path / "checkpoint-1"))


def test_a_checkpoint_of_another_trainer_is_refused(tmp_path):
    data = Sentences(16)
    Trainer(
        model=llama(), args=arguments(tmp_path, 2, max_steps=1, save_strategy="steps", save_steps=1), train_dataset=data
    ).train()
    with pytest.raises(ValueError, match="was not written by a trainer with InvariantAdamMixin"):
        trained(llama(), arguments(tmp_path, 2), data, resume=str(tmp_path / "checkpoint-1"))
    with pytest.raises(ValueError, match=f"has no {'trainer_state.json'}"):
        trained(llama(), arguments(tmp_path, 2), data, resume=str(tmp_path / "nothing"))

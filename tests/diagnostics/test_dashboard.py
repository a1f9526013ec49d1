"""The dashboard: one line, any writer, and only the logged updates wait."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import invariant_adam as ia

NAMES = {
    "kappa", "rho", "samples_seen", "lr", "update_share", "update_share_v", "relative_step", "noise_scale",
    "noise_scale_stderr",
}  # fmt: skip


def train(log, updates=8, kappa=2, groups=1):
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    params = [{"params": [p]} for p in model.parameters()] if groups == 2 else model.parameters()
    opt = ia.InvariantAdam(params, lr=1e-3, betas=(0.9, 0.99), micro_batch_size=4, tuned_batch_size=8)
    handle = log(opt)
    for _ in range(updates):
        for _ in range(kappa):
            (model(torch.randn(4, 3)) - 3).square().mean().backward()
        opt.step()
    return opt, handle


class Wandb:
    def __init__(self):
        self.rows = []

    def log(self, data, step=None, commit=None):
        self.rows.append((step, data))


class Plain:
    def __init__(self):
        self.rows = []

    def log(self, data):
        self.rows.append((None, data))


def test_scalars_of_every_nth_update_are_logged():
    wandb = Wandb()
    _, log = train(lambda opt: ia.log_to(opt, wandb, every=2, prefix=""))
    assert [step for step, _ in wandb.rows] == [16, 32, 48, 64]
    assert wandb.rows[-1][1].keys() == NAMES
    last = wandb.rows[-1][1]
    assert (last["kappa"], last["rho"], last["lr"]) == (2.0, 1.0, 1e-3)
    assert last["update_share"] == pytest.approx(0.1 / (1 - 0.9**8))
    assert last["noise_scale"] > 0
    assert 0 < last["relative_step"] < 0.01
    log.remove()
    assert len(wandb.rows) == 4


def test_the_first_update_is_all_of_m():
    rows = []
    train(lambda opt: ia.log_to(opt, lambda values, step: rows.append(values), every=1), updates=1)
    assert rows[0]["invariant_adam/update_share"] == pytest.approx(1.0)


def test_other_writers_and_several_groups():
    plain = Plain()
    train(lambda opt: ia.log_to(opt, plain, every=4), groups=2)
    assert len(plain.rows) == 2
    assert {"invariant_adam/lr/0", "invariant_adam/lr/1"} <= plain.rows[0][1].keys()
    opt, _ = train(lambda opt: ia.log_to(opt, None, every=4))
    assert len(opt.queue.moments.readings) == 2  # a rank that writes nothing reads all the same
    with pytest.raises(TypeError, match="writer must have add_scalar"):
        ia.log_to(opt, 3)
    with pytest.raises(ValueError, match="every must be"):
        ia.log_to(opt, plain, every=0)


def test_removed_and_called_by_hand():
    wandb = Wandb()
    opt, log = train(lambda opt: ia.log_to(opt, wandb, every=3, hook=False))
    assert wandb.rows == []
    for _ in range(3):
        log()
    assert len(wandb.rows) == 1
    assert not opt._optimizer_step_post_hooks


def test_only_logged_updates_read_the_moments():
    opt, _ = train(lambda opt: ia.log_to(opt, lambda *_: None, every=5), updates=9)
    assert [reading.samples for reading in opt.queue.moments.readings] == [40]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_reads_what_was_written(tmp_path):
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with tensorboard.SummaryWriter(tmp_path) as writer:
        train(lambda opt: ia.log_to(opt, writer, every=2))
    events = accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {f"invariant_adam/{name}" for name in NAMES}
    assert [(e.step, e.value) for e in events.Scalars("invariant_adam/kappa")] == [(n, 2.0) for n in (16, 32, 48, 64)]

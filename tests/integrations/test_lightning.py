"""Lightning's real Trainer against the loop of the guide."""

import pytest
import torch

pytest.importorskip("lightning")

import lightning.pytorch as pl
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from plain_loop import (
    HYPERPARAMETERS,
    TUNED,
    M,
    Sentences,
    Stream,
    assert_equal_runs,
    grown,
    llama,
    optimizer_of,
    train_plainly,
    windows,
)
from torch.utils.data import DataLoader

from invariant_adam import InvariantAdam, one_pass, unwrap
from invariant_adam.integrations.lightning import InvariantAdamCallback

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*is an experimental feature"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec"),
    pytest.mark.filterwarnings("ignore:Found .* module"),
    pytest.mark.filterwarnings("ignore:.*GPU available but not used"),
    pytest.mark.filterwarnings("ignore:`training_step` returned `None`"),
]


class Module(pl.LightningModule):
    def __init__(self, **options):
        super().__init__()
        self.net, self.options = llama(), options
        self.net.train()

    def training_step(self, batch, batch_idx):
        return self.net(**batch).loss

    def configure_optimizers(self):
        return optimizer_of(self.net, **self.options)


def fit(module, data, accumulation, size=M, callbacks=None, **options):
    return unwrap(run(module, DataLoader(data, batch_size=size), accumulation, callbacks, **options).optimizers[0])


def run(module, loader, accumulation, callbacks=None, resume=None, **options):
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        accumulate_grad_batches=accumulation,
        callbacks=[InvariantAdamCallback()] if callbacks is None else callbacks,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_epochs": 3, "enable_checkpointing": False, **options},
    )
    trainer.fit(module, loader, ckpt_path=resume)
    return trainer


def assert_is_plain(module, opt, data, plan, announced=(), **options):
    other = llama()
    reference = optimizer_of(other, **options)
    train_plainly(other, reference, data, plan, announced=announced)
    assert_equal_runs(module.net, opt, other, reference)


@pytest.mark.parametrize(("samples", "unequal"), [(48, False), (58, True)])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_it_is_the_plain_loop(accumulation, samples, unequal):
    data, module = Sentences(samples, unequal), Module()
    opt = fit(module, data, accumulation)
    assert_is_plain(module, opt, data, windows(range(samples), accumulation) * 3)


def test_a_dataset_without_a_length():
    data, module = Sentences(58), Module()
    opt = fit(module, Stream(data), 4)
    # The end comes as a surprise: windows of four micro-batches are announced, and the last one has 3.5 of them.
    assert_is_plain(module, opt, data, windows(range(58), 4) * 3, announced=dict.fromkeys((3, 7, 11), 4))


def test_accumulation_may_change():
    data, module = Sentences(48), Module()
    opt = fit(module, data, 1, callbacks=[GradientAccumulationScheduler({0: 1, 1: 4}), InvariantAdamCallback()])
    assert_is_plain(module, opt, data, [window for k in (1, 4, 4) for window in windows(range(48), k)])


def test_clipping_is_that_of_each_micro_batch():
    data, options = Sentences(40), {"max_micro_norm": 0.2, "fold": "call"}
    module = Module(**options)
    opt = fit(module, data, 2)
    assert_is_plain(module, opt, data, windows(range(40), 2) * 3, **options)


@pytest.mark.parametrize(("samples", "unequal"), [(48, False), (58, True)])
@pytest.mark.parametrize(("size", "accumulation"), [(4 * M, 1), (2 * M, 2)])
def test_one_pass_is_the_plain_loop(size, accumulation, samples, unequal):
    data, module = Sentences(samples, unequal), Module()
    opt = fit(module, data, accumulation, size, callbacks=[InvariantAdamCallback(one_pass="net")])
    assert_is_plain(module, opt, data, windows(range(samples), 4) * 3)


class Manual(Module):
    """Cuts each batch into micro-batches, and steps after each batch."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        opt = self.optimizers()
        for first in range(0, len(batch["labels"]), M):
            self.manual_backward(self.net(**{key: t[first : first + M] for key, t in batch.items()}).loss)
        opt.step()
        opt.zero_grad()


class ManualTwo(Manual):
    """Trains its head by an optimizer of its own."""

    def configure_optimizers(self):
        head, rest = [self.net.lm_head.weight], [p for n, p in self.net.named_parameters() if n != "lm_head.weight"]
        options = {"micro_batch_size": M, "tuned_batch_size": TUNED, **HYPERPARAMETERS}
        return [InvariantAdam(params, **options) for params in (head, rest)]

    def training_step(self, batch, batch_idx):
        self.manual_backward(self.net(**batch).loss)
        for opt in self.optimizers():
            opt.step()


def test_two_optimizers_in_manual_optimization():
    data, module = Sentences(26), ManualTwo()
    trainer = run(module, DataLoader(data, batch_size=M), 1)
    other = llama()
    reference = InvariantAdam(other.parameters(), micro_batch_size=M, tuned_batch_size=TUNED, **HYPERPARAMETERS)
    train_plainly(other, reference, data, windows(range(26), 1) * 3, announced=None)
    for (name, a), b in zip(module.net.named_parameters(), other.parameters(), strict=True):
        assert (a - b).abs().max() <= 1e-6, name
    assert [unwrap(opt).samples_seen for opt in trainer.optimizers] == [3 * 26] * 2


class ManualOnce(Manual):
    """Takes each batch in one pass."""

    def training_step(self, batch, batch_idx):
        with one_pass(self.net, M, into=self.optimizers()):
            self.manual_backward(self.net(**batch).loss)
        self.optimizers().step()


@pytest.mark.parametrize(("cls", "samples", "size"), [(Manual, 48, 4 * M), (Manual, 26, M), (ManualOnce, 48, 4 * M)])
def test_manual_optimization_is_the_plain_loop(cls, samples, size):
    data, module = Sentences(samples), cls()
    opt = fit(module, data, 1, size)
    assert_is_plain(module, opt, data, windows(range(samples), size // M) * 3, announced=None)
    assert opt.samples_seen == 3 * samples


def test_one_pass_by_the_callback_in_manual_optimization_is_refused():
    with pytest.raises(ValueError, match=r"automatic_optimization=False.*in training_step"):
        fit(Manual(), Sentences(8), 1, callbacks=[InvariantAdamCallback(one_pass="net")])


class Remembering(DataLoader):
    """Knows where it is, as Lightning asks of a loader that it goes on with in the middle of an epoch."""

    begun = at = 0

    def __iter__(self):
        self.at, self.begun = self.begun, 0
        for i, batch in enumerate(super().__iter__()):
            if i >= self.at:
                self.at += 1
                yield batch

    def state_dict(self):
        return {"begun": self.at}

    def load_state_dict(self, state):
        self.begun = state["begun"]


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@pytest.mark.parametrize("after", [2, 4])
def test_a_run_goes_on_within_an_epoch(tmp_path, after):
    data, saving = Sentences(58), ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=3, save_top_k=-1)
    loader = Remembering(data, batch_size=M)
    run(Module(), loader, 2, [InvariantAdamCallback(), saving], max_epochs=1, enable_checkpointing=True)
    module, loader = Module(), Remembering(data, batch_size=M)
    trainer = run(module, loader, after, resume=tmp_path / "step=3.ckpt", max_epochs=2)
    # Six batches of fifteen were three updates; Lightning counts batches, so that a window of four ends at the eighth.
    first = {2: windows(range(24, 58), 2), 4: windows(range(24, 32), 4) + windows(range(32, 58), 4)}[after]
    plan = windows(range(24), 2) + first + windows(range(58), after)
    assert_is_plain(module, unwrap(trainer.optimizers[0]), data, plan)


class Leaving(Module):
    """Leaves the second batch of each four out."""

    def training_step(self, batch, batch_idx):
        return None if batch_idx % 4 == 1 else super().training_step(batch, batch_idx)


@pytest.mark.parametrize("one_pass", [None, "net"])
def test_a_step_that_returns_nothing_is_no_micro_batch(one_pass):
    data, module = Sentences(48), Leaving()
    opt = fit(module, data, 4, callbacks=[InvariantAdamCallback(one_pass=one_pass)])
    plan = [window[:1] + window[2:] for window in windows(range(48), 4)] * 3
    assert_is_plain(module, opt, data, plan, announced=dict.fromkeys(range(9), 4))


class Failing(Module):
    def training_step(self, batch, batch_idx):
        self.net(**batch)
        raise ArithmeticError("as may happen")


def test_an_error_leaves_the_model_as_it_was():
    module = Failing()
    with pytest.raises(ArithmeticError):
        fit(module, Sentences(16), 1, 4 * M, callbacks=[InvariantAdamCallback(one_pass="net")])
    assert {type(p) for p in module.net.parameters()} == {torch.nn.Parameter}
    data, module = Sentences(48), Module()
    opt = fit(module, data, 1, 4 * M, callbacks=[InvariantAdamCallback(one_pass="net")])  # opens again
    assert_is_plain(module, opt, data, windows(range(48), 4) * 3)


@pytest.mark.parametrize(
    ("options", "match"),
    [({"gradient_clip_val": 1.0}, "gradient_clip_val=1.0 finds no gradient")],
)
def test_what_cannot_be_exact_is_refused(options, match):
    with pytest.raises(ValueError, match=match):
        fit(Module(), Sentences(8), 1, **options)


def test_a_batch_of_more_samples_is_refused():
    with pytest.raises(ValueError, match=r"ragged\(samples=8\) must be between 1 and micro_batch_size=4"):
        fit(Module(), Sentences(8), 1, 2 * M)


def test_other_optimizers_are_refused():
    class Plain(Module):
        def configure_optimizers(self):
            return torch.optim.AdamW(self.net.parameters())

    with pytest.raises(TypeError, match="got AdamW"):
        fit(Plain(), Sentences(8), 1)


@pytest.mark.parametrize("options", [{}, {"max_micro_norm": 0.2, "fold": "call"}])
def test_growing_in_is_the_plain_loop_over_the_same_cuts(options):
    data, module = Sentences(58, unequal=True), Module(**options)
    opt = fit(module, data, 8, callbacks=[InvariantAdamCallback(grow=True)])
    plan, sizes = grown(windows(range(58), 8) * 3)
    assert {size for window in sizes for size in window} >= {1, 2, 3}
    short = {i: len(update) for i, update in enumerate(plan) if len(update) > 1}  # its last batch was not foreseen
    assert_is_plain(module, opt, data, plan, short, **options)


def test_growing_in_refuses_one_pass_with_the_remedy():
    with pytest.raises(ValueError, match=r"BatchGrowth\(self.optimizers\(\)\).split"):
        fit(Module(), Sentences(16), 2, callbacks=[InvariantAdamCallback(grow=True, one_pass="net")])

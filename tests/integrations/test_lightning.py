"""Lightning's real Trainer against the loop of the guide."""

import pytest
import torch

pytest.importorskip("lightning")

import lightning.pytorch as pl
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from plain_loop import M, Sentences, assert_equal_runs, grown, llama, optimizer_of, train_plainly, windows
from torch.utils.data import DataLoader

from invariant_adam import one_pass, unwrap
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
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=3,
        accumulate_grad_batches=accumulation,
        callbacks=[InvariantAdamCallback()] if callbacks is None else callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(module, DataLoader(data, batch_size=size))
    return unwrap(trainer.optimizers[0])


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
    plan = windows(range(samples), accumulation) * 3
    short = {i: 3 for i, window in enumerate(plan) if sum(map(len, window)) == 10}  # its last batch was not foreseen
    assert_is_plain(module, opt, data, plan, short)


def test_accumulation_may_change():
    data, module = Sentences(48), Module()
    opt = fit(module, data, 1, callbacks=[GradientAccumulationScheduler({0: 1, 1: 4}), InvariantAdamCallback()])
    assert_is_plain(module, opt, data, [window for k in (1, 4, 4) for window in windows(range(48), k)])


def test_clipping_is_that_of_each_micro_batch():
    data, options = Sentences(40), {"max_micro_norm": 0.2, "fold": "call"}
    module = Module(**options)
    opt = fit(module, data, 2)
    assert_is_plain(module, opt, data, windows(range(40), 2) * 3, **options)


@pytest.mark.parametrize(("size", "accumulation"), [(4 * M, 1), (2 * M, 2)])
def test_one_pass_is_the_plain_loop(size, accumulation):
    data, module = Sentences(48), Module()
    opt = fit(module, data, accumulation, size, callbacks=[InvariantAdamCallback(one_pass="net")])
    assert_is_plain(module, opt, data, windows(range(48), 4) * 3)


class Manual(Module):
    """Cuts each batch into micro-batches, and steps after each batch."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        opt = self.optimizers()
        for first in range(0, len(batch["labels"]), M):
            self.manual_backward(self.net(**{key: t[first : first + M] for key, t in batch.items()}).loss)
        opt.step()
        opt.zero_grad()


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

"""A training loop of Accelerate against the loop of the guide."""

import pytest
import torch

pytest.importorskip("accelerate")

from accelerate import Accelerator
from accelerate.state import AcceleratorState
from plain_loop import M, Sentences, assert_equal_runs, grown, llama, optimizer_of, train_plainly, windows
from torch.utils.data import DataLoader

from invariant_adam import unwrap
from invariant_adam.integrations.accelerate import InvariantAccelerator


@pytest.fixture(autouse=True)
def _fresh():
    """Accelerate keeps its state for the life of a process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def trained(data, accumulation, epochs=3, size=M, changes=(), once=False, grow=None, **options):
    """Train as Accelerate's documentation does; `changes` are accumulations of later epochs."""
    accelerator = InvariantAccelerator(cpu=True, gradient_accumulation_steps=accumulation, grow=grow)
    model = llama()
    model, opt, loader = accelerator.prepare(model, optimizer_of(model, **options), DataLoader(data, batch_size=size))
    model.train()
    for epoch in range(epochs):
        accelerator.gradient_accumulation_steps = dict(changes).get(epoch, accelerator.gradient_accumulation_steps)
        for batch in loader:
            with accelerator.accumulate(model):
                n = len(batch["labels"])
                if once:
                    with accelerator.one_pass(model, opt):
                        accelerator.backward(model(**batch).loss, samples=n)
                else:
                    accelerator.backward(model(**batch).loss, samples=n)
                opt.step()
                opt.zero_grad()
    return accelerator, model, opt


def assert_is_plain(model, opt, data, plan, announced=None, **options):
    other = llama()
    reference = optimizer_of(other, **options)
    train_plainly(other, reference, data, plan, announced=announced)
    assert_equal_runs(model, unwrap(opt), other, reference)


@pytest.mark.parametrize(("samples", "unequal"), [(48, False), (58, True)])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_it_is_the_plain_loop(accumulation, samples, unequal):
    data = Sentences(samples, unequal)
    _, model, opt = trained(data, accumulation)
    assert_is_plain(model, opt, data, windows(range(samples), accumulation) * 3)


def test_accumulation_may_change(recwarn):
    data = Sentences(48)
    _, model, opt = trained(data, 2, changes={1: 3, 2: 4})
    assert_is_plain(model, opt, data, [window for k in (2, 3, 4) for window in windows(range(48), k)])


def test_clipping_is_that_of_each_micro_batch():
    data, options = Sentences(40), {"max_micro_norm": 0.2, "fold": "call"}
    accelerator, model, opt = trained(data, 2, **options)
    assert_is_plain(model, opt, data, windows(range(40), 2) * 3, **options)
    with pytest.raises(RuntimeError, match=r"clip_grad_norm_\(\) finds no gradient"):
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(RuntimeError, match=r"clip_grad_value_\(\) finds no gradient"):
        accelerator.clip_grad_value_(model.parameters(), 1.0)


@pytest.mark.parametrize("unequal", [False, True])
def test_one_pass_is_the_plain_loop(unequal):
    data = Sentences(56, unequal)
    _, model, opt = trained(data, 2, size=2 * M, once=True)
    assert_is_plain(model, opt, data, windows(range(56), 4) * 3)


def test_samples_must_be_told():
    accelerator, model = InvariantAccelerator(cpu=True), llama()
    model, _ = accelerator.prepare(model, optimizer_of(model))
    with pytest.raises(TypeError, match=r"accelerator.backward\(loss, samples=len\(batch\)\)"):
        accelerator.backward(model(**Sentences(4).batch(range(4))).loss)
    with pytest.raises(ValueError, match=r"ragged\(samples=5\) must be between 1 and micro_batch_size=4"):
        accelerator.backward(model(**Sentences(5).batch(range(5))).loss, samples=5)


def test_other_optimizers_are_prepared_as_ever():
    data, ends = Sentences(32), []
    for cls in (Accelerator, InvariantAccelerator):
        AcceleratorState._reset_state(reset_partial_state=True)
        accelerator, model = cls(cpu=True, gradient_accumulation_steps=2), llama()
        model, opt = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        for indices in (range(4), range(4, 8)):
            with accelerator.accumulate(model):
                accelerator.backward(model(**data.batch(indices)).loss)
                accelerator.clip_grad_norm_(model.parameters(), 0.1)
                opt.step()
        ends.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


@pytest.mark.parametrize("options", [{}, {"max_micro_norm": 0.2, "fold": "call"}])
def test_growing_in_is_the_plain_loop_over_the_same_cuts(options):
    data = Sentences(56, unequal=True)  # windows of 8 and of 6 micro-batches
    _, model, opt = trained(data, 8, grow=True, **options)
    plan, sizes = grown(windows(range(56), 8) * 3)
    assert {size for window in sizes for size in window} >= {1, 2, 3}
    foreseen = dict(enumerate(_foreseen(sizes)))
    assert_is_plain(model, opt, data, plan, announced=foreseen, **options)


def _foreseen(sizes):
    """What was announced of each update: the end of the epoch is not known beforehand."""
    seen = 0
    for window in sizes:
        done = 0
        for kappa in window:
            yield max(kappa, min(8 - done, seen // 10))
            done += kappa
            seen += kappa


def test_growing_in_refuses_one_pass_with_the_remedy():
    with pytest.raises(ValueError, match=r"BatchGrowth\(opt\).split"):
        trained(Sentences(16), 2, once=True, grow=True)

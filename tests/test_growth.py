"""BatchGrowth: updates are cut as the equation says, and a run that grows in is the reference fed the same cuts."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from problems import distance, flat, gradient_of, loss, mlp, moments

import invariant_adam as ia
from invariant_adam import BatchGrowth, InvariantAdam, reference
from invariant_adam.scaling import Hyperparameters

M = 2


def data(samples, seed=3):
    return torch.randn(samples, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def optimizer_of(model):
    return InvariantAdam(model.parameters(), lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1, micro_batch_size=M)


def train(model, opt, growth, samples, batch, start=0, once=False):
    """Grow in over mini-batches of `batch` samples; return the samples of each update."""
    xs, sizes = data(samples), []
    for first in range(start, samples, batch):
        for x in growth.split(xs[first : first + batch]):
            if once:
                with ia.one_pass(model, M, into=opt):
                    loss(model, x).backward()
            else:
                for part in x.split(M):
                    with opt.ragged(len(part)):
                        loss(model, part).backward()
            opt.step()
            sizes.append(len(x))
    return sizes


@given(
    kappa=st.integers(1, 9),
    batches=st.integers(1, 5),
    ratio=st.sampled_from([0.05, 0.1, 0.25, 1.0]),
    short=st.integers(0, 2 * M - 1),
)
def test_updates_are_cut_as_the_equation_says(kappa, batches, ratio, short):
    model = mlp()
    opt = optimizer_of(model)
    samples = max(1, kappa * M * batches - short)
    sizes = train(model, opt, BatchGrowth(opt, ratio), samples, kappa * M)
    assert sum(sizes) == samples == opt.samples_seen
    seen = 0
    for size in sizes:
        left = min(kappa * M - seen % (kappa * M), samples - seen)  # of the mini-batch
        assert size == min(left, M * max(1, math.floor(ratio * seen / M + 1e-9)))
        seen += size


@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize("ratio", [0.1, 0.5])
def test_it_is_the_reference_fed_the_same_cuts(ratio, once):
    model = mlp()
    start = copy.deepcopy(model)
    opt = optimizer_of(model)
    sizes = train(model, opt, BatchGrowth(opt, ratio), 96, 16, once=once)
    assert len(set(sizes)) > 2
    state, xs, first = reference.start(flat(start.parameters())), data(96), 0
    probe = copy.deepcopy(start)
    for size in sizes:
        torch.nn.utils.vector_to_parameters(state.w.clone(), probe.parameters())
        grads = [gradient_of(probe, x) for x in xs[first : first + size].split(M)]
        h = ia.scaling.scale(1e-2, (0.9, 0.99), 0.1, from_batch=M, to_batch=size, rule="exponential")
        state = reference.invariant_adam(state, grads, Hyperparameters(h.lr, h.betas, h.weight_decay))
        first += size
    assert distance(flat(model.parameters()), state.w) < 1e-10
    assert distance(moments(opt)[1], state.v) < 1e-10


def test_a_resumed_run_goes_on_where_it_was():
    model, whole = mlp(), mlp()
    opt = optimizer_of(whole)
    sizes = train(whole, opt, BatchGrowth(opt), 96, 16)
    opt = optimizer_of(model)
    before = train(model, opt, BatchGrowth(opt), 48, 16)
    resumed = optimizer_of(model)
    resumed.load_state_dict(opt.state_dict())
    after = train(model, resumed, BatchGrowth(resumed), 96, 16, start=48)
    assert before + after == sizes
    assert distance(flat(model.parameters()), flat(whole.parameters())) < 1e-12


def test_nested_batches_and_other_leaves():
    opt = optimizer_of(mlp())
    batch = {"x": torch.arange(4), "more": [torch.arange(8).view(4, 2), "a name"], "number": torch.tensor(3.0)}
    (first, *_) = BatchGrowth(opt).split(batch)
    assert first["x"].tolist() == [0, 1]
    assert first["more"][0].tolist() == [[0, 1], [2, 3]]
    assert first["more"][1] == "a name"
    assert first["number"] == 3


def test_mistakes_are_named():
    model = mlp()
    opt = optimizer_of(model)
    with pytest.raises(ValueError, match="ratio must be positive, got 0"):
        BatchGrowth(opt, 0)
    growth = BatchGrowth(opt)
    with pytest.raises(ValueError, match="limit must be at least one micro-batch, got 0"):
        growth.next_kappa(0)
    with pytest.raises(ValueError, match=r"as many samples each, got \[4, 6\]"):
        next(growth.split(torch.ones(4), torch.ones(6)))
    with pytest.raises(ValueError, match="give it micro_batch_size"):
        next(BatchGrowth(InvariantAdam(mlp().parameters())).split(torch.ones(4)))
    loss(model, data(2)).backward()
    with pytest.raises(RuntimeError, match="BatchGrowth"):
        growth.next_kappa(4)

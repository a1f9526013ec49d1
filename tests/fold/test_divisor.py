"""A loss that is divided by κ in silence is noticed when κ changes; nothing else is taken for it."""

from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from problems import batches, loss, mlp

from invariant_adam import InvariantAdam


def train(model, opt, kappas, divide, seed=1, size=16):
    data = iter(batches(sum(kappas), seed=seed, size=size))
    for kappa in kappas:
        opt.expect(kappa)
        for _ in range(kappa):
            (loss(model, next(data)) / (kappa if divide else 1)).backward()
        opt.step()


CHANGES = [[2] * 8 + [8] * 2, [8] * 2 + [1] * 16, [4] * 4 + [16], [1] * 50 + [4] * 4, [4] * 4 + [2] * 2 + [1] * 16]


@pytest.mark.parametrize("kappas", CHANGES)
def test_a_division_by_kappa_is_noticed_when_kappa_changes(kappas):
    model = mlp()
    opt = InvariantAdam(model.parameters(), lr=1e-3, micro_batch_size=16)
    with pytest.warns(RuntimeWarning, match=rf"κ went from {kappas[0]} to {kappas[-1]}.*loss_divisor") as told:
        train(model, opt, kappas, divide=True)
    assert told[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, opt, [1] * 16 + [16], divide=True)  # once


@pytest.mark.parametrize("option", [{}, {"loss_divisor": 2.0}, {"loss_divisor": lambda: 1.0}])
@pytest.mark.parametrize("kappas", [*CHANGES, [1, 2, 4, 8, 16, 32], [1] * 16 + [16]])
def test_a_changed_kappa_alone_is_no_reason(kappas, option):
    model = mlp()
    train(model, InvariantAdam(model.parameters(), lr=1e-3, **option), kappas, divide=False)  # warnings are errors


@given(st.integers(0, 10**6), st.sampled_from([*CHANGES, [1] * 16 + [16]]), st.integers(1, 3))
def test_micro_batches_of_few_samples_are_no_reason(seed, kappas, size):
    model = mlp(seed=seed)
    opt = InvariantAdam(model.parameters(), lr=1e-2)
    train(model, opt, kappas, divide=False, seed=seed, size=size)


def test_a_checkpoint_that_goes_on_at_another_kappa():
    model, divided = mlp(), mlp()
    for m, divide in ((model, False), (divided, True)):
        opt = InvariantAdam(m.parameters(), lr=1e-3, micro_batch_size=16)
        train(m, opt, [4] * 5, divide)
        resumed = InvariantAdam(m.parameters(), lr=1e-3, micro_batch_size=16)
        resumed.load_state_dict(opt.state_dict())
        if divide:
            with pytest.warns(RuntimeWarning, match="κ went from 4 to 16"):
                train(m, resumed, [16], divide, seed=2)
        else:
            train(m, resumed, [16], divide, seed=2)


def test_parameters_that_come_in_a_part_of_the_micro_batches_are_left_alone():
    a, b = (torch.nn.Parameter(torch.ones(4)) for _ in range(2))
    opt = InvariantAdam([a, b], lr=1e-3)
    for kappa in (1, 4, 16):
        opt.expect(kappa)
        for i in range(kappa):
            ((a if i % 2 else a + b) ** 2).sum().div(kappa).backward()
        opt.step()

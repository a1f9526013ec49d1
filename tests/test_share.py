"""`update_share`: the weight of an update's own gradients in the averages, by the folds themselves."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from problems import batches, flat, loss, mlp
from torch import nn

import invariant_adam as ia
from invariant_adam import InvariantAdam
from invariant_adam.scaling import INVARIANT, update_shares

BETAS = (0.8, 0.95)


def shares_by_folding(kappas, declared, rule):
    """Mark the last update's gradients: those before are 0, its own are 1; then m̂ and v̂ are its shares."""
    w = nn.Parameter(torch.zeros((), dtype=torch.float64))
    opt = InvariantAdam([w], lr=0.0, betas=BETAS, rule=rule)
    shown = None
    for i, kappa in enumerate(kappas):
        if declared:
            opt.expect(kappa)
        for _ in range(kappa):
            (w * float(i == len(kappas) - 1)).backward()
            shown = opt.update_share()
        opt.step()
    state = opt.state_dict()["state"][0]
    return opt, shown, state["exp_avg"] / (1 - state["debias1"]), state["exp_avg_sq"] / (1 - state["debias2"])


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.booleans(), st.sampled_from(INVARIANT[::2]))
def test_it_is_what_marked_gradients_are_of_the_averages(kappas, declared, rule):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of sizes that were not announced
        opt, shown, m, v = shares_by_folding(kappas, declared, rule)
    last = opt.update_share()
    assert (last.m, last.v) == pytest.approx((float(m), float(v)), rel=1e-9)
    assert shown[:3] == pytest.approx(last[:3], rel=1e-9)  # the update was open, with its last micro-batch in
    assert shown.relative_step is None
    if len(set(kappas)) == 1:
        seen = kappas[0] * (len(kappas) - 1)
        by_scaling = update_shares(BETAS, from_batch=1, to_batch=kappas[0], seen=seen, rule=rule)
        assert by_scaling == pytest.approx(last[1:3], rel=1e-9)


def test_the_step_is_relative_to_the_weights_and_survives_a_checkpoint():
    model = mlp()
    opt = InvariantAdam(model.parameters(), lr=1e-2, betas=BETAS, micro_batch_size=4)
    ia.SampleLambdaLR(opt, ia.warmup_cosine(40, 400))
    data = iter(batches(12))
    for _ in range(4):
        before = flat(model.parameters())
        for _ in range(3):
            loss(model, next(data)).backward()
        opt.step()
    share = opt.update_share()
    now = flat(model.parameters())
    assert share.kappa == 3
    assert float(share.relative_step) == pytest.approx(float((now - before).norm() / now.norm()), rel=1e-6)
    resumed = InvariantAdam(copy.deepcopy(model).parameters(), micro_batch_size=4)
    resumed.load_state_dict(opt.state_dict())
    again = resumed.update_share()
    assert again[:3] == pytest.approx(share[:3], rel=1e-9)
    assert float(again.relative_step) == pytest.approx(float(share.relative_step), rel=1e-9)


def test_the_largest_share_is_given_and_frozen_parameters_have_none():
    often, seldom, frozen = (nn.Parameter(torch.ones(2)) for _ in range(3))
    frozen.requires_grad_(False)
    opt = InvariantAdam([often, seldom, frozen], betas=BETAS)
    for i in range(5):
        (often.sum() + (seldom.sum() if i == 4 else 0.0)).backward()
        opt.step()
    share = opt.update_share()
    assert (share.m, share.v) == (1.0, 1.0)  # of `seldom`, whose first update it was
    assert float(share.relative_step) > 0


def test_before_the_first_backward_there_is_no_update():
    with pytest.raises(RuntimeError, match="before the first backward"):
        InvariantAdam(mlp().parameters()).update_share()

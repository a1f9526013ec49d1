"""Schedules in samples: the same at every batch size."""

from __future__ import annotations

import copy
import gc
import pickle
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from problems import batches, distance, flat, loss, mlp
from torch import nn

from invariant_adam import InvariantAdam, InvariantEMA, SampleLambdaLR, warmup_cosine
from invariant_adam.schedules import mean_factor

SCHEDULES = st.builds(
    lambda warmup, rest, floor: warmup_cosine(warmup, warmup + rest, floor=floor),
    st.floats(0, 1e4),
    st.floats(1, 1e5),
    st.floats(0, 1),
)


@given(SCHEDULES, st.lists(st.floats(0, 2e5), min_size=2, max_size=10))
def test_means_add_up_however_the_samples_are_cut(schedule, cuts):
    cuts.sort()
    whole = mean_factor(schedule, cuts[0], cuts[-1]) * (cuts[-1] - cuts[0])
    parts = sum(mean_factor(schedule, a, b) * (b - a) for a, b in pairwise(cuts))
    assert parts == pytest.approx(whole, rel=1e-6, abs=1e-6)


@given(SCHEDULES, st.floats(0, 1e5), st.floats(1, 1e4))
def test_the_closed_mean_is_the_mean_of_the_schedule(schedule, start, length):
    """Piece by piece, where quadrature is exact to rounding."""
    marks = [start, *(x for x in (schedule.warmup, schedule.total) if start < x < start + length), start + length]
    smooth = sum(mean_factor(lambda s: schedule(s), a, b) * (b - a) for a, b in pairwise(marks)) / length
    assert mean_factor(schedule, start, start + length) == pytest.approx(smooth, abs=1e-6)


@pytest.mark.parametrize("total", [10**7, 10**9, 10**12])
def test_the_last_updates_have_a_learning_rate_of_at_least_zero(total):
    schedule = warmup_cosine(total // 100, total)
    means = [mean_factor(schedule, total - 8 * (i + 1), total - 8 * i) for i in range(2000)]
    assert min(means) >= 0
    assert means[-1] == pytest.approx(schedule(total - 8 * 2000 + 4), rel=1e-3)


def test_a_schedule_without_a_mean_is_averaged_by_quadrature():
    schedule = warmup_cosine(10, 1000)
    plain = mean_factor(lambda s: schedule(s), 100, 400)
    assert plain == pytest.approx(mean_factor(schedule, 100, 400), abs=1e-9)


@pytest.mark.parametrize("kappa", [1, 2, 4, 8])
def test_the_learning_rates_of_a_stretch_of_samples_sum_to_the_same(kappa):
    model = mlp()
    opt = InvariantAdam(model.parameters(), lr=1e-3, micro_batch_size=4)
    scheduler = SampleLambdaLR(opt, warmup_cosine(32, 256, floor=0.1))
    total = 0.0
    data = iter(batches(64))
    for _ in range(64 // kappa):
        for _ in range(kappa):
            loss(model, next(data)).backward()
        opt.step()
        scheduler.step()  # as a trainer would; it must not move the schedule
        total += kappa * scheduler.get_last_lr()[0]
    assert total == pytest.approx(64e-3 * mean_factor(warmup_cosine(32, 256, floor=0.1), 0, 256), rel=1e-12)


def test_groups_may_have_their_own_schedules():
    model = mlp()
    opt = InvariantAdam(
        [
            {"params": model[0].parameters(), "lr": 1.0},
            {"params": [*model[2].parameters(), *model[4].parameters()]},
        ],
        lr=torch.tensor(0.5),
        micro_batch_size=4,
    )
    SampleLambdaLR(opt, [lambda s: s / 8, lambda s: 1.0])
    loss(model, batches(1)[0]).backward()
    opt.step()
    assert [float(g["lr"]) for g in opt.param_groups] == [pytest.approx(0.25), 0.5]


def test_a_schedule_inside_a_closure_sees_its_samples():
    model = mlp()
    opt = InvariantAdam(model.parameters(), lr=1.0, micro_batch_size=4)
    scheduler = SampleLambdaLR(opt, lambda s: s / 8)

    def closure():
        for x in batches(2):
            loss(model, x).backward()
        return 0.0

    opt.step(closure)
    assert scheduler.get_last_lr() == [pytest.approx(0.5)]


def test_a_schedule_resumes_with_its_optimizer():
    def build():
        model = mlp()
        opt = InvariantAdam(model.parameters(), lr=1e-2, micro_batch_size=4)
        return model, opt, SampleLambdaLR(opt, warmup_cosine(16, 64))

    def go(model, opt, data):
        for x in data:
            loss(model, x).backward()
            opt.step()

    data = batches(12)
    model, opt, scheduler = build()
    go(model, opt, data[:5])
    states = copy.deepcopy((model.state_dict(), opt.state_dict(), scheduler.state_dict()))
    go(model, opt, data[5:])
    other, opt2, scheduler2 = build()
    other.load_state_dict(states[0])
    opt2.load_state_dict(states[1])
    scheduler2.load_state_dict(states[2])
    assert scheduler2.get_last_lr() == [pytest.approx(1e-2 * mean_factor(warmup_cosine(16, 64), 16, 20))]
    go(other, opt2, data[5:])
    assert torch.equal(flat(model.parameters()), flat(other.parameters()))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: warmup_cosine(10, 10), ValueError, "warmup < total"),
        (lambda: warmup_cosine(-1, 10), ValueError, "warmup=-1"),
        (lambda: warmup_cosine(1, 10, floor=2), ValueError, "floor"),
        (lambda: SampleLambdaLR(torch.optim.AdamW(mlp().parameters()), lambda s: 1), TypeError, "LambdaLR"),
        (
            lambda: SampleLambdaLR(InvariantAdam(mlp().parameters()), lambda s: 1),
            ValueError,
            "give it micro_batch_size",
        ),
        (
            lambda: SampleLambdaLR(InvariantAdam(mlp().parameters(), micro_batch_size=1), [lambda s: 1] * 2),
            ValueError,
            "2 schedules for 1",
        ),
        (
            lambda: InvariantEMA(mlp(), InvariantAdam(mlp().parameters()), decay=1.0),
            ValueError,
            "decay must be",
        ),
    ],
)
def test_mistakes_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_the_average_of_still_weights_depends_on_samples_alone(kappas):
    """Weights that jump once and stay: what is left of the old ones is decay^(samples/tuned), however cut."""
    w = nn.Linear(1, 1, bias=False)
    opt = InvariantAdam(w.parameters(), lr=0.0, micro_batch_size=2, tuned_batch_size=4)
    ema = InvariantEMA(w, opt, decay=0.9)
    nn.init.constant_(w.weight, 1.0)
    ema.update_parameters(w)
    nn.init.constant_(w.weight, 0.0)
    for kappa in kappas:
        for _ in range(kappa):
            w(torch.ones(2, 1)).sum().backward()
        opt.step()
        ema.update_parameters(w)
    assert ema.module.weight.item() == pytest.approx(0.9 ** (2 * sum(kappas) / 4), rel=1e-5)


def test_the_average_resumes_from_its_state_dict():
    model = mlp()
    opt = InvariantAdam(model.parameters(), lr=1e-2, micro_batch_size=4)
    ema = InvariantEMA(model, opt, decay=0.9, use_buffers=True)
    data = batches(6)
    for x in data[:3]:
        loss(model, x).backward()
        opt.step()
        ema.update_parameters(model)
    twin = InvariantEMA(model, opt, decay=0.9, use_buffers=True)
    twin.load_state_dict(copy.deepcopy(ema.state_dict()))
    for x in data[3:]:
        loss(model, x).backward()
        opt.step()
        ema.update_parameters(model)
        twin.update_parameters(model)
    assert distance(flat(twin.parameters()), flat(ema.parameters())) == 0


def test_copies_of_a_schedule_move_with_their_copies():
    model = mlp()
    opt = InvariantAdam(model.parameters(), lr=1e-2, micro_batch_size=4)
    scheduler = SampleLambdaLR(opt, warmup_cosine(100, 1000))
    twin, opt2, scheduler2 = copy.deepcopy((model, opt, scheduler))
    for m, o in ((model, opt), (twin, opt2)):
        for x in batches(3):
            loss(m, x).backward()
            o.step()
    assert scheduler2.get_last_lr() == scheduler.get_last_lr() == [pytest.approx(1e-3)]
    assert torch.equal(flat(model.parameters()), flat(twin.parameters()))


def test_a_schedule_does_not_keep_a_replaced_optimizer_alive():
    model = mlp()
    gc.disable()
    try:
        opt = InvariantAdam(model.parameters(), micro_batch_size=4)
        scheduler = SampleLambdaLR(opt, lambda s: 1.0)
        opt = torch.optim.AdamW(model.parameters())
        before = flat(model.parameters())
        loss(model, batches(1)[0]).backward()
        opt.step()
    finally:
        gc.enable()
    assert not torch.equal(flat(model.parameters()), before)
    with pytest.raises(RuntimeError, match="optimizer of this schedule is gone"):
        scheduler.step()


def test_a_shared_tensor_learning_rate_is_set_for_each_group():
    model, lr = mlp(), torch.tensor(1.0)
    groups = [{"params": model[i].parameters(), "lr": lr} for i in (0, 2, 4)]
    opt = InvariantAdam(groups, micro_batch_size=4)
    SampleLambdaLR(opt, [lambda s: 0.1, lambda s: 0.2, lambda s: 0.3])
    loss(model, batches(1)[0]).backward()
    opt.step()
    assert [round(float(g["lr"]), 6) for g in opt.param_groups] == [0.1, 0.2, 0.3]


def test_a_group_added_after_the_schedule_is_refused_by_name():
    model = mlp()
    opt = InvariantAdam(model.parameters(), micro_batch_size=4)
    SampleLambdaLR(opt, lambda s: 1.0)
    opt.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    loss(model, batches(1)[0]).backward()
    with pytest.raises(RuntimeError, match="add groups first"):
        opt.step()


def test_the_average_takes_batch_norm_along():
    model = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).double()
    opt = InvariantAdam(model.parameters(), lr=1e-2, micro_batch_size=4)
    ema = InvariantEMA(model, opt, decay=0.5, use_buffers=True)
    seen = []
    for x in batches(3):
        loss(model, x).backward()
        opt.step()
        ema.update_parameters(model)
        seen.append(model[1].running_mean.clone())
    expected = seen[0] / 4 + seen[1] / 4 + seen[2] / 2
    torch.testing.assert_close(ema.module[1].running_mean, expected)
    assert ema.module[1].num_batches_tracked == 3


def test_a_copied_average_goes_on_and_an_unpickled_one_says_what_it_lacks():
    model = mlp()
    opt = InvariantAdam(model.parameters(), lr=1e-2, micro_batch_size=4)
    ema = InvariantEMA(model, opt, decay=0.9)
    loss(model, batches(1)[0]).backward()
    opt.step()
    ema.update_parameters(model)
    twin = copy.deepcopy(ema)
    loss(model, batches(1)[0]).backward()
    opt.step()
    ema.update_parameters(model)
    twin.update_parameters(model)
    assert torch.equal(flat(twin.parameters()), flat(ema.parameters()))
    loose = pickle.loads(pickle.dumps(ema))
    with pytest.raises(RuntimeError, match="no optimizer to count samples with"):
        loose.update_parameters(model)


def test_an_average_ahead_of_its_optimizer_is_refused():
    model = mlp()
    opt = InvariantAdam(model.parameters(), micro_batch_size=4)
    ema = InvariantEMA(model, opt)
    ema.samples.fill_(1000)
    with pytest.raises(RuntimeError, match="has seen 0 samples, this average 1000"):
        ema.update_parameters(model)

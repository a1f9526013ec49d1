"""Every way to feed InvariantAdam against the float64 reference: loop in hooks, loop by call, pairs of one pass."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from problems import batches, distance, flat, gradient_of, loss, mlp, moments, put, reference_run
from torch import nn

from invariant_adam import InvariantAdam, reference
from invariant_adam.scaling import INVARIANT, Hyperparameters, scale

H = Hyperparameters(lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
DTYPES = [(torch.float64, 1e-10), (torch.float32, 2e-5)]


def run(model, updates, feed="backward", expect=False, **options):
    """Train `model` on updates of micro-batches through one of the paths."""
    opt = InvariantAdam(
        model.parameters(), *H[:2], 1e-8, H[2], fold="call" if feed == "call" else "backward", **options
    )
    for micro in updates:
        if expect:
            opt.expect(len(micro))
        if feed == "pair":
            put_pairs(model, micro)
        else:
            for x in micro:
                loss(model, x).backward()
                if feed == "call":
                    opt.fold()
        opt.step()
    return opt


def put_pairs(model, micro, divisor=1.0):
    """Leave on each parameter what one pass over `micro` leaves."""
    grads = [torch.autograd.grad(loss(model, x) / divisor, list(model.parameters())) for x in micro]
    for p, g in zip(model.parameters(), zip(*grads, strict=True), strict=True):
        g = torch.stack(g)
        put(p, g.mean(0), g.square().mean(0), float(len(micro)))


def assert_equal(model, opt, state, tolerance):
    m, v = moments(opt)
    assert distance(flat(model.parameters()), state.w) < tolerance
    assert distance(m, state.m) < tolerance * 10
    assert distance(v, state.v) < tolerance * 10


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES, ids=["float64", "float32"])
@pytest.mark.parametrize("rule", INVARIANT)
@pytest.mark.parametrize("feed", ["backward", "call", "pair"])
@pytest.mark.parametrize("kappa", [1, 2, 5])
def test_constant_kappa_is_exact_with_nothing_declared(kappa, feed, rule, dtype, tolerance, device):
    model = mlp(dtype, device=device)
    data = batches(kappa * 12, dtype=dtype, device=device)
    updates = [data[i : i + kappa] for i in range(0, len(data), kappa)]
    state = reference_run(model, updates, H, rule=rule)
    opt = run(model, updates, feed, rule=rule)
    assert_equal(model, opt, state, tolerance)


@pytest.mark.parametrize("tuned", [4, 16, 64])
def test_hyperparameters_hold_at_the_tuned_batch_size(tuned):
    model = mlp()
    data = batches(4 * 8)
    updates = [data[i : i + 4] for i in range(0, len(data), 4)]
    state = reference_run(model, updates, H, tuned=tuned / 4)
    opt = run(model, updates, micro_batch_size=4, tuned_batch_size=tuned)
    assert_equal(model, opt, state, 1e-10)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=8), st.sampled_from(INVARIANT))
def test_any_history_of_kappa_is_exact_when_declared(kappas, rule):
    model = mlp()
    data = iter(batches(sum(kappas)))
    updates = [[next(data) for _ in range(kappa)] for kappa in kappas]
    state = reference_run(model, updates, H, rule=rule)
    opt = run(model, updates, expect=True, rule=rule)
    assert_equal(model, opt, state, 1e-10)


@given(st.lists(st.integers(1, 6), min_size=2, max_size=8))
def test_an_undeclared_change_of_kappa_is_right_to_first_order(kappas):
    """The gap to the declared run is second order in γ: a tenth of the γ, a hundredth of the gap."""
    gaps = []
    for gamma in (1e-2, 1e-3):
        finals = []
        for expect in (True, False):
            model = mlp()
            data = iter(batches(sum(kappas)))
            opt = InvariantAdam(model.parameters(), lr=1e-12, betas=(1 - gamma, 1 - gamma))
            for kappa in kappas:
                if expect:
                    opt.expect(kappa)
                for _ in range(kappa):
                    loss(model, next(data)).backward()
                opt.step()
            finals.append(moments(opt)[0])
        gaps.append(float((finals[0] - finals[1]).norm()))
    assert gaps[0] < 1e-2
    assert gaps[1] <= gaps[0] / 50 + 1e-15


@pytest.mark.parametrize("feed", ["backward", "call", "pair"])
@pytest.mark.parametrize("maximize", [False, True])
def test_l2_decay_and_maximize(feed, maximize):
    model = mlp()
    data = batches(3 * 6)
    updates = [data[i : i + 3] for i in range(0, len(data), 3)]
    state = reference_run(model, updates, H, decoupled=False, sign=-1.0 if maximize else 1.0)
    opt = run(model, updates, feed, decoupled=False, maximize=maximize)
    assert_equal(model, opt, state, 1e-10)


@pytest.mark.parametrize("feed", ["backward", "call", "pair"])
def test_loss_divisor_undoes_a_trainers_division(feed):
    model, twin = mlp(), mlp()
    data = batches(12)
    opts = [
        InvariantAdam(m.parameters(), fold="call" if feed == "call" else "backward", loss_divisor=d)
        for m, d in ((model, 1.0), (twin, 4.0))
    ]
    for i in range(0, 12, 4):
        for m, opt in ((model, opts[0]), (twin, opts[1])):
            if feed == "pair":
                put_pairs(m, data[i : i + 4], opt.loss_divisor)
            else:
                for x in data[i : i + 4]:
                    (loss(m, x) / opt.loss_divisor).backward()
                    if feed == "call":
                        opt.fold()
            opt.step()
    assert distance(flat(twin.parameters()), flat(model.parameters())) < 1e-12


@pytest.mark.parametrize("options", [{}, {"fold": "call"}, {"max_micro_norm": 0.1}, {"maximize": True}])
def test_a_loss_divisor_may_be_asked_at_each_micro_batch(options):
    """A loop that divides each micro-batch by another number, and tells, is one that does not divide."""
    model, twin = mlp(), mlp()
    divisor = [1.0]
    opt = InvariantAdam(model.parameters(), **options)
    other = InvariantAdam(twin.parameters(), loss_divisor=lambda: divisor[0], **options)
    for i, x in enumerate(batches(12)):
        for m, o in ((model, opt), (twin, other)):
            divisor[0] = 1.0 if m is model else float(1 + i % 5)
            (loss(m, x) / divisor[0]).backward()
            if "fold" in options:
                o.fold()
            if i % 4 == 3:
                o.step()
    tol = 1e-6 if "max_micro_norm" in options else 1e-12  # a norm has a small number added to it
    assert distance(flat(twin.parameters()), flat(model.parameters())) < tol
    assert distance(moments(other)[1], moments(opt)[1]) < tol
    divisor[0] = 0.0
    twin_loss = loss(twin, x)
    if "fold" in options:
        twin_loss.backward()
    with pytest.raises(ValueError, match=r"what loss_divisor\(\) returns must be a positive finite number, got 0"):
        other.fold() if "fold" in options else twin_loss.backward()


def test_a_ragged_micro_batch_counts_by_its_samples():
    """Weights 1, 1, ½ are those of a list that has the full ones twice and the half one once."""
    for feed in ("backward", "call"):
        model = mlp()
        full, half = batches(2, size=4), batches(1, size=2, seed=5)
        expected = reference.invariant_adam(
            reference.start(flat(model.parameters())),
            [gradient_of(model, x) for x in (*full, *full, *half)],
            scaled(2.5),
        )
        opt = InvariantAdam(model.parameters(), *H[:2], 1e-8, H[2], micro_batch_size=4, fold=feed)
        for x in full:
            loss(model, x).backward()
            if feed == "call":
                opt.fold()
        with opt.ragged(2):
            loss(model, half[0]).backward()
            if feed == "call":
                opt.fold()
        assert opt.kappa == 2.5
        opt.step()
        assert opt.samples_seen == 10
        assert_equal(model, opt, expected, 1e-10)


def scaled(kappa):
    return scale(*H, from_batch=1, to_batch=kappa)


def test_groups_have_their_own_hyperparameters_and_schedule():
    """κ = 1 is AdamW: 200 steps, several groups, decay, a schedule running."""
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
        model = mlp(dtype)
        twin = copy.deepcopy(model)

        def groups(m):
            return [
                {"params": m[0].parameters(), "lr": 3e-3, "weight_decay": 0.1},
                {"params": m[2].parameters(), "betas": (0.8, 0.95), "eps": 1e-6},
                {"params": m[4].parameters()},
            ]

        ours = InvariantAdam(groups(model), lr=1e-2, weight_decay=0.01)
        theirs = torch.optim.AdamW(groups(twin), lr=1e-2, weight_decay=0.01)
        schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(o, 200) for o in (ours, theirs)]
        for x in batches(200, dtype=dtype):
            for m, opt, schedule in ((model, ours, schedules[0]), (twin, theirs, schedules[1])):
                opt.zero_grad()
                loss(m, x).backward()
                opt.step()
                schedule.step()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance)


class Experts(nn.Module):
    """Two experts; the sign of the first feature chooses one for the whole micro-batch."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(5, 5)
        self.experts = nn.ModuleList(nn.Linear(5, 1) for _ in range(2))

    def forward(self, x):
        return self.experts[int(x[0, 0] > 0)](self.trunk(x).tanh())


def test_a_parameter_absent_from_some_micro_batches_is_scaled_by_its_own_count():
    torch.manual_seed(0)
    model = Experts().double()
    opt = InvariantAdam(model.parameters(), *H[:2], 1e-8, H[2])
    data = batches(4)
    chosen = [int(x[0, 0] > 0) for x in data]
    assert 0 < sum(chosen) < 4
    before = flat(model.experts[1].parameters())
    gradients = [
        flat(torch.autograd.grad(loss(model, x), list(model.experts[1].parameters())))
        for x, c in zip(data, chosen, strict=True)
        if c
    ]
    expected = reference.invariant_adam(
        reference.start(before), [lambda w, g=g: g for g in gradients], scaled(len(gradients))
    )
    for x in data:
        loss(model, x).backward()
    assert opt.kappa == 4
    opt.step()
    assert distance(flat(model.experts[1].parameters()), expected.w) < 1e-12


def test_a_parameter_with_no_gradient_at_all_stays():
    model = mlp()
    spare = nn.Parameter(torch.ones(3, dtype=torch.float64))
    opt = InvariantAdam([*model.parameters(), spare], weight_decay=0.1)
    loss(model, batches(1)[0]).backward()
    opt.step()
    assert spare.tolist() == [1.0, 1.0, 1.0]
    assert opt.state[spare]["step"].item() == 0


def test_bfloat16_parameters_have_float32_moments(device):
    model = mlp(torch.bfloat16, device=device)
    data = batches(8, dtype=torch.bfloat16, device=device)
    grads = [torch.autograd.grad(loss(model, x), list(model.parameters())) for x in data]
    opt = InvariantAdam(model.parameters())
    for x in data:
        loss(model, x).backward()
    opt.step()
    for p, g in zip(model.parameters(), zip(*grads, strict=True), strict=True):
        m, v = opt.state[p]["exp_avg"], opt.state[p]["exp_avg_sq"]
        assert m.dtype == v.dtype == torch.float32
        x = torch.stack(g).float()
        torch.testing.assert_close(v / opt.state[p]["norm2"], x.square().mean(0) * (1 - 0.999**8), rtol=1e-5, atol=0)


@pytest.mark.parametrize("feed", ["backward", "call"])
def test_micro_norm_clips_each_micro_batch(feed):
    limit = 0.05
    model, twin = mlp(), mlp()
    data = batches(3)
    opt = InvariantAdam(model.parameters(), max_micro_norm=limit, fold=feed)
    other = InvariantAdam(twin.parameters(), fold="call")
    for x in data:
        loss(model, x).backward()
        if feed == "call":
            opt.fold()
        loss(twin, x).backward()
        if feed == "call":
            torch.nn.utils.clip_grad_norm_(twin.parameters(), limit)
        else:
            for p in twin.parameters():
                torch.nn.utils.clip_grad_norm_([p], limit)
        other.fold()
    opt.step()
    other.step()
    assert distance(flat(model.parameters()), flat(twin.parameters())) < 1e-9

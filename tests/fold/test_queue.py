"""Gradients that wait: for `step()`, where each is a whole update, and for others to share a launch with."""

from __future__ import annotations

import copy
import gc
import math
import weakref

import pytest
import torch
from problems import batches, failing, flat, loss, mlp
from torch import nn

from invariant_adam import InvariantAdam, one_pass
from invariant_adam.fold import queue
from invariant_adam.kernels import adam as kernels


@pytest.fixture
def launches(monkeypatch):
    """The kernels called, and on how many tensors each."""
    made = []
    for name in ("fold", "step", "fold_step"):
        plain = getattr(kernels, name)

        def call(*lists, name=name, plain=plain, **scalars):
            made.append((name, len(lists[0])))
            plain(*lists, **scalars)

        monkeypatch.setattr(kernels, name, call)
    return made


@pytest.fixture
def sharing(monkeypatch):
    """Share launches on the CPU too."""
    monkeypatch.setattr(queue, "SHARING", frozenset({"cpu", "cuda"}))


def run(model, opt, data, expect):
    for x in data:
        if expect:
            opt.expect(1)
        loss(model, x).backward()
        opt.step()
    return flat(model.parameters())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weight_decay": 0.1, "maximize": True, "loss_divisor": 2.0},
        {"weight_decay": 0.1, "decoupled": False, "max_micro_norm": 0.3},
        {"on_nonfinite": "raise", "rule": "linear"},
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_folding_in_the_step_changes_no_number(options, dtype, device, launches):
    models = [mlp(dtype, device=device) for _ in range(2)]
    opts = [InvariantAdam(m.parameters(), lr=0.01, eps=1e-4, **options) for m in models]
    data = batches(5, dtype=dtype, device=device)
    one = run(models[0], opts[0], data, expect=True)
    waited = list(launches)
    other = run(models[1], opts[1], data, expect=False)
    if options.get("on_nonfinite") != "raise":
        assert waited == [("fold_step", 6)] * 5
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]
    torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
    first, second = (opt.state_dict() for opt in opts)
    assert first["param_groups"] == second["param_groups"]
    for a, b in zip(first["state"].values(), second["state"].values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_only_a_declared_update_of_one_gradient_waits(launches, monkeypatch):
    monkeypatch.setattr(queue, "SHARING", frozenset())  # or small ones wait for each other
    model = mlp()
    opt = InvariantAdam(model.parameters())
    for expected, kappa in ((None, 1), (2, 2), (2, 1)):
        if expected:
            opt.expect(expected)
        for x in batches(kappa):
            loss(model, x).backward()
        assert [name for name, _ in launches] == ["fold"] * 6 * kappa
        opt.step()
        launches.clear()
    call = InvariantAdam(model.parameters(), fold="call")
    call.expect(1)
    loss(model, batches(1)[0]).backward()
    call.fold()
    assert not launches
    call.step()
    assert launches == [("fold_step", 6)]


def test_a_gradient_that_was_written_over_while_it_waited_is_refused():
    w = nn.Parameter(torch.ones(3, dtype=torch.float64))
    opt = InvariantAdam([w], lr=0.1, fold="call")
    held = torch.ones(3, dtype=torch.float64)

    def fold(value):
        opt.expect(1)
        w.grad = held.fill_(value)
        opt.fold()

    fold(1.0)
    opt.step()
    before = {key: opt.state[w][key].clone() for key in ("exp_avg", "exp_avg_sq")}, w.detach().clone()
    fold(2.0)
    held.view(-1)[:1].zero_()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"was written over between its fold and step\(\).*opt.abandon"):
            opt.step()
    opt.abandon()
    after = {key: opt.state[w][key] for key in before[0]}, w.detach()
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    fold(3.0)
    opt.step()
    assert opt.samples_seen == 2


def test_gradients_that_wait_are_freed_by_the_step():
    model, x = mlp(), batches(1)[0]
    opt = InvariantAdam(model.parameters())
    opt.expect(1)
    alive = []
    for p in model.parameters():
        p.register_hook(lambda g: alive.append(weakref.ref(g.untyped_storage())))
    loss(model, x).backward()
    assert opt.kappa == 1
    assert all(p.grad is None for p in model.parameters())
    assert len(opt.queue.update.late) == 6
    opt.step()
    gc.collect()
    assert not opt.queue.update.late


def test_a_second_gradient_folds_the_first_and_is_refused():
    model, data = mlp(), batches(2)
    opt = InvariantAdam(model.parameters())
    opt.expect(1)
    for x in data:
        loss(model, x).backward()
    assert not opt.queue.update.late
    with pytest.raises(RuntimeError, match=r"2 gradients where expect\(1\)"):
        opt.step()
    opt.abandon()
    run(model, opt, data, expect=True)


def test_an_abandoned_update_keeps_what_waited():
    models, data = [mlp() for _ in range(2)], batches(3)
    opts = [InvariantAdam(m.parameters()) for m in models]
    for model, opt, expect in zip(models, opts, (True, False), strict=True):
        run(model, opt, data[:1], expect)
        if expect:
            opt.expect(1)
        loss(model, data[1]).backward()
        opt.abandon()
        run(model, opt, data[2:], expect)
    torch.testing.assert_close(*(flat(m.parameters()) for m in models), rtol=1e-12, atol=1e-12)


def test_an_error_in_step_leaves_the_gradients_waiting():
    models, x = [mlp() for _ in range(2)], batches(1)[0]
    opts = [InvariantAdam(m.parameters(), lr=0.1) for m in models]
    for model, opt in zip(models, opts, strict=True):
        opt.expect(1)
        loss(model, x).backward()
    opts[0].param_groups[0]["lr"] = -1.0
    with pytest.raises(ValueError, match="lr"):
        opts[0].step()
    opts[0].param_groups[0]["lr"] = 0.1
    for opt in opts:
        opt.step()
    torch.testing.assert_close(*(flat(m.parameters()) for m in models), rtol=0, atol=0)


def test_copies_and_checkpoints_with_waiting_gradients():
    model, x = mlp(), batches(1)[0]
    opt = InvariantAdam(model.parameters(), lr=0.1)
    opt.expect(1)
    loss(model, x).backward()
    with pytest.raises(RuntimeError, match="middle of an update"):
        opt.state_dict()
    twin_model, twin = copy.deepcopy((model, opt))
    opt.step()
    twin.step()
    torch.testing.assert_close(flat(model.parameters()), flat(twin_model.parameters()))
    saved = copy.deepcopy(opt.state_dict())
    opt.expect(1)
    loss(model, x).backward()
    opt.load_state_dict(saved)  # drops what waits
    assert opt.kappa == 0
    before = flat(s["exp_avg"] for s in opt.state.values())
    opt.expect(1)
    loss(model, x).backward()
    torch.testing.assert_close(before, flat(s["exp_avg"] for s in opt.state.values()))
    opt.step()


def test_a_non_finite_gradient_that_waited_is_left_out_and_told_of():
    w = nn.Parameter(torch.ones(3))
    opt = InvariantAdam([w])
    opt.expect(1)
    (w * torch.tensor([1.0, math.nan, 2.0])).sum().backward()
    with pytest.warns(RuntimeWarning, match="1 gradient elements"):
        opt.step()
    assert (opt.nonfinite, opt.samples_seen) == (1, 1)
    assert w.tolist() == [pytest.approx(0.999), 1.0, pytest.approx(0.999)]


def test_a_parameter_without_a_gradient_is_left_alone(launches):
    a, b, c = (nn.Parameter(torch.ones(2)) for _ in range(3))
    opt = InvariantAdam([{"params": [a, b]}, {"params": [c], "lr": 0.5}], lr=0.1)
    opt.expect(1)
    (a + c).sum().backward()
    opt.step()
    assert launches == [("fold_step", 1), ("fold_step", 1)]
    assert (a[0].item(), b[0].item(), c[0].item()) == (pytest.approx(0.9), 1.0, pytest.approx(0.5))


def test_a_closure_that_declares_its_update():
    models, data = [mlp() for _ in range(2)], batches(3)
    opts = [InvariantAdam(m.parameters()) for m in models]
    for x in data:

        def closure(x=x):
            opts[0].expect(1)
            value = loss(models[0], x)
            value.backward()
            return value.item()

        opts[0].step(closure)
    run(models[1], opts[1], data, expect=False)
    torch.testing.assert_close(*(flat(m.parameters()) for m in models), rtol=1e-12, atol=1e-12)


# -------------------------------------------------------------------- the queue


@pytest.mark.parametrize("kappa", [1, 3])
def test_small_gradients_share_a_launch(sharing, launches, kappa, monkeypatch):
    model, twin, data = mlp(), mlp(), batches(2 * kappa)
    opt = InvariantAdam(model.parameters())
    for i in range(2):
        for x in data[i * kappa :][:kappa]:
            loss(model, x).backward()
        assert launches == [("fold", 6)] * kappa
        assert not opt.queue.update.queued
        opt.step()
        launches.clear()
    monkeypatch.setattr(queue, "SHARING", frozenset())
    other = InvariantAdam(twin.parameters())
    for i in range(2):
        for x in data[i * kappa :][:kappa]:
            loss(twin, x).backward()
        other.step()
    torch.testing.assert_close(flat(model.parameters()), flat(twin.parameters()), rtol=0, atol=0)


def test_the_queue_is_bounded_and_leaves_large_ones_alone(sharing, launches, monkeypatch):
    monkeypatch.setattr(queue, "ROOM", 25)  # the first weight has 35 elements
    model = mlp()
    opt = InvariantAdam(model.parameters())
    loss(model, batches(1)[0]).backward()
    assert sum(n for _, n in launches) == 6
    assert len(launches) < 6
    opt.step()


def test_pairs_of_one_pass_share_a_launch(sharing, launches):
    models, data = [mlp() for _ in range(2)], batches(2, size=8)
    opts = [InvariantAdam(m.parameters(), micro_batch_size=2) for m in models]
    for x in data:
        with one_pass(models[0], 2, into=opts[0]):
            loss(models[0], x).backward()
        assert launches == [("fold", 6)]
        opts[0].step()
        for part in x.split(2):
            loss(models[1], part).backward()
        opts[1].step()
        launches.clear()
    torch.testing.assert_close(*(flat(m.parameters()) for m in models), rtol=1e-10, atol=1e-12)


def test_pairs_wait_within_bounds(sharing, launches, monkeypatch):
    monkeypatch.setattr(queue, "ROOM", 25)
    model, x = mlp(), batches(1, size=8)[0]
    opt = InvariantAdam(model.parameters(), micro_batch_size=2)
    with one_pass(model, 2):
        loss(model, x).backward()
        assert opt.kappa == 4
    assert sum(n for _, n in launches) == 6
    assert 1 < len(launches) < 6
    opt.step()


@pytest.mark.filterwarnings("default")  # tracing warns
def test_pairs_of_a_compiled_graph_are_folded_together(sharing, launches, monkeypatch):
    monkeypatch.setattr(queue, "ROOM", 25)
    torch._dynamo.reset()
    model, twin, data = mlp(), mlp(), batches(3, size=8)
    compiled = torch.compile(model, backend="aot_eager")
    opts = [InvariantAdam(m.parameters(), micro_batch_size=2) for m in (model, twin)]
    for x in data:
        with one_pass(compiled, 2):
            loss(compiled, x).backward()
        assert launches == [("fold", 6)]
        opts[0].step()
        for part in x.split(2):
            loss(twin, part).backward()
        opts[1].step()
        launches.clear()
    torch.testing.assert_close(flat(model.parameters()), flat(twin.parameters()), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("into", [False, True])
@pytest.mark.parametrize("caught", [False, True])
def test_a_failed_backward_leaves_no_pair_behind(sharing, into, caught):
    models, x = [mlp() for _ in range(2)], batches(1, size=8)[0]
    opts = [InvariantAdam(m.parameters(), micro_batch_size=2) for m in models]
    fails = False
    models[0][1].register_forward_hook(lambda module, args, y: failing(ValueError)(y) if fails else y)
    options = {"into": opts[0]} if into else {}
    for i in range(3):
        fails = i == 1
        if fails and caught:
            with (
                pytest.raises(RuntimeError, match="did not come to its end"),
                one_pass(models[0], 2, **options),
                pytest.raises(ValueError, match="out of memory"),
            ):
                loss(models[0], x).backward()
        elif fails:
            with pytest.raises(ValueError, match="out of memory"), one_pass(models[0], 2, **options):
                loss(models[0], x).backward()
        if fails:
            assert opts[0].kappa == 0
            with pytest.raises(RuntimeError, match="step\\(\\) found no gradient"):
                opts[0].step()
            continue
        with one_pass(models[0], 2, **options):
            loss(models[0], x).backward()
        opts[0].step()
        for part in x.split(2):
            loss(models[1], part).backward()
        opts[1].step()
    torch.testing.assert_close(*(flat(m.parameters()) for m in models), rtol=1e-10, atol=1e-12)


def test_what_waits_is_refused_in_its_backward(sharing):
    model, x = mlp(), batches(1, size=8)[0]
    opt = InvariantAdam(model.parameters(), micro_batch_size=2, max_micro_norm=1.0)
    with one_pass(model, 2):
        value = loss(model, x)
        with pytest.raises(RuntimeError, match="max_micro_norm"):
            value.backward()
    assert opt.kappa == 0


def test_a_failed_backward_with_a_queue(sharing):
    a, b = (nn.Parameter(torch.ones(2)) for _ in range(2))
    opt = InvariantAdam([a, b])
    (a * b).sum().backward()
    opt.step()
    with pytest.raises(ValueError, match="out of memory"):
        (failing(ValueError)(a * 2).sum() + b.sum() * 3).backward()
    with pytest.raises(RuntimeError, match="did not come to its end"):
        opt.step()
    opt.abandon()
    assert not opt.queue.update.queued
    before = b.tolist()
    (a * b).sum().backward()
    opt.step()
    assert b.tolist() < before

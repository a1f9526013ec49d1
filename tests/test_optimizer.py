"""InvariantAdam as a torch.optim.Optimizer: its life among hooks, checkpoints, trainers and mistakes."""

from __future__ import annotations

import copy
import gc
import io
import math
import os
import pickle
import subprocess
import sys
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from problems import batches, distance, flat, gradient_of, loss, mlp, moments, put
from torch import nn
from torch.utils.checkpoint import checkpoint

from invariant_adam import InvariantAdam, reference
from invariant_adam.fold import hooks, pair
from invariant_adam.fold import queue as fold_queue
from invariant_adam.scaling import INVARIANT, Hyperparameters


def train(model, opt, updates, seed=1, kappa=2):
    data = iter(batches(updates * kappa, seed=seed, dtype=next(model.parameters()).dtype))
    for _ in range(updates):
        for _ in range(kappa):
            loss(model, next(data)).backward()
            if not opt.queue.in_backward:
                opt.fold()
        opt.step()


# -------------------------------------------------------------------- memory


def deep(width=32, layers=20):
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.Tanh())))


@pytest.mark.parametrize("room", [0, 1500])
def test_at_most_one_gradient_is_alive_after_its_hook(room, monkeypatch):
    """A watcher in front of the optimizer's hooks counts the bytes of gradients that still exist.

    Beside small ones, which wait for each other.
    """
    monkeypatch.setattr(fold_queue, "ROOM_IN_CACHE", room)
    model, alive, peak = deep(), [], []
    opt = InvariantAdam(model.parameters())

    def watch(p):
        alive.append((weakref.ref(p.grad.untyped_storage()), p.grad.untyped_storage().nbytes()))
        opt.queue.on_grad(p)
        peak.append(sum(n for storage, n in alive if storage() is not None))

    for p in model.parameters():
        p._post_accumulate_grad_hooks.clear()
        p.register_post_accumulate_grad_hook(watch)
    for _ in range(3):
        model(torch.randn(4, 32)).square().mean().backward()
    opt.step()
    largest = max(p.numel() * p.element_size() for p in model.parameters())
    assert len(peak) == 3 * 40
    assert max(peak) <= max(largest, 4 * room)


def tensors_per_parameter(make, use):
    """Weights, state and gradients just before a step, in tensors the size of all parameters."""
    model = deep()
    opt = make(model.parameters())
    for _ in range(3):
        for _ in range(2):
            use(model(torch.randn(4, 32)).square().mean())
        held = [*model.parameters()] + [p.grad for p in model.parameters() if p.grad is not None]
        held += [s for p in model.parameters() for s in opt.state[p].values() if torch.is_tensor(s) and s.dim()]
        opt.step()
        opt.zero_grad()
    return sum(t.numel() for t in held) / sum(p.numel() for p in model.parameters())


def test_three_tensors_per_parameter_where_adamw_with_accumulation_has_four():
    assert tensors_per_parameter(InvariantAdam, lambda x: x.backward()) == 3
    assert tensors_per_parameter(torch.optim.AdamW, lambda x: (x / 2).backward()) == 4


# -------------------------------------------------------------------- checkpoints


def saved(opt):
    """Through a real file format, loaded as untrusted data is."""
    buffer = io.BytesIO()
    torch.save(opt.state_dict(), buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.sampled_from([torch.float64, torch.bfloat16]))
def test_a_resumed_run_is_the_uninterrupted_one(kappas, dtype):
    """Bit for bit against a run that saved at the same place, for any history of κ before it."""
    model = mlp(dtype)
    opt = InvariantAdam(model.parameters(), lr=1e-2, micro_batch_size=4, tuned_batch_size=8)
    for i, kappa in enumerate(kappas):
        train(model, opt, 1, seed=i, kappa=kappa)
    state = saved(opt)
    twin = copy.deepcopy(model)
    other = InvariantAdam(twin.parameters(), lr=99.0, micro_batch_size=4)
    other.load_state_dict(state)
    assert other.samples_seen == opt.samples_seen == 4 * sum(kappas)
    assert (other.param_groups[0]["lr"], other.tuned_batch_size) == (1e-2, 8)
    for m, o in ((model, opt), (twin, other)):
        train(m, o, 3, seed=50, kappa=3)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))
    assert all(s["exp_avg"].dtype == torch.promote_types(dtype, torch.float32) for s in other.state.values())


def test_saving_does_not_move_the_run():
    runs = []
    for save in (False, True):
        model = mlp()
        opt = InvariantAdam(model.parameters())
        for i, kappa in enumerate((2, 5, 1)):
            train(model, opt, 1, seed=i, kappa=kappa)
            if save:
                saved(opt)
        runs.append(flat(model.parameters()))
    assert distance(*runs) < 1e-14


@pytest.mark.parametrize("other", [torch.optim.AdamW, torch.optim.Adam])
def test_an_adam_checkpoint_goes_on_here_and_back(other):
    """κ = 1: five steps of Adam, five here, five of Adam again, are fifteen of Adam."""
    model = mlp()
    twin = copy.deepcopy(model)
    data = batches(15)
    whole = other(twin.parameters(), lr=1e-2, weight_decay=0.1)
    for x in data:
        loss(twin, x).backward()
        whole.step()
        whole.zero_grad()
    state = None
    for first, cls in ((0, other), (5, InvariantAdam), (10, other)):
        options = {"lr": 1e-2, "weight_decay": 0.1}
        if cls is InvariantAdam:
            options["decoupled"] = other is torch.optim.AdamW
        opt = cls(model.parameters(), **options)
        if state is not None:
            opt.load_state_dict(state)
        for x in data[first : first + 5]:
            opt.zero_grad()
            loss(model, x).backward()
            opt.step()
        state = saved(opt)
        opt.zero_grad()
        del opt
    assert distance(flat(model.parameters()), flat(twin.parameters())) < 1e-13


def test_parameters_new_to_a_checkpoint_start_fresh():
    model = mlp()
    theirs = torch.optim.AdamW(model.parameters())  # made no step: it has no state at all
    opt = InvariantAdam(model.parameters())
    train(model, opt, 2)
    opt.load_state_dict(theirs.state_dict())
    assert all(s["step"].item() == 0 and not s["exp_avg"].any() for s in opt.state.values())
    train(model, opt, 1)


def test_a_checkpoint_in_mid_update_is_refused_and_nothing_is_lost():
    model, twin = mlp(), mlp()
    opts = [InvariantAdam(m.parameters()) for m in (model, twin)]
    x, y = batches(2)
    for m, opt, save in ((model, opts[0], True), (twin, opts[1], False)):
        loss(m, x).backward()
        if save:
            with pytest.raises(RuntimeError, match="middle of an update: 1 micro-batch is folded"):
                opt.state_dict()
        loss(m, y).backward()
        opt.step()
    assert torch.equal(flat(model.parameters()), flat(twin.parameters()))


def test_loading_drops_the_open_update():
    model = mlp()
    opt = InvariantAdam(model.parameters())
    train(model, opt, 2)
    state = saved(opt)
    loss(model, batches(1)[0]).backward()
    opt.load_state_dict(state)
    assert opt.kappa == 0
    assert distance(moments(opt)[0], flat(s["exp_avg"] for s in state["state"].values())) == 0


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda s: s.pop("state"), "no 'state'"),
        (lambda s: s["param_groups"].append(dict(s["param_groups"][0])), "groups of"),
        (
            lambda s: s["param_groups"][0].update(micro_batch_size=8),
            "micro_batch_size=8, the optimizer with 4",
        ),
        (lambda s: s["param_groups"][0].update(amsgrad=True), "amsgrad"),
        (lambda s: s["state"][1].update(exp_avg=torch.zeros(3)), r"exp_avg of parameter 1 .* shape \(3,\)"),
        (lambda s: s["state"][1].update(exp_avg_sq=torch.zeros(7, dtype=torch.int8)), "int8"),
        (lambda s: s["state"].update({0: {"momentum_buffer": torch.zeros(7, 5)}}), "another optimizer"),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(spoil, message):
    model = mlp()
    opt = InvariantAdam(model.parameters(), micro_batch_size=4)
    train(model, opt, 2)
    before = copy.deepcopy(opt.state_dict())
    state = saved(opt)
    spoil(state)
    with pytest.raises(ValueError, match=message):
        opt.load_state_dict(state)
    after = opt.state_dict()
    assert before["param_groups"] == after["param_groups"]
    for i, s in before["state"].items():
        assert all(
            torch.equal(v, after["state"][i][k]) if torch.is_tensor(v) else v == after["state"][i][k]
            for k, v in s.items()
        )


def test_a_users_hook_may_rearrange_what_is_loaded():
    """torch's documented use of load_state_dict pre-hooks: match parameters by name."""
    a, b = (nn.Parameter(torch.ones(2)) for _ in range(2))
    theirs = torch.optim.AdamW([a, b])
    (a * 3 + b).sum().backward()
    theirs.step()
    a.grad = b.grad = None
    opt = InvariantAdam([b, a])

    def swap(_, state_dict):
        return {**state_dict, "state": {0: state_dict["state"][1], 1: state_dict["state"][0]}}

    opt.register_load_state_dict_pre_hook(swap)
    opt.load_state_dict(theirs.state_dict())
    torch.testing.assert_close(opt.state[a]["exp_avg"], theirs.state[a]["exp_avg"])
    assert not torch.equal(opt.state[a]["exp_avg"], opt.state[b]["exp_avg"])


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("open_update", [False, True])
def test_copies_train_on_alone(copier, open_update):
    model = mlp()
    opt = InvariantAdam(model.parameters(), lr=1e-2, max_micro_norm=0.5, loss_divisor=2.0)
    train(model, opt, 2)
    if open_update:
        loss(model, batches(1, seed=7)[0]).backward()
    twin, other = copier((model, opt))
    before = flat(model.parameters())
    assert other.kappa == opt.kappa
    train(twin, other, 2)
    assert torch.equal(flat(model.parameters()), before)
    train(model, opt, 2)
    assert torch.equal(flat(model.parameters()), flat(twin.parameters()))


def test_the_moments_follow_the_model():
    model = mlp(torch.float32)
    opt = InvariantAdam(model.parameters())
    train(model, opt, 1)
    model.double()
    train(model, opt, 1)
    assert all(s["exp_avg"].dtype == torch.float64 for s in opt.state.values())
    assert next(model.parameters()).grad is None


@pytest.mark.gpu
def test_a_model_moved_to_the_gpu_after_the_optimizer_was_built():
    model = mlp(torch.float32)
    opt = InvariantAdam(model.parameters())
    model.cuda()
    loss(model, batches(1, dtype=torch.float32, device="cuda")[0]).backward()
    opt.step()
    assert all(s["exp_avg"].is_cuda for s in opt.state.values())


# -------------------------------------------------------------------- as torch uses optimizers


def test_a_closure_runs_the_micro_batches():
    model, twin = mlp(), mlp()
    opt, other = InvariantAdam(model.parameters()), InvariantAdam(twin.parameters())
    data = batches(3)

    def closure():
        total = sum(loss(model, x) for x in data)
        for x in data:
            loss(model, x).backward()
        return total.item()

    assert opt.step(closure) == pytest.approx(sum(loss(twin, x).item() for x in data))
    for x in data:
        loss(twin, x).backward()
    other.step()
    assert torch.equal(flat(model.parameters()), flat(twin.parameters()))


def test_an_expanded_gradient_is_copied_before_it_is_written_to():
    w = nn.Parameter(torch.ones(3))
    opt = InvariantAdam([w], fold="call", max_micro_norm=0.1, weight_decay=0.1, decoupled=False)
    w.grad = torch.ones(1).expand(3)
    opt.fold()
    opt.step()
    assert opt.samples_seen == 1


def test_a_step_inside_a_ragged_context_does_not_end_it():
    w = nn.Parameter(torch.ones(3))
    opt = InvariantAdam([w], micro_batch_size=4)
    with opt.ragged(2):
        for _ in range(2):
            w.sum().backward()
            opt.step()
    assert opt.samples_seen == 4


def test_step_hooks_run():
    model = mlp()
    opt = InvariantAdam(model.parameters())
    calls = []
    opt.register_step_pre_hook(lambda *_: calls.append(("pre", opt.kappa)))
    opt.register_step_post_hook(lambda *_: calls.append(("post", opt.kappa)))
    train(model, opt, 1, kappa=3)
    assert calls == [("pre", 3.0), ("post", 0)]


@pytest.mark.parametrize(
    "make",
    [
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=1e-2, total_steps=20),  # moves beta1 as well
        lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    ],
    ids=["onecycle", "exponential", "lambda"],
)
def test_torch_schedulers(make):
    """Whatever a scheduler writes into the group is what the update has."""
    model = mlp()
    opt = InvariantAdam(model.parameters())
    schedule = make(opt)
    state = reference.start(flat(model.parameters()))
    data = batches(15)
    gradients = [gradient_of(model, x) for x in data]
    for x, gradient in zip(data, gradients, strict=True):
        group = opt.param_groups[0]
        state = reference.standard_adam(state, [gradient], Hyperparameters(group["lr"], group["betas"], 0.0))
        loss(model, x).backward()
        opt.step()
        schedule.step()
    assert distance(flat(model.parameters()), state.w) < 1e-12


def test_a_tensor_learning_rate():
    model, twin = mlp(), mlp()
    lr = torch.tensor(1e-2)
    opt, other = InvariantAdam(model.parameters(), lr=lr), InvariantAdam(twin.parameters(), lr=1e-2)
    train(model, opt, 2)
    train(twin, other, 2)
    lr.fill_(5e-3)
    other.param_groups[0]["lr"] = 5e-3
    train(model, opt, 2)
    train(twin, other, 2)
    assert distance(flat(model.parameters()), flat(twin.parameters())) < 1e-7


def test_grad_scaler_with_fold_on_call():
    """Each micro-batch is unscaled by its own scale, and an overflow spoils nothing."""
    model, twin = mlp(torch.float32), mlp(torch.float32)
    opt, other = (InvariantAdam(m.parameters(), fold="call") for m in (model, twin))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    data = batches(6, dtype=torch.float32)
    for i in range(0, 6, 3):
        for x in data[i : i + 3]:
            scaler.scale(loss(model, x)).backward()
            scaler.unscale_(opt)
            opt.fold()
            scaler.update()
            loss(twin, x).backward()
            other.fold()
        opt.step()
        other.step()
    assert scaler.get_scale() > 2.0**10
    assert distance(flat(model.parameters()), flat(twin.parameters())) < 1e-6
    scaler.scale(loss(model, data[0]) * 1e38).backward()
    scaler.unscale_(opt)
    opt.fold()
    scaler.update()
    with pytest.warns(RuntimeWarning, match="not finite"):
        opt.step()
    assert flat(model.parameters()).isfinite().all()


def test_grad_scaler_step_with_one_micro_batch_per_update():
    model, twin = mlp(torch.float32), mlp(torch.float32)
    opt, other = (InvariantAdam(m.parameters(), fold="call") for m in (model, twin))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for x in batches(4, dtype=torch.float32):
        scaler.scale(loss(model, x)).backward()
        scaler.unscale_(opt)
        opt.fold()
        scaler.step(opt)
        scaler.update()
        loss(twin, x).backward()
        other.fold()
        other.step()
    assert distance(flat(model.parameters()), flat(twin.parameters())) < 1e-6


def test_grad_scaler_step_with_scaled_gradients_is_refused():
    model = mlp(torch.float32)
    opt = InvariantAdam(model.parameters(), fold="call")
    before = flat(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scaler.scale(loss(model, batches(1, dtype=torch.float32)[0])).backward()
    opt.fold()
    with pytest.raises(RuntimeError, match=r"unscale_\(opt\); opt.fold\(\)"):
        scaler.step(opt)
    assert torch.equal(flat(model.parameters()), before)


def test_grad_scaler_with_fold_in_backward_is_refused():
    model = mlp(torch.float32)
    opt = InvariantAdam(model.parameters())
    before = flat(model.parameters())
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss(model, batches(1, dtype=torch.float32)[0])).backward()
    with pytest.raises(RuntimeError, match=r"bfloat16.*fold=\"call\""):
        scaler.step(opt)
    assert torch.equal(flat(model.parameters()), before)


@pytest.mark.parametrize("fold", ["backward", "call"])
def test_a_compiled_training_step_does_not_recompile(fold):
    torch._dynamo.reset()
    model, twin = mlp(torch.float32), mlp(torch.float32)
    opt, other = (InvariantAdam(m.parameters(), fold=fold) for m in (model, twin))

    def step(m, o, x, y):
        for z in (x, y):
            loss(m, z).backward()
            if fold == "call":
                o.fold()
        o.step()

    compiled = torch.compile(step, backend="aot_eager")
    data = batches(12, dtype=torch.float32)
    for i in range(6):
        if i == 2:  # the first calls may specialise; from here on a changed learning rate may not
            torch._dynamo.config.error_on_recompile = True
        opt.param_groups[0]["lr"] = other.param_groups[0]["lr"] = 1e-3 / (i + 1)
        try:
            compiled(model, opt, *data[2 * i : 2 * i + 2])
        finally:
            torch._dynamo.config.error_on_recompile = False
        step(twin, other, *data[2 * i : 2 * i + 2])
    assert distance(flat(model.parameters()), flat(twin.parameters())) < 1e-6


def test_a_compiled_model_folds_as_an_eager_one():
    torch._dynamo.reset()
    model, twin = mlp(torch.float32), mlp(torch.float32)
    opt, other = InvariantAdam(model.parameters()), InvariantAdam(twin.parameters())
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for x in batches(4, dtype=torch.float32):
        loss(compiled, x).backward()
        loss(twin, x).backward()
    assert opt.kappa == 4
    opt.step()
    other.step()
    assert distance(flat(model.parameters()), flat(twin.parameters())) < 1e-6


def test_named_parameters_and_added_groups():
    model = mlp()
    opt = InvariantAdam(model[0].named_parameters(), micro_batch_size=4)
    train_one = batches(1)[0]
    loss(model, train_one).backward()
    model[2].zero_grad()
    model[4].zero_grad()
    opt.step()
    opt.add_param_group({"params": list(model[2].named_parameters()), "lr": 1e-2, "decoupled": False})
    opt.add_param_group({"params": list(model[4].named_parameters())})
    assert [g["samples_seen"] for g in opt.param_groups] == [4, 4, 4]
    before = flat(model[4].parameters())
    loss(model, train_one).backward()
    opt.step()
    assert not torch.equal(flat(model[4].parameters()), before)
    assert opt.param_groups[1]["decoupled_weight_decay"] is False


# -------------------------------------------------------------------- gradients that are not plain


def test_sparse_gradients_are_summed_before_the_square():
    models = []
    for sparse in (False, True):
        torch.manual_seed(0)
        table = nn.Embedding(6, 3, sparse=sparse).double()
        opt = InvariantAdam(table.parameters())
        for index in (torch.tensor([1, 1, 2]), torch.tensor([2, 5, 5])):
            table(index).pow(3).sum().backward()
        opt.step()
        models.append(table.weight.detach())
    torch.testing.assert_close(*models, rtol=1e-12, atol=0)


def test_tied_weights_fold_once_with_their_whole_gradient():
    torch.manual_seed(0)
    table = nn.Embedding(6, 3).double()
    head = nn.Linear(3, 6, bias=False).double()
    head.weight = table.weight
    index = torch.tensor([0, 1, 1, 4])
    expected = torch.autograd.grad(head(table(index)).square().mean(), table.weight)[0]
    opt = InvariantAdam(table.parameters())
    head(table(index)).square().mean().backward()
    assert opt.kappa == 1
    opt.step()
    state = opt.state[table.weight]
    torch.testing.assert_close(state["exp_avg_sq"], expected.square(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e200])
@pytest.mark.parametrize("fold", ["backward", "call"])
def test_a_non_finite_gradient_never_poisons_the_moments(bad, fold):
    w = nn.Parameter(torch.ones(3))
    opt = InvariantAdam([w], fold=fold)
    good = torch.tensor([0.5, 1.0, -1.0])
    for factor in (good, torch.tensor([1.0, bad, 1.0]), good):
        (w * factor).sum().backward()
        if fold == "call":
            opt.fold()
    with pytest.warns(RuntimeWarning, match="1 gradient elements were not finite"):
        opt.step()
    assert opt.nonfinite == 1
    assert w.isfinite().all()
    v = opt.state[w]["exp_avg_sq"] / opt.state[w]["norm2"] / (1 - 0.999**3)
    torch.testing.assert_close(v, torch.tensor([1.5, 2.0, 3.0]) / 3)
    (w * good).sum().backward()
    if fold == "call":
        opt.fold()
    opt.step()  # and is told of once


def test_on_nonfinite_raise_stops_before_the_weights_move():
    w = nn.Parameter(torch.ones(3))
    opt = InvariantAdam([w], on_nonfinite="raise")
    (w * torch.tensor([1.0, math.nan, 1.0])).sum().backward()
    with pytest.raises(RuntimeError, match="the weights have not moved"):
        opt.step()
    assert w.tolist() == [1.0, 1.0, 1.0]
    opt.step()
    assert w.tolist() == [pytest.approx(0.999), 1.0, pytest.approx(0.999)]


# -------------------------------------------------------------------- the pair of one pass


def test_a_pair_is_folded_at_once_and_counts_kappa():
    w = nn.Parameter(torch.ones(2, dtype=torch.float64))
    opt = InvariantAdam([w], micro_batch_size=4)
    put(w, torch.tensor([1.0, 2.0]).double(), torch.tensor([3.0, 5.0]).double(), 2.0)
    assert w.grad is None
    assert not hasattr(w, "grad_sq")
    put(w, torch.tensor([1.0, 2.0]).double(), torch.tensor([3.0, 5.0]).double(), 6.0)
    assert opt.kappa == 8
    opt.step()
    assert opt.samples_seen == 32
    m, v = moments(opt)
    torch.testing.assert_close(m, torch.tensor([1.0, 2.0]).double() * (1 - 0.9**8))
    torch.testing.assert_close(v, torch.tensor([3.0, 5.0]).double() * (1 - 0.999**8))


@pytest.mark.parametrize("maximize", [False, True])
def test_a_kernel_that_folds_its_pair_itself_makes_the_same_update(maximize):
    torch.manual_seed(0)
    w, twin = (nn.Parameter(torch.ones(5)) for _ in "ab")
    one, other = (
        InvariantAdam([p], lr=0.1, micro_batch_size=4, loss_divisor=2.0, maximize=maximize) for p in (w, twin)
    )
    for kappa in (2.0, 3.0, 3.0):
        for _ in range(2):
            g, square = torch.randn(5), torch.rand(5)
            put(w, g.clone(), square.clone(), kappa)
            target = other.queue.target(twin, kappa, scale=(0.5, 0.25))
            target.exp_avg.mul_(target.keep[0]).add_(2 * g, alpha=target.gain[0])
            target.exp_avg_sq.mul_(target.keep[1]).add_(4 * square, alpha=target.gain[1])
        assert other.kappa == one.kappa == 2 * kappa
        one.step()
        other.step()
        torch.testing.assert_close(w, twin)
    assert one.state_dict()["param_groups"] == other.state_dict()["param_groups"]


def test_what_is_more_than_a_sum_is_not_left_to_a_kernel():
    w, wide = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(5).double())
    assert InvariantAdam([w], weight_decay=0.1, decoupled=False).queue.target(w, 2.0) is None
    assert InvariantAdam([w], max_micro_norm=1.0).queue.target(w, 2.0) is None
    opt = InvariantAdam([wide])
    assert opt.queue.target(wide, 2.0) is None
    assert opt.kappa == 0


def test_pairs_accumulate_where_nobody_folds_them():
    w = nn.Parameter(torch.ones(1))
    put(w, torch.tensor([1.0]), torch.tensor([1.0]), 1.0)
    put(w, torch.tensor([4.0]), torch.tensor([16.0]), 2.0)
    assert pair.peek(w) == pair.Pair(torch.tensor([3.0]), torch.tensor([11.0]), 3.0)
    opt = InvariantAdam([w], fold="call")
    opt.step()  # consumes them
    assert opt.samples_seen == 3
    assert w.grad is None


def test_a_mini_batch_gradient_is_not_taken_for_a_micro_batch():
    w = nn.Parameter(torch.ones(1))
    opt = InvariantAdam([w])
    w.grad_armed = True
    (2 * w).sum().backward()
    del w.grad_armed
    assert opt.kappa == 0
    assert w.grad.item() == 2
    with pytest.raises(RuntimeError, match="never folded"):
        opt.step()


def test_half_a_pair_is_refused():
    w = nn.Parameter(torch.ones(2))
    opt = InvariantAdam([w], fold="call")
    w.grad_sq = torch.ones(2)
    with pytest.raises(RuntimeError, match="a pair needs all three"):
        opt.step()
    opt.zero_grad()
    assert not hasattr(w, "grad_sq")


def test_clipping_a_pair_is_refused():
    w = nn.Parameter(torch.ones(2))
    opt = InvariantAdam([w], fold="call", max_micro_norm=1.0)
    put(w, torch.ones(2), torch.ones(2), 2.0)
    with pytest.raises(RuntimeError, match="max_micro_norm=1 clips each micro-batch"):
        opt.step()


# -------------------------------------------------------------------- mistakes, each with its remedy


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr must be"),
        ({"lr": math.nan}, "lr must be"),
        ({"betas": (0.9, 1.0)}, "beta2 must be in"),
        ({"eps": -1e-8}, "eps must be"),
        ({"weight_decay": -0.1}, "weight_decay must be"),
        ({"micro_batch_size": 0}, "micro_batch_size must be a whole number"),
        ({"micro_batch_size": 2.5}, "micro_batch_size must be a whole number"),
        ({"tuned_batch_size": 64}, "micro_batch_size is needed too"),
        ({"rule": "square_root"}, "rule must be one of 'exponential', 'linear'"),
        ({"fold": "never"}, "fold must be one of"),
        ({"loss_divisor": 0}, "loss_divisor must be"),
        ({"max_micro_norm": -1.0}, "max_micro_norm must be"),
        ({"on_nonfinite": "ignore"}, "on_nonfinite must be one of"),
        ({"state_dtype": torch.bfloat16}, "rounds its own updates away"),
        ({"amsgrad": True}, "amsgrad=True is not supported"),
        ({"differentiable": True}, "differentiable=True is not supported"),
        ({"capturable": True}, "capturable=True is not supported"),
    ],
)
def test_arguments_are_checked_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        InvariantAdam(mlp().parameters(), **options)


def test_adamw_speed_hints_pass_and_unknown_options_do_not():
    InvariantAdam(mlp().parameters(), fused=True, foreach=None, amsgrad=False)
    with pytest.raises(TypeError, match="unexpected argument momentum"):
        InvariantAdam(mlp().parameters(), momentum=0.9)


def test_parameters_are_checked():
    with pytest.raises(ValueError, match="complex"):
        InvariantAdam([nn.Parameter(torch.ones(2, dtype=torch.complex64))])
    model = mlp()
    loss(model, batches(1)[0]).backward()
    with pytest.raises(ValueError, match=r"has a gradient already.*model.zero_grad\(\)"):
        InvariantAdam(model.parameters())
    model.zero_grad()
    opt = InvariantAdam(model.parameters(), micro_batch_size=4)
    with pytest.raises(ValueError, match="micro_batch_size=8, but it is the same for the whole run"):
        opt.add_param_group({"params": [nn.Parameter(torch.ones(1))], "micro_batch_size": 8})
    for options, message in (
        ({"amsgrad": True}, "amsgrad"),
        ({"fold": "call"}, "fold='call'"),
        ({"betas": None}, "NoneType"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            opt.add_param_group({"params": [nn.Parameter(torch.ones(1))], **options})
    assert len(opt.param_groups) == 1
    for value in (0, -2, math.nan):
        with pytest.raises(ValueError, match="loss_divisor"):
            opt.loss_divisor = value


def test_an_unannounced_jump_is_warned_of_once():
    model = mlp()
    opt = InvariantAdam(model.parameters())
    train(model, opt, 2, kappa=32)
    with pytest.warns(RuntimeWarning, match=r"update of 1 micro-batches.*opt.expect\(kappa\)"):
        train(model, opt, 1, kappa=1)
    train(model, opt, 1, kappa=32)
    opt.expect(1)
    train(model, opt, 1, kappa=1)


def test_an_expectation_is_shared_out_to_parameters_that_come_seldom():
    """A parameter in one of many micro-batches keeps its own average when the update is announced."""
    seen = []
    for expect in (False, True):
        often, seldom = (nn.Parameter(torch.zeros(1, dtype=torch.float64)) for _ in range(2))
        opt = InvariantAdam([often, seldom], lr=0.0)
        for _ in range(3):
            if expect:
                opt.expect(64)
            for k in range(64):
                (often + (seldom if k == 0 else 0)).sum().backward()
            opt.step()
        opt.state_dict()
        seen.append(opt.state[seldom]["exp_avg"].item())
    assert seen == [pytest.approx(1 - 0.9**3)] * 2


@pytest.mark.parametrize("rule", INVARIANT)
def test_a_checkpoint_keeps_the_rule(rule):
    w = nn.Parameter(torch.ones(1))
    saved = InvariantAdam([w], rule=rule).state_dict()
    opt = InvariantAdam([w])
    opt.load_state_dict(saved)
    assert opt.param_groups[0]["rule"] == opt.defaults["rule"] == rule


def test_the_linear_rule_says_when_it_ends():
    w = nn.Parameter(torch.ones(1))
    opt = InvariantAdam([w], betas=(0.9, 0.99), rule="linear", micro_batch_size=4)
    for _ in range(16):
        w.sum().backward()
    with pytest.raises(ValueError, match=r"rho\*\(1-beta1\) < 1, got 1.6 at batch size 64 \(tuned at 4\); use rule="):
        opt.step()
    assert w.item() == 1.0
    later = InvariantAdam([w], betas=(0.9, 0.99), rule="linear", micro_batch_size=4)
    w.sum().backward()
    later.step()
    for _ in range(16):
        w.sum().backward()
    at = w.item()
    with pytest.raises(ValueError, match=r"rho\*\(1-beta1\) < 1, got 1.6"):
        later.step()
    assert w.item() == at


def test_too_much_decay_is_refused():
    w = nn.Parameter(torch.ones(1))
    opt = InvariantAdam([w], lr=1.0, weight_decay=2.0)
    w.sum().backward()
    with pytest.raises(ValueError, match=r"lr\*weight_decay must be below 1"):
        opt.step()
    assert w.item() == 1.0
    opt = InvariantAdam([w], lr=1e-2, betas=(0.9999, 0.9999), weight_decay=10.0, rule="linear")
    for _ in range(20):
        w.sum().backward()
    with pytest.raises(ValueError, match="factor of -1 at rho=20"):
        opt.step()
    assert w.item() == 1.0


def test_a_step_without_gradients_is_refused():
    opt = InvariantAdam(mlp().parameters())
    with pytest.raises(RuntimeError, match="step\\(\\) found no gradient"):
        opt.step()


def test_gradients_that_nobody_folded_are_refused():
    model = mlp()
    opt = InvariantAdam(model.parameters(), fold="call")
    loss(model, batches(1)[0]).backward()
    with pytest.raises(RuntimeError, match=r"call opt.fold\(\) after each micro-batch"):
        opt.step()
    opt.fold()
    opt.step()
    with pytest.raises(RuntimeError, match="fold\\(\\) found no gradient"):
        opt.fold()
    hooked = InvariantAdam(mlp().parameters())
    with pytest.raises(RuntimeError, match='fold\\(\\) is for InvariantAdam\\(fold="call"\\)'):
        hooked.fold()
    hooked.param_groups[0]["params"][0].grad = torch.zeros(7, 5, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="assigned after the backward"):
        hooked.step()


def test_lost_hooks_are_noticed_and_repaired():
    """Following the error's own remedy gives the run that lost nothing."""
    model, twin = mlp(), mlp()
    opt, other = InvariantAdam(model.named_parameters()), InvariantAdam(twin.parameters())
    for i, (name, p) in enumerate(list(model[0].named_parameters())):  # replaced, as by a wrapper
        opt.param_groups[0]["params"][i] = new = nn.Parameter(p.detach().clone())
        setattr(model[0], name, new)
    x = batches(1)[0]
    loss(model, x).backward()
    with pytest.raises(RuntimeError, match=r"parameter '0.weight' that was never folded: the fold hooks of 2"):
        opt.step()
    opt.abandon()
    for m, o in ((model, opt), (twin, other)):
        loss(m, x).backward()
        o.step()
    assert torch.equal(flat(model.parameters()), flat(twin.parameters()))


def test_frozen_parameters_have_no_moments_until_they_are_unfrozen():
    """A run that unfreezes its first layer is one whose first layer got no gradient so far."""
    model, twin = mlp(), mlp()
    model[0].requires_grad_(False)
    opt, other = (InvariantAdam(m.parameters(), lr=1e-2, micro_batch_size=4) for m in (model, twin))
    assert len(opt.state) == 4
    xs = batches(4)
    for m, o in ((model, opt), (twin, other)):
        inputs = None if m is model else list(twin[2:].parameters())
        loss(m, xs[0]).backward(inputs=inputs)
        o.step()
    assert len(opt.state) == len(opt.state_dict()["state"]) == 4

    model[0].requires_grad_(True)
    loaded_model = copy.deepcopy(model)
    loaded = InvariantAdam(loaded_model.parameters(), lr=1e-2, micro_batch_size=4)
    loaded.load_state_dict(opt.state_dict())
    opt.zero_grad()  # finds the new parameters, as step() does
    assert len(opt.state) == len(loaded.state) == 6
    for m, o in ((model, opt), (twin, other), (loaded_model, loaded)):
        for x in xs[1:]:
            loss(m, x).backward()
        o.step()
        o.state_dict()  # normalises the moments
        for p, q in zip(m.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-12, atol=0)
            torch.testing.assert_close(o.state[p]["exp_avg_sq"], opt.state[q]["exp_avg_sq"], rtol=1e-12, atol=0)


@pytest.mark.parametrize("fold", ["backward", "call"])
def test_parameters_unfrozen_between_updates_are_folded_from_then_on(fold):
    """Nothing is to be called after unfreezing; and none of it takes parameters from another optimizer."""
    model, twin = mlp(), mlp()
    opt = InvariantAdam(twin.parameters(), lr=1e-2, micro_batch_size=4)
    for p in model[0].parameters():
        p.requires_grad_(False)
    late = InvariantAdam(model.parameters(), lr=1e-2, micro_batch_size=4, fold=fold)
    assert not any(p.requires_grad for p in model[0].parameters())
    xs = batches(6)
    for i, x in enumerate(xs):
        model[0].requires_grad_(i >= 2)
        loss(model, x).backward()
        if fold == "call":
            late.fold()
        loss(twin, x).backward(inputs=list((twin if i >= 2 else twin[2:]).parameters()))
        if i % 2:
            late.step()
            opt.step()
    late.state_dict(), opt.state_dict()  # which normalise the moments
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=0)
        torch.testing.assert_close(late.state[p]["exp_avg_sq"], opt.state[q]["exp_avg_sq"], rtol=1e-12, atol=0)

    model[0].requires_grad_(False)
    other = InvariantAdam(model[0].parameters())
    assert hooks.owner(model[0].weight) is late.queue
    model[0].requires_grad_(True)
    loss(model, xs[0]).backward()
    if fold == "call":
        late.fold()
    late.step()
    with pytest.raises(RuntimeError, match="belongs to an InvariantAdam"):
        other.zero_grad()


def test_a_failed_backward_is_noticed_and_the_update_can_be_abandoned():
    model, twin = mlp(), mlp()
    opt, other = InvariantAdam(model.parameters()), InvariantAdam(twin.parameters())
    x, y = batches(2)

    def fail(grad):
        raise MemoryError

    hidden = model[1](model[0](x))
    hidden.register_hook(fail)
    with pytest.raises(MemoryError):
        model[4](model[3](model[2](hidden))).sum().backward()
    with pytest.raises(RuntimeError, match=r"did not come to its end.*opt.abandon\(\)"):
        opt.step()
    opt.abandon()
    for m, o in ((model, opt), (twin, other)):
        loss(m, y).backward()
        o.step()
    assert opt.samples_seen == 1
    assert torch.equal(flat(model.parameters()), flat(twin.parameters()))


def test_an_abandoned_update_leaves_a_normalised_average():
    w = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    opt = InvariantAdam([w], lr=0.1, micro_batch_size=1)
    for g in (1.0, 1.0):
        (g * w).sum().backward()
        opt.step()
    at = w.item()
    (w.sum()).backward()
    opt.abandon()
    assert (w.item(), opt.kappa, opt.samples_seen) == (at, 0, 2)
    m, v = moments(opt)
    state = opt.state[w]
    assert m.item() == pytest.approx(1 - state["debias1"])  # the average of ones is one
    assert v.item() == pytest.approx(1 - state["debias2"])


def test_zero_grad_in_mid_update_is_refused():
    """A GAN's usual loop: the generator's backward reaches the discriminator, whose zero_grad() would discard it."""
    model = mlp()
    opt = InvariantAdam(model.parameters())
    loss(model, batches(1)[0]).backward()
    with pytest.raises(RuntimeError, match=r"cannot be taken back.*requires_grad_\(False\).*opt.abandon\(\)"):
        opt.zero_grad()
    opt.step()
    opt.zero_grad()
    other = mlp()
    call = InvariantAdam(other.parameters(), fold="call")
    for x in batches(2):
        call.zero_grad()
        loss(other, x).backward()
        call.fold()
    assert call.kappa == 2


def test_backward_with_named_inputs_keeps_away_from_the_others():
    model = mlp()
    opt = InvariantAdam(model[0].parameters())
    other = InvariantAdam(model[4].parameters())
    loss(model, batches(1)[0]).backward(inputs=list(model[0].parameters()))
    assert (opt.kappa, other.kappa) == (1, 0)


def test_the_latest_optimizer_owns_the_parameters():
    model = mlp()
    old = InvariantAdam(model.parameters())
    new = InvariantAdam(model.parameters())
    loss(model, batches(1)[0]).backward()
    assert (old.kappa, new.kappa) == (0, 1)
    new.step()
    with pytest.raises(RuntimeError, match="built later on the same parameters"):
        old.step()
    call = InvariantAdam(model.parameters(), fold="call")
    loss(model, batches(1)[0]).backward()
    call.fold()
    call.step()
    with pytest.raises(RuntimeError, match="built later on the same parameters"):
        new.step()


def test_a_deleted_optimizer_leaves_gradients_alone():
    model = mlp()
    opt = InvariantAdam(model.parameters())
    del opt
    gc.collect()
    loss(model, batches(1)[0]).backward()
    assert all(p.grad is not None for p in model.parameters())


class Twice(nn.Module):
    """A layer used twice, each use in its own checkpoint."""

    def __init__(self, reentrant):
        super().__init__()
        self.inner, self.outer, self.reentrant = nn.Linear(5, 5), nn.Linear(5, 1), reentrant

    def forward(self, x):
        x = x.requires_grad_()
        for _ in range(2):
            x = checkpoint(self.inner, x, use_reentrant=self.reentrant)
        return self.outer(x)


def test_checkpointing_with_a_shared_layer():
    torch.manual_seed(0)
    plain = Twice(False).double()
    shared = Twice(True).double()
    shared.load_state_dict(plain.state_dict())
    opt, other = InvariantAdam(plain.parameters()), InvariantAdam(shared.parameters())
    x = batches(1)[0]
    loss(plain, x.clone()).backward()
    assert opt.kappa == 1
    opt.step()
    loss(shared, x.clone()).backward()
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        other.step()


def test_reentrant_checkpointing_without_sharing_is_fine():
    class Once(Twice):
        def forward(self, x):
            return self.outer(checkpoint(self.inner, x.requires_grad_(), use_reentrant=True))

    torch.manual_seed(0)
    model = Once(True).double()
    opt = InvariantAdam(model.parameters())
    for x in batches(3):
        loss(model, x).backward()
    assert opt.kappa == 3
    opt.step()


def test_reentrant_checkpointing_of_everything_must_be_declared():
    """No backward is visible but those inside the checkpoints: one micro-batch or two cannot be told."""
    layer = nn.Linear(5, 5).double()
    opt = InvariantAdam(layer.parameters())

    def twice(x):
        for _ in range(2):
            x = checkpoint(layer, x, use_reentrant=True)
        return x.square().mean()

    x = batches(1)[0].requires_grad_()
    twice(x).backward()
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        opt.step()
    opt.abandon()
    opt.expect(1)
    twice(x).backward()
    with pytest.raises(RuntimeError, match=r"got 2 gradients where expect\(1\)"):
        opt.step()
    opt.abandon()
    opt.expect(1)
    checkpoint(layer, x, use_reentrant=True).square().mean().backward()
    opt.step()
    assert opt.samples_seen == 1


def test_a_second_backward_over_a_declared_micro_batch_is_refused():
    model = mlp()
    opt = InvariantAdam(model.named_parameters())
    opt.expect(1)
    value = loss(model, batches(1)[0])
    value.backward(retain_graph=True)
    value.backward()
    with pytest.raises(RuntimeError, match=r"'.*' got 2 gradients where expect\(1\)"):
        opt.step()
    opt.abandon()
    train(model, opt, 1)


def test_expect_comes_before_the_first_backward():
    model = mlp()
    opt = InvariantAdam(model.parameters())
    loss(model, batches(1)[0]).backward()
    with pytest.raises(RuntimeError, match="before the first backward"):
        opt.expect(2)
    with pytest.raises(ValueError, match="kappa must be"):
        InvariantAdam(mlp().parameters()).expect(0)


def test_ragged_needs_the_size_of_a_full_micro_batch():
    opt = InvariantAdam(mlp().parameters())
    with pytest.raises(ValueError, match="give micro_batch_size"), opt.ragged(3):
        pass
    opt = InvariantAdam(mlp().parameters(), micro_batch_size=4)
    with pytest.raises(ValueError, match="between 1 and micro_batch_size=4"), opt.ragged(5):
        pass


def test_a_learning_rate_on_the_wrong_device_is_refused():
    with pytest.raises(ValueError, match="0-d tensor on the CPU"):
        InvariantAdam(mlp().parameters(), lr=torch.ones(2))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_capture_in_a_cuda_graph_is_refused():
    w = nn.Parameter(torch.ones(3, device="cuda"))
    opt = InvariantAdam([w], fold="call")
    w.grad = torch.ones_like(w)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="captured in a CUDA graph"), torch.cuda.graph(graph):
        opt.fold()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_neither_fold_nor_step_waits_for_the_gpu():
    model = mlp(torch.float32, device="cuda")
    opt = InvariantAdam(model.parameters(), weight_decay=0.1)
    data = batches(6, dtype=torch.float32, device="cuda")
    loss(model, data[0]).backward()
    opt.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for i, x in enumerate(data):
            loss(model, x).backward()
            opt.param_groups[0]["lr"] = 1e-3 / (i + 1)
            opt.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


RANKS = """
import sys, torch, torch.distributed as dist
from invariant_adam import InvariantAdam
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=int(sys.argv[2]), world_size=2)
w = torch.nn.Parameter(torch.ones(2))
opt = InvariantAdam([w])
w.sum().backward()
try:
    opt.step()
except RuntimeError as error:
    assert "2 ranks is up" in str(error), error
    assert w.tolist() == [1.0, 1.0]
    print("refused")
dist.barrier()
"""


def test_ranks_that_would_drift_apart_are_refused(tmp_path):
    command = [sys.executable, "-c", RANKS, str(tmp_path / "store")]
    ranks = [subprocess.Popen([*command, str(r)], stdout=subprocess.PIPE, text=True, env=os.environ) for r in range(2)]
    assert [rank.communicate(timeout=120)[0].strip() for rank in ranks] == ["refused", "refused"]


class _Gate(torch.autograd.Function):
    """Takes a parameter, and has no gradient for it."""

    @staticmethod
    def forward(ctx, x, w):
        return 2 * x

    @staticmethod
    def backward(ctx, g):
        return 2 * g, None


def test_a_gradient_that_is_undefined_is_none():
    layer, gate = nn.Linear(3, 2), nn.Parameter(torch.ones(2))
    opt = InvariantAdam([*layer.parameters(), gate], lr=0.1)
    for _ in range(2):
        _Gate.apply(layer(torch.ones(4, 3)), gate).sum().backward()
    opt.step()
    assert torch.equal(gate, torch.ones(2))
    assert opt.state[gate]["step"] == 0
    assert opt.state[layer.weight]["step"] == 1

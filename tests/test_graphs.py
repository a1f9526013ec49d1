"""`capture`: replays with slots make the updates that eager calls make, counters and schedules included."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from problems import flat
from torch import nn

import invariant_adam as ia
from invariant_adam import graphs
from invariant_adam.fold import queue
from invariant_adam.kernels import adam as kernels

try:
    from invariant_adam.kernels.adam import triton as adam_triton
except ImportError:
    adam_triton = None

# Interpreted Triton, where there is no GPU for the real one.
TWINS = ["torch"] if adam_triton is None or torch.cuda.is_available() else ["torch", "triton"]


class Rehearsed(graphs.Captured):
    """A graph of the optimizer's kernels alone: for a loss that is linear in the weights, gradients stay the same."""

    def _record(self, update):
        self.calls = []
        plain = {name: getattr(kernels, name) for name in ("fold", "step", "fold_step")}

        def recorder(name):
            def call(*lists, **scalars):
                assert scalars["slots"] is not None
                # floats are poisoned: a replay must not read them
                poisoned = {
                    key: type(x)([float("nan")] * 2) if isinstance(x, tuple) else float("nan")
                    for key, x in scalars.items()
                    if key not in ("slots", "count")
                }
                kept = {key: scalars[key] for key in ("slots", "count") if key in scalars}
                self.calls.append(lambda: plain[name](*lists, **poisoned, **kept))

            return call

        with pytest.MonkeyPatch.context() as patch:
            for name in plain:
                patch.setattr(kernels, name, recorder(name))
            return update()

    @torch.no_grad()
    def _replay(self):
        for call in self.calls:
            call()


class Weighed(nn.Module):
    """A loss that is linear in the weights, whose gradients are buffers."""

    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(0)
        self.ws = nn.ParameterList(torch.randn(s, dtype=dtype) for s in ((4, 3), (3,), (2, 5)))
        self.cs = [torch.randn(3, *w.shape, dtype=dtype) for w in self.ws]

    def loss(self, k):
        return sum((w * c[k]).sum() for w, c in zip(self.ws, self.cs, strict=True))


def make(dtype, kappa, expect, **options):
    model = Weighed(dtype)
    groups = [{"params": list(model.ws)[:2]}, {"params": list(model.ws)[2:], "lr": 0.02, "betas": (0.8, 0.99)}]
    opt = ia.InvariantAdam(groups, lr=0.01, weight_decay=0.1, micro_batch_size=4, **options)

    def update():
        if expect:
            opt.expect(kappa)
        for k in range(kappa):
            model.loss(k).backward()
            if options.get("fold") == "call":
                opt.fold()
        opt.step()

    return model, opt, update


@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize(("kappa", "expect"), [(1, False), (1, True), (3, False), (3, True)])
@pytest.mark.parametrize("options", [{}, {"fold": "call", "maximize": True, "loss_divisor": 2.0}])
@pytest.mark.parametrize("sharing", [False, True])
def test_replays_are_eager_updates(twin, kappa, expect, options, sharing, monkeypatch):
    if twin == "triton":
        monkeypatch.setattr(kernels, "_serving", lambda *lists: adam_triton)
    if sharing:
        monkeypatch.setattr(queue, "SHARING", frozenset({"cpu"}))
    dtype = torch.float64 if twin == "torch" else torch.float32
    made = [make(dtype, kappa, expect, **options) for _ in range(2)]
    schedules = [ia.SampleLambdaLR(opt, ia.warmup_cosine(warmup=40, total=100 * kappa)) for _, opt, _ in made]
    (model, opt, update), (twin_model, twin_opt, eager) = made
    for _ in range(2):
        update()
        eager()
    captured = Rehearsed(opt, update)
    assert opt.samples_seen == twin_opt.samples_seen  # a capture is no update
    for i in range(4):
        for _, each, _ in made:
            each.param_groups[1]["betas"] = (0.8 + 0.01 * i, 0.99)
            if i == 2:
                each.state_dict()  # normalises in place
        captured()
        eager()
        torch.testing.assert_close(flat(model.parameters()), flat(twin_model.parameters()), rtol=1e-6, atol=1e-7)
    first, second = opt.state_dict(), twin_opt.state_dict()
    assert first["param_groups"] == second["param_groups"]
    for a, b in zip(first["state"].values(), second["state"].values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
    assert schedules[0].get_last_lr() == schedules[1].get_last_lr()
    update()  # eager again
    eager()
    torch.testing.assert_close(flat(model.parameters()), flat(twin_model.parameters()), rtol=1e-6, atol=1e-7)


def test_slots_keep_the_moments_precision():
    model, opt, update = make(torch.float64, 1, True)
    update()
    captured = Rehearsed(opt, update)
    captured()
    twin_model, _, eager = make(torch.float64, 1, True)
    for _ in range(2):
        eager()
    torch.testing.assert_close(flat(model.parameters()), flat(twin_model.parameters()), rtol=1e-14, atol=1e-14)


def test_on_a_cpu_updates_run_as_they_are():
    (model, opt, update), (twin_model, twin_opt, eager) = (make(torch.float64, 2, False) for _ in range(2))
    train = ia.capture(opt, update)
    train()
    for _ in range(4):
        eager()
    assert opt.samples_seen == twin_opt.samples_seen == 32
    torch.testing.assert_close(flat(model.parameters()), flat(twin_model.parameters()), rtol=0, atol=0)


def test_what_cannot_be_captured_is_refused():
    w = nn.Parameter(torch.ones(2))
    with pytest.raises(TypeError, match="InvariantAdam"):
        ia.capture(torch.optim.AdamW([w]), lambda: None)
    with pytest.raises(ValueError, match="on_nonfinite"):
        ia.capture(ia.InvariantAdam([w], on_nonfinite="raise"), lambda: None)
    opt = ia.InvariantAdam([w])
    handle = opt.register_step_post_hook(lambda *_: None)
    with pytest.raises(ValueError, match="step hooks"):
        ia.capture(opt, lambda: None)
    handle.remove()
    w.sum().backward()
    with pytest.raises(RuntimeError, match="middle of an update"):
        ia.capture(opt, lambda: None)


def test_a_capture_that_fails_leaves_the_optimizer_as_it_was():
    model, opt, update = make(torch.float64, 1, False)
    twin_model, _, eager = make(torch.float64, 1, False)
    with pytest.raises(RuntimeError, match="first gradient of all"):
        Rehearsed(opt, update)
    update()
    eager()
    with pytest.raises(RuntimeError, match=r"did not call opt\.step"):
        Rehearsed(opt, lambda: model.loss(0).backward())
    with pytest.raises(RuntimeError, match="more than one update"):
        Rehearsed(opt, lambda: (update(), update()))
    with pytest.raises(ZeroDivisionError):
        Rehearsed(opt, lambda: (model.loss(0).backward(), 1 / 0))
    assert (opt.kappa, opt.samples_seen) == (0, 4)
    update()
    eager()
    torch.testing.assert_close(flat(model.parameters()), flat(twin_model.parameters()), rtol=0, atol=0)


@pytest.mark.parametrize("way", ["loop", "one pass", "into"])
def test_what_is_held_of_an_earlier_backward_is_seen(way):
    """On a GPU it would keep the capture from its stream."""
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)), torch.randn(8, 3)
    opt = ia.InvariantAdam(model.parameters(), micro_batch_size=4)
    model[0].bias.requires_grad_(False)
    params = list(model.parameters())

    def update():
        with nullcontext() if way == "loop" else ia.one_pass(model, 4, into=opt if way == "into" else None):
            loss = model(x).square().mean()
            loss.backward()
        opt.step()
        return loss

    graphs._refuse_kept(params)
    loss = update()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"3 of 3 parameters in use.*del loss"):
            graphs._refuse_kept(params)
    kept = loss.detach()
    del loss
    graphs._refuse_kept(params)
    assert kept > 0


def test_a_capture_inside_autocast_is_refused():
    """Its cache would give every update the weights of the first, silently."""
    model, x = nn.Linear(3, 1), torch.randn(4, 3)
    opt, losses = ia.InvariantAdam(model.parameters(), lr=0.1, micro_batch_size=4), []

    def update():
        with torch.autocast("cpu"):
            loss = model(x).square().mean()
        loss.backward()
        opt.step()
        losses.append(loss.item())

    with torch.autocast("cpu"), pytest.raises(RuntimeError, match=r"open it in update\(\)"):
        ia.capture(opt, update)
    with torch.autocast("cpu", cache_enabled=False):
        ia.capture(opt, update)
    assert len(set(losses)) == 3


@pytest.mark.gpu
def test_a_capture_beside_a_held_loss_is_refused_before_anything_changes():
    model = nn.Linear(3, 1).cuda()
    opt, x = ia.InvariantAdam(model.parameters(), micro_batch_size=4), torch.randn(4, 3, device="cuda")

    def update():
        loss = model(x).square().mean()
        loss.backward()
        opt.step()
        return loss

    loss = update()
    before = flat(model.parameters())
    with pytest.raises(RuntimeError, match="del loss"):
        ia.capture(opt, update)
    assert torch.equal(flat(model.parameters()), before)
    del loss
    ia.capture(opt, update)()


@pytest.mark.gpu
def test_a_hook_that_may_change_a_gradient_in_a_replay_is_refused():
    """It changed none before: its clamp acts on large gradients only, and nobody would look in a replay."""
    model = nn.Linear(3, 1).cuda()
    opt, x = ia.InvariantAdam(model.parameters(), micro_batch_size=4), torch.randn(8, 3, device="cuda")
    model.weight.register_hook(lambda g: g.clamp(-1e6, 1e6))

    def update():
        with ia.one_pass(model, 4):
            model(x).square().mean().backward()
        opt.step()

    update()
    with pytest.raises(ia.UnsupportedUse, match=r"in a capture: that returned another tensor"):
        ia.capture(opt, update)


def test_a_failed_capture_says_what_is_likely_the_cause():
    model, opt, update = make(torch.float64, 1, False)
    update()

    def failing():
        model.loss(0).backward()
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nCompile with ...")

    with pytest.raises(RuntimeError, match=r"when stream is capturing\).*del loss.*\.item\(\)") as caught:
        Rehearsed(opt, failing)
    assert opt.kappa == 0
    assert "Compile with" not in str(caught.value)
    assert "Compile with" in str(caught.value.__cause__)


def test_a_replay_that_would_be_wrong_is_refused():
    model, opt, update = make(torch.float64, 1, False)
    update()
    captured = Rehearsed(opt, update)
    model.loss(0).backward()
    with pytest.raises(RuntimeError, match="an update is open"):
        captured()
    opt.abandon()
    opt.max_micro_norm = 1.0
    with pytest.raises(RuntimeError, match="max_micro_norm"):
        captured()
    opt.max_micro_norm = None
    opt.param_groups[0]["lr"] = -1.0
    with pytest.raises(ValueError, match="lr"):
        captured()
    opt.param_groups[0]["lr"] = 0.01
    seen = opt.samples_seen
    captured()
    assert opt.samples_seen == seen + 4
    model.ws[0].requires_grad_(False)
    with pytest.raises(RuntimeError, match="frozen or unfrozen"):
        captured()
    model.ws[0].requires_grad_(True)
    handle = opt.register_step_post_hook(lambda *_: None)
    with pytest.raises(ValueError, match="step hooks"):
        captured()
    handle.remove()
    captured()
    opt.load_state_dict(opt.state_dict())
    with pytest.raises(RuntimeError, match="another place"):
        captured()


@pytest.mark.parametrize("expect", [False, True])
@pytest.mark.parametrize("end", ["step", "abandon"])
def test_parameters_that_no_longer_share_their_scalars_are_noticed(expect, end):
    made = [make(torch.float64, 1, expect) for _ in range(2)]
    (model, opt, update), (twin_model, _, eager) = made
    for _ in range(2):
        update()
        eager()
    captured = Rehearsed(opt, update)
    for each, its, _ in made:  # the first of the two parameters of a group, alone
        (each.ws[0] * each.cs[0][0]).sum().backward()
        getattr(its, end)()
    before = opt.samples_seen
    with pytest.raises(RuntimeError, match="capture it again"):
        captured()
    assert (opt.kappa, opt.samples_seen) == (0, before)
    captured = Rehearsed(opt, update)
    captured()
    eager()
    torch.testing.assert_close(flat(model.parameters()), flat(twin_model.parameters()), rtol=1e-12, atol=1e-12)


def test_what_is_not_finite_in_a_replay_is_left_out_and_counted():
    model, opt, update = make(torch.float64, 1, False)
    update()
    model.cs[0][0, 1, 2] = torch.inf
    captured = Rehearsed(opt, update)
    assert opt.nonfinite == 0  # a capture launches nothing
    before = opt.state[model.ws[0]]["exp_avg"].clone()
    captured()
    assert opt.nonfinite == 1
    state = opt.state[model.ws[0]]
    assert torch.isfinite(state["exp_avg"]).all()
    assert abs(state["exp_avg"][1, 2] / state["norm1"]) < abs(before[1, 2])
    with pytest.warns(RuntimeWarning, match="1 gradient elements were not finite"):
        opt.state_dict()


def test_torchs_schedulers_see_replays():
    _, opt, update = make(torch.float64, 1, False)
    update()
    captured = Rehearsed(opt, update)
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 1, 0.5)
    captured()
    scheduler.step()  # warns where it believes that no step came before


def test_what_a_capture_returns_holds_no_graph():
    """Its nodes would stay, and with them the stream of the capture, for eager updates between replays."""
    model, opt, update = make(torch.float64, 1, False)
    update()

    def returning():
        update()
        loss = (model.ws[0] * model.cs[0][0]).sum()
        return {"loss": loss, "other": (loss + 1, "name")}

    output = Rehearsed(opt, returning)()
    assert not output["loss"].requires_grad
    assert not output["other"][0].requires_grad
    assert output["other"][1] == "name"


@pytest.mark.gpu
def test_after_an_error_the_current_stream_waits_for_the_one_aside():
    value = torch.zeros(1, device="cuda")

    def fail():
        with graphs.aside(value.device):
            torch.cuda._sleep(200_000_000)  # cycles
            value.fill_(1.0)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert value.clone().item() == 1


def test_tables_of_a_capture_are_its_own():
    if adam_triton is None:
        pytest.skip("needs Triton")
    model, opt, _ = make(torch.float32, 1, False)
    shelf = graphs._Shelf(opt)
    with kernels.tables_on(shelf.place):
        assert adam_triton.room_for is not None
        tables, n = adam_triton._tables(list(model.ws), list(model.ws))
    assert adam_triton.room_for is None
    shelf.fill()
    expected, m = adam_triton._tables(list(model.ws), list(model.ws))
    assert n == m == 3
    for ours, theirs in zip(tables, expected, strict=True):
        assert torch.equal(ours.reshape(-1), theirs.reshape(-1))


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["loop", "loop expected", "call", "one pass", "into"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_on_the_gpu(way, dtype):
    kappa = 1 if way == "loop expected" else 4

    def build():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 300), nn.LayerNorm(300), nn.Tanh(), nn.Linear(300, 300), nn.Linear(300, 8))
        model.to("cuda", dtype)
        x = torch.randn(4 * kappa, 16, 32, device="cuda", dtype=dtype)
        opt = ia.InvariantAdam(
            model.parameters(), lr=1e-3, eps=1e-4, weight_decay=0.1, micro_batch_size=4,
            fold="call" if way == "call" else "backward",
        )  # fmt: skip
        schedule = ia.SampleLambdaLR(opt, ia.warmup_cosine(warmup=100, total=400))

        def update():
            if "expected" in way:
                opt.expect(1)
            if way in ("one pass", "into"):
                with ia.one_pass(model, 4, into=opt if way == "into" else None):
                    value = model(x).float().square().mean()
                    value.backward()
            else:
                for part in x.split(4):
                    value = model(part).float().square().mean()
                    value.backward()
                    if way == "call":
                        opt.fold()
            opt.step()
            return value.detach()

        return model, opt, x, schedule, update

    (model, opt, x, schedule, update), (twin, twin_opt, y, twin_schedule, eager) = (build() for _ in range(2))
    y.copy_(x)
    train = ia.capture(opt, update)
    for _ in range(3):
        eager()
    generator = torch.Generator("cuda").manual_seed(1)
    for _ in range(8):
        x.normal_(generator=generator)
        y.copy_(x)
        value, other = train(), eager()
        torch.testing.assert_close(value, other, rtol=2e-2 if dtype == torch.bfloat16 else 1e-3, atol=1e-4)
    assert opt.samples_seen == twin_opt.samples_seen
    assert schedule.get_last_lr() == twin_schedule.get_last_lr()
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(flat(model.parameters()), flat(twin.parameters()), rtol=tolerance, atol=tolerance)


class Images(nn.Module):
    """Convolutions in channels-last memory with more elements than pairs may wait, and matrices."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        layers = [nn.Conv2d(3, 256, 3, padding=1)]
        for _ in range(4):
            layers += [nn.ReLU(), nn.Conv2d(256, 256, 3, padding=1)]
        self.body, self.head = nn.Sequential(*layers), nn.Linear(256, 10)

    def forward(self, x):
        return self.head(self.body(x).mean((2, 3)))


def image_update(into):
    model = Images().cuda().to(memory_format=torch.channels_last)
    opt = ia.InvariantAdam(model.parameters(), lr=1e-3, micro_batch_size=8)
    x = torch.randn(32, 3, 16, 16, device="cuda").contiguous(memory_format=torch.channels_last)
    y = torch.randint(10, (32,), device="cuda")

    def update():
        with ia.one_pass(model, micro_batch_size=8, **({"into": opt} if into else {})):
            nn.functional.cross_entropy(model(x), y).backward()
        opt.step()

    return model, opt, update


@pytest.mark.gpu
@pytest.mark.parametrize("into", [False, True])
def test_replays_of_several_streams_at_once_are_those_of_one(into):
    """What a graph uses is its own: neither a node of an earlier update nor a library's workspace is shared."""
    wanted, _, eager = image_update(into)
    for _ in range(8):
        eager()
    streams = [torch.cuda.Stream() for _ in range(3)]
    made = []
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            model, opt, update = image_update(into)
            made.append((model, opt, ia.capture(opt, update)))
    torch.cuda.synchronize()
    for _ in range(5):
        for stream, (*_, replay) in zip(streams, made, strict=True):
            with torch.cuda.stream(stream):
                replay()
    torch.cuda.synchronize()
    for model, *_ in made:
        assert (flat(model.parameters()) - flat(wanted.parameters())).norm() < 1e-3 * flat(wanted.parameters()).norm()


class RehearsedSizes(graphs.CapturedSizes):
    """Graphs by size, each of the optimizer's kernels alone."""

    def _directly(self, *batch):
        return self.update(*batch)

    def _captured(self, update):
        return Rehearsed(self.optimizer, update)


def test_each_size_is_a_graph_of_its_own_and_growth_keeps_them_few():
    def build(wrap):
        model = Weighed(torch.float64)
        opt = ia.InvariantAdam(model.parameters(), lr=0.01, weight_decay=0.1, micro_batch_size=1)

        def update(x):
            for k in range(len(x)):
                model.loss(k % 3).backward()  # a rehearsal repeats the gradients it was made with
            opt.step()

        return model, opt, wrap(opt, update), ia.BatchGrowth(opt, powers_of_two=True)

    model, opt, train, growth = build(RehearsedSizes)
    twin, judge, eager, other = build(lambda opt, update: update)
    sizes = []
    for _ in range(12):
        for (x,), (y,) in zip(growth.split((torch.zeros(12),)), other.split((torch.zeros(12),)), strict=True):
            train(x)
            eager(y)
            sizes.append(len(x))
            assert opt.param_groups[0]["kappa"] == judge.param_groups[0]["kappa"] == len(x)
    assert set(sizes) == {1, 2, 4, 8, 12}
    assert len(train._graphs) == sum(sizes.count(size) > 2 for size in set(sizes)) >= 4
    torch.testing.assert_close(flat(model.parameters()), flat(twin.parameters()), rtol=1e-12, atol=1e-12)


def test_a_graph_takes_its_own_size_only():
    _, opt, update = make(torch.float64, 3, expect=False)
    update()
    update()
    captured = Rehearsed(opt, update)
    opt.expect(2)
    with pytest.raises(RuntimeError, match="of another size"):
        captured()
    opt.abandon()


def test_by_size_runs_as_it_is_on_a_cpu():
    opt = ia.InvariantAdam(nn.Linear(2, 1).parameters(), micro_batch_size=1)
    assert ia.capture(opt, len, by_size=True) is len


@pytest.mark.gpu
def test_growing_in_on_graphs():
    def build(wrap):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 300), nn.Tanh(), nn.Linear(300, 8)).cuda()
        opt = ia.InvariantAdam(model.parameters(), lr=1e-3, eps=1e-4, micro_batch_size=4)

        def update(x):
            with ia.one_pass(model, 4, into=opt):
                loss = model(x).square().mean()
                loss.backward()
            opt.step()
            return loss

        return model, opt, wrap(opt, update), ia.BatchGrowth(opt, powers_of_two=True)

    model, _, train, growth = build(lambda opt, update: ia.capture(opt, update, by_size=True))
    twin, _, eager, other = build(lambda opt, update: update)
    generator = torch.Generator("cuda").manual_seed(1)
    for _ in range(16):
        batch = torch.randn(64, 16, 32, device="cuda", generator=generator)
        for x, y in zip(growth.split(batch), other.split(batch), strict=True):
            torch.testing.assert_close(train(x), eager(y).detach(), rtol=1e-3, atol=1e-4)
    assert len(train._graphs) >= 4
    torch.testing.assert_close(flat(model.parameters()), flat(twin.parameters()), rtol=1e-4, atol=1e-4)

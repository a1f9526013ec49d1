"""`one_pass(..., into=opt)`: the same moments and weights as the pair's way, and no gradient in memory."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import invariant_adam as ia
from invariant_adam.kernels import Serving
from invariant_adam.kernels import gemm_square as kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
gpu = [pytest.mark.gpu] if DEVICE == "cuda" else []
pytestmark = gpu


class Text(nn.Module):
    """Every way a parameter goes: embedding, norm, linear, tied, added."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(11, 8)
        self.places = nn.Parameter(torch.randn(5, 8))
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.twice = nn.Linear(8, 8, bias=False)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids):
        x = self.tokens(ids) + self.places
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        return self.head(self.twice(torch.tanh(self.twice(x))))


class Image(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 6, 3, 2, bias=False), nn.Conv2d(6, 4, 3, groups=2)
        self.norm, self.head = nn.BatchNorm2d(6), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.conv2(F.relu(self.norm(self.conv1(x)))).mean((2, 3)))


def batch_of(model, size):
    if isinstance(model, Text):
        return torch.randint(11, (size, 5), device=DEVICE)
    return torch.randn(size, 1, 9, 9, dtype=torch.float64, device=DEVICE)


def train(make, into, *, compiled=False, sizes=(8, 8, 7), options=None, passes=None):
    torch.manual_seed(0)
    model = make().to(DEVICE, torch.float64)
    opt = ia.InvariantAdam(model.parameters(), lr=0.01, micro_batch_size=2, **options or {})
    run = torch.compile(model, backend="aot_eager") if compiled else model
    for size in sizes:
        x = batch_of(model, size)
        with ia.one_pass(run, 2, **passes or {}, **({"into": opt} if into else {})):
            reduce = torch.sum if (passes or {}).get("reduction") == "sum" else torch.mean
            reduce(run(x).square().flatten(1).mean(1)).backward()
        assert all(p.grad is None for p in model.parameters())
        opt.step()
    return model, opt


@pytest.mark.filterwarnings("default")  # torch warns of itself while tracing
@pytest.mark.parametrize("make", [Text, Image])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("options", "passes"),
    [
        ({}, {}),
        ({"weight_decay": 0.1, "decoupled": False, "loss_divisor": 3.0}, {}),
        ({"maximize": True, "weight_decay": 0.1}, {"reduction": "sum"}),
    ],
)
def test_same_numbers_as_the_pair(make, compiled, options, passes):
    sizes = (8, 8) if compiled or passes else (8, 8, 7)
    (a, left), (b, right) = (
        train(make, into, compiled=compiled, sizes=sizes, options=options, passes=passes) for into in (False, True)
    )
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-12)
        for key in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(left.state[p][key], right.state[q][key], rtol=1e-12, atol=1e-14)
    assert left.samples_seen == right.samples_seen == sum(sizes)


def test_products_fold_themselves(monkeypatch):
    """The kernel's own epilogue, on the GPU or interpreted: no product is left for anyone else to fold."""
    twin = pytest.importorskip("invariant_adam.kernels.gemm_square.triton")
    monkeypatch.setattr(kernels, "fused", twin)
    monkeypatch.setattr(kernels, "takes_fused", twin.serves)
    folded = []
    plain = twin.gemm_square

    def gemm_square(*operands, into=None, **how):
        if Serving.noted is None:  # a rehearsal starts no kernel
            folded.append(into)
        return plain(*operands, into=into, **how)

    monkeypatch.setattr(twin, "gemm_square", gemm_square)
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 4, bias=False)).to(DEVICE)
    second = copy.deepcopy(first)
    ours = ia.InvariantAdam(first.parameters(), lr=0.01, eps=1e-4, micro_batch_size=2)
    loop = ia.InvariantAdam(second.parameters(), lr=0.01, eps=1e-4, micro_batch_size=2)
    for _ in range(3):
        x = torch.randn(6, 9, 12, device=DEVICE)
        with ia.one_pass(first, 2, into=ours):
            first(x).square().mean().backward()
        for part in x.split(2):
            second(part).square().mean().backward()
        ours.step()
        loop.step()
    assert sum(into is not None for into in folded) == 6
    assert all(into is not None for into in folded[-6:])  # the check of the first call folds nothing
    for p, q in zip(first.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(ours.state[p]["exp_avg_sq"], loop.state[q]["exp_avg_sq"], rtol=1e-4, atol=1e-9)


def test_several_mini_batches_make_an_update():
    torch.manual_seed(0)
    model = nn.Linear(3, 2).to(DEVICE, torch.float64)
    other = copy.deepcopy(model)
    ours = ia.InvariantAdam(model.parameters(), micro_batch_size=2)
    loop = ia.InvariantAdam(other.parameters(), micro_batch_size=2)
    x = torch.randn(12, 3, dtype=torch.float64, device=DEVICE)
    for half in x.split(6):
        with ia.one_pass(model, 2, into=ours):
            model(half).square().mean().backward()
    for part in x.split(2):
        other(part).square().mean().backward()
    assert ours.kappa == loop.kappa == 6
    ours.step()
    loop.step()
    torch.testing.assert_close(list(model.parameters()), list(other.parameters()), rtol=1e-12, atol=1e-12)


def test_refuses_what_it_cannot_fold():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)).to(DEVICE)
    x = torch.randn(4, 3, device=DEVICE)
    part = ia.InvariantAdam(model[0].parameters(), micro_batch_size=2)
    with (
        pytest.raises(ValueError, match=r"into= must hold all .* 1\.weight, 1\.bias"),
        ia.one_pass(model, 2, into=part),
    ):
        pass
    call = ia.InvariantAdam(model.parameters(), micro_batch_size=2, fold="call")
    with pytest.raises(ValueError, match='fold="backward"'), ia.one_pass(model, 2, into=call):
        pass
    opt = ia.InvariantAdam(model.parameters(), micro_batch_size=2)
    with ia.one_pass(model, 2, into=opt):
        loss = model(x).square().mean()
    with pytest.raises(RuntimeError, match="after its context was closed"):
        loss.backward()
    opt.abandon()
    with ia.one_pass(model, 2, into=opt):
        loss = model(x).square().mean()
        loss.backward(retain_graph=True)
        with pytest.raises(ia.UnsupportedUse, match="second square"):
            loss.backward()
    opt.abandon()
    with ia.one_pass(model, 2, into=opt):
        model(x).square().mean().backward()
    opt.step()


@pytest.mark.filterwarnings("default")  # torch warns of itself while tracing
@pytest.mark.parametrize("compiled", [False, True])
def test_backwards_that_accumulate_nothing(compiled):
    """torch.autograd.grad folds nothing; backward(inputs=...) is refused."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(8, 3, requires_grad=True)
    opt = ia.InvariantAdam(model.parameters(), micro_batch_size=2)
    run = torch.compile(model, backend="aot_eager") if compiled else model
    with ia.one_pass(run, 2, into=opt):
        value = run(x).square().mean()
        (grad,) = torch.autograd.grad(value, x, retain_graph=True)
        assert opt.kappa == 0
        assert grad.any()
        value.backward()
    assert {part.kappa for part in opt.queue.update.tallies.values()} == {4.0}
    opt.step()
    for named in (model[0], model[2]):
        with pytest.raises(RuntimeError, match=r"backward\(inputs"), ia.one_pass(run, 2, into=opt):
            run(x).square().mean().backward(inputs=list(named.parameters()))
        assert opt.kappa == 0


def test_parameters_of_another_optimizer_and_of_another_context():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(8, 3)
    model[0].requires_grad_(False)
    opt = ia.InvariantAdam(model.parameters())
    model[0].requires_grad_(True)  # seen when the context opens
    with ia.one_pass(model, 2, into=opt):
        model(x).square().mean().backward()
    assert len(opt.queue.update.tallies) == 4
    opt.step()
    with ia.one_pass(model, 2, into=opt):
        value = model(x).square().mean()
    for size in (2, 4):
        with pytest.raises(RuntimeError, match="another context"), ia.one_pass(model, size, into=opt):
            value.backward(retain_graph=True)
        opt.abandon()
    newer = ia.InvariantAdam(model[2].parameters())
    with pytest.raises(RuntimeError, match="belongs to an InvariantAdam that was built later"):
        ia.one_pass(model, 2, into=opt).__enter__()
    assert newer.kappa == 0
    with pytest.raises(TypeError, match="AdamW"):
        ia.one_pass(model, 2, into=torch.optim.AdamW(model.parameters())).__enter__()


def test_what_is_not_finite_never_reaches_the_moments():
    """An infinite sample: left out, counted and told as by the pair's way."""
    results = []
    for into in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(DEVICE, torch.float64)
        opt = ia.InvariantAdam(model.parameters(), lr=0.01, micro_batch_size=2)
        for bad in (False, True, False):
            x = torch.randn(6, 3, dtype=torch.float64, device=DEVICE)
            with ia.one_pass(model, 2, **({"into": opt} if into else {})):
                weight = torch.ones(6, 1, dtype=torch.float64, device=DEVICE)
                weight[3] = torch.inf if bad else 1.0
                (model(x).square() * weight).mean().backward()
            told = pytest.warns(RuntimeWarning, match="not finite") if bad and DEVICE == "cpu" else nullcontext()
            with told:
                opt.step()
        assert all(
            torch.isfinite(t).all() for state in opt.state.values() for t in (state["exp_avg"], state["exp_avg_sq"])
        )
        results.append((opt.nonfinite, [p.detach() for p in model.parameters()]))
    assert results[0][0] == results[1][0] > 0
    for pair, direct in zip(results[0][1], results[1][1], strict=True):
        torch.testing.assert_close(pair, direct, rtol=1e-12, atol=0)

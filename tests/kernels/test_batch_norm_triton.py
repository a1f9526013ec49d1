"""Ghost batch norm against float64, by its kernels (on the GPU or interpreted on the CPU) and by plain torch."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.compiler import is_compiling

import invariant_adam as ia
from invariant_adam.kernels import batch_norm as plain

twin = pytest.importorskip("invariant_adam.kernels.batch_norm.triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 1e-2, torch.float32: 1e-5}


LAYOUTS = {"first": torch.contiguous_format, "last": torch.channels_last}  # where channels are in memory


def images(*shape, dtype=torch.float32, channels="last"):
    t = (torch.randn(shape) * 2 + torch.randn(shape[1]).view(-1, *(1,) * (len(shape) - 2))).to(DEVICE, dtype)
    if channels == "last" and t.ndim == 3:
        return t.mT.contiguous().mT
    return t.contiguous(memory_format=LAYOUTS[channels]) if t.ndim == 4 else t


def near(got, want, tolerance):
    assert torch.isfinite(got).all()
    assert (got.double() - want).norm() <= tolerance * want.norm()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("channels", LAYOUTS)
@pytest.mark.parametrize(
    ("shape", "kappa"),
    [
        ((12, 8, 3, 5), 3),
        ((20, 37), 2),
        ((6, 130, 1, 2), 1),
        ((18, 5, 4, 9), 9),
        ((8, 3, 9, 9), 1),
        ((4, 3, 35, 37), 1),  # planes of two tiles, in two chunks
        ((36, 5, 16, 16), 2),  # several tiles of several planes, the last not full; numbers that are loaded together
        ((10, 6, 7), 5),
    ],
)
@pytest.mark.parametrize(("affine", "weighted"), [(True, False), (False, True)])
def test_kernels(monkeypatch, shape, kappa, affine, weighted, dtype, channels):
    x, g = (images(*shape, dtype=dtype, channels=channels) for _ in range(2))
    width = shape[1]
    w, b = (torch.randn(width, device=DEVICE) for _ in range(2)) if affine else (None, None)
    c = torch.rand(kappa, dtype=torch.float64).to(DEVICE) if weighted else None
    rm, rv = torch.randn(width, device=DEVICE), torch.rand(width, device=DEVICE)
    wide, again = [rm.double(), rv.double()], [rm.clone(), rv.clone()]
    tracked = torch.tensor(5, device=DEVICE)
    empty, like = torch.empty, torch.empty_like
    with monkeypatch.context() as poison:  # what is not written shows
        poison.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(torch.nan))
        poison.setattr(torch, "empty_like", lambda *a, **k: like(*a, **k).fill_(torch.nan))
        mean, rstd = twin.statistics(x, kappa, 1e-5, rm, rv, *plain.running(0.3, kappa))
        y = twin.normalise(x, mean, rstd, w, b)
        dx, sums, pairs = twin.backward(g, x, mean, rstd, w, c)
        once = twin.forward(x, kappa, 1e-5, *again, *plain.running(0.3, kappa), tracked, w, b)
        dx_alone, no_sums, pairs_alone = twin.backward(g, x, mean, rstd, w, c, shares=False)
    for got, expected in zip((*once, *again), (mean, rstd, y, rm, rv), strict=True):
        near(got, expected.double(), TOLERANCE[got.dtype])
    assert once[2].stride() == y.stride()
    assert tracked == 4 + kappa
    assert no_sums is None
    assert torch.equal(dx_alone, dx)
    assert torch.equal(pairs_alone, pairs)
    assert y.stride() == dx.stride() == x.stride()
    assert y.dtype == dx.dtype == dtype
    leaf = x.double().requires_grad_()
    ws, bs = [], []
    out = []
    for xs in leaf.chunk(kappa):
        ws.append((torch.ones(width, device=DEVICE) if w is None else w).double().requires_grad_())
        bs.append((torch.zeros(width, device=DEVICE) if b is None else b).double().requires_grad_())
        out.append(F.batch_norm(xs, *wide, ws[-1], bs[-1], True, 0.3, 1e-5))
    want = torch.cat(out)
    want.backward(g.double())
    tolerance = TOLERANCE[dtype]
    near(y, want, tolerance)
    near(dx, leaf.grad, 2 * tolerance)
    near(rm, wide[0], tolerance)
    near(rv, wide[1], tolerance)
    scale = 1.0 if c is None else c[:, None]
    each = [torch.stack([t.grad for t in ts]) for ts in (ws, bs)]
    near(sums, torch.stack(each, 1), tolerance)
    near(pairs, torch.cat([torch.stack([t.sum(0), (scale * t.square()).sum(0)]) for t in each]), tolerance)


@pytest.mark.parametrize("channels", LAYOUTS)
def test_a_gradient_of_another_layout(channels):
    """Backward takes a gradient as it comes: of the other layout, or expanded from a mean over places."""
    x = images(6, 4, 3, 5, channels=channels)
    mean, rstd = twin.statistics(x, 3, 1e-5, None, None, *plain.running(0.1, 3))
    others = images(6, 4, 3, 5, channels="last" if channels == "first" else "first"), images(6, 4, 1, 1).expand_as(x)
    for g in others:
        got = twin.backward(g, x, mean, rstd, None, None)
        for made, want in zip(got, twin.backward(torch.empty_like(x).copy_(g), x, mean, rstd, None, None), strict=True):
            assert torch.equal(made, want)
        assert got[0].stride() == x.stride()
        assert torch.equal(twin.like(g, x), g)
        assert twin.like(g, x).stride() == x.stride()


@pytest.mark.parametrize(
    ("x", "served"),
    [
        (torch.empty(4, 3, 5, 5), True),
        (torch.empty(4, 5, 5, 3).movedim(-1, 1), True),
        (torch.empty(4, 3, 7, 5)[:, :, :5], False),
        (torch.empty(4, 3, 5, 5).mT, False),
        (torch.empty(4, 3, 5, 5, dtype=torch.float64), False),
    ],
    ids=["contiguous", "channels last", "cut", "turned", "float64"],
)
def test_what_is_served(x, served):
    assert twin.serves(x, 2) is served


@pytest.mark.parametrize("channels", LAYOUTS)
def test_a_large_mean_does_not_cancel(channels):
    x = images(8, 4, 6, 6, channels=channels) + 1000
    mean, rstd = twin.statistics(x, 2, 1e-5, None, None, *plain.running(0.1, 2))
    want_mean, want_rstd, _ = plain.statistics(x.double(), 2, 1e-5, None, None, plain.running(0.1, 2))
    near(mean, want_mean, 1e-6)
    near(rstd, want_rstd, 1e-4)


@pytest.mark.parametrize("momentum", [0.0, 1.0])
def test_momentum_at_its_ends(momentum):
    x = images(6, 4, 2, 2)
    rm, rv = torch.randn(4, device=DEVICE), torch.rand(4, device=DEVICE)
    wide = rm.double(), rv.double()
    twin.statistics(x, 3, 1e-5, rm, rv, *plain.running(momentum, 3))
    plain.statistics(x.double(), 3, 1e-5, *wide, plain.running(momentum, 3))
    near(rm, wide[0], 1e-6)
    near(rv, wide[1], 1e-5)


def loop(model, batches, size):
    """The gradients and running statistics of the loop over micro-batches."""
    for x in batches:
        grads = []
        for part in x.split(size):
            model.zero_grad()
            model(part).square().mean().backward()
            grads.append([len(part) / len(x) * p.grad for p in model.parameters()])
    return [sum(g) for g in zip(*grads, strict=True)], [
        sum(len(x) / len(part) * g.square() for g, part in zip(gs, x.split(size), strict=True))
        for gs in zip(*grads, strict=True)
    ]


def network(momentum, affine=True):
    return nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5, momentum=momentum, affine=affine), nn.Conv2d(5, 2, 2))


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize(("fused", "channels"), [(False, "last"), (True, "last"), (True, "first")])
def test_in_one_pass(monkeypatch, momentum, affine, fused, channels):
    """Gradients, squares, running statistics and counts of two mini-batches, one ragged, are the loop's."""
    dtype = torch.float32 if fused else torch.float64
    if fused:
        monkeypatch.setattr(plain, "fused", twin)
        monkeypatch.setattr(plain, "takes_fused", twin.serves)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # the convolutions beside it
    torch.manual_seed(0)
    first = network(momentum, affine).to(DEVICE, dtype).to(memory_format=LAYOUTS[channels])
    second = copy.deepcopy(first).double()
    batches = [images(n, 3, 6, 6, dtype=dtype, channels=channels) for n in (6, 7)]
    for x in batches:
        first.zero_grad()
        for p in first.parameters():
            p.grad_sq = None
        with ia.one_pass(first, 2 if len(x) == 6 else 3):
            first(x).square().mean().backward()
    loop(second, [batches[0].double()], 2)
    grads, squares = loop(second, [batches[1].double()], 3)
    tight = {"rtol": 1e-4, "atol": 1e-5} if fused else {"rtol": 1e-9, "atol": 1e-11}
    for p, g, s in zip(first.parameters(), grads, squares, strict=True):
        torch.testing.assert_close(p.grad.double(), g, **tight)
        torch.testing.assert_close(p.grad_sq.double(), s, **tight)
    for name, buffer in first.named_buffers():
        torch.testing.assert_close(buffer.double(), dict(second.named_buffers())[name].double(), **tight)


@pytest.mark.filterwarnings("default")  # torch warns of itself while tracing
@pytest.mark.slow
@pytest.mark.parametrize("channels", LAYOUTS)
def test_compiled(monkeypatch, channels):
    """The plain formulas of a compiled graph: gradients, squares and running statistics are those of the kernels."""
    monkeypatch.setattr(plain, "fused", twin)
    monkeypatch.setattr(plain, "takes_fused", lambda x, kappa: not is_compiling() and twin.serves(x, kappa))
    torch.manual_seed(0)
    first = network(0.1).to(DEVICE).to(memory_format=LAYOUTS[channels])
    second = copy.deepcopy(first)
    x = images(6, 3, 6, 6, channels=channels)
    run = torch.compile(second, backend="aot_eager")
    for model in (first, run):
        for _ in range(2):
            model.zero_grad()
            for p in model.parameters():
                p.grad_sq = None
            with ia.one_pass(model, 2):
                model(x).square().mean().backward()
    for p, q in zip(first.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(p.grad_sq, q.grad_sq, rtol=1e-3, atol=1e-5)  # tf32 convolutions on a GPU
    for a, b in zip(first.buffers(), second.buffers(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_one_value_per_channel_is_refused():
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).to(DEVICE)
    with pytest.raises(ValueError, match="more than 1 value per channel"), ia.one_pass(model, 1):
        model(torch.randn(4, 3, device=DEVICE)).sum().backward()

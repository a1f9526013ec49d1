"""Sums of rows and their squares against float64, on the GPU or interpreted on the CPU."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import invariant_adam as ia
from invariant_adam.kernels import chip
from invariant_adam.kernels import sums as plain

launch = pytest.importorskip("invariant_adam.kernels.launch")
twin = pytest.importorskip("invariant_adam.kernels.sums.triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 1e-2, torch.float32: 1e-5}


def close(got, want, tolerance):
    assert torch.isfinite(got).all()
    assert got.dtype == torch.float32
    assert (got.double() - want).norm() <= tolerance * want.norm()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("kappa", "rows", "width"), [(1, 1, 3), (3, 70, 40), (9, 5, 130), (2, 600, 17)])
@pytest.mark.parametrize("weighted", [False, True])
def test_sums(monkeypatch, kappa, rows, width, weighted, dtype):
    G, X = (torch.randn(kappa, rows, width).to(DEVICE, dtype) for _ in range(2))
    mean, rstd = torch.randn(kappa, rows).to(DEVICE), torch.rand(kappa, rows).to(DEVICE)
    c = torch.rand(kappa, dtype=torch.float64).to(DEVICE) if weighted else None
    empty = torch.empty
    with monkeypatch.context() as poison:  # what is not written shows
        poison.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(torch.nan))
        got = [*twin.norm_sums(G, X, mean, rstd, c), *twin.row_sums(G, c)]
    wide = [None if t is None else t.double() for t in (G, X, mean, rstd, c)]
    want = [*plain.norm_sums(*wide), *plain.row_sums(wide[0], wide[-1])]
    for a, b in zip(got, want, strict=True):
        close(a, b, TOLERANCE[dtype])


@pytest.mark.parametrize("fused", [True, False], ids=["one kernel", "two kernels"])
def test_the_last_block_adds_the_chunks_or_a_second_kernel_does(monkeypatch, fused):
    here = chip.of(torch.device(DEVICE))._replace(publishes=fused)
    monkeypatch.setattr(chip, "of", lambda device: here)
    monkeypatch.setattr(twin, "_known", {})
    G, X = torch.randn(3, 600, 70).to(DEVICE), torch.randn(3, 600, 70).to(DEVICE)
    mean, rstd = torch.randn(3, 600).to(DEVICE), torch.rand(3, 600).to(DEVICE)
    each, pairs = twin.norm_sums(G, X, mean, rstd)
    wide = [t.double() for t in (G, X, mean, rstd)]
    for got, want in zip((each, pairs), plain.norm_sums(*wide), strict=True):
        close(got, want, 1e-5)
    none, pair = twin.row_sums(G, shares=False)
    assert none is None
    close(pair, plain.row_sums(wide[0])[1], 1e-5)


def test_counters_are_kept_for_a_stream_and_left_as_they_were_found(monkeypatch):
    monkeypatch.setattr(launch, "_counters", {})
    G = torch.randn(3, 300, 70).to(DEVICE)
    own = launch.counters(G, 5)
    assert own.numel() == 5
    launch.keep_counters(G.device)
    kept = launch.counters(G, 5)
    assert launch.counters(G, 2) is kept
    first = twin.row_sums(G)[1].clone()
    assert not kept.any()
    assert torch.equal(twin.row_sums(G)[1], first)
    assert launch.counters(G, kept.numel() + 1).numel() > kept.numel()
    monkeypatch.setattr(launch, "_capturing", lambda: True)  # graphs may be replayed side by side
    assert launch.counters(G, 5) is not kept


class Shared(nn.Module):
    """Biases of linear and convolution, layer norms of one and two dimensions, one of them used twice, group norm."""

    def __init__(self):
        super().__init__()
        self.conv, self.group = nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4)
        self.planes, self.norm, self.head = nn.LayerNorm((4, 4)), nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, x):
        x = self.planes(self.group(self.conv(x)))
        x = self.norm(x.flatten(2).transpose(1, 2))
        return self.head(self.norm(torch.tanh(x)))


def test_in_one_pass(monkeypatch):
    monkeypatch.setattr(plain, "fused", twin)
    monkeypatch.setattr(plain, "takes_fused", twin.serves)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # the convolutions beside them
    torch.manual_seed(0)
    first = Shared().to(DEVICE)
    second = copy.deepcopy(first).double()
    x = torch.randn(7, 2, 6, 6, device=DEVICE).contiguous(memory_format=torch.channels_last)
    with ia.one_pass(first, 3):
        first(x).square().mean().backward()
    grads = []
    for part in x.split(3):
        second.zero_grad()
        second(part.double()).square().mean().backward()
        grads.append((len(part) / len(x), [p.grad.clone() for p in second.parameters()]))
    for i, (name, p) in enumerate(first.named_parameters()):
        torch.testing.assert_close(p.grad.double(), sum(w * g[i] for w, g in grads), rtol=1e-4, atol=1e-6, msg=name)
        want = sum(w * g[i].square() for w, g in grads)
        torch.testing.assert_close(p.grad_sq.double(), want, rtol=1e-4, atol=1e-7, msg=name)

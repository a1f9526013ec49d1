"""Sums of rows and their squares against float64, on the GPU or interpreted on the CPU."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import invariant_adam as ia
from invariant_adam.kernels import sums as plain

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

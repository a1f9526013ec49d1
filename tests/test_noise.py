"""The noise scale against a gradient whose signal and noise are known."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from invariant_adam import InvariantAdam


def feed(signal, deviation, kappas, betas=(0.95, 0.95), size=4, shapes=((3000,), (40, 50))):
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.zeros(s)) for s in shapes]
    opt = InvariantAdam(params, lr=0.0, betas=betas, micro_batch_size=size)
    for kappa in kappas:
        for _ in range(kappa):
            loss = sum((p * (signal + deviation * torch.randn(p.shape, generator=generator))).sum() for p in params)
            loss.backward()
        opt.step()
    return opt


@pytest.mark.parametrize("kappas", [[1] * 300, [8] * 40, [1, 5, 2, 9, 3] * 15], ids=["one", "eight", "changing"])
@pytest.mark.parametrize(("signal", "deviation"), [(1.0, 1.0), (0.5, 2.0)])
def test_signal_and_noise_are_found_whatever_the_batch_size(signal, deviation, kappas):
    found = feed(signal, deviation, kappas).noise_scale()
    assert found.signal == pytest.approx(5000 * signal**2, rel=0.1)
    assert found.noise == pytest.approx(4 * 5000 * deviation**2, rel=0.1)  # of one sample: M times a micro-batch's
    assert found.batch == pytest.approx(found.noise / found.signal)


def test_pure_noise_has_no_finite_scale_or_a_large_one():
    assert feed(0.0, 1.0, [1] * 200).noise_scale().batch > 100


def test_what_cannot_be_told_is_refused():
    opt = feed(1.0, 1.0, [1], betas=(0.0, 0.9))
    with pytest.raises(RuntimeError, match="at least two micro-batches"):
        opt.noise_scale()
    opt = feed(1.0, 1.0, [2])
    opt.param_groups[0]["params"][0].sum().backward()
    with pytest.raises(RuntimeError, match="middle of an update"):
        opt.noise_scale()
    fresh = InvariantAdam([nn.Parameter(torch.zeros(2))])
    assert math.isinf(fresh.noise_scale().batch)

"""The noise scale against a gradient whose signal and noise are known."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from invariant_adam import BatchGrowth, InvariantAdam


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


def noisy(readings, seed=0, every=20, betas=(0.9, 0.99), scale=40.0):
    """A run at M = 4 whose gradient has the noise scale `scale`, in 20 directions, read now and then."""
    generator = torch.Generator().manual_seed(seed)
    params = [nn.Parameter(torch.zeros(60)), nn.Parameter(torch.zeros(40))]
    named = [("layer.weight", params[0]), ("head.weight", params[1])]
    opt = InvariantAdam(named, lr=0.0, betas=betas, micro_batch_size=4)
    mean = torch.full((100,), 0.1)  # |G|² = 1
    basis = torch.linalg.qr(torch.randn(100, 20, generator=torch.Generator().manual_seed(9)))[0] * math.sqrt(scale / 20)
    for update in range(1, readings * every + 1):
        g = mean + basis @ torch.randn(4, 20, generator=generator).mean(0)
        ((params[0] * g[:60]).sum() + (params[1] * g[60:]).sum()).backward()
        opt.step()
        if update % every == 0:
            found = opt.noise_scale(smooth=min(readings, 64))
    return opt, found


def test_several_readings_are_nearer_to_the_truth_and_know_their_error():
    runs = [noisy(12, seed)[1] for seed in range(8)]
    off = [(found.batch - 40) / found.stderr for found in runs]
    assert all(abs(found.batch / 40 - 1) < 0.5 for found in runs)
    assert 0.4 < math.sqrt(sum(z * z for z in off) / len(off)) < 2.0  # errors are as large as they are said to be
    single, many = noisy(16)
    assert single.noise_scale().stderr > 2 * many.stderr
    assert math.isnan(noisy(3)[1].stderr)


def test_layers_and_groups_add_up():
    opt, found = noisy(8)
    assert list(found.layers) == ["layer", "head"]
    assert sum(part.noise for part in found.layers.values()) == pytest.approx(found.noise)
    assert sum(part.signal for part in found.layers.values()) == pytest.approx(found.signal)
    (whole,) = found.groups
    assert whole.batch == pytest.approx(found.batch)
    p, q = (nn.Parameter(torch.zeros(3)) for _ in range(2))
    opt = InvariantAdam([{"params": [p]}, {"params": [q]}], micro_batch_size=2)
    for x in torch.randn(4, 3):
        (p * x + 2 * q * x).sum().backward()
        opt.step()
    first, second = opt.noise_scale().groups
    assert second.noise == pytest.approx(4 * first.noise)
    assert second.batch == pytest.approx(first.batch)
    assert list(opt.noise_scale().layers) == ["group 0, parameter 0", "group 1, parameter 0"]


def test_readings_do_not_lag_as_v_does():
    """After the noise falls by four, readings since then do not know of it, though v does."""
    generator = torch.Generator().manual_seed(0)
    w = nn.Parameter(torch.zeros(2000))
    opt = InvariantAdam([w], lr=0.0, betas=(0.9, 0.999), micro_batch_size=1)
    for update in range(400):
        deviation = 2.0 if update < 200 else 1.0
        (w * (1.0 + deviation * torch.randn(2000, generator=generator))).sum().backward()
        opt.step()
        if update == 199 or (update >= 240 and update % 20 == 0):
            found = opt.noise_scale(smooth=4)
    assert found.batch == pytest.approx(1.0, rel=0.05)
    opt.queue.moments.readings.clear()
    assert opt.noise_scale().batch > 1.8


class NoWaiting(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert function is not torch.ops.aten._local_scalar_dense.default, "a number was read"
        return function(*args, **(kwargs or {}))


def test_nothing_waits_for_the_device_before_a_number_is_read():
    opt, _ = noisy(6)
    with NoWaiting():
        found = opt.noise_scale(smooth=4)
    assert found.batch > 0


def test_it_says_in_words_what_it_means():
    _, found = noisy(12)
    assert "A batch of about" in str(found)
    assert f"± {found.stderr:.2g}"[:3] in str(found)
    assert found.efficiency(found.batch) == pytest.approx(0.5)
    assert found.efficiency(0) == 1.0
    assert "no update has been made" in InvariantAdam([nn.Parameter(torch.zeros(2))]).noise_scale().advice()
    signal, noise, batch = found
    assert batch == noise / signal


def test_readings_belong_to_one_run():
    opt, _ = noisy(6)
    with pytest.raises(ValueError, match="smooth must be from 1 to 64 readings, got 0"):
        opt.noise_scale(smooth=0)
    opt.load_state_dict(opt.state_dict())
    assert opt.noise_scale(smooth=4).readings == 1
    assert opt.noise_scale(smooth=4).readings == 1  # twice at the same samples is once


def benchmark():
    path = Path(__file__).parents[1] / "benchmarks" / "noise_scale.py"
    spec = importlib.util.spec_from_file_location("noise_scale_benchmark", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["loop", "loop, κ = 8", "one pass, κ = 8"])
@pytest.mark.parametrize("name", ["mlp", "gpt"])
def test_it_is_within_a_tenth_of_brute_force(name, mode):
    module = benchmark()
    model, loss = getattr(module, name)()
    truth = module.brute_force(model, loss)
    assert module.network(model, loss, mode).batch == pytest.approx(truth, rel=0.1)


def test_growing_in_does_not_change_it():
    w = nn.Parameter(torch.zeros(1000))
    opt = InvariantAdam([w], lr=0.0, betas=(0.95, 0.99), micro_batch_size=8)
    growth, generator = BatchGrowth(opt), torch.Generator().manual_seed(0)
    for _ in range(20):
        left = 16
        while left:
            now = growth.next_kappa(left)
            for _ in range(now):
                (w * (1.0 + torch.randn(1000, generator=generator))).sum().backward()
            opt.step()
            left -= now
    assert opt.noise_scale().batch == pytest.approx(8, rel=0.1)

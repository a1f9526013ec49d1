"""The paper's claim: the same samples give the same trajectory at every batch size."""

from __future__ import annotations

import pytest
from problems import batches, distance, flat, loss, mlp, reference_run

from invariant_adam import InvariantAdam, SampleLambdaLR, reference, warmup_cosine
from invariant_adam.scaling import Hyperparameters

SMALL = Hyperparameters(lr=1e-5, betas=(0.999, 0.9999), weight_decay=0.1)


def final(kappa, algorithm, h, n=64, rule="exponential"):
    model = mlp()
    data = batches(n)
    updates = [data[i : i + kappa] for i in range(0, n, kappa)]
    return reference_run(model, updates, h, algorithm=algorithm, rule=rule).w - flat(model.parameters())


@pytest.mark.parametrize("kappa", [4, 16])
def test_invariant_adam_follows_micro_adam_where_standard_adam_does_not(kappa):
    micro = final(1, reference.micro_adam, SMALL)
    invariant = distance(final(kappa, reference.invariant_adam, SMALL), micro)
    linear = distance(final(kappa, reference.standard_adam, SMALL), micro)
    square_root = distance(final(kappa, reference.standard_adam, SMALL, rule="square_root"), micro)
    assert invariant < 0.01 * kappa
    assert min(linear, square_root) > 5 * invariant


def train(kappas, warmup=0):
    """Train on micro-batches of 4, grouped into updates as `kappas` says; return how far the weights went."""
    model = mlp()
    start = flat(model.parameters())
    opt = InvariantAdam(model.parameters(), *SMALL[:2], 1e-8, SMALL[2], micro_batch_size=4)
    if warmup:
        SampleLambdaLR(opt, warmup_cosine(warmup, 10**9))
    data = iter(batches(sum(kappas)))
    for kappa in kappas:
        for _ in range(kappa):
            loss(model, next(data)).backward()
        opt.step()
    assert opt.samples_seen == 4 * sum(kappas)
    return flat(model.parameters()) - start


def test_a_batch_ramp_stays_on_the_trajectory():
    constant = train([1] * 62)
    ramp = train([1] * 10 + [2] * 6 + [4] * 4 + [8] * 3)
    assert distance(ramp, constant) < 0.03


def test_a_warm_up_in_samples_brings_the_batch_sizes_nearer():
    """The first updates are not small yet; a warm-up makes them so."""
    plain = distance(train([16] * 8), train([1] * 128))
    warmed = distance(train([16] * 8, warmup=256), train([1] * 128, warmup=256))
    assert warmed < plain / 2


def test_a_micro_batch_of_the_whole_batch_is_standard_adam():
    model = mlp()
    updates = [[x] for x in batches(10)]
    a = reference_run(model, updates, SMALL)
    b = reference_run(model, updates, SMALL, algorithm=reference.standard_adam)
    assert distance(a.w, b.w) == 0

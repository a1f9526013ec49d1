"""The scalars alone: laws that hold for every history of batch sizes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from invariant_adam.fold import scalars

KAPPAS = st.lists(st.floats(0.25, 64), min_size=1, max_size=20)
BETAS = st.tuples(st.floats(0, 0.9999), st.floats(0, 0.9999))


def history(kappas, expected, betas, g=3.0):
    """Fold the constant gradient `g` through updates; return counters and the raw moments."""
    counters, m, v = scalars.fresh(), 0.0, 0.0
    for kappa, hat in zip(kappas, expected, strict=True):
        free = counters["debias1"] == 1.0
        tally = scalars.begin_free() if free else scalars.begin(counters, tuple(b**hat for b in betas), hat)
        m = tally.keep[0] * m + tally.b[0] * kappa * g
        v = tally.keep[1] * v + tally.b[1] * kappa * g * g
        tally.kappa = kappa
        counters = scalars.close(counters, tally, tuple(b**kappa for b in betas))
    return counters, m, v


@given(KAPPAS, st.data(), BETAS)
def test_a_constant_gradient_is_returned_after_any_history(kappas, data, betas):
    expected = data.draw(st.lists(st.floats(0.25, 64), min_size=len(kappas), max_size=len(kappas)))
    counters, m, v = history(kappas, expected, betas)
    x, y = scalars.debias(counters)
    assert m / x == pytest.approx(3.0, rel=1e-9)
    assert v / y**2 == pytest.approx(9.0, rel=1e-9)


@given(KAPPAS, BETAS)
def test_declared_histories_debias_by_samples_alone(kappas, betas):
    """β′ = β^κ, so the product of all of them depends on the sum of κ only, not on how it was cut."""
    counters, _, _ = history(kappas, kappas, betas)
    assert counters["debias1"] == pytest.approx(betas[0] ** sum(kappas), rel=1e-6, abs=1e-300)
    assert counters["debias2"] == pytest.approx(betas[1] ** sum(kappas), rel=1e-6, abs=1e-300)


@given(KAPPAS, BETAS)
def test_expected_updates_owe_no_normaliser(kappas, betas):
    counters, _, _ = history(kappas, kappas, betas)
    if len(kappas) > 1:
        assert counters["norm1"] == pytest.approx(1.0, rel=1e-12)
        assert counters["norm2"] == pytest.approx(1.0, rel=1e-12)


@given(st.integers(1, 50), BETAS)
def test_updates_of_one_micro_batch_count_as_adam_does(steps, betas):
    counters, _, _ = history([1.0] * steps, [1.0] * steps, betas)
    adam = scalars.after_adam(betas, steps)
    for key in ("debias1", "debias2", "noise"):
        assert counters[key] == pytest.approx(adam[key], rel=1e-6, abs=1e-300)


@given(KAPPAS, BETAS)
def test_the_noise_left_is_between_all_of_it_and_an_equal_average(kappas, betas):
    counters, _, _ = history(kappas, kappas, betas)
    left = counters["noise"] / (1 - counters["debias1"]) ** 2
    assert 1 / sum(kappas) <= left * (1 + 1e-6)
    assert left <= 1 / min(kappas) * (1 + 1e-6)

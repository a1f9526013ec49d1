import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from invariant_adam.scaling import RULES, Hyperparameters, scale

ADAM = ("linear", "exponential", "square_root")
SMALL = {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.1}


def decay_factor(h: Hyperparameters) -> float:
    return 1 - h.lr * h.weight_decay


@pytest.mark.parametrize(
    ("rule", "lr", "beta1", "beta2", "factor"),
    [
        ("linear", 4e-3, 0.6, 0.996, 1 - 4 * 1e-4),
        ("exponential", 4e-3, 0.9**4, 0.999**4, (1 - 1e-4) ** 4),
        ("long_momentum", 4e-3, 0.9 ** (4**0.25), 0.999**4, (1 - 1e-4) ** 4),
        ("square_root", 2e-3, 0.6, 0.996, 1 - 2 * 1e-4),
        ("sgd", 4e-3, 0.9, 0.999, 1 - 4 * 1e-4),
    ],
)
def test_each_rule_is_its_row_of_the_table(rule, lr, beta1, beta2, factor):
    h = scale(**SMALL, from_batch=32, to_batch=128, rule=rule)
    assert h.lr == pytest.approx(lr, rel=1e-14)
    assert h.betas == pytest.approx((beta1, beta2), rel=1e-14)
    assert decay_factor(h) == pytest.approx(factor, rel=1e-14)


@pytest.mark.parametrize("rule", RULES)
def test_the_same_batch_size_changes_nothing(rule):
    h = scale(**SMALL, from_batch=7, to_batch=7, rule=rule)
    assert (h.lr, *h.betas, h.weight_decay) == pytest.approx((1e-3, 0.9, 0.999, 0.1), rel=1e-12)


lrs = st.floats(1e-6, 1e-1)
betas = st.tuples(st.floats(0.5, 0.9999), st.floats(0.5, 0.9999))
decays = st.floats(0, 1)
batches = st.integers(1, 10_000)


@given(st.sampled_from(sorted(RULES)), lrs, betas, decays, batches, batches)
def test_scaling_there_and_back_is_nothing(rule, lr, betas, decay, a, b):
    if b > a and RULES[rule].needs_small and b / a * (1 - min(betas)) >= 0.99:
        b = a  # not valid: the next tests cover the refusal
    there = scale(lr, betas, decay, from_batch=a, to_batch=b, rule=rule)
    if not there.lr * there.weight_decay < 0.99 or min(there.betas) < 1e-6:
        return  # all of a weight or of an average gone in one update leaves nothing to come back from
    back = scale(*there, from_batch=b, to_batch=a, rule=rule)
    assert back.lr == pytest.approx(lr, rel=1e-9)
    assert back.betas == pytest.approx(betas, rel=1e-9)
    assert decay_factor(back) == pytest.approx(1 - lr * decay, rel=1e-9)


@given(lrs, betas, decays, batches, batches, batches)
def test_the_exponential_rule_composes(lr, betas, decay, a, b, c):
    direct = scale(lr, betas, decay, from_batch=a, to_batch=c)
    if direct.lr * direct.weight_decay >= 0.99:
        return
    half = scale(lr, betas, decay, from_batch=a, to_batch=b)
    if half.lr * half.weight_decay >= 0.99 or min(half.betas) < 1e-6:
        return
    twice = scale(*half, from_batch=b, to_batch=c)
    assert twice.lr == pytest.approx(direct.lr, rel=1e-9)
    assert twice.betas == pytest.approx(direct.betas, rel=1e-6, abs=1e-12)


@given(betas, st.floats(1, 200))
def test_the_exponential_rule_forgets_the_same_per_sample(betas, rho):
    h = scale(1e-3, betas, from_batch=1, to_batch=rho)
    for new, old in zip(h.betas, betas, strict=True):
        assert new ** (1 / rho) == pytest.approx(old, rel=1e-9)


def test_linear_and_exponential_agree_to_first_order():
    gaps = []
    for gamma in (1e-2, 1e-3, 1e-4):
        linear, exponential = (
            scale(gamma, (1 - gamma, 1 - gamma), 0.5, from_batch=1, to_batch=8, rule=rule)
            for rule in ("linear", "exponential")
        )
        gaps.append(abs(linear.betas[0] - exponential.betas[0]))
        assert abs(decay_factor(linear) - decay_factor(exponential)) < 10 * gamma**2
    assert gaps[0] / gaps[1] == pytest.approx(100, rel=0.1)
    assert gaps[1] / gaps[2] == pytest.approx(100, rel=0.1)


@pytest.mark.parametrize("rule", ["linear", "square_root"])
def test_an_average_that_would_forget_everything_is_refused_with_its_remedy(rule):
    text = f'rule="{rule}" needs rho*(1-beta1) < 1, got 1.6 at batch size 1024 (tuned at 64); use rule="exponential"'
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        scale(1e-3, (0.9, 0.999), from_batch=64, to_batch=1024, rule=rule)


def test_the_second_beta_is_named_too():
    with pytest.raises(ValueError, match=r"rho\*\(1-beta2\) < 1, got 2 at batch size 20"):
        scale(1e-3, (0.99, 0.9), from_batch=1, to_batch=20, rule="linear")


@pytest.mark.parametrize("rho", [10, 1e3, 1e6])
def test_the_exponential_rule_is_valid_at_any_batch_size(rho):
    h = scale(1e-4, (0.9, 0.999), 0.1, from_batch=1, to_batch=rho)
    assert all(0 <= beta < 1 for beta in h.betas)
    assert 0 <= decay_factor(h) <= 1


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"rule": "cubic"},
            "rule must be one of 'linear', 'exponential', 'square_root', 'sgd', 'long_momentum', got 'cubic'",
        ),
        ({"from_batch": 0}, "from_batch must be a positive number of samples, got 0"),
        ({"to_batch": math.inf}, "to_batch must be a positive number of samples, got inf"),
        ({"to_batch": math.nan}, "to_batch must be a positive number of samples, got nan"),
        ({"lr": -1e-3}, "lr must be a finite number of at least 0, got -0.001"),
        ({"betas": (0.9, 1.0)}, "beta2 must be in [0, 1), got betas=(0.9, 1.0)"),
        ({"betas": (0.9,)}, "betas must be two numbers, got (0.9,)"),
        ({"weight_decay": -0.1}, "weight_decay must be a finite number of at least 0, got -0.1"),
        ({"lr": 2.0, "weight_decay": 0.5}, "lr*weight_decay must be below 1, got 2*0.5 = 1"),
    ],
)
def test_nonsense_is_refused_by_name(change, text):
    with pytest.raises(ValueError, match="^" + re.escape(text)):
        scale(**(SMALL | {"from_batch": 8, "to_batch": 16} | change))


def test_no_learning_rate_keeps_the_decay():
    assert scale(0.0, weight_decay=0.1, from_batch=1, to_batch=4).weight_decay == 0.1


@pytest.mark.parametrize("rule", ADAM)
def test_no_decay_stays_none(rule):
    assert scale(1e-3, from_batch=1, to_batch=4, rule=rule).weight_decay == 0


@pytest.mark.parametrize("rule", ["linear", "square_root", "sgd"])
def test_a_decay_that_would_turn_the_weights_around_is_refused(rule):
    with pytest.raises(ValueError, match="turns them around"):
        scale(0.1, (0.99999, 0.99999), 9.0, from_batch=1, to_batch=400, rule=rule)


@given(st.floats(0.01, 1), st.sampled_from([0.98, 1.02]))
def test_an_average_of_gradients_is_stable_up_to_the_bound_that_long_momentum_is_made_for(gamma, part):
    """w' = w - s*m, m' = (1-gamma)*m + gamma*h*w: stable for s*h < 2*(2-gamma)/gamma."""
    step = part * 2 * (2 - gamma) / gamma
    # The roots of z^2 - (2 - gamma - gamma*s*h)*z + (1 - gamma); the bound is where one of them is -1.
    b = 2 - gamma - gamma * step
    root = (abs(b) + math.sqrt(max(0.0, b * b - 4 * (1 - gamma)))) / 2
    assert (root < 1) == (part < 1)


def test_long_momentum_allows_larger_steps_at_larger_batches():
    def largest(rule, rho):
        gamma = 1 - scale(1.0, (0.9, 0.99), from_batch=1, to_batch=rho, rule=rule).betas[0]
        return 2 * (2 - gamma) / gamma / rho

    assert largest("exponential", 1) == largest("long_momentum", 1)
    assert largest("long_momentum", 16) > 6 * largest("exponential", 16)

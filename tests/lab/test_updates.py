import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lab_runs import CPU, M, run, small_source

import invariant_adam as ia
from invariant_adam_lab.training.runs import RULES, check
from invariant_adam_lab.training.train import make_model
from invariant_adam_lab.training.updates import (
    Epoch,
    ScaledOptimizer,
    Scored,
    TrainingStep,
    accuracy,
    captured,
    loss_of,
)


def test_the_loss_is_the_papers():
    source = small_source("vit")
    x, y = source.epoch(0, 0, 0, 80)
    model = make_model(run("vit"), source)
    inputs, target = source.inputs((x[:20], y[:20]))
    wanted = (x[:20].double() / 255 - source.mean) / source.std
    assert torch.allclose(inputs.double(), wanted, atol=1e-6)
    logits = model(inputs)
    loss = loss_of(logits, target, 0.1)
    log = logits.double().log_softmax(1)
    by_formula = -(0.9 * log[torch.arange(20), y[:20]] + 0.1 * log.mean(1)).mean()
    assert loss.item() == pytest.approx(by_formula.item(), rel=1e-5)
    assert accuracy(logits, target).item() == (logits.argmax(1) == y[:20]).double().mean().item()


def test_a_captured_update_has_made_its_first_three():
    """On a CPU nothing is captured, but the first updates are made in the same place, each prepared for its samples."""
    source = small_source("resnet-ln")
    wanted = run(batch=10)
    model = make_model(wanted, source)
    optimizer = ScaledOptimizer(wanted, model, CPU)
    epoch = Epoch(source, wanted, 80)
    epoch.begin(0)
    prepared: list[int] = []
    update = TrainingStep(wanted, Scored(model, 0.0), optimizer, source, epoch, "loop")
    captured(update, prepared.append, 160)
    assert prepared == [160, 170, 180]
    assert epoch.place.item() == 30
    assert optimizer.inner.samples_seen == 30


def steps(algorithm: str, rule: str, legs: list[tuple[int, int]], gradient, device=CPU) -> list[torch.Tensor]:
    """Return what each update moves the weights by, over its learning rate and, for AdamA, over 1/√(mean of 1/κ) in v.

    Args:
        algorithm: of the run.
        rule: of the run.
        legs: micro-batches of an update, and updates, in the order of a run that is tuned for 32 micro-batches.
        gradient: micro-batches seen before an update -> the gradient of all of its micro-batches.
        device: where.
    """
    model = torch.nn.Linear(3, 1, bias=False, dtype=torch.float64, device=device)
    weight, size = model.weight, M * legs[0][0]
    optimizer = ScaledOptimizer(run("vit", algorithm, rule, size, max_batch_size=32 * M), model, device)
    found, seen, sums = [], 0, [0.0, 0.0]  # of the weights in v, and of 1/κ by them, for rules with γ′ = ργ
    for kappa, updates in legs:
        optimizer.resize(M * kappa)
        optimizer.set_lr(1.0)
        backwards = kappa if isinstance(optimizer.inner, ia.InvariantAdam) else 1
        for _ in range(updates):
            before = weight.detach().clone()
            optimizer.inner.zero_grad()
            for _ in range(backwards):
                (weight * gradient(seen).to(device)).sum().backward()
            optimizer.inner.step()
            seen += kappa
            gamma = 0.001 * kappa / 32
            sums = [(1 - gamma) * total + gamma * new for total, new in zip(sums, (1.0, 1 / kappa), strict=True)]
            unit = math.sqrt(sums[0] / sums[1]) if algorithm == "adama" else 1.0
            found.append((before - weight.detach()).cpu() / optimizer.lr() / unit)
    return found


CONSTANT = torch.tensor([[100.0, -300.0, 900.0]], dtype=torch.float64)  # far above ε
LEGS = st.lists(st.tuples(st.sampled_from([1, 2, 4, 32]), st.integers(1, 40)), min_size=2, max_size=4)


@pytest.mark.parametrize(
    ("algorithm", "rule"), [(name, rule) for name in RULES if name != "micro" for rule in RULES[name]]
)
@settings(max_examples=8)
@given(legs=LEGS)
def test_a_constant_gradient_moves_the_weights_by_the_learning_rate_at_any_batch_sizes(algorithm, rule, legs):
    """m̂ is g and v̂ is g², before, at and after every change of the batch size."""
    for step in steps(algorithm, rule, legs, lambda seen: CONSTANT):
        assert torch.allclose(step, CONSTANT.sign(), rtol=0, atol=2e-6)  # torch's count of updates is a float32


@pytest.mark.parametrize("kappa", [1, 4, 16])
@pytest.mark.parametrize(
    ("algorithm", "rule", "power"),
    [
        ("standard", "square_root", 0.5),
        ("standard", "linear", 1),
        ("standard", "none", 0),
        ("invariant", "long_momentum", 1),
    ],
)
def test_hyperparameters_that_are_tuned_at_a_micro_batch_hold_there(algorithm, rule, power, kappa):
    """Standard Adam keeps its betas at every batch size; the rules of invariant Adam are the library's."""
    model = torch.nn.Linear(3, 1)
    wanted = run("vit", algorithm, rule, kappa * M, max_batch_size=16 * M, tuned=M)
    optimizer = ScaledOptimizer(check(wanted), model, CPU)
    optimizer.set_lr(0.5)
    assert optimizer.lr(0.5) == pytest.approx(0.5e-3 * kappa**power)
    (group,) = optimizer.inner.param_groups
    assert group["betas"] == (0.9, 0.999)
    assert group["lr"] == pytest.approx(0.5e-3 * (kappa**power if algorithm == "standard" else 1))
    assert getattr(optimizer.inner, "tuned_batch_size", M) == M


@pytest.mark.parametrize("kappa", [1, 4, 32])
def test_adamas_epsilon_is_beside_the_root_of_its_own_v(kappa):
    """η g/(√(g²/κ) + ε), where ε is no smaller than that root."""
    tiny = torch.tensor([[1e-9, -1e-8, 1e-7]], dtype=torch.float64)
    for step in steps("adama", "linear", [(kappa, 3)], lambda seen: tiny):
        want = tiny / (tiny.abs() / math.sqrt(kappa) + 1e-8) / math.sqrt(kappa)
        assert torch.allclose(step, want, rtol=1e-5, atol=0)


@settings(max_examples=25)
@given(legs=LEGS)
def test_where_micro_batches_agree_standard_adam_is_invariant_adam_at_any_batch_sizes(legs):
    """So what came before a change of the batch size weighs as much after it as it should."""

    def gradient(seen: int) -> torch.Tensor:
        return 300.0 * torch.tensor([[1.0, math.cos(seen), 2 + math.sin(seen / 7)]], dtype=torch.float64)

    standard, invariant = (steps(name, "exponential", legs, gradient) for name in ("standard", "invariant"))
    for one, other in zip(standard, invariant, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=2e-6)


@pytest.mark.gpu
def test_one_micro_batch_is_torchs_adam_on_a_gpu():
    device = torch.device("cuda")
    source = small_source("vit", device)
    wanted = run("vit", "invariant", "linear", M)
    model = make_model(wanted, source)
    assert isinstance(ScaledOptimizer(wanted, model, device).inner, torch.optim.Adam)


@pytest.mark.gpu
@pytest.mark.parametrize(("algorithm", "rule"), [("standard", "square_root"), ("halflife", "none")])
def test_the_count_of_updates_takes_fractions_on_a_gpu_too(algorithm, rule):
    legs = [(1, 100), (32, 20), (1, 50)]
    for step in steps(algorithm, rule, legs, lambda seen: CONSTANT, torch.device("cuda")):
        assert torch.allclose(step, CONSTANT.sign(), rtol=0, atol=1e-5)  # the learning rate is a float32 there

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lab_runs import MAX, M, run

import invariant_adam as ia
from invariant_adam_lab.training.runs import BETAS, RECIPES, check
from invariant_adam_lab.training.updates import loss_of


def test_the_recipe_is_the_papers():
    """Crop always; what else is done to images, and the batch sizes, of which the last is B_max."""
    recipe = {
        name: (recipe.dataset, recipe.batch_sizes, recipe.micro_batch_size, recipe.flip, recipe.auto, recipe.smoothing)
        for name, recipe in RECIPES.items()
    }
    sizes = (25, 50, 100, 200, 400, 800)
    assert recipe == {
        "resnet-bn": ("cifar10", sizes, 25, True, False, 0.0),
        "resnet-ln": ("cifar10", sizes, 25, True, False, 0.0),
        "vit": ("cifar10", sizes[:5], 25, False, True, 0.1),
        "gpt": ("tinyshakespeare", (8, 16, 32, 64, 128, 256), 8, True, False, 0.0),  # a text has no flips
        "gpt2": ("text", (8, 32, 128, 256), 8, True, False, 0.0),
    }
    models = {name: (recipe.model, recipe.options) for name, recipe in RECIPES.items()}
    assert models == {
        "resnet-bn": ("resnet18", {}),
        "resnet-ln": ("resnet18", {"norm": "layer"}),
        "vit": ("vit-cifar", {}),
        "gpt": ("gpt-char", {}),
        "gpt2": ("gpt2-124m", {"context": 1024, "tied": True}),
    }
    assert {name for name, recipe in RECIPES.items() if recipe.betas != BETAS or recipe.weight_decay} == {"gpt2"}
    assert BETAS == (0.9, 0.999)


def test_the_least_that_the_vits_training_loss_can_be():
    """The entropy of the smoothed labels: 0.91 for the class of ten that it is, 0.01 for each of the others."""
    least = -0.91 * math.log(0.91) - 9 * 0.01 * math.log(0.01)
    assert round(least, 4) == 0.5003  # as docs/lab.md has it
    best = torch.full((10, 10), 0.01, dtype=torch.float64).fill_diagonal_(0.91).log()
    assert loss_of(best, torch.arange(10), RECIPES["vit"].smoothing).item() == pytest.approx(least, rel=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "alexnet"}, "model must be one of"),
        ({"algorithm": "lion"}, "algorithm must be one of"),
        ({"rule": "cubic"}, "rule of invariant must be one of"),
        ({"batch_size": 15}, "must divide max_batch_size=20"),
        ({"micro_batch_size": 3}, "multiple of micro_batch_size=3"),
        ({"algorithm": "micro"}, "micro Adam's batch"),
        ({"lr0": 0.0}, "lr0 must be"),
        ({"epochs": 0}, "epochs must be at least 1"),
        ({"ramp": "5 to 20"}, "ramp must be two batch sizes"),
        ({"ramp": "5-20"}, "the first of them 20"),
    ],
)
def test_settings_are_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        check(run()._replace(**change))


@settings(max_examples=30, deadline=None)
@given(kappa=st.sampled_from([1, 2, 4, 8]), grow=st.floats(0.02, 2.0), epochs=st.integers(1, 3))
def test_the_updates_of_a_run_are_those_of_batch_growth(kappa, grow, epochs):
    """Mini-batches cut by `BatchGrowth`, whose optimizer has seen what the run has seen."""
    wanted = run(batch=M * kappa, max_batch_size=8 * M, grow=grow, epochs=epochs)
    optimizer = ia.InvariantAdam([torch.nn.Parameter(torch.zeros(1))], micro_batch_size=M)
    growth, weight = ia.BatchGrowth(optimizer, ratio=grow), optimizer.param_groups[0]["params"][0]
    for epoch in range(epochs):
        sizes = []
        for batch in torch.arange(16.0 * M).split(M * kappa):
            for part in growth.split(batch):
                for micro in part.split(M):
                    (weight * micro).mean().backward()
                optimizer.step()
                sizes.append(len(part))
        assert wanted.update_sizes(epoch, 16 * M) == sizes


def test_growth_and_order_are_refused_by_name():
    with pytest.raises(ValueError, match="grow must be a finite number, 0 or above, got -1"):
        check(run(grow=-1))
    with pytest.raises(ValueError, match=r"order must be 0 for batch size 20, got 3: .* one micro-batch of 5"):
        check(run(order=3))
    with pytest.raises(ValueError, match="order must be at least 0, got -1"):
        check(run(batch=M, order=-1))
    assert check(run(batch=M, order=3, grow=0.1)).name.endswith("-g0.1-o3-M5")


def test_a_run_that_is_tuned_at_a_batch_size_has_rules_of_its_own():
    """Those of a user who moves from AdamW; the paper's runs have theirs."""
    tuned = check(run("resnet-ln", "standard", "none", MAX, tuned=M))
    assert (tuned.anchor, run().anchor) == (M, MAX)
    assert tuned.name.endswith("-tuned5-M5")
    assert check(run(rule="long_momentum", tuned=M)).anchor == M
    with pytest.raises(ValueError, match="algorithm must be one of invariant, standard, got 'halflife'"):
        check(run("resnet-ln", "halflife", "none", tuned=M))
    with pytest.raises(ValueError, match="standard must be one of square_root, linear, none, got 'exponential'"):
        check(run("resnet-ln", "standard", "exponential", tuned=M))
    with pytest.raises(ValueError, match="rule of invariant must be one of linear, exponential, got 'long_momentum'"):
        check(run(rule="long_momentum"))
    with pytest.raises(ValueError, match="tuned must be at least 0, got -1"):
        check(run(tuned=-1))

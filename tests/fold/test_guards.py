"""What would find no gradient refuses it, while an optimizer that folds in backward lives, and no longer."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import subprocess
import sys

import pytest
import torch
from problems import batches, loss, mlp
from torch import nn
from torch.nn.utils import clip_grad

from invariant_adam import InvariantAdam, one_pass


@pytest.mark.parametrize("function", ["clip_grad_norm_", "clip_grad_value_"])
def test_clipping_after_folding_is_refused(function):
    from torch.nn.utils import clip_grad

    model = mlp()
    opt = InvariantAdam(model.parameters())
    loss(model, batches(1)[0]).backward()
    for place in (torch.nn.utils, clip_grad):
        with pytest.raises(RuntimeError, match=r'max_micro_norm.*fold="call"'):
            getattr(place, function)(model.parameters(), 1.0)
    opt.step()
    other = mlp()
    loss(other, batches(1)[0]).backward()
    getattr(torch.nn.utils, function)(other.parameters(), 1e-3)  # those of other optimizers as ever
    assert all(p.grad.abs().max() <= 1e-3 for p in other.parameters())


def test_clipping_imported_by_name_is_refused():
    from torch.nn.utils import clip_grad_norm_

    model = mlp()
    opt = InvariantAdam(model.parameters())
    loss(model, batches(1)[0]).backward()
    with pytest.raises(RuntimeError, match="max_micro_norm"):
        clip_grad_norm_(model.parameters(), 1.0)
    opt.step()


def test_another_optimizer_on_folded_parameters_is_refused():
    model = nn.Linear(3, 2)
    opt = InvariantAdam(model.parameters())
    rival = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    with pytest.raises(RuntimeError, match=r"AdamW\.step\(\) would do nothing: parameter 0 of its group 0"):
        rival.step()
    opt.step()  # nothing is lost
    other = nn.Linear(3, 2)
    torch.optim.AdamW(other.parameters()).step()  # has nothing to do with it
    del opt
    model(torch.ones(1, 3)).sum().backward()
    before = model.weight.clone()
    rival.step()
    assert not torch.equal(model.weight, before)


def test_an_optimizer_around_this_one_is_none_of_its_rivals():
    class Around(torch.optim.Optimizer):
        def __init__(self, inner):
            super().__init__(inner.param_groups, {})
            self.inner = inner

        def step(self, closure=None):
            return self.inner.step(closure)

    model = nn.Linear(3, 2)
    around = Around(InvariantAdam(model.parameters()))
    model(torch.ones(1, 3)).sum().backward()
    around.step()
    assert around.inner.samples_seen == 1


def test_unscaling_folded_gradients_is_refused():
    model = nn.Linear(3, 2)
    scaler = torch.amp.GradScaler("cpu")
    opt = InvariantAdam(model.parameters())
    scaler.scale(model(torch.ones(1, 3)).sum()).backward()
    with pytest.raises(RuntimeError, match="GradScaler cannot work"):
        scaler.unscale_(opt)
    opt.abandon()
    torch.amp.GradScaler("cpu", enabled=False).unscale_(opt)
    called = InvariantAdam(model.parameters(), fold="call")
    scaler.scale(model(torch.ones(1, 3)).sum()).backward()
    scaler.unscale_(called)


def test_clipping_by_a_name_imported_before_is_refused():
    code = (
        "from torch.nn.utils import clip_grad_norm_, clip_grad_value_\n"
        "import torch, invariant_adam\n"
        "model = torch.nn.Linear(2, 2)\n"
        "opt = invariant_adam.InvariantAdam(model.parameters())\n"
        "model(torch.ones(1, 2)).sum().backward()\n"
        "for clip in (clip_grad_norm_, clip_grad_value_):\n"
        "    try: clip(model.parameters(), 1.0)\n"
        "    except RuntimeError as error: print('max_micro_norm' in str(error))\n"
        "other = torch.nn.Linear(2, 2)\n"
        "other(torch.ones(1, 2)).sum().backward()\n"
        "clip_grad_value_(other.parameters(), 0.5)\n"
        "print(other.bias.grad.tolist())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:3] == ["True", "True", "[0.5, 0.5]"]


PATCHED = (
    "import gc, torch, invariant_adam\n"
    "from torch.nn.utils import clip_grad\n"
    "from torch.optim import optimizer\n"
    "def inner():\n"
    "    clips = (clip_grad._clip_grads_with_norm_, clip_grad.clip_grad_value_)\n"
    "    cells = [cell.cell_contents for f in clips for cell in f.__closure__]\n"
    "    return [*cells, torch.amp.GradScaler.unscale_, *optimizer._global_optimizer_pre_hooks]\n"
    "torch_own = inner()\n"
    "model = torch.nn.Linear(2, 2)\n"
    "called = invariant_adam.InvariantAdam(model.parameters(), fold='call')\n"
    "print(inner() == torch_own)\n"
    "opts = [invariant_adam.InvariantAdam(torch.nn.Linear(2, 2).parameters()) for _ in range(2)]\n"
    "print(inner() == torch_own)\n"
    "opts.pop(); gc.collect()\n"
    "print(inner() == torch_own)\n"
    "opts.pop(); gc.collect()\n"
    "print(inner() == torch_own)\n"
    "print(len(optimizer._global_optimizer_pre_hooks))\n"
)


@pytest.mark.parametrize(("switch", "expected"), [("", "True False False True 0"), ("0", "True True True True 0")])
def test_torch_is_its_own_again_with_the_last_optimizer(switch, expected):
    environment = os.environ | {"INVARIANT_ADAM_GUARDS": switch}
    done = subprocess.run([sys.executable, "-c", PATCHED], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.split() == expected.split()


def test_a_copy_is_guarded_as_well():
    import copy

    model = nn.Linear(3, 2)
    twin_model, twin = copy.deepcopy((model, InvariantAdam(model.parameters())))
    twin_model(torch.ones(1, 3)).sum().backward()
    with pytest.raises(RuntimeError, match="max_micro_norm"):
        clip_grad.clip_grad_norm_(twin_model.parameters(), 1.0)
    twin.step()


def test_a_question_for_the_norm_is_answered_not_refused():
    """`clip_grad_norm_(..., inf)` is how trainers ask for a norm; NaN says that it is not known."""
    code = (
        "import torch, invariant_adam, warnings\n"
        "from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm\n"
        "model = torch.nn.Linear(2, 2)\n"
        "opt = invariant_adam.InvariantAdam(model.parameters())\n"
        "model(torch.ones(1, 2)).sum().backward()\n"
        "with warnings.catch_warnings(record=True) as told:\n"
        "    warnings.simplefilter('always')\n"
        "    norms = [clip_grad_norm_(model.parameters(), float('inf')) for _ in range(2)]\n"
        "    norms.append(clip_grad_norm_(model.parameters(), max_norm=torch.inf, norm_type=1.0))\n"
        "print([norm.item() for norm in norms], len(told), told[0].filename, 'NaN' in str(told[0].message))\n"
        "other = torch.nn.Linear(2, 2)\n"
        "other(torch.ones(1, 2)).sum().backward()\n"
        "print(clip_grad_norm_(other.parameters(), float('inf')).item() > 2.4)\n"
        "opt.step()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["[nan, nan, nan] 1 <string> True", "True"]


class TestMiniBatchOutsideOnePass:
    """A model that one_pass was opened on refuses to train on a mini-batch as if it were a micro-batch."""

    def known(self):
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        opt = InvariantAdam(model.parameters(), micro_batch_size=4)
        with one_pass(model, 4):
            model(torch.randn(8, 3)).square().mean().backward()
        opt.step()
        return model, opt

    def test_it_is_refused_before_anything_changes(self):
        model, opt = self.known()
        with pytest.raises(RuntimeError, match=r"got 32 samples.*micro_batch_size=4.*one_pass\(model, 4\)"):
            model(torch.randn(32, 3))
        assert opt.kappa == 0
        model(torch.randn(4, 3)).square().mean().backward()
        opt.step()
        assert opt.samples_seen == 12

    def test_what_may_be_right_passes(self):
        model, opt = self.known()
        with torch.no_grad():
            model(torch.randn(32, 3))
        model.eval()(torch.randn(32, 3))
        model.train()
        model(torch.randn(6, 4, 3))  # the batch is in another dimension
        model(torch.randn(6, 3))  # no multiple: tokens, say
        with opt.ragged(2):
            model(torch.randn(2, 3)).square().mean().backward()
        opt.step()
        del opt
        gc.collect()
        model(torch.randn(32, 3))  # whoever trains it now

    def test_a_watched_model_is_copied_and_pickled(self):
        model, _opt = self.known()
        pickle.loads(pickle.dumps(model))(torch.randn(32, 3))
        copy.deepcopy(model)(torch.randn(32, 3))

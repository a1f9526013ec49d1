"""`unwrap`, and the functions that take a trainer's wrapper for the optimizer inside."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import invariant_adam as ia


class Accelerated(torch.optim.Optimizer):
    """As accelerate does it: an optimizer that holds another, and forwards what torch's interface names."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    param_groups = property(lambda self: self.optimizer.param_groups)


def lightning(optimizer):
    """As lightning does it: a class made of the wrapper's and the optimizer's, with a copy of its attributes."""

    class Wrapper:
        def __init__(self):
            self.__dict__.update({name: value for name, value in vars(optimizer).items() if name != "queue"})
            self._inner = optimizer

        optimizer = property(lambda self: self._inner)

    return type("Lightning", (Wrapper, type(optimizer)), {})()


@pytest.fixture
def run():
    model = nn.Linear(3, 1)
    return model, ia.InvariantAdam(model.parameters(), lr=1.0, micro_batch_size=4)


@pytest.mark.parametrize("wrap", [lambda o: o, Accelerated, lightning, lambda o: Accelerated(Accelerated(o))])
def test_the_optimizer_inside_is_found_and_used(run, wrap):
    model, opt = run
    wrapped = wrap(opt)
    assert ia.unwrap(wrapped) is opt
    ia.SampleLambdaLR(wrapped, lambda samples: samples / 100)
    ema = ia.InvariantEMA(model, wrapped)
    x = torch.randn(8, 3)

    def update():
        with ia.one_pass(model, 4, into=wrapped):
            model(x).square().mean().backward()
        opt.step()

    ia.capture(wrapped, update)()
    assert opt.samples_seen == 32  # three updates of the capture and one more
    assert opt.param_groups[0]["lr"] == pytest.approx(0.28)  # the middle of the last update's samples
    ema.update_parameters(model)
    assert int(ema.samples) == 32


def test_what_is_no_invariant_adam_is_named(run):
    model, _ = run
    adamw = torch.optim.AdamW(model.parameters())
    with pytest.raises(TypeError, match=r"got AdamW$"):
        ia.unwrap(adamw)
    with pytest.raises(TypeError, match="got Accelerated around AdamW"):
        ia.unwrap(Accelerated(adamw))
    with pytest.raises(TypeError, match="got Linear"):
        ia.one_pass(model, 4, into=model)
    with pytest.raises(TypeError, match=r"SampleLambdaLR counts samples.*got AdamW; use torch's LambdaLR"):
        ia.SampleLambdaLR(adamw, lambda samples: 1.0)

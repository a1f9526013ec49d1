"""How other packages join in: sources of parameters, trusted wrappers, and squares taken during the context."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from invariant_adam.one_pass import UnsupportedUse, exchange, one_pass


class Wrapper(nn.parallel.DistributedDataParallel):
    def __init__(self, module):
        nn.Module.__init__(self)  # no process group
        self.module = module

    def forward(self, x):
        return self.module(x)


def backward(model, x):
    model(x).square().mean().backward()


def test_a_wrapper_is_refused_until_it_is_trusted():
    model, x = Wrapper(nn.Linear(3, 1)), torch.randn(8, 3)
    with pytest.raises(UnsupportedUse, match=r"distributed\.prepare\(model, opt\)"), one_pass(model, 2):
        pass
    exchange.trusted.add(model)
    with one_pass(model, 2):
        backward(model, x)
    assert model.module.weight.grad_sq.shape == (1, 3)


def test_a_sharded_model_is_refused_until_a_source_names_its_parameters(monkeypatch):
    monkeypatch.setattr(exchange, "sources", [])
    model = nn.Linear(3, 1)
    model._get_fsdp_state = None
    with pytest.raises(UnsupportedUse, match=r"fully_shard.*distributed\.prepare\(model, opt\)"), one_pass(model, 2):
        pass
    named = [("whole " + name, p) for name, p in model.named_parameters()]
    exchange.sources.append(lambda module: named if module is model else None)
    with one_pass(model, 2, check=False) as context:
        backward(model, torch.randn(8, 3))
        assert [entry.name for entry in context.facts.order] == ["whole weight", "whole bias"]
    assert model.bias.grad_kappa == 4


def test_squares_are_taken_once():
    model, x = nn.Linear(3, 1).double(), torch.randn(8, 3, dtype=torch.float64)
    with one_pass(model, 2):
        backward(model, x)
    want = model.weight.grad_sq
    del model.weight.grad_sq, model.weight.grad_kappa, model.bias.grad_sq, model.bias.grad_kappa
    model.zero_grad()
    assert exchange.Open.mini_batch is None
    assert not exchange.has_square(model.weight)
    with one_pass(model, 2):
        backward(model, x)
        mini_batch = exchange.Open.mini_batch
        assert (mini_batch.single, mini_batch.kappa, mini_batch.scale) == (False, 4.0, (1.0, 4.0))
        assert exchange.has_square(model.weight)
        torch.testing.assert_close(exchange.take_square(model.weight) * mini_batch.scale[1], want)
        assert not exchange.has_square(model.weight)
        with pytest.raises(UnsupportedUse, match=r"weight is used more than once.*before fully_shard"):
            exchange.take_square(model.weight)

"""What one pass remembers from one mini-batch to the next is asked for again as soon as anything differs."""

from __future__ import annotations

import copy

import pytest
import torch
from loop_oracle import assert_exact, error, loop
from torch import nn

import invariant_adam as ia
from invariant_adam.one_pass.mini_batch import MiniBatch


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 6), nn.LayerNorm(6), nn.Linear(6, 6)
        self.order = None

    def forward(self, x):
        x = self.norm(torch.relu(self.first(x)))
        return self.last(x if self.order is None else x[self.order])


def mean_square(model, batch):
    return model(*batch).square().mean()


@pytest.fixture
def looks(monkeypatch):
    """The operations whose input is looked at."""
    names, place = [], MiniBatch.place

    def noted(self, x, event, name, *rest):
        names.append(name)
        return place(self, x, event, name, *rest)

    monkeypatch.setattr(MiniBatch, "place", noted)
    return names


@pytest.fixture
def net():
    torch.manual_seed(0)
    net = Net().double()
    assert_exact(net, batch(8, 4), mean_square, 2)
    net.zero_grad()
    return net


def batch(*shape):
    return (torch.randn(*shape, 3, dtype=torch.float64),)


def test_a_second_mini_batch_is_not_looked_at_again(net, looks):
    assert_exact(net, batch(8, 4), mean_square, 2)
    assert looks == ["linear"]  # of the inputs, which are not differentiable


def test_nor_is_one_of_another_length(net, looks):
    assert_exact(net, batch(8, 5), mean_square, 2, check=False)
    assert looks == ["linear"]


@pytest.mark.parametrize("shape", [(8, 5), (12, 4), (7, 4), (2, 4), (16,)])
def test_other_shapes_are(net, shape):
    for _ in range(2):
        assert_exact(net, batch(*shape), mean_square, 2)
        assert_exact(net, batch(8, 4), mean_square, 2)


def test_the_batch_in_another_dimension_is(net):
    (x,) = batch(8, 4)
    assert_exact(net, (x.transpose(0, 1),), mean_square, 2, B=8, batch_dim=1, dims=1)
    assert_exact(net, (x,), mean_square, 2)


def test_rows_in_another_order_are(net):
    inputs = batch(8)
    want = loop(copy.deepcopy(net), inputs, mean_square, 2, 8)
    assert_exact(net, inputs, mean_square, 2)
    net.zero_grad()
    net.order = torch.randperm(8)
    with ia.one_pass(net, 2, check=False):
        mean_square(net, inputs).backward()
    for name, p in net.last.named_parameters():
        assert error(p.grad_sq, want[f"last.{name}"][1], 1e-9) < 1e-10


def test_another_micro_batch_size_is(net):
    for M in (4, 2, 1, 8, 2):
        assert_exact(net, batch(8, 4), mean_square, M)


def test_frozen_and_replaced_parameters_are(net):
    net.norm.weight.requires_grad_(False)
    assert_exact(net, batch(8, 4), mean_square, 2)
    net.norm.weight.requires_grad_(True)
    net.last.weight = nn.Parameter(torch.randn(6, 6, dtype=torch.float64))
    net.norm.bias.data = torch.randn(6, dtype=torch.float64)
    assert_exact(net, batch(8, 4), mean_square, 2)
    net.float()
    assert_exact(net, (torch.randn(8, 4, 3),), mean_square, 2, tol=1e-4)


def test_settings_are_not_remembered(net):
    net.norm.eps = 0.5
    assert_exact(net, batch(8, 4), mean_square, 2)


def test_an_optimizer_that_takes_pairs_as_they_are_made_may_come_and_go(net):
    twin, inputs = copy.deepcopy(net), [batch(8, 4) for _ in range(6)]
    ways = [{}, {"into": True}, {"into": True}, {}, {}, {"into": True}]
    for model in (net, twin):
        opt = ia.InvariantAdam(model.parameters(), lr=1e-2, micro_batch_size=2, tuned_batch_size=8)
        for each, way in zip(inputs, ways, strict=True):
            with ia.one_pass(model, 2, **({"into": opt} if way and model is net else {})):
                mean_square(model, each).backward()
            opt.step()
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)


def test_a_weight_in_channels_last_is_not_where_an_optimizer_takes_its_pairs(looks):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 5, 3)).double().to(memory_format=torch.channels_last)
    nets = [net, copy.deepcopy(net)]
    opts = [ia.InvariantAdam(n.parameters(), lr=0.01, micro_batch_size=2, tuned_batch_size=4) for n in nets]
    for _ in range(3):
        x = torch.randn(4, 3, 7, 7, dtype=torch.float64)
        looks.clear()
        with ia.one_pass(net, 2, into=opts[0]):
            net(x).square().mean().backward()
        for part in x.split(2):
            nets[1](part).square().mean().backward()
        for opt in opts:
            opt.step()
    assert looks == ["conv2d"]  # of the inputs, which are not differentiable
    for p, q in zip(*(n.parameters() for n in nets), strict=True):
        torch.testing.assert_close(p, q)


def test_a_loop_in_the_same_context_is_one_micro_batch(net):
    """A mini-batch of one micro-batch has no squares that could tell of its gradients."""
    opt = ia.InvariantAdam(net.parameters(), lr=1e-2, micro_batch_size=2, tuned_batch_size=8)
    twin = copy.deepcopy(net)
    judge = ia.InvariantAdam(twin.parameters(), lr=1e-2, micro_batch_size=2, tuned_batch_size=8)
    for size in (2, 8, 2):
        (x,) = batch(size, 4)
        with ia.one_pass(net, 2):
            mean_square(net, (x,)).backward()
        assert net.last.weight.grad is None  # folded in backward
        opt.step()
        for part in x.split(2):
            mean_square(twin, (part,)).backward()
        judge.step()
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        assert error(p, q, 1e-9) < 1e-9

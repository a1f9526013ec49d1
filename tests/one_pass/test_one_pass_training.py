"""One pass and the loop through the real optimizer: the same run."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from problems import distance, flat
from torch import nn

import invariant_adam as ia


def cnn():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.GELU(),
        nn.Conv2d(4, 6, 3, stride=2),
        nn.GroupNorm(2, 6),
        nn.Flatten(),
        nn.Linear(6 * 9, 5),
    )


class Text(nn.Module):
    """A transformer with a tied head."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.places = nn.Embedding(11, 8), nn.Parameter(torch.randn(6, 8) * 0.1)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, ids):
        return F.linear(self.block(self.table(ids) + self.places), self.table.weight)


def images(n, seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 1, 8, 8, generator=generator).to(dtype), torch.randint(5, (n,), generator=generator)


def texts(n, seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(11, (n, 6), generator=generator), torch.randint(11, (n, 6), generator=generator)


def loss(model, x, y):
    return F.cross_entropy(model(x).flatten(0, -2), y.flatten())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-6)], ids=str)
@pytest.mark.parametrize("fold", ["backward", "call"])
@pytest.mark.parametrize(("make", "data"), [(cnn, images), (Text, texts)], ids=["cnn", "text"])
@pytest.mark.parametrize("size", [12, 10])
def test_ten_updates_by_loop_and_by_one_pass_are_the_same(make, data, fold, dtype, tolerance, size):
    """Mini-batches of 12, and of 10 with a ragged last micro-batch of 2; micro-batches of 4.

    ε is above the rounding noise of float32: the bias of attention's keys has no gradient but that noise, which Adam
    would blow up to whole steps.
    """
    looped = make().to(dtype)
    passed = copy.deepcopy(looped)
    opts = [
        ia.InvariantAdam(m.parameters(), lr=1e-3, eps=1e-4, weight_decay=0.1, micro_batch_size=4, fold=fold)
        for m in (looped, passed)
    ]
    for update in range(10):
        x, y = data(size, update, dtype)
        for rows in torch.arange(size).split(4):
            with opts[0].ragged(len(rows)):
                loss(looped, x[rows], y[rows]).backward()
                if fold == "call":
                    opts[0].fold()
        opts[0].step()
        with ia.one_pass(passed, micro_batch_size=4):
            loss(passed, x, y).backward()
        opts[1].step()
    assert opts[0].samples_seen == opts[1].samples_seen == 10 * size
    assert distance(flat(passed.parameters()), flat(looped.parameters())) < tolerance
    for a, b in zip(looped.buffers(), passed.buffers(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_several_one_pass_mini_batches_make_one_update():
    model, twin = cnn().double(), cnn().double()
    opts = [ia.InvariantAdam(m.parameters(), lr=1e-3, micro_batch_size=4) for m in (model, twin)]
    x, y = images(16, 0, torch.float64)
    for m, opt, pieces in ((model, opts[0], 1), (twin, opts[1], 2)):
        for rows in torch.arange(16).split(16 // pieces):
            with ia.one_pass(m, micro_batch_size=4):
                loss(m, x[rows], y[rows]).backward()
        assert opt.kappa == 4
        opt.step()
    assert distance(flat(twin.parameters()), flat(model.parameters())) < 1e-12


def test_pairs_are_folded_during_backward():
    """With fold="backward" no parameter keeps a gradient or a square after its own hook."""
    model = cnn()
    opt = ia.InvariantAdam(model.parameters(), micro_batch_size=4)
    x, y = images(8, 0, torch.float32)
    with ia.one_pass(model, micro_batch_size=4):
        loss(model, x, y).backward()
        left = [p for p in model.parameters() if p.grad is not None or getattr(p, "grad_sq", None) is not None]
    assert not left
    assert opt.kappa == 2
    opt.step()


def test_a_micro_batch_of_the_whole_mini_batch_is_adamw():
    model, twin = cnn().double(), cnn().double()
    ours = ia.InvariantAdam(model.parameters(), lr=1e-3, weight_decay=0.1)
    theirs = torch.optim.AdamW(twin.parameters(), lr=1e-3, weight_decay=0.1)
    for update in range(5):
        x, y = images(8, update, torch.float64)
        with ia.one_pass(model, micro_batch_size=8):
            loss(model, x, y).backward()
        ours.step()
        loss(twin, x, y).backward()
        theirs.step()
        theirs.zero_grad()
    assert distance(flat(model.parameters()), flat(twin.parameters())) < 1e-10


def test_an_exception_inside_leaves_model_and_optimizer_as_they_were():
    model = cnn()
    opt = ia.InvariantAdam(model.parameters(), micro_batch_size=4)
    x, y = images(8, 0, torch.float32)

    def fail(logits, y):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), ia.one_pass(model, micro_batch_size=4):
        fail(model(x), y)
    assert opt.kappa == 0
    assert all(type(p) is nn.Parameter and p.grad is None for p in model.parameters())
    loss(model, x[:4], y[:4]).backward()  # the loop goes on as ever
    assert opt.kappa == 1
    opt.step()


@pytest.mark.parametrize("seed", range(4))
def test_a_relu_that_turns_on_rounding_is_not_taken_for_a_mistake(seed):
    """float32, batch norm, ReLU: the check of the first call must not refuse what is exact."""
    torch.manual_seed(seed)
    layers = [nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
    for _ in range(4):
        layers += [nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * 64, 5))
    x, y = images(8, seed, torch.float32)
    with ia.one_pass(model, micro_batch_size=4):
        loss(model, x, y).backward()
    assert all(p.dtype == p.grad.dtype == p.grad_sq.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("make", "data"), [(cnn, images), (Text, texts)], ids=["cnn", "text"])
def test_autocast_agrees_with_the_loop_under_autocast(make, data, device):
    model = make().to(device)
    x, y = (t.to(device) for t in data(12, 0, torch.float32))
    twin = copy.deepcopy(model)
    squares = {name: 0.0 for name, _ in model.named_parameters()}
    for rows in torch.arange(12).split(4):
        with torch.autocast(device, torch.bfloat16):
            value = loss(twin, x[rows], y[rows])
        grads = torch.autograd.grad(value, list(twin.parameters()))
        for name, g in zip(squares, grads, strict=True):
            squares[name] += g.float().square() / 3
    with ia.one_pass(model, micro_batch_size=4):
        with torch.autocast(device, torch.bfloat16):
            value = loss(model, x, y)
        value.backward()
    largest = max(s.max() for s in squares.values())
    for name, p in model.named_parameters():
        assert p.grad.dtype == torch.float32
        difference = (p.grad_sq - squares[name]).norm() / (squares[name].norm() + 1e-3 * largest)
        assert difference < 0.1, name


def test_a_failed_backward_in_one_pass_is_noticed():
    model = cnn()
    opt = ia.InvariantAdam(model.parameters(), micro_batch_size=4)
    x, y = images(8, 0, torch.float32)
    with ia.one_pass(model, micro_batch_size=4):
        loss(model, x, y).backward()
    opt.step()

    def fail(grad):
        raise MemoryError

    def half_a_backward():
        with ia.one_pass(model, micro_batch_size=4):
            hidden = []
            handle = model[2].register_forward_hook(lambda *args: hidden.append(args[-1]))
            value = loss(model, x, y)
            handle.remove()
            hidden[-1].register_hook(fail)
            value.backward()

    before = flat(model.parameters())
    with pytest.raises(MemoryError):
        half_a_backward()
    assert opt.kappa == 0  # small pairs wait for the end of their backward, so that none of this one was folded
    with pytest.raises(RuntimeError, match=r"step\(\) found no gradient"):
        opt.step()
    opt.abandon()
    assert torch.equal(flat(model.parameters()), before)
    with ia.one_pass(model, micro_batch_size=4):
        loss(model, x, y).backward()
    opt.step()
    assert opt.samples_seen == 16

"""`invariance_check`: it passes what is invariant, and names what is not, with the right cause."""

from __future__ import annotations

import json
import random
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import invariant_adam as ia
from invariant_adam.diagnostics.samples import draw

X = torch.randn(512, 6, generator=torch.Generator().manual_seed(0))
Y = X.sum(1).gt(0).long()


def net(layer=lambda: nn.LayerNorm(12)):
    return lambda: nn.Sequential(nn.Linear(6, 12), layer(), nn.GELU(), nn.Linear(12, 2))


def cross_entropy(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def check(make_model=None, loss=cross_entropy, data=(X, Y), **options):
    asked = {"batch_sizes": (8, 16), "lr": 1e-3, "samples": 256} | options
    return ia.invariance_check(make_model or net(), loss, data, **asked)


def kinds(result):
    return [cause.kind for cause in result.causes]


class Centred(nn.Module):
    def forward(self, x):
        return x - x.mean(0)


class Unseeded(nn.Module):
    """Dropout whose seed differs from run to run."""

    def forward(self, x):
        generator = torch.Generator()
        generator.seed()
        return x * torch.rand(x.shape, generator=generator).gt(0.2)


def contrastive(model, batch):
    z = F.normalize(model(batch[0]), dim=-1)
    return F.cross_entropy(z @ z.T, torch.arange(len(z)))


def test_a_net_with_layer_norm_passes():
    result = check()
    assert result.ok
    assert 0 < result.spread < result.limit
    assert 0 < result.floor < result.limit
    assert result.repeat == 0
    assert list(result.losses) == [8, 16]
    assert "INVARIANT: the batch size does not matter" in str(result)
    assert str(result) == str(check())


def test_batch_norm_in_a_loop_is_coupled_unless_it_is_meant():
    result = check(net(lambda: nn.BatchNorm1d(12)))
    assert not result.ok
    assert kinds(result) == ["coupled"]
    assert result.causes[0].where == "1"
    assert "Samples see each other in '1', BatchNorm1d" in str(result)
    meant = check(net(lambda: nn.BatchNorm1d(12)), coupled="micro-batch")
    assert meant.ok
    assert "You say that this is meant" in str(meant)


@pytest.mark.parametrize(
    ("model", "loss", "where"),
    [(net(Centred), cross_entropy, "1"), (net(), contrastive, "loss")],
    ids=["centred", "contrastive"],
)
def test_samples_that_see_each_other_are_named(model, loss, where):
    result = check(model, loss)
    assert not result.ok
    assert [(cause.kind, cause.where) for cause in result.causes] == [("coupled", where)]


def test_a_coupling_that_begins_at_zero_is_found():
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.centred = nn.Parameter(torch.zeros(())), Centred()

        def forward(self, x):
            return x + self.gate * self.centred(x)

    assert check(net(Gated)).causes[0].where == "1.centred"


def test_a_learning_rate_a_hundred_times_too_large_is_named():
    result = check(lr=0.1)
    assert kinds(result) == ["update too large"]
    assert "lr = 0.1 becomes 0.2 at B = 16" in result.causes[0].text
    assert "lower lr" in result.causes[0].remedy


def test_a_run_that_is_lost_is_told():
    result = check(lr=1e6, loss=lambda model, batch: model(batch[0]).square().mean())
    assert kinds(result) == ["update too large"]
    assert not result.ok
    assert json.loads(json.dumps(result.asdict(), allow_nan=False))["ok"] is False


def test_growing_in_is_a_remedy_where_it_is_left_out():
    result = check(net(), batch_sizes=(4, 64), lr=1e-2, grow=False, samples=512)
    assert kinds(result) == ["update too large"]
    assert "grow in (grow=True)" in result.causes[0].remedy


def test_dropout_with_seeds_of_its_own_is_not_deterministic():
    result = check(net(Unseeded))
    assert "not deterministic" in kinds(result)
    assert "'1' (Unseeded)" in str(result)
    assert result.repeat > 0


def test_dropout_from_torchs_generator_is_the_same_at_every_batch_size():
    result = check(net(lambda: nn.Dropout(0.2)))
    assert result.ok
    assert "draws random numbers" in str(result)


def test_a_model_that_is_made_with_other_weights_each_time_begins_with_the_same():
    count = iter(range(100))

    def make():
        torch.manual_seed(next(count))
        return net()()

    assert len({curve.losses[0] for curve in check(make).curves}) == 1
    assert check(net()()).ok  # a model is copied


def test_a_loss_that_is_not_positive_is_measured_too():
    result = check(loss=lambda model, batch: cross_entropy(model, batch) - 10)
    assert result.ok
    assert 0 < result.spread < 0.05


def test_a_sum_of_losses_and_tied_weights_pass():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(F.gelu(self.a(x)))

    result = check(Tied, lambda model, batch: (model(batch[0]) - batch[0]).square().sum())
    assert result.ok, str(result)


def test_nothing_of_the_user_is_changed():
    model = net(lambda: nn.Sequential(nn.BatchNorm1d(12), nn.Dropout(0.1)))()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    states = torch.get_rng_state(), random.getstate()
    check(model, progress=lambda done, total, what: None)
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_progress_is_told_and_ends_where_it_said(capsys):
    told = []
    result = check(progress=lambda *news: told.append(news))
    assert [done for done, _, _ in told] == sorted(done for done, _, _ in told)
    assert told[-1][0] == told[-1][1] == told[0][1]
    assert {"B = 8", "B = 16", "order floor", "the same run again"} == {what for _, _, what in told}
    assert result.samples[-1] == 256
    check(progress=True)
    assert "invariance check: B = 8" in capsys.readouterr().err


def test_it_plots(tmp_path, monkeypatch):
    result = check()
    figure = result.plot(tmp_path / "check.png")
    assert (tmp_path / "check.png").stat().st_size > 10_000
    lines = figure.axes[0].get_lines()
    assert [list(line.get_ydata()) for line in lines] == list(result.losses.values())
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ModuleNotFoundError, match="needs matplotlib; install it"):
        result.plot()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_sizes": (8,)}, "a size above micro_batch_size = 8"),
        ({"batch_sizes": (8, 20)}, "multiples of micro_batch_size = 8: 20 is not; use 16 or 24"),
        ({"batch_sizes": (0, 8)}, "batch_sizes must be numbers of samples"),
        ({"micro_batch_size": 0}, "micro_batch_size must be at least 1"),
        ({"samples": 208}, "samples=208 is too few to tell: .* from 224 samples"),
        ({"lr": 0.0}, "lr must be a finite number above 0"),
        ({"coupled": "batch"}, 'coupled must be None or "micro-batch"'),
        ({"tolerance": 0}, "tolerance must be above 0"),
        ({"data": (X, Y[:5])}, "as many samples each"),
        ({"data": (X[:5], Y[:5]), "batch_sizes": (8, 16)}, "data has 5 samples, and micro_batch_size is 8"),
        ({"fold": "call"}, "leave fold out"),
    ],
)
def test_what_cannot_be_checked_is_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        check(**options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"make_model": 3}, "make_model must be a function"),
        ({"make_model": lambda: 3}, "make_model must return a torch.nn.Module, got int"),
        ({"loss": lambda model, batch: model(batch[0])}, r"one number, got a tensor of shape \(8, 2\)"),
        ({"loss": lambda model, batch: 1.0}, "one number, got float"),
        ({"data": 3}, "data must be a tensor"),
    ],
)
def test_what_is_of_another_kind_is_refused_by_name(arguments, message):
    with pytest.raises(TypeError, match=message):
        check(**arguments)


def test_a_model_that_is_not_new_and_a_loss_that_is_detached_are_refused():
    model = net()()
    with pytest.raises(ValueError, match="returned the same model twice"):
        check(lambda: model)
    with pytest.raises(ValueError, match="calls backward"):
        check(loss=lambda model, batch: cross_entropy(model, batch).detach())


# ---------------------------------------------------------------- data


class Pairs(Dataset):
    def __len__(self):
        return len(X)

    def __getitem__(self, i):
        return {"x": X[i], "y": Y[i]}


class Stream(IterableDataset):
    def __iter__(self):
        return zip(X[:40], Y[:40], strict=True)


@pytest.mark.parametrize(
    ("data", "again"),
    [
        ((X, Y), 70),
        ([X, Y], 70),
        ({"x": X, "y": Y}, 70),
        (TensorDataset(X, Y), 70),
        (Pairs(), 70),
        (Stream(), 7),
        (DataLoader(TensorDataset(X, Y), batch_size=16, shuffle=True), 65),
        (DataLoader(TensorDataset(X, Y), batch_size=5), 65),
        (X, 3),
    ],
    ids=["tuple", "list", "dict", "tensors", "dataset", "stream", "shuffling loader", "small batches", "one tensor"],
)
def test_data_of_all_forms_become_micro_batches(data, again):
    torch.manual_seed(3)
    batches = draw(data, 8, again, seed=0)
    assert len(batches) == again
    first = [b if isinstance(b, torch.Tensor) else b["x"] if isinstance(b, dict) else b[0] for b in batches]
    assert all(x.shape == (8, 6) for x in first)
    rows = torch.cat(first[: min(again, 5)])
    assert len(rows.unique(dim=0)) == len(rows)  # no sample twice before all were seen
    if not isinstance(data, (torch.Tensor, DataLoader)) and not isinstance(batches[0], torch.Tensor):
        x, y = batches[1].values() if isinstance(batches[1], dict) else batches[1]
        assert torch.equal(x.sum(1).gt(0).long(), y)


def test_batches_of_other_lengths_are_cut_and_not_joined():
    class Padded:
        def __iter__(self):
            return iter([torch.zeros(10, 5), torch.zeros(10, 7), torch.zeros(8, 7)])

    assert [tuple(b.shape) for b in draw(Padded(), 4, 7, seed=0)] == [(4, 5)] * 2 + [(4, 7)] * 4 + [(4, 5)]


def test_data_that_can_be_read_once_must_suffice():
    with pytest.raises(ValueError, match="can be read only once and gave 2 micro-batches of the 5 needed"):
        draw((x for x in X[:16].split(8)), 8, 5, seed=0)


# ---------------------------------------------------------------- larger models


class GPT(nn.Module):
    def __init__(self, length=12, words=16, width=16):
        super().__init__()
        self.embed, self.places = nn.Embedding(words, width), nn.Parameter(0.02 * torch.randn(length, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, 32, 0.0, batch_first=True, norm_first=True) for _ in range(2)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length))

    def forward(self, x):
        h = self.embed(x) + self.places
        for layer in self.layers:
            h = layer(h, src_mask=self.mask, is_causal=True)
        return self.head(self.norm(h))


class ViT(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.patches, self.token = nn.Conv2d(1, width, 4, 4), nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(0.02 * torch.randn(1, 5, width))
        layer = nn.TransformerEncoderLayer(width, 2, 32, 0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        h = self.patches(x).flatten(2).mT
        h = torch.cat([self.token.expand(len(h), -1, -1), h], 1) + self.places
        return self.head(self.layers(h)[:, 0])


def text():
    generator = torch.Generator().manual_seed(0)
    moves = torch.softmax(3 * torch.randn(16, 16, generator=generator), -1)
    columns = [torch.randint(16, (512,), generator=generator)]
    for _ in range(12):
        columns.append(torch.multinomial(moves[columns[-1]], 1, generator=generator)[:, 0])
    return torch.stack(columns, 1)


def next_token(model, batch):
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


@pytest.mark.slow
@pytest.mark.parametrize("lr", [1e-3, 0.1])
def test_a_gpt_passes_and_fails_at_a_hundred_times_its_learning_rate(lr):
    result = check(GPT, next_token, text(), lr=lr, samples=1024, batch_sizes=(8, 32, 64))
    assert kinds(result) == ([] if lr < 0.1 else ["update too large"]), str(result)


@pytest.mark.slow
@pytest.mark.parametrize("lr", [3e-4, 3e-2])
def test_a_vit_passes_and_fails_at_a_hundred_times_its_learning_rate(lr):
    from invariant_adam_lab.demo import load_digits

    digits = load_digits()
    result = check(ViT, data=(digits.x, digits.y), lr=lr, samples=1024, batch_sizes=(8, 32, 64))
    assert kinds(result) == ([] if lr < 1e-3 else ["update too large"]), str(result)

"""What lets samples see each other is found and named: in layers, in functions, in the loss; and nothing else is."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from invariant_adam.diagnostics.coupling import draws, find_coupling, writes_state

X = torch.randn(16, 6, generator=torch.Generator().manual_seed(0))
Y = X.sum(1).gt(0).long()
BATCHES = [(X[:8], Y[:8]), (X[8:], Y[8:])]
TOKENS = torch.randint(12, (16, 17), generator=torch.Generator().manual_seed(1))


class Apply(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def net(layer):
    return nn.Sequential(nn.Linear(6, 12), layer, nn.GELU(), nn.Linear(12, 3))


def cross_entropy(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def find(model, loss=cross_entropy, batches=BATCHES):
    return [(found.kind, found.where) for found in find_coupling(model, loss, *batches, seed=0)]


APART = {
    "layer norm": nn.LayerNorm(12),
    "group norm": nn.GroupNorm(3, 12),
    "dropout": nn.Dropout(0.3),
    "batch norm in eval mode": nn.BatchNorm1d(12).eval(),
    "weight norm": nn.utils.parametrizations.weight_norm(nn.Linear(12, 12)),
    "sorted features": Apply(lambda x: x.sort(-1).values),
}


@pytest.mark.parametrize("layer", APART.values(), ids=APART.keys())
def test_layers_that_keep_samples_apart_pass(layer):
    assert find(net(layer)) == []


COUPLED = {
    "batch norm": nn.BatchNorm1d(12),
    "batch norm without statistics": nn.BatchNorm1d(12, affine=False, track_running_stats=False),
    "synchronised batch norm": nn.SyncBatchNorm(12),
    "F.batch_norm": Apply(lambda x: F.batch_norm(x, None, None, training=True)),
    "centred": Apply(lambda x: x - x.mean(0)),
    "softmax over samples": Apply(lambda x: x.softmax(0)),
    "top-k over samples": Apply(lambda x: x * (x >= x.topk(4, 0).values[-1:])),
    "cumulative": Apply(lambda x: x.cumsum(0)),
    "the next sample": Apply(lambda x: x + 0.1 * x.roll(1, 0)),
    "the opposite sample": Apply(lambda x: x + 0.1 * x.flip(0)),
    "in place": Apply(lambda x: x.clone().sub_(x.mean(0))),
}


@pytest.mark.parametrize("layer", COUPLED.values(), ids=COUPLED.keys())
def test_the_layer_that_couples_samples_is_named(layer):
    assert find(net(layer)) == [("layer", "1")]


def test_a_function_in_a_forward_is_named_by_its_module_and_not_by_the_layers_beside_it():
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(12, 12), nn.Linear(12, 12)

        def forward(self, x):
            h = self.a(x)
            return self.b(h - h.mean(0, keepdim=True))

    assert find(net(Inner())) == [("layer", "1")]
    assert find(nn.Sequential(Inner(), nn.Linear(12, 3)), batches=[(torch.cat([x, x], 1), y) for x, y in BATCHES]) == [
        ("layer", "0")
    ]


def contrastive(model, batch):
    z = F.normalize(model(batch[0]), dim=-1)
    return F.cross_entropy(z @ z.T * 5, torch.arange(len(z)))


def standardised(model, batch):
    z = model(batch[0])
    return F.cross_entropy((z - z.mean(0)) / z.std(0), batch[1])


def mixed(model, batch):
    return F.cross_entropy(model(0.7 * batch[0] + 0.3 * batch[0][torch.randperm(8)]), batch[1])


def similar(model, batch):
    z = model(batch[0])
    return (F.cosine_similarity(z[:, None], z[None], dim=-1) - torch.eye(8)).square().mean()


@pytest.mark.parametrize("loss", [contrastive, standardised, mixed, similar])
def test_a_loss_that_couples_samples_is_found(loss):
    assert find(net(nn.LayerNorm(12)), loss) == [("loss", "")]


def test_both_a_layer_and_a_loss_are_found():
    assert find(net(nn.BatchNorm1d(12)), contrastive) == [("layer", "1"), ("loss", "")]


def ranked(model, batch):
    scores = model(batch[0])[:, 0]
    return F.softplus(scores[:, None] - scores).mean()


def weighted(model, batch):
    w = 1.0 + batch[1]
    return (w * (model(batch[0])[:, 0] - batch[0][:, 0]).square()).sum() / w.sum()


@pytest.mark.parametrize(
    ("loss", "kinds"),
    [
        (lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), []),
        (lambda model, batch: cross_entropy(model, batch) / 7, []),
        (lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], weight=torch.tensor([1.0, 3, 2])), ["factor"]),
        (lambda model, batch: F.mse_loss(model(batch[0])[:, 0], batch[0][:, 0]).sqrt(), ["factor"]),
        (weighted, ["factor"]),
        (ranked, ["loss"]),
    ],
    ids=["sum", "divided", "class weights", "root of a mean", "weights", "pairs"],
)
def test_a_common_factor_is_told_from_a_loss_over_pairs(loss, kinds):
    assert [kind for kind, _ in find(net(nn.LayerNorm(12)), loss)] == kinds
    if loss in (weighted, ranked):  # one number per sample is always a multiple of another
        assert [kind for kind, _ in find(nn.Linear(6, 1), loss)] == kinds


class Tokens(nn.Module):
    """Attention with the samples first or second, and as many places as samples."""

    def __init__(self, first=True, across=False):
        super().__init__()
        self.first, self.across = first, across
        self.embed, self.places = nn.Embedding(12, 8), nn.Embedding(16, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=first ^ across)
        self.head = nn.Linear(8, 12)

    def forward(self, x):
        h = self.embed(x) + self.places(torch.arange(x.shape[1]))
        return self.head(self.layer(h)) if self.first else self.head(self.layer(h.transpose(0, 1))).transpose(0, 1)


def next_token(model, batch):
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


@pytest.mark.parametrize("size", [8, 16])
@pytest.mark.parametrize("first", [True, False])
def test_sequences_pass_wherever_their_samples_are(first, size):
    assert find(Tokens(first), next_token, [TOKENS[:size], TOKENS[-size:].flip(1)]) == []


def test_attention_over_samples_is_found():
    assert find(Tokens(across=True), next_token, list(TOKENS.split(8))) == [("layer", "layer.self_attn")]


def test_what_is_random_without_a_seed_is_named():
    def unseeded(x):
        generator = torch.Generator()
        generator.seed()
        return x * torch.rand(x.shape, generator=generator)

    assert find(net(Apply(unseeded))) == [("random", "1")]


def test_what_is_random_now_and_then_is_not_taken_for_a_coupling():
    import random

    own = random.Random(0)
    skips = Apply(lambda x: x + x.sin() if own.random() > 0.3 else x)
    assert find(net(skips)) == [("random", "1")]
    assert set(find(net(nn.Sequential(skips, nn.BatchNorm1d(12))))) == {("random", "1.0"), ("layer", "1.1")}


def test_a_layer_that_is_left_out_at_random_is_named():
    import random

    class Skipped(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.random = nn.Linear(12, 12), random.Random(0)

        def forward(self, x):
            return x + self.layer(x) if self.random.random() > 0.3 else x

    assert find(net(Skipped())) == [("random", "1")]


def test_a_small_part_of_the_loss_over_all_samples_is_found():
    def balanced(model, batch):
        z = model(batch[0])
        return F.cross_entropy(z, batch[1]) + 0.1 * z.softmax(-1).mean(0).square().sum()

    assert find(net(nn.LayerNorm(12)), balanced) == [("loss", "")]
    two = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 2))  # gradients of two classes lie on a line
    assert find(two, balanced) == [("loss", "")]


def test_the_model_is_left_as_it_was():
    model = net(nn.Sequential(nn.BatchNorm1d(12), nn.Dropout(0.5).eval()))
    before = {name: t.clone() for name, t in model.state_dict().items()}
    state = torch.get_rng_state()
    find(model)
    assert writes_state(model, cross_entropy, BATCHES[0], 0) == [
        "1.0.running_mean",
        "1.0.running_var",
        "1.0.num_batches_tracked",
    ]
    assert not draws(model, cross_entropy, BATCHES[0], 0)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    assert model.training
    assert not model[1][1].training
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())

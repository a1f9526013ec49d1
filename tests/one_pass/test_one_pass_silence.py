"""Ways in which one pass could be wrong without a word: each is exact or refused."""

from __future__ import annotations

import copy
import random
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
import torch
from loop_oracle import assert_exact, error, loop
from torch import nn
from torch.utils.checkpoint import checkpoint

import invariant_adam as ia
from invariant_adam.kernels.gemm_square import gemm_square
from invariant_adam.one_pass.verify import probe
from invariant_adam_lab.bench.memory import growth
from invariant_adam_lab.models import build


def loss(model, batch):
    out = model(*batch)
    return out if out.ndim == 0 else out.flatten(1).sin().sum(1).mean()


def exact_or_refused(model, batches, M, **options):
    """Run one pass over the batches in turn; the last must equal the loop, or be refused. Returns whether it ran."""
    for batch in batches[:-1]:
        with ia.one_pass(model, M, **options):
            loss(model, batch).backward()
        model.zero_grad()
        for p in model.parameters():
            p.__dict__.pop("grad_sq", None)
    batch = batches[-1]
    want = loop(copy.deepcopy(model), batch, loss, M, len(batch[0]))
    try:
        with ia.one_pass(model, M, **options):
            loss(model, batch).backward()
    except ia.UnsupportedUse:
        return False
    for name, p in model.named_parameters():
        if name in want:
            floor = max(s.abs().max().item() for _, s in want.values()) * 1e-6
            assert error(p.grad_sq, want[name][1], floor) < 1e-8, name
            assert error(p.grad, want[name][0], floor) < 1e-8, name
    return True


def rows(b, *shape, seed=0):
    return torch.randn(b, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("R", [2, 3, 4, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_squares_of_what_cancels_are_not_negative(R, dtype):
    """A constant input in front of a batch norm: the rows' gradients sum to zero in every group."""
    G = torch.randn(64, R, 16, generator=torch.Generator().manual_seed(0))
    G = (G - G.mean(1, keepdim=True)).to(dtype)
    X = torch.ones(64, R, 8, dtype=dtype)
    _, S = gemm_square(G, X)
    want = (G.double().transpose(1, 2) @ X.double()).square().sum(0)
    assert (S >= 0).all()
    torch.testing.assert_close(S.double(), want, rtol=1e-2, atol=1e-9)


def test_a_constant_feature_before_batch_norm_trains():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))
    opt = ia.InvariantAdam(model.parameters(), micro_batch_size=4)
    x = torch.randn(64, 8)
    x[:, 0] = 1
    for _ in range(3):
        with ia.one_pass(model, 4):
            model(x).square().mean().backward()
        opt.step()
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("change", ["clip", "scale"])
def test_a_gradient_changed_after_one_pass_is_noticed(change):
    model = nn.Linear(3, 2)
    opt = ia.InvariantAdam(model.parameters(), fold="call")
    with ia.one_pass(model, 2):
        model(torch.randn(8, 3)).square().mean().backward()
    if change == "clip":
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    else:
        model.weight.grad.mul_(0.5)
    with pytest.raises(RuntimeError, match="changed in place after one_pass"):
        opt.step()
    opt.zero_grad()


@pytest.mark.parametrize("sizes", [(8, 16), (8, 2), (2, 2)])
def test_a_second_forward_before_the_backward(sizes):
    model = nn.Linear(3, 2).double()

    def twice():
        with ia.one_pass(model, 2):
            value = loss(model, (rows(sizes[0], 3),))
            model(rows(sizes[1], 3, seed=1))
            value.backward()

    with pytest.raises(ia.UnsupportedUse, match="called twice before a backward"):
        twice()


class Plus(nn.Module):
    """x (B, T, 4) plus something of a parameter and a constant as long as the sequence."""

    def __init__(self, kind, share=1.0, token=False):
        super().__init__()
        self.kind, self.share, self.table, self.scale, self.line = (
            kind,
            share,
            nn.Embedding(3, 4),
            nn.Parameter(torch.ones(4)),
            nn.Linear(4, 4),
        )
        self.token = nn.Parameter(torch.randn(1, 1, 4)) if token else None

    def forward(self, x):
        if self.token is not None:
            x = torch.cat([self.token.expand(len(x), 1, 4), x], 1)
        T = x.shape[1]
        if self.kind == "table":
            x = x + self.table(torch.zeros(T, dtype=torch.long))
        elif self.kind == "scale":
            x = x * (self.scale * torch.ones(T, 4, dtype=x.dtype))
        else:
            x = x + self.share * self.line(torch.zeros(T, 4, dtype=x.dtype))
        return self.line(x)


@pytest.mark.parametrize("kind", ["table", "scale", "line"])
@pytest.mark.parametrize("lengths", [(16,), (9, 16), (4, 32)])
def test_sequences_as_long_as_the_batch(kind, lengths):
    torch.manual_seed(0)
    exact_or_refused(Plus(kind).double(), [(rows(16, T, 4),) for T in lengths], 2)


@pytest.mark.parametrize("kind", ["table", "scale", "line"])
@pytest.mark.parametrize("lengths", [(15,), (9, 15)])
def test_a_token_makes_sequences_as_long_as_the_batch(kind, lengths):
    """A length that neither an input nor a parameter shows, and a constant that is the same for every token."""
    torch.manual_seed(0)
    assert exact_or_refused(Plus(kind, token=True).double(), [(rows(16, T, 4),) for T in lengths], 2)


def test_a_value_of_parameters_under_autocast():
    """A constant in bfloat16 goes through a layer: the backward computes that again, and is itself not in autocast."""
    torch.manual_seed(0)
    first, last = nn.Linear(4, 4), nn.Linear(4, 4)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = first, last

        def forward(self, x):
            h = self.first(x)
            return (h + self.last(torch.full((6, 4), 0.5, dtype=h.dtype))).tanh()

    def under(model, batch):
        with torch.autocast("cpu", torch.bfloat16):
            return loss(model, batch)

    assert_exact(Net(), (rows(16, 6, 4).float(),), under, 2, tol=3e-2)


@pytest.mark.parametrize("reduced", [False, True])
def test_one_large_sample_does_not_hide_the_others(reduced):
    """An exchange of samples changes little beside it, and the batch was taken for a constant."""
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)), rows(32, 4).float()
    x[10, 0] = 1e3 if reduced else 1e6

    def under(model, batch):
        with torch.autocast("cpu", torch.bfloat16, enabled=reduced):
            return loss(model, batch)

    assert_exact(net, (x,), under, 2, tol=3e-2 if reduced else 1e-5)


def test_a_mean_over_many_samples_is_seen_under_autocast_and_dropout():
    """It moves the others by less than bfloat16 rounds, and is not there in eval mode."""

    class Centred(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.drop, self.last = nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 2)

        def forward(self, x):
            x = self.first(x)
            return self.last(self.drop(x - x.mean(0) if self.training else x))

    torch.manual_seed(0)
    net, x = Centred(), rows(512, 4).float() + 1
    with (
        pytest.raises(ia.UnsupportedUse, match="depends on samples of other micro-batches"),
        ia.one_pass(net, 2),
        torch.autocast("cpu", torch.bfloat16),
    ):
        net(x)


def test_a_small_part_of_a_gradient_is_not_taken_for_rounding():
    """All micro-batches are held against the loop in float32, where a hundredth would pass."""
    torch.manual_seed(0)
    assert_exact(Plus("line", share=0.01), (rows(16, 16, 4).float(),), loss, 2, tol=2e-6)


@pytest.mark.slow
def test_rounding_of_a_deep_model_is_not_taken_for_a_mistake():
    """In bfloat16, as many channels as samples: where all micro-batches disagree with the loop, float64 decides."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 32, 3, padding=1)]
    for _ in range(40):
        layers += [nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()]
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    with ia.one_pass(net, 4), torch.autocast("cpu", torch.bfloat16):
        net(torch.randn(32, 3, 6, 6)).square().mean().backward()
    assert net[0].weight.grad_sq.isfinite().all()


class TimeFirst(nn.Module):
    """Layers over (T, B, D), the first of them on a tensor that is not differentiable."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.last(self.first(x.transpose(0, 1)).tanh()).transpose(0, 1)


@pytest.mark.parametrize("length", [32, 24, 64])
def test_time_first_of_a_length_that_fits_the_batch_or_a_few_micro_batches(length):
    torch.manual_seed(0)
    assert exact_or_refused(TimeFirst().double(), [(rows(32, length, 4),)], 2)


class SequenceFirst(nn.Module):
    """A token in front, then layers over (T + 1, B, D)."""

    def __init__(self):
        super().__init__()
        self.bos, self.line, self.norm = nn.Parameter(torch.randn(4)), nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x):
        x = torch.cat([self.bos.expand(len(x), 1, 4), x], 1).transpose(0, 1)
        return self.norm(self.line(x)).transpose(0, 1)


@pytest.mark.parametrize("length", [7, 15, 8])
def test_a_length_inside_the_model_that_becomes_the_batch(length):
    torch.manual_seed(0)
    exact_or_refused(SequenceFirst().double(), [(rows(8, 10, 4),), (rows(8, length, 4),)], 2)


def test_a_layer_used_outside_of_the_forward_on_rows_that_could_be_misread():
    class Body(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 1)

        def forward(self, x):
            return self.body(x)

    model = Body().double()

    def outside():
        with ia.one_pass(model, 2):
            h = model(rows(8, 3))
            model.head(torch.cat([h, h.square()])).square().mean().backward()

    with pytest.raises(ia.UnsupportedUse, match="outside of the model's forward"):
        outside()
    with ia.one_pass(model, 2):
        model.head(model(rows(8, 3))).square().mean().backward()  # as the batch is: fine
    assert model.head.weight.grad_kappa == 4


class MaskedMean(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(3, 1)

    def forward(self, x, mask):
        return (self.line(x).squeeze(-1).square() * mask).sum() / mask.sum()


def test_a_token_mean_is_refused_also_after_a_call_with_weights():
    model = MaskedMean().double()
    x, mask = rows(16, 5, 3), torch.ones(16, 5, dtype=torch.float64)
    mask[::3, 2:] = 0  # the micro-batches that the check exchanges have equally many tokens; others do not
    with ia.one_pass(model, 2, weights=mask):  # κ = 8: more than the check holds against the loop
        model(x, mask).backward()
    model.zero_grad()
    for p in model.parameters():
        del p.grad_sq
    with pytest.raises(ia.UnsupportedUse, match="not a mean over micro-batches"), ia.one_pass(model, 2):
        model(x, mask).backward()


class Tagger(nn.Module):
    """Returns logits and the mean loss of all tokens that have a label, as Hugging Face's models do."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 11))

    def forward(self, ids, labels):
        logits = self.net(ids)
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("unequal", [False, True])
def test_unequal_shares_in_a_loss_are_found_where_all_losses_are_the_same(unequal):
    """In a new model every token has a loss of about log 11, so that the value of a mean does not tell its weights."""
    torch.manual_seed(0)
    model = Tagger()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1e-3)
    ids, labels = torch.randint(11, (2, 24, 5))
    if unequal:
        labels[:10, 2:] = -100
    refused = pytest.raises(ia.UnsupportedUse, match=r"not a mean over micro-batches: number . has .* of its share")
    with refused if unequal else nullcontext(), ia.one_pass(model, 2):
        model(ids, labels)[1].backward()


class Coupled(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(3, 2)

    def forward(self, x):
        return self.line(x - x.mean(0))


def test_a_first_batch_that_shows_nothing_is_not_a_check():
    model = Coupled().double()
    assert not exact_or_refused(model, [(torch.ones(8, 3, dtype=torch.float64),), (rows(8, 3),)], 2)


class Switch(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(4, 4)

    def forward(self, x, swap=False):
        return self.line(x.transpose(0, 1)).transpose(0, 1) if swap else self.line(x)


def test_a_plain_argument_that_changes_the_layout():
    torch.manual_seed(0)
    exact_or_refused(Switch().double(), [(rows(8, 8, 4), False), (rows(8, 8, 4), True)], 2)


class Moving(nn.Module):
    """A buffer that each forward binds anew."""

    def __init__(self):
        super().__init__()
        self.line = nn.Linear(3, 2)
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, x):
        y = self.line(x)
        self.mean = self.mean + 0.1 * y.detach().sum(0)  # so that the loop comes to the same
        return y


def test_the_check_leaves_buffers_as_they_were():
    model, twin = Moving(), Moving()
    twin.load_state_dict(model.state_dict())
    x = torch.randn(8, 3)
    with ia.one_pass(model, 2):
        model(x).square().mean().backward()
    twin(x)
    assert model.mean.dtype == torch.float32
    torch.testing.assert_close(model.mean, twin.mean)


def test_one_pass_over_a_part_of_what_the_optimizer_trains_is_refused():
    body, head = nn.Linear(3, 4), nn.Linear(4, 1)
    opt = ia.InvariantAdam([*body.parameters(), *head.parameters()], micro_batch_size=2)
    with ia.one_pass(body, 2):
        head(body(torch.randn(8, 3))).square().mean().backward()
    with pytest.raises(RuntimeError, match="taken for one micro-batch"):
        opt.step()


def test_a_copy_made_inside_is_an_ordinary_model():
    model = nn.Linear(3, 2)
    with ia.one_pass(model, 2):
        twin = copy.deepcopy(model)
        model(torch.randn(8, 3)).square().mean().backward()
    assert type(twin.weight) is nn.Parameter
    with ia.one_pass(twin, 2):
        twin(torch.randn(8, 3)).square().mean().backward()


def test_moments_of_squares_follow_the_models_dtype():
    model = nn.Linear(3, 2)
    for dtype in (torch.float32, torch.float64):
        model.to(dtype)
        model.zero_grad()
        with ia.one_pass(model, 2):
            model(torch.randn(8, 3, dtype=dtype)).square().mean().backward()
        assert model.weight.grad_sq.dtype == dtype
        del model.weight.grad_sq, model.bias.grad_sq


class Repeat(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x, n):
        for _ in range(n):
            x = self.a(x).tanh()
        return x


@pytest.mark.filterwarnings("default")  # torch warns of itself while tracing
@pytest.mark.parametrize("compiled", [False, True])
def test_a_layer_used_more_often_than_when_it_was_checked(compiled):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Repeat().double()
    run = torch.compile(model, backend="aot_eager") if compiled else model
    x = rows(8, 4)
    want = loop(copy.deepcopy(model), (x, 3), loss, 2, 8)
    for n in (1, 3):
        model.zero_grad()
        model.a.weight.__dict__.pop("grad_sq", None)
        model.a.bias.__dict__.pop("grad_sq", None)
        with ia.one_pass(run, 2):
            loss(run, (x, n)).backward()
    assert error(model.a.weight.grad_sq, want["a.weight"][1], 0.0) < 1e-8


# ---------------------------------------------------------------- batch norm


class Norms(nn.Module):
    """A batch norm used as `way` says."""

    def __init__(self, way, affine, momentum=0.1):
        super().__init__()
        self.way = way
        self.first, self.last = nn.Conv2d(2, 4, 3), nn.Conv2d(4, 2, 1)
        self.norm = nn.BatchNorm2d(4, affine=affine, momentum=momentum)

    def forward(self, x):
        h = self.first(x)
        if self.way == "checkpoint":
            h = checkpoint(lambda t: self.norm(t).relu(), h, use_reentrant=False)
        else:
            h = self.norm(h).relu()
        for _ in range(2 if self.way == "three times" else 0):
            h = self.norm(h[..., 1:] + h[..., :-1].square())
        return self.last(h).mean((2, 3))


@pytest.mark.parametrize("way", ["three times", "checkpoint"])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize(("momentum", "M"), [(0.1, 2), (0.3, 3), (None, 3), (1.0, 2)])
def test_running_statistics_of_a_norm_that_runs_again(way, affine, momentum, M):
    """The loop updates them by all uses of one micro-batch before the next; a checkpoint uses the norm twice."""
    torch.manual_seed(0)
    model = Norms(way, affine, momentum).double()
    judge = copy.deepcopy(model)
    x, y = torch.randn(8, 2, 6, 6).double(), torch.randn(8, 2).double()
    for _ in range(2):
        for lo in range(0, 8, M):
            (judge(x[lo : lo + M]) - y[lo : lo + M]).square().mean().backward()
        with ia.one_pass(model, M):
            (model(x) - y).square().mean().backward()
    for (name, b), c in zip(model.named_buffers(), judge.buffers(), strict=True):
        torch.testing.assert_close(b, c, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("check", [True, False])
def test_a_mode_changed_inside_the_context(affine, training, check):
    torch.manual_seed(0)
    model = Norms("once", affine).double().train(not training)
    judge = copy.deepcopy(model).train(training)
    x, y = torch.randn(8, 2, 6, 6).double(), torch.randn(8, 2).double()
    want = loop(judge, (x, y), lambda m, b: (m(b[0]) - b[1]).square().mean(), 2, 8)
    with ia.one_pass(model, 2, check=check):
        model.train(training)
        (model(x) - y).square().mean().backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close((p.grad, p.grad_sq), want[name], rtol=1e-9, atol=1e-12)
    for b, c in zip(model.buffers(), judge.buffers(), strict=True):
        torch.testing.assert_close(b, c)


def test_random_numbers_beside_a_norm_without_parameters():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, affine=False), nn.Dropout(0.5), nn.Linear(4, 2))
    with ia.one_pass(model, 2):  # is checked in eval mode
        model(torch.randn(8, 3)).square().mean().backward()


@pytest.mark.parametrize("affine", [True, False])
def test_an_activation_that_writes_over_a_norms_output(affine):
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(4, affine=affine)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), norm, nn.ReLU(inplace=True), nn.Conv2d(4, 2, 1)).double()
    assert_exact(model, (torch.randn(8, 2, 6, 6).double(),), lambda m, b: m(b[0]).square().mean(), 2)


def test_norms_that_share_a_weight_are_refused():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4))
    model[2].weight = model[1].weight
    with pytest.raises(ia.UnsupportedUse, match="shares its weight"), ia.one_pass(model, 2):
        pass
    assert all(type(p) is nn.Parameter for p in model.parameters())
    model.eval()
    with ia.one_pass(model, 2):
        model(torch.randn(8, 3)).square().mean().backward()


# ---------------------------------------------------------------- what changes besides


def test_buffers_that_the_loop_would_change_otherwise():
    torch.manual_seed(0)
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(3, 4)), nn.Tanh(), nn.Linear(4, 2))
    x = torch.randn(8, 3)
    with (
        pytest.raises(ia.UnsupportedUse, match=r"0\.parametrizations\.weight\.0 is a spectral norm"),
        ia.one_pass(model, 2),
    ):
        model(x)
    model.eval()
    with ia.one_pass(model, 2):
        model(x).square().mean().backward()

    class Average(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)
            self.register_buffer("mean", torch.zeros(2))

        def forward(self, x):
            y = self.layer(x)
            self.mean.lerp_(y.detach().mean(0), 0.1)
            return y

    with pytest.raises(ia.UnsupportedUse, match="the buffer mean is changed"), ia.one_pass(model := Average(), 2):
        model(x)
    with ia.one_pass(model, 2, check=False):
        model(x).square().mean().backward()

    class Cache(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)
            self.register_buffer("table", torch.zeros(3), persistent=False)

        def forward(self, x):
            self.table = torch.arange(x.shape[1]).to(x)  # the same for every micro-batch
            return self.layer(x + self.table)

    model = Cache()
    with ia.one_pass(model, 2):
        model(x).square().mean().backward()


def test_hooks_that_change_a_gradient():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(8, 3)
    opt = ia.InvariantAdam(model.parameters())
    with ia.one_pass(model, 2):
        model(x).square().mean().backward()
    opt.step()
    seen = []
    reader = model[0].weight.register_hook(lambda g: seen.append(g))
    with ia.one_pass(model, 2):
        model(x).square().mean().backward()
    assert seen
    opt.step()
    with pytest.raises(ia.UnsupportedUse, match="into= would not call"), ia.one_pass(model, 2, into=opt):
        pass
    reader.remove()
    writer = model[0].weight.register_hook(lambda g: 2 * g)  # after the model was checked
    changed = pytest.raises(ia.UnsupportedUse, match=r"0\.weight has a hook .* that changed its gradient")
    with changed, ia.one_pass(model, 2):
        model(x)
    writer.remove()
    after = model[0].weight.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(ia.UnsupportedUse, match="register_post_accumulate_grad_hook"), ia.one_pass(model, 2):
        pass
    after.remove()
    with ia.one_pass(model, 2, into=opt):
        model(x).square().mean().backward()
    opt.step()


def halved(g):
    return g / 2 if g.abs().max() > 10 else g.clone()


def halved_in_place(g):
    if g.abs().max() > 10:
        g.div_(2)


@pytest.mark.parametrize("hook", [halved, halved_in_place])
@pytest.mark.parametrize("check", [True, False])
def test_a_hook_that_changes_gradients_on_some_data_only(hook, check):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double(), rows(8, 3)
    opt = ia.InvariantAdam(model.parameters())
    model[2].bias.register_hook(hook)
    kept = dict(model[2].bias._backward_hooks)

    def train(x, M=2):
        with ia.one_pass(model, M, check=check):
            (model(x) * 100 * x[:, :1]).mean().backward()

    train(x / 100)
    opt.step()
    with pytest.raises(ia.UnsupportedUse, match=r"2\.bias has a hook .* that changed its gradient.*opt\.abandon"):
        train(x.abs())
    opt.abandon()
    train(x.abs(), M=8)  # of one micro-batch, the square is of what the hook leaves
    opt.step()
    assert model[2].bias._backward_hooks == kept


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_that_comes_inside_a_context_is_refused(register):
    model, x = nn.Linear(3, 2), torch.randn(8, 3)
    hook = (lambda g: 2 * g) if register == "register_hook" else (lambda p: p.grad.mul_(2) and None)
    for check in (True, False):
        refused = pytest.raises(ia.UnsupportedUse, match=rf"weight .* a hook \({register}\)")
        with refused, ia.one_pass(model, 2, check=check):
            loss = model(x).square().mean()
            getattr(model.weight, register)(hook)
            loss.backward()
    with ia.one_pass(model, 2):
        opt = ia.InvariantAdam(model.parameters())  # whose own hooks may come
        model(x).square().mean().backward()
    opt.step()


class Clamped(nn.Module):
    """A gradient that is clamped on its way back: one pass divides it by κ before, the loop after."""

    def __init__(self, scalar):
        super().__init__()
        self.first, self.last, self.scalar = nn.Linear(3, 4), nn.Linear(4, 2), scalar

    def forward(self, x):
        hidden = self.first(x).tanh()
        if hidden.requires_grad:
            hidden.register_hook(lambda g: g.clamp(-0.02, 0.02))
        return self.last(hidden).square().mean() if self.scalar else self.last(hidden)


@pytest.mark.parametrize("scalar", [True, False])
def test_a_hook_that_is_not_linear_in_the_gradient_is_seen_by_the_check(scalar):
    torch.manual_seed(0)
    model = Clamped(scalar).double()
    with pytest.raises(ia.UnsupportedUse, match=r"(?s)clamps.*first\.weight: its "), ia.one_pass(model, 2):
        model(rows(8, 3))


@pytest.mark.parametrize("fold", ["backward", "call"])
def test_a_backward_after_the_context_is_refused(fold):
    model, x = nn.Linear(3, 2), torch.randn(8, 3)
    opt = ia.InvariantAdam(model.parameters(), fold=fold)
    with ia.one_pass(model, 2):
        value = model(x).square().mean()
    with pytest.raises(RuntimeError, match="after its context was closed"):
        value.backward()
    opt.abandon()
    with ia.one_pass(model, 2):
        model(x).square().mean().backward()
    opt.step()
    assert opt.samples_seen == 4


@pytest.mark.parametrize("sink", [True, False])
@pytest.mark.parametrize("norm", [nn.Identity, nn.BatchNorm2d, partial(nn.BatchNorm2d, affine=False)])
def test_a_penalty_on_gradients_is_refused(norm, sink):
    """A convolution's backward has its weight as a constant: the penalty's gradient would be lost without a word."""
    net = nn.Sequential(nn.Conv2d(2, 3, 3, bias=False), norm(3), nn.Tanh(), nn.Conv2d(3, 2, 2, bias=False))
    opt = ia.InvariantAdam(net.parameters(), micro_batch_size=2)
    x = torch.randn(8, 2, 6, 6, requires_grad=True)
    with ia.one_pass(net, micro_batch_size=2, into=opt if sink else None):
        out = net(x).mean((2, 3)).sum()
        with pytest.raises(ia.UnsupportedUse, match=r"create_graph=True.*abandon"):
            torch.autograd.grad(out, x, create_graph=True)


@pytest.mark.parametrize("length", [24, 32])
@pytest.mark.slow
def test_the_check_of_a_first_update_takes_little_more_memory_than_an_update(length, monkeypatch):
    """Also where the sequences are as long as the batch, and all micro-batches are held against the loop."""
    monkeypatch.setattr(probe, "PIECE", 4096)  # as small beside these tensors as it is beside large ones
    torch.manual_seed(0)
    net = build("gpt-char", width=32, depth=2, heads=2, context=length)
    opt = ia.InvariantAdam(net.parameters(), 1e-3, micro_batch_size=2)
    x = torch.randint(65, (32, length))

    def update():
        with ia.one_pass(net, 2):
            nn.functional.cross_entropy(net(x).flatten(0, 1), x.flatten()).backward()
        opt.step()

    first, second = (growth(update, lambda: None, torch.device("cpu")).peak for _ in range(2))
    assert second < first < 2 * second


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_check_leaves_the_random_numbers_as_they_were(device):
    """Of the device, too: dropout would draw the same masks after the check of every new shape."""
    net = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1)).to(device)
    x = torch.randn(8, 3, device=device)
    states = []
    for check in (True, False):
        twin = copy.deepcopy(net)
        torch.manual_seed(0)
        with ia.one_pass(twin, 2, check=check):
            twin(x).square().mean().backward()
        states.append(torch.rand(4, device=device))
    assert torch.equal(*states)


@pytest.mark.parametrize("draw", [lambda x: np.random.rand(*x.shape), lambda x: [[random.random()] for _ in x]])
def test_random_numbers_of_the_host_are_told_from_samples_that_mix(draw):
    """A forward that draws them is another one each time, and its samples are apart all the same."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.token = nn.Linear(3, 3), nn.Parameter(torch.randn(3))

        def forward(self, x):
            y = self.layer(x)
            return torch.where(torch.tensor(draw(x)) > 0.5, self.token, y) if self.training else y

    x = torch.randn(8, 3)
    states = []
    for check in (True, False):
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        net = Net()
        with ia.one_pass(net, 2, check=check):
            net(x).square().mean().backward()
        assert net.token.grad_sq.all()
        states.append((random.random(), np.random.rand()))
    assert states[0] == states[1]


@pytest.mark.parametrize("transform", [torch.func.vmap, lambda f: torch.func.vmap(torch.func.jacrev(f))])
def test_a_parameter_inside_of_a_transform_is_refused(transform):
    class Net(nn.Linear):
        def forward(self, x):
            return transform(lambda row: row @ self.weight.t())(x)

    net = Net(3, 2)
    with ia.one_pass(net, 2), pytest.raises(ia.UnsupportedUse, match=r"weight goes through .* a transform of torch"):
        net(torch.randn(8, 3))


@pytest.mark.parametrize("M", [1, 3])
@pytest.mark.parametrize("B", [6, 12, 24])
def test_what_a_model_does_to_every_other_sample_is_seen(B, M):
    """By its place in the batch: in the loop it is another sample that has the place."""

    class Net(nn.Linear):
        def forward(self, x):
            y = super().forward(x).clone()
            y[1::2] = y[1::2] * 2
            return y

    net = Net(4, 4)
    with ia.one_pass(net, M), pytest.raises(ia.UnsupportedUse):
        net(torch.randn(B, 4)).sin().sum(1).mean().backward()

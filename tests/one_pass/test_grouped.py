"""Grouped expert products against the loop: in float64 by the operation of transformers, in float32 by torch's own."""

from __future__ import annotations

import importlib.util

import pytest
import torch
import torch.nn.functional as F
import zoo
from loop_oracle import assert_exact
from torch import Tensor, nn

import invariant_adam as ia
from invariant_adam.one_pass import UnsupportedUse, explain, one_pass

B, T, D, E = 12, 5, 8, 4  # samples, tokens each, width, experts
SINGLE = 3e-6  # torch's own takes no float64
needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)


def by_transformers(x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
    zoo.zoo_module("transformers.integrations.moe")  # which registers it
    return torch.ops.transformers.grouped_mm_fallback(x, w, offs=offs)


class Experts(nn.Module):
    """Two products by expert, of all samples' tokens; one weight lies transposed. `to` names the expert of each token.

    Tokens of expert E are dropped, as those of other ranks are: their rows come last, and belong to nobody here. The
    biases are picked by expert, as in gpt-oss.
    """

    def __init__(self, product=F.grouped_mm, shared: bool = False, biased: str = "") -> None:
        super().__init__()
        self.product, self.shared, self.biased = product, shared, biased
        self.inp = nn.Linear(D, D)
        self.up, self.down = (nn.Parameter(torch.randn(E, D, D) / 3) for _ in range(2))
        if biased:
            self.bias = nn.Parameter(torch.randn(E, D))
            self.bias_down = self.bias if "shared" in biased else nn.Parameter(torch.randn(E, D))
        self.double() if product is by_transformers else self.float()

    def forward(self, x: Tensor, to: Tensor) -> Tensor:
        to, order = to.flatten().sort()
        offs = torch.searchsorted(to, torch.arange(E, device=to.device), right=True).int()
        dropped = (to == E)[:, None]
        rows = self.inp(x).flatten(0, 1)[order].masked_fill(dropped, 0)
        rows = self.product(rows, self.up.mT, offs=offs).masked_fill(dropped, 0)
        if self.biased:
            rows.add_(self.bias[to.clamp(max=E - 1)])
        rows = rows.tanh().masked_fill(dropped, 0)
        rows = self.product(rows, self.up if self.shared else self.down, offs=offs).masked_fill(dropped, 0)
        if "negative" in self.biased:
            rows = self.bias_down[to.clamp(max=E - 1) - E] + rows
        elif self.biased:
            rows = rows * self.bias_down[to.clamp(max=E - 1)]
        rows = rows.masked_fill(dropped, 0)
        return rows[order.argsort()].view(len(x), -1)


def destinations(which: str) -> Tensor:
    to = torch.randint(0, E, (B, T))
    if which == "one without tokens":
        to[to == 1] = 2
    elif which == "one for the first sample alone":
        to[to == 3] = 0
        to[0, 2:] = 3
    elif which == "all to one":
        to[:] = 2
    elif which == "some dropped":
        to = torch.randint(0, E + 1, (B, T))
    return to


def batch_of(model: Experts, which: str = "spread") -> tuple[Tensor, Tensor]:
    return torch.randn(B, T, D, dtype=model.up.dtype), destinations(which)


def loss(model: nn.Module, batch: tuple) -> Tensor:
    return model(*batch).sin().sum(1).mean()


@pytest.fixture(params=[pytest.param(by_transformers, marks=needs_transformers), F.grouped_mm])
def product(request):
    torch.manual_seed(0)
    return request.param


ROUTES = ["spread", "one without tokens", "one for the first sample alone", "all to one", "some dropped"]


@pytest.mark.parametrize("M", [1, 3, 5, 12])  # 5 leaves a ragged one
@pytest.mark.parametrize("which", ROUTES)
def test_equals_the_loop(product, which: str, M: int) -> None:
    model = Experts(product)
    assert_exact(model, batch_of(model, which), loss, M, tol=SINGLE if product is F.grouped_mm else 1e-10)


@pytest.mark.parametrize("M", [1, 3, 5])
def test_uses_of_a_shared_weight_are_added_before_they_are_squared(product, M: int) -> None:
    model = Experts(product, shared=True)
    model.down.requires_grad_(False)
    assert_exact(model, batch_of(model), loss, M, tol=SINGLE if product is F.grouped_mm else 1e-10)


@pytest.mark.parametrize("M", [1, 3, 5, 12])
@pytest.mark.parametrize("which", ROUTES)
@pytest.mark.parametrize("biased", ["own", "shared", "negative"])
def test_biases_picked_by_expert(product, biased: str, which: str, M: int) -> None:
    model = Experts(product, biased=biased)
    tol = SINGLE if product is F.grouped_mm else 1e-10
    assert_exact(model, batch_of(model, which), loss, M, tol=tol)
    assert_exact(model, batch_of(model, "spread"), loss, M, tol=tol)  # what was found out holds for other routes


def test_rows_picked_by_expert_that_meet_others_are_refused(product) -> None:
    """First as biases, and then of rows in batch order: one site cannot be both."""
    model = Experts(product, biased="own")

    def forward(x: Tensor, to: Tensor) -> Tensor:
        again = model.bias[to.flatten().sort().values]
        return Experts.forward(model, x, to) + again.view(x.shape[0], T, D).sum(1, keepdim=True)

    model.forward = forward  # type: ignore[method-assign]
    with pytest.raises(UnsupportedUse, match=r"bias goes through __getitem__ .*set_experts"), one_pass(model, 3):
        model(*batch_of(model))


def test_many_rows_of_a_group(product) -> None:
    """More than 16 rows are filled up to a multiple."""
    model = Experts(product)
    x = torch.randn(6, 45, D, dtype=model.up.dtype)
    assert_exact(model, (x, torch.randint(0, E, (6, 45))), loss, 2, tol=SINGLE if product is F.grouped_mm else 1e-10)


@pytest.mark.gpu
@pytest.mark.parametrize("M", [1, 3, 5])
@pytest.mark.parametrize("which", ROUTES)
@pytest.mark.parametrize("biased", ["", "own"])
def test_on_the_gpu_in_bfloat16(biased: str, which: str, M: int) -> None:
    torch.manual_seed(0)
    model = Experts(biased=biased).to("cuda", torch.bfloat16)
    x, to = batch_of(Experts(), which)
    assert_exact(model, (x.to("cuda", torch.bfloat16), to.cuda()), loss, M, tol=5e-2)  # a bfloat16 has 8 bits


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_the_forward_is_the_models_own_to_the_bit(product, dtype: torch.dtype | None) -> None:
    model = Experts(product, biased="own")
    model.to(dtype or model.up.dtype)
    model.bias.data = model.bias.data.float()  # as a checkpoint may keep it
    batch = batch_of(model)
    plain = model(*batch)
    with one_pass(model, 3):
        out = model(*batch)
        assert torch.equal(out, plain)
        out.mean().backward()


@pytest.mark.parametrize("into", [False, True])
def test_trains_as_the_loop_does(product, into: bool) -> None:
    models = [Experts(product, biased="own"), Experts(product, biased="own")]
    models[1].load_state_dict(models[0].state_dict())
    mine, theirs = (ia.InvariantAdam(m.parameters(), lr=0.01, micro_batch_size=3) for m in models)
    for which in ROUTES:
        batch = batch_of(models[0], which)
        with ia.one_pass(models[0], 3, **{"into": mine} if into else {}):
            loss(models[0], batch).backward()
        for k in range(4):
            loss(models[1], tuple(t[3 * k : 3 * k + 3] for t in batch)).backward()
        assert all(p.grad is None for p in models[0].parameters())
        mine.step()
        theirs.step()
    for p, q in zip(*(m.parameters() for m in models), strict=True):
        tolerance = {"rtol": 0, "atol": 1e-4 if product is F.grouped_mm else 1e-10}
        torch.testing.assert_close(p, q, **tolerance)
        for key in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(mine.state[p][key], theirs.state[q][key], rtol=1e-4, atol=1e-7)


def test_explains_the_kernel() -> None:
    model = Experts()
    rows = {r.name: r for r in explain(model, batch_of(model), 3).rows}
    assert rows["up"].rule == "grouped_mm, mT"
    assert (rows["up"].rows, rows["up"].kernel) == (3 * T, "gemm_square per expert")
    assert rows["up"].memory < 4 * 4 * model.up.numel()  # no copy of all experts per micro-batch


class Rows(nn.Module):
    """All rows go to the last expert, so that rows in batch order are sorted by expert."""

    def __init__(self, how) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how, self.inp, self.w = how, nn.Linear(D, D), nn.Parameter(torch.randn(E, D, D))

    def forward(self, x: Tensor) -> Tensor:
        offs = torch.tensor([0, 0, 0, len(x)], dtype=torch.int32)
        return F.grouped_mm(self.how(self, x), self.w, offs=offs)


def picked(x: Tensor) -> Tensor:
    return x[torch.arange(len(x))]


@pytest.mark.parametrize(
    "how",
    [
        lambda s, x: s.inp(x),
        lambda s, x: s.inp(x).gather(0, torch.arange(len(x))[:, None].expand(-1, D)),
        lambda s, x: picked(s.inp(x)).flip(0),
        lambda s, x: picked(x),
    ],
    ids=["in order", "gathered", "flipped", "of an input"],
)
def test_rows_without_a_known_place_are_refused(how) -> None:
    """A check of this batch could not tell that other batches are not in order."""
    model = Rows(how)
    with pytest.raises(UnsupportedUse, match=r"w goes through grouped_mm on rows .* not known"), one_pass(model, 3):
        model(torch.randn(B, D))


def test_rows_of_an_input_that_requires_a_gradient() -> None:
    assert_exact(Rows(lambda s, x: picked(x.requires_grad_())), (torch.randn(B, D),), loss, 5, tol=SINGLE)


def test_a_gradient_without_memory_of_its_own() -> None:
    """A sum expands its gradient, which torch's own backward does not take."""
    model, x = Rows(lambda s, x: picked(s.inp(x))), torch.randn(B, D)
    with one_pass(model, 3, check=False):
        model(x).sum(1).mean().backward()
    shares = model.inp(x).detach().view(4, 3, D).sum(1) / B
    torch.testing.assert_close(model.w.grad[-1], shares.sum(0)[:, None].expand(D, D))
    torch.testing.assert_close(model.w.grad_sq[-1], 4 * shares.square().sum(0)[:, None].expand(D, D))
    assert not model.w.grad[:-1].any()
    assert not model.w.grad_sq[:-1].any()


def test_a_penalty_on_gradients_is_refused() -> None:
    model = Experts()
    with pytest.raises(UnsupportedUse, match="create_graph"), one_pass(model, 3):
        loss(model, batch_of(model)).backward(create_graph=True)


OTHER = {
    "2d by 2d": ((D, D), lambda s, x: F.grouped_mm(s.inp(x[:, 0]), s.w, offs=s.offs).transpose(0, 1)),
    "3d by 3d": ((T, D, D), lambda s, x: F.grouped_mm(s.inp(x).transpose(0, 1), s.w).transpose(0, 1)),
    "3d by 2d": ((D, D), lambda s, x: F.grouped_mm(s.inp(x).transpose(0, 1)[:2], s.w, offs=s.offs)),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("form", OTHER)
def test_other_forms_go_by_copies(form: str) -> None:
    shape, function = OTHER[form]
    model = Rows(None)
    model.w, model.offs = nn.Parameter(torch.randn(shape)), torch.tensor([3, D], dtype=torch.int32)
    model.forward = lambda x: function(model, x)  # type: ignore[method-assign]
    x, grads = torch.randn(B, T, D), []
    with one_pass(model, 3):
        model(x).square().mean().backward()
    found, found_sq = model.w.grad, model.w.grad_sq
    for part in x.split(3):
        grads.append(torch.autograd.grad(model(part).square().mean(), model.w)[0])
    torch.testing.assert_close(found, torch.stack(grads).mean(0))
    torch.testing.assert_close(found_sq, torch.stack(grads).square().mean(0))


def mixtral() -> nn.Module:
    transformers = zoo.zoo_module("transformers")
    torch.manual_seed(0)
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            vocab_size=37, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, num_local_experts=E, use_cache=False,
        )
    )  # fmt: skip


@needs_transformers
@pytest.mark.filterwarnings("ignore")  # of transformers
@pytest.mark.parametrize("M", [1, 2, 4])
def test_mixtral_with_the_experts_it_chooses(M: int) -> None:
    model, tokens = mixtral(), torch.randint(3, 37, (6, 6))
    assert model.config._experts_implementation == "grouped_mm"
    assert_exact(model, (tokens,), lambda m, b: m(*b).logits.flatten(1).sin().sum(1).mean(), M, tol=SINGLE)
    if M == 2:
        rows = {r.name.rpartition(".")[2]: r.kernel for r in explain(model, tokens, M).rows}
        assert rows["gate_up_proj"] == rows["down_proj"] == "gemm_square per expert"

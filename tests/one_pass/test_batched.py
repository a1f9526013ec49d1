"""Batched products of a parameter, whose batch is in the second dimension, against the loop."""

from __future__ import annotations

import pytest
import torch
from loop_oracle import assert_exact
from torch import Tensor, nn

import invariant_adam as ia
from invariant_adam.one_pass import UnsupportedUse, explain, one_pass

B, T, D, E = 12, 5, 8, 4  # samples, tokens each, width, experts


class Experts(nn.Module):
    """Every token goes through every expert, two products deep; one weight lies transposed."""

    def __init__(self, shared: bool = False, E: int = E) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.E, self.inp, self.shared = E, nn.Linear(D, D), shared
        self.up, self.down = (nn.Parameter(torch.randn(E, D, D) / 3) for _ in range(2))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        rows = self.inp(x).flatten(0, 1).repeat(self.E, 1).view(self.E, -1, D)
        rows = torch.bmm(rows, self.up.mT).tanh()
        rows = torch.bmm(rows, self.up if self.shared else self.down)
        return rows.sum(0).view(len(x), -1)


def loss(model: nn.Module, batch: tuple) -> Tensor:
    return model(*batch).sin().sum(1).mean()


def batch_of(dtype: torch.dtype = torch.float64) -> tuple[Tensor]:
    torch.manual_seed(1)
    return (torch.randn(B, T, D, dtype=dtype),)


@pytest.mark.parametrize("M", [1, 3, 5, 12])  # 5 leaves a ragged one
@pytest.mark.parametrize("shared", [False, True])
def test_equals_the_loop(M: int, shared: bool) -> None:
    model = Experts(shared)
    if shared:
        model.down.requires_grad_(False)
    assert_exact(model, batch_of(), loss, M)


@pytest.mark.filterwarnings("default")  # torch warns of itself while tracing
@pytest.mark.parametrize("M", [3, 5])
def test_compiled(M: int) -> None:
    model = Experts()
    assert_exact(model, batch_of(), loss, M, run=torch.compile(model, fullgraph=True, backend="aot_eager"))


@pytest.mark.gpu
@pytest.mark.parametrize("M", [1, 3, 5])
def test_on_the_gpu_in_bfloat16(M: int) -> None:
    model = Experts().to("cuda", torch.bfloat16)
    assert_exact(model, (batch_of()[0].to("cuda", torch.bfloat16),), loss, M, tol=5e-2)  # a bfloat16 has 8 bits


@pytest.mark.parametrize("into", [False, True])
def test_trains_as_the_loop_does(into: bool) -> None:
    models = [Experts(), Experts()]
    mine, theirs = (
        ia.InvariantAdam(m.parameters(), lr=0.01, micro_batch_size=3, state_dtype=torch.float64) for m in models
    )
    for _ in range(2):
        (x,) = batch_of()
        with ia.one_pass(models[0], 3, **{"into": mine} if into else {}):
            loss(models[0], (x,)).backward()
        for part in x.split(3):
            loss(models[1], (part,)).backward()
        mine.step()
        theirs.step()
    for p, q in zip(*(m.parameters() for m in models), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-12)
        torch.testing.assert_close(mine.state[p]["exp_avg_sq"], theirs.state[q]["exp_avg_sq"], rtol=1e-9, atol=1e-15)


def test_explains_the_kernel() -> None:
    model = Experts()
    rows = {r.name: r for r in explain(model, batch_of(), 3).rows}
    assert (rows["down"].rule, rows["down"].rows) == ("bmm", 3 * T)
    assert rows["down"].kernel == "gemm_square (products) each"


def test_a_penalty_on_gradients_is_refused() -> None:
    model = Experts()
    with pytest.raises(UnsupportedUse, match="create_graph"), one_pass(model, 3):
        loss(model, batch_of()).backward(create_graph=True)


def test_rows_that_are_not_whole_samples_are_refused() -> None:
    model = Experts()

    def forward(x: Tensor) -> Tensor:
        rows = model.inp(x).flatten(0, 1)[7:]
        return torch.bmm(rows.expand(E, *rows.shape), model.up).sum((0, 2))

    model.forward = forward  # type: ignore[method-assign]
    with pytest.raises(UnsupportedUse, match="up goes through bmm"), one_pass(model, 3):
        model(*batch_of())


def test_as_many_experts_as_samples() -> None:
    """(E, B·T, d) has a multiple of B in two dimensions; a parameter's first is its experts'."""
    assert_exact(Experts(E=B), batch_of(), loss, 3)


class Gates(nn.Module):
    """A block-diagonal layer for each head, as in RecurrentGemma: one product for all of them, with a bias."""

    def __init__(self, heads: int = 2, uses: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inp, self.heads, self.uses = nn.Linear(D, heads * D), heads, uses
        self.w, self.b = nn.Parameter(torch.randn(heads, D, D)), nn.Parameter(torch.randn(heads, D))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        rows = self.inp(x).reshape(-1, self.heads, D).permute(1, 0, 2)
        for _ in range(self.uses):
            rows = torch.baddbmm(self.b[:, None, :], rows, self.w).tanh()
        return rows.permute(1, 0, 2).reshape(len(x), -1)


@pytest.mark.parametrize("uses", [1, 2])
@pytest.mark.parametrize("heads", [2, B])
@pytest.mark.parametrize("M", [1, 3, 5, 12])
def test_with_a_bias(M: int, heads: int, uses: int) -> None:
    assert_exact(Gates(heads, uses), batch_of(), loss, M)


@pytest.mark.parametrize("name", ["w", "b"])
def test_with_a_bias_one_of_them_frozen(name: str) -> None:
    model = Gates()
    getattr(model, name).requires_grad_(False)
    assert_exact(model, batch_of(), loss, 3)


@pytest.mark.parametrize("kind", [Experts, Gates])
def test_the_forward_is_the_models_own_under_autocast(kind, device: str) -> None:
    torch.manual_seed(0)
    model, (x,) = kind().float().to(device), batch_of(torch.float32)
    with torch.autocast(device, torch.bfloat16):
        plain = model(x.to(device))
        with one_pass(model, 3):
            out = model(x.to(device))
            assert out.dtype == plain.dtype  # on a GPU autocast sums in float32
            assert torch.equal(out, plain)
            out.float().mean().backward()


class Shared(Experts):
    """One weight, twice, by a view that turns it or that is all of it."""

    def forward(self, x: Tensor) -> Tensor:
        rows = self.inp(x).flatten(0, 1).repeat(self.E, 1).view(self.E, -1, D)
        rows = torch.bmm(torch.bmm(rows, self.up.mT).tanh(), self.up[:, :, :])
        return rows.sum(0).view(len(x), -1)


def test_views_of_a_shared_weight_of_twice_as_many_experts_as_samples() -> None:
    model = Shared(E=2 * B)
    model.down.requires_grad_(False)
    assert_exact(model, batch_of(), loss, 3)


def test_a_product_in_the_loss_is_refused() -> None:
    """No check has looked at it: here the rows lie in another order."""
    model = Experts()
    model.forward = model.inp.forward  # type: ignore[method-assign]

    def late(rows: Tensor) -> Tensor:
        return torch.bmm(rows.transpose(0, 1).flatten(0, 1).expand(E, -1, -1), model.up).sum()

    with pytest.raises(UnsupportedUse, match="up goes through bmm"), one_pass(model, 3):
        late(model(*batch_of()))


class Attention(nn.Module):
    """The heads of all samples side by side, each with its copy of the keys, as in DeBERTa."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inp, self.keys = nn.Linear(D, D), nn.Parameter(torch.randn(2, D, 3))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        heads = self.inp(x).repeat(1, 3, 1)[:, :B].repeat_interleave(2, 0)  # (2B, B, D)
        return torch.bmm(heads, self.keys.tanh().repeat(len(x), 1, 1)).reshape(len(x), -1)


def test_a_value_repeated_for_each_sample_is_no_expert() -> None:
    """The batch is in the first dimension, though B is the size of the second."""
    assert_exact(Attention(), batch_of(), loss, 3)

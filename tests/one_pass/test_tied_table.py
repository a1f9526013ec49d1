"""A table that is both embedding and head: exact with cross terms at the tokens' rows, without κ gradients."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from loop_oracle import assert_exact, loop
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import invariant_adam as ia
from invariant_adam.one_pass import one_pass
from invariant_adam.one_pass.groups import UnsupportedUse, divided
from invariant_adam.one_pass.model import facts_of

B, V, D = 12, 11, 5


class Tied(nn.Module):
    """Embedding, a layer, the head: `how` says what is special."""

    def __init__(self, how: str = "", vocabulary: int = V, width: int = D) -> None:
        super().__init__()
        self.how = how
        self.table = nn.Embedding(vocabulary, width, padding_idx=3 if "padding" in how else None)
        self.layer = nn.Linear(width, width)
        self.head = nn.Linear(width, vocabulary, bias="bias" in how)
        self.head.weight = self.table.weight

    def rows(self, ids: Tensor) -> Tensor:
        return checkpoint(self.table, ids, use_reentrant=False) if "rows again" in self.how else self.table(ids)

    def forward(self, ids: Tensor, other: bool = False) -> Tensor:
        h = self.rows(ids) * (3.3 if "scaled" in self.how else 1.0)  # as Gemma does
        h = self.layer(h).tanh()
        if "twice" in self.how:  # as an encoder and a decoder do
            h = h + self.table(ids.flip(1)[:, :2]).sum(1, keepdim=True)
        if "shifted" in self.how:
            h = h[:, :-1]
        if "picked" in self.how:
            flat = h.reshape(-1, h.shape[-1])
            return self.head(flat[torch.arange(len(flat)).flip(0)]).flip(0).view(len(ids), -1)
        if "transposed" in self.how:
            return h @ self.table.weight.t()
        if other:
            h = h + self.table(ids[:, :1])
            return self.head(h) + self.table(ids).sum(-1, keepdim=True)
        h = h * D**-0.5 if "scaled" in self.how else h  # as T5 does
        return checkpoint(self.head, h, use_reentrant=False) if "head again" in self.how else self.head(h)


def loss(model: nn.Module, batch: tuple) -> Tensor:
    return model(*batch).flatten(1).sin().sum(1).mean()


def ids(length: int = 4, batch: int = B, vocabulary: int = V) -> Tensor:
    return torch.randint(0, vocabulary, (batch, length))


def is_table(model: nn.Module, M: int) -> bool:
    (entry,) = (e for e in facts_of(model, M, 0).order if e.name.endswith("table.weight"))
    return bool(entry.table)


HOWS = ["", "padding", "scaled", "bias", "shifted", "twice", "twice padding", "picked", "head again", "rows again"]


@pytest.mark.parametrize("M", [1, 3, 5, B])
@pytest.mark.parametrize("length", [4, 3 * V], ids=["few tokens", "more tokens than rows"])
@pytest.mark.parametrize("how", HOWS)
def test_equals_the_loop(how: str, length: int, M: int) -> None:
    torch.manual_seed(0)
    model = Tied(how).double()
    assert_exact(model, (ids(length),), loss, M)
    assert M == B or is_table(model, M)


def test_weights_of_tokens() -> None:
    torch.manual_seed(0)
    model, x, w = Tied("twice").double(), ids(), torch.rand(B, dtype=torch.float64)

    def weighted(m: nn.Module, lo: int, hi: int) -> Tensor:
        return (m(x[lo:hi]).flatten(1).sin().sum(1) * w[lo:hi]).sum()

    total, mean, square = w.sum(), 0.0, 0.0
    for lo in range(0, B, 3):
        (g,) = torch.autograd.grad(weighted(model, lo, lo + 3), [model.table.weight])
        own = w[lo : lo + 3].sum()
        mean, square = mean + g / total, square + (g / own).square() * own / total
    with one_pass(model, 3, weights=w):
        (weighted(model, 0, B) / total).backward()
    p = model.table.weight
    assert torch.allclose(p.grad, mean, rtol=1e-10)
    assert torch.allclose(p.grad_sq, square, rtol=1e-10)


def test_into_and_without_agree() -> None:
    torch.manual_seed(0)
    model = Tied("padding twice").double()
    twin, x = copy.deepcopy(model), ids()
    first, second = (ia.InvariantAdam(m.parameters(), state_dtype=torch.float64) for m in (model, twin))
    for _ in range(2):
        with one_pass(model, 3, into=first):
            loss(model, (x,)).backward()
        for part in x.split(3):
            loss(twin, (part,)).backward()
        first.step()
        second.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(first.state[p]["exp_avg_sq"], second.state[q]["exp_avg_sq"], rtol=1e-10)
        assert torch.allclose(p, q, rtol=1e-10)


@pytest.mark.filterwarnings("default")  # torch warns of itself while tracing
@pytest.mark.parametrize("how", ["padding", "twice"])
def test_compiled_in_one_graph_that_is_not_made_again(how: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Tied(how).double()
    run = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch._dynamo.utils.counters.clear()
    for _ in range(3):
        model.zero_grad()
        assert_exact(model, (ids(),), loss, 3, run=run)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.filterwarnings("default")  # torch warns of itself while tracing
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("whole", [False, True])
def test_compiled_with_lengths_that_vary(whole: bool, dynamic: bool | None) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Tied(vocabulary=200).double()  # of more rows than a micro-batch has tokens: some are picked
    run = torch.compile(model, fullgraph=whole, dynamic=dynamic, backend="aot_eager")
    for length in (4, 6, 9):
        model.zero_grad()
        assert_exact(model, (ids(length, B, 200),), loss, 3, run=run)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_near_the_loop_in_float64(dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(0)
    model = Tied(width=16).to(device)
    x = ids(8).to(device)
    want = loop(copy.deepcopy(model).double(), (x,), loss, 2, B)["table.weight"][1]
    with one_pass(model, 2), torch.autocast(device, dtype):
        loss(model, (x,)).backward()
    got = model.table.weight.grad_sq
    assert is_table(model, 2)
    assert float((got - want).norm() / want.norm()) < 0.02


@given(st.integers(1, 12), st.integers(1, 4), st.booleans(), st.integers(0, 2**16))
def test_a_sum_of_squares_is_not_below_that_of_the_mean(batch: int, micro: int, weighted: bool, seed: int) -> None:
    """What is right stays, whatever the weights; what rounding has left below comes back to the least there can be."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(batch, dtype=torch.float64, generator=generator) + 0.1 if weighted else None
    groups = divided(batch, micro, 0, weights, None, "weight", "mean", None)
    shares = torch.randn(groups.kappa, 7, dtype=torch.float64, generator=generator)
    c = torch.ones(groups.kappa) if groups.c is None else groups.c.double()
    dW, S = shares.sum(0), (c[:, None] * shares.square()).sum(0)
    torch.testing.assert_close(groups.bounded(S, dW), S, rtol=1e-6, atol=0)
    assert torch.equal(groups.bounded(-S, dW), dW.square() / groups.kappa)


def next_tokens(model: nn.Module, batch: tuple) -> Tensor:
    """Each token's neighbour is to be guessed: a row of the table gets gradients from both of its uses."""
    return F.cross_entropy(model(*batch).flatten(0, 1).float(), batch[0].flip(1).flatten())


def check_cancelling(device: str, dtype: torch.dtype, length: int, M: int, compiled: bool) -> None:
    """Where an embedding's share of a gradient cancels the head's, squares have no more than the loop's own errors."""
    torch.manual_seed(0)
    model = Tied(vocabulary=2003, width=32).to(device)
    x = ids(length, 16, 2003).to(device)

    def low(m: nn.Module, batch: tuple) -> Tensor:
        with torch.autocast(device, dtype):
            return next_tokens(m, batch)

    exact = loop(copy.deepcopy(model).double(), (x,), next_tokens, M, 16)["table.weight"][1]
    near = loop(model, (x,), low, M, 16)["table.weight"][1]
    run = torch.compile(model, dynamic=False) if compiled else model
    with one_pass(run, M):
        low(run, (x,)).backward()
    assert is_table(run, M)
    mean, square = model.table.weight.grad.double(), model.table.weight.grad_sq.double()
    assert bool((square >= 0.999 * mean.square()).all())  # or √v is NaN, or less than Adam's

    def off(found: Tensor) -> float:
        return float(((found - exact).abs() > 0.05 * exact)[x.unique()].double().mean())

    assert off(square) < 1.2 * off(near) + 0.005


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("length", "M"), [(1, 1), (2, 1), (16, 2), (16, 8)])
def test_shares_that_cancel(length: int, M: int, dtype: torch.dtype, device: str) -> None:
    check_cancelling(device, dtype, length, M, compiled=False)


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")  # torch warns of itself while tracing
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_shares_that_cancel_in_a_compiled_graph(dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    check_cancelling("cuda", dtype, 16, 8, compiled=True)


def test_another_sharing_has_copies() -> None:
    torch.manual_seed(0)
    model = Tied("transposed").double()
    assert_exact(model, (ids(),), loss, 3)
    assert not is_table(model, 3)


def test_another_use_is_found_by_the_next_check() -> None:
    """A new signature of inputs is checked anew, and a table that is used otherwise there has copies from then on."""
    torch.manual_seed(0)
    model = Tied().double()
    assert_exact(model, (ids(),), loss, 3)
    assert is_table(model, 3)

    def other(m: nn.Module, batch: tuple) -> Tensor:
        return m(batch[0], other=True).flatten(1).sin().sum(1).mean()

    assert_exact(model, (ids(),), other, 3)
    assert not is_table(model, 3)
    assert_exact(model, (ids(),), loss, 3)


@pytest.mark.parametrize("use", ["an embedding", "a product", "a second head"])
def test_a_use_that_no_check_has_seen_is_refused(use: str) -> None:
    torch.manual_seed(0)
    model = Tied().double()

    def step(use: str | None) -> None:
        x = ids()
        h = model(x)
        if use == "an embedding":
            h = h + F.embedding(x, model.table.weight).sum(-1, keepdim=True)
        elif use == "a product":
            h = h + (h[..., :D] @ (2 * model.table.weight).t())
        elif use == "a second head":
            h = h + F.linear(h[..., :D], model.table.weight)
        h.flatten(1).sin().sum(1).mean().backward()

    with one_pass(model, 3):
        step(None)
    for p in model.parameters():
        p.grad = p.grad_sq = None
    with pytest.raises(UnsupportedUse, match=r"table\.weight"), one_pass(model, 3):
        step(use)


class Largest(TorchDispatchMode):
    """The largest result of any operation, in elements of memory."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, Tensor):
                self.elements = max(self.elements, t.untyped_storage().nbytes() // t.element_size())
        return out


def test_memory_is_not_that_of_kappa_gradients() -> None:
    torch.manual_seed(0)
    rows, width, kappa, length = 4000, 32, 16, 3
    model, x = Tied(vocabulary=rows, width=width), ids(length, kappa, rows)
    with one_pass(model, 1):
        loss(model, (x,)).backward()  # checked
    for p in model.parameters():
        p.grad = p.grad_sq = None
    with one_pass(model, 1), Largest() as seen:
        loss(model, (x,)).backward()
    assert seen.elements <= max(kappa * length * rows, rows * width)  # the logits; and no κ × V × D
    assert seen.elements < kappa * rows * width


def test_explain_tells_of_both_kernels() -> None:
    model = Tied(vocabulary=400)
    (row,) = (r for r in ia.explain(model, ids(4, 8, 400), 2).rows if r.name == "table.weight")
    assert "embedding_square" in row.kernel
    assert "gemm_square" in row.kernel
    assert row.memory < 8 // 2 * 400 * D * 4 * 2

"""The embedding table's gradient and square against float64, on the GPU or interpreted on the CPU."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import invariant_adam as ia
from invariant_adam.kernels import embedding_square as plain

twin = pytest.importorskip("invariant_adam.kernels.embedding_square.triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 1e-2, torch.float32: 1e-5}


def table_gradients(ids, G, rows, c=None):
    """dW and S from all κ tables, in float64."""
    tables = torch.zeros(ids.shape[0], rows, G.shape[-1], dtype=torch.float64)
    for k in range(ids.shape[0]):
        tables[k].index_add_(0, ids[k].cpu(), G[k].double().cpu())
    scale = 1 if c is None else c.double().cpu()[:, None, None]
    return tables.sum(0), (scale * tables.square()).sum(0)


def check(ids, G, rows, c=None):
    """Close to float64, and zero where no token is; what is not written shows."""
    empty = torch.empty
    with pytest.MonkeyPatch.context() as poison:
        poison.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(torch.nan))
        got = twin.embedding_square(ids, G, rows, c)
    untouched = torch.ones(rows, dtype=torch.bool)
    untouched[ids.cpu().reshape(-1)] = False
    for have, want in zip(got, table_gradients(ids, G, rows, c), strict=True):
        assert have.dtype == torch.float32
        assert (have.cpu()[untouched] == 0).all()
        assert (have.cpu().double() - want).norm() <= TOLERANCE[G.dtype] * want.norm()
    return got


def skewed(kappa, places, rows, share, generator):
    """Random tokens, a share of them the same one."""
    ids = torch.randint(rows, (kappa, places), generator=generator)
    return ids.masked_fill(torch.rand(ids.shape, generator=generator) < share, rows // 3)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    ("kappa", "places", "rows", "width", "share"),
    [(1, 1, 1, 1, 0), (3, 40, 50, 16, 0), (5, 14, 9, 300, 0), (4, 33, 500, 33, 0.9), (2, 80, 3, 20, 1)],
)
def test_sums_and_squares(kappa, places, rows, width, share, weighted, dtype):
    generator = torch.Generator().manual_seed(kappa * places)
    ids = skewed(kappa, places, rows, share, generator).to(DEVICE)
    G = torch.randn(kappa, places, width, generator=generator).to(DEVICE, dtype)
    c = torch.rand(kappa, generator=generator, dtype=torch.float64).to(DEVICE) if weighted else None
    check(ids, G, rows, c)


@given(
    st.integers(1, 5), st.integers(1, 24), st.integers(1, 40), st.integers(1, 4),
    st.sampled_from([0.0, 0.5, 0.9, 1.0]), st.sampled_from([1, 2, 8]), st.integers(0, 1000),
)  # fmt: skip
@pytest.mark.slow
def test_any_tokens_in_any_chunks(kappa, places, rows, width, share, chunk, seed):
    """Segments and runs within chunks, filling them, crossing one or many."""
    generator = torch.Generator().manual_seed(seed)
    ids = skewed(kappa, places, rows, share, generator).to(DEVICE)
    G = torch.randn(kappa, places, width, generator=generator).to(DEVICE)
    with pytest.MonkeyPatch.context() as small:
        small.setattr(twin, "CHUNK", chunk)
        small.setattr(twin, "AHEAD", 2)
        check(ids, G, rows, torch.rand(kappa, generator=generator).to(DEVICE))


def test_the_same_every_time():
    ids = skewed(4, 40, 20, 0.6, torch.Generator().manual_seed(1)).to(DEVICE)
    G = torch.randn(4, 40, 12, device=DEVICE)
    for once, twice in zip(*(check(ids, G, 20) for _ in range(2)), strict=True):
        assert torch.equal(once, twice)


def test_a_bad_row_spoils_its_token_alone():
    ids = skewed(4, 50, 12, 0.5, torch.Generator().manual_seed(0)).to(DEVICE)
    G = torch.randn(4, 50, 8, device=DEVICE)
    G[1, 7] = torch.nan
    for got in twin.embedding_square(ids, G, 12):
        bad = got.isnan().any(1)
        assert bad[ids[1, 7]]
        assert bad.sum() == 1


def test_strided_operands_and_short_ids():
    """As a rule gives them: views of a batch that is not first; ids of 32 bits."""
    ids = torch.randint(7, (9, 4), dtype=torch.int32, device=DEVICE).t()
    G = torch.randn(9, 4, 6, device=DEVICE).transpose(0, 1)
    for got, want in zip(twin.embedding_square(ids, G, 7), table_gradients(ids, G, 7), strict=True):
        torch.testing.assert_close(got.cpu().double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("share", [0.0, 0.9])
@pytest.mark.parametrize("kappa", [1, 32])
def test_a_language_model_on_a_gpu(share, kappa):
    generator = torch.Generator().manual_seed(0)
    ids = skewed(kappa, 32768 // kappa, 5000, share, generator).cuda()
    G = torch.randn(kappa, 32768 // kappa, 768, generator=generator).cuda()
    for once, twice in zip(*(check(ids, G, 5000) for _ in range(2)), strict=True):
        assert torch.equal(once, twice)


def test_operator():
    ids, G, c = torch.randint(9, (3, 20), device=DEVICE), torch.randn(3, 20, 5, device=DEVICE), torch.rand(3).to(DEVICE)
    for weights in (None, c):
        torch.library.opcheck(twin.embedding_square_op, (ids, G, 9, weights))


class Tokens(nn.Module):
    """Two tables, one with padding."""

    def __init__(self):
        super().__init__()
        self.words, self.kinds = nn.Embedding(30, 6, padding_idx=2), nn.Embedding(3, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, ids):
        return self.head(torch.tanh(self.words(ids) + self.kinds(ids % 3)))


@pytest.mark.filterwarnings("default")  # torch warns of itself while tracing
@pytest.mark.parametrize("compiled", [False, True])
def test_in_one_pass(monkeypatch, compiled):
    """κ = 3 with a ragged last micro-batch, eager and as a graph with the operator in it."""
    monkeypatch.setattr(plain, "fused", twin)
    monkeypatch.setattr(plain, "takes_fused", twin.serves)
    torch.manual_seed(0)
    first = Tokens().to(DEVICE)
    second = copy.deepcopy(first).double()
    ids = skewed(7, 12, 30, 0.3, torch.Generator().manual_seed(0)).to(DEVICE)
    ids[:, -3:] = 2
    run = torch.compile(first, backend="aot_eager", fullgraph=True) if compiled else first
    with ia.one_pass(run, 3):
        run(ids).square().mean().backward()
    grads = []
    for part in ids.split(3):
        second.zero_grad()
        second(part).square().mean().backward()
        grads.append((len(part) / len(ids), [p.grad.clone() for p in second.parameters()]))
    for i, (name, p) in enumerate(first.named_parameters()):
        torch.testing.assert_close(p.grad.double(), sum(w * g[i] for w, g in grads), rtol=1e-4, atol=1e-6, msg=name)
        want = sum(w * g[i].square() for w, g in grads)
        torch.testing.assert_close(p.grad_sq.double(), want, rtol=1e-4, atol=1e-7, msg=name)

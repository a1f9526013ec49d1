"""Whole models against the loop in float64, random nets, and training."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from loop_oracle import assert_exact, loop
from torch import Tensor, nn

from invariant_adam.one_pass import one_pass

B = 6


class Residual(nn.Module):
    def __init__(self, i: int, o: int, stride: int, norm) -> None:
        super().__init__()
        self.a, self.b = (
            nn.Conv2d(i, o, 3, stride, 1, bias=False),
            nn.Conv2d(o, o, 3, 1, 1, bias=False),
        )
        self.na, self.nb = norm(o), norm(o)
        self.skip = (
            nn.Identity() if i == o and stride == 1 else nn.Sequential(nn.Conv2d(i, o, 1, stride, bias=False), norm(o))
        )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.na(self.a(x)))
        return F.relu(self.nb(self.b(y)) + self.skip(x))


def resnet18(norm) -> nn.Module:
    """ResNet-18 for 32×32, an eighth as wide."""
    widths = (8, 16, 32, 64)
    blocks, i = [], 8
    for w in widths:
        for j in range(2):
            blocks.append(Residual(i, w, 2 if j == 0 and w > 8 else 1, norm))
            i = w
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 1, 1, bias=False),
        norm(8),
        nn.ReLU(),
        *blocks,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


class Attention(nn.Module):
    def __init__(self, d: int, qk_norm: bool = False, causal: bool = False) -> None:
        super().__init__()
        self.qkv, self.o, self.causal = nn.Linear(d, 3 * d), nn.Linear(d, d), causal
        self.nq, self.nk = (nn.LayerNorm(d // 2), nn.LayerNorm(d // 2)) if qk_norm else (nn.Identity(), nn.Identity())

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, 2, d // 2).permute(2, 0, 3, 1, 4).unbind(0)
        a = F.scaled_dot_product_attention(self.nq(q), self.nk(k), v, is_causal=self.causal)
        return self.o(a.transpose(1, 2).reshape(b, t, d))


class Block(nn.Module):
    def __init__(self, d: int, **options: bool) -> None:
        super().__init__()
        self.a, self.n1, self.n2 = Attention(d, **options), nn.LayerNorm(d), nn.LayerNorm(d)
        self.f = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.a(self.n1(x))
        return x + self.f(self.n2(x))


class ViT(nn.Module):
    def __init__(self, d: int = 16) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, d, 4, 4)
        self.cls, self.pos = nn.Parameter(torch.randn(1, 1, d)), nn.Parameter(torch.randn(1, 17, d))
        self.blocks = nn.Sequential(Block(d, qk_norm=True), Block(d, qk_norm=True))
        self.head = nn.Linear(d, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.pos
        return self.head(self.blocks(x)[:, 0])


class GPT(nn.Module):
    def __init__(self, d: int = 16, V: int = 11) -> None:
        super().__init__()
        self.tok, self.pos = nn.Embedding(V, d), nn.Embedding(8, d)
        self.blocks = nn.Sequential(Block(d, causal=True), Block(d, causal=True))
        self.n, self.head = nn.LayerNorm(d), nn.Linear(d, V, bias=False)
        self.head.weight = self.tok.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.tok(x) + self.pos(torch.arange(x.shape[1]))
        return self.head(self.n(self.blocks(x)))


class Translator(nn.Module):
    def __init__(self, d: int = 8, V: int = 11) -> None:
        super().__init__()
        self.e = nn.Embedding(V, d)
        self.net = nn.Transformer(d, 2, 2, 2, 16, 0.0, batch_first=True)
        self.head = nn.Linear(d, V)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(y.shape[1], dtype=torch.float64)
        return self.head(self.net(self.e(x), self.e(y), tgt_mask=mask))


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.e, self.r, self.o = (
            nn.Embedding(11, 6),
            nn.LSTM(6, 5, 2, batch_first=True, bidirectional=True),
            nn.Linear(10, 4),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.o(self.r(self.e(x))[0])


class MixtureOfExperts(nn.Module):
    """Top-1 routing: tokens of all samples go to their expert in one call."""

    def __init__(self, d: int = 6, experts: int = 3) -> None:
        super().__init__()
        self.inp, self.router = nn.Linear(d, d), nn.Linear(d, experts)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(d, 8), nn.GELU(), nn.Linear(8, d)) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        h = self.inp(x).reshape(-1, x.shape[-1])
        gate, choice = self.router(h).softmax(-1).max(-1)
        out = torch.zeros_like(h)
        for e, expert in enumerate(self.experts):
            rows = (choice == e).nonzero()[:, 0]
            if len(rows):
                out = out.index_add(0, rows, expert(h[rows]) * gate[rows, None])
        return out.view_as(x)


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 6, 3, 1, 1), nn.Conv2d(6, 8, 3, 2, 1)
        self.norm, self.up = nn.BatchNorm2d(8), nn.ConvTranspose2d(8, 6, 4, 2, 1)
        self.out = nn.Conv2d(12, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.a(x).relu()
        b = self.norm(self.b(a)).relu()
        return self.out(torch.cat([a, self.up(b)], 1))


def images(size: int = 16) -> Tensor:
    return torch.randn(B, 3, size, size, dtype=torch.float64)


def words(length: int = 5) -> Tensor:
    return torch.randint(0, 11, (B, length))


MODELS = {
    "mlp": lambda: (
        nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)),
        torch.randn(B, 5, dtype=torch.float64),
    ),
    "resnet18_batch_norm": lambda: (resnet18(nn.BatchNorm2d), images()),
    "resnet18_group_norm": lambda: (resnet18(lambda c: nn.GroupNorm(1, c)), images()),
    "vit": lambda: (ViT(), images()),
    "gpt_tied": lambda: (GPT(), words()),
    "encoder_decoder": lambda: (Translator(), words(), words(4)),
    "lstm_tagger": lambda: (Tagger(), words()),
    "mixture_of_experts": lambda: (MixtureOfExperts(), torch.randn(B, 4, 6, dtype=torch.float64)),
    "unet": lambda: (UNet(), images(8)),
}


def loss(model: nn.Module, batch: tuple) -> Tensor:
    return model(*batch).flatten(1).sin().sum(1).mean()


NEED_TWO = ("resnet18_batch_norm", "unet")  # samples per micro-batch, for their batch norm


@pytest.mark.parametrize(("name", "M"), [(n, M) for n in MODELS for M in (1, 3, 4, B) if M > 1 or n not in NEED_TWO])
def test_model_equals_loop(name: str, M: int) -> None:
    torch.manual_seed(0)
    model, *batch = MODELS[name]()
    assert_exact(model.double(), tuple(batch), loss, M)


LAYERS = {
    "linear": lambda: nn.Linear(6, 6),
    "linear_norm": lambda: nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6)),
    "rms": lambda: nn.RMSNorm(6),
    "prelu": lambda: nn.PReLU(),
    "conv": lambda: nn.Conv1d(4, 4, 3, padding=1),
    "depthwise": lambda: nn.Conv1d(4, 4, 3, padding=1, groups=4),
    "group_norm": lambda: nn.GroupNorm(2, 4),
    "batch_norm": lambda: nn.BatchNorm1d(4),
    "encoder": lambda: nn.TransformerEncoderLayer(6, 2, 8, 0.0, batch_first=True),
    "weight_norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)),
    "gelu": lambda: nn.GELU(),
}


class Random(nn.Module):
    """Layers of (4, 6) maps in a chain, some called twice, one with a raw parameter between."""

    def __init__(self, names: list[str], again: list[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(LAYERS[n]() for n in names)
        self.again = [i for i in again if i < len(names)]
        self.raw = nn.Parameter(torch.randn(4, 6))
        self.head = nn.Linear(24, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        x = x * self.raw
        for i in self.again:
            x = x + self.layers[i](x)
        return self.head(x.flatten(1))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(
    names=st.lists(st.sampled_from(sorted(LAYERS)), min_size=1, max_size=4),
    again=st.lists(st.integers(0, 3), max_size=2),
    M=st.integers(2, 5),
    kappa=st.integers(1, 4),
    rest=st.integers(0, 4),
)
def test_random_nets_equal_the_loop(names: list[str], again: list[int], M: int, kappa: int, rest: int) -> None:
    torch.manual_seed(len(names) + M)
    batch = M * kappa + rest % M
    if batch % M == 1:
        batch -= 1  # batch norm needs two samples
    # A batch norm called again folds its statistics twice per micro-batch; the loop interleaves
    # them, one pass does not.
    again = [i for i in again if i < len(names) and names[i] != "batch_norm"]
    model = Random(names, again).double()
    assert_exact(model, (torch.randn(batch, 4, 6, dtype=torch.float64),), loss, M)


def adam(params: list[nn.Parameter], state: dict, pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Invariant Adam's update from pairs, written out."""
    state["t"] = t = state.get("t", 0) + 1
    for p, (g, g2) in zip(params, pairs, strict=True):
        m, v = state.setdefault(p, (torch.zeros_like(p), torch.zeros_like(p)))
        m.lerp_(g.to(m), 0.1)
        v.lerp_(g2.to(v), 0.01)
        p.data -= 1e-3 * (m / (1 - 0.9**t)) / ((v / (1 - 0.99**t)).sqrt() + 1e-6)


@pytest.mark.parametrize(("dtype", "tol"), [(torch.float64, 1e-10), (torch.float32, 1e-6)])
def test_ten_updates_give_the_weights_of_the_loop(dtype: torch.dtype, tol: float) -> None:
    torch.manual_seed(0)
    looped = Tagger().to(dtype)
    passed = copy.deepcopy(looped)
    states: tuple[dict, dict] = ({}, {})
    for step in range(10):
        torch.manual_seed(step)
        batch = (words(),)
        want = loop(looped, batch, loss, 2, B)
        adam(list(looped.parameters()), states[0], list(want.values()))
        with one_pass(passed, 2):
            loss(passed, batch).backward()
        adam(list(passed.parameters()), states[1], [(p.grad, p.grad_sq) for p in passed.parameters()])
        for p in passed.parameters():
            p.grad = None
            del p.grad_sq
    for a, b in zip(looped.parameters(), passed.parameters(), strict=True):
        assert (a - b).abs().max() <= tol * max(1, a.abs().max())

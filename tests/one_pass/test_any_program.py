"""The law of one pass: on whatever a model does with the batch and its parameters, it equals the loop or refuses.

Hypothesis writes the models: a few steps in a row, each with parameters of its own or with earlier ones once more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st
from loop_oracle import assert_exact, error, loop
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from invariant_adam.one_pass import UnsupportedUse, one_pass


class Step(NamedTuple):
    """What a model does with x (B, D) or (B, T, D), the shapes of the parameters it takes, and which x it fits."""

    run: Callable[..., Tensor]
    shapes: Callable[[torch.Size], list[tuple[int, ...]]] = lambda s: []
    fits: Callable[[torch.Size], bool] = lambda s: True


def sequence(s: torch.Size) -> bool:
    return len(s) == 3


def even_length(s: torch.Size) -> bool:
    return len(s) == 3 and s[1] % 2 == 0


def even_width(s: torch.Size) -> bool:
    return len(s) == 3 and s[2] % 2 == 0


def vector(s: torch.Size) -> list[tuple[int, ...]]:
    return [(s[-1],)]


def vectors(s: torch.Size) -> list[tuple[int, ...]]:
    return [(s[-1],), (s[-1],)]


def matrix(s: torch.Size) -> list[tuple[int, ...]]:
    return [(s[-1], s[-1])]


def normal(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-3)


def buckets(x: Tensor, n: int) -> Tensor:
    """A number below n for each row of x, which depends on the row."""
    return (x.detach().sum(-1) * 2).floor().long() % n


def expert_by_expert(x: Tensor, gate: Tensor, experts: Tensor) -> Tensor:
    flat = x.flatten(0, 1)
    scores = (flat @ gate).softmax(-1)
    top, out = scores.argmax(-1), torch.zeros_like(flat)
    for e in range(len(experts)):
        at = (top == e).nonzero()[:, 0]
        out = out.index_add(0, at, F.linear(flat[at], experts[e]) * scores[at, e][:, None])
    return out.view_as(x)


def in_windows(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    windows = F.linear(x.unflatten(1, (-1, 2)).flatten(0, 1), w)
    windows = torch.softmax(windows @ windows.transpose(1, 2) + bias, -1) @ windows
    return windows.unflatten(0, (x.shape[0], -1)).flatten(1, 2)


def recurrent(x: Tensor, w: Tensor, decay: Tensor) -> Tensor:
    h, out = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        h = torch.tanh(torch.sigmoid(decay) * x[:, t] + F.linear(h, w))
        out.append(h)
    return torch.stack(out, 1)


def by_heads(x: Tensor, w: Tensor, outer: bool) -> Tensor:
    heads = x.unflatten(2, (2, -1))
    heads = heads.permute(2, 0, 1, 3) if outer else heads.transpose(1, 2)
    made = (heads.flatten(0, 1) @ w).unflatten(0, heads.shape[:2])
    return (made.permute(1, 2, 0, 3) if outer else made.transpose(1, 2)).flatten(2)


def added_in_place(x: Tensor, p: Tensor) -> Tensor:
    y = x.clone()
    y += p
    y *= 2
    return y


def half_of_rows(x: Tensor, w: Tensor) -> Tensor:
    chosen, out = x.detach().sum(-1) > 0, x.clone()
    out[chosen] = F.linear(x[chosen], w)
    return out


# Steps that treat samples alike.
ALIKE = {
    "linear": Step(F.linear, lambda s: [(4, s[-1]), (4,)]),
    "product": Step(torch.matmul, matrix),
    "product_from_the_left": Step(lambda x, w: w @ x, lambda s: [(3, s[1])], sequence),
    "scale": Step(torch.mul, vector),
    "bias": Step(lambda x, p: p + x, vector),
    "gate": Step(lambda x, p: torch.sigmoid(p) * x, vector),
    "positions": Step(lambda x, p: x + p[:, : x.shape[1]], lambda s: [(1, s[1] + 2, s[2])], sequence),
    "columns": Step(lambda x, p: x * p, lambda s: [(s[1], 1)], sequence),
    "layer_norm": Step(lambda x, w, b: F.layer_norm(x, w.shape, w, b), vectors),
    "rms_norm": Step(lambda x, w: F.rms_norm(x, w.shape, w), vector),
    "own_norm": Step(lambda x, w: w * normal(x), vector),
    "convolution": Step(lambda x, w: F.conv1d(x, w, padding=1), lambda s: [(4, s[1], 3)], sequence),
    "token": Step(lambda x, p: torch.cat([p.expand(len(x), -1, -1), x], 1), lambda s: [(1, 1, s[2])], sequence),
    "tokens": Step(lambda x, p: torch.cat([p.repeat(len(x), 1, 1), x], 1), lambda s: [(2, s[2])], sequence),
    "query": Step(lambda x, p: torch.softmax(p @ x.transpose(1, 2), -1) @ x, lambda s: [(2, s[2])], sequence),
    "memory": Step(
        lambda x, p: F.scaled_dot_product_attention(x, *[p[None].expand(len(x), -1, -1)] * 2),
        lambda s: [(3, s[2])], sequence,
    ),
    "bias_of_attention": Step(
        lambda x, p: torch.softmax(x @ x.transpose(1, 2) * 0.3 + p, -1) @ x, lambda s: [(s[1], s[1])], sequence
    ),
    "einsum": Step(lambda x, w: torch.einsum("btd,tde->bte", x, w), lambda s: [(s[1], s[2], 4)], sequence),
    "bmm": Step(lambda x, w: torch.bmm(x.transpose(0, 1), w).transpose(0, 1), lambda s: [(s[1], s[2], 4)], sequence),
    "experts": Step(expert_by_expert, lambda s: [(s[2], 3), (3, s[2], s[2])], sequence),
    "token_for_a_mask": Step(
        lambda x, p: torch.where(x.detach().sum(-1, keepdim=True) > 0, p, x), lambda s: [(s[2],)], sequence
    ),
    "weight_norm": Step(
        lambda x, w, g: F.linear(x, g * w / w.norm(dim=1, keepdim=True)), lambda s: [(4, s[-1]), (4, 1)]
    ),
    "low_rank": Step(
        lambda x, w, a, b: F.linear(x, w + b @ a), lambda s: [(s[-1], s[-1]), (2, s[-1]), (s[-1], 2)]
    ),
    "halves": Step(lambda x, w: F.linear(x, w[:4]) * F.linear(x, w[4:]), lambda s: [(8, s[-1])]),
    "lerp": Step(lambda x, p: torch.lerp(x, x.flip(-1), p), vector),
    "power": Step(lambda x, p: (x.abs() + 0.5) ** p, lambda s: [(1,)]),
    "addcmul": Step(lambda x, p, q: torch.addcmul(p, x, q), vectors),
    "table": Step(lambda x, p: x + p[buckets(x, 4)], lambda s: [(4, s[-1])]),
    "lookup": Step(lambda x, p: x + F.embedding(buckets(x, 4), p), lambda s: [(4, s[-1])]),
    "lookup_of_places": Step(lambda x, p: x + F.embedding(torch.arange(x.shape[1]), p), lambda s: [s[1:]], sequence),
    "recurrent": Step(recurrent, lambda s: [(s[2], s[2]), (s[2],)], sequence),
    "rows_of_time": Step(
        lambda x, w: F.linear(x.flatten(0, 1), w).unflatten(0, (len(x), -1)), lambda s: [(4, s[2])], sequence
    ),
    "time_first": Step(lambda x, w: F.linear(x.transpose(0, 1), w).transpose(0, 1), lambda s: [(4, s[2])], sequence),
    "windows": Step(in_windows, lambda s: [(s[2], s[2]), (2, 2)], even_length),
    "heads": Step(lambda x, w: by_heads(x, w, False), lambda s: [(s[2] // 2, 3)], even_width),
    "heads_first": Step(lambda x, w: by_heads(x, w, True), lambda s: [(s[2] // 2, 3)], even_width),
    "beams": Step(lambda x, w: F.linear(x.repeat_interleave(2, 0), w).unflatten(0, (-1, 2)).sum(1), matrix),
    "checkpoint": Step(
        lambda x, w, p: checkpoint(lambda t: torch.tanh(F.linear(t, w)) * p, x, use_reentrant=False),
        lambda s: [(s[-1], s[-1]), (s[-1],)],
    ),
    "in_place": Step(added_in_place, vector),
    "half_of_rows": Step(half_of_rows, matrix, sequence),
    "activation": Step(torch.tanh),
    "softmax": Step(lambda x: x.softmax(-1)),
    "transpose": Step(lambda x: x.transpose(1, 2), fits=sequence),
    "mean_over_time": Step(lambda x: x.mean(1), fits=sequence),
    "last": Step(lambda x: x[torch.arange(len(x)), x.detach().sum(-1).argmax(-1)], fits=sequence),
    "sequence": Step(lambda x: x[:, None].expand(-1, 3, -1), fits=lambda s: len(s) == 2),
}  # fmt: skip
# Steps that do not, some of them for a while.
MIXING = {
    "other_order": Step(lambda x, w: F.linear(x.flip(0), w), matrix),
    "order_and_back": Step(lambda x, w: F.linear(x.flip(0), w).flip(0), matrix),
    "mean_of_samples": Step(lambda x, w: F.linear(x - x.mean(0), w), matrix),
    "sorted_samples": Step(lambda x, p: x[x.detach().flatten(1).sum(1).argsort()] * p, vector),
    "penalty": Step(lambda x, p: x + p.square().sum(), vector),
}  # fmt: skip
STEPS = ALIKE | MIXING


class Program(nn.Module):
    """Steps in a row, those that fit the shape they meet; `again` says which take an earlier parameter."""

    def __init__(self, names: list[str], again: list[bool], x: Tensor) -> None:
        super().__init__()
        self.values, self.steps = nn.ParameterList(), []
        torch.manual_seed(0)
        for name, once_more in zip(names, again, strict=True):
            step = STEPS[name]
            if not step.fits(x.shape):
                continue
            places = [self._place(torch.Size(shape), once_more) for shape in step.shapes(x.shape)]
            y = step.run(x, *(self.values[i] for i in places)).detach()
            if y.numel() <= 4000:
                self.steps.append((step.run, places))
                x = y

    def _place(self, shape: torch.Size, once_more: bool) -> int:
        alike = [i for i, p in enumerate(self.values) if p.shape == shape]
        if once_more and alike:
            return alike[0]
        self.values.append(nn.Parameter(torch.randn(shape, dtype=torch.float64) / 2))
        return len(self.values) - 1

    def forward(self, x: Tensor) -> Tensor:
        for run, places in self.steps:
            x = run(x, *(self.values[i] for i in places))
        return x


def loss(model: nn.Module, batch: Any) -> Tensor:
    return model(*batch).flatten(1).sin().sum(1).mean()


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(
    steps=st.lists(st.tuples(st.sampled_from(sorted(STEPS)), st.booleans()), min_size=1, max_size=6),
    tokens=st.booleans(),
    B=st.sampled_from([4, 6, 7, 8]),
    T=st.sampled_from([2, 3, 4, 6, 8]),
    D=st.sampled_from([4, 6, 8]),
    M=st.integers(1, 3),
)
def test_is_exact_or_refused(steps, tokens, B, T, D, M):
    """Sizes that are the batch's, ragged micro-batches and shared parameters among them."""
    names, again = zip(*steps, strict=True)
    generator = torch.Generator().manual_seed(B * T * D * M)
    x = torch.randn(B, T, D, dtype=torch.float64, generator=generator)
    model = Program(list(names), list(again), x)
    if tokens:  # differentiable from the start, as behind an embedding
        x, table = torch.randint(5, (B, T), generator=generator), nn.Embedding(5, D, dtype=torch.float64)
        model = nn.Sequential(table, Program(list(names), list(again), table(x).detach()))
    assume(list(model.parameters()) and model(x).requires_grad)
    try:
        with one_pass(model, M):
            loss(model, (x,)).backward()
    except UnsupportedUse as refused:
        event(f"refused: {str(refused).partition(' goes through ')[2][:40]}")
        return
    want = loop(model, (x,), loss, M, B)
    floor = max(float(square.abs().max()) for _, square in want.values())
    for name, p in model.named_parameters():
        if name in want:
            event("exact")
            assert error(p.grad, want[name][0], 1e-6 * floor**0.5) < 1e-7, (name, names)
            assert error(p.grad_sq, want[name][1], 1e-6 * floor) < 1e-7, (name, names)


def flattened(model: nn.Module, x: Tensor) -> Tensor:
    y = F.linear(x.flatten(0, 1), model[0].weight).unflatten(0, (len(x), -1)).clone()
    y += model[1].weight[0]
    return y


def marked(model: nn.Module, x: Tensor) -> Tensor:
    mark = (x[:, :1, :1] > 0).expand(-1, 2, -1)  # the same for the first two samples, and for the last two
    return torch.where(mark, model[1].weight[0], model[0](x))


class Two(nn.Sequential):
    def __init__(self, run: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__(nn.Linear(4, 4).double(), nn.Linear(4, 4).double())
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


@pytest.mark.parametrize("run", [flattened, marked])
def test_what_was_taken_for_a_constant_before_a_refusal_is_looked_at_again(run):
    """Inputs that need no gradient do not show that they are the batch's, and what follows may be refused for that."""
    torch.manual_seed(0)
    x = torch.randn(6, 2, 4, dtype=torch.float64)
    x[:, 0, 0] = torch.tensor([1.0, 1.0, -1.0, 1.0, -1.0, -1.0])
    assert_exact(Two(run), (x,), loss, 1)

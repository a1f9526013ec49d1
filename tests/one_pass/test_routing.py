"""Rows that were picked by index keep their place in the batch through what happens to them afterwards."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from loop_oracle import assert_exact
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from invariant_adam.one_pass import UnsupportedUse, explain, one_pass

B, T, D, E = 12, 5, 8, 4  # samples, tokens each, width, experts
Apply = Callable[["Sorted", Tensor, list[int]], Tensor]


class Sorted(nn.Module):
    """Experts that find their rows side by side: `apply` takes the sorted rows and the number of each expert's."""

    def __init__(self, apply: Apply) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.apply_to, self.inp = apply, nn.Linear(D, D)
        self.experts = nn.ModuleList(nn.Linear(D, D) for _ in range(E))
        self.last = nn.Linear(D, D)
        self.double()

    def forward(self, x: Tensor, to: Tensor) -> Tensor:
        to, order = to.flatten().sort()
        rows = self.inp(x).flatten(0, 1)[order]
        rows = self.apply_to(self, rows, torch.bincount(to, minlength=E).tolist())
        return rows[order.argsort()].view(len(x), -1)


def each(model: Sorted, parts: list[Tensor]) -> list[Tensor]:
    return [expert(part).tanh() for expert, part in zip(model.experts, parts, strict=True)]


def by_split(m: Sorted, rows: Tensor, sizes: list[int]) -> Tensor:
    return m.last(torch.cat(each(m, rows.split(sizes))))


def by_slices(m: Sorted, rows: Tensor, sizes: list[int]) -> Tensor:
    ends = torch.tensor(sizes).cumsum(0).tolist()
    parts = [rows[end - n : end] for n, end in zip(sizes, ends, strict=True)]
    return m.last(torch.cat(each(m, parts), dim=-2))


def in_even_parts(m: Sorted, rows: Tensor, sizes: list[int]) -> Tensor:
    return m.last(torch.cat(each(m, rows.split(len(rows) // E, dim=-2))))


def by_columns(m: Sorted, rows: Tensor, sizes: list[int]) -> Tensor:
    """Neither parts of columns nor their concatenation move rows."""
    left, right = rows[..., ::2], rows[..., 1::2]
    first, second = torch.cat([left, right], -1).chunk(2, dim=-1)
    return m.last(torch.cat([first.tanh(), second], 1))


def by_a_copy(m: Sorted, rows: Tensor, sizes: list[int]) -> Tensor:
    out = torch.zeros_like(rows)
    out.copy_(rows)
    return m.last(out)


def over_others(m: Sorted, rows: Tensor, sizes: list[int]) -> Tensor:
    """Rows that were picked otherwise, and are written over."""
    out = rows.flip(0)[torch.arange(len(rows))]
    out.copy_(rows)
    return m.last(out)


def by_aten(m: Sorted, rows: Tensor, sizes: list[int]) -> Tensor:
    """A slice whose bounds are not given."""
    return m.last(torch.ops.aten.slice.Tensor(rows, 0, None, None))


def loss(model: nn.Module, batch: tuple) -> Tensor:
    return model(*batch).sin().sum(1).mean()


def destinations(which: str) -> Tensor:
    torch.manual_seed(2)
    to = torch.randint(0, E, (B, T))
    if which == "one without tokens":
        to[to == 1] = 2
    return to


@pytest.mark.parametrize("M", [1, 3, 5])  # 5 leaves a ragged one
@pytest.mark.parametrize("which", ["spread", "one without tokens"])
@pytest.mark.parametrize("apply", [by_split, by_slices, by_columns, by_a_copy, over_others, by_aten])
def test_equals_the_loop(apply: Apply, which: str, M: int) -> None:
    torch.manual_seed(1)
    batch = torch.randn(B, T, D, dtype=torch.float64), destinations(which)
    assert_exact(Sorted(apply), batch, loss, M)


ACTIVATIONS = [
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Sigmoid, nn.Tanh,
    nn.Softplus, nn.Hardswish, nn.Hardtanh, nn.Hardsigmoid, nn.LogSigmoid,
]  # fmt: skip


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_rows_keep_their_place_through_an_activation(activation: type[nn.Module]) -> None:
    def apply(m: Sorted, rows: Tensor, sizes: list[int]) -> Tensor:
        return m.last(activation()(rows))

    torch.manual_seed(1)
    batch = torch.randn(B, T, D, dtype=torch.float64), destinations("spread")
    assert_exact(Sorted(apply), batch, loss, 3)


class Languages(nn.Module):
    """Sequences that are picked whole, each for its language's layers, tied ones among them, as in X-MOD."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inp, self.tied = nn.Linear(D, D), nn.Linear(D, D)
        self.adapters = nn.ModuleList(nn.Linear(D, D) for _ in range(2))
        self.scale = nn.Parameter(torch.rand(D))
        self.double()

    def forward(self, x: Tensor, language: Tensor) -> Tensor:
        x = self.inp(x)
        out = torch.zeros_like(x)
        for i, adapter in enumerate(self.adapters):
            rows = x[language == i]
            out[language == i] = self.tied(self.tied(adapter(rows).tanh()) * self.scale)
        return (out + x).flatten(1)


@pytest.mark.parametrize("M", [1, 3, 5])
def test_sequences_that_were_picked_whole(M: int) -> None:
    torch.manual_seed(1)
    language = torch.randint(0, 2, (B,))
    batch = torch.randn(B, T, D, dtype=torch.float64), language
    assert_exact(Languages(), batch, loss, M)
    told = str(explain(Languages(), batch, micro_batch_size=M))
    rows = -(-int((language == 0).sum()) * T // -(-B // M))  # of each micro-batch, in the mean
    assert re.search(rf"adapters\.0\.weight +8×8 +linear +{rows} ", told)


def test_parts_of_one_size_are_told_by_their_number() -> None:
    """split(n) gives its outputs no sizes of their own; the loop would cut other rows, so squares are made by hand."""
    torch.manual_seed(1)
    model = Sorted(in_even_parts)
    x, to = torch.randn(B, T, D, dtype=torch.float64), destinations("spread")
    with one_pass(model, 3, check=False):
        out = model(x, to)
        out.square().sum(1).mean().backward()
    order = to.flatten().sort().indices
    rows = model.inp(x).flatten(0, 1)[order].detach()
    group = (order // T) // 3
    n = len(rows) // E
    for expert in model.experts:
        squares = torch.zeros_like(expert.weight)
        for k in range(B // 3):
            # All rows but those of micro-batch k are cut off from the loss, so that its share is left.
            mine = [(group[i * n : (i + 1) * n] == k)[:, None] for i in range(E)]
            outs = [f(rows[i * n : (i + 1) * n]).tanh() * mine[i] for i, f in enumerate(model.experts)]
            y = model.last(torch.cat(outs)) * torch.cat(mine)
            squares += torch.autograd.grad(y.square().sum() / 3, expert.weight)[0].square() / (B // 3)
        torch.testing.assert_close(expert.weight.grad_sq, squares)


def stacked(m: Sorted, rows: Tensor, sizes: list[int]) -> Tensor:
    """Rows with rows of the batch that were not picked: nobody knows the places of the latter."""
    return m.last(torch.cat([rows, m.inp.bias.expand(1, D)]))[:-1]


def test_a_concatenation_with_rows_of_unknown_place_is_refused() -> None:
    batch = torch.randn(B, T, D, dtype=torch.float64), destinations("spread")
    with pytest.raises(UnsupportedUse), one_pass(Sorted(stacked), 3) as context:
        context.model(*batch).mean().backward()


class Compiled(nn.Module):
    """Sorted rows, which meet a layer and biases picked by expert."""

    def __init__(self, biased: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inp, self.last = nn.Linear(D, D), nn.Linear(D, D)
        self.b = nn.Parameter(torch.randn(E, D)) if biased else None
        self.double()

    def forward(self, x: Tensor, to: Tensor) -> Tensor:
        to, order = to.flatten().sort(stable=True)
        rows = self.inp(x).flatten(0, 1)[order]
        rows = self.last(rows) if self.b is None else rows + self.b[to]
        return rows.tanh()[order.argsort()].view(len(x), -1)


@pytest.mark.filterwarnings("default")  # torch warns of itself while tracing
@pytest.mark.parametrize("biased", [False, True])
def test_a_compiled_graph_does_not_take_picked_rows_for_rows_in_order(biased: bool) -> None:
    """The check has followed them in the model as it is written; a trace cannot, and leaves them to the eager model."""
    torch._dynamo.reset()
    torch.manual_seed(1)
    batch, model = (torch.randn(B, T, D, dtype=torch.float64), destinations("spread")), Compiled(biased)
    assert_exact(model, batch, loss, 3, run=torch.compile(model, backend="aot_eager"))
    torch._dynamo.reset()
    model = Compiled(biased)
    whole = torch.compile(model, backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="whose places a compiled graph does not tell"), one_pass(whole, 3):
        whole(*batch)


@pytest.mark.filterwarnings("default")
def test_rows_that_come_out_of_a_graph_are_refused() -> None:
    """A function that is compiled by itself picks the rows."""
    torch._dynamo.reset()
    model = Compiled(False)
    pick = torch.compile(lambda x, order: x.flatten(0, 1)[order], backend="aot_eager")

    def forward(x: Tensor, to: Tensor) -> Tensor:
        order = to.flatten().argsort()
        return model.last(pick(model.inp(x), order))[order.argsort()].view(len(x), -1)

    model.forward = forward  # type: ignore[method-assign]
    batch = torch.randn(B, T, D, dtype=torch.float64), destinations("spread")
    with pytest.raises(UnsupportedUse, match=r"last.weight.* whose places a compiled graph"), one_pass(model, 3):
        model(*batch)


class Checkpointed(Sorted):
    """All of it in a checkpoint, which would run again for an index in the middle of its forward."""

    def forward(self, x: Tensor, to: Tensor) -> Tensor:
        return checkpoint(super().forward, x, to, use_reentrant=False)


def test_rows_picked_inside_of_a_checkpoint_are_refused() -> None:
    batch = torch.randn(B, T, D, dtype=torch.float64), destinations("spread")
    with pytest.raises(UnsupportedUse, match=r"inside of a checkpoint.*checkpoint what comes"):  # noqa: SIM117
        with one_pass(Checkpointed(by_split), 3, check=False) as context:
            context.model(*batch)


class OneByOne(nn.Module):
    """Each expert finds its rows and its bias, which is named by a vector of one number."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inp, self.b = nn.Linear(D, D), nn.Parameter(torch.randn(E, D))
        self.double()

    def forward(self, x: Tensor, to: Tensor) -> Tensor:
        rows, to = self.inp(x).flatten(0, 1), to.flatten()
        out = torch.zeros_like(rows)
        for e in range(E):
            mine = torch.where(to == e)[0]
            out = out.index_add(0, mine, (rows[mine] + self.b[torch.tensor([e])]).tanh())
        return out.view(len(x), -1)


def test_an_expert_with_one_row_makes_its_bias_no_batchs() -> None:
    torch.manual_seed(1)
    x, one_row = torch.randn(B, T, D, dtype=torch.float64), destinations("spread")
    one_row[one_row == 1] = 2
    one_row[3, 1] = 1
    model = OneByOne()
    for to in (one_row, destinations("spread"), one_row):
        assert_exact(model, (x, to), loss, 3)

"""Rows of a table that are named by constants, against the loop in float64."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from loop_oracle import assert_exact, loop
from test_own_forward import assert_own
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import invariant_adam as ia
from invariant_adam.one_pass import one_pass

B, N, H, V = 12, 4, 3, 7
SIZES = [1, 3, 5, B]


class Windows(nn.Module):
    """Attention within windows, as Swin has it: a table of biases, looked up for each pair of places."""

    index: Tensor

    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.how = how
        self.first = nn.Linear(H * 2, H * 2)
        self.qkv, self.proj = nn.Linear(H * 2, H * 6), nn.Linear(H * 2, H * 2)
        self.table = nn.Parameter(torch.randn(V, H))
        self.other = self.table if "tied" in how else nn.Parameter(torch.randn(V, H))
        index = torch.randint(0, V - 1, (N, N))  # names some rows often, and the last never
        self.register_buffer("index", index - V if "negative" in how else index)

    def bias(self, table: Any) -> Any:
        if "2-d" in self.how:
            rows = table[self.index]
        elif "embedding" in self.how:
            rows = F.embedding(self.index % V, table)
        elif "index_select" in self.how:
            rows = table.index_select(0, self.index.view(-1) % V)
        elif "int32" in self.how:
            rows = table[self.index.int()]
        else:
            rows = table[self.index.view(-1)]
        return rows.view(N, N, -1).permute(2, 0, 1).contiguous().unsqueeze(0)

    def attend(self, x: Tensor, name: str) -> Tensor:
        table = getattr(self, name)
        q, k, v = self.qkv(x).reshape(len(x), N, 3, H, 2).permute(2, 0, 3, 1, 4)
        if "mask" in self.how:
            y = F.scaled_dot_product_attention(q, k, v, self.bias(table))
        else:
            scores = q @ k.mT
            scores = self.bias(table) + scores if "first" in self.how else scores + self.bias(table)
            y = scores.softmax(-1) @ v
        return self.proj(y.transpose(1, 2).reshape(x.shape))

    def forward(self, x: Tensor) -> Tensor:
        windows = self.first(x).reshape(-1, N, H * 2)  # two of each sample
        for name in ("table", "other"):
            if "again" in self.how:
                windows = windows + checkpoint(self.attend, windows, name, use_reentrant=False)
            else:
                windows = windows + self.attend(windows, name)
        return windows.reshape(x.shape)


def case(how: str = "") -> tuple[Windows, tuple[Tensor]]:
    torch.manual_seed(0)
    return Windows(how).double(), (torch.randn(B, 2, N, H * 2, dtype=torch.float64),)


def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return model(*batch).flatten(1).sin().sum(1).mean()


HOW = ["", "2-d", "embedding", "index_select", "int32", "negative", "mask", "first", "tied", "again", "tied again"]


@pytest.mark.parametrize("M", SIZES)
@pytest.mark.parametrize("how", HOW)
def test_equals_the_loop(how: str, M: int) -> None:
    assert_exact(*case(how), loss, M)


TABLES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "vector": lambda t, i: t[:, 0, 0][i.view(-1)],
    "of_matrices": lambda t, i: t[i[0]],
    "one_row": lambda t, i: t[i[0, 0]],
    "of_a_part": lambda t, i: t[1:][i[1] % 3],
    "of_a_computed_value": lambda t, i: t.exp()[i],
    "twice": lambda t, i: t[i][i[0] % N],
    "of_int16": lambda t, i: t[i[0].short().long()],
    "by_a_mask": lambda t, i: t[torch.arange(V) % 2 == 0],
    "by_two": lambda t, i: t[i[0], i[1] % 2],
    "by_one_and_a_slice": lambda t, i: t[i[0], :, 1:],
    "behind_a_slice": lambda t, i: t[:, i[0] % 2],
    "other_dimension": lambda t, i: t.index_select(-1, i[0] % 3),
    "padding": lambda t, i: F.embedding(i, t[:, 0], padding_idx=2),
    "nothing": lambda t, i: t[i[0][:0]].sum(0) + t[0],
}


class Table(nn.Module):
    """A table (V, 2, 3) whose rows scale the batch."""

    index: Tensor

    def __init__(self, pick: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.pick = pick
        self.t, self.lin = nn.Parameter(torch.randn(V, 2, 3)), nn.Linear(2, 1)
        self.register_buffer("index", torch.randint(0, V, (N, N)))

    def forward(self, x: Tensor) -> Tensor:
        rows = self.pick(self.t, self.index)
        return (self.lin(x).view(-1, *[1] * rows.ndim) * rows).reshape(len(x), -1)


@pytest.mark.parametrize("M", SIZES)
@pytest.mark.parametrize("name", TABLES)
def test_tables_of_any_shape_equal_the_loop(name: str, M: int) -> None:
    torch.manual_seed(0)
    assert_exact(Table(TABLES[name]).double(), (torch.randn(B, 2, dtype=torch.float64),), loss, M)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, None])
@pytest.mark.parametrize("how", HOW)
def test_the_forward_is_the_models_own(how: str, dtype: torch.dtype | None, device: str) -> None:
    model, (x,) = case(how)
    model, x = model.float().to(device), x.float().to(device)
    assert_own(model, lambda: model(x), dtype, device)


@pytest.mark.filterwarnings("default")  # torch warns of itself while tracing
@pytest.mark.parametrize("into", [False, True])
@pytest.mark.parametrize("how", ["", "2-d", "embedding", "negative", "mask", "tied", "again"])
def test_compiled(how: str, into: bool) -> None:
    torch._dynamo.reset()
    model, batch = case(how)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    if not into:
        assert_exact(model, batch, loss, 3, run=compiled)
        return
    want = loop(model, batch, loss, 3, B)
    opt = ia.InvariantAdam(model.parameters(), lr=1e-3, state_dtype=torch.float64, micro_batch_size=3)
    with one_pass(compiled, 3, into=opt):
        loss(compiled, batch).backward()
    agree(model, opt, want)


def agree(model: nn.Module, opt: Any, want: dict[str, tuple[Tensor, Tensor]]) -> None:
    """The moments after a first update are those of the loop, whatever their factors."""
    for name, p in model.named_parameters():
        for key, expected in zip(("exp_avg", "exp_avg_sq"), want[name], strict=True):
            got, scale = opt.state[p][key].double(), expected.abs().max()
            torch.testing.assert_close(got / got.abs().max(), expected / scale, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("how", ["", "tied", "again"])
def test_pairs_go_into_the_optimizer(how: str) -> None:
    model, batch = case(how)
    want = loop(model, batch, loss, 3, B)
    opt = ia.InvariantAdam(model.parameters(), lr=1e-3, state_dtype=torch.float64, micro_batch_size=3)
    with one_pass(model, 3, into=opt):
        loss(model, batch).backward()
    agree(model, opt, want)


@pytest.mark.parametrize("how", ["", "tied"])
def test_autocast(how: str) -> None:
    def reduced(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss(model, batch).float()

    model, (x,) = case(how)
    assert_exact(model.float(), (x.float(),), reduced, 3, tol=3e-2)


class Names(TorchDispatchMode):
    """The operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_one_addition_serves_all_micro_batches() -> None:
    model, batch = case()
    with one_pass(model, 3):
        loss(model, batch).backward()
    with one_pass(model, 3):
        value = loss(model, batch)
        with Names() as seen:
            value.backward()
    assert seen.names.count("index_add_") == 2  # one for each table
    assert not {"sort", "index_put", "index_put_", "_index_put_impl_"} & set(seen.names)


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_same_numbers_twice_in_torchs_deterministic_mode(deterministic: bool, device: str) -> None:
    model, (x,) = case()
    model, x = model.float().to(device), x.float().to(device)
    before = torch.are_deterministic_algorithms_enabled()
    try:
        torch.use_deterministic_algorithms(deterministic)
        squares = []
        for _ in range(2):
            model.zero_grad()
            with one_pass(model, 3):
                loss(model, (x,)).backward()
            squares.append(model.table.grad_sq.clone())  # type: ignore[attr-defined]
            del model.table.grad_sq  # type: ignore[attr-defined]
    finally:
        torch.use_deterministic_algorithms(before)
    if deterministic or device == "cpu":
        assert torch.equal(*squares)
    torch.testing.assert_close(*squares)


def test_an_index_that_comes_from_the_batch_is_taken_for_one() -> None:
    class Picked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.t = nn.Parameter(torch.randn(V, 3, dtype=torch.float64))

        def forward(self, ids: Tensor) -> Tensor:
            return self.t[ids].tanh() * self.t.index_select(0, ids.flatten()).view(*ids.shape, -1).cos()

    torch.manual_seed(0)
    assert_exact(Picked(), (torch.randint(0, V, (B, 4)),), loss, 3)


class Alone(nn.Module):
    """Attention of parameters alone, before they meet the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.t, self.lin = nn.Parameter(torch.randn(V, 12)), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.t[torch.arange(16) % V]
        q, k, v = rows.view(16, 3, 1, 1, 4).permute(1, 2, 3, 0, 4)
        return self.lin(x) + F.scaled_dot_product_attention(q, k, v, rows[:, :1]).sum((1, 2))


def test_values_of_parameters_alone_are_differentiable_to_torch() -> None:
    """It chooses another kernel of this attention where the mask is not differentiable, which rounds otherwise."""
    torch.manual_seed(0)
    model, x = Alone(), torch.randn(B, 4)
    fused = []
    for context in (nullcontext(), one_pass(model, 3, check=False)):
        with context, Names() as seen:
            model(x)
        fused.append([name for name in seen.names if "attention" in name])
    assert fused[0] == fused[1]

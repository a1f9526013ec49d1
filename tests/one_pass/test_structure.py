"""Operations that move the elements of values made of parameters alone, against the loop, and without `vmap`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from loop_oracle import assert_exact
from torch import Tensor, nn

from invariant_adam.one_pass import one_pass

B = 12
Move = Callable[[Tensor], Any]
MOVES: dict[str, Move] = {
    "view": lambda w: w.view(3, 8),
    "view_rest": lambda w: w.view(-1, 4),
    "view_tuple": lambda w: w.view((2, -1)),
    "view_after_transpose": lambda w: w.transpose(0, 1).contiguous().view(-1, 2),
    "reshape": lambda w: w.permute(2, 0, 1).reshape(4, -1),
    "reshape_function": lambda w: torch.reshape(w, (2, 12)),
    "reshape_by_name": lambda w: w.reshape(shape=(2, 12)),
    "ravel": lambda w: w.ravel(),
    "unsqueeze": lambda w: w.unsqueeze(1),
    "unsqueeze_last": lambda w: w.unsqueeze(-1),
    "unsqueeze_by_name": lambda w: torch.unsqueeze(w, dim=-2),
    "squeeze": lambda w: w[:1].squeeze(),
    "squeeze_first": lambda w: w[:1].squeeze(0),
    "squeeze_last": lambda w: w[..., :1].squeeze(-1),
    "squeeze_nothing": lambda w: w.squeeze(-2),
    "flatten": lambda w: w.flatten(),
    "flatten_last": lambda w: w.flatten(-2),
    "flatten_by_name": lambda w: w.flatten(start_dim=0, end_dim=-2),
    "unflatten": lambda w: w.unflatten(-1, (2, -1)),
    "unflatten_first": lambda w: w.unflatten(0, (1, 2)),
    "contiguous": lambda w: w.permute(2, 0, 1).contiguous(),
    "contiguous_already": lambda w: w.contiguous(),
    "clone": lambda w: w.transpose(0, 2).clone(),
    "transpose": lambda w: w.transpose(0, 2),
    "transpose_last": lambda w: w.transpose(-1, -2),
    "transpose_by_name": lambda w: torch.transpose(w, dim0=0, dim1=-1),
    "swapaxes": lambda w: w.swapaxes(0, -1),
    "swapdims": lambda w: w.swapdims(-1, 1),
    "permute": lambda w: w.permute(2, 0, 1),
    "permute_last": lambda w: w.permute((-1, 0, -2)),
    "t": lambda w: w[0].t(),
    "t_vector": lambda w: w[0, 0].t(),
    "T": lambda w: w[1].T,
    "mT": lambda w: w.mT,
    "adjoint": lambda w: w.adjoint(),
    "movedim": lambda w: w.movedim(0, -1),
    "movedim_back": lambda w: w.movedim(-1, 0),
    "movedims": lambda w: torch.movedim(w, (0, -1), (-1, 0)),
    "moveaxis": lambda w: w.moveaxis((-1,), (1,)),
    "narrow": lambda w: w.narrow(1, 1, 2),
    "narrow_last": lambda w: w.narrow(-1, 1, 2),
    "select": lambda w: w.select(0, 1),
    "select_last": lambda w: w.select(-1, -2),
    "select_by_name": lambda w: w.select(dim=-1, index=1),
    "chunk": lambda w: w.chunk(2, -1),
    "chunk_uneven": lambda w: w.chunk(2, dim=1),
    "split": lambda w: w.split(2, 1),
    "split_sizes": lambda w: torch.split(w, [1, 3], dim=-1),
    "split_first": lambda w: w.split(1),
    "split_with_sizes": lambda w: w.split_with_sizes((1, 2), 1),
    "tensor_split": lambda w: w.tensor_split(3, -1),
    "unbind": lambda w: w.unbind(),
    "unbind_last": lambda w: w.unbind(-1),
    "unbind_by_name": lambda w: w.unbind(dim=1),
    "iterate": list,
    "index": lambda w: w[1],
    "index_last": lambda w: w[:, -1],
    "index_slices": lambda w: w[:, 1:, ::2],
    "index_ellipsis": lambda w: w[..., -1],
    "index_new": lambda w: w[:, None, ..., 1:],
    "index_all": lambda w: w[...],
    "index_number": lambda w: w[1, -1, 2],
    "view_as": lambda w: w.view_as(torch.zeros(6, 4)),
    "to": lambda w: w[:1].to(torch.float64),
    "float": lambda w: w.double().contiguous(),
}
# How the value comes about: it has one use, or is one of κ copies of a parameter that is shared or has been looked up.
SOURCES: dict[str, Callable[[Net], Tensor]] = {
    "one_use": lambda s: s.w,
    "shared": lambda s: s.w,
    "looked_up": lambda s: s.w[s.index],
    "computed": lambda s: s.w.tanh(),
}


class Net(nn.Module):
    """A value of w (2, 3, 4), moved about by `move`, meets the batch."""

    index: Tensor

    def __init__(self, source: str, move: Move) -> None:
        super().__init__()
        self.source, self.move = source, move
        self.w = nn.Parameter(torch.randn(2, 3, 4, dtype=torch.float64))
        self.lin = nn.Linear(2, 1, dtype=torch.float64)
        self.register_buffer("index", torch.tensor([1, 1]))

    def forward(self, x: Tensor) -> Tensor:
        made = self.move(SOURCES[self.source](self))
        y = self.lin(x)[:, 0]
        for i, part in enumerate([made] if isinstance(made, Tensor) else made):
            scale = torch.linspace(1, 2 + i, max(1, part.numel()), dtype=x.dtype).view(part.shape)
            rows = y.view(-1, *[1] * part.ndim) * scale
            y = y + (rows * part + rows).sin().reshape(len(x), -1).sum(1) * (1 + i)
        if self.source == "shared":
            y = y + (x[:, :1] * self.w[0, 0]).cos().sum(1)
        return y


def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return model(*batch).sin().mean()


def net(source: str, name: str) -> tuple[Net, tuple[Tensor]]:
    torch.manual_seed(0)
    return Net(source, MOVES[name]), (torch.randn(B, 2, dtype=torch.float64),)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("name", MOVES)
def test_equals_the_loop(name: str, source: str) -> None:
    model, batch = net(source, name)
    assert_exact(model, batch, loss, 5)


@pytest.mark.parametrize("M", [1, 3, B])
@pytest.mark.parametrize("name", ["view_after_transpose", "permute_last", "contiguous", "split_sizes", "index_new"])
def test_equals_the_loop_at_other_sizes(name: str, M: int) -> None:
    for source in SOURCES:
        model, batch = net(source, name)
        assert_exact(model, batch, loss, M)


REST = {"transpose_by_name", "select_by_name", "adjoint", "tensor_split", "view_as", "to", "float"}


@pytest.mark.parametrize("source", ["shared", "looked_up"])
@pytest.mark.parametrize("name", sorted(MOVES.keys() - REST))
def test_needs_no_vmap(name: str, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = net(source, name)
    with one_pass(model, 3):  # its check finds out what is shared
        loss(model, batch).backward()
    model.zero_grad()

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("vmap")

    monkeypatch.setattr(torch.func, "vmap", refuse)
    with one_pass(model, 3):
        loss(model, batch).backward()


@pytest.mark.filterwarnings("default")  # torch warns of itself while tracing
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("name", ["contiguous", "permute_last", "flatten_last", "split_sizes", "index_new", "movedims"])
def test_compiled(name: str, source: str) -> None:
    torch._dynamo.reset()
    model, batch = net(source, name)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_exact(model, batch, loss, 5, run=compiled)


def test_a_copy_that_lies_as_before_is_none() -> None:
    """κ copies have no memory of their own before they meet the batch."""
    model, batch = net("looked_up", "contiguous_already")
    seen: list[Any] = []
    model.move = lambda w: seen.append(w.contiguous().view(2, 12).unsqueeze(0)) or seen[0]  # type: ignore[func-returns-value]
    with one_pass(model, 3, check=False):
        model(*batch)
    assert seen[0].handle.tag.shape == (4, 1, 2, 12)
    assert seen[0].handle.tag.stride()[0] == 0

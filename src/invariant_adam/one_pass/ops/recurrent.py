"""RNN, LSTM and GRU, step by step.

The input weights are one linear layer over all time steps. The recurrent weights are used once per step, so each
micro-batch steps with its own copy of them, and the copies' gradients are squared at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..dispatch import dispatch
from ..groups import UnsupportedUse
from ..mini_batch import MiniBatch
from ..weight import names_of
from . import base
from .linear import linear_with, products

States = tuple[Tensor, ...]


def _lstm(gx: Tensor, gh: Tensor, state: States) -> States:
    i, f, g, o = (gx + gh).chunk(4, -1)
    cell = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    return o.sigmoid() * cell.tanh(), cell


def _gru(gx: Tensor, gh: Tensor, state: States) -> States:
    rx, zx, nx = gx.chunk(3, -1)
    rh, zh, nh = gh.chunk(3, -1)
    z = (zx + zh).sigmoid()
    new = (nx + (rx + rh).sigmoid() * nh).tanh()
    return (new + z * (state[0] - new),)


CELLS: dict[str, Callable[[Tensor, Tensor, States], States]] = {
    "lstm": _lstm,
    "gru": _gru,
    "rnn_tanh": lambda gx, gh, _: ((gx + gh).tanh(),),
    "rnn_relu": lambda gx, gh, _: ((gx + gh).relu(),),
}


@base.operation("lstm", "gru", "rnn_tanh", "rnn_relu", line=products)
def recurrent(mini: MiniBatch, func: Any, x: Any, hx: Any, weights: Any, *rest: Any) -> Any:
    """A recurrent network of any number of layers and both directions."""
    name = func.__name__
    if (isinstance(hx, Tensor) and not isinstance(weights, (tuple, list))) or len(rest) != 6:
        raise UnsupportedUse(f"{name} on a packed sequence loses the batch dimension; pad it, and pass weights=")
    has_bias, layers, dropout, training, bidirectional, batch_first = rest
    directions, per = 2 if bidirectional else 1, 4 if has_bias else 2
    names = names_of([mini.handle_of(w) for w in weights])
    if len(weights) != per * layers * directions:
        raise UnsupportedUse(f"{names} goes through {name} with proj_size; put a Linear layer after it")
    states: States = tuple(hx) if isinstance(hx, (tuple, list)) else (hx,)
    if any(mini.holds(t) for t in (x, *states)):
        raise UnsupportedUse(f"{names} goes through {name} with an input or state made from parameters alone")
    axis = 0 if batch_first else 1
    if x.ndim != 3 or x.shape[axis] % mini.groups.batch:
        raise UnsupportedUse(
            f"{names} goes through {name} with an input of shape {tuple(x.shape)}, without the batch of "
            f"{mini.groups.batch} in dimension {axis}; if it is in another dimension of the model's inputs, pass "
            "batch_dim="
        )
    last: list[States] = []
    given = x
    for layer in range(layers):
        outs = []
        for d in range(directions):
            at = layer * directions + d
            ws, start = weights[at * per : (at + 1) * per], tuple(s[at] for s in states)
            y, end = _run(mini, name, x, ws, start, axis, reverse=d == 1)
            outs.append(y)
            last.append(end)
        x = outs[0] if len(outs) == 1 else torch.cat(outs, -1)
        if dropout and training and layer + 1 < layers:
            x = F.dropout(x, dropout)
    out = (x, *[torch.stack(s) for s in zip(*last, strict=True)])
    if dropout and training and layers > 1:  # which has drawn its numbers
        return out
    return base.as_called(out, func, given, hx, weights, *rest)


@base.operation("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell")
def cell(mini: MiniBatch, func: Any, x: Any, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None) -> Any:
    """One step: two linear layers and the cell."""
    states: States = tuple(hx) if isinstance(hx, (tuple, list)) else (hx,)
    gx = dispatch(F.linear, (x, w_ih, b_ih), {})
    gh = dispatch(F.linear, (states[0], w_hh, b_hh), {})
    out = CELLS[func.__name__.removesuffix("_cell")](gx, gh, states)
    return base.as_called(out if len(out) > 1 else out[0], func, x, hx, w_ih, w_hh, b_ih, b_hh)


def _run(mini: MiniBatch, name: str, x: Tensor, ws: Any, hx: States, axis: int, reverse: bool) -> tuple[Tensor, States]:
    """One layer in one direction: its outputs, the batch at `axis`, and its last states (B, H)."""
    groups, step = mini.groups, CELLS[name]
    gates = linear_with(mini, name, x, ws[0], ws[2] if len(ws) == 4 else None, axis=axis)
    own = [(w, mini.handle_of(w)) for w in (ws[1], *ws[3:])]
    mini.note([h for _, h in own], name)
    copies = [w.expand(groups.kappa, *w.shape) if h is None else mini.grouped(h) for w, h in own]
    begin = [groups.stack(s, 0) for s in hx]
    outs, ends = [], []
    for i, (stretch, gx) in enumerate(zip(groups.stretches, groups.stack(gates, axis), strict=True)):
        W = copies[0][stretch.lo : stretch.hi].transpose(1, 2)  # (κ, H, gates)
        b = copies[1][stretch.lo : stretch.hi, None] if len(copies) > 1 else None
        state: States = tuple(s[i] for s in begin)  # (κ, m, H)
        seen = []
        for t in reversed(range(gx.shape[2])) if reverse else range(gx.shape[2]):
            gh = state[0] @ W
            state = step(gx[:, :, t], gh if b is None else gh + b, state)
            seen.append(state[0])
        outs.append(torch.stack(seen[::-1] if reverse else seen, 2))
        ends.append(state)
    y = groups.merge(outs, 0)
    return (y if axis == 0 else y.transpose(0, 1)), tuple(groups.merge(list(s), 0) for s in zip(*ends, strict=True))

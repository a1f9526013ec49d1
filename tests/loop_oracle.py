"""The judge: the loop over micro-batches with torch.autograd.grad, which one pass must equal."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from invariant_adam.one_pass import one_pass

Loss = Callable[[nn.Module, tuple], Tensor]


def cut(batch: tuple, lo: int, hi: int, dims: dict[int, int] | int = 0) -> tuple:
    """Samples lo..hi of every tensor of a batch."""

    def one(i: int, t):
        d = dims if isinstance(dims, int) else dims.get(i, 0)
        return t.narrow(d, lo, hi - lo) if torch.is_tensor(t) else t

    return tuple(one(i, t) for i, t in enumerate(batch))


def loop(model: nn.Module, batch: tuple, loss: Loss, M: int, B: int, dims=0):
    """{name: (mean g, mean g²)} with a ragged last micro-batch weighing n/M."""
    names, params = zip(*[(n, p) for n, p in model.named_parameters() if p.requires_grad], strict=True)
    total = [torch.zeros_like(p) for p in params]
    square = [torch.zeros_like(p, dtype=torch.float64) for p in params]
    seen = [False] * len(params)
    weight = 0.0
    for lo in range(0, B, M):
        hi = min(lo + M, B)
        w = (hi - lo) / M
        grads = torch.autograd.grad(loss(model, cut(batch, lo, hi, dims)), params, allow_unused=True)
        for i, g in enumerate(grads):
            if g is not None:
                g = g.to_dense()  # an embedding's may be sparse
                seen[i] = True
                total[i] += w * g
                square[i] += w * g.double() ** 2
        weight += w
    return {n: (t / weight, s / weight) for n, t, s, ok in zip(names, total, square, seen, strict=True) if ok}


def error(got: Tensor, want: Tensor, floor: float) -> float:
    """The largest difference relative to the largest value, or to `floor` where all should
    vanish."""
    scale = max(want.abs().max().item(), floor, 1e-300)
    return (got.double() - want.double()).abs().max().item() / scale


def assert_exact(
    model: nn.Module,
    batch: tuple,
    loss: Loss,
    M: int,
    *,
    B: int | None = None,
    tol=1e-10,
    dims=0,
    run=None,
    **options,
) -> None:
    """One pass over `batch` equals the loop in gradients, squares, κ and buffers."""
    B = batch[0].shape[0] if B is None else B
    judge = copy.deepcopy(model)
    want = loop(judge, batch, loss, M, B, dims)
    model.zero_grad()
    for p in model.parameters():
        if hasattr(p, "grad_sq"):
            del p.grad_sq
    with one_pass(run if run is not None else model, M, **options):
        loss(run if run is not None else model, batch).backward()
    # A gradient that is zero in exact arithmetic (a bias before a batch norm) is rounding noise in
    # both.
    floor = 1e-4 * max(g.abs().max().item() for g, _ in want.values())
    for name, p in model.named_parameters():
        assert type(p) is nn.Parameter
        if not p.requires_grad:
            continue
        if name not in want:
            # An unused branch may get an exact zero instead of nothing.
            assert p.grad is None or not p.grad.any(), name
            continue
        grad, square = want[name]
        assert p.grad is not None, name
        assert error(p.grad, grad, floor) <= tol, (name, "grad", error(p.grad, grad, floor))
        wrong = error(p.grad_sq, square, floor**2)
        assert wrong <= tol, (name, "grad_sq", wrong)
        assert abs(p.grad_kappa - B / M) < 1e-12
    for (name, b), c in zip(model.named_buffers(), judge.buffers(), strict=True):
        assert torch.allclose(b.double(), c.double(), rtol=1e-9, atol=1e-11), name

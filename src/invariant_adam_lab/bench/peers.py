"""One pass against the loop and its peers on the CPU: step time and peak memory.

Times are medians of interleaved rounds, as ratios to a plain forward and backward; the best rounds are kept too. Memory
is the growth of the peak resident size over one call, in a fresh process for each cell. Every method's gradients and
squares are compared with the loop's; a method that misses parameters or differs by more than 1e-3 is not exact.
"""

from __future__ import annotations

import gc
import itertools
import platform
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from invariant_adam.one_pass import one_pass

from ..record import version
from . import timing

NETS = ("mlp", "cnn", "gpt")
METHODS = ("plain", "loop", "backpack", "opacus", "vmap", "ours")
MICRO = (1, 4, 16)


class SmallBlock(nn.Module):
    """Attention and a small net, each after a norm."""

    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.l1, self.qkv, self.o = nn.LayerNorm(d), nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.l2, self.f1, self.f2 = nn.LayerNorm(d), nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output for x (B, T, d)."""
        B, T, d = x.shape
        qkv = self.qkv(self.l1(x)).view(B, T, 3, self.heads, d // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        x = x + self.o(a.reshape(B, T, d))
        out: Tensor = x + self.f2(F.gelu(self.f1(self.l2(x))))
        return out


class SmallGPT(nn.Module):
    """A small transformer over tokens."""

    def __init__(self, V: int = 1000, d: int = 256, T: int = 128, layers: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.tok, self.pos = nn.Embedding(V, d), nn.Embedding(T, d)
        self.blocks = nn.ModuleList(SmallBlock(d, heads) for _ in range(layers))
        self.ln, self.head = nn.LayerNorm(d), nn.Linear(d, V)

    def forward(self, i: Tensor) -> Tensor:
        """Return the logits of tokens i (B, T)."""
        B, T = i.shape
        x = self.tok(i) + self.pos(torch.arange(T).expand(B, T))
        for b in self.blocks:
            x = b(x)
        logits: Tensor = self.head(self.ln(x))
        return logits


def build(net: str) -> tuple[nn.Module, Tensor, Tensor, int]:
    """Return the model, inputs, targets and rows per sample."""
    torch.manual_seed(0)
    if net == "mlp":
        model = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
        return model, torch.randn(256, 784), torch.randint(10, (256,)), 1
    if net == "cnn":
        sizes = ((3, 32, 1), (32, 32, 1), (32, 64, 2), (64, 64, 1), (64, 128, 2), (128, 128, 1))
        layers = [m for i, o, s in sizes for m in (nn.Conv2d(i, o, 3, s, 1), nn.ReLU())]
        model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))
        return model, torch.randn(64, 3, 32, 32), torch.randint(10, (64,)), 1024
    return SmallGPT(), torch.randint(1000, (16, 128)), torch.randint(1000, (16, 128)), 128


def loss_of(out: Tensor, y: Tensor) -> Tensor:
    """Return the mean cross-entropy."""
    return F.cross_entropy(out.reshape(-1, out.shape[-1]), y.reshape(-1))


Pairs = dict[str, tuple[Tensor, Tensor]]


def prepare(method: str, net: str, M: int, check: bool = True) -> Callable[[], Pairs | None] | None:
    """Return a function that runs one step and returns {name: (mean g, mean g²)}; None where the method has none."""
    model, x, y, _ = build(net)
    B = len(x)
    kappa = B // M
    names, params = zip(*model.named_parameters(), strict=True)

    def plain() -> None:
        model.zero_grad()
        loss_of(model(x), y).backward()

    def loop() -> Pairs:
        total = [torch.zeros_like(p) for p in params]
        square = [torch.zeros_like(p) for p in params]
        for k in range(kappa):
            model.zero_grad()
            loss_of(model(x[k * M : (k + 1) * M]), y[k * M : (k + 1) * M]).backward()
            for p, t, s in zip(params, total, square, strict=True):
                t.add_(p.grad, alpha=1 / kappa)
                s.addcmul_(p.grad, p.grad, value=1 / kappa)
        return {n: (t, s) for n, t, s in zip(names, total, square, strict=True)}

    def ours() -> Pairs:
        for p in params:
            p.grad = None
            p.__dict__.pop("grad_sq", None)
        with one_pass(model, M, check=check):
            loss_of(model(x), y).backward()
        return {n: (p.grad, p.grad_sq) for n, p in zip(names, params, strict=True)}

    if method in ("plain", "loop", "ours"):
        return {"plain": plain, "loop": loop, "ours": ours}[method]

    if method == "vmap":
        detached = {n: p.detach() for n, p in zip(names, params, strict=True)}
        gradient = torch.func.grad(lambda p, a, b: loss_of(torch.func.functional_call(model, p, (a,)), b))
        each = torch.func.vmap(gradient, in_dims=(None, 0, 0), randomness="different")
        xs, ys = x.view(kappa, M, *x.shape[1:]), y.view(kappa, M, *y.shape[1:])

        def vmapped() -> Pairs:
            return {n: (g.mean(0), g.square().mean(0)) for n, g in each(detached, xs, ys).items()}

        return vmapped

    if method == "opacus":
        from opacus.grad_sample import GradSampleModule

        wrapped = GradSampleModule(model, loss_reduction="mean")

        def opacus() -> Pairs:
            for p in params:
                p.grad = p.grad_sample = None
            loss_of(wrapped(x), y).backward()
            out = {}
            for n, p in zip(names, params, strict=True):
                g = p.grad_sample.view(kappa, M, *p.shape).mean(1)
                out[n] = (g.mean(0), g.square().mean(0))
            return out

        return opacus

    if M != 1:
        return None  # BackPACK squares per sample only
    from backpack import backpack, extend
    from backpack.extensions import SumGradSquared

    extended = nn.ModuleList([extend(model)])[0]
    criterion = extend(nn.CrossEntropyLoss())

    def packed() -> Pairs:
        model.zero_grad()
        out = extended(x)
        with backpack(SumGradSquared()):
            criterion(out.reshape(-1, out.shape[-1]), y.reshape(-1)).backward()
        return {
            n: (p.grad, p.sum_grad_squared * B)
            for n, p in zip(names, params, strict=True)
            if hasattr(p, "sum_grad_squared")
        }

    return packed


def disagreement(got: Pairs | None, want: Pairs) -> tuple[float, int]:
    """Return the largest relative error over parameters, and how many are missing."""
    if got is None:
        return float("nan"), 0
    worst = 0.0
    for name, (g, s) in want.items():
        if name in got:
            for a, b in zip(got[name], (g, s), strict=True):
                worst = max(worst, float((a - b).abs().max() / b.abs().max()))
    return worst, len(want.keys() - got.keys())


def peak(net: str, method: str, M: int) -> float:
    """Return the growth of the peak resident size over one call, in MB; for a fresh process."""
    run = prepare(method, net, M, check=False)
    assert run is not None
    model, x, y, _ = build(net)
    loss_of(model(x[:1]), y[:1]).backward()  # libraries and thread pools
    del model
    gc.collect()

    def status(key: str) -> float:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(float(line.split()[1]) / 1024 for line in lines if line.startswith(key))

    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    result = run()
    grown = status("VmHWM") - before
    del result
    return grown


def number_of_cells(nets: tuple[str, ...]) -> int:
    """How many cells these nets have: BackPACK squares at M = 1 only."""
    return len(nets) * (len(METHODS) * len(MICRO) - len(MICRO) + 1)


def run(
    rounds: int = 11,
    memory: bool = True,
    nets: tuple[str, ...] = NETS,
    begin: Callable[[str], None] = lambda text: None,
    finish: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Measure all cells and return them as JSON holds them.

    Args:
        rounds: how often each method is timed.
        memory: measure the peak memory of each cell, too.
        nets: some of `NETS`.
        begin: is told what is being measured.
        finish: is told of each cell when it is done.
    """
    torch.set_num_threads(2)
    cells: list[dict[str, Any]] = []
    for net, M in itertools.product(nets, MICRO):
        begin(f"{net}, M = {M}: all methods in turn")
        want = prepare("loop", net, M)()  # type: ignore[misc]
        assert want is not None
        steps: dict[str, Callable[[], Any]] = {}
        checked: dict[str, tuple[float, float, int]] = {}  # the first call's seconds, the largest error, missing
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for method in METHODS:
                try:
                    step = prepare(method, net, M)
                    if step is None:
                        continue
                    start = time.perf_counter()
                    result = step()
                    seconds = time.perf_counter() - start
                except Exception as error:
                    failed = f"{type(error).__name__}: {error}"[:200]
                    cells.append({"net": net, "M": M, "method": method, "error": failed})
                    finish(f"{net}, M = {M}, {method}: {failed}")
                    continue
                steps[method], checked[method] = step, (seconds, *disagreement(result, want))
                del result
            # In another order each round, because a method that frees a gigabyte slows the next one.
            taken = timing.interleaved(steps, torch.device("cpu"), rounds, warmup=0)
        for method, (seconds, wrong, missing) in checked.items():
            own, plain = taken[method], taken["plain"]
            cell = {
                "net": net,
                "M": M,
                "rows_per_group": M * build(net)[3],
                "method": method,
                "ms": own.ms,
                "ratio": own.ms / plain.ms,
                "best_ms": own.best_ms,
                "best_ratio": own.best_ms / plain.best_ms,
                "rounds": rounds,
                "first_call_ms": 1e3 * seconds,
                "error": None if method == "plain" else wrong,
                "missing": missing,
                "exact": method != "plain" and missing == 0 and wrong < 1e-3,
            }
            if memory:
                cell["peak_mb"] = _fresh(net, method, M)
            cells.append(cell)
            finish(_line(cell))
    return {
        "machine": {"processor": platform.processor() or platform.machine(), "threads": torch.get_num_threads()},
        "versions": {
            "python": platform.python_version(),
            **{p: version(p) for p in ("torch", "backpack-for-pytorch", "opacus")},
        },
        "date": datetime.now(timezone.utc).date().isoformat(),
        "cells": cells,
    }


def _fresh(net: str, method: str, M: int) -> float | None:
    command = [sys.executable, "-W", "ignore", "-m", __name__, net, method, str(M)]
    out = subprocess.run(command, capture_output=True, text=True, check=False)
    return float(out.stdout.split()[-1]) if out.returncode == 0 else None


def _line(cell: dict[str, Any]) -> str:
    mb = cell.get("peak_mb")
    return (
        f"{cell['net']}, M = {cell['M']}, {cell['method']}: {cell['ms']:.1f} ms, {cell['ratio']:.2f} × plain"
        f"{'' if mb is None else f', peak grows by {mb:.0f} MB'}"
        f"{'' if cell['method'] == 'plain' else ', exact' if cell['exact'] else ', not exact'}"
    )


def table(record: dict[str, Any]) -> str:
    """The record as a Markdown table: ratio to plain / growth of the peak in MB."""
    nets = list(dict.fromkeys(c["net"] for c in record["cells"]))
    columns = [(n, M) for n in nets for M in MICRO]
    lines = ["| | " + " | ".join(f"{n} M={M}" for n, M in columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for method in METHODS:
        row = [cell(record, net, M, method) for net, M in columns]
        lines.append(f"| {method} | " + " | ".join(row) + " |")
    return "\n".join(lines)


def cell(record: dict[str, Any], net: str, M: int, method: str) -> str:
    """One cell: ratio to plain / growth of the peak in MB, where it was measured."""
    found = [c for c in record["cells"] if (c["net"], c["M"], c["method"]) == (net, M, method)]
    if not found or "ratio" not in found[0]:
        return "-"
    one = found[0]
    mark = "" if one["exact"] or method == "plain" else " (not exact)"
    return f"{one['ratio']:.2f}" + (f" / {one['peak_mb'] or 0:.0f}" if "peak_mb" in one else "") + mark


if __name__ == "__main__":  # one cell of memory, in a process of its own
    torch.set_num_threads(2)
    print(peak(sys.argv[1], sys.argv[2], int(sys.argv[3])))

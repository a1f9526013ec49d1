"""The optimizer alone: the time of fold and step over that of `torch.optim.AdamW(fused=True)` and of a copy.

| work | what is timed |
|---|---|
| copy | a copy of as many floats: the ceiling |
| fold, step | the kernels, on gradients and moments in memory |
| fold+step | both in turn |
| fold_step | both in one pass over memory, as in an update of one micro-batch |
| adamw | the kernel of fused AdamW |
| alone | a whole update of κ micro-batches, `fold()` and `step()`, on gradients in memory |
| handed | the same with gradients from a backward that makes each by one multiplication |
| net | the same in a chain of linear layers on micro-batches of 32, as in a training step |

On a GPU the kernels are timed as CUDA graphs, so that their time is the device's own; the copy, `alone`, `handed` and
`net` are launched by the host.

TB/s count the bytes that must be read and written: 20 bytes per parameter to fold, 16 to step, 28 for both in one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from invariant_adam import InvariantAdam
from invariant_adam.kernels import adam as kernels

from ..models import MODELS, build
from ..record import Rows
from . import timing

KERNELS = {"copy": 8, "fold": 20, "step": 16, "fold+step": 36, "fold_step": 28, "adamw": 28}  # bytes per parameter
UPDATES = ("alone", "handed", "net")
Tell = Callable[[str], None]


def sizes_of(tensors: str) -> list[int]:
    """Return the sizes that "gpt2-124m" or "100x1e7" (100 tensors of 10⁷) mean.

    >>> sizes_of("3x1e2"), len(sizes_of("gpt2-124m")), sum(sizes_of("gpt2-124m"))
    ([100, 100, 100], 148, 124439808)
    """
    if tensors in MODELS:
        as_published = {"vocab": 50257, "tied": True} if tensors.startswith("gpt2-") else {}
        with torch.device("meta"):
            return [p.numel() for p in build(tensors, **as_published).parameters()]
    try:
        count, size = (float(part) for part in tensors.split("x"))
        if min(count, size) < 1 or count % 1 or size % 1:
            raise ValueError
    except ValueError:
        raise ValueError(
            f"--tensors must be the name of a model ({', '.join(MODELS)}) or a number of tensors times their size, "
            f"such as 100x1e7, got {tensors!r}"
        ) from None
    return [int(size)] * int(count)


def check(tensors: list[str], works: list[str]) -> None:
    """Refuse what cannot be measured."""
    for work in works:
        if work not in ("kernels", *UPDATES):
            raise ValueError(f"--work must be some of kernels, {', '.join(UPDATES)}, got {work!r}")
    for name in tensors:
        sizes = sizes_of(name)
        if "net" in works and (len(set(sizes)) > 1 or math.isqrt(sizes[0]) ** 2 != sizes[0]):
            raise ValueError(
                f"--work net is a chain of square matrices, and --tensors {name} has others; use --tensors "
                f"{len(sizes)}x{math.isqrt(sizes[0]) ** 2}, or another --work"
            )


HEAD = ("work", "κ", "ms", "× AdamW", "TB/s", "of a copy")


def title(row: dict[str, Any]) -> str:
    """Return what a row was measured on."""
    return f"{row['tensors']}: {row['number']} tensors, {row['parameters']:,} parameters"


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """Return a row as it is printed under `HEAD`."""
    rate, share = row.get("tb_per_s"), row.get("of_copy")
    return (
        row["work"],
        str(row["kappa"] or ""),
        f"{row['ms']:.3f}",
        f"{row['ratio']:.3f}",
        "" if rate is None else f"{rate:.3g}",
        "" if share is None else f"{share:.0%}",
    )


Job = tuple[str, str, int | None]  # tensors, work, κ


def jobs(tensors: list[str], works: list[str], kappas: list[int], rows: Rows) -> list[Job]:
    """Return what `rows` lacks."""
    found: list[Job] = []
    for name in tensors:
        for work in works:
            for kappa in kappas if work in UPDATES else [None]:
                if not all(rows.has(_settings(name, each, kappa)) for each in _rows_of(work)):
                    found.append((name, work, kappa))
    return found


def number_of_rows(todo: list[Job]) -> int:
    """How many rows these jobs give."""
    return sum(len(_rows_of(work)) for _, work, _ in todo)


def _rows_of(work: str) -> list[str]:
    return [work] if work in UPDATES else list(KERNELS)


def measure(todo: list[Job], rows: Rows, *, device: str, rounds: int, tell: Tell) -> Iterator[dict[str, Any]]:
    """Measure and yield each row once it is written."""
    where = torch.device(device)
    round_ms = 30.0 if where.type == "cuda" else 0.0
    for name, work, kappa in todo:
        sizes = sizes_of(name)
        tell(f"{len(sizes)} tensors of {name}: {work}{'' if kappa is None else f', κ = {kappa}'}")
        torch.manual_seed(0)
        common = {"parameters": sum(sizes), "number": len(sizes)}
        if work == "kernels":
            passes = _kernels(sizes, where)
            if where.type == "cuda":  # the device's own time, because in training the host runs ahead
                # The copy is left out: a graph gives it to the copy engines, which are slower than a kernel.
                passes |= {each: timing.captured(f) for each, f in passes.items() if each != "copy"}
            taken = timing.interleaved(passes, where, rounds, warmup=2, round_ms=round_ms)
        else:
            assert kappa is not None
            taken = timing.interleaved(_updates(work, sizes, kappa, where), where, rounds, warmup=2, round_ms=round_ms)
        base = taken["adamw"]
        rates = {each: sum(sizes) * KERNELS[each] / t.ms / 1e9 for each, t in taken.items() if work == "kernels"}
        for each, t in taken.items():
            if work != "kernels" and each == "adamw":
                continue
            measured = {
                **common,
                "ms": round(t.ms, 4),
                "best_ms": round(t.best_ms, 4),
                "adamw_ms": round(base.ms, 4),
                "ratio": round(t.ms / base.ms, 4),
                "rounds": t.rounds,
                "calls_per_round": t.calls,
            }
            if each in rates:
                measured |= {"tb_per_s": float(f"{rates[each]:.4g}"), "of_copy": round(rates[each] / rates["copy"], 4)}
            yield rows.add(_settings(name, each, kappa), measured)


def _settings(tensors: str, work: str, kappa: int | None) -> dict[str, Any]:
    return {"tensors": tensors, "work": work, "kappa": kappa}


def _kernels(sizes: list[int], device: torch.device) -> dict[str, timing.Work]:
    """The passes over memory, each on the same tensors."""
    g, w, m, v = ([torch.randn(n, device=device) * 1e-3 for n in sizes] for _ in range(4))
    for x in v:
        x.square_()
    # One number of steps per tensor, as the optimizer holds it; in place, so it stays small.
    steps = [torch.tensor(5.0, device=device) for _ in sizes]
    count = torch.zeros((), dtype=torch.int64, device=device)
    source, target = (torch.empty(sum(sizes), device=device) for _ in range(2))
    keep, gain, size, eps = (0.9, 0.999), (0.1, 0.001), 1e-6, 1e-8

    def fold() -> None:
        kernels.fold(g, None, m, v, keep=keep, gain=gain, count=count)

    def step() -> None:
        kernels.step(w, m, v, size=size, eps=eps, decay=0.9999)

    def both() -> None:
        fold()
        step()

    def adamw() -> None:
        torch._fused_adamw_(
            w, g, m, v, [], steps, lr=1e-6, beta1=0.9, beta2=0.999, weight_decay=0.1, eps=1e-8, amsgrad=False,
            maximize=False,
        )  # fmt: skip

    def fused() -> None:
        kernels.fold_step(w, g, None, m, v, keep=keep, gain=gain, count=count, size=size, eps=eps, decay=0.9999)

    whole = {"fold+step": both, "adamw": adamw, "fold_step": fused}
    return {"copy": lambda: target.copy_(source), "fold": fold, "step": step, **whole}


def _updates(work: str, sizes: list[int], kappa: int, device: torch.device) -> dict[str, timing.Work]:
    """Whole updates of κ micro-batches by both optimizers: {"adamw": ..., work: ...}."""
    if work == "alone":
        return _alone(sizes, kappa, device)
    with device:
        nets = [_Net(sizes) if work == "net" else _Handed(sizes) for _ in range(2)]
    x = torch.randn(32, math.isqrt(sizes[0]), device=device)
    adamw = torch.optim.AdamW(nets[0].parameters(), fused=True)
    invariant = InvariantAdam(nets[1].parameters(), weight_decay=0.01)

    def plain() -> None:
        for _ in range(kappa):
            (nets[0](x) / kappa).backward()
        adamw.step()
        adamw.zero_grad()

    def ours() -> None:
        invariant.expect(kappa)
        for _ in range(kappa):
            nets[1](x).backward()
        invariant.step()

    return {"adamw": plain, work: ours}


def _alone(sizes: list[int], kappa: int, device: torch.device) -> dict[str, timing.Work]:
    params = [[nn.Parameter(torch.randn(n, device=device)) for n in sizes] for _ in range(2)]
    grads = [torch.randn(n, device=device) * 1e-3 for n in sizes]
    sums = [torch.zeros_like(g) for g in grads] if kappa > 1 else grads
    adamw = torch.optim.AdamW(params[0], fused=True)
    invariant = InvariantAdam(params[1], weight_decay=0.01, fold="call")

    def plain() -> None:
        for _ in range(kappa - 1):  # autograd keeps the first gradient and adds the others to it
            for total, g in zip(sums, grads, strict=True):
                total.add_(g)
        for p, total in zip(params[0], sums, strict=True):
            p.grad = total
        adamw.step()

    def ours() -> None:
        invariant.expect(kappa)
        for _ in range(kappa):
            for p, g in zip(params[1], grads, strict=True):
                p.grad = g
            invariant.fold()
        invariant.step()

    return {"adamw": plain, "alone": ours}


class _Handed(nn.Module):
    """Parameters whose gradients cost one multiplication each."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(n) for n in sizes)
        self.factors = [torch.randn(n) for n in sizes]

    def forward(self, _: Tensor) -> Tensor:
        return torch.stack([(w * f).sum() for w, f in zip(self.weights, self.factors, strict=True)]).sum()


class _Net(nn.Module):
    """A deep net of square matrices."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        side = math.isqrt(sizes[0])
        self.layers = nn.ModuleList(nn.Linear(side, side, bias=False) for _ in sizes)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x)) / math.sqrt(len(self.layers))
        return x.square().mean()

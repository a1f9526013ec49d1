"""Time of fold + step against `torch.optim.AdamW(fused=True)` with as many accumulated micro-batches.

10M parameters in 100 tensors, timed in one process, interleaved, compared as medians:

- `net`: whole updates of a chain of 100 linear layers on micro-batches of 32: what a training step feels;
- `handed`: whole updates where a backward makes each gradient by one multiplication and nothing else;
- `alone`: no autograd at all: gradients lie ready, are added up or folded, and the step is made.

    PYTHONPATH=src python benchmarks/step.py --device cpu --out benchmarks/results/step_cpu.json
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import time
from datetime import date
from pathlib import Path

import torch
from torch import nn

import invariant_adam
from invariant_adam import InvariantAdam

TENSORS, SIDE = 100, 316  # 100 × 316² = 9,985,600 parameters


class Handed(nn.Module):
    """Parameters whose gradients cost one multiplication each."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(SIDE, SIDE) for _ in range(TENSORS))
        self.factors = [torch.randn(SIDE, SIDE) for _ in range(TENSORS)]

    def to(self, device):
        self.factors = [f.to(device) for f in self.factors]
        return super().to(device)

    def forward(self, x):
        return sum((w * f).sum() for w, f in zip(self.weights, self.factors, strict=True))


class Net(nn.Module):
    """The same parameters as a deep net."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(SIDE, SIDE, bias=False) for _ in range(TENSORS))

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x)) / math.sqrt(TENSORS)
        return x.square().mean()


def updates(make, device):
    """For each optimizer, a function that makes one update of kappa micro-batches."""
    x = torch.randn(32, SIDE, device=device)
    models = {name: make().to(device) for name in ("adamw", "invariant")}
    opts = {
        "adamw": torch.optim.AdamW(models["adamw"].parameters(), fused=True),
        "invariant": InvariantAdam(models["invariant"].parameters(), weight_decay=0.01),
    }

    def update(name, kappa):
        if name == "invariant":
            opts[name].expect(kappa)
        for _ in range(kappa):
            (models[name](x) / (kappa if name == "adamw" else 1)).backward()
        opts[name].step()
        opts[name].zero_grad()

    return update


def updates_alone(device):
    """The same with gradients that lie ready."""
    params = {name: [nn.Parameter(torch.randn(SIDE, SIDE, device=device)) for _ in range(TENSORS)] for name in "ab"}
    grads = [torch.randn(SIDE, SIDE, device=device) * 1e-3 for _ in range(TENSORS)]
    sums = [torch.zeros_like(g) for g in grads]
    adamw = torch.optim.AdamW(params["a"], fused=True)
    invariant = InvariantAdam(params["b"], weight_decay=0.01, fold="call")

    def update(name, kappa):
        if name == "adamw":
            for _ in range(kappa - 1):  # autograd keeps the first gradient and adds the others to it
                for total, g in zip(sums, grads, strict=True):
                    total.add_(g)
            for p, total in zip(params["a"], sums, strict=True):
                p.grad = total
            adamw.step()
            return
        invariant.expect(kappa)
        for _ in range(kappa):
            for p, g in zip(params["b"], grads, strict=True):
                p.grad = g
            invariant.fold()
        invariant.step()

    return update


def measure(update, kappas, device, repeats):
    rows = []
    for kappa in kappas:
        times = {"adamw": [], "invariant": []}
        for i in range(repeats + 3):
            for name, seconds in times.items():
                if device == "cuda":
                    torch.cuda.synchronize()
                begin = time.perf_counter()
                update(name, kappa)
                if device == "cuda":
                    torch.cuda.synchronize()
                if i >= 3:
                    seconds.append(time.perf_counter() - begin)
        ms = {name: 1e3 * statistics.median(seconds) for name, seconds in times.items()}
        rows.append(
            {
                "kappa": kappa,
                **{f"{name}_ms": round(value, 3) for name, value in ms.items()},
                "ratio": round(ms["invariant"] / ms["adamw"], 3),
            }
        )
        print(rows[-1], flush=True)
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=15, help="timed updates per cell; the median counts")
    parser.add_argument("--kappas", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--out", type=Path, help="write the result here as JSON")
    args = parser.parse_args()
    torch.manual_seed(0)
    result = {
        "benchmark": "fold+step against torch.optim.AdamW(fused=True) with accumulation",
        "parameters": TENSORS * SIDE**2,
        "tensors": TENSORS,
        "device": torch.cuda.get_device_name() if args.device == "cuda" else platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "invariant_adam": invariant_adam.__version__,
        "date": date.today().isoformat(),
    }
    work = {
        "net": updates(Net, args.device),
        "handed": updates(Handed, args.device),
        "alone": updates_alone(args.device),
    }
    for name, update in work.items():
        print(name)
        result[name] = measure(update, args.kappas, args.device, args.repeats)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")
        print(f"wrote {args.out}")


if __name__ == "__main__":
    main()

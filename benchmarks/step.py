"""Time of fold + step against `torch.optim.AdamW(fused=True)` with as many accumulated micro-batches.

10M parameters in 100 tensors. Three things are timed in one process, interleaved, and compared as medians:

- `handed`: gradients come from a backward that does nothing else (one multiplication per tensor), so the time is
  the optimizer's own and the accumulation's: the harshest comparison;
- `net`: the same parameters as a chain of 100 linear layers on micro-batches of 32: what a training step feels;
- `backward`: the backward of each alone, its gradients dropped, which both sides pay.

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


def update(model, opt, x, kappa, divide):
    """One update; the forward is outside of what is compared only in so far as both sides run it."""
    for _ in range(kappa):
        (model(x) / divide).backward()
        if opt is None:
            for p in model.parameters():
                p.grad = None
    if opt is not None:
        opt.step()
        opt.zero_grad()


def measure(make, kappas, device, repeats):
    model = {name: make().to(device) for name in ("backward", "adamw", "invariant")}
    opts = {
        "backward": None,
        "adamw": torch.optim.AdamW(model["adamw"].parameters(), fused=True),
        "invariant": InvariantAdam(model["invariant"].parameters(), weight_decay=0.01),
    }
    x = torch.randn(32, SIDE, device=device)
    rows = []
    for kappa in kappas:
        times = {name: [] for name in model}
        for i in range(repeats + 3):
            for name in model:
                if device == "cuda":
                    torch.cuda.synchronize()
                begin = time.perf_counter()
                update(model[name], opts[name], x, kappa, kappa if name == "adamw" else 1)
                if device == "cuda":
                    torch.cuda.synchronize()
                if i >= 3:
                    times[name].append(time.perf_counter() - begin)
        ms = {name: 1e3 * statistics.median(t) for name, t in times.items()}
        rows.append(
            {
                "kappa": kappa,
                **{f"{name}_ms": round(value, 3) for name, value in ms.items()},
                "ratio": round(ms["invariant"] / ms["adamw"], 3),
                "ratio_without_backward": round((ms["invariant"] - ms["backward"]) / (ms["adamw"] - ms["backward"]), 3),
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
    for name, make in (("handed", Handed), ("net", Net)):
        result[name] = measure(make, args.kappas, args.device, args.repeats)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")
        print(f"wrote {args.out}")


if __name__ == "__main__":
    main()

"""Memory bandwidth of `fold` and `step` on a GPU, and both together against `torch.optim.AdamW(fused=True)`.

The tensors are those of GPT-2 124M (148 of them) and one billion parameters in 100. A device-to-device copy in the same
run is the ceiling. Times are medians of CUDA-event timings, the three optimizers interleaved.

    PYTHONPATH=src python benchmarks/bandwidth.py --out benchmarks/results/bandwidth_h200.json
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from datetime import date
from pathlib import Path

import torch
import triton

import invariant_adam
from invariant_adam.kernels import adam_torch, adam_triton


def gpt2_sizes():
    block = [768, 768, 2304 * 768, 2304, 768 * 768, 768, 768, 768, 3072 * 768, 3072, 768 * 3072, 768]
    return [50257 * 768, 1024 * 768, *(block * 12), 768, 768]


def timed(work, repeats=15):
    """Milliseconds of each piece of work, interleaved, as medians."""
    times = {name: [] for name in work}
    for i in range(repeats + 3):
        for name, function in work.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            function()
            end.record()
            torch.cuda.synchronize()
            if i >= 3:
                times[name].append(begin.elapsed_time(end))
    return {name: statistics.median(t) for name, t in times.items()}


def measure(sizes, tune):
    n = sum(sizes)
    g, w, m, v = ([torch.randn(s, device="cuda") * 1e-3 for s in sizes] for _ in range(4))
    v = [x.square_() for x in v]
    steps = [torch.tensor(5.0, device="cuda") for _ in sizes]
    count = torch.zeros((), dtype=torch.int64, device="cuda")

    def fold(kernels=adam_triton):
        kernels.fold(g, None, m, v, keep=(0.9, 0.999), gain=(0.1, 0.001), count=count)

    def step(kernels=adam_triton):
        kernels.step(w, m, v, size=1e-6, eps=1e-8, keep=0.9999)

    def adamw():
        torch._fused_adamw_(
            w, g, m, v, [], steps, lr=1e-6, beta1=0.9, beta2=0.999, weight_decay=0.1, eps=1e-8, amsgrad=False,
            maximize=False,
        )  # fmt: skip

    if tune:
        for block, warps in ((1024, 4), (2048, 4), (2048, 8), (4096, 8), (4096, 16), (8192, 8), (8192, 16)):
            adam_triton.BLOCK, adam_triton.WARPS = block, warps
            adam_triton._blocks.cache_clear()
            ms = timed({"fold": fold, "step": step}, repeats=7)
            print(
                block,
                warps,
                {k: f"{n * b / ms[k] / 1e9:.2f} TB/s" for k, b in (("fold", 20), ("step", 16))},
                flush=True,
            )
        return None
    source, target = torch.empty(n, device="cuda"), torch.empty(n, device="cuda")
    work = {
        "copy": lambda: target.copy_(source),
        "fold": fold,
        "step": step,
        "fold_and_step": lambda: (fold(), step()),
        "adamw": adamw,
        "torch_fold": lambda: fold(adam_torch),
        "torch_step": lambda: step(adam_torch),
    }
    ms = timed(work)
    bytes_per_parameter = {"copy": 8, "fold": 20, "step": 16, "adamw": 28, "torch_fold": 20, "torch_step": 16}
    return {
        "parameters": n,
        "tensors": len(sizes),
        "ms": {name: round(t, 3) for name, t in ms.items()},
        "TB_per_s": {name: round(n * b / ms[name] / 1e9, 3) for name, b in bytes_per_parameter.items()},
        "fold_and_step_over_adamw": round(ms["fold_and_step"] / ms["adamw"], 3),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true", help="time block sizes instead")
    parser.add_argument("--out", type=Path, help="write the result here as JSON")
    args = parser.parse_args()
    result = {
        "benchmark": "bandwidth of fold and step",
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "invariant_adam": invariant_adam.__version__,
        "date": date.today().isoformat(),
    }
    for name, sizes in (("gpt2-124m", gpt2_sizes()), ("1e9", [10_000_000] * 100)):
        result[name] = measure(sizes, args.tune)
        print(name, result[name], flush=True)
    if args.out and not args.tune:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")
        print(f"wrote {args.out}")


if __name__ == "__main__":
    main()

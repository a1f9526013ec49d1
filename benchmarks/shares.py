"""What the kernels of a training step take on a GPU, by kernel: the products, the small kernels, the moments, the rest.

    PYTHONPATH=src python benchmarks/shares.py --out benchmarks/results/shares_h200.json

Cases of `invariant-adam bench one-pass` under torch's profiler. "small" are the kernels that square what is not a
matrix: norm weights, biases, embeddings. Each row is written when it is measured.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from invariant_adam_lab import record
from invariant_adam_lab.bench import one_pass as bench
from invariant_adam_lab.bench import timing

PARTS = {
    "squares of products": (
        "_gemm_square", "_conv_square", "_window_sums", "_tap_sums", "_finish_taps", "_pack", "_deliver", "_leave",
    ),
    "small": ("_sum_rows", "_walk", "_join"),
    "batch norm": (
        "_sum_statistics", "_finish_statistics", "_normalise", "_finish_and_normalise", "_sum_gradients",
        "_finish_and_input_gradient",
    ),
    "moments": ("_fold", "_fold_one", "_step", "_fold_step"),
}  # fmt: skip
# Kernels of these names end several works: in a convolutional net the first, without one the second.
SHARED = {"_finish": ("squares of products", "small"), "_finish_gradients": ("batch norm", "small")}


def part_of(name, model):
    """The part that a kernel belongs to."""
    if "multi_tensor_apply_kernel" in name:  # of torch, in the middle of a C++ name
        return "moments"
    if name in SHARED:
        return SHARED[name][not model.startswith("resnet")]
    return next((part for part, names in PARTS.items() if name in names), "rest")


def profiled(update, updates):
    """Milliseconds of the device per update, by kernel."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as found:
        for _ in range(updates):
            update()
        torch.cuda.synchronize()
    times = Counter()
    for event in found.events():
        # Not what torch calls a stretch of the timeline, as an optimizer's step: it spans kernels.
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation:
            times[event.name] += event.time_range.elapsed_us() / 1e3 / updates
    return times


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(bench.SIZES), default=["gpt2-124m", "gpt2-350m", "vit-b16"])
    parser.add_argument("--methods", nargs="+", choices=bench.METHODS, default=["plain", "one-pass", "into"])
    parser.add_argument("--eager", action="store_true", help="do not compile the models")
    parser.add_argument("--updates", type=int, default=5, help="that are profiled")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this measures kernels of a GPU, and torch sees none here")
    device = torch.device("cuda")
    rows = record.Rows(args.out, "python benchmarks/shares.py", "time of a training step's kernels", device)
    options = {"device": "cuda", "precision": "bfloat16", "compiled": not args.eager}
    with timing.fast_math(), timing.many_graphs():
        for case in bench.cases(args.models, **options):
            for method in args.methods:
                update = bench.CaseStep(case, method)
                for _ in range(4):
                    update()
                ms = min(timing.clock(update, device, 5) for _ in range(3))
                times = profiled(update, args.updates)
                parts, top = Counter(), Counter()
                for name, each in times.items():
                    parts[part_of(name, case.model)] += each
                    top[name[:80]] += each
                total = sum(parts.values())
                measured = {
                    "ms": round(ms, 3),
                    "kernels_ms": round(total, 3),
                    "parts": {part: round(each, 4) for part, each in sorted(parts.items())},
                    "top": {name: round(each, 4) for name, each in top.most_common(25)},
                }
                rows.add(case.settings(method), measured)
                print(f"{case} {method}: {ms:.2f} ms, kernels {total:.2f} ms", flush=True)
                for part, each in parts.most_common():
                    print(f"    {part:20} {each:9.4f} ms {each / total:8.2%}", flush=True)
                del update


if __name__ == "__main__":
    main()

"""Time of `gemm_square` over that of the plain weight gradient (one library matrix product), on a GPU.

    PYTHONPATH=src python benchmarks/gemm_square.py --out benchmarks/results/gemm_square_h200.json

Operands are random bfloat16, the outputs' error is checked against float32 products first. `--tune` times
configurations instead, `--profile` runs two shapes a few times for a profiler of the hardware's counters.
"""

from __future__ import annotations

import argparse
from datetime import date
from pathlib import Path

import torch

from invariant_adam.kernels.gemm_square.triton import candidates, choose, gemm_square
from invariant_adam_lab import record
from invariant_adam_lab.bench import timing

# rows in all, rows per group, o, i
SHAPES = [
    (32768, 1024, 768, 768), (32768, 1024, 3072, 768), (32768, 1024, 768, 3072), (32768, 1024, 2304, 768),
    (32768, 1024, 50304, 768), (32768, 1024, 50257, 768), (16384, 1024, 4096, 4096), (16384, 1024, 11008, 4096),
    (32768, 256, 3072, 768), (32768, 128, 3072, 768), (50432, 1576, 768, 768), (50432, 1576, 3072, 768),
    (16384, 1024, 1024, 1024), (16384, 1024, 3072, 1024), (16384, 1024, 4096, 1024), (16384, 1024, 1024, 4096),
]  # fmt: skip


def timed(work, repeats):
    """Milliseconds of each piece of work as a CUDA graph, so that the host's launches are not in the time."""
    work = {name: timing.captured(function) for name, function in work.items()}
    taken = timing.interleaved(work, torch.device("cuda"), repeats, warmup=2, round_ms=5.0)
    return {name: t.ms for name, t in taken.items()}


def error(G, X, D, S):
    """Relative errors against float32 products of the groups, formed one at a time."""
    want_d, want_s = torch.zeros_like(D), torch.zeros_like(S)
    for g, x in zip(G, X, strict=True):
        product = g.float().t() @ x.float()
        want_d += product
        want_s += product.square()
    return [((a - b).norm() / b.norm()).item() for a, b in ((D, want_d), (S, want_s))]


def profile():
    """The kernel and the library's product in turn, four times."""
    for o, i, kappa in ((4096, 4096, 16), (768, 768, 32)):
        G, X = (torch.randn(kappa, 1024, n, device="cuda", dtype=torch.bfloat16) for n in (o, i))
        for _ in range(4):
            gemm_square(G, X)
            G.view(-1, o).t() @ X.view(-1, i)
    torch.cuda.synchronize()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true", help="time configurations instead")
    parser.add_argument("--profile", action="store_true", help="run two shapes for a profiler instead")
    parser.add_argument("--out", type=Path, help="write the result here as JSON")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this measures kernels of a GPU, and torch sees none here")
    if args.profile:
        profile()
        return
    rows = []
    for total, r, o, i in SHAPES:
        G = torch.randn(total // r, r, o, device="cuda", dtype=torch.bfloat16)
        X = torch.randn(total // r, r, i, device="cuda", dtype=torch.bfloat16)
        flat_g, flat_x = G.view(-1, o), X.view(-1, i)
        work = {"plain": lambda g=flat_g, x=flat_x: g.t() @ x}
        if args.tune:
            for config in candidates(o, i, r, G.dtype):
                try:
                    gemm_square(G, X, config=config)
                except Exception as problem:  # a configuration may not fit the chip
                    print(config, type(problem).__name__, str(problem)[:80])
                    continue
                work[config] = lambda G=G, X=X, config=config: gemm_square(G, X, config=config)
        else:
            work["ours"] = lambda G=G, X=X: gemm_square(G, X)
        ms = timed(work, 3 if args.tune else 9)
        plain = ms.pop("plain")
        if args.tune:
            best = sorted(ms.items(), key=lambda item: item[1])[:4]
            print((total, r, o, i), f"plain {2 * total * o * i / plain / 1e9:.0f} TFLOP/s", flush=True)
            print("   ", [(tuple(config), round(t / plain, 3)) for config, t in best], flush=True)
            continue
        wrong = error(G, X, *gemm_square(G, X))
        assert max(wrong) < 1e-2, wrong
        rows.append(
            {
                "rows": total, "rows_per_group": r, "o": o, "i": i,
                "plain_ms": round(plain, 4), "plain_tflops": round(2 * total * o * i / plain / 1e9, 1),
                "ratio": round(ms["ours"] / plain, 3), "config": choose(o, i, r, G.dtype)._asdict(),
                "error": [float(f"{e:.1e}") for e in wrong],
            }
        )  # fmt: skip
        print(rows[-1], flush=True)
    if args.out and rows:
        head = {
            "benchmark": "gemm_square over the plain weight gradient, bfloat16",
            "command": "python benchmarks/gemm_square.py",
        }
        made = record.environment(torch.device("cuda")) | {"date": date.today().isoformat(), "rows": rows}
        record.write_json(args.out, head | made)
        print(f"wrote {args.out}")


if __name__ == "__main__":
    main()

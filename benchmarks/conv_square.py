"""Time of `conv_square` and ghost batch norm over that of the plain library calls, layer by layer, on a GPU.

    PYTHONPATH=src python benchmarks/conv_square.py --json benchmarks/results/conv_square_h200.json

ResNet-18 on 32×32 (B=800, M=25) and ResNet-50 on 224×224 (B=64, M=8), or with `--model grouped` convolutions in channel
groups and depthwise ones on 224×224 (B=64, M=8); bfloat16, channels last, random operands, the cache flushed before
each run, medians. Each convolution is tuned first, over all its ways (`kernels/conv_square/ways.py`), for this run
alone unless INVARIANT_ADAM_CACHE names a folder; the row says which way won, and what the others cost. Batch norm is
timed forward and backward. Errors are checked against the library's gradients of the groups. The file is written after
each row.

Most of the time would go into compiling: processes (`--jobs`) do that beforehand, side by side.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from datetime import date
from functools import partial
from pathlib import Path

import torch

from invariant_adam.kernels import tuning
from invariant_adam.kernels.batch_norm import running
from invariant_adam.kernels.batch_norm import triton as norm
from invariant_adam.kernels.conv_square import Geometry, conv_backward, ways
from invariant_adam_lab import record
from invariant_adam_lab.bench import timing

# times, input channels, output channels, input pixels a side, kernel, stride
RESNET18 = [
    (1, 3, 64, 32, 3, 1), (4, 64, 64, 32, 3, 1),
    (1, 64, 128, 32, 3, 2), (3, 128, 128, 16, 3, 1), (1, 64, 128, 32, 1, 2),
    (1, 128, 256, 16, 3, 2), (3, 256, 256, 8, 3, 1), (1, 128, 256, 16, 1, 2),
    (1, 256, 512, 8, 3, 2), (3, 512, 512, 4, 3, 1), (1, 256, 512, 8, 1, 2),
]  # fmt: skip
RESNET50 = [
    (1, 3, 64, 224, 7, 2),
    (1, 64, 64, 56, 1, 1), (3, 64, 64, 56, 3, 1), (4, 64, 256, 56, 1, 1), (2, 256, 64, 56, 1, 1),
    (1, 256, 128, 56, 1, 1), (1, 128, 128, 56, 3, 2), (3, 128, 128, 28, 3, 1), (4, 128, 512, 28, 1, 1),
    (3, 512, 128, 28, 1, 1), (1, 256, 512, 56, 1, 2),
    (1, 512, 256, 28, 1, 1), (1, 256, 256, 28, 3, 2), (5, 256, 256, 14, 3, 1), (6, 256, 1024, 14, 1, 1),
    (5, 1024, 256, 14, 1, 1), (1, 512, 1024, 28, 1, 2),
    (1, 1024, 512, 14, 1, 1), (1, 512, 512, 14, 3, 2), (2, 512, 512, 7, 3, 1), (3, 512, 2048, 7, 1, 1),
    (2, 2048, 512, 7, 1, 1), (1, 1024, 2048, 14, 1, 2),
]  # fmt: skip
# and channel groups: of a ResNeXt-50 (32×4d), then depthwise ones of a MobileNetV2
GROUPED = [
    (3, 128, 128, 56, 3, 1, 32), (3, 256, 256, 28, 3, 1, 32), (5, 512, 512, 14, 3, 1, 32), (2, 1024, 1024, 7, 3, 1, 32),
    (1, 32, 32, 112, 3, 1, 32), (1, 144, 144, 56, 3, 1, 144), (3, 192, 192, 28, 3, 1, 192),
    (4, 576, 576, 14, 3, 1, 576),
]  # fmt: skip
MODELS = {"resnet18": (RESNET18, 800, 25), "resnet50": (RESNET50, 64, 8), "grouped": (GROUPED, 64, 8)}
# times, channels, pixels a side
NORMS = {
    "resnet18": [(5, 64, 32), (5, 128, 16), (5, 256, 8), (5, 512, 4)],
    "resnet50": [
        (1, 64, 112), (6, 64, 56), (4, 256, 56), (1, 128, 56), (7, 128, 28), (5, 512, 28),
        (1, 256, 28), (11, 256, 14), (7, 1024, 14), (1, 512, 14), (5, 512, 7), (4, 2048, 7),
    ],
}  # fmt: skip


def timed(work, repeats):
    """Milliseconds of each piece of work as a CUDA graph on a cold cache: medians."""
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    graphs = {name: timing.captured(function) for name, function in work.items()}
    times = {name: [] for name in work}
    for _ in range(repeats):
        for name, replay in graphs.items():
            flush.zero_()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            replay()
            end.record()
            times[name].append((begin, end))
    torch.cuda.synchronize()
    return {name: statistics.median(b.elapsed_time(e) for b, e in found) for name, found in times.items()}


def random(*shape):
    t = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    return t.contiguous(memory_format=torch.channels_last) if t.ndim == 4 else t


def layer(model, inner, out, pixels, kernel, stride, groups=1):
    """G and X of a layer, (κ, M, ...), and its geometry."""
    _, batch, micro = MODELS[model]
    pad = kernel // 2
    side = (pixels + 2 * pad - kernel) // stride + 1
    weight, taps = (out, inner // groups, kernel, kernel), ((stride,) * 2, (pad,) * 2, (1, 1))
    geo = Geometry(weight, *taps, False, (0, 0), groups, True)
    shapes = (out, side, side), (inner, pixels, pixels)
    return *(random(batch, *shape).unflatten(0, (batch // micro, micro)) for shape in shapes), geo


def error(G, X, geo, D, S):
    """Relative errors against the library's gradients of the groups, whose outputs are bfloat16."""
    weight = torch.empty(geo.weight, device="cuda", dtype=G.dtype)
    want_d, want_s = torch.zeros_like(D), torch.zeros_like(S)
    for g, x in zip(G, X, strict=True):
        each = conv_backward(g, x, weight, geo, [False, True, False])[1].float()
        want_d += each
        want_s += each.square()
    return [float(f"{((a - b).norm() / b.norm()).item():.1e}") for a, b in ((D, want_d), (S, want_s))]


def once(work):
    """A timer that takes no time: for processes that only compile."""
    work()
    return 0.0


def compile_layer(model, shape):
    """Run every candidate of a layer once, which leaves its kernels in Triton's cache."""
    tuning.best = partial(tuning.best, timer=once)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["INVARIANT_ADAM_CACHE"] = folder
        ways.best(*layer(model, *shape))
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def compile_all(models, jobs):
    start = time.perf_counter()
    work = [(model, shape) for model in models for _, *shape in MODELS[model][0]]
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        waiting = [(args, pool.apply_async(compile_layer, args)) for args in work]
        for args, done in waiting:
            try:
                done.get()
            except Exception as problem:  # it comes again where it is timed
                print(*args, problem, flush=True)
    print(f"compiled {len(work)} layers in {time.perf_counter() - start:.0f} s", flush=True)


def convolutions(model):
    """Rows of one network: each layer's time over the library's, and all of them."""
    plain_all, ours_all, whole = 0.0, 0.0, True
    for times, *shape in MODELS[model][0]:
        try:
            row = convolution(model, *shape)
        except Exception as problem:  # what was measured stays
            yield {"model": model, "layer": shape, "failed": f"{type(problem).__name__}: {problem}"[:300]}
            whole = False
            continue
        plain_all += times * row["plain_ms"]
        ours_all += times * row["plain_ms"] * row["ratio"]
        yield {"model": model, "times": times} | row
    if whole:
        yield {"model": model, "all_plain_ms": round(plain_all, 3), "ratio": round(ours_all / plain_all, 3)}


def convolution(model, *shape):
    """The row of one layer."""
    start = time.perf_counter()
    G, X, geo = layer(model, *shape)
    g, x = (t.flatten(0, 1) for t in (G, X))
    configs = {"best": ways.best(G, X, geo)}
    for config in ways.candidates(G, X, geo):  # of each way the first configuration, and the one to take unmeasured
        configs.setdefault("untuned", config)
        configs.setdefault(config.way, config)
    work = {name: partial(ways.conv_square, G, X, geo, config=config) for name, config in configs.items()}
    wrong = {name: error(G, X, geo, *function()) for name, function in work.items()}
    assert max(map(max, wrong.values())) < 1e-2, wrong
    weight = random(*geo.weight)
    ms = timed(work | {"plain": partial(conv_backward, g, x, weight, geo, [False, True, False])}, 7)
    plain = ms.pop("plain")
    ratios = {name: round(t / plain, 3) for name, t in ms.items()}
    return {
        "inner": shape[0], "out": shape[1], "pixels": shape[2], "kernel": shape[3], "stride": shape[4],
        "groups": geo.groups, "plain_ms": round(plain, 4),
        "plain_tflops": round(2 * g.numel() * geo.weight[1] * shape[3] ** 2 / plain / 1e9, 1),
        "way": configs["best"].way, "ratio": ratios.pop("best"), "errors": wrong["best"],
        "untuned": configs["untuned"].way, "untuned_ratio": ratios.pop("untuned"),
        "ways": ratios, "config": list(configs["best"]), "seconds": round(time.perf_counter() - start, 1),
    }  # fmt: skip


def norms(model):
    """Rows of one network's batch norms: forward and backward over the library's."""
    _, batch, micro = MODELS[model]
    kappa, all_ms = batch // micro, {"forward": [0.0, 0.0], "backward": [0.0, 0.0]}
    for times, channels, pixels in NORMS[model]:
        x, g = (random(batch, channels, pixels, pixels) for _ in range(2))
        w, b, mean, var = (torch.rand(channels, device="cuda") for _ in range(4))
        how = running(0.1, kappa)
        aten = torch.ops.aten  # what F.batch_norm runs on bfloat16 with float32 weights
        _, mu, r = aten.native_batch_norm(x, w, b, mean, var, True, 0.1, 1e-5)
        mus, rs = norm.statistics(x, kappa, 1e-5, None, None, *how)

        def forward(x=x, w=w, b=b, mean=mean, var=var, how=how):
            return norm.normalise(x, *norm.statistics(x, kappa, 1e-5, mean, var, *how), w, b)

        ms = timed(
            {
                "forward": partial(aten.native_batch_norm, x, w, b, mean, var, True, 0.1, 1e-5),
                "ours forward": forward,
                "backward": partial(
                    aten.native_batch_norm_backward, g, x, w, mean, var, mu, r, True, 1e-5, [True, True, True]
                ),
                "ours backward": partial(norm.backward, g, x, mus, rs, w, None),
            },
            11,
        )
        row = {"model": model, "times": times, "channels": channels, "pixels": pixels}
        for way, total in all_ms.items():
            row |= {f"{way}_ms": round(ms[way], 4), f"{way}_ratio": round(ms["ours " + way] / ms[way], 3)}
            total[0] += times * ms[way]
            total[1] += times * ms["ours " + way]
        yield row
    last = {"model": model, "norms": True}
    for way, (plain, ours) in all_ms.items():
        last |= {f"all_{way}_ms": round(plain, 3), f"{way}_ratio": round(ours / plain, 3)}
    yield last


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, help="one set of layers only; resnet18 and resnet50 if not given")
    parser.add_argument("--jobs", type=int, default=8, help="processes that compile beforehand; 0: none")
    parser.add_argument("--json", type=Path, help="write the result here, after each row")
    args = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    models = [args.model] if args.model else list(NORMS)
    os.environ["INVARIANT_ADAM_TUNE"] = "1"
    if args.jobs:
        compile_all(models, args.jobs)
    os.environ.setdefault("INVARIANT_ADAM_CACHE", tempfile.mkdtemp())
    result = {
        "benchmark": "conv_square and ghost batch norm over the library's calls, bfloat16, channels last",
        "command": "python benchmarks/conv_square.py" + (f" --model {args.model}" if args.model else ""),
    }
    result |= record.environment(torch.device("cuda")) | {"date": date.today().isoformat(), "rows": []}
    for work in (convolutions, norms):
        for model in models:
            for row in work(model) if work is convolutions or model in NORMS else ():
                print(row, flush=True)
                result["rows"].append(row)
                if args.json:
                    record.write_json(args.json, result)
    if args.json:
        print(f"wrote {args.json}")


if __name__ == "__main__":
    main()

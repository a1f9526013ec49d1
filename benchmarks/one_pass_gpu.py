"""A training step on a GPU: one pass and the loop against fused AdamW over the same mini-batch.

GPT-2 124M (untied head, 50,304 tokens), B = 32 sequences of 1,024, bfloat16 autocast; and ResNet-18 for 32×32 images in
channels_last, B = 800, M = 25, ghost batch norm. Ratios are to one plain pass with `torch.optim.AdamW(fused=True)` in
the same run, medians of CUDA-event timings. The result is written after each row: a run cut short keeps its rows.

    PYTHONPATH=src python benchmarks/one_pass_gpu.py --out benchmarks/results/one_pass_h200.json
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from datetime import date
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import invariant_adam as ia

T, D, LAYERS, HEADS, V = 1024, 768, 12, 12, 50304


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.up, self.down = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(V, D), nn.Parameter(torch.randn(T, D) * 0.02)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, V, bias=False)

    def forward(self, ids):
        return self.head(self.norm(self.blocks(self.tokens(ids) + self.places)))


class Residual(nn.Module):
    def __init__(self, inner, outer, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(outer), nn.BatchNorm2d(outer)
        self.short = nn.Sequential()
        if stride != 1:
            self.short = nn.Sequential(nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer))

    def forward(self, x):
        return F.relu(self.short(x) + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


def resnet18():
    widths = [
        (64, 64, 1),
        (64, 64, 1),
        (64, 128, 2),
        (128, 128, 1),
        (128, 256, 2),
        (256, 256, 1),
        (256, 512, 2),
        (512, 512, 1),
    ]
    return nn.Sequential(
        nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU(), *(Residual(*w) for w in widths),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10),
    )  # fmt: skip


def loss_of(model, x, y):
    with torch.autocast("cuda", torch.bfloat16):
        out = model(x)
    return F.cross_entropy(out.flatten(0, -2).float(), y.flatten())


def timed(step, repeats):
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        step()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times), torch.cuda.max_memory_allocated() / 2**30


def measure(name, make, x, y, sizes, compiled, save):
    wrap = torch.compile if compiled else (lambda m: m)
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = make()
    run = wrap(model)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def plain(adamw=adamw):
        loss_of(run, x, y).backward()
        adamw.step()
        adamw.zero_grad()

    base, memory = timed(plain, 10)
    row = {
        "model": name,
        "batch": len(x),
        "compiled": compiled,
        "plain_ms": round(base, 2),
        "plain_gib": round(memory, 2),
    }
    save({**row, "method": "plain"})
    del adamw
    for size in sizes:
        model.zero_grad()
        torch._dynamo.reset()
        run = wrap(model)
        opt = ia.InvariantAdam(model.parameters(), lr=1e-4, micro_batch_size=size)

        def once(run=run, opt=opt, size=size):
            with ia.one_pass(run, micro_batch_size=size):
                loss_of(run, x, y).backward()
            opt.step()

        begin = time.perf_counter()
        once()
        first = time.perf_counter() - begin
        ms, memory = timed(once, 10)
        save(
            {
                **row,
                "method": "one pass",
                "M": size,
                "ratio": round(ms / base, 3),
                "gib": round(memory, 2),
                "first_call_s": round(first, 1),
            }
        )
        if not compiled:

            def loop(run=run, opt=opt, size=size):
                for a, b in zip(x.split(size), y.split(size), strict=True):
                    loss_of(run, a, b).backward()
                opt.step()

            ms, memory = timed(loop, 3)
            save({**row, "method": "loop", "M": size, "ratio": round(ms / base, 3), "gib": round(memory, 2)})
        del opt


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the result here as JSON")
    parser.add_argument("--only", nargs="+", default=["gpt", "resnet", "gpt-compiled"])
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    result = {
        "benchmark": "a training step by one pass and by the loop, over one pass with fused AdamW",
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "python": platform.python_version(),
        "invariant_adam": ia.__version__, "date": date.today().isoformat(), "rows": [],
    }  # fmt: skip

    def save(row):
        print(row, flush=True)
        result["rows"].append(row)
        if args.out:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(result, indent=1) + "\n")

    def text():
        return (torch.randint(V, (32, T), device="cuda") for _ in range(2))

    if "gpt" in args.only:
        measure("GPT-2 124M", lambda: GPT().cuda(), *text(), [1], False, save)
    if "resnet" in args.only:
        x = torch.randn(800, 3, 32, 32, device="cuda").to(memory_format=torch.channels_last)
        y = torch.randint(10, (800,), device="cuda")
        measure("ResNet-18", lambda: resnet18().cuda().to(memory_format=torch.channels_last), x, y, [25], False, save)
    if "gpt-compiled" in args.only:
        measure("GPT-2 124M", lambda: GPT().cuda(), *text(), [1], True, save)


if __name__ == "__main__":
    main()

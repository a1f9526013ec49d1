"""Timing: work is interleaved in rounds, the median counts, and the machine's ceilings are measured in the same run.

On a GPU, CUDA events around several calls in a row take the time, so that the host runs ahead as it does in training;
on the CPU, `perf_counter` does.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from invariant_adam.graphs import aside

Work = Callable[[], Any]


class Ceilings(NamedTuple):
    """What the machine reaches on the plainest work: bytes read and written by a copy, a square matrix product."""

    copy_tb_per_s: float
    gemm_tflops: float


class Taken(NamedTuple):
    """The times of one piece of work, in milliseconds per call."""

    ms: float
    best_ms: float
    rounds: int
    calls: int


@contextmanager
def fast_math() -> Iterator[None]:
    """Let libraries choose their fastest algorithms: cuDNN by trial, float32 products by tf32."""
    before = torch.backends.cudnn.benchmark, torch.get_float32_matmul_precision()
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before[0]
        torch.set_float32_matmul_precision(before[1])


@contextmanager
def many_graphs() -> Iterator[None]:
    """Let torch.compile keep graphs of many models and shapes; by default it runs eagerly after the eighth."""
    from torch._dynamo import config  # torch has no public name for it

    limit = "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit"
    with config.patch({limit: 1024, f"accumulated_{limit}": 4096}):
        yield


def clock(work: Work, device: torch.device, calls: int = 1) -> float:
    """Return the milliseconds of one call, over `calls` calls in a row."""
    if device.type == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(device)
        begin.record()
        for _ in range(calls):
            work()
        end.record()
        torch.cuda.synchronize(device)
        return float(begin.elapsed_time(end)) / calls
    start = time.perf_counter()
    for _ in range(calls):
        work()
    return 1e3 * (time.perf_counter() - start) / calls


def interleaved(
    work: Mapping[str, Work], device: torch.device, rounds: int, *, warmup: int = 1, round_ms: float = 0.0
) -> dict[str, Taken]:
    """Time each piece of work once per round, in another order each round, so that all see the same machine.

    Args:
        work: functions by name.
        device: where they run.
        rounds: how often each is timed.
        warmup: calls before, which do not count.
        round_ms: repeat a piece of work in each round until about this many milliseconds are full.
    """
    calls = {}
    for name, function in work.items():
        ms = min([clock(function, device) for _ in range(warmup)], default=round_ms)
        calls[name] = max(1, min(50, round(round_ms / max(ms, 1e-6))))
    times: dict[str, list[float]] = {name: [] for name in work}
    order = random.Random(0)
    for _ in range(rounds):
        for name in order.sample(list(work), len(work)):
            times[name].append(clock(work[name], device, calls[name]))
    return {name: Taken(statistics.median(t), min(t), rounds, calls[name]) for name, t in times.items()}


def captured(work: Work, first: int = 1) -> Work:
    """Return the work as the replay of a CUDA graph, so that its time leaves out the host's launches.

    Args:
        work: what is captured; a replay returns what it returned then.
        first: calls before, which compile and allocate.
    """
    with aside(torch.device("cuda")) as stream:
        for _ in range(first):
            work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        output = work()

    def replay(held: Work = work) -> Any:  # the tensors of the work live as long as its graph
        graph.replay()
        return output

    return replay


def ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Measure the bandwidth of a copy and the rate of a square product of `dtype`."""
    gpu = device.type == "cuda"
    source, target = (torch.randn(2**28 if gpu else 2**24, device=device) for _ in range(2))
    side = 8192 if gpu else 1024
    # Random numbers, because constants switch fewer bits, and a chip bound by power runs faster on them.
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    work: dict[str, Callable[[], Tensor]] = {"copy": lambda: target.copy_(source), "gemm": lambda: a @ b}
    taken = interleaved(work, device, rounds=7, warmup=2, round_ms=20.0 if gpu else 0.0)
    return Ceilings(8 * source.numel() / taken["copy"].ms / 1e9, 2 * side**3 / taken["gemm"].ms / 1e9)

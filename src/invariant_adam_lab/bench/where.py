"""Where the time of an update goes: kernels, operations and the host, by torch's profiler."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

HEAD = ("operation", "plain ms", "own ms", "more ms")
_FEW = 6  # operations that are shown
_LONG = 80  # characters of a name
_TIMES = 3  # updates in a profile
_LAUNCHED = 7  # updates whose launches are timed


def look(update: Callable[[], Any], device: torch.device, ms: float) -> dict[str, Any]:
    """Return where the milliseconds of one update go.

    Args:
        update: makes one update; it has run before.
        device: where it runs.
        ms: its time without the profiler, which slows the host down: on a CPU the parts are scaled to it.

    On a GPU `kernels_ms` is what the device computes, and `host_ms` is when the host has launched all of it, the median
    of some updates that begin with an idle GPU; the larger one limits the update. On a CPU `operations_ms` is torch's
    operators, and `host_ms` everything else: Python, autograd, the optimizer.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or the profiler greets on stderr
    gpu = device.type == "cuda"
    found: dict[str, Any] = {}
    if gpu:
        launched = []
        for _ in range(_LAUNCHED):
            torch.cuda.synchronize(device)
            start = time.perf_counter()
            update()
            launched.append(1e3 * (time.perf_counter() - start))
        found["host_ms"] = statistics.median(launched)
        torch.cuda.synchronize(device)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])]
    with profile(activities=activities, acc_events=True) as seen:
        start = time.perf_counter()
        for _ in range(_TIMES):
            update()
        if gpu:
            torch.cuda.synchronize(device)
        profiled = 1e3 * (time.perf_counter() - start)
    unit = 1e-3 / _TIMES if gpu else 1e-3 * ms / profiled
    # On a GPU a kernel stands under its own name and under those of the operator that launched it and of annotations
    # around it: taken once.
    times = (
        (event.key, unit * (event.self_device_time_total if gpu else event.self_cpu_time_total))
        for event in seen.key_averages()
        if not gpu or (event.device_type == DeviceType.CUDA and not event.is_user_annotation)
    )
    spent = added(times)
    if gpu:
        found["kernels_ms"] = sum(spent.values())
    else:  # the time that a Function has to itself is Python's
        found["operations_ms"] = sum(own for name, own in spent.items() if name.startswith(("aten::", "mkldnn::")))
        found["host_ms"] = max(0.0, ms - found["operations_ms"])
    top = sorted(spent.items(), key=lambda item: -item[1])[:40]
    found["operations"] = {name: round(own, 3) for name, own in top}
    return {key: round(value, 3) if isinstance(value, float) else value for key, value in found.items()}


def added(times: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Return times by shortened names, which several kernels of a library may share.

    >>> added([("conv" * 30 + "_small", 1.0), ("conv" * 30 + "_large", 2.0), ("relu", 0.0)]) == {"conv" * 20: 3.0}
    True
    """
    found: dict[str, float] = {}
    for name, spent in times:
        if spent > 0:
            found[name[:_LONG]] = found.get(name[:_LONG], 0.0) + spent
    return found


def verdict(row: dict[str, Any]) -> str:
    """Say what limits the update of a row."""
    found = row["where"]
    kind = "kernels" if "kernels_ms" in found else "operations"
    work, host = found[f"{kind}_ms"], found["host_ms"]
    limit = "the host: Python, autograd and the optimizer" if host > work else f"its {kind}"
    if host > work and kind == "kernels" and row["method"] in ("one-pass", "into"):
        limit += "; a CUDA graph leaves it out (ia.capture in your script, --graph here)"
    where = "" if kind == "kernels" else " on a CPU"
    return f"{row['method']}{where}: {kind} {work:.2f} ms, host {host:.2f} ms; limited by {limit}"


def differences(plain: dict[str, Any], own: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return what takes longer in `own` than in `plain`, the largest first, as it is printed under `HEAD`."""
    before, after = plain["where"]["operations"], own["where"]["operations"]
    more = {name: ms - before.get(name, 0.0) for name, ms in after.items()}
    top = sorted(more, key=lambda name: -more[name])[:_FEW]
    return [
        (name[:36], f"{before.get(name, 0.0):.2f}", f"{after[name]:.2f}", f"{more[name]:+.2f}")
        for name in top
        if more[name] > 0.005
    ]

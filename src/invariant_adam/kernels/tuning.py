"""Which configuration a kernel runs with: the one measured best on this machine, else the kernel's own choice.

With `INVARIANT_ADAM_TUNE=1` in the environment, the first use of each shape times the kernel's candidates (some seconds
a shape, most of them compiling) and keeps the best on disk, by GPU and Triton version; later processes find it there
with or without the variable. `INVARIANT_ADAM_CACHE` names another folder.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

C = TypeVar("C", bound=NamedTuple)
Timer = Callable[[Callable[[], Any]], float]


def best(
    kernel: str, shape: tuple[int | str, ...], device: torch.device, choice: C,
    candidates: Callable[[], Sequence[C]], run: Callable[[C], Any], timer: Timer | None = None,
) -> C:  # fmt: skip
    """Return the configuration of `kernel` for `shape`: the one measured best here, else `choice`.

    Args:
        kernel: its name on disk.
        shape: what the best configuration depends on.
        device: where it runs.
        choice: the kernel's own.
        candidates: what else to try.
        run: runs the kernel with a configuration, and leaves nothing behind.
        timer: returns the time of a function; by default its time on the device.
    """
    if device.type != "cuda" and timer is None:
        return choice
    file, key = _file(device), " ".join(map(str, shape))
    known = _load(file).get(kernel, {}).get(key)
    if known is not None and len(known) == len(choice):
        return type(choice)(*known)
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if capturing or not wanted():
        return choice
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        found = _fastest([choice, *candidates()], run, timer or _milliseconds)
    _keep(file, kernel, key, list(found))
    return found


def wanted() -> bool:
    """Whether configurations that are not known are to be measured."""
    return os.environ.get("INVARIANT_ADAM_TUNE", "0") not in ("", "0")


def _fastest(configs: Sequence[C], run: Callable[[C], Any], timer: Timer) -> C:
    times: dict[C, float] = {}
    for config in dict.fromkeys(configs):
        try:
            times[config] = timer(lambda config=config: run(config))  # type: ignore[misc]
        except Exception as problem:  # too large for this chip's registers or shared memory, unless the device failed
            if config == configs[0] or "CUDA error" in str(problem) or "HIP error" in str(problem):
                raise
    return min(times, key=times.__getitem__)


def _milliseconds(function: Callable[[], Any]) -> float:
    """Return the median time on the device of a call whose data is in no cache.

    The device idles before each call, so that all launches of the call are queued when it begins. In training the host
    is ahead of the device, and a way of many short kernels must not lose by the time that its launches take here.
    """
    function()  # compiles
    cache = torch.empty(2**28, dtype=torch.int8, device="cuda")
    events = []
    for _ in range(20):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        cache.zero_()
        torch.cuda._sleep(1_000_000)  # cycles, about half a millisecond
        begin.record()
        function()
        end.record()
        events.append((begin, end))
    torch.cuda.synchronize()
    return statistics.median(float(begin.elapsed_time(end)) for begin, end in events)


def folder() -> Path:
    """Return where configurations are kept."""
    if chosen := os.environ.get("INVARIANT_ADAM_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "invariant_adam"


def _file(device: torch.device) -> Path:
    import triton

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    machine = re.sub(r"[^A-Za-z0-9.]+", "-", f"{name} triton {triton.__version__}")
    return folder() / f"tuned-{machine}.json"


@cache
def _load(file: Path) -> dict[str, dict[str, list[Any]]]:
    """What the file holds; nothing where it is missing or damaged, since it only saves time."""
    try:
        kept = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return kept if isinstance(kept, dict) else {}


def _keep(file: Path, kernel: str, key: str, config: list[Any]) -> None:
    """Add one configuration to what other processes have added meanwhile; the file is whole at any time."""
    _load(file).setdefault(kernel, {})[key] = config
    with suppress(OSError):  # a folder that cannot be written: tuned again next time
        file.parent.mkdir(parents=True, exist_ok=True)
        merged = _load.__wrapped__(file)
        for name, configs in _load(file).items():
            merged.setdefault(name, {}).update(configs)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False, encoding="utf-8") as aside:
            json.dump(merged, aside, indent=1, sort_keys=True)
        os.replace(aside.name, file)

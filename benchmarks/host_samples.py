"""Where the host's time of an update goes: Python's stack, looked at every half millisecond.

    PYTHONPATH=src python benchmarks/host_samples.py --out benchmarks/results/host_samples_h200.json

Each update begins when the GPU is idle, so that the host never waits for it. A function's time is that of the samples
in which it is on the stack; a profiler that is called at every function would make small ones look large. Time inside
of torch's C++ counts for the line of Python that comes next, perhaps a hook. A plain backward runs in a thread of its
own, which is not looked into.
"""

from __future__ import annotations

import argparse
import collections
import signal
import time
import warnings
from pathlib import Path

import torch

from invariant_adam_lab import record
from invariant_adam_lab.bench import timing
from invariant_adam_lab.bench.one_pass import Case, CaseStep

CASES = [
    ("resnet18", 800, 25, False),
    ("resnet18", 800, 25, True),
    ("timm:vit_small_patch16_224", 256, 8, True),
]
EVERY = 0.0005  # seconds between two looks
SHOWN = 70  # functions that are kept


class Samples:
    """Counts the functions on the stack."""

    def __init__(self):
        self.count, self.total = collections.Counter(), 0

    def look(self, _, frame):
        self.total += 1
        seen = set()
        while frame is not None:
            code = frame.f_code
            seen.add(f"{'/'.join(Path(code.co_filename).parts[-3:])}:{code.co_name}")
            frame = frame.f_back
        self.count.update(seen)


def sampled(step, seconds):
    """Milliseconds of the host per update, and those of each function."""
    samples, updates, busy = Samples(), 0, 0.0
    signal.signal(signal.SIGALRM, samples.look)
    signal.setitimer(signal.ITIMER_REAL, EVERY, EVERY)
    try:
        while busy < seconds:
            torch.cuda.synchronize()
            start = time.perf_counter()
            step()
            busy += time.perf_counter() - start
            updates += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    each = 1e3 * busy / updates / max(1, samples.total)
    return 1e3 * busy / updates, {name: round(n * each, 2) for name, n in samples.count.most_common(SHOWN)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/host_samples.json"), help="results, a row at a time")
    parser.add_argument("--seconds", type=float, default=1.2, help="of each method's updates (default: %(default)s)")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("the host is looked at while it launches for a GPU, and this machine has none")
    warnings.simplefilter("ignore")  # of first updates
    device = torch.device("cuda")
    rows = record.Rows(options.out, "python benchmarks/host_samples.py", "host_samples", device)
    with timing.fast_math(), timing.many_graphs():
        for model, batch, micro, compiled in CASES:
            case = Case(model, batch, micro, "cuda", compiled=compiled)
            steps = {method: CaseStep(case, method) for method in ("plain", "one-pass")}
            for step in steps.values():
                for _ in range(6):
                    step()
            taken = timing.interleaved(steps, device, 7, round_ms=200.0)
            for method, step in steps.items():
                host, functions = sampled(step, options.seconds)
                times = {"ms": round(taken[method].ms, 2), "best_ms": round(taken[method].best_ms, 2)}
                found = times | {"host_ms": round(host, 2), "functions": functions}
                print(rows.add(case.settings(method), found), flush=True)
            torch.compiler.reset()


if __name__ == "__main__":
    main()

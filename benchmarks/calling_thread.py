"""In which thread a backward runs: torch's thread for the GPU, or the one that calls it, as one pass has it.

    PYTHONPATH=src python benchmarks/calling_thread.py --out benchmarks/results/calling_thread_h200.json

Eager updates of two models that wait for the host, bfloat16 autocast: plain with fused AdamW and in one pass, each in
both threads, in turn and in one process. Nothing else runs on the machine.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path

import torch

from invariant_adam_lab import record
from invariant_adam_lab.bench import timing
from invariant_adam_lab.bench.one_pass import Case, CaseStep

CASES = [("timm:vit_small_patch16_224", 256, 8), ("resnet18", 800, 25)]


class Update(CaseStep):
    """An update whose backward runs in torch's thread for the GPU, or in the calling one."""

    threads = True

    def loss(self, *batch):
        found = super().loss(*batch)
        torch._C._set_multithreading_enabled(self.threads)  # one pass has its own way: change it after the forward
        return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/calling_thread.json"), help="results, a row at a time")
    parser.add_argument("--rounds", type=int, default=7, help="how often each is timed; the median counts")
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # of first updates
    device = torch.device("cuda")
    rows = record.Rows(options.out, "python benchmarks/calling_thread.py", "calling_thread", device)
    with timing.fast_math():
        for model, batch, micro in CASES:
            case, work = Case(model, batch, micro, "cuda"), {}
            for method in ("plain", "one-pass"):
                step = Update(case, method)
                for _ in range(5):
                    step()

                def update(step=step, threads=True):
                    step.threads = threads
                    step()

                work[method, True], work[method, False] = update, lambda update=update: update(threads=False)
            taken = timing.interleaved(work, device, options.rounds, round_ms=200.0)
            for (method, threads), found in taken.items():
                settings = {
                    "model": model,
                    "batch": batch,
                    "micro_batch": micro,
                    "method": method,
                    "own_thread": threads,
                }
                print(rows.add(settings, {"ms": round(found.ms, 2), "rounds": found.rounds}), flush=True)


if __name__ == "__main__":
    main()

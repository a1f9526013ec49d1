"""Seconds per epoch of the lab's runs at the smallest and largest batch sizes: as a loop, and as the lab runs them.

    PYTHONPATH=src python benchmarks/lab_seconds.py --out benchmarks/results/lab_seconds_h200.json

"loop": micro-batch by micro-batch, every kernel launched by the host. "lab": one CUDA graph per update, one pass where
there are several micro-batches. One run at a time; the median epoch after the first, of about a tenth of the training
set and of the test set, times what is left out. Each row is written when it is measured.
"""

from __future__ import annotations

import argparse
import statistics
from contextlib import nullcontext
from pathlib import Path

import torch

from invariant_adam_lab import record
from invariant_adam_lab.bench import timing
from invariant_adam_lab.training import data, train
from invariant_adam_lab.training.runs import RECIPES, Run
from invariant_adam_lab.training.source import load
from invariant_adam_lab.training.updates import FIRST

WAYS = {"loop": {"engine": "loop", "graphs": False}, "lab": {"engine": "one-pass", "graphs": True}}
RULES = {"invariant": "linear", "standard": "square_root"}


def part_of(found, share):
    """The dataset with `share` of its test set."""
    if isinstance(found, data.Images):
        count = int(len(found.test_x) * share)
        return found._replace(test_x=found.test_x[:count], test_y=found.test_y[:count])
    return found._replace(test_ids=found.test_ids[: int(len(found.test_ids) * share)])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = [name for name, recipe in RECIPES.items() if recipe.dataset != "text"]  # that is the user's own
    parser.add_argument("--models", nargs="+", choices=known, default=known)
    parser.add_argument("--epochs", type=int, default=3, help="of each run; the first is not counted")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="small models: to try this script")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    device = torch.device(args.device)
    rows = record.Rows(args.out, "python benchmarks/lab_seconds.py", "seconds per epoch of the lab's runs", device)
    for model in args.models:
        recipe = RECIPES[model]
        whole = (data.cifar10 if recipe.dataset == "cifar10" else data.tinyshakespeare)()[0]
        source = load(model, device, small=args.small, found=part_of(whole, 0.1))
        largest, M = recipe.batch_sizes[-1], recipe.micro_batch_size
        total = source.count // largest * largest
        samples = max(source.count // 10 // largest, 2 * FIRST) * largest
        for batch in (M, largest):
            for algorithm, rule in RULES.items():
                for way, how in WAYS.items():
                    settings = {"model": model, "algorithm": algorithm, "batch_size": batch, "way": way}
                    if rows.has(settings):
                        continue
                    run = Run(
                        model, algorithm, rule, batch, M, largest, 1e-4, 0, args.epochs, samples, small=args.small
                    )
                    with timing.fast_math() if device.type == "cuda" else nullcontext():
                        epochs = train.finish(train.train(run, source, **how))
                    seconds = statistics.median(row["seconds"] for row in epochs[1:]) * total / samples
                    rows.add(settings, {"seconds": float(f"{seconds:.4g}"), "epochs": args.epochs, "samples": samples})
                    print(f"{model:10} {algorithm:10} B = {batch:4} {way:5} {seconds:8.2f} s per epoch", flush=True)


if __name__ == "__main__":
    main()

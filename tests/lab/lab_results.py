"""Results as a grid would leave them, made up by a formula: for tests of what is drawn from them."""

import csv
import json
import math
import random

from invariant_adam_lab.results.curves import COLUMNS

PAIR = (("invariant", "linear"), ("standard", "square_root"))
FULL = (
    *PAIR,
    ("invariant", "exponential"),
    ("standard", "linear"),
    ("micro", "none"),
    ("adama", "linear"),
    ("halflife", "none"),
)
# How fast a run learns as its batch grows, as a power of B/B_max: 0 would be invariance.
DRIFT = {("standard", "square_root"): 0.03, ("standard", "linear"): -0.06, ("adama", "linear"): 0.05}
DRIFT |= {("halflife", "none"): 0.2}


def rows(
    model="resnet-bn",
    algorithms=PAIR,
    sizes=(25, 100, 400, 800),
    rates=(1e-5, 1e-4, 1e-3),
    seeds=(0,),
    epochs=10,
    warmups=(0,),
    micro=25,
    ramps=(),
    samples=50_000,
    largest=None,
):
    """Rows of a results.csv, as dictionaries; all runs of a seed share its noise, as if they saw the same samples."""
    found = []
    largest = largest or sizes[-1]
    runs = [
        (algorithm, rule, size, lr0, seed, warmup, "")
        for algorithm, rule in algorithms
        for size in (sizes if algorithm != "micro" else (micro,))
        for lr0 in rates
        for seed in seeds
        for warmup in warmups
    ]
    runs += [("invariant", "linear", sizes[0], lr0, seed, 0, ramp) for ramp in ramps for lr0 in rates for seed in seeds]
    for algorithm, rule, size, lr0, seed, warmup, ramp in runs:
        noise = random.Random(f"{model} {lr0} {seed}")
        own = random.Random(f"{model} {algorithm} {rule} {size} {lr0} {seed} {warmup} {ramp}")
        log_size = math.log(size / largest)
        speed = lr0 * 2e4 * math.exp(DRIFT.get((algorithm, rule), 0.0) * log_size)
        for epoch in range(1, epochs + 1):
            t = 8 * epoch * speed
            common = 1 + 0.01 * noise.gauss(0, 1)
            error = 3e-4 * (lr0 / 1e-5) ** 0.55 * (1 - 0.6 * bool(warmup)) / epoch**0.5
            if algorithm in ("invariant", "micro"):
                loss = (0.02 + 2.28 / (1 + t) ** 0.45) * common * (1 + error * (log_size + 0.2 * own.gauss(0, 1)))
            else:
                loss = (0.02 + 2.28 / (1 + t) ** 0.45) * common
            test = 0.35 + 0.85 * loss + 0.02 * own.gauss(0, 1)
            accuracy = max(0.1, 1 - 0.36 * loss)
            found.append(
                {
                    "model": model,
                    "algorithm": algorithm,
                    "rule": rule,
                    "batch_size": size,
                    "micro_batch_size": micro,
                    "max_batch_size": largest,
                    "lr0": lr0,
                    "seed": seed,
                    "warmup_samples": warmup,
                    "ramp": ramp,
                    "epoch": epoch,
                    "samples": epoch * samples,
                    "train_loss": loss,
                    "train_accuracy": accuracy,
                    "test_loss": test,
                    "test_accuracy": max(0.1, 1 - 0.36 * test),
                    "lr": lr0 * size / largest,
                    "seconds": 4 + 300 / size,
                }
            )
    return found


def uneven():
    """Grids in which not every series has every batch size, learning rate and seed, and one run that fits nowhere."""

    def bn(*algorithms, sizes=(25, 100, 400, 800), rates=(1e-4,), **more):
        return rows(algorithms=algorithms or PAIR, sizes=sizes, rates=rates, epochs=3, largest=800, **more)

    def vit(*algorithms, sizes=(25, 100, 400), **more):
        return rows("vit", algorithms or PAIR, sizes, epochs=3, largest=400, **more)

    rates = (1e-4, 3e-4, 1e-3)
    found = bn(rates=(1e-5, 1e-3)) + bn(seeds=(0, 1, 2)) + bn(sizes=(100, 400), rates=(3e-4,))
    found += bn(sizes=(25, 800), rates=(1e-5, 1e-4), warmups=(25_000,))
    found += bn(*FULL[3:4], *FULL[5:], sizes=(100, 400, 800)) + bn(("accumulate", "square_root"), sizes=(100, 400, 800))
    found += bn(PAIR[0], sizes=(100, 400), rates=rates, micro=100) + bn(PAIR[0], sizes=(400,), rates=rates, micro=400)
    found += rows("resnet-ln", sizes=(100, 400, 800), rates=(1e-5, 1e-4), epochs=3)
    found += vit() + vit(FULL[2], sizes=(100, 400), rates=(1e-4, 1e-3))
    stray = bn(PAIR[0], sizes=(800,), rates=(3e-3,), micro=100, seeds=(7,)) + vit(FULL[6], sizes=(25,), rates=(1e-4,))
    return found + stray


def same(row, **settings):
    return all(row[key] == value for key, value in settings.items())


def write(folder, rows, **grid):
    """Write a grid's folder and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "results.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    about = {"preset": "synthetic", "machine": "none", "versions": {"torch": "0"}, "date": "2000-01-01"}
    (folder / "grid.json").write_text(json.dumps(about | grid), encoding="utf-8")
    return folder

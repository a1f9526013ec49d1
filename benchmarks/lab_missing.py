"""Make the runs that the committed results of the lab lack, the most wanted first, side by side and for so long.

    PYTHONPATH=src python benchmarks/lab_missing.py --list
    PYTHONPATH=src python benchmarks/lab_missing.py --seconds 500 --at-once 12

Each run is a process of `invariant-adam reproduce` with a folder of its own, so that a stopped one loses nothing but
itself. Finished ones go to benchmarks/results/lab at once, and are gathered at the end. Then make figures and pages:

    invariant-adam figures benchmarks/results/lab --out docs/figures/lab
    python benchmarks/pages.py

Processes share a GPU far better under NVIDIA's MPS (nvidia-cuda-mps-control -d).
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from invariant_adam_lab.grids import cost, grid, store

LAB = Path("benchmarks/results/lab")
PRESET = "short"
IMAGES = ("vit", "resnet-bn", "resnet-ln")
GROWN, ORDER = {"algorithms": "invariant", "grow": "0.1"}, {"algorithms": "invariant", "order": "1"}
STAGES = [  # what is asked, of which models, by which options of `reproduce`
    ("the order floor at 1e-4", IMAGES, ORDER | {"lrs": "1e-4"}),
    ("grown in at 1e-5", IMAGES, GROWN | {"lrs": "1e-5"}),
    ("grown in with a warm-up at 1e-4", IMAGES, GROWN | {"lrs": "1e-4", "warmup": "25000"}),
    ("grown in with a warm-up at 1e-4", ("gpt",), GROWN | {"lrs": "1e-4", "warmup": "4000"}),
    ("more seeds at 1e-4, grown in", IMAGES, GROWN | {"lrs": "1e-4", "seeds": "1,2"}),
    ("more seeds at 1e-4", IMAGES, {"lrs": "1e-4", "seeds": "1,2"}),
    ("the order floor at 1e-3", IMAGES, ORDER | {"lrs": "1e-3"}),
    ("the order floor at 1e-5", IMAGES, ORDER | {"lrs": "1e-5"}),
]
LAST = 15  # seconds kept for gathering


def choice(options):
    """What the command line makes of options."""

    def listed(name, kind):
        return tuple(map(kind, options[name].split(","))) if name in options else None

    return grid.Choice(
        lrs=listed("lrs", float),
        batch_sizes=listed("batch-sizes", int),
        seeds=listed("seeds", int),
        algorithms=grid.read_algorithms(options["algorithms"], "curves") if "algorithms" in options else None,
        warmup_samples=listed("warmup", int) or (0,),
        grow=listed("grow", float),
        orders=listed("order", int) or (0,),
    )


def plans():
    """The plan of each stage and model, with the stage's title and options."""
    for title, models, options in STAGES:
        for model in models:
            yield title, options, grid.plan(model, PRESET, "curves", choice(options))


def setup_of(plan, device):
    """How the runs of a plan are made."""
    digest, precision = store.digest(plan.model, plan.made_up, None), "bfloat16" if device == "cuda" else "float32"
    how = {"small": plan.small, "precision": precision, "made_up": plan.made_up}
    return store.Setup(LAB, plan.name, device, digest, **how)


def options_of(run):
    """The options of `reproduce` that mean one run."""
    found = {
        "algorithms": f"{run.algorithm}:{run.rule}", "lrs": f"{run.lr0:g}", "batch-sizes": str(run.batch_size),
        "seeds": str(run.seed),
    }  # fmt: skip
    if run.warmup_samples:
        found["warmup"] = str(run.warmup_samples)
    if run.grow:
        found["grow"] = f"{run.grow:g}"
    if run.order:
        found["order"] = str(run.order)
    return found


def written(options):
    return [word for name, value in options.items() for word in (f"--{name}", value)]


def missing(device):
    """Title, run and seconds alone on an H200 of each run that no file has, once."""
    known, _ = cost.costs(Path("none"), "cuda")
    found = {}
    for title, _, plan in plans():
        setup = setup_of(plan, device)
        for run in plan.runs:
            if run not in found and store.finished(run, setup, take=False) is None:
                found[run] = (title, run, cost.estimate(run, known) or 0.0)
    return list(found.values())


class Maker:
    """Starts runs, and takes in those that have ended."""

    def __init__(self, work, device):
        self.work, self.device, self.running, self.made = work, device, [], set()
        self.began = time.monotonic()
        work.mkdir(parents=True, exist_ok=True)

    def say(self, text):
        print(f"[{time.monotonic() - self.began:4.0f} s] {text}", flush=True)

    def start(self, run):
        folder = self.work / run.name
        shutil.rmtree(folder, ignore_errors=True)
        line = [sys.executable, "-m", "invariant_adam", "reproduce", run.model, "--preset", PRESET]
        line += written(options_of(run))
        more = ["--device", self.device, "--out", str(folder), "--lanes", "1", "--no-figures"]
        with (self.work / f"{run.name}.log").open("w") as log:
            env = os.environ | {"OMP_NUM_THREADS": "1"}
            process = subprocess.Popen(
                [*line, *more], env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        self.running.append((process, run, folder))

    def take_in(self):
        """Keep the files of the runs that have ended."""
        for held in [held for held in self.running if held[0].poll() is not None]:
            self.running.remove(held)
            process, run, folder = held
            files = list(folder.glob("*/*-lr*.json"))
            for path in files:
                to = LAB / path.parent.name
                to.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, to)
            self.made |= {run} if files else set()
            said = "made" if files else f"failed, exit status {process.returncode}: see {self.work / run.name}.log"
            self.say(f"{run.name}: {said}")

    def stop(self):
        """End what still runs."""
        for process, run, _ in self.running:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            self.say(f"{run.name}: stopped")


def gather(made, device):
    """Write results.csv and grid.json of the grids that have new runs."""
    for _, options, plan in plans():
        if made & set(plan.runs):
            setup = setup_of(plan, device)
            words = " ".join(["reproduce", plan.model, "--preset", PRESET, *written(options)])
            store.gather(plan, setup, f"invariant-adam {words} --out {LAB} --no-figures")
            (setup.folder / "results.parquet").unlink(missing_ok=True)  # not kept in the repository


def main(words=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print what is missing, and make nothing")
    parser.add_argument("--seconds", type=float, default=500.0, help="when to stop (default: %(default)s)")
    parser.add_argument("--at-once", type=int, default=8, help="processes side by side (default: %(default)s)")
    parser.add_argument("--device", default="cuda", help="where (default: %(default)s)")
    parser.add_argument("--work", type=Path, default=Path("runs/lab_missing"), help="folder for runs and logs")
    options = parser.parse_args(words)
    todo = missing(options.device)
    if options.list:
        for title, run, seconds in todo:
            print(f"{seconds:5.0f} s  {title}: {run.model} {' '.join(written(options_of(run)))}")
        print(f"{sum(seconds for *_, seconds in todo):5.0f} s  {len(todo)} runs, one after the other on an H200")
        return
    maker, end = Maker(options.work, options.device), time.monotonic() + options.seconds - LAST
    try:
        while (todo or maker.running) and time.monotonic() < end:
            maker.take_in()
            fit = [job for job in todo if time.monotonic() + 30 + 1.5 * job[2] < end]  # the others would be stopped
            for job in fit[: options.at_once - len(maker.running)]:
                todo.remove(job)
                maker.start(job[1])
            if not maker.running:
                break
            time.sleep(0.3)
        maker.take_in()
    finally:
        maker.stop()
        gather(maker.made, options.device)
    maker.say(f"{len(maker.made)} runs made, {len(missing(options.device))} are missing")


if __name__ == "__main__":
    main()

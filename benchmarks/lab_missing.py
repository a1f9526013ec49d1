"""Make the runs that the committed results of the lab lack, the most wanted first, side by side and for so long.

    PYTHONPATH=src python benchmarks/lab_missing.py --list
    PYTHONPATH=src python benchmarks/lab_missing.py --seconds 500 --at-once 12

Each run is a process of `invariant-adam reproduce` with a folder of its own, so that a stopped one loses nothing but
itself. Finished ones go to benchmarks/results/lab at once, and are gathered at the end. Then make figures and pages:

    invariant-adam figures benchmarks/results/lab --out docs/figures/lab
    python benchmarks/pages.py

Under NVIDIA's MPS (nvidia-cuda-mps-control -d) the kernels of several processes run at once.
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

from invariant_adam_lab import record
from invariant_adam_lab.cli.reproduce import OPTIONS
from invariant_adam_lab.grids import cost, grid, store

LAB = Path("benchmarks/results/lab")
PRESET = "short"
IMAGES = ("vit", "resnet-bn", "resnet-ln")
OURS = grid.read_algorithms("invariant", "curves")
FLOOR, GROWN, SEEDS = grid.Choice(algorithms=OURS, orders=(1,)), grid.Choice(algorithms=OURS, grow=(0.1,)), (1, 2)
STAGES = [  # what is asked, of which models, by which runs
    ("the order floor at 1e-4", IMAGES, FLOOR._replace(lrs=(1e-4,))),
    ("grown in at 1e-5", IMAGES, GROWN._replace(lrs=(1e-5,))),
    ("grown in with a warm-up at 1e-4", IMAGES, GROWN._replace(lrs=(1e-4,), warmup_samples=(25_000,))),
    ("grown in with a warm-up at 1e-4", ("gpt",), GROWN._replace(lrs=(1e-4,), warmup_samples=(4_000,))),
    ("more seeds at 1e-4, grown in", IMAGES, GROWN._replace(lrs=(1e-4,), seeds=SEEDS)),
    ("more seeds at 1e-4", IMAGES, grid.Choice(lrs=(1e-4,), seeds=SEEDS)),
    ("the order floor at 1e-3", IMAGES, FLOOR._replace(lrs=(1e-3,))),
    ("the order floor at 1e-5", IMAGES, FLOOR._replace(lrs=(1e-5,))),
    ("the paper's other batch sizes", IMAGES, grid.Choice(lrs=(1e-4, 1e-5, 1e-3), batch_sizes=(50, 200))),
    ("the paper's smallest learning rate", IMAGES, grid.Choice(lrs=(1e-6,))),
]
LAST = 15  # seconds kept for gathering


def plans():
    """The plan of each stage and model, with the stage's title and choice."""
    for title, models, choice in STAGES:
        for model in models:
            yield title, choice, grid.plan(model, PRESET, "curves", choice)


def setup_of(plan, device):
    """How the runs of a plan are made."""
    digest, precision = store.digest(plan.model, plan.made_up, None), "bfloat16" if device == "cuda" else "float32"
    how = {"small": plan.small, "precision": precision, "made_up": plan.made_up}
    return store.Setup(LAB, plan.name, device, digest, **how)


def choice_of(run):
    """What means one run."""
    one = {"lrs": (run.lr0,), "batch_sizes": (run.batch_size,), "seeds": (run.seed,), "orders": (run.order,)}
    grow = (run.grow,) if run.grow else None
    return grid.Choice(**one, algorithms=((run.algorithm, run.rule),), warmup_samples=(run.warmup_samples,), grow=grow)


def words_of(choice):
    """A choice in the words of `reproduce`."""
    usual, found = grid.Choice()._asdict(), []
    for name, value in choice._asdict().items():
        if value != usual[name]:
            each = (":".join(v) if isinstance(v, tuple) else f"{v:g}" for v in value)
            found += [OPTIONS[name], ",".join(each)]
    return found


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
        line += [*words_of(choice_of(run)), "--device", self.device, "--lanes", "1", "--no-figures"]
        with (self.work / f"{run.name}.log").open("w") as log:
            env = os.environ | {"OMP_NUM_THREADS": "1"}
            line += ["--out", str(folder)]
            process = subprocess.Popen(line, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        self.running.append((process, run, folder))

    def take_in(self):
        """Keep the files of the runs that have ended."""
        for held in [held for held in self.running if held[0].poll() is not None]:
            self.running.remove(held)
            process, run, folder = held
            files = list(folder.glob("*/*-lr*.json"))
            for path in files:
                record.write(LAB / path.parent.name / path.name, path.read_bytes())
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
    for _, choice, plan in plans():
        if made & set(plan.runs):
            setup = setup_of(plan, device)
            words = " ".join(["reproduce", plan.model, "--preset", PRESET, *words_of(choice)])
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
    if options.at_once < 1 or options.seconds <= LAST:
        parser.error(f"--at-once must be at least 1 and --seconds more than {LAST}, in which runs are gathered")
    if not LAB.is_dir():
        parser.error(f"there is no {LAB} here, so that every run would be missing; call this from the repository")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that what runs ends too
    todo = missing(options.device)
    if options.list:
        for title, run, seconds in todo:
            print(f"{seconds:5.0f} s  {title}: {run.model} {' '.join(words_of(choice_of(run)))}")
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

"""Kill ranks, lose and gain nodes while examples/train_gpt.py trains, and compare with a run that was left alone.

python benchmarks/faults.py kills     SIGKILL of a rank, ten times: in a fold, in a reduction, in a checkpoint's write
python benchmarks/faults.py elastic   nodes of 2 + 2 ranks; one is lost (2 left), one of 1 joins (3)
python benchmarks/faults.py silence   a rank is killed, or stops answering, and no launcher stops the others for them

Everything runs on this machine: processes are ranks, launchers (torchrun) are nodes. Results go to --out as JSON.
"""

import argparse
import json
import os
import random
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "train_gpt.py"


def dtype(mode):
    return "float32" if mode == "fsdp2" else "float64"


def small(mode, *more):
    """Arguments for a net small enough to start and stop many times, in float64 where FSDP2 does not forbid it."""
    # Ten micro-batches, an unequal share for three or four ranks; FSDP2 needs equal ones.
    batch = 24 if mode == "fsdp2" else 20
    net = ("--width=16", "--depth=1", "--context=16", "--micro-batch=2", "--ramp=1", "--lr=3e-3", "--timeout=60")
    return [*net, f"--dtype={dtype(mode)}", f"--batch={batch}", f"--grow-from={batch}", *more]


# Where a rank dies: how many calls may pass first, and the longest delay after the call begins, in seconds.
FAULTS = {"fold": (5, 1e-4), "reduction": (3, 1e-3), "write": (5, 2e-3), "any moment": (1, 0.1)}
COLLECTIVES = ("all_reduce", "reduce_scatter_tensor", "reduce_scatter_single")


# ---------------------------------------------------------------------- inside a rank


class Ledger:
    """What happened, one JSON object per line, on the disk before the process goes on (or dies)."""

    def __init__(self, path):
        self.path = Path(path)

    def add(self, event, **facts):
        line = json.dumps({"event": event, "time": time.time(), **facts}) + "\n"
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            os.write(file, line.encode())
            _fsync(file)
        finally:
            os.close(file)

    def read(self, event=None):
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        return [fact for fact in map(json.loads, lines) if event in (None, fact["event"])]


_fsync = os.fsync


class Saboteur:
    """Stands in the way of a rank: kills it in the middle of what the plan says, once per entry of the plan."""

    def __init__(self, plan, ledger):
        self.ledger, self.holds = ledger, plan.get("holds", [])
        self.rank, self.world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        done = len(ledger.read("kill"))
        self.fault = next(iter(plan.get("faults", [])[done:]), None)
        self.optimizer, self.writing, self.count = None, False, 0

    def install(self):
        from invariant_adam import distributed
        from invariant_adam.kernels import adam

        adam.fold = self.around(adam.fold, "fold")
        for name in COLLECTIVES:
            if hasattr(dist, name):
                setattr(dist, name, self.around(getattr(dist, name), "reduction"))
        for name in ("fsync", "rename"):
            setattr(os, name, self.around(getattr(os, name), "write"))
        distributed.load_latest = self.watch_load(distributed.load_latest)
        distributed.save = self.watch_save(distributed.save)

    def around(self, function, kind):
        """Let `function` be called, and let the rank die in one of its calls when its hour has come."""

        def call(*args, **kwargs):
            if not self.is_due(kind):
                return function(*args, **kwargs)
            fault, self.fault = self.fault, None
            threading.Timer(fault["delay"], self.strike, (fault, function.__name__)).start()
            result = function(*args, **kwargs)
            if fault["kind"] != "any moment":
                time.sleep(1000)  # it dies in this call, at its end at the latest
            return result

        return call

    def is_due(self, kind):
        """Whether this call is the one to die in."""
        fault = self.fault
        if fault is None or self.optimizer is None or fault["rank"] != self.rank:
            return False
        if {"any moment": "fold"}.get(fault["kind"], fault["kind"]) != kind:
            return False
        if self.optimizer.samples_seen < fault["after"] or self.writing is not (kind == "write"):
            return False
        self.count += 1
        return self.count > fault["calls"]

    def strike(self, fault, call):
        place = call if fault["kind"] != "any moment" else "save" if self.writing else "update"
        facts = {"kind": fault["kind"], "place": place, "rank": self.rank, "samples": self.optimizer.samples_seen}
        self.ledger.add("kill", **facts)
        os.kill(os.getpid(), signal.Signals[fault.get("signal", "SIGKILL")])

    def watch_load(self, load):
        def watched(folder, model, optimizer, **others):
            found = load(folder, model, optimizer, **others)
            self.optimizer = optimizer
            facts = {"rank": self.rank, "world": self.world, "samples": optimizer.samples_seen, "pid": os.getpid()}
            self.ledger.add("start", **facts)
            return found

        return watched

    def watch_save(self, save):
        def watched(folder, model, optimizer, **others):
            self.writing, self.count = True, 0 if self.fault and self.fault["kind"] == "write" else self.count
            path = save(folder, model, optimizer, **others)
            self.writing = False
            if self.rank == 0:
                self.ledger.add("saved", samples=optimizer.samples_seen, world=self.world)
            for hold in self.holds:
                if self.world == hold["world"] and optimizer.samples_seen >= hold["samples"]:
                    self.wait_for_change()
            return path

        return watched

    def wait_for_change(self):
        """Train no further until a node comes or goes, so that it happens where the test wants it."""
        if self.rank == 0:
            self.ledger.add("waiting", world=self.world)
        while True:
            time.sleep(0.1)
            dist.barrier()  # notices a rank that is gone


def work(plan, arguments):
    """Be a rank: run the example, watched."""
    plan = json.loads(Path(plan).read_text())
    ledger = Ledger(plan["ledger"])
    Saboteur(plan, ledger).install()
    sys.argv = [str(EXAMPLE), *arguments]
    try:
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
        ledger.add("error", rank=int(os.environ.get("RANK", 0)), message=message)
        raise
    ledger.add("done", rank=int(os.environ.get("RANK", 0)))


# ---------------------------------------------------------------------- around the ranks


def children(pid):
    """All processes below one, as Linux tells them."""
    try:
        pids = [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
    return pids + [below for p in pids for below in children(p)]


def kill_all(process):
    """SIGKILL to a launcher and its ranks: a node that is gone."""
    for pid in [process.pid, *children(process.pid)]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


@contextmanager
def launch(command, log, env):
    """Start a process in a session of its own, and leave nothing of it behind."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH")))),
        "OMP_NUM_THREADS": "1",
        # Else torchrun's first node does not tell a node that joins later where the ranks meet.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        **env,
    }
    with open(log, "a") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    try:
        yield process
    finally:
        kill_all(process)


def torchrun(ranks, *options):
    return [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", *options]


class ExampleRun:
    """A run of the example in a folder of its own: its command, its ledger, its log."""

    def __init__(self, folder, arguments, *, faults=(), holds=(), seconds=600):
        self.folder, self.seconds, self.began = Path(folder), seconds, time.monotonic()
        self.folder.mkdir(parents=True)
        self.log, self.ledger = self.folder / "log.txt", Ledger(self.folder / "events.jsonl")
        plan = self.folder / "plan.json"
        plan.write_text(json.dumps({"ledger": str(self.ledger.path), "faults": list(faults), "holds": list(holds)}))
        self.command = [str(Path(__file__).resolve()), "work", str(plan), *arguments, "--out", str(self.folder / "out")]

    def launch(self, *launcher, env=()):
        return launch([*(launcher or (sys.executable,)), *self.command], self.log, dict(env))

    def wait(self, until):
        """Wait for something to be true, or fail with the end of the log."""
        while not until():
            if time.monotonic() - self.began > self.seconds:
                raise TimeoutError(f"not done after {self.seconds} s:\n{self.log.read_text()[-5000:]}")
            time.sleep(0.1)

    def finish(self, process):
        self.wait(lambda: process.poll() is not None)
        if process.returncode:
            raise RuntimeError(f"exit code {process.returncode}:\n{self.log.read_text()[-5000:]}")
        return self

    def loss(self):
        return float(re.findall(r"held-out text: ([\d.]+)", self.log.read_text())[-1])

    def state(self):
        """The weights and moments of the last checkpoint, and whether each checkpoint that is there is whole."""
        from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

        from invariant_adam.distributed import checkpoint

        paths = sorted((self.folder / "out").glob("samples-*"))
        damaged = [f"{path.name}: {damage}" for path in paths if (damage := checkpoint.find_damage(path))]
        whole = self.folder / "last.pt"
        dcp_to_torch_save(paths[-1], whole)
        found = torch.load(whole, weights_only=True)
        moments = found["optimizer"]["state"]
        return {
            "samples": found["optimizer"]["param_groups"][0]["samples_seen"],
            "damaged": damaged,
            "weights": found["model"],
            "exp_avg": {name: moments[name]["exp_avg"] for name in found["model"]},
            "exp_avg_sq": {name: moments[name]["exp_avg_sq"] for name in found["model"]},
        }


def compare(run, alone):
    """The largest differences between two runs, and what is wrong with the checkpoints of the first."""
    ours, theirs = run.state(), alone.state()
    result = {"samples": ours["samples"], "samples_alone": theirs["samples"], "damaged": ours["damaged"]}
    for key in ("weights", "exp_avg", "exp_avg_sq"):
        pairs = [(ours[key][name], theirs[key][name]) for name in theirs[key]]
        result[key] = max(float((a - b).abs().max()) for a, b in pairs)
    return {**result, "loss": run.loss(), "loss_alone": alone.loss()}


def kills(args, folder):
    """Kill a rank again and again; every start must go on from the last checkpoint that was saved."""
    arguments = small(args.mode, "--mode", args.mode, "--samples", "2400", "--every", "120", *args.rest)
    dice = random.Random(args.seed)
    kinds = [(*FAULTS, *list(FAULTS)[:-1] * args.kills)[i] for i in range(args.kills)]
    dice.shuffle(kinds)
    faults = []
    for i, kind in enumerate(kinds):
        rank, (calls, delay) = dice.randrange(args.ranks), FAULTS[kind]
        if kind == "write" and rank:
            calls = 1  # all that a rank writes, but for the first, which renames the whole
        after = round(2400 * (i + dice.random()) / (args.kills + 1))
        moment = {"calls": dice.randrange(calls), "delay": dice.random() * delay}
        faults.append({"kind": kind, "rank": rank, "after": after, **moment})
    alone = ExampleRun(folder / "alone", arguments)
    with alone.launch(*torchrun(args.ranks, "--standalone")) as process:
        alone.finish(process)
    run = ExampleRun(folder / "killed", arguments, faults=faults)
    with run.launch(*torchrun(args.ranks, "--standalone", f"--max-restarts={args.kills}")) as process:
        run.finish(process)
    rows, saved = [], 0
    for fact in run.ledger.read():
        if fact["event"] == "saved":
            saved = fact["samples"]
        if fact["event"] == "kill":
            rows.append({key: fact[key] for key in ("kind", "place", "rank", "samples")} | {"saved": saved})
        if fact["event"] == "start" and fact["rank"] == 0 and rows:
            rows[-1].setdefault("resumed", fact["samples"])
    facts = {"mode": args.mode, "dtype": dtype(args.mode), "ranks": args.ranks, "seed": args.seed}
    return {**facts, "rows": rows, **compare(run, alone)}


def elastic(args, folder):
    """Lose a node of two ranks and gain one of one, under one rendezvous; compare with one process left alone."""
    arguments = small(args.mode, "--samples", "1200", "--every", "60", *args.rest)
    alone = ExampleRun(folder / "alone", [*arguments, "--mode", "single"])
    with alone.launch() as process:
        alone.finish(process)
    holds = [{"world": 4, "samples": 300}, {"world": 2, "samples": 700}]
    run = ExampleRun(folder / "elastic", [*arguments, "--mode", args.mode], holds=holds)
    # The store of the rendezvous lives here, so that any node may go.
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    options = (
        "--nnodes=1:2", "--max-restarts=3", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{store.port}",
        "--rdzv-id=elastic", "--local-addr=localhost", "--monitor-interval=0.1",
        "--rdzv-conf=is_host=0,join_timeout=120,last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=3",
    )  # fmt: skip

    def waiting(world):
        return lambda: any(fact["world"] == world for fact in run.ledger.read("waiting"))

    with ExitStack() as nodes:
        first, second = (nodes.enter_context(run.launch(*torchrun(2, *options))) for _ in range(2))
        run.wait(waiting(4))
        kill_all(second)
        run.wait(waiting(2))
        third = nodes.enter_context(run.launch(*torchrun(1, *options)))
        for node in (first, third):
            run.finish(node)
    starts = [fact for fact in run.ledger.read("start") if fact["rank"] == 0]
    rows = [{"ranks": fact["world"], "from": fact["samples"]} for fact in starts]
    return {"mode": args.mode, "dtype": dtype(args.mode), "rows": rows, **compare(run, alone)}


def silence(args, folder):
    """Kill a rank, or stop it, where nobody stops the others; say when they stop by themselves, and why."""
    rows = []
    for name, sent in (("killed", "SIGKILL"), ("stopped", "SIGSTOP")):
        arguments = small(
            args.mode, "--mode", args.mode, "--samples", "2400", "--timeout", str(args.timeout), *args.rest
        )
        fault = {"kind": "reduction", "rank": 1, "after": 200, "calls": 1, "delay": 0.0, "signal": sent}
        run = ExampleRun(folder / name, arguments, faults=[fault], seconds=120 + args.timeout)
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        with ExitStack() as ranks:
            processes = []
            for rank in range(3):
                numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 3, "MASTER_PORT": store.port}
                meeting = {"MASTER_ADDR": "localhost", "TORCHELASTIC_USE_AGENT_STORE": "True"}
                own = {**meeting, **{key: str(value) for key, value in numbers.items()}}
                processes.append(ranks.enter_context(run.launch(env=own)))
            run.wait(lambda: run.ledger.read("kill"))  # noqa: B023
            others = [p for rank, p in enumerate(processes) if rank != fault["rank"]]
            run.wait(lambda: all(p.poll() is not None for p in others))  # noqa: B023
        (kill,), errors = run.ledger.read("kill"), run.ledger.read("error")
        # Without the paths of the machine that built torch.
        messages = {str(fact["rank"]): re.sub(r"/\S+/", "", fact["message"]) for fact in errors}
        seconds = max(fact["time"] for fact in errors) - kill["time"]
        codes = [p.returncode for p in others]
        rows.append({"rank_1": name, "seconds": round(seconds, 1), "exit_codes": codes, "errors": messages})
    return {"mode": args.mode, "ranks": 3, "timeout": args.timeout, "rows": rows}


def main():
    if sys.argv[1:2] == ["work"]:
        work(sys.argv[2], sys.argv[3:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("kills", "elastic", "silence"))
    parser.add_argument("--mode", choices=("ddp", "fsdp2"), default="ddp")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--timeout", type=int, default=10, help="of the process group, in seconds, for silence")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="where the result goes; by default to benchmarks/results")
    parser.add_argument("--keep", type=Path, help="a folder for the logs and checkpoints, which are dropped otherwise")
    args, args.rest = parser.parse_known_args()

    from invariant_adam_lab import record

    with tempfile.TemporaryDirectory() as scratch:
        result = {"kills": kills, "elastic": elastic, "silence": silence}[args.what](args, args.keep or Path(scratch))
    result = {"command": f"python benchmarks/faults.py {' '.join(sys.argv[1:])}", **record.provenance(), **result}
    out = args.out or ROOT / "benchmarks" / "results" / f"faults_{args.what}_{args.mode}.json"
    record.write_json(out, result)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()

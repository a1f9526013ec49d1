"""What one pass costs the host, per operation on parameters: 72 tiny operations, so that nothing else takes time.

    python benchmarks/host.py --before CHECKOUT --out benchmarks/results/host_cpu.json

Twelve blocks of two layer norms and four linear layers of width 8 are trained on a mini-batch of 8 samples, M = 2. The
optimizer and the backward are part of it. Each round times a plain update with fused AdamW, one in `one_pass`, and one
in `one_pass(..., into=opt)`, in the time of the thread, which other processes do not lengthen. Checkouts take turns,
round by round, each in a process of its own: `--before` names another one, such as a worktree of an older commit.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

OPERATIONS = 72
HERE = Path(__file__).resolve().parent.parent


def serve(calls: int) -> None:
    """Time `calls` updates of each kind for every line on stdin, and print the medians in milliseconds as JSON."""
    import torch
    from torch import nn

    import invariant_adam as ia

    torch.set_num_threads(1)
    torch.manual_seed(0)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(2))
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def forward(self, x):
            x = x + self.layers[1](self.layers[0](self.norms[0](x)))
            return x + self.layers[3](torch.relu(self.layers[2](self.norms[1](x))))

    def updates(kind):
        model, x = nn.Sequential(*(Block() for _ in range(12))), torch.randn(8, 4, 8)
        if kind == "plain":
            opt = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        else:
            opt = ia.InvariantAdam(model.parameters(), lr=1e-4, micro_batch_size=2, tuned_batch_size=8)

        def plain():
            model(x).square().mean().backward()
            opt.step()
            opt.zero_grad()

        def once():
            with ia.one_pass(model, micro_batch_size=2, **({"into": opt} if kind == "into" else {})):
                model(x).square().mean().backward()
            opt.step()

        return plain if kind == "plain" else once

    kinds = {kind: updates(kind) for kind in ("plain", "one pass", "into")}
    for update in kinds.values():
        for _ in range(10):
            update()
    for _ in sys.stdin:
        taken = {}
        for kind, update in kinds.items():
            times = []
            for _ in range(calls):
                start = time.thread_time()
                update()
                times.append(1e3 * (time.thread_time() - start))
            taken[kind] = statistics.median(times)
        print(json.dumps(taken), flush=True)


class Server:
    def __init__(self, checkout: Path, calls: int) -> None:
        where = {**os.environ, "PYTHONPATH": str(checkout / "src"), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(Path(__file__).resolve()), "--serve", str(calls)]
        self.process = subprocess.Popen(command, env=where, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def round(self) -> dict[str, float]:
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def stop(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def row(version: str, rounds: list[dict[str, float]]) -> dict[str, object]:
    ms = {kind: statistics.median(r[kind] for r in rounds) for kind in rounds[0]}
    plain = ms.pop("plain")
    each = {
        f"{kind.replace(' ', '_')}_us": round(
            1e3 * statistics.median(r[kind] - r["plain"] for r in rounds) / OPERATIONS, 1
        )
        for kind in ms
    }
    times = {f"{kind.replace(' ', '_')}_ms": round(value, 3) for kind, value in ms.items()}
    return {"version": version, "plain_ms": round(plain, 3), **times, **each, "rounds": len(rounds)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="another checkout to compare with")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--calls", type=int, default=10, help="updates of each kind in a round")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.serve:
        serve(asked.serve)
        return
    checkouts = {"before": asked.before, "after": HERE} if asked.before else {"after": HERE}
    servers = {name: Server(path, asked.calls) for name, path in checkouts.items()}
    taken = {name: [] for name in servers}
    for _ in range(asked.rounds):
        for name, server in servers.items():
            taken[name].append(server.round())
    for server in servers.values():
        server.stop()
    rows = [row(name, rounds) for name, rounds in taken.items()]
    if asked.before:  # the file is of the commit after that it comes with
        commit = ["git", "-C", str(asked.before), "rev-parse", "--short", "HEAD"]
        rows[0]["commit"] = subprocess.run(commit, capture_output=True, text=True, check=True).stdout.strip()
    for each in rows:
        print(each)
    if asked.out:
        import torch

        sys.path.insert(0, str(HERE / "src"))
        from invariant_adam_lab.record import environment

        head = {
            "benchmark": "the host's time per operation on parameters, in excess of a plain update",
            "command": "python benchmarks/host.py --before CHECKOUT",
            **environment(torch.device("cpu")),
            "operations": OPERATIONS,
        }
        asked.out.write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

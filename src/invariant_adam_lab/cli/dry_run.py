"""The dry run of `reproduce`: the grid, what the rest of it costs, and the commands to share it out."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from .console import count, new_table, print_json, stdout

if TYPE_CHECKING:
    from ..grids.grid import Grid
    from ..grids.store import Setup
    from ..training.runs import Run


def show(plan: Grid, setup: Setup, gpus: int, on_cpu: bool, as_json: bool) -> None:
    """Show a grid, what is done of it, what the rest costs and how to share it out."""
    from ..grids import cost
    from ..grids.grid import shard
    from ..grids.store import finished

    gpus = 1 if on_cpu else gpus
    known, source = cost.costs(setup.out, "cpu" if on_cpu else "cuda", plan.small)
    left = [run for run in plan.runs if finished(run, setup, take=False) is None]
    done = len(plan.runs) - len(left)
    seconds = {run: cost.estimate(run, known) for run in plan.runs}
    borrowed = {run for run in left if (key := cost.lender(run, known)) and key[1] != run.algorithm}
    unknown = [run for run in left if seconds[run] is None]
    words = ["invariant-adam", *_without(sys.argv[1:], ("--dry-run", "--json"), ("--gpus", "--shard"))]
    last = shlex.join(words)
    if as_json:
        runs = [{"name": run.name, **run._asdict()} for run in plan.runs]
        rest = {
            "seconds": _total(left, seconds) if len(unknown) < len(left) or not left else None,
            "from": source,
            "borrowed": sorted({run.algorithm for run in borrowed}),
            "unknown": sorted({run.algorithm for run in unknown}),
        }
        commands = [
            f"CUDA_VISIBLE_DEVICES={i} {last} --shard {i + 1}/{gpus} --no-figures" for i in range(gpus) if gpus > 1
        ]
        print_json({"grid": plan.name, "runs": runs, "finished": done, "cost": rest, "commands": [*commands, last]})
        return
    stdout.print(
        f"[bold]{plan.name}[/bold]: {count(len(plan.runs), 'run')} of {count(plan.runs[0].epochs, 'epoch')}, "
        f"{done} finished"
    )
    kind = "CPU" if on_cpu else "GPU"
    _print_settings(plan.runs, set(left), seconds if len(unknown) < len(left) else {}, borrowed, kind)
    if not left:
        # Not `figures`: runs that other grids have made are not in this one's folder yet.
        for line in ("Nothing is left to do. To gather and draw it:", *_broken(words, "  ")):
            stdout.print(line, markup=False, soft_wrap=True)
        return
    if plan.small:
        data, takes = ("made-up data", "seconds") if plan.made_up else ("a part of the data", "minutes")
        stdout.print(f"Small models on {data}: it takes {takes}, on a CPU too.")
    elif len(unknown) == len(left):
        stdout.print(f"No cost is known: make some runs (--epochs 1) on a {kind} into the same --out, and ask again.")
    else:
        least = "at least" if unknown else "about"
        unfinished = set(left)
        shares = (shard(plan.runs, i + 1, gpus) for i in range(gpus))
        longest = max(_total([run for run in share if run in unfinished], seconds) for share in shares)
        several = f", {_time(longest)} on {gpus}" if gpus > 1 else ""
        stdout.print(f"What is left takes {least} {_time(_total(left, seconds))} on one {kind}{several}, by {source}.")
        if unknown:
            names = ", ".join(sorted({run.algorithm for run in unknown}))
            stdout.print(f"Not counted: {count(len(unknown), 'run')} of {names}, of which nothing was measured.")
        if borrowed:
            stdout.print(f"* borrowed: as other algorithms of {plan.model} cost at the nearest batch size")
    if gpus == 1:
        lines = ["", f"To run it on one {kind}:", *_broken(words, "  ")]
    else:
        lines = [
            "",
            f"To run it on the {gpus} GPUs of a machine, a log for each:",
            f"  for i in $(seq 1 {gpus}); do",
            "    CUDA_VISIBLE_DEVICES=$((i - 1)) \\",
            *_broken(words, "    ", f" --shard $i/{gpus} --no-figures >shard-$i.log 2>&1 &"),
            "  done; wait",
            "and then, to gather and draw:",
            *_broken(words, "  "),
            f"Several machines that share --out: a --shard for each GPU, 1/{gpus} to {gpus}/{gpus}.",
        ]
    for line in lines:
        stdout.print(line, markup=False, soft_wrap=True)


def _broken(words: list[str], indent: str, end: str = "") -> list[str]:
    """Write a command in lines of at most 80 columns, as far as its words allow.

    >>> _broken(["invariant-adam", "data"], "  ", " &")
    ['  invariant-adam data &']
    """
    lines = [indent + words[0]]
    for word in map(shlex.quote, words[1:]):
        if len(lines[-1]) + len(word) + 3 > 80:  # a space and " \\"
            lines[-1] += " \\"
            lines.append(f"{indent}  {word}")
        else:
            lines[-1] += f" {word}"
    if len(lines[-1]) + len(end) > 80:
        lines[-1] += " \\"
        lines.append(f"{indent} ")
    lines[-1] += end
    return lines


def _without(words: list[str], flags: tuple[str, ...], options: tuple[str, ...]) -> list[str]:
    """Leave flags and options with their values out of a command line.

    >>> _without(["vit", "--gpus", "4", "--json", "--shard=1/2"], ("--json",), ("--gpus", "--shard"))
    ['vit']
    """
    kept = []
    rest = iter(words)
    for word in rest:
        if word in options:
            next(rest, None)
        elif word not in flags and word.partition("=")[0] not in options:
            kept.append(word)
    return kept


def _print_settings(
    runs: list[Run], left: set[Run], seconds: Mapping[Run, float | None], borrowed: set[Run], kind: str
) -> None:
    """Show what is compared: what all have in common above a table of what differs."""
    from ..results.curves import rate

    def joined(values: Iterable[object]) -> str:
        return " ".join(map(str, dict.fromkeys(values)))

    groups: dict[tuple[str, str, int, int, float, int], list[Run]] = {}
    for run in runs:
        key = (run.algorithm, run.rule, run.micro_batch_size, run.warmup_samples, run.grow, run.order)
        groups.setdefault(key, []).append(run)
    rows = [groups[key] for key in sorted(groups)]
    by_size = [sorted(row, key=lambda run: (run.ramp, run.batch_size)) for row in rows]
    settings = {  # the column's name, what it is called above the table, its cells
        "B": ("batch sizes B", [joined(r.ramp.replace("-", "→") or r.batch_size for r in row) for row in by_size]),
        "η₀": ("learning rates η₀", [joined(map(rate, sorted({run.lr0 for run in row}))) for row in rows]),
        "M": ("micro-batch M", [f"{row[0].micro_batch_size}" for row in rows]),
        "warm-up": ("warm-up in samples", [f"{row[0].warmup_samples:,}" for row in rows]),
        "grow": ("growing in", [f"{row[0].grow:g}" for row in rows]),
        "order": ("order", [f"{row[0].order}" for row in rows]),
        "seeds": ("seeds", [joined(sorted({run.seed for run in row})) for row in rows]),
    }
    common = {name: cells[0] for name, (_, cells) in settings.items() if len(set(cells)) == 1}
    for name, cell in common.items():
        if name not in ("warm-up", "grow", "order") or cell != "0":
            stdout.print(f"{settings[name][0]:>20}  {cell}", soft_wrap=True)
    table = new_table()
    for name in ("algorithm", "rule"):
        table.add_column(name, no_wrap=True)
    columns: dict[str, list[str]] = {name: cells for name, (_, cells) in settings.items() if name not in common}
    columns["runs"] = [f"{len(row)}" for row in rows]
    rests = [[run for run in row if run in left] for row in rows]
    if len(left) < len(runs):
        columns["left"] = [f"{len(rest)}" for rest in rests]
    if seconds:
        columns[f"{kind} hours"] = [
            "?" if any(seconds[run] is None for run in rest) else
            f"{_total(rest, seconds) / 3600:.2f}" + "*" * any(run in borrowed for run in rest)
            for rest in rests
        ]  # fmt: skip
    for name, cells in columns.items():
        # Lists break between their numbers where they must; nothing else does, and no number.
        longest = max(len(word) for cell in cells for word in cell.split())
        table.add_column(name, justify="right", no_wrap=name not in ("B", "η₀", "seeds"), min_width=longest)
    for i, row in enumerate(rows):
        table.add_row(row[0].algorithm, row[0].rule, *(cells[i] for cells in columns.values()))
    stdout.print(table)


def _total(runs: list[Run], seconds: Mapping[Run, float | None]) -> float:
    """Add up what is known."""
    return sum(seconds[run] or 0.0 for run in runs)


def _time(seconds: float) -> str:
    """Write a time that is not known better than to a minute.

    >>> _time(40_320), _time(600), _time(5)
    ('11.2 hours', '10 minutes', '1 minute')
    """
    return f"{seconds / 3600:,.1f} hours" if seconds >= 5400 else count(max(1, round(seconds / 60)), "minute")

"""`explain`: which rule serves each parameter, with which kernel and memory, before training starts."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .context import one_pass
from .groups import UnsupportedUse
from .mini_batch import MiniBatch
from .ops.base import COPIES, OPERATIONS, Seen, by_copies
from .verify.check import verify
from .verify.probe import Probe, Trial
from .weight import Entry


@dataclass(frozen=True)
class Row:
    """What one pass does for one parameter."""

    name: str
    shape: tuple[int, ...]
    rule: str  # the operations it goes through
    rows: int | None  # per micro-batch, at the operation that squares it
    kernel: str
    memory: int  # bytes above a plain backward: the square, and what is alive while it is formed


@dataclass(frozen=True)
class Explanation:
    """One row per trainable parameter, and why the model is refused, where it is."""

    rows: tuple[Row, ...]
    batch_size: int
    micro_batch_size: int
    problem: str | None = None

    @property
    def supported(self) -> bool:
        """Whether one pass equals the loop on this model and batch."""
        return self.problem is None

    def __str__(self) -> str:
        head = ("parameter", "shape", "rule", "rows", "kernel", "memory")
        body = []
        for r in self.rows:
            shape, rows = "×".join(map(str, r.shape)) or "1", "-" if r.rows is None else str(r.rows)
            body.append((r.name, shape, r.rule, rows, r.kernel, f"{r.memory / 2**20:.2f} MiB"))
        widths = [max(len(line[i]) for line in (head, *body)) for i in range(len(head))]
        lines = ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in (head, *body)]
        lines.insert(1, "  ".join("-" * w for w in widths))
        kappa = -(-self.batch_size // self.micro_batch_size)
        lines.append(f"{self.batch_size} samples in {kappa} micro-batches of {self.micro_batch_size}: ")
        lines[-1] += "equal to the loop" if self.supported else f"refused\n{self.problem}"
        return "\n".join(lines)


def explain(
    model: nn.Module, sample_batch: Any, micro_batch_size: int, *, batch_dim: int = 0, batch_size: int | None = None
) -> Explanation:
    """Say what `one_pass` would do with a model, parameter by parameter, after checking it against the loop.

    `sample_batch` is what the model is called with: a tensor, a tuple of arguments or a dict of keyword arguments.

    >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
    >>> report = explain(net, torch.randn(8, 3), micro_batch_size=2)
    >>> report.supported, report.rows[0].kernel
    (True, 'gemm_square (pairs)')
    """
    batch = (sample_batch,) if isinstance(sample_batch, Tensor) else sample_batch
    args, kwargs = (tuple(batch), {}) if isinstance(batch, (tuple, list)) else ((), dict(batch))
    context = one_pass(model, micro_batch_size, batch_dim=batch_dim, batch_size=batch_size, check=False)
    problem, probe = None, Probe()

    def run() -> Probe:
        with torch.compiler.set_stance("force_eager"):
            return Trial(context.mini, getattr(model, "_orig_mod", model), (args, kwargs)).run()[0]

    try:
        with context, torch.enable_grad():
            context.before_forward(model, args, kwargs)
            if not context.mini.single:
                with suppress(UnsupportedUse):  # the check may still find out what is a constant
                    probe = run()
                context.facts.find(checked=frozenset(), looks={}, passed=False)
                verify(context.mini, model, args, kwargs)
                probe = run()
    except UnsupportedUse as error:
        problem = str(error)
    rows = [_row(entry, context.mini, probe) for entry in context.facts.order]
    return Explanation(tuple(rows), context.mini.groups.batch, micro_batch_size, problem)


def _row(entry: Entry, mini: MiniBatch, probe: Probe) -> Row:
    shape, itemsize = tuple(entry.param.shape), entry.companion.element_size()
    square = entry.size * itemsize
    if mini.single:
        return Row(entry.name, shape, "any", None, "square of the gradient", square)
    mine = [(name, records) for (names, name), records in probe.records.items() if entry.name in names.split(", ")]
    found = [(name, r) for name, records in mine for r in records if r.placed]
    rule = ", ".join(sorted(entry.operations | {name for name, _ in found}))
    if not rule:
        return Row(entry.name, shape, "not used", None, "-", 0)
    shared = entry.tied or probe.uses[entry.name] > 1
    rows, kernel, extra = None, COPIES, mini.groups.kappa * square
    lines = []
    for name, record in found:
        line = OPERATIONS[name].line if name in OPERATIONS else by_copies
        lines.append(
            line(
                Seen(
                    torch.empty(record.shape, device="meta"), record.axis or 0, record.ids, mini.groups, shape, itemsize
                )
            )
        )
    if lines:
        rows = lines[0].rows
        if entry.table:  # both uses, and the cross terms at the tokens' rows
            tokens = sum(r.shape.numel() for name, r in found if name == "embedding")
            kernel = " + ".join(dict.fromkeys(line.kernel for line in lines))
            extra = square + max(line.extra for line in lines) + tokens * shape[1] * itemsize
        elif len(lines) == 1 and not shared:
            kernel, extra = lines[0].kernel, lines[0].extra
    return Row(entry.name, shape, f"{rule} (shared)" if shared else rule, rows, kernel, square + extra)

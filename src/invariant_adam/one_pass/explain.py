"""`explain`: which rule serves each parameter, with which kernel and memory, before training
starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.gemm_square import method
from .check import verify
from .context import one_pass
from .engine import Engine
from .groups import Groups, UnsupportedUse
from .handles import Entry
from .probe import Probe, Record, run

PRODUCTS = (
    "linear",
    "matmul",
    "mm",
    "addmm",
    "multi_head_attention",
    "lstm",
    "gru",
    "rnn_tanh",
    "rnn_relu",
)
SUMS = ("layer_norm", "group_norm", "instance_norm", "batch_norm")


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
        body = [
            (
                r.name,
                "×".join(map(str, r.shape)) or "1",
                r.rule,
                "-" if r.rows is None else str(r.rows),
                r.kernel,
                f"{r.memory / 2**20:.2f} MiB",
            )
            for r in self.rows
        ]
        widths = [max(len(line[i]) for line in (head, *body)) for i in range(len(head))]
        lines = ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in (head, *body)]
        lines.insert(1, "  ".join("-" * w for w in widths))
        kappa = -(-self.batch_size // self.micro_batch_size)
        lines.append(f"{self.batch_size} samples in {kappa} micro-batches of {self.micro_batch_size}: ")
        lines[-1] += "equal to the loop" if self.supported else f"refused\n{self.problem}"
        return "\n".join(lines)


def explain(
    model: nn.Module,
    sample_batch: Any,
    micro_batch_size: int,
    *,
    batch_dim: int = 0,
    batch_size: int | None = None,
) -> Explanation:
    """Say what `one_pass` would do with a model, parameter by parameter, after checking it against
    the loop.

    `sample_batch` is what the model is called with: a tensor, a tuple of arguments or a dict of
    keyword arguments.

    >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
    >>> report = explain(net, torch.randn(8, 3), micro_batch_size=2)
    >>> report.supported, report.rows[0].kernel
    (True, 'gemm_square (pairs)')
    """
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    if isinstance(sample_batch, Tensor):
        args = (sample_batch,)
    elif isinstance(sample_batch, (tuple, list)):
        args = tuple(sample_batch)
    else:
        kwargs = dict(sample_batch)
    context = one_pass(model, micro_batch_size, batch_dim=batch_dim, batch_size=batch_size, check=False)
    problem = None
    probe: Probe | None = None
    engine = context.engine
    uses: dict[str, int] = {}
    try:
        with context, torch.enable_grad():
            context._before_forward(model, args, kwargs)
            if not engine.single:
                plain = getattr(model, "_orig_mod", model)
                with torch.compiler.set_stance("force_eager"):
                    probe, _ = run(engine, plain, args, kwargs)
                uses = dict(engine.uses)
                engine.checked.clear()
                engine.compilable = False
                verify(engine, model, args, kwargs)
    except UnsupportedUse as error:
        problem = str(error)
    rows = [_row(entry, engine, probe, uses) for entry in engine.entries.values()]
    return Explanation(tuple(rows), engine.groups.batch, micro_batch_size, problem)


def _row(entry: Entry, engine: Engine, probe: Probe | None, uses: dict[str, int]) -> Row:
    groups, p = engine.groups, entry.param
    square = p.numel() * entry.companion.element_size()
    shape = tuple(p.shape)
    if engine.single:
        return Row(entry.name, shape, "any", None, "square of the gradient", square)
    found: list[tuple[str, Record]] = []
    for (names, name), records in (probe.records if probe is not None else {}).items():
        if entry.name in names.split(", "):
            found += [(name, r) for r in records if r.axis is not None or r.ids is not None]
    operations = sorted(entry.operations | {name for name, _ in found})
    rule = ", ".join(operations) or "not used"
    if not operations:
        return Row(entry.name, shape, rule, None, "-", 0)
    copies = groups.kappa * square
    rows = _rows(*found[0], groups) if found else None
    if entry.tied or uses.get(entry.name, 0) > 1:
        return Row(entry.name, shape, f"{rule} (shared)", rows, "copies per micro-batch", square + copies)
    if len(found) != 1 or rows is None:
        return Row(entry.name, shape, rule, rows, "copies per micro-batch", square + copies)
    name, record = found[0]
    routed = record.ids is not None
    size = entry.companion.element_size()
    if (p.ndim == 1 and (name in PRODUCTS or name in SUMS or name.startswith("conv"))) or name in SUMS:
        return Row(entry.name, shape, rule, rows, "sum_square", square + copies)
    if (
        name in PRODUCTS
        and p.ndim == 2
        and not (name in ("lstm", "gru", "rnn_tanh", "rnn_relu") and "hh" in entry.name)
    ):
        how = "products" if routed else method(rows)
        work = {"square": 1.0, "pairs": (rows + 1) / 2}.get(how)
        extra = 2 * square if work is None else int(work * rows * groups.kappa * sum(shape) * size)
        return Row(entry.name, shape, rule, rows, f"gemm_square ({how})", square + extra)
    if name.startswith("conv"):
        return Row(entry.name, shape, rule, rows, "conv_square", square + 2 * square)
    if name == "embedding":
        return Row(
            entry.name,
            shape,
            rule,
            rows,
            "embedding_square",
            square + 3 * rows * groups.kappa * shape[1] * size,
        )
    return Row(entry.name, shape, rule, rows, "copies per micro-batch", square + copies)


def _rows(name: str, record: Record, groups: Groups) -> int:
    """Rows per micro-batch: vectors for a product or a norm, tokens for an embedding, samples for
    the rest."""
    x = record.x
    if record.ids is not None:
        return -(-x.shape[0] // groups.kappa)
    if name in PRODUCTS or name == "layer_norm":
        return x.numel() // x.shape[-1] * groups.micro // groups.batch
    if name == "embedding":
        return x.numel() * groups.micro // groups.batch
    assert record.axis is not None
    return x.shape[record.axis] * groups.micro // groups.batch

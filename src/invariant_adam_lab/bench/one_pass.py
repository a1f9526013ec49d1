"""The time of a training step by each method, over that of a plain pass with `torch.optim.AdamW(fused=True)`.

| method | what an update is |
|---|---|
| plain | one forward and backward over the mini-batch, fused AdamW |
| accumulate | a loop of micro-batches whose gradients are added up, fused AdamW |
| loop | a loop of micro-batches, each folded by InvariantAdam during backward |
| one-pass | one forward and backward in `one_pass`, InvariantAdam |
| into | the same with `one_pass(..., into=opt)`: no gradient is ever in memory |

Every method has a model of its own, from the same seed. Its updates alternate with plain ones, so that both sides
of a ratio are measured in one run. TFLOP/s are the model's own matrix products, forward and backward (attention counted
in full).
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import invariant_adam as ia

from ..record import Rows
from . import subjects, timing, where
from .allocated import growth, size_of

METHODS = ("plain", "accumulate", "loop", "one-pass", "into")
# Samples in the mini-batch and in a micro-batch, where nothing else is asked for.
SIZES = {
    "gpt2-124m": (32, 1),
    "gpt2-350m": (16, 1),
    "gpt-char": (16, 1),
    "vit-b16": (256, 8),
    "vit-cifar": (400, 25),
    "resnet18": (800, 25),
    "resnet18-224": (256, 8),
    "resnet50": (256, 8),
}
THEIR_SIZES = (32, 4)  # of a model that is not the lab's
# What is measured when no model is named: the ones that suit the device.
USUAL = {"cuda": ["gpt2-124m", "gpt2-350m", "vit-b16", "resnet18", "resnet50"], "cpu": ["gpt-char"]}
LOOPS = ("accumulate", "loop")
LOOP_ROUNDS = 3  # they take many times as long as the others
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Case:
    """One model at one batch size, one micro-batch size, one precision.

    Args:
        model: its name; see `subjects`.
        options: options of the model that differ from the name's.
        batch: B, samples in the mini-batch.
        micro_batch: M, samples in a micro-batch; it divides `batch`.
        device: "cuda" or "cpu".
        precision: "bfloat16" for autocast, or "float32".
        compiled: whether the model is compiled.
        graph: whether a whole update is one CUDA graph, plain ones too.
        mode: of torch.compile, such as "reduce-overhead"; None for its default.
    """

    model: str
    batch: int
    micro_batch: int
    device: str
    precision: str = "bfloat16"
    compiled: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    graph: bool = False
    mode: str | None = None

    def settings(self, method: str) -> dict[str, Any]:
        """Return what identifies a row of this case; a plain pass has no micro-batch."""
        return {
            "model": self.model,
            "options": self.options,
            "batch": self.batch,
            "micro_batch": None if method == "plain" else self.micro_batch,
            "precision": self.precision,
            "compiled": self.compiled,
            "method": method,
            "graph": self.graph,
            **({"mode": self.mode} if self.mode else {}),
        }

    def __str__(self) -> str:
        return f"{title(self.settings(''))}, M = {self.micro_batch}"


def cases(
    models: list[str],
    *,
    batch: int | None = None,
    micro_batches: list[int] | None = None,
    device: str,
    precision: str,
    compiled: bool,
    options: dict[str, Any] | None = None,
    graph: bool = False,
    mode: str | None = None,
) -> list[Case]:
    """Return the cases that these choices mean, each of which can be built."""
    found = []
    if mode and not compiled:
        raise ValueError(f"--mode {mode} is one of torch.compile's; add --compile")
    if graph and device != "cuda":
        raise ValueError(f"--graph captures updates in CUDA graphs, which --device {device} has not; leave it out")
    for model in models:
        subjects.check(model, options or {})
        usual = SIZES.get(model, THEIR_SIZES)
        samples = batch or usual[0]
        for size in micro_batches or [math.gcd(usual[1], samples)]:
            if samples % size:
                raise ValueError(
                    f"--micro-batch {size} does not divide --batch {samples}; use --batch {-(-samples // size) * size} "
                    f"or --micro-batch {math.gcd(size, samples)}"
                )
            found.append(Case(model, samples, size, device, precision, compiled, options or {}, graph, mode))
    return found


def check_methods(methods: list[str]) -> list[str]:
    """Return the methods, or raise where one is unknown."""
    for method in methods:
        if method not in METHODS:
            raise ValueError(f"--methods must be some of {', '.join(METHODS)}, got {method!r}")
    return methods


class CaseStep:
    """A case by one method: a model, its optimizer and random data; each call is one update.

    `gather` computes the gradients, `step` moves the weights.
    """

    def __init__(self, case: Case, method: str) -> None:
        self.case, self.method = case, method
        self.replay: Callable[[], Tensor] | None = None
        torch.manual_seed(0)
        device = torch.device(case.device)
        self.model, self.run, self.batch = self._subject(device)
        if case.compiled:  # the loop and the first check have batch sizes, and so graphs, of their own
            self.run = torch.compile(self.run, dynamic=False, mode=case.mode)
        self.optimizer: torch.optim.Optimizer
        if method in ("plain", "accumulate"):
            fused = case.device != "meta"  # where only operations are counted
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=fused, capturable=case.graph)
        else:
            self.optimizer = ia.InvariantAdam(
                self.model.parameters(), lr=1e-4, weight_decay=0.01, micro_batch_size=case.micro_batch
            )

    def _subject(self, device: torch.device) -> tuple[Any, Any, tuple[Tensor, ...]]:
        return subjects.make(self.case.model, self.case.options, self.case.batch, device)

    def loss(self, *batch: Tensor) -> Tensor:
        """Return the mean loss over the samples of a batch."""
        reduced = self.case.precision == "bfloat16"
        with torch.autocast(self.case.device, torch.bfloat16) if reduced else nullcontext():
            loss: Tensor = self.run(*batch)
        return loss

    def gather(self) -> Tensor:
        """Run the forwards and backwards of one update and return the last loss."""
        M = self.case.micro_batch
        if self.method in LOOPS:
            kappa = self.case.batch // M if self.method == "accumulate" else 1
            for batch in zip(*(x.split(M) for x in self.batch), strict=True):
                loss = self.loss(*batch) / kappa
                loss.backward()
            return loss
        into: dict[str, Any] = {"into": self.optimizer} if self.method == "into" else {}
        once = self.method in ("one-pass", "into")
        with ia.one_pass(self.run, micro_batch_size=M, **into) if once else nullcontext():
            loss = self.loss(*self.batch)
            loss.backward()
        return loss

    def step(self) -> None:
        """Move the weights."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def peak_bytes(self) -> int:
        """Make one update on the CPU, and return the bytes alive at its worst moment."""
        state = [t for values in self.optimizer.state.values() for t in values.values() if isinstance(t, Tensor)]
        alive = size_of([*self.model.parameters(), *self.model.buffers(), *self.batch, *state])
        return alive + growth(self, lambda: None, torch.device(self.case.device)).peak

    def __call__(self) -> Tensor:
        """Make one update and return the last loss."""
        if self.case.graph:
            if self.replay is None:
                self.replay = self._capture()
            return self.replay()
        return self._once()

    def _once(self) -> Tensor:
        loss = self.gather()
        self.step()
        return loss

    def _capture(self) -> Callable[[], Tensor]:
        if isinstance(self.optimizer, ia.InvariantAdam):
            return ia.capture(self.optimizer, self._once)
        return timing.captured(self._once, first=3)


class _Ready:
    """A `CaseStep` that has run, with its first seconds and its peak memory without the other models alive."""

    def __init__(self, case: Case, method: str) -> None:
        device = torch.device(case.device)
        gpu = device.type == "cuda"
        gc.collect()
        before = torch.cuda.memory_allocated(device) if gpu else 0
        start = time.perf_counter()
        self.update = CaseStep(case, method)
        if gpu:
            torch.cuda.reset_peak_memory_stats(device)
        loss = self.update()
        check_finite(loss)  # waits for the device
        self.first_s = time.perf_counter() - start
        self.first_gib: float | None = None
        self.peak_gib: float | None = None
        if gpu:
            self.first_gib = (torch.cuda.max_memory_allocated(device) - before) / 2**30
            torch.cuda.empty_cache()  # what the first check took: other commands may be getting ready here
        self.update()
        if gpu and not case.graph:  # a replay allocates nothing; the capture did
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            self.update()
            self.peak_gib = (torch.cuda.max_memory_allocated(device) - before) / 2**30
        if not gpu:  # seen by the profiler, which would be part of the first seconds: so by another model
            another = CaseStep(case, method)
            self.first_gib, self.peak_gib = (another.peak_bytes() / 2**30 for _ in range(2))


def check_finite(loss: Tensor) -> None:
    """Refuse to time what trains no more: NaN takes a GPU less power, and so less time, than numbers do."""
    if not math.isfinite(value := float(loss.detach())):
        raise RuntimeError(f"the loss is {value}: nothing is trained, and its time would be that of other numbers")


def model_flops(case: Case) -> int | None:
    """Return the floating-point operations of the products in one update: forward and backward over the mini-batch."""
    small = replace(
        case, batch=2, micro_batch=2, device="meta", precision="float32", compiled=False, graph=False, mode=None
    )
    try:
        with FlopCounterMode(display=False) as counter:
            CaseStep(small, "plain").gather()
    except Exception:
        if subjects.is_theirs(case.model):  # a forward that looks at values, which a meta tensor has not
            return None
        raise
    return int(counter.get_total_flops()) * case.batch // 2


# "1st": of the first update, which checks the model; the others are of updates after it.
HEAD = ("method", "M", "ms", "× plain", "TFLOP/s", "peak GiB", "1st GiB", "1st s")


def title(row: dict[str, Any]) -> str:
    """Return what a row was measured on."""
    options = "".join(f" {key}={value}" for key, value in row["options"].items())
    how = row.get("mode") or ("compiled" if row["compiled"] else "eager")
    how += ", CUDA graph" if row.get("graph") else ""
    return f"{row['model']}{options}, B = {row['batch']}, {row['precision']}, {how}"


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """Return a row as it is printed under `HEAD`."""
    return (
        row["method"],
        str(row["micro_batch"] or ""),
        _number(row, "ms", ".2f"),
        _number(row, "ratio", ".3f"),
        _number(row, "tflops", ".3g"),
        _number(row, "peak_gib", ".3g"),
        _number(row, "first_gib", ".3g"),
        _number(row, "first_s", ".1f"),
    )


def _number(row: dict[str, Any], key: str, form: str) -> str:
    value = row.get(key)
    return "" if value is None else format(value, form)


Job = tuple[Case, str]


def jobs(wanted: list[Case], methods: list[str], rows: Rows) -> list[Job]:
    """Return the cases and methods that `rows` lacks; a plain pass counts once, whatever M is."""
    found: list[Job] = []
    for case in wanted:
        for method in methods:
            settings = case.settings(method)
            if not rows.has(settings) and all(c.settings(m) != settings for c, m in found):
                found.append((case, method))
    return found


def measure(todo: list[Job], rows: Rows, *, rounds: int, tell: Tell) -> Iterator[dict[str, Any]]:
    """Measure case by case, and yield the rows of one once they are written.

    The methods of a case are made ready first, which compiles and checks them, then timed. A method that fails gives a
    row with its error, and the others go on.

    Args:
        todo: what to measure.
        rows: where to write it.
        rounds: how often each method is timed.
        tell: is told what goes on.
    """
    if not todo:
        return
    device = torch.device(todo[0][0].device)
    ceilings: timing.Ceilings | None = None
    with timing.fast_math(), timing.many_graphs():
        for jobs_of_case in _by_plain(todo):
            _clear(jobs_of_case[0][0])
            ready = _prepare(jobs_of_case, tell)
            if ceilings is None:
                tell("measuring the ceilings of the machine")
                ceilings = timing.ceilings(device, getattr(torch, todo[0][0].precision))
            found = []
            for case, method in jobs_of_case:
                tell(f"{case}: {method}")
                own, plain = ready[case.micro_batch, method], ready[None, "plain"]
                try:
                    if isinstance(plain, Exception):
                        raise plain
                    if isinstance(own, Exception):
                        raise own
                    found.append(_against(plain, own, case, method, rounds, ceilings))
                except Exception as error:  # out of memory, refused, not to be compiled
                    found.append(failure(error))
            # After all are timed: once the profiler has looked, it may slow the launches of this process down.
            for (case, method), measured in zip(jobs_of_case, found, strict=True):
                own = ready[case.micro_batch, method]
                if "error" not in measured and method not in LOOPS and not case.graph:
                    tell(f"{case}: where {method} takes its time")
                    measured["where"] = where.look(own.update, device, measured["ms"])  # type: ignore[union-attr]
                yield rows.add(case.settings(method), measured)
            del ready


def _by_plain(todo: list[Job]) -> list[list[Job]]:
    """The jobs in lists that share a plain pass."""
    found: list[list[Job]] = []
    for case, method in todo:
        if not found or found[-1][0][0].settings("plain") != case.settings("plain"):
            found.append([])
        found[-1].append((case, method))
    return found


def _prepare(todo: list[Job], tell: Tell) -> dict[tuple[int | None, str], _Ready | Exception]:
    """Make plain and the methods ready, by micro-batch size (None for plain) and method; errors in their place.

    Args:
        todo: the jobs, which share a plain pass.
        tell: is told what goes on.
    """
    ready: dict[tuple[int | None, str], _Ready | Exception] = {}
    for case, method in [(todo[0][0], "plain"), *todo]:
        key = (None if method == "plain" else case.micro_batch, method)
        if key not in ready:
            tell(f"{case}: {method} made ready")
            try:
                ready[key] = _Ready(case, method)
            except Exception as error:
                ready[key] = error
    for case, method in todo:
        if method == "plain":
            ready[case.micro_batch, method] = ready[None, method]
    return ready


def _against(
    plain: _Ready, ready: _Ready, case: Case, method: str, rounds: int, ceilings: timing.Ceilings
) -> dict[str, Any]:
    device = torch.device(case.device)
    both = [
        timing.interleaved(
            {"plain": plain.update, method: ready.update},
            device,
            min(rounds, LOOP_ROUNDS) if method in LOOPS else rounds,
            round_ms=300.0 if device.type == "cuda" else 0.0,
        )
        for _ in range(1 if method in LOOPS else 2)  # twice, so that a row says how far it can be trusted
    ]
    check_finite(ready.update())
    own_ms, plain_ms = (statistics.mean(taken[name].ms for taken in both) for name in (method, "plain"))
    own = both[0][method]
    flops = model_flops(case)
    model = plain.update.model
    measured = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "layers": sum(any(True for _ in m.parameters(recurse=False)) for m in model.modules()),  # with weights
        "ms": round(own_ms, 3),
        "best_ms": round(min(taken[method].best_ms for taken in both), 3),
        "plain_ms": round(plain_ms, 3),
        "ratio": round(own_ms / plain_ms, 4),
        "ratios": [round(taken[method].ms / taken["plain"].ms, 4) for taken in both],
        "rounds": own.rounds,
        "updates_per_round": own.calls,
        "first_s": round(ready.first_s, 1),
    }
    if flops is not None:
        tflops = flops / own_ms / 1e9
        measured |= {
            "tflops": float(f"{tflops:.4g}"),
            "gemm_tflops": float(f"{ceilings.gemm_tflops:.4g}"),
            "of_gemm": round(tflops / ceilings.gemm_tflops, 4),
        }
    if ready.peak_gib is not None and plain.peak_gib is not None:
        measured |= {"peak_gib": round(ready.peak_gib, 4), "plain_peak_gib": round(plain.peak_gib, 4)}
    if ready.first_gib is not None and plain.first_gib is not None:
        measured |= {"first_gib": round(ready.first_gib, 4), "plain_first_gib": round(plain.first_gib, 4)}
    return measured


def remarks(rows: list[dict[str, Any]]) -> Iterator[tuple[str, list[tuple[str, ...]]]]:
    """Say what limits each method of a table, with the operations that take longer than in a plain pass."""
    plain = next((row for row in rows if row["method"] == "plain" and "where" in row), None)
    for row in rows:
        if "where" in row:
            own = plain is not None and row is not plain
            yield where.verdict(row), where.differences(plain, row) if own and plain else []


def failure(error: Exception) -> dict[str, Any]:
    """Return what the row of a failed method holds."""
    return {"error": f"{type(error).__name__}: {error}".strip()[:500]}


def _clear(case: Case) -> None:
    """Forget graphs and memory of the case before."""
    torch.compiler.reset()
    gc.collect()
    if case.device == "cuda":
        torch.cuda.empty_cache()

"""The user's question: tuned with AdamW at B₀ = M, then trained at 4 and 16 times that batch with nothing retuned.

A small GPT over characters sees the same samples in the same order in every run. The learning rate is the tuned one
times what the method makes of it, on a warm-up and half a cosine in samples. At B₀ all methods are AdamW.

| method | learning rate at ρB₀ | γ₁ | γ₂ | first updates |
|---|---|---|---|---|
| exponential | ρη | 1 − (1−γ)^ρ | the same | one mini-batch each |
| linear | ρη | ργ | the same | |
| long_momentum | ρη | 1 − (1−γ)^(ρ^p), p = 1/4 | as exponential | |
| …, grown in | | | | `BatchGrowth` |
| adam √, linear, unchanged | √ρ η, ρη, η | γ | γ | |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import invariant_adam as ia
from invariant_adam.scaling import INVARIANT, RULES, long_momentum
from invariant_adam.schedules import Schedule, mean_factor

from . import record
from .models import build
from .training import data as lab_data

FACTORS = (4, 16)  # B over B₀
BETAS = (0.9, 0.99)  # at B₀
POWERS = {f"power {p}": long_momentum(p) for p in (0.0, 0.5)}  # tried beside the 1/4 of long_momentum
ADAM = {"adam, √": 0.5, "adam, linear": 1.0, "adam, unchanged": 0.0}  # the power of ρ on the learning rate
METHODS = (
    "exponential",
    "exponential, grown in",
    "linear",
    "long_momentum",
    "long_momentum, grown in",
    *(f"{name}, grown in" for name in POWERS),
    *ADAM,
)


class Preset(NamedTuple):
    """How long a run is and which there are."""

    samples: int  # of an epoch
    epochs: int
    lrs: tuple[float, ...]  # at B₀
    seeds: tuple[int, ...]
    more: tuple[float, ...] = ()  # learning rates that are tried at B₀ alone, to show where the best one is


PRESETS = {
    "smoke": Preset(1_024, 1, (1e-3,), (0,)),
    "short": Preset(8_192, 3, (3e-4, 1e-3, 3e-3, 1e-2), (0,), (1e-4, 3e-2)),
    "full": Preset(8_192, 3, (3e-4, 1e-3, 3e-3, 1e-2), (0, 1, 2), (1e-4, 3e-2)),
}
MICRO, CONTEXT, HELD_OUT = 16, 32, 512  # samples, characters, samples
NET = {"width": 32, "depth": 2, "heads": 2}


class Case(NamedTuple):
    """One run."""

    lr: float
    seed: int
    batch: int  # samples
    method: str  # of `METHODS`; "tuned" at B₀
    samples: int
    epochs: int


def cases(preset: Preset) -> Iterator[Case]:
    """All runs of a preset, one seed after the other."""
    for seed in preset.seeds:
        for lr in preset.more:
            yield Case(lr, seed, MICRO, "tuned", preset.samples, preset.epochs)
        for lr in preset.lrs:
            yield Case(lr, seed, MICRO, "tuned", preset.samples, preset.epochs)
            for rho in FACTORS:
                for method in METHODS:
                    if method == "linear" and rho * (1 - BETAS[0]) >= 1:
                        continue  # it forgets more than everything
                    yield Case(lr, seed, rho * MICRO, method, preset.samples, preset.epochs)


class Data(NamedTuple):
    """Stretches of a text, one character longer than the context."""

    train: Tensor
    test: Tensor
    vocabulary: int


def cut(ids: Tensor, test_ids: Tensor, vocabulary: int, samples: int) -> Data:
    """Cut a text into samples."""

    def stretches(text: Tensor, n: int) -> Tensor:
        return text.long().unfold(0, CONTEXT + 1, CONTEXT)[:n]

    train = stretches(ids, samples)
    if len(train) < samples:
        raise ValueError(f"the text has {len(train)} samples of {CONTEXT} characters, and {samples} are needed")
    return Data(train, stretches(test_ids, HELD_OUT), vocabulary)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    """Return the mean loss over the characters of samples."""
    return F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())


def train(case: Case, data: Data) -> float:
    """Train; return the loss on held-out text at the end."""
    torch.manual_seed(case.seed)
    model = build("gpt-char", **NET, context=CONTEXT, vocab=data.vocabulary)
    total = case.samples * case.epochs
    schedule = ia.warmup_cosine(total // (4 * case.epochs), total)
    RULES.update(POWERS)  # the library does not know them otherwise
    try:
        update = (_adam if case.method in ADAM else _invariant)(case, model, schedule)
        for epoch in range(case.epochs):
            order = torch.randperm(case.samples, generator=torch.Generator().manual_seed(1_000 * case.seed + epoch))
            for rows in order.split(case.batch):
                update(data.train[rows])
    finally:
        for name in POWERS:
            del RULES[name]
    with torch.no_grad():
        return float(loss_of(model, data.test))


def _invariant(case: Case, model: nn.Module, schedule: Schedule) -> Callable[[Tensor], None]:
    name, _, grown = case.method.partition(", ")
    rule = name if name in RULES else INVARIANT[0]  # at B₀ all are the same
    opt = ia.InvariantAdam(model.parameters(), case.lr, BETAS, micro_batch_size=MICRO)
    opt.param_groups[0]["rule"] = rule
    ia.SampleLambdaLR(opt, schedule)  # the optimizer asks it at each update
    growth = ia.BatchGrowth(opt, 0.1 if grown else float("inf"))

    def update(x: Tensor) -> None:
        for part in growth.split(x):
            with ia.one_pass(model, MICRO, into=opt) if len(part) > MICRO else nullcontext():
                loss_of(model, part).backward()
            opt.step()

    return update


def _adam(case: Case, model: nn.Module, schedule: Schedule) -> Callable[[Tensor], None]:
    opt = torch.optim.AdamW(model.parameters(), case.lr, BETAS, weight_decay=0.0)
    lr, seen = case.lr * (case.batch / MICRO) ** ADAM[case.method], 0

    def update(x: Tensor) -> None:
        nonlocal seen
        opt.param_groups[0]["lr"] = lr * mean_factor(schedule, seen, seen + len(x))
        opt.zero_grad()
        loss_of(model, x).backward()
        opt.step()
        seen += len(x)

    return update


def measure(
    preset: Preset, out: Path, text: lab_data.Text, command: str, on_run: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Make all runs that the file `out` does not have yet, a row for each; return what it holds then.

    Args:
        text: what is trained on.
        command: what makes the file, as it is to be named in it.
        on_run: is told of each row, found or made.
    """
    rows = record.Rows(out, command, "scale-up", torch.device("cpu"))
    data = cut(text.ids, text.test_ids, len(text.vocab), preset.samples)
    for case in cases(preset):
        settings = case._asdict()
        if not rows.has(settings):
            rows.add(settings, {"loss": round(train(case, data), 5)})
        on_run(next(row for row in rows.rows if settings.items() <= row.items()))
    return rows.result()


def table(result: dict[str, Any]) -> Iterator[list[str]]:
    """The rows of a table: a mean over seeds of the loss at the end, at B₀ and, for each method, minus that.

    The columns are learning rates at B₀ and batch sizes.
    """
    rows = result["rows"]
    lrs = sorted({row["lr"] for row in rows if row["method"] != "tuned"})

    def mean(method: str, lr: float, batch: int) -> float | None:
        found = [row["loss"] for row in rows if (row["method"], row["lr"], row["batch"]) == (method, lr, batch)]
        return sum(found) / len(found) if found else None

    yield ["", *(f"{lr:g}, B = {rho * MICRO}" for lr in lrs for rho in FACTORS)]
    yield [f"AdamW, B₀ = {MICRO}", *(f"{mean('tuned', lr, MICRO):.3f}" for lr in lrs for _ in FACTORS)]
    for method in METHODS:
        cells = []
        for lr in lrs:
            base = mean("tuned", lr, MICRO)
            for rho in FACTORS:
                loss = mean(method, lr, rho * MICRO)
                cells.append("" if loss is None or base is None else f"{loss - base:+.3f}")
        yield [method, *cells]

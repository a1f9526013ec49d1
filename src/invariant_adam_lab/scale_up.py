"""The user's question: tuned with AdamW at B₀ = M, then trained at 4 and 16 times that batch with nothing retuned.

Every run sees the same samples in the same order. The learning rate is the tuned one times what the method makes of it,
on a warm-up and half a cosine in samples. At B₀ all methods are AdamW.

| method | learning rate at ρB₀ | γ₁ | γ₂ | first updates |
|---|---|---|---|---|
| exponential | ρη | 1 − (1−γ)^ρ | the same | one mini-batch each |
| linear | ρη | ργ | the same | |
| long_momentum | ρη | 1 − (1−γ)^(ρ^p), p = 1/4 | as exponential | |
| …, grown in | | | | `BatchGrowth` |
| adam √, linear, unchanged | √ρ η, ρη, η | γ | γ | |

Three models are asked. `gpt`, a small GPT over characters, has a plain loop of its own here, which reads as a user's
does. `resnet-ln` and `gpt2` are runs of the lab with `tuned` set, so that a GPU makes them as fast as any other grid.
"""

from __future__ import annotations

import math
import tempfile
import time
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
from .grids import workers
from .grids.grid import Grid
from .grids.store import Setup
from .models import build
from .training import data as lab_data
from .training.runs import RECIPES, Run

FACTORS = (4, 16)  # B over B₀
BETAS = (0.9, 0.99)  # at B₀, of `gpt`; the others have their recipe's
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
# Of the lab's models: a GPU's time may end before the runs do, so what a user chooses between comes first.
FIRST = ("long_momentum, grown in", "exponential, grown in", "adam, √", "adam, unchanged", "adam, linear")
LATER = ("exponential", "long_momentum", "linear")
GROW = 0.1
MICRO, CONTEXT, HELD_OUT = 16, 32, 512  # of `gpt`: samples, characters, samples
NET = {"width": 32, "depth": 2, "heads": 2}


class Preset(NamedTuple):
    """How long a run is and which there are."""

    samples: int  # of an epoch
    epochs: int
    lrs: tuple[float, ...]  # at B₀
    seeds: tuple[int, ...]
    more: tuple[float, ...] = ()  # learning rates that are tried at B₀ alone, to show where the best one is
    micro: int = MICRO  # B₀ = M, samples
    methods: tuple[tuple[str, ...], ...] = (METHODS,)  # in groups: all runs of one are made before the next begins
    small: bool = False  # a small form of the lab's model, on made-up data


_RESNET = Preset(50_000, 2, (1e-4, 3e-5, 3e-4), (0,), (1e-5, 1e-3), 25, (FIRST, LATER))
_GPT2 = Preset(8_192, 1, (6e-4, 3e-4, 1.2e-3), (0,), (2.4e-3,), 8, (FIRST, LATER))
_SMOKE = Preset(80, 2, (1e-2,), (0,), (), 5, (FIRST, LATER), small=True)
PRESETS = {
    "gpt": {
        "smoke": Preset(1_024, 1, (1e-3,), (0,)),
        "short": Preset(8_192, 3, (3e-4, 1e-3, 3e-3, 1e-2), (0,), (1e-4, 3e-2)),
        "full": Preset(8_192, 3, (3e-4, 1e-3, 3e-3, 1e-2), (0, 1, 2), (1e-4, 3e-2)),
    },
    "resnet-ln": {"smoke": _SMOKE, "short": _RESNET, "full": _RESNET._replace(epochs=10, seeds=(0, 1, 2))},
    "gpt2": {"smoke": _SMOKE, "short": _GPT2, "full": _GPT2._replace(samples=32_768, seeds=(0, 1, 2))},
}


class Case(NamedTuple):
    """One run."""

    lr: float
    seed: int
    batch: int  # samples
    method: str  # of `METHODS`; "tuned" at B₀
    samples: int
    epochs: int


Tell = Callable[[str, Case, Any], None]  # ("done" | "skipped" | "error", case, what was measured or why)
Make = Callable[[list[Case], Tell], None]  # makes runs and tells of each


def choose(
    preset: Preset,
    *,
    samples: int | None = None,
    epochs: int | None = None,
    lrs: tuple[float, ...] | None = None,
    seeds: tuple[int, ...] | None = None,
    methods: tuple[str, ...] | None = None,
) -> Preset:
    """Return a preset with what the user chose instead; None: as the preset has it.

    Args:
        preset: of `PRESETS`.
        samples: of an epoch.
        epochs: passes over them.
        lrs: learning rates at B₀, for all methods.
        seeds: of weights and order.
        methods: as `word` writes them.
    """
    for name, values in (("--lrs", lrs), ("--seeds", seeds), ("--methods", methods)):
        if values == ():
            raise ValueError(f"{name} must name at least one, got none")
    for lr in lrs or ():
        if not 0 < lr < math.inf:
            raise ValueError(f"--lrs must be finite numbers above 0, got {lr}")
    for seed in seeds or ():
        if not 0 <= seed < 2**53:
            raise ValueError(f"--seeds must be from 0 to 2**53 - 1, got {seed}")
    block = max(FACTORS) * preset.micro
    if samples is not None and (samples < 1 or samples % block):
        near = max(1, round(samples / block)) * block
        raise ValueError(
            f"--samples must be a multiple of the largest batch, {block}, so that all batches see the same samples, "
            f"got {samples}; use {near}"
        )
    if epochs is not None and epochs < 1:
        raise ValueError(f"--epochs must be at least 1, got {epochs}")
    known = {word(method): method for group in preset.methods for method in group}
    for name in methods or ():
        if name not in known:
            raise ValueError(f"--methods must be some of {', '.join(known)}, got {name!r}")
    return preset._replace(
        samples=samples or preset.samples,
        epochs=epochs or preset.epochs,
        lrs=lrs or preset.lrs,
        more=preset.more if lrs is None else (),
        seeds=seeds or preset.seeds,
        methods=preset.methods if methods is None else (tuple(known[name] for name in methods),),
    )


def word(method: str) -> str:
    """Return a method as it is written on a command line.

    >>> word("long_momentum, grown in"), word("adam, √")
    ('long_momentum:grown-in', 'adam:sqrt')
    """
    return method.replace(", ", ":").replace(" ", "-").replace("√", "sqrt")


def cases(preset: Preset) -> list[Case]:
    """All runs of a preset, each once: for each learning rate B₀ and then all methods of a group at each batch size."""
    found: dict[Case, None] = {}
    length = (preset.samples, preset.epochs)
    for methods in preset.methods:
        for seed in preset.seeds:
            for lr in preset.lrs:
                found[Case(lr, seed, preset.micro, "tuned", *length)] = None
                for rho in FACTORS:
                    for method in methods:
                        if method == "linear" and rho * (1 - BETAS[0]) >= 1:
                            continue  # it forgets more than everything
                        found[Case(lr, seed, rho * preset.micro, method, *length)] = None
            for lr in preset.more:
                found[Case(lr, seed, preset.micro, "tuned", *length)] = None
    return list(found)


# ---------------------------------------------------------------- gpt: a loop as users write it


class Data(NamedTuple):
    """Stretches of a text, one character longer than the context."""

    train: Tensor
    test: Tensor
    vocabulary: int


def cut(text: lab_data.Text, samples: int, device: torch.device) -> Data:
    """Cut a text into samples."""

    def stretches(ids: Tensor, n: int) -> Tensor:
        return ids.long().unfold(0, CONTEXT + 1, CONTEXT)[:n].to(device)

    train = stretches(text.ids, samples)
    if len(train) < samples:
        raise ValueError(
            f"the text has {len(train)} samples of {CONTEXT} characters, and {samples} are needed; use a longer text"
        )
    return Data(train, stretches(text.test_ids, HELD_OUT), len(text.vocab))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    """Return the mean loss over the characters of samples."""
    return F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())


def train(case: Case, data: Data) -> float:
    """Train; return the loss on held-out text at the end."""
    torch.manual_seed(case.seed)
    model = build("gpt-char", **NET, context=CONTEXT, vocab=data.vocabulary).to(data.train.device)
    total = case.samples * case.epochs
    schedule = ia.warmup_cosine(total // (4 * case.epochs), total)
    RULES.update(POWERS)  # the library does not know them otherwise
    try:
        update = (_adam if case.method in ADAM else _invariant)(case, model, schedule)
        for epoch in range(case.epochs):
            order = torch.randperm(case.samples, generator=torch.Generator().manual_seed(1_000 * case.seed + epoch))
            for rows in order.to(data.train.device).split(case.batch):
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
    growth = ia.BatchGrowth(opt, GROW if grown else float("inf"))

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


def by_loop(text: lab_data.Text, preset: Preset, device: torch.device, deadline: float | None = None) -> Make:
    """Return what makes the runs of `gpt`, one after the other.

    Args:
        text: what is trained on.
        preset: of the runs.
        device: where.
        deadline: by `time.time`; no run begins later.
    """
    data = cut(text, preset.samples, device)

    def make(todo: list[Case], tell: Tell) -> None:
        for case in todo:
            if deadline is not None and time.time() > deadline:
                tell("skipped", case, "the budget is spent")
            else:
                tell("done", case, {"loss": _rounded(train(case, data))})

    return make


# ---------------------------------------------------------------- resnet-ln and gpt2: runs of the lab


def run_of(case: Case, model: str, preset: Preset) -> Run:
    """Return a case as a run of the lab.

    >>> run_of(Case(1e-4, 0, 100, "adam, √", 50_000, 2), "resnet-ln", PRESETS["resnet-ln"]["short"]).name
    'resnet-ln-standard-square_root-B100-lr0.0001-s0-tuned25'
    """
    name, _, grown = case.method.partition(", ")
    algorithm, rule = "invariant", name
    if case.method == "tuned" or case.method in ADAM:
        algorithm, rule = "standard", {0.5: "square_root", 1.0: "linear", 0.0: "none"}[ADAM.get(case.method, 0.0)]
    return Run(
        model,
        algorithm,
        rule,
        case.batch,
        preset.micro,
        max(FACTORS) * preset.micro,
        case.lr,
        case.seed,
        case.epochs,
        case.samples * (case.epochs if RECIPES[model].once else 1),  # one pass is cut into its epochs
        small=preset.small,
        grow=GROW if algorithm == "invariant" and grown else 0.0,
        tuned=preset.micro,
    )


def by_lab(model: str, preset: Preset, setup: Setup, say: lab_data.Tell = lambda text: None) -> Make:
    """Return what makes the runs of a model of the lab, as its grids are made.

    Args:
        model: a key of `RECIPES`.
        preset: of the runs.
        setup: how; its folder is a temporary one, because the rows are what is kept.
        say: is told where the dataset is looked for.
    """

    def make(todo: list[Case], tell: Tell) -> None:
        of = {run_of(case, model, preset): case for case in todo}
        if not of:
            return
        found = workers.prepare(Grid("scale-up", model, "", "", list(of)), setup, say)
        seconds = dict.fromkeys(of, 0.0)

        def told(kind: str, run: Run | None, what: Any) -> None:
            if run is None:
                raise RuntimeError(f"a worker failed: {what}")
            if kind == "epoch":
                seconds[run] += what["seconds"]
                return
            if kind == "done":
                names = {"loss": "test_loss", "accuracy": "test_accuracy", "train_loss": "end_train_loss"}
                what = {name: _rounded(what[key]) for name, key in names.items()} | {"seconds": round(seconds[run], 2)}
            tell(kind, of[run], what)

        with tempfile.TemporaryDirectory(prefix="scale-up-") as folder:
            workers.make(list(of), setup._replace(out=Path(folder)), told, found)

    return make


def _rounded(loss: float) -> float | None:
    return round(loss, 5) if math.isfinite(loss) else None  # JSON has no NaN


# ---------------------------------------------------------------- rows and their table


def measure(preset: Preset, rows: record.Rows, make: Make, tell: Tell) -> dict[str, Any]:
    """Make all runs that a file does not have yet, a row for each; return what it holds then.

    Args:
        preset: of the runs.
        rows: of the file.
        make: makes runs.
        tell: is told of each, found or made, with its row.
    """
    todo = []
    for case in cases(preset):
        if rows.has(case._asdict()):
            tell("done", case, next(row for row in rows.rows if case._asdict().items() <= row.items()))
        else:
            todo.append(case)

    def told(kind: str, case: Case, what: Any) -> None:
        tell(kind, case, rows.add(case._asdict(), what) if kind == "done" else what)

    make(todo, told)
    return rows.result()


def table(result: dict[str, Any]) -> Iterator[list[str]]:
    """The rows of a table: a mean over seeds of the loss at the end, at B₀ and, for each method, minus that.

    The columns are learning rates at B₀ and batch sizes. What lacks its run at B₀, a seed or a learning rate, is left
    out.
    """
    rows = result["rows"]
    tuned = {(row["lr"], row["seed"]): row["loss"] for row in rows if row["method"] == "tuned"}
    micro = min((row["batch"] for row in rows if row["method"] == "tuned"), default=0)
    larger = [row for row in rows if row["method"] != "tuned" and (row["lr"], row["seed"]) in tuned]
    lrs, batches = (sorted({row[key] for row in larger}) for key in ("lr", "batch"))

    def mean(losses: list[float | None], form: str) -> str:
        finite = [loss for loss in losses if loss is not None]
        if len(finite) < len(losses):
            return "diverged"
        return format(sum(finite) / len(finite), form) if finite else ""

    def gaps(method: str, lr: float, batch: int) -> Iterator[float | None]:
        for row in larger:
            if (row["method"], row["lr"], row["batch"]) == (method, lr, batch):
                base = tuned[lr, row["seed"]]
                yield None if base is None or row["loss"] is None else row["loss"] - base

    yield ["", *(f"{lr:g}, B = {batch}" for lr in lrs for batch in batches)]
    bases = [mean([loss for (rate, _), loss in tuned.items() if rate == lr], ".3f") for lr in lrs]
    yield [f"AdamW, B₀ = {micro}", *(base for base in bases for _ in batches)]
    for method in METHODS:
        if any(row["method"] == method for row in larger):
            yield [method, *(mean(list(gaps(method, lr, batch)), "+.3f") for lr in lrs for batch in batches)]

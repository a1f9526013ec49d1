"""Grids of runs: which runs, in which order, on which machine.

| grid | question | what is compared |
|---|---|---|
| curves | does the trajectory depend on the batch size? (the paper's figures) | invariant and standard Adam |
| rivals | what else is tried against it? | standard Adam with η ∝ B, AdamA's accumulation, a constant half-life of v |
| tuned | (a) is it as good at the best learning rate? | the same at finer learning rates, for M, 4M and 16M |
| rules | (b) linear or exponential? | both rules |
| micro | (c) what does M do? | M, 4M and 16M at two batch sizes |
| ramp | (d) is a batch that grows in mid-run the same run? | a ramp beside both its batch sizes |
| norm | (e) how much of the spread is batch norm's? | standard Adam with batch norm over B and over M samples |

Presets: "paper" is the paper's grid, "short" 10 epochs of fewer settings, "tiny" small models on a part of the data,
"smoke" small models on made-up data.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

from ..training.runs import ALGORITHMS, RECIPES, RULES, Run, check

PRESETS = ("paper", "short", "tiny", "smoke")
PAIR = (("invariant", "linear"), ("standard", "square_root"))
GRIDS: dict[str, tuple[tuple[str, str], ...]] = {
    "curves": PAIR,
    "rivals": (*PAIR, ("standard", "linear"), ("adama", "square_root"), ("halflife", "none")),
    "tuned": PAIR,
    "rules": (("invariant", "linear"), ("invariant", "exponential")),
    "micro": PAIR,
    "ramp": PAIR,
    "norm": (*PAIR, ("accumulate", "square_root")),
}
MADE_UP_IMAGES = 120
TINY_UPDATES = 8  # of the largest batch size, in an epoch of the preset "tiny"


class Choice(NamedTuple):
    """What the user may choose of a grid; None: as the preset has it."""

    epochs: int | None = None
    samples: int | None = None
    lrs: tuple[float, ...] | None = None
    batch_sizes: tuple[int, ...] | None = None
    seeds: tuple[int, ...] | None = None
    algorithms: tuple[tuple[str, str], ...] | None = None
    micro_batch_size: int | None = None
    max_batch_size: int | None = None
    warmup_samples: tuple[int, ...] = (0,)
    grow: tuple[float, ...] | None = None
    orders: tuple[int, ...] = (0,)  # of micro-batches; those above 0 are of runs at B = M, for the order floor


class Grid(NamedTuple):
    """The runs of a grid, the sharpest comparisons first."""

    name: str
    model: str
    grid: str
    preset: str
    runs: list[Run]

    @property
    def small(self) -> bool:
        """Whether its models are small."""
        return self.preset in ("tiny", "smoke")

    @property
    def made_up(self) -> bool:
        """Whether its data are made up."""
        return self.preset == "smoke"


def plan(model: str, preset: str, grid: str = "curves", choice: Choice | None = None) -> Grid:
    """Return the runs of a grid.

    >>> found = plan("vit", "short")
    >>> len(found.runs), found.runs[0].name
    (18, 'vit-invariant-linear-B400-lr0.0001-s0')
    """
    for what, value, names in (("model", model, RECIPES), ("preset", preset, PRESETS), ("grid", grid, GRIDS)):
        if value not in names:
            raise ValueError(f"{what} must be one of {', '.join(names)}, got {value!r}")
    choice = choice or Choice()
    for what, value in choice._asdict().items():
        if value == ():
            raise ValueError(f"{what} must name at least one, got none")
    recipe, small = RECIPES[model], preset == "smoke"  # the batches of made-up data are small too
    M = choice.micro_batch_size or (5 if small else recipe.micro_batch_size)
    sizes = recipe.batch_sizes if preset == "paper" else (5, 10, 20) if small else recipe.batch_sizes[::2]
    if recipe.once and not small:
        sizes = recipe.batch_sizes
    if preset in ("short", "tiny") and sizes[-1] != recipe.batch_sizes[-1]:
        sizes = (*sizes, recipe.batch_sizes[-1])
    sizes = tuple(sorted(set(choice.batch_sizes or sizes)))
    largest = choice.max_batch_size or (20 if small else recipe.batch_sizes[-1])
    lrs = {
        "paper": (1e-6, 1e-5, 1e-4, 1e-3),
        "short": (1e-5, 1e-4, 1e-3),
        "tiny": (3e-4, 1e-3, 3e-3, 1e-2),
        "smoke": (1e-3, 1e-2),
    }[preset]
    if recipe.lrs and preset in ("paper", "short"):
        lrs = recipe.lrs
    if grid == "tuned" and not small:
        lrs = tuple(float(f"{a}e{b}") for b in (-5, -4, -3) for a in (1, 3))
    lrs = choice.lrs or lrs
    seeds = choice.seeds or (tuple(range(3)) if preset == "paper" else (0,))
    epochs = choice.epochs or {"paper": 10 if recipe.once else 200, "short": 10, "tiny": 6, "smoke": 2}[preset]
    least = largest * (epochs if recipe.once else 1)
    common: dict[str, Any] = {
        "max_batch_size": largest,
        "epochs": epochs,
        "samples": choice.samples or (TINY_UPDATES * least if preset == "tiny" else 0),
        "small": preset in ("tiny", "smoke"),
    }
    if choice.samples and choice.samples < least:
        parts = f", in each of epochs={epochs}" * recipe.once
        raise ValueError(
            f"samples must be at least max_batch_size={largest}, the samples of an update at the largest batch size"
            f"{parts}, got {choice.samples}"
        )
    runs: dict[Run, None] = {}
    for warmup, asked, order in itertools.product(choice.warmup_samples, choice.grow or (None,), choice.orders):
        for algorithm, rule in choice.algorithms or GRIDS[grid]:
            grow = asked if asked is not None else recipe.grow if algorithm == "invariant" else 0.0
            for micro in _micro_batch_sizes(grid, algorithm, M, largest):
                floor = [(micro, "")] if order else []
                for batch, ramp in floor or _batch_sizes(grid, algorithm, sizes, micro, micro == M):
                    for lr, seed in itertools.product(lrs, seeds):
                        run = Run(
                            model, algorithm, rule, batch, micro, lr0=lr, seed=seed, warmup_samples=warmup,
                            ramp=ramp, grow=grow, order=order, **common,
                        )  # fmt: skip
                        if run.batch_sizes == (micro,):
                            run = check(run)._replace(grow=0.0)  # one micro-batch is not cut: it is the same run
                        runs[check(run)] = None
    name = f"{model}-{grid}-{preset}"
    for letter, number in (("e", choice.epochs), ("n", choice.samples)):
        name += f"-{letter}{number}" if number else ""
    return Grid(name, model, grid, preset, sorted(runs, key=_sharpness))


def read_algorithms(text: str, grid: str) -> tuple[tuple[str, str], ...]:
    """Read algorithms with commas between them, each with its rule after a colon; else the grid's rule, else its first.

    >>> read_algorithms("invariant,standard:linear", "curves")
    (('invariant', 'linear'), ('standard', 'linear'))
    """
    found = []
    for word in text.replace(",", " ").split():
        name, _, rule = word.partition(":")
        if name not in RULES:
            raise ValueError(f"algorithms must be some of {', '.join(RULES)}, got {name!r}")
        found.append((name, rule or dict(reversed(GRIDS[grid])).get(name, RULES[name][0])))
    return tuple(found)


def _micro_batch_sizes(grid: str, algorithm: str, M: int, largest: int) -> list[int]:
    if grid in ("tuned", "micro") and algorithm == "invariant":
        return [M * k for k in (1, 4, 16) if largest % (M * k) == 0]
    return [M]


def _batch_sizes(grid: str, algorithm: str, sizes: tuple[int, ...], micro: int, all_of: bool) -> list[tuple[int, str]]:
    """Return the batch sizes of an algorithm in a grid, each with its ramp: all, or those that are multiples of M."""
    if algorithm == "micro":
        return [(micro, "")]
    fitting = [size for size in sizes if all_of or size % micro == 0]
    if grid == "micro":
        fitting = [size for size in fitting if size in (sizes[-1], sizes[len(sizes) // 2])]
    if grid == "ramp":
        first, last = fitting[0], fitting[-1]
        if first == last:
            raise ValueError(f"batch_sizes must be two or more for a ramp, got {first}")
        return [(first, ""), (last, ""), (first, f"{first}-{last}")]
    return [(size, "") for size in fitting]


def _sharpness(run: Run) -> tuple[Any, ...]:
    """Return a run's place in its grid: seeds one by one; η₀ near 1e-4 first; then the batch sizes farthest apart."""
    far = -abs(math.log(run.batch_size / math.sqrt(run.max_batch_size * run.micro_batch_size)))
    far = min(far, -math.log(2)) if run.ramp else far
    return (
        run.seed,
        abs(round(math.log10(run.lr0) + 4, 3)),
        run.lr0,
        run.warmup_samples,
        run.order,
        round(far, 6),
        -run.batch_size,
        ALGORITHMS.index(run.algorithm),
        run.rule,
        run.micro_batch_size,
        run.grow,
    )


def work(run: Run) -> float:
    """Return the backward passes of an epoch, which its time grows with: the unit of progress and of shards."""
    samples = epoch_samples(run)
    each = (
        run.micro_batch_size
        if run.algorithm == "accumulate"
        else math.prod(run.batch_sizes) ** (1 / len(run.batch_sizes))
    )
    return samples / each + samples / 200  # the second: what a sample costs at any batch size


def epoch_samples(run: Run) -> int:
    """The samples of an epoch, about."""
    whole = run.samples or training_set(run.model, run.small)
    return whole // run.epochs if RECIPES[run.model].once else whole


def training_set(model: str, small: bool = False) -> int:
    """The samples of a model's training set, about; the data need not be there."""
    if RECIPES[model].dataset == "text":
        return 160 if small else 100_000  # 100 million tokens
    images = RECIPES[model].dataset == "cifar10"
    return (MADE_UP_IMAGES if images else 40) if small else 50_000 if images else 3_900


def shard(runs: list[Run], part: int, parts: int) -> list[Run]:
    """Return the runs of one of several machines, about equal in work, in their order.

    Args:
        runs: all.
        part: from 1.
        parts: machines.
    """
    if not 1 <= part <= parts:
        raise ValueError(f"--shard must be I/N with I from 1 to N, got {part}/{parts}")
    loads = [0.0] * parts
    mine = set()
    for run in sorted(runs, key=lambda run: -work(run) * run.epochs):
        least = loads.index(min(loads))
        loads[least] += work(run) * run.epochs
        if least == part - 1:
            mine.add(run)
    return [run for run in runs if run in mine]

"""What a run is: a model, an algorithm, a batch size, a learning rate, a seed; and which of them are valid.

| algorithm | an update of B = κM samples |
|---|---|
| invariant | `InvariantAdam`: v gets mean_k g_k² |
| standard | `torch.optim.Adam` on the whole mini-batch: v gets (mean_k g_k)² |
| accumulate | the same by accumulated gradients: equal, except that batch norm sees M samples instead of B |
| micro | `torch.optim.Adam` on each micro-batch: B = M |
| adama | AdamA's accumulation: v gets Σ_k (g_k/κ)² |
| halflife | standard Adam at the same learning rate for all B, with the half-life of v kept constant in samples |

With ρ = B/B_max, η₀ and the betas (0.9, 0.999) hold at B_max, as in the paper: γ′ = ργ, and η = ρη₀ (rule "linear") or
√ρη₀ ("square_root"). The learning rate is constant, after a linear warm-up in samples if one is asked for; there is no
weight decay. GPT-2, which the paper lacks, is trained as language models are: one pass over a text, warm-up and cosine
in samples, weight decay and betas (0.9, 0.95). A run may be grown in, by the rule of `invariant_adam.BatchGrowth`: its
first mini-batches are cut into updates that grow with what was seen.

A run with `tuned` asks a user's question instead (`scale_up`): η₀ and the betas hold at that batch size B₀, and
ρ = B/B₀. Standard Adam keeps its betas then, as users leave them, and η is √ρη₀, ρη₀ or η₀ ("none"). Every model is
trained on a warm-up and a cosine in samples.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from invariant_adam.growth import grown_kappa
from invariant_adam.scaling import INVARIANT

BETAS = (0.9, 0.999)  # at B_max
RULES = {
    "invariant": ("linear", "exponential"),
    "standard": ("square_root", "linear", "exponential"),
    "accumulate": ("square_root", "linear", "exponential"),
    "micro": ("linear", "exponential"),
    "adama": ("square_root", "linear"),
    "halflife": ("none",),
}
ALGORITHMS = tuple(RULES)
TUNED_RULES = {"invariant": INVARIANT, "standard": ("square_root", "linear", "none")}  # of runs with `tuned`


class Recipe(NamedTuple):
    """How a model is trained in the paper; GPT, which the paper lacks, is trained likewise."""

    model: str  # in `models`
    options: dict[str, Any]
    small: dict[str, Any]  # options of a version that trains on a CPU in seconds
    dataset: str
    batch_sizes: tuple[int, ...]
    micro_batch_size: int
    flip: bool = True
    auto: bool = False
    smoothing: float = 0.0
    betas: tuple[float, float] = BETAS
    weight_decay: float = 0.0  # of matrices
    once: bool = False  # an epoch is a part of one pass over the data, on a warm-up and a cosine in samples
    lrs: tuple[float, ...] = ()  # of full-size models, at B_max; none: those of the paper
    grow: float = 0.0  # of invariant Adam, where nothing else is asked for
    vocabulary: int = 0  # tokens of a text; 0: its characters
    most: int = 0  # samples of a backward, which memory limits; 0: any


_CIFAR_SIZES = (25, 50, 100, 200, 400, 800)
RECIPES = {
    "resnet-bn": Recipe("resnet18", {}, {"width": 8, "depths": (1, 1)}, "cifar10", _CIFAR_SIZES, 25),
    "resnet-ln": Recipe("resnet18", {"norm": "layer"}, {"width": 8, "depths": (1, 1)}, "cifar10", _CIFAR_SIZES, 25),
    "vit": Recipe(
        "vit-cifar",
        {},
        {"width": 32, "depth": 2, "heads": 2, "hidden": 32},
        "cifar10",
        _CIFAR_SIZES[:-1],
        25,
        flip=False,
        auto=True,
        smoothing=0.1,
    ),
    "gpt": Recipe(
        "gpt-char",
        {},
        {"width": 32, "depth": 2, "heads": 2, "context": 32},
        "tinyshakespeare",
        (8, 16, 32, 64, 128, 256),
        8,
    ),
    "gpt2": Recipe(
        "gpt2-124m",
        {"context": 1024, "tied": True},
        {"width": 32, "depth": 2, "heads": 2, "context": 32},
        "text",
        (8, 32, 128, 256),
        8,
        betas=(0.9, 0.95),
        weight_decay=0.1,
        once=True,
        lrs=(3e-4, 6e-4, 1.2e-3),
        grow=0.1,
        vocabulary=32_768,
        most=32,
    ),
}
SMALL_VOCABULARY = 512  # tokens, for small models
WARMUP = 0.05  # of one pass
COSINE_FLOOR = 0.1  # the last learning rate of one pass over the highest


class Run(NamedTuple):
    """The settings of a run; two runs with equal settings give equal curves, up to rounding."""

    model: str
    algorithm: str
    rule: str
    batch_size: int
    micro_batch_size: int
    max_batch_size: int
    lr0: float
    seed: int
    epochs: int
    samples: int = 0  # used of the training set; 0: all
    warmup_samples: int = 0
    ramp: str = ""  # "25-800": the first batch size for the first half of the epochs, the second for the rest
    small: bool = False
    grow: float = 0.0  # an update is at most this part of what was seen before it; 0: mini-batches are not cut
    order: int = 0  # of the micro-batches inside each block of B_max samples: a seed; 0: as they come
    tuned: int = 0  # B₀, the samples at which lr0 and the betas hold; 0: B_max

    @property
    def anchor(self) -> int:
        """The batch size at which `lr0` and the betas hold."""
        return self.tuned or self.max_batch_size

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """The batch sizes of the run, in their order: one, or two with a ramp."""
        return tuple(map(int, self.ramp.split("-"))) if self.ramp else (self.batch_size,)

    def batch_at(self, epoch: int) -> int:
        """Return the batch size in an epoch, from 0."""
        return self.batch_sizes[0] if 2 * epoch < self.epochs else self.batch_sizes[-1]

    @property
    def name(self) -> str:
        """The run's name in files and on the screen."""
        size = self.ramp or self.batch_size
        extra = f"-w{self.warmup_samples}" * bool(self.warmup_samples)
        extra += f"-g{self.grow:g}" * bool(self.grow) + f"-o{self.order}" * bool(self.order)
        extra += f"-tuned{self.tuned}" * bool(self.tuned)
        extra += f"-M{self.micro_batch_size}" * (self.micro_batch_size != RECIPES[self.model].micro_batch_size)
        return f"{self.model}-{self.algorithm}-{self.rule}-B{size}-lr{self.lr0:g}-s{self.seed}{extra}"

    def update_sizes(self, epoch: int, take: int) -> list[int]:
        """Return the samples of each update of an epoch, from 0, that has `take` samples.

        No update crosses the end of a mini-batch.

        >>> Run("vit", "invariant", "linear", 100, 25, 400, 1e-4, 0, 10, grow=0.5).update_sizes(0, 400)
        [25, 25, 25, 25, 50, 50, 100, 100]
        """
        batch, M = self.batch_at(epoch), self.micro_batch_size
        if not self.grow:
            return [batch] * (take // batch)
        found, done = [], 0
        while done < take:
            left = (batch - done % batch) // M
            found.append(grown_kappa(left, (epoch * take + done) / M, self.grow) * M)
            done += found[-1]
        return found


def check(run: Run) -> Run:
    """Return the run, or refuse it by name.

    >>> check(Run("vit", "invariant", "linear", 100, 25, 400, 1e-4, 0, 10)).name
    'vit-invariant-linear-B100-lr0.0001-s0'
    """
    if run.model not in RECIPES:
        raise ValueError(f"model must be one of {', '.join(RECIPES)}, got {run.model!r}")
    rules = TUNED_RULES if run.tuned else RULES
    if run.algorithm not in rules:
        raise ValueError(f"algorithm must be one of {', '.join(rules)}, got {run.algorithm!r}")
    if run.rule not in rules[run.algorithm]:
        raise ValueError(f"rule of {run.algorithm} must be one of {', '.join(rules[run.algorithm])}, got {run.rule!r}")
    if run.ramp and not all(size.isdecimal() for size in run.ramp.split("-")):
        raise ValueError(f"ramp must be two batch sizes such as 25-800, got {run.ramp!r}")
    if run.ramp and (len(run.batch_sizes) != 2 or run.batch_size != run.batch_sizes[0]):
        raise ValueError(f"ramp must be two batch sizes, the first of them {run.batch_size}, got {run.ramp!r}")
    for size in run.batch_sizes:
        if size < 1 or run.max_batch_size % size:
            raise ValueError(
                f"batch size {size} must divide max_batch_size={run.max_batch_size}, so that all batch sizes see the "
                "same samples in an epoch"
            )
        if run.micro_batch_size < 1 or size % run.micro_batch_size:
            raise ValueError(f"batch size {size} must be a multiple of micro_batch_size={run.micro_batch_size}")
        if run.algorithm == "micro" and size != run.micro_batch_size:
            raise ValueError(f"micro Adam's batch is its micro-batch of {run.micro_batch_size}, got {size}")
    if run.order and run.batch_sizes != (run.micro_batch_size,):
        raise ValueError(
            f"order must be 0 for batch size {run.ramp or run.batch_size}, got {run.order}: the order floor is of one "
            f"micro-batch of {run.micro_batch_size} per update"
        )
    if not 0 <= run.grow < math.inf:
        raise ValueError(f"grow must be a finite number, 0 or above, got {run.grow}; 0.1 is usual")
    if not 0 < run.lr0 < math.inf:
        raise ValueError(f"lr0 must be a finite number above 0, got {run.lr0}")
    for name in ("epochs", "samples", "warmup_samples", "seed", "order", "tuned"):
        least = 1 if name == "epochs" else 0
        if not getattr(run, name) >= least:
            raise ValueError(f"{name} must be at least {least}, got {getattr(run, name)}")
    if run.seed >= 2**53:
        raise ValueError(f"seed must be below 2**53, as results.csv holds no larger number exactly, got {run.seed}")
    return run

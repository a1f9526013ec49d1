"""Same samples, same trajectory: a small CNN trained at several batch sizes with two optimizers.

Invariant Adam (learning rate ∝ B) beside standard Adam (learning rate ∝ √B, or ∝ B if asked), from the same weights, on
the same samples in the same order. Both are tuned at the smallest batch size, which is also the micro-batch. There an
update is one micro-batch: the two optimizers are the same algorithm and share one curve. Only a larger batch tells them
apart. Invariant Adam grows in (`BatchGrowth`): its first mini-batches are cut into smaller updates.

The order floor is a yardstick beside them: how far runs at B = M lie apart when only the order of the micro-batches
inside each block of B_max samples changes.

The images are the 1,797 handwritten digits (8×8) of the test part of "Optical Recognition of Handwritten Digits" by
E. Alpaydin and C. Kaynak, UCI Machine Learning Repository, doi 10.24432/C50P49, CC BY 4.0.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from invariant_adam import BatchGrowth, InvariantAdam, one_pass
from invariant_adam.scaling import Hyperparameters, scale

from . import record
from .results import measures

OPTIMIZERS = ("standard", "invariant")
TRAIN = 1536  # images; the other 261 are held out
BETAS_AT_LARGEST = (0.9, 0.999)  # as in the paper: γ ∝ B, with the usual betas at the largest batch size
DIVERGED = 1e3  # a training loss far above that of guessing, log 10: the run diverged
ORDERS = (0, 1, 2)  # of the micro-batches inside a block, for the order floor; 0: as they come
STANDARD_RULES = ("square_root", "linear")  # how users of standard Adam scale its learning rate


class Settings(NamedTuple):
    """What is trained; two demos with equal settings give equal curves."""

    batch_sizes: tuple[int, ...] = (8, 16, 32, 64, 128)
    lr: float = 2e-4  # per update at the smallest batch size
    epochs: int = 20
    seed: int = 0
    standard_rule: str = "square_root"
    grow: bool = True  # whether invariant Adam grows in

    @property
    def micro_batch(self) -> int:
        """Samples whose gradient is squared: the smallest batch."""
        return self.batch_sizes[0]

    @property
    def samples_per_epoch(self) -> int:
        """The most samples that every batch size divides, so that all runs see the same ones."""
        together = math.lcm(*self.batch_sizes)
        return TRAIN // together * together

    @property
    def tuned(self) -> Hyperparameters:
        """The hyperparameters at the smallest batch size, where both optimizers are tuned."""
        largest = self.batch_sizes[-1]
        betas = scale(0.0, BETAS_AT_LARGEST, from_batch=largest, to_batch=self.micro_batch, rule="linear").betas
        return Hyperparameters(self.lr, betas, 0.0)

    @property
    def rules(self) -> dict[str, str]:
        """How each optimizer scales its hyperparameters with the batch size."""
        return {"standard": self.standard_rule, "invariant": "exponential"}

    def at(self, optimizer: str, batch: int) -> Hyperparameters:
        """Return the hyperparameters that one update of `batch` samples uses."""
        return scale(*self.tuned, from_batch=self.micro_batch, to_batch=batch, rule=self.rules[optimizer])


class DemoRun(NamedTuple):
    """One training run: what it reached after each epoch."""

    optimizer: str
    batch_size: int
    losses: list[float]  # mean cross-entropy over the whole training set, after each epoch
    accuracy: float  # on the held-out images, after the last epoch
    seconds: float
    order: int = 0  # one of ORDERS


class DivergedError(RuntimeError):
    """The loss of a run can no longer be compared."""


def check(settings: Settings) -> Settings:
    """Return the settings in order, or refuse them by name.

    >>> check(Settings(batch_sizes=(64, 16))).batch_sizes
    (16, 64)
    """
    sizes = tuple(sorted(set(settings.batch_sizes)))
    given = ",".join(map(str, settings.batch_sizes))
    if len(sizes) < 2 or sizes[0] < 1:
        raise ValueError(f"--batch-sizes must be two or more different sizes of at least 1, got {given!r}")
    for size in sizes[1:]:
        if size % sizes[0]:
            raise ValueError(
                f"--batch-sizes must be multiples of the smallest, which is the micro-batch: {size} is no multiple "
                f"of {sizes[0]}; use {size // sizes[0] * sizes[0]} or {(size // sizes[0] + 1) * sizes[0]}"
            )
    if math.lcm(*sizes) > TRAIN:
        raise ValueError(
            f"--batch-sizes {given} only come together after {math.lcm(*sizes)} samples, but an epoch has {TRAIN}; "
            "use smaller sizes, or sizes that are multiples of each other"
        )
    if not 0 < settings.lr < math.inf:
        raise ValueError(f"--lr must be a finite number above 0, got {settings.lr}")
    if settings.epochs < 1:
        raise ValueError(f"--epochs must be at least 1, got {settings.epochs}")
    if settings.standard_rule not in STANDARD_RULES:
        raise ValueError(f"--standard-rule must be one of {', '.join(STANDARD_RULES)}, got {settings.standard_rule!r}")
    if not 0 <= settings.seed < 2**31:
        raise ValueError(f"--seed must be at least 0 and below 2**31, got {settings.seed}")
    return settings._replace(batch_sizes=sizes)


class Digits(NamedTuple):
    """The images, split once and for all: the split does not depend on the seed."""

    x: Tensor  # (TRAIN, 1, 8, 8), in [0, 1]
    y: Tensor  # (TRAIN,)
    held_out_x: Tensor
    held_out_y: Tensor


def load_digits() -> Digits:
    """Return the handwritten digits that ship with the package.

    >>> digits = load_digits()
    >>> digits.x.shape, len(digits.held_out_y)
    (torch.Size([1536, 1, 8, 8]), 261)
    """
    with np.load(Path(__file__).with_name("digits.npz")) as arrays:
        x = torch.from_numpy(arrays["images"]).to(torch.float32)[:, None] / 16
        y = torch.from_numpy(arrays["labels"]).to(torch.int64)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(1234))
    train, held_out = order[:TRAIN], order[TRAIN:]
    return Digits(x[train], y[train], x[held_out], y[held_out])


def build_model(seed: int) -> nn.Module:
    """Return the CNN with the weights that `seed` gives it: 9,930 parameters."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.GELU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.GELU(),
            nn.Flatten(),
            nn.Linear(32 * 4 * 4, 10),
        )


def train(
    settings: Settings,
    optimizer: str,
    batch: int,
    data: Digits,
    on_epoch: Callable[[], None] = lambda: None,
    order: int = 0,
) -> DemoRun:
    """Train one model at one batch size; `on_epoch` is called after each epoch."""
    began = time.perf_counter()
    model = build_model(settings.seed)
    update = (_invariant if optimizer == "invariant" else _standard)(settings, model, batch, data)
    losses = []
    for epoch in range(settings.epochs):
        for rows in samples(settings, epoch, order).split(batch):
            update(rows)
        with torch.no_grad():
            losses.append(F.cross_entropy(model(data.x), data.y).item())
        if not 0 < losses[-1] < DIVERGED:  # its logarithm is what the spread is made of
            raise DivergedError(
                f"{optimizer} Adam at batch size {batch} reached a training loss of {losses[-1]} in epoch {epoch + 1}: "
                f"--lr {settings.lr:g} is too large; use a smaller one"
            )
        on_epoch()
    with torch.no_grad():
        accuracy = (model(data.held_out_x).argmax(1) == data.held_out_y).double().mean().item()
    return DemoRun(optimizer, batch, losses, accuracy, time.perf_counter() - began, order)


def _standard(settings: Settings, model: nn.Module, batch: int, data: Digits) -> Callable[[Tensor], None]:
    h = settings.at("standard", batch)
    opt = torch.optim.AdamW(model.parameters(), h.lr, h.betas, weight_decay=0.0)

    def update(rows: Tensor) -> None:
        F.cross_entropy(model(data.x[rows]), data.y[rows]).backward()
        opt.step()
        opt.zero_grad()

    return update


def _invariant(settings: Settings, model: nn.Module, batch: int, data: Digits) -> Callable[[Tensor], None]:
    """It is told once where it was tuned: the batch size is nowhere in here."""
    M, h = settings.micro_batch, settings.tuned
    opt = InvariantAdam(
        model.parameters(), h.lr, h.betas, micro_batch_size=M, tuned_batch_size=M, rule=settings.rules["invariant"]
    )
    growth = BatchGrowth(opt, 0.1 if settings.grow else math.inf)

    def update(rows: Tensor) -> None:
        for part in growth.split(rows):
            with one_pass(model, M, into=opt) if len(part) > M else nullcontext():  # one micro-batch needs no help
                F.cross_entropy(model(data.x[part]), data.y[part]).backward()
            opt.step()

    return update


def samples(settings: Settings, epoch: int, order: int = 0) -> Tensor:
    """Return the samples of an epoch; another order changes only where micro-batches stand in their block of B_max.

    >>> s = Settings(batch_sizes=(8, 32))
    >>> usual, other = samples(s, 0), samples(s, 0, order=1)
    >>> torch.equal(usual, other), torch.equal(usual[:32].sort().values, other[:32].sort().values)
    (False, True)
    """
    generator = torch.Generator().manual_seed(1_000_003 * settings.seed + epoch)
    found = torch.randperm(TRAIN, generator=generator)[: settings.samples_per_epoch]
    if not order:
        return found
    blocks = found.view(-1, settings.batch_sizes[-1] // settings.micro_batch, settings.micro_batch)
    generator.manual_seed((1_000_003 * settings.seed + epoch) * 101 + order)
    return torch.cat([block[torch.randperm(len(block), generator=generator)] for block in blocks]).flatten()


class Progress(Protocol):
    """What `demo` reports while it works; the command line draws it."""

    def begin(self, work: int) -> None:
        """Note that `work` backward passes lie ahead."""

    def advance(self, optimizer: str, batch: int, work: int) -> None:
        """Note that `work` of them are done, in this run."""

    def finish(self, run: DemoRun, kept: bool) -> None:
        """Note that a run is complete: trained now, or kept from an earlier start."""


def demo(settings: Settings, out: Path, progress: Progress) -> dict[str, Any]:
    """Train every batch size with both optimizers and return the result; finished runs are kept under `out`."""
    settings = check(settings)
    jobs = all_jobs(settings)
    runs = {job: _load(settings, job, out) for job in jobs}

    def work(optimizer: str, batch: int, order: int) -> int:  # about the milliseconds of an epoch
        updates = settings.samples_per_epoch // batch
        return updates * (4 + batch // settings.micro_batch if optimizer == "invariant" else 4)

    progress.begin(sum(work(*job) * settings.epochs for job in jobs if runs[job] is None))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # layers this small are faster on one thread
    try:
        data = load_digits()
        for job in jobs:
            run, kept = runs[job], True
            if run is None:
                optimizer, batch, order = job

                def on_epoch(optimizer: str = optimizer, batch: int = batch, step: int = work(*job)) -> None:
                    progress.advance(optimizer, batch, step)

                run, kept = train(settings, optimizer, batch, data, on_epoch, order), False
                record.write_json(_path(settings, job, out), run._asdict())
                runs[job] = run
            progress.finish(run, kept)
    finally:
        torch.set_num_threads(threads)
    return summarise(settings, [run for run in runs.values() if run is not None])


Job = tuple[str, int, int]  # optimizer, batch size, order


def all_jobs(settings: Settings) -> list[Job]:
    """Return the runs of a demo: every batch size by both optimizers, then B = M in other orders.

    >>> len(all_jobs(Settings()))
    12
    """
    jobs = [(optimizer, batch, 0) for optimizer in OPTIMIZERS for batch in settings.batch_sizes]
    return jobs + [("standard", settings.micro_batch, order) for order in ORDERS if order]


def spread(runs: Sequence[DemoRun]) -> float:
    """Return the mean over epochs of (max − min over batch sizes) of the log training loss.

    >>> runs = [DemoRun("invariant", b, losses, 1.0, 0.0) for b, losses in ((8, [1.0, 1.0]), (16, [math.e, 1.0]))]
    >>> spread(runs)
    0.5
    """
    return measures.spread([run.losses for run in runs])


def summarise(settings: Settings, runs: Sequence[DemoRun]) -> dict[str, Any]:
    """Return settings, spreads and curves as JSON holds them; the runs of other orders stand apart."""
    at_m = [run for run in runs if (run.optimizer, run.batch_size) == ("standard", settings.micro_batch)]
    reordered, runs = [run for run in runs if run.order], [run for run in runs if not run.order]
    spreads = {name: spread([run for run in runs if run.optimizer == name]) for name in OPTIMIZERS}
    return {
        "command": "demo",
        "settings": {
            **settings._asdict(),
            "micro_batch_size": settings.micro_batch,
            "tuned_at": settings.micro_batch,
            "tuned_betas": settings.tuned.betas,
            "samples_per_epoch": settings.samples_per_epoch,
            "rules": settings.rules,
        },
        "spread": spreads,
        "ratio": spreads["standard"] / spreads["invariant"] if spreads["invariant"] else None,
        "order_floor": spread(at_m),
        "runs": [
            {**run._asdict(), "hyperparameters": settings.at(run.optimizer, run.batch_size)._asdict()} for run in runs
        ],
        "reordered": [run._asdict() for run in reordered],
        "seconds": sum(run.seconds for run in (*runs, *reordered)),
        "provenance": record.provenance(),
    }


def _path(settings: Settings, job: Job, out: Path) -> Path:
    """Return the file of a run, whose name holds a hash of all that the run depends on."""
    optimizer, batch, order = job
    depends = {
        "optimizer": optimizer,
        "batch": batch,
        "order": order and (order, settings.batch_sizes[-1]),
        "grow": settings.grow and optimizer == "invariant",
        "tuned": settings.tuned,
        "micro_batch": settings.micro_batch,
        "samples_per_epoch": settings.samples_per_epoch,
        "epochs": settings.epochs,
        "seed": settings.seed,
        "rule": settings.rules[optimizer],
        "code": record.source_digest(),
        "torch": str(torch.__version__),
    }
    key = hashlib.sha256(json.dumps(depends, sort_keys=True).encode()).hexdigest()[:12]
    return out / "runs" / f"{optimizer}-{batch}-{key}.json"


def _load(settings: Settings, job: Job, out: Path) -> DemoRun | None:
    saved = record.read_json(_path(settings, job, out))
    try:
        run = DemoRun(**saved)
        whole = (run.optimizer, run.batch_size, run.order, len(run.losses)) == (*job, settings.epochs)
    except TypeError:  # no file, or not one of ours
        return None
    return run if whole else None

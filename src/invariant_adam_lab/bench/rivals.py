"""Optimizers for batches that do not fit: ours beside AdamW with accumulation, optimi's optimizer accumulation, AdamA.

| | |
|---|---|
| spread | over batch sizes, of the demo's CNN on digits: mean over epochs of max − min of the log training loss |
| loss | the lowest and the highest training loss at the end, over batch sizes |
| ms | a whole update of κ micro-batches of a wider net, the median |
| tensors | weights, state and gradients when the last backward is done, over the weights |

All have the same hyperparameters at B = M, where all are Adam. At larger batches AdamW has η ∝ √B and γ ∝ B; AdamA has
η ∝ √B and betas as they are, as published; optimi, whose betas are those of a micro-batch, has η ∝ √B or η ∝ B; ours
scales by itself and grows in.
(`peers` is about something else: who makes the squares of micro-batches fastest.)
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from invariant_adam import BatchGrowth, InvariantAdam, one_pass
from invariant_adam.scaling import Hyperparameters, scale

from ..demo import Digits, Settings, build_model, load_digits, samples
from ..record import Rows, version
from ..results import measures
from . import memory, timing

Tell = Callable[[str], None]
KAPPA = 8  # micro-batches of the update that is timed


class NotInstalledError(RuntimeError):
    """A rival is not here."""


class Rival:
    """An optimizer that takes a mini-batch micro-batch by micro-batch: AdamW with accumulated gradients.

    Args:
        model: what it trains.
        h: hyperparameters at one micro-batch.
        micro_batch: samples.
        kappa: micro-batches per update.
    """

    law = "√B"  # what the learning rate is proportional to
    optimizer: torch.optim.Optimizer

    def __init__(self, model: nn.Module, h: Hyperparameters, micro_batch: int, kappa: int) -> None:
        self.model, self.micro_batch, self.kappa = model, micro_batch, kappa
        self.optimizer = self.make(h)

    def make(self, h: Hyperparameters) -> torch.optim.Optimizer:
        """Return the optimizer with the hyperparameters of κ micro-batches."""
        h = scale(*h, from_batch=1, to_batch=self.kappa, rule="square_root")
        return torch.optim.AdamW(self.model.parameters(), h.lr, h.betas, weight_decay=h.weight_decay)

    def gather(self, x: Tensor, y: Tensor) -> None:
        """Do the backward passes of an update."""
        for x1, y1 in zip(x.split(self.micro_batch), y.split(self.micro_batch), strict=True):
            (F.cross_entropy(self.model(x1), y1) / self.kappa).backward()

    def step(self) -> None:
        """Move the weights."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def update(self, x: Tensor, y: Tensor) -> None:
        """Make an update of κ micro-batches."""
        self.gather(x, y)
        self.step()

    def state(self) -> list[Tensor]:
        """Return the tensors that it keeps from update to update."""
        return [t for values in self.optimizer.state.values() for t in values.values() if isinstance(t, Tensor)]


class Optimi(Rival):
    """optimi's AdamW: m and v take each gradient in the backward and decay each time; the last one steps there, too."""

    power = 0.5  # of κ in the learning rate

    def make(self, h: Hyperparameters) -> torch.optim.Optimizer:
        """Return it with its hooks on the model."""
        try:
            optimi = importlib.import_module("optimi")
        except ModuleNotFoundError:
            raise NotInstalledError("not installed: pip install torch-optimi") from None
        lr = h.lr * self.kappa**self.power
        params = self.model.parameters()
        made = optimi.AdamW(
            params, lr, h.betas, weight_decay=h.weight_decay, eps=1e-8, triton=False, gradient_release=True
        )
        optimi.prepare_for_gradient_release(self.model, made)
        optimizer: torch.optim.Optimizer = made
        return optimizer

    def gather(self, x: Tensor, y: Tensor) -> None:
        """Accumulate all but the last."""
        last = len(x) - self.micro_batch
        for i in range(0, len(x), self.micro_batch):
            self.optimizer.optimizer_accumulation = i < last  # type: ignore[attr-defined]
            F.cross_entropy(self.model(x[i : i + self.micro_batch]), y[i : i + self.micro_batch]).backward()

    def step(self) -> None:
        """The last backward has stepped."""


class LinearOptimi(Optimi):
    """The same with η ∝ B."""

    law, power = "B", 1.0


class AdamA(Rival):
    """Adam accumulation as published: m and v take each g_k/κ in the backward, and the betas know nothing of κ."""

    def make(self, h: Hyperparameters) -> torch.optim.Optimizer:
        """Return an optimizer that only holds the state; the arithmetic is here."""
        self.h, self.updates = h._replace(lr=h.lr * math.sqrt(self.kappa)), 0
        params = list(self.model.parameters())
        held = torch.optim.SGD(params, self.h.lr)
        for p in params:
            held.state[p] = {"m": torch.zeros_like(p), "v": torch.zeros_like(p)}
            p.register_post_accumulate_grad_hook(self._take)
        self.begun: set[Tensor] = set()
        return held

    def _take(self, p: Tensor) -> None:
        (beta1, beta2), state, g = self.h.betas, self.optimizer.state[p], p.grad
        assert g is not None
        if p not in self.begun:
            self.begun.add(p)
            state["m"].mul_(beta1)
            state["v"].mul_(beta2)
        state["m"].add_(g, alpha=1 - beta1)
        state["v"].addcmul_(g, g, value=1 - beta2)
        p.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Debias as Adam does, and move the weights."""
        self.updates += 1
        self.begun.clear()
        first, second = (1 - beta**self.updates for beta in self.h.betas)
        for p, state in self.optimizer.state.items():
            p.addcdiv_(state["m"], (state["v"] / second).sqrt_().add_(1e-8), value=-self.h.lr / first)


class Loop(Rival):
    """Ours, a backward for each micro-batch."""

    law = "B"

    def make(self, h: Hyperparameters) -> torch.optim.Optimizer:
        """Return it as it is at every batch size."""
        opt = InvariantAdam(
            self.model.parameters(), h.lr, h.betas, weight_decay=h.weight_decay, micro_batch_size=self.micro_batch
        )
        self.growth = BatchGrowth(opt)
        return opt

    def gather(self, x: Tensor, y: Tensor) -> None:
        """Fold in the backward of each."""
        for x1, y1 in zip(x.split(self.micro_batch), y.split(self.micro_batch), strict=True):
            F.cross_entropy(self.model(x1), y1).backward()

    def update(self, x: Tensor, y: Tensor) -> None:
        """Grow in: the first mini-batches are several updates."""
        for part in self.growth.split(x, y):
            self.gather(*part)
            self.step()


class OnePass(Loop):
    """Ours, one backward over the mini-batch."""

    def gather(self, x: Tensor, y: Tensor) -> None:
        """Fold all micro-batches at once."""
        if len(x) == self.micro_batch:
            return super().gather(x, y)
        with one_pass(self.model, self.micro_batch, into=self.optimizer):
            F.cross_entropy(self.model(x), y).backward()
        return None


METHODS: dict[str, type[Rival]] = {
    "AdamW": Rival,
    "optimi": Optimi,
    "optimi, linear": LinearOptimi,
    "AdamA": AdamA,
    "ours, loop": Loop,
    "ours, one pass": OnePass,
}
HEAD = ("method", "lr", "spread", "loss", "ms", "× AdamW", "tensors")


def title(row: dict[str, Any]) -> str:
    """Return what a row was measured on."""
    sizes = ", ".join(map(str, row["batch_sizes"]))
    return f"digits, M = {row['batch_sizes'][0]}, B = {sizes}, {row['epochs']} epochs, lr {row['lr']:g} at B = M"


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """Return a row as it is printed under `HEAD`."""
    if "error" in row:
        return (row["method"], *[""] * (len(HEAD) - 1))
    losses = row["losses"].values()
    return (
        row["method"],
        f"∝ {row['law']}",
        f"{row['spread']:.4f}",
        f"{min(losses):.3f}–{max(losses):.3f}",
        f"{row['ms']:.1f}",
        f"{row['ratio']:.2f}",
        f"{row['tensors']:.2f}",
    )


def settings_of(batch_sizes: Sequence[int], epochs: int, lr: float, rounds: int) -> dict[str, Any]:
    """Return what all rows of one table share."""
    return {"batch_sizes": list(batch_sizes), "epochs": epochs, "lr": lr, "rounds": rounds}


def jobs(shared: dict[str, Any], rows: Rows) -> list[str]:
    """Return the methods that `rows` lacks."""
    return [method for method in METHODS if not rows.has({"method": method, **shared})]


def measure(todo: Sequence[str], shared: dict[str, Any], rows: Rows, *, tell: Tell) -> Iterator[dict[str, Any]]:
    """Measure method by method and yield each row once it is written."""
    settings = Settings(tuple(shared["batch_sizes"]), shared["lr"], shared["epochs"])
    data = load_digits()
    for method in todo:
        try:
            curves = {}
            for batch in settings.batch_sizes:
                tell(f"{method}: B = {batch}")
                curves[batch] = train(METHODS[method], settings, batch, data)
            tell(f"{method}: time and memory")
            taken = timed(method, shared["rounds"])
            measured = {
                "law": METHODS[method].law,
                "spread": measures.spread(list(curves.values())),
                "losses": {str(batch): losses[-1] for batch, losses in curves.items()},
                **taken,
            }
            if issubclass(METHODS[method], Optimi):
                measured["optimi"] = version("torch-optimi")
        except NotInstalledError as error:
            measured = {"error": str(error)}
        yield rows.add({"method": method, **shared}, measured)


def train(kind: type[Rival], settings: Settings, batch: int, data: Digits) -> list[float]:
    """Train the demo's network at one batch size; return the training loss after each epoch."""
    model = build_model(settings.seed)
    rival = kind(model, settings.tuned, settings.micro_batch, batch // settings.micro_batch)
    losses = []
    for epoch in range(settings.epochs):
        for rows in samples(settings, epoch).split(batch):
            rival.update(data.x[rows], data.y[rows])
        with torch.no_grad():
            losses.append(F.cross_entropy(model(data.x), data.y).item())
    return losses


def timed(method: str, rounds: int) -> dict[str, Any]:
    """Time an update beside one of AdamW, and count the bytes of state and gradients."""
    both = {}
    for name in dict.fromkeys(("AdamW", method)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
        both[name] = METHODS[name](model, Hyperparameters(1e-4, (0.99, 0.999), 0.0), 8, KAPPA)
    x, y = torch.randn(8 * KAPPA, 784), torch.randint(10, (8 * KAPPA,))

    def update(rival: Rival) -> Callable[[], None]:
        def whole() -> None:  # not `update`, which grows in: what is timed is any later update
            rival.gather(x, y)
            rival.step()

        return whole

    for rival in both.values():  # the first updates make the state, and one pass checks the model
        rival.update(x, y)
    taken = timing.interleaved({name: update(rival) for name, rival in both.items()}, x.device, rounds, warmup=2)
    own, base, rival = taken[method], taken["AdamW"], both[method]
    weights, kept = (sum(t.numel() * t.element_size() for t in ts) for ts in (rival.model.parameters(), rival.state()))
    grown = memory.growth(lambda: rival.gather(x, y), rival.step, x.device)
    return {
        "ms": round(own.ms, 3),
        "adamw_ms": round(base.ms, 3),
        "ratio": round(own.ms / base.ms, 4),
        "weight_bytes": weights,
        "held_bytes": kept + grown.between,
        "tensors": round((weights + kept + grown.between) / weights, 3),
        "peak_bytes": weights + kept + grown.peak,
    }

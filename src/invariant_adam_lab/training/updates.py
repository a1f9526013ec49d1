"""One update of a run: the next samples of its epoch -> loss -> gradients -> weights, by the run's algorithm.

On a GPU `captured` makes it one CUDA graph.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import invariant_adam as ia
from invariant_adam.graphs import aside
from invariant_adam.scaling import scale

from . import augment
from .runs import RECIPES, Run
from .source import Source

FIRST = 3  # updates that `captured` makes


class Epoch:
    """The samples of the epoch under way, where the next update begins, and sums over its updates."""

    def __init__(self, source: Source, run: Run, take: int) -> None:
        self.source, self.run, self.take = source, run, take
        self.samples = tuple(torch.empty_like(part) for part in source.epoch(run.seed, 0, run.samples, take))
        self.place = torch.zeros((), dtype=torch.int64, device=source.device)
        self.totals = torch.zeros(2, dtype=torch.float64, device=source.device)  # of losses and right answers

    def begin(self, epoch: int) -> None:
        """Bring the samples of an epoch."""
        run, samples = self.run, self.source.epoch(self.run.seed, epoch, self.run.samples, self.take)
        if run.order:
            block, device = run.max_batch_size, self.source.device
            places = augment.reordered(run.order, epoch, self.take, block, run.micro_batch_size, device)
            samples = tuple(part[places] for part in samples)
        for here, there in zip(self.samples, samples, strict=True):
            here.copy_(there)
        self.place.zero_()
        self.totals.zero_()


def loss_of(logits: Tensor, y: Tensor, smoothing: float = 0.0) -> Tensor:
    """Return the mean loss of logits (…, classes) over samples, and characters of a sequence."""
    return F.cross_entropy(logits.flatten(0, -2).float(), y.flatten(), label_smoothing=smoothing)


def accuracy(logits: Tensor, y: Tensor) -> Tensor:
    """Return the share of right answers."""
    return (logits.argmax(-1) == y).double().mean()


class Scored(nn.Module):
    """A model with its loss, so that a compiled graph holds both."""

    def __init__(self, model: nn.Module, smoothing: float) -> None:
        super().__init__()
        self.model, self.smoothing = model, smoothing

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean loss over samples x with answers y, and the logits."""
        logits = self.model(x)
        return loss_of(logits, y, self.smoothing), logits


class ScaledOptimizer:
    """The optimizer of a run, whose hyperparameters follow the batch size by the run's rule."""

    def __init__(self, run: Run, model: nn.Module, device: torch.device) -> None:
        self.run, self.rate, self.batch = run, math.nan, run.batch_sizes[0]
        self.inner: torch.optim.Optimizer
        gpu = device.type == "cuda"
        # With one micro-batch per update invariant Adam is Adam, and torch's needs no host between two graphs.
        same = gpu and run.algorithm == "invariant" and run.batch_sizes == (run.micro_batch_size,)
        self.betas, decay = RECIPES[run.model].betas, RECIPES[run.model].weight_decay
        groups = [{"params": [*model.parameters()], "weight_decay": 0.0}]
        if decay:  # of matrices alone, as is usual
            parts = [[p for p in model.parameters() if (p.dim() > 1) == whole] for whole in (True, False)]
            groups = [{"params": parts[0], "weight_decay": decay}, {"params": parts[1], "weight_decay": 0.0}]
        if run.algorithm in ("invariant", "adama") and not same:
            self.inner = ia.InvariantAdam(
                groups,
                run.lr0,
                self.betas,
                micro_batch_size=run.micro_batch_size,
                tuned_batch_size=run.anchor,
                rule=run.rule if run.algorithm == "invariant" else "linear",
            )
        else:
            lr = torch.tensor(run.lr0, device=device) if gpu else run.lr0
            self.inner = torch.optim.AdamW(groups, lr, self.betas, fused=True, capturable=gpu)
        self.resize(run.batch_sizes[0])

    def resize(self, batch: int) -> None:
        """Change the batch size of the updates to come."""
        run, inner = self.run, self.inner
        if isinstance(inner, ia.InvariantAdam):
            if inner.samples_seen:
                inner.expect(batch / run.micro_batch_size)
            if run.algorithm == "adama":
                # v/κ in the place of v: η m/(√(v/κ) + ε) = √κη m/(√v + √κε)
                for group in inner.param_groups:
                    group["eps"] = 1e-8 * math.sqrt(batch / run.micro_batch_size)
                for state in inner.state.values():  # v/κ stays what it was under the κ before
                    state["exp_avg_sq"].mul_(batch / self.batch)
        elif not (run.tuned and run.algorithm == "standard"):  # which keeps its betas
            rule = "linear" if run.rule == "none" else run.rule
            betas = scale(0.0, self.betas, from_batch=run.anchor, to_batch=batch, rule=rule).betas
            if run.algorithm == "halflife":
                betas = (self.betas[0], self.betas[1] ** (batch / run.anchor))
            change_betas(inner, betas)
        self.batch, self.rate = batch, math.nan

    def lr(self, factor: float = 1.0) -> float:
        """Return the learning rate of an update by the run's rule, times a warm-up's factor."""
        rho = self.batch / self.run.anchor
        return self.run.lr0 * factor * {"square_root": math.sqrt(rho), "none": 1.0}.get(self.run.rule, rho)

    def set_lr(self, factor: float) -> None:
        """Set the learning rate of the next update to the rule's times `factor`."""
        if factor == self.rate:
            return  # on a GPU every change is a launch
        self.rate, lr = factor, self.lr(factor)
        if self.run.algorithm == "adama":
            rho = self.batch / self.run.anchor
            lr = lr / rho * math.sqrt(self.batch / self.run.micro_batch_size)
        elif isinstance(self.inner, ia.InvariantAdam):
            lr = self.run.lr0 * factor  # at the anchor; InvariantAdam scales it
        for group in self.inner.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr


def change_betas(adam: torch.optim.Optimizer, betas: tuple[float, float]) -> None:
    """Change the betas of torch's Adam in mid-run and leave m̂ and v̂ as they are.

    Torch debiases by 1 − βᵗ, as if all t updates had used the β of the last. With t′ = t·ln β₂/ln β₂′ in the place of t
    the factor of v stays 1 − β₂ᵗ. The same t′ is right for m only if both betas scale exponentially, so m is multiplied
    by (1 − β₁′^t′)/(1 − β₁ᵗ). This is 1 once m has forgotten its start; before that it matters most where β₁ does not
    follow the batch size.
    """
    old = adam.param_groups[0]["betas"]
    for group in adam.param_groups:
        group["betas"] = betas
    for state in adam.state.values():  # in place; torch's step is a float and may be a fraction
        t = state["step"].item()
        equal = t * math.log(old[1]) / math.log(betas[1])
        state["step"].fill_(equal)
        state["exp_avg"].mul_((1 - betas[0] ** equal) / (1 - old[0] ** t))


class TrainingStep:
    """One update on buffers that stay where they are: take the next samples, forward, backward, step.

    Everything that changes between updates is on the device, so that one CUDA graph can make any of them.

    Args:
        run: settings.
        net: the model with its loss; the same one for all steps of a run, because one pass checks a model once.
        optimizer: its batch size is that of the update.
        source: what gives the model its inputs.
        epoch: the samples.
        engine: "one-pass" or "loop", for updates of several micro-batches.
        compiled: compile the model.
    """

    def __init__(
        self,
        run: Run,
        net: Scored,
        optimizer: ScaledOptimizer,
        source: Source,
        epoch: Epoch,
        engine: str = "one-pass",
        compiled: bool = False,
    ) -> None:
        self.optimizer, self.source, self.epoch = optimizer, source, epoch
        self.net: nn.Module = net
        if compiled:
            self.net = cast(nn.Module, torch.compile(self.net, dynamic=False))
        batch, M = optimizer.batch, run.micro_batch_size
        invariant = isinstance(optimizer.inner, ia.InvariantAdam)
        self.one_pass = M if invariant and batch > M and engine == "one-pass" else 0
        self.piece = M if (invariant or run.algorithm == "accumulate") and not self.one_pass else batch
        most = RECIPES[run.model].most
        if most and self.piece > most:  # the most micro-batches that make equal pieces
            self.piece = M * max(k for k in range(1, most // M + 1) if batch // M % k == 0)
        self.one_pass *= self.piece > M  # of one micro-batch it is a plain backward
        self.divisor = 1 if invariant else batch // self.piece
        self.batch = batch
        self.rows = torch.arange(batch, device=source.device)

    def __call__(self) -> None:
        """Make one update."""
        inner, epoch = self.optimizer.inner, self.epoch
        if not isinstance(inner, ia.InvariantAdam):
            inner.zero_grad()
        samples = tuple(part.index_select(0, epoch.place + self.rows) for part in epoch.samples)
        x, y = self.source.inputs(samples)
        losses, right = [], []
        with self.source.autocast():  # once around all micro-batches: weights are cast once per update
            for piece, target in zip(x.split(self.piece), y.split(self.piece), strict=True):
                with (
                    ia.one_pass(self.net, self.one_pass, into=cast(ia.InvariantAdam, inner))
                    if self.one_pass
                    else nullcontext()
                ):
                    loss, answers = self.net(piece, target)
                    (loss / self.divisor).backward()
                losses.append(loss.detach())
                right.append(accuracy(answers.detach(), target))
        means = torch.stack((torch.stack(losses).double().mean(), torch.stack(right).mean()))
        epoch.totals += self.batch * means
        inner.step()
        epoch.place += self.batch


def captured(update: TrainingStep, prepare: Callable[[int], None], start: int) -> Callable[[], Any]:
    """Make three updates, two directly and one by a CUDA graph, and return the graph's replay.

    Args:
        update: what is captured.
        prepare: called before each of the three with its first sample; it sets what the host must set.
        start: the sample that the first begins with.
    """
    inner, made = update.optimizer.inner, itertools.count(start, update.batch)

    def work() -> None:
        prepare(next(made))
        update()

    if isinstance(inner, ia.InvariantAdam):
        return ia.capture(inner, work)
    with aside(update.source.device) as stream:
        work()
        work()
    prepare(next(made))  # not in the graph: it launches a kernel where the rate is on the device
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        update()
    graph.replay()
    return graph.replay

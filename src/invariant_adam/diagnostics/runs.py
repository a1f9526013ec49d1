"""The runs of a check: one model, trained on one list of micro-batches, at one batch size."""

from __future__ import annotations

import copy
import math
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..growth import BatchGrowth
from ..optimizer import InvariantAdam
from ..schedules import SampleLambdaLR
from .samples import Batch, moved

DIVERGED = 1e3  # a loss this many times the first one is that of a run that is lost

LossFn = Callable[[nn.Module, Batch], Tensor]


class Problem(NamedTuple):
    """What is trained, the same in all runs of a check."""

    build: Callable[[], nn.Module]  # a new model with the weights that all runs begin with
    loss_fn: LossFn
    batches: list[Batch]  # micro-batches, in the order in which they are seen
    size: int  # M, samples
    options: dict[str, Any]  # of InvariantAdam
    schedule: Callable[[float], float] | None
    growth: float | None  # the ratio of `BatchGrowth`; None: no growing in
    marks: list[int]  # micro-batches after which the loss is measured
    probes: list[int]  # the micro-batches that it is measured on
    seed: int


class Curve(NamedTuple):
    """One run: the training loss where it was measured."""

    batch: int  # B, samples
    losses: list[float]  # in eval mode, over the probes: before the first update, and at the marks
    updates: int
    nonfinite: int  # gradient elements

    @property
    def diverged(self) -> bool:
        """Whether the run is lost."""
        first, last = self.losses[0], self.losses[-1]
        return not math.isfinite(last) or abs(last) > DIVERGED * max(abs(first), 1e-12)


def spread(curves: Sequence[Curve]) -> float:
    """The largest minus the smallest log loss over runs, as a mean over the marks; inf where a run is lost.

    Where a loss is not positive, the loss is taken relative to how far it moves in the first run.
    """
    if any(curve.diverged for curve in curves):
        return math.inf
    columns = list(zip(*(curve.losses[1:] for curve in curves), strict=True))
    if all(loss > 0 for column in columns for loss in column):
        return math.fsum(math.log(max(column) / min(column)) for column in columns) / len(columns)
    first = curves[0].losses
    moved_by = max(max(first) - min(first), 1e-12)
    return math.fsum(max(column) - min(column) for column in columns) / len(columns) / moved_by


@contextmanager
def randomness() -> Iterator[None]:
    """Give torch, numpy and random back as they were."""
    cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    numpy = sys.modules.get("numpy")
    plain, arrays = random.getstate(), numpy.random.get_state() if numpy else None
    with torch.random.fork_rng(devices=range(torch.cuda.device_count()) if cuda else []):
        try:
            yield
        finally:
            random.setstate(plain)
            if numpy:
                numpy.random.set_state(arrays)


def seeded(seed: int) -> None:
    """Begin all random numbers that a seed controls anew."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy:
        numpy.random.seed(seed % 2**32)


def builder(
    make_model: Callable[[], nn.Module] | nn.Module, device: Any, seed: int, warm: Callable[[nn.Module], Any]
) -> Callable[[], nn.Module]:
    """A function that makes models which all begin with the same weights.

    Args:
        make_model: makes a new model; or a model, of which copies are made.
        device: where it shall be; None: where it is made.
        seed: before each model is made.
        warm: runs a model once, where its weights are not made before.
    """
    given = make_model if isinstance(make_model, nn.Module) else None
    if given is None and not callable(make_model):
        raise TypeError(f"make_model must be a function that makes a model, got {type(make_model).__name__}")
    first: list[Any] = []  # the first model's weights, and the model, to know it again

    def build() -> nn.Module:
        seeded(seed)
        model = copy.deepcopy(given) if given is not None else make_model()
        if not isinstance(model, nn.Module):
            raise TypeError(f"make_model must return a torch.nn.Module, got {type(model).__name__}")
        if first and model is first[1]:
            raise ValueError(
                "make_model returned the same model twice, which would go on from the run before; make a new one in "
                "it, or give the model itself, which is then copied"
            )
        if device is not None:
            model = model.to(device)
        if any(is_lazy(p) for p in model.parameters()):
            warm(model)
        if not first:
            if not any(p.requires_grad for p in model.parameters()):
                raise ValueError("the model of make_model has no parameter that is trained (requires_grad)")
            state = {name: copy.deepcopy(value) for name, value in model.state_dict().items()}
            first.extend((state, model if given is None else None))
        else:
            model.load_state_dict(first[0])
        return model

    return build


def device_of(model: nn.Module) -> torch.device:
    """Where a model is."""
    return next(model.parameters()).device


def loss_of(loss_fn: LossFn, model: nn.Module, batch: Batch) -> Tensor:
    """The loss of one micro-batch; refused where it is not a scalar to be differentiated."""
    loss = loss_fn(model, batch)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise TypeError(f"loss_fn(model, batch) must return the mean loss of the batch, one number, got {what}")
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise ValueError(
            "loss_fn(model, batch) returned a loss that does not depend on trained parameters: it calls backward() "
            "itself, or .item() or detach(), or the model is frozen; return the loss, and leave backward() to the check"
        )
    return loss


def train(
    problem: Problem,
    batch: int,
    *,
    order: Sequence[int] | None = None,
    until: int | None = None,
    tell: Callable[[int], None] = lambda samples: None,
    **changes: Any,
) -> Curve:
    """Train at one batch size.

    Args:
        problem: what is trained.
        batch: B, samples, a multiple of M.
        order: in which the micro-batches are seen; None: as they are.
        until: stop after so many marks; None: after all.
        tell: called with the number of samples just seen.
        changes: options of InvariantAdam that differ in this run.
    """
    model = problem.build()
    opt = InvariantAdam(model.parameters(), micro_batch_size=problem.size, **(problem.options | changes))
    if problem.schedule is not None:
        SampleLambdaLR(opt, problem.schedule)
    growth = BatchGrowth(opt, math.inf if problem.growth is None else problem.growth)
    device, kappa = device_of(model), batch // problem.size
    marks = problem.marks[:until]
    places = list(order if order is not None else range(marks[-1]))[: marks[-1]]
    seeded(problem.seed)
    losses, updates = [evaluate(problem, model)], 0
    with warnings.catch_warnings(), torch.enable_grad():
        warnings.filterwarnings("ignore", "[0-9]+ gradient elements were not finite")  # told as a cause
        for first in range(0, len(places), kappa):
            mini = places[first : first + kappa]
            while mini:
                now = growth.next_kappa(len(mini))
                for place in mini[:now]:
                    loss_of(problem.loss_fn, model, moved(problem.batches[place], device)).backward()
                opt.step()
                mini, updates = mini[now:], updates + 1
            seen = min(first + kappa, len(places))
            tell((seen - first) * problem.size)
            if seen in marks:
                losses.append(evaluate(problem, model))
                if Curve(batch, losses, updates, 0).diverged:
                    break
        nonfinite = opt.nonfinite
    return Curve(batch, losses, updates, nonfinite)


@torch.no_grad()
def evaluate(problem: Problem, model: nn.Module) -> float:
    """The training loss in eval mode, as a mean over micro-batches. The run does not notice it.

    Args:
        problem: has the loss and the micro-batches.
        model: in whatever mode.
    """
    device = device_of(model)
    with randomness(), unchanged(model):
        seeded(problem.seed)
        model.eval()
        losses = [loss_of(problem.loss_fn, model, moved(problem.batches[i], device)) for i in problem.probes]
        return float(torch.stack([loss.detach().double().reshape(()).cpu() for loss in losses]).mean())


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Give the modes and buffers of a model back as they were."""
    modes = [(module, module.training) for module in model.modules()]
    kept = [(m._buffers, dict(m._buffers)) for m in model.modules() if m._buffers]
    values = [(b, b.detach().clone()) for _, held in kept for b in held.values() if b is not None]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
        for buffers, held in kept:
            buffers.update(held)  # where a forward put another tensor in its place
        with torch.no_grad():
            for b, value in values:
                b.copy_(value)

"""A run from its first weights to its last: a row of losses and accuracies per epoch; several runs at once.

Runs of one seed start from the same weights. A run is a generator that yields after each update, so that several runs
share a GPU, each on a stream of its own.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn

from invariant_adam import InvariantAdam
from invariant_adam.schedules import mean_factor, warmup_cosine

from ..models import build
from . import data
from .runs import COSINE_FLOOR, RECIPES, WARMUP, Run, check
from .source import Source
from .updates import FIRST, Epoch, ScaledOptimizer, Scored, TrainingStep, accuracy, captured, loss_of

MEASURED = ("train_loss", "train_accuracy", "test_loss", "test_accuracy", "end_train_loss")  # at the end of an epoch
AHEAD = 8  # updates that the host may be ahead of the device, so that runs on one device take turns

Row = dict[str, float]


def make_model(run: Run, source: Source) -> nn.Module:
    """Return the model of a run with the weights that its seed gives it, on the device of its data."""
    recipe = RECIPES[run.model]
    options = {**recipe.options, **(recipe.small if run.small else {})}
    if isinstance(source.found, data.Text):
        options.update(vocab=len(source.found.vocab), context=source.context)
    else:
        options.update(classes=source.found.classes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(run.seed)
        model = build(recipe.model, **options)
    source.channels_last = source.device.type == "cuda" and run.model.startswith("resnet")
    if source.channels_last:
        return model.to(source.device, memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]
    return model.to(source.device)


def train(
    run: Run,
    source: Source,
    *,
    engine: str = "one-pass",
    graphs: bool = True,
    compiled: bool = False,
    on_epoch: Callable[[Row], None] = lambda row: None,
) -> Generator[None, None, list[Row]]:
    """Train; yield after each update; return a row per epoch.

    On a GPU the caller makes the run's stream current whenever it resumes the run. The numbers of an epoch are read
    once the device has them; nothing waits for them. A run whose weights are no numbers any more ends there: the rows
    of the epochs that are left say so. The updates that a run grows in by are few and of many sizes: they are loops
    over micro-batches, without a graph and not compiled.

    Args:
        run: settings.
        source: what `source.load` gave for the model.
        engine: "one-pass" or "loop", for updates of several micro-batches.
        graphs: make updates CUDA graphs on a GPU.
        compiled: compile the model.
        on_epoch: called with the row of each epoch when its numbers are known.
    """
    run = check(run)
    total = min(run.samples or source.count, source.count) // (run.epochs if source.recipe.once else 1)
    take = total // run.max_batch_size * run.max_batch_size
    if not take:
        raise ValueError(
            f"{total} samples make no update of max_batch_size={run.max_batch_size}; use more samples or a smaller one"
        )
    gpu = source.device.type == "cuda"
    model = make_model(run, source)
    net = Scored(model, RECIPES[run.model].smoothing)
    optimizer = ScaledOptimizer(run, model, source.device)
    warmup = warmup_cosine(run.warmup_samples, run.warmup_samples + 1, floor=1.0) if run.warmup_samples else None
    if source.recipe.once or run.tuned:
        whole = run.epochs * take
        warmup = warmup_cosine(run.warmup_samples or WARMUP * whole, whole, floor=COSINE_FLOOR)
    epoch_data = Epoch(source, run, take)
    rows: list[Row] = []
    clock = time.perf_counter()
    waiting: deque[tuple[Any, Tensor, Row]] = deque()  # epochs whose numbers are on their way
    running: deque[Any] = deque()
    update: Callable[[], Any] | None = None

    def prepare(start: int) -> None:  # an update that begins with this sample
        stop = start + optimizer.batch
        optimizer.set_lr(mean_factor(warmup, start, stop) if warmup is not None else 1.0)

    def read(wait: bool = False) -> None:
        nonlocal clock
        while waiting and (wait or waiting[0][0] is None or waiting[0][0].query()):
            event, numbers, row = waiting.popleft()
            if event is not None:
                event.synchronize()
            values = dict(zip(MEASURED, numbers.tolist(), strict=True))
            now = time.perf_counter()
            rows.append({**row, **values, "seconds": now - clock})
            clock = now
            on_epoch(rows[-1])

    for number in range(run.epochs):
        read()
        if rows and not _alive(rows[-1]):
            break
        epoch_data.begin(number)
        sizes, made, place = run.update_sizes(number, take), 0, number * take
        while made < len(sizes):
            if update is None or sizes[made] != optimizer.batch:
                optimizer.resize(sizes[made])
                grown = set(sizes[made:]) == {run.batch_at(number)}  # from here on nothing is cut
                how = (engine, compiled) if grown else ("loop", False)
                plain = update = TrainingStep(run, net, optimizer, source, epoch_data, *how)
                if gpu and graphs and grown and len(sizes) - made >= FIRST:
                    update = captured(plain, prepare, place)
                    made, place = made + FIRST, place + FIRST * optimizer.batch
                    continue
            prepare(place)
            update()
            made, place = made + 1, place + optimizer.batch
            read()
            if gpu:
                running.append(_event())
                while len(running) > AHEAD and not running[0].query():
                    yield
                    read()
                if len(running) > AHEAD:
                    running.popleft()
            yield
        if gpu and graphs and update is plain:  # the next epoch may have updates enough for a graph
            update = None
        fixed = evaluate(model, source, source.fixed(run.samples))[:1]
        numbers = torch.cat((epoch_data.totals / take, evaluate(model, source), fixed))
        if gpu:
            numbers = torch.empty(len(MEASURED), dtype=numbers.dtype, pin_memory=True).copy_(numbers, non_blocking=True)
        lr = optimizer.lr(optimizer.rate)
        row = {"epoch": number + 1, "samples": (number + 1) * take, "lr": lr}
        if source.recipe.once and isinstance(optimizer.inner, InvariantAdam):
            row["noise_scale"] = optimizer.inner.noise_scale().batch
        if source.recipe.once and gpu:
            row["peak_memory"] = torch.cuda.max_memory_allocated(source.device)
        waiting.append((_event() if gpu else None, numbers, row))
    while waiting:
        read(wait=not gpu)
        yield
    for number in range(len(rows), run.epochs):  # the accuracies stay those of weights that are no numbers
        left = {"epoch": number + 1, "samples": (number + 1) * take, "train_loss": math.nan, "seconds": 0.0}
        rows.append({**rows[-1], **left})
        on_epoch(rows[-1])
    return rows


def _alive(row: Row) -> bool:
    """Whether the weights at the end of an epoch are numbers, by the losses on both sets."""
    return not (math.isnan(row["test_loss"]) and math.isnan(row["end_train_loss"]))


def _event() -> Any:
    event = torch.cuda.Event()
    event.record()
    return event


@torch.no_grad()
def evaluate(model: nn.Module, source: Source, batches: Iterator[tuple[Tensor, ...]] | None = None) -> Tensor:
    """Return mean loss and share of right answers on samples, by default the test set, on the device."""
    totals = torch.zeros(2, dtype=torch.float64, device=source.device)
    count = 0
    model.eval()
    with source.autocast():
        for samples in source.test() if batches is None else batches:
            x, y = source.inputs(samples)
            logits = model(x)
            totals += torch.stack((loss_of(logits, y).double(), accuracy(logits, y))) * len(samples[0])
            count += len(samples[0])
    model.train()
    return totals / count


def finish(work: Generator[None, None, list[Row]]) -> list[Row]:
    """Run to the end and return the rows."""
    while True:
        try:
            next(work)
        except StopIteration as done:
            return cast(list[Row], done.value)


def lanes(
    works: Iterator[tuple[Any, Generator[None, None, list[Row]]]], count: int, device: torch.device
) -> Iterator[tuple[Any, list[Row] | Exception]]:
    """Run several runs at once, taking turns, and yield each with its rows, or its error, as it ends.

    On a GPU each has a stream of its own; micro-batches of 25 leave most of it free. On the CPU they only take turns.

    Args:
        works: names and runs; the next is taken whenever a place is free.
        count: runs at once.
        device: where they run.
    """
    gpu = device.type == "cuda"
    streams = [torch.cuda.Stream(device) if gpu else None for _ in range(count)]
    places: list[tuple[Any, Generator[None, None, list[Row]]] | None] = [None] * count
    exhausted = False
    while True:
        for place, stream in enumerate(streams):
            if places[place] is None and not exhausted:
                places[place] = next(works, None)
                exhausted = places[place] is None
            held = places[place]
            if held is None:
                continue
            name, work = held
            try:
                with torch.cuda.stream(stream) if stream is not None else nullcontext():
                    next(work)
                continue
            except StopIteration as done:
                outcome: list[Row] | Exception = done.value
            except Exception as error:
                outcome = error
            places[place] = None
            work.close()
            del work, held
            yield name, outcome
        if exhausted and not any(places):
            return

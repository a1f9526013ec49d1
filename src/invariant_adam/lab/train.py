"""One run of the lab: a model, an algorithm, a batch size, a learning rate, a seed -> losses and accuracies per epoch.

| algorithm | an update of B = κM samples |
|---|---|
| invariant | `InvariantAdam`: v gets mean_k g_k² |
| standard | `torch.optim.Adam` on the whole mini-batch: v gets (mean_k g_k)² |
| accumulate | the same, gradients added up over micro-batches: equal, but that batch norm sees M samples and not B |
| micro | `torch.optim.Adam` on each micro-batch: B = M |
| adama | AdamA's accumulation: v gets Σ_k (g_k/κ)² |
| halflife | standard Adam at the same learning rate for all B, with the half-life of v kept constant in samples |

With ρ = B/B_max, η₀ and the betas (0.9, 0.999) hold at B_max, as in the paper: γ′ = ργ, and η = ρη₀ (rule "linear") or
√ρη₀ ("square_root"). The learning rate is constant, after a linear warm-up in samples if one is asked for; there is no
weight decay.

Runs of one seed start from the same weights and see the same samples, augmented alike, in the same order, at every B.
A run is a generator that hands over after each update, so that several runs share a GPU, each on a stream of its own;
there an update is one CUDA graph.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import invariant_adam as ia

from ..graphs import aside
from ..scaling import scale
from ..schedules import mean_factor, warmup_cosine
from . import augment, data
from .models import build

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
KEPT_BYTES = 8 << 30  # of epochs made on a GPU and kept for the next run; on the CPU one epoch is kept
TEST_BATCH = 1_000  # samples
AHEAD = 8  # updates that the host may be ahead of the device, so that runs on one device take turns


class Task(NamedTuple):
    """What is trained, and how, in the paper (GPT: in its manner)."""

    model: str  # in `models`
    options: dict[str, Any]
    small: dict[str, Any]  # options of a version that trains on a CPU in seconds
    dataset: str
    batch_sizes: tuple[int, ...]
    micro_batch_size: int
    flip: bool = True
    auto: bool = False
    smoothing: float = 0.0


_CIFAR_SIZES = (25, 50, 100, 200, 400, 800)
TASKS = {
    "resnet-bn": Task("resnet18", {}, {"width": 8, "depths": (1, 1)}, "cifar10", _CIFAR_SIZES, 25),
    "resnet-ln": Task("resnet18", {"norm": "layer"}, {"width": 8, "depths": (1, 1)}, "cifar10", _CIFAR_SIZES, 25),
    "vit": Task(
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
    "gpt": Task(
        "gpt-char",
        {},
        {"width": 32, "depth": 2, "heads": 2, "context": 32},
        "tinyshakespeare",
        (8, 16, 32, 64, 128, 256),
        8,
    ),
}


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
    samples: int = 0  # of the training set that are used; 0: all
    warmup_samples: int = 0
    ramp: str = ""  # "25-800": the first batch size for the first half of the epochs, the second for the rest
    small: bool = False

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """The batch sizes of the run, in their order: one, or two with a ramp."""
        return tuple(map(int, self.ramp.split("-"))) if self.ramp else (self.batch_size,)

    def batch_at(self, epoch: int) -> int:
        """Return the batch size in an epoch, from 0."""
        return self.batch_sizes[0] if 2 * epoch < self.epochs else self.batch_sizes[-1]

    @property
    def name(self) -> str:
        """How the run is called in files and on the screen."""
        size = self.ramp or self.batch_size
        extra = f"-w{self.warmup_samples}" * bool(self.warmup_samples)
        extra += f"-M{self.micro_batch_size}" * (self.micro_batch_size != TASKS[self.model].micro_batch_size)
        return f"{self.model}-{self.algorithm}-{self.rule}-B{size}-lr{self.lr0:g}-s{self.seed}{extra}"


def check(run: Run) -> Run:
    """Return the run, or refuse it by name.

    >>> check(Run("vit", "invariant", "linear", 100, 25, 400, 1e-4, 0, 10)).name
    'vit-invariant-linear-B100-lr0.0001-s0'
    """
    if run.model not in TASKS:
        raise ValueError(f"model must be one of {', '.join(TASKS)}, got {run.model!r}")
    if run.algorithm not in RULES:
        raise ValueError(f"algorithm must be one of {', '.join(RULES)}, got {run.algorithm!r}")
    if run.rule not in RULES[run.algorithm]:
        raise ValueError(f"rule of {run.algorithm} must be one of {', '.join(RULES[run.algorithm])}, got {run.rule!r}")
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
    if not 0 < run.lr0 < math.inf:
        raise ValueError(f"lr0 must be a finite number above 0, got {run.lr0}")
    for name in ("epochs", "samples", "warmup_samples", "seed"):
        least = 1 if name == "epochs" else 0
        if not getattr(run, name) >= least:
            raise ValueError(f"{name} must be at least {least}, got {getattr(run, name)}")
    return run


# ---------------------------------------------------------------- samples on the device


class Source:
    """A dataset on a device: epochs in their order, the test set, and what a model takes of either.

    Args:
        found: images or a text.
        task: how it is augmented.
        device: where it goes.
        context: characters of a sequence, where it is a text.
        precision: "float32", or "bfloat16" for autocast with float32 weights.
    """

    def __init__(
        self,
        found: data.Images | data.Text,
        task: Task,
        device: torch.device,
        context: int = 0,
        precision: str = "float32",
    ) -> None:
        self.task, self.device, self.context, self.precision = task, device, context, precision
        moved = {name: part.to(device) for name, part in found._asdict().items() if isinstance(part, Tensor)}
        self.found: data.Images | data.Text = found._replace(**moved)  # type: ignore[arg-type]
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # runs read it on streams of their own
        self.kept: OrderedDict[Any, tuple[Tensor, ...]] = OrderedDict()
        if isinstance(found, data.Images):
            self.count = len(found.x)
            self.mean, self.std = (
                torch.tensor(value, device=device).view(3, 1, 1) for value in (data.CIFAR10_MEAN, data.CIFAR10_STD)
            )
        else:
            self.count = (len(found.ids) - context) // context  # wherever in the first `context` characters it starts
            if self.count < 1 or len(found.test_ids) <= context:
                raise ValueError(
                    f"a text of {len(found.ids):,} and {len(found.test_ids):,} held-out characters has no sequence of "
                    f"{context}; use a longer text"
                )
        self.channels_last = False

    def epoch(self, seed: int, epoch: int, samples: int, take: int) -> tuple[Tensor, ...]:
        """Return the samples of an epoch in their order, augmented.

        Args:
            seed: of the run.
            epoch: from 0.
            samples: of the training set that are used; 0: all.
            take: samples of an epoch; what is left over is other samples in each epoch.
        """
        key = (seed, epoch, samples, take)
        if key not in self.kept:
            made = self._make(seed, epoch, samples or self.count, take)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # other streams will read it
            size = sum(part.nbytes for part in made)
            while self.kept and (len(self.kept) + 1) * size > (KEPT_BYTES if self.device.type == "cuda" else size):
                self.kept.popitem(last=False)
            self.kept[key] = made
        self.kept.move_to_end(key)
        found = self.kept[key]
        if self.device.type == "cuda":
            for part in found:
                part.record_stream(torch.cuda.current_stream(self.device))
        return found

    def _make(self, seed: int, epoch: int, samples: int, take: int) -> tuple[Tensor, ...]:
        order = augment.order(seed, epoch, samples, self.device)[:take]
        if isinstance(self.found, data.Images):
            x = augment.augment(self.found.x[order], order, seed, epoch, flip=self.task.flip, auto=self.task.auto)
            return x, self.found.y[order]
        start = int(augment.draw(seed, epoch, torch.zeros(1, dtype=torch.int64), 1) * self.context)
        return (self._sequences(self.found.ids, start)[order],)

    def _sequences(self, ids: Tensor, start: int) -> Tensor:
        """Cut a text into sequences, each with the character that follows it."""
        return ids[start:].unfold(0, self.context + 1, self.context)

    def test(self) -> Iterator[tuple[Tensor, ...]]:
        """Yield the test set in batches."""
        if isinstance(self.found, data.Images):
            yield from zip(self.found.test_x.split(TEST_BATCH), self.found.test_y.split(TEST_BATCH), strict=True)
        else:
            for part in self._sequences(self.found.test_ids, 0).split(TEST_BATCH // 4):
                yield (part,)

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context in which models run."""
        if self.precision == "bfloat16":
            return torch.autocast(self.device.type, torch.bfloat16)
        return nullcontext()

    def inputs(self, samples: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Return what a model takes and what it should answer."""
        if not isinstance(self.found, data.Images):
            ids = samples[0].long()
            return ids[:, :-1], ids[:, 1:]
        x = (samples[0].float().div_(255) - self.mean) / self.std
        return (x.contiguous(memory_format=torch.channels_last) if self.channels_last else x), samples[1]


def loss_of(logits: Tensor, y: Tensor, smoothing: float = 0.0) -> Tensor:
    """Return the mean loss of logits (…, classes) over samples, and characters of a sequence."""
    return F.cross_entropy(logits.flatten(0, -2).float(), y.flatten(), label_smoothing=smoothing)


def accuracy(logits: Tensor, y: Tensor) -> Tensor:
    """Return the share of right answers."""
    return (logits.argmax(-1) == y).double().mean()


def default_precision(device: torch.device) -> str:
    """Return what models run in unless told otherwise."""
    return "bfloat16" if device.type == "cuda" else "float32"


def load(
    model: str, device: torch.device, *, small: bool = False, found: Any = None, precision: str | None = None
) -> Source:
    """Return the dataset of a model on a device.

    Args:
        model: a key of `TASKS`.
        device: where it goes.
        small: the model is the small one.
        found: images or a text to use instead of the model's own dataset.
        precision: by default bfloat16 on a GPU and float32 elsewhere.
    """
    task = TASKS[model]
    if found is None:
        found = (data.cifar10 if task.dataset == "cifar10" else data.tinyshakespeare)()[0]
    context = 0
    if isinstance(found, data.Text):
        context = (task.small if small else {}).get("context", 256)
    return Source(found, task, device, context, precision or default_precision(device))


def make_model(run: Run, source: Source) -> nn.Module:
    """Return the model of a run with the weights that its seed gives it, on the device of its data."""
    task = TASKS[run.model]
    options = {**task.options, **(task.small if run.small else {})}
    if isinstance(source.found, data.Text):
        options.update(vocab=len(source.found.vocab), context=source.context)
    else:
        options.update(classes=source.found.classes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(run.seed)
        model = build(task.model, **options)
    source.channels_last = source.device.type == "cuda" and run.model.startswith("resnet")
    if source.channels_last:
        return model.to(source.device, memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]
    return model.to(source.device)


# ---------------------------------------------------------------- optimizers


class Optimizer:
    """The optimizer of a run, whose hyperparameters follow the batch size by the run's rule."""

    def __init__(self, run: Run, model: nn.Module, device: torch.device) -> None:
        self.run, self.rate = run, math.nan
        self.inner: torch.optim.Optimizer
        gpu = device.type == "cuda"
        # Of one micro-batch invariant Adam is Adam, and torch's needs nothing of the host between two graphs.
        same = gpu and run.algorithm == "invariant" and run.batch_sizes == (run.micro_batch_size,)
        if run.algorithm in ("invariant", "adama") and not same:
            self.inner = ia.InvariantAdam(
                model.parameters(),
                run.lr0,
                BETAS,
                micro_batch_size=run.micro_batch_size,
                tuned_batch_size=run.max_batch_size,
                rule=run.rule if run.algorithm == "invariant" else "linear",
            )
        else:
            lr = torch.tensor(run.lr0, device=device) if gpu else run.lr0
            self.inner = torch.optim.Adam(model.parameters(), lr, BETAS, fused=True, capturable=gpu)
        self.resize(run.batch_sizes[0])

    def resize(self, batch: int) -> None:
        """Change the batch size of the updates to come."""
        run, inner = self.run, self.inner
        rho = batch / run.max_batch_size
        if isinstance(inner, ia.InvariantAdam):
            self.batch = batch
            if inner.samples_seen:
                inner.expect(batch / run.micro_batch_size)
            if run.algorithm == "adama":
                # v/κ in the place of v: η m/(√(v/κ) + ε) = √κη m/(√v + √κε)
                inner.param_groups[0]["eps"] = 1e-8 * math.sqrt(batch / run.micro_batch_size)
        else:
            self.batch = batch
            rule = "linear" if run.rule == "none" else run.rule
            betas = scale(0.0, BETAS, from_batch=run.max_batch_size, to_batch=batch, rule=rule).betas
            if run.algorithm == "halflife":
                betas = (BETAS[0], BETAS[1] ** rho)
            inner.param_groups[0]["betas"] = betas
        self.rate = math.nan

    def lr(self, factor: float = 1.0) -> float:
        """Return the learning rate of an update, in the words of the rule, times a warm-up's factor."""
        rho = self.batch / self.run.max_batch_size
        return self.run.lr0 * factor * {"square_root": math.sqrt(rho), "none": 1.0}.get(self.run.rule, rho)

    def set_lr(self, factor: float) -> None:
        """Set the learning rate of the next update to the rule's times `factor`."""
        if factor == self.rate:
            return  # on a GPU every change is a launch
        self.rate, group = factor, self.inner.param_groups[0]
        if self.run.algorithm == "adama":
            rho = self.batch / self.run.max_batch_size
            group["lr"] = self.lr(factor) / rho * math.sqrt(self.batch / self.run.micro_batch_size)
        elif isinstance(self.inner, ia.InvariantAdam):
            group["lr"] = self.run.lr0 * factor  # at B_max: it scales itself
        elif isinstance(group["lr"], Tensor):
            group["lr"].fill_(self.lr(factor))
        else:
            group["lr"] = self.lr(factor)


class Scored(nn.Module):
    """A model with its loss, so that a compiled graph holds both."""

    def __init__(self, model: nn.Module, smoothing: float) -> None:
        super().__init__()
        self.model, self.smoothing = model, smoothing

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean loss over samples x with answers y, and the logits."""
        logits = self.model(x)
        return loss_of(logits, y, self.smoothing), logits


class Update:
    """One update on buffers that stay where they are: take the next samples, forward, backward, step.

    All that changes from update to update is on the device, so that a CUDA graph of one call makes any of them.
    """

    def __init__(
        self,
        run: Run,
        model: nn.Module,
        optimizer: Optimizer,
        source: Source,
        epoch: Epoch,
        engine: str = "one-pass",
        compiled: bool = False,
    ) -> None:
        self.optimizer, self.source, self.epoch = optimizer, source, epoch
        self.net: nn.Module = Scored(model, TASKS[run.model].smoothing)
        if compiled:
            self.net = cast(nn.Module, torch.compile(self.net, dynamic=False))
        batch, M = optimizer.batch, run.micro_batch_size
        invariant = isinstance(optimizer.inner, ia.InvariantAdam)
        self.one_pass = M if invariant and batch > M and engine == "one-pass" else 0
        self.piece = M if (invariant or run.algorithm == "accumulate") and not self.one_pass else batch
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
        losses, logits = [], []
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
                logits.append(answers.detach())
        epoch.totals += torch.stack((torch.stack(losses).double().mean(), accuracy(torch.cat(logits), y)))
        inner.step()
        epoch.place += self.batch


class Epoch:
    """The samples of the epoch under way, where the next update begins, and sums over its updates."""

    def __init__(self, source: Source, run: Run, take: int) -> None:
        self.source, self.run, self.take = source, run, take
        self.samples = tuple(torch.empty_like(part) for part in source.epoch(run.seed, 0, run.samples, take))
        self.place = torch.zeros((), dtype=torch.int64, device=source.device)
        self.totals = torch.zeros(2, dtype=torch.float64, device=source.device)  # mean loss and share right, per update

    def begin(self, epoch: int) -> None:
        """Bring the samples of an epoch."""
        for here, there in zip(
            self.samples, self.source.epoch(self.run.seed, epoch, self.run.samples, self.take), strict=True
        ):
            here.copy_(there)
        self.place.zero_()
        self.totals.zero_()


FIRST = 3  # updates that `_captured` makes


def _captured(update: Update, prepare: Callable[[int], None], start: int) -> Callable[[], Any]:
    """Return the update as a CUDA graph, with the first three made: two as they are, one by the graph.

    Args:
        update: what is captured.
        prepare: called before each of the three with the sample it begins with, to set what the host has to.
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
    prepare(next(made))  # launches, where it sets a rate on the device: not a part of the graph
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        update()
    graph.replay()
    return graph.replay


# ---------------------------------------------------------------- the run


Row = dict[str, float]


def train(
    run: Run,
    source: Source,
    *,
    engine: str = "one-pass",
    graphs: bool = True,
    compiled: bool = False,
    on_epoch: Callable[[Row], None] = lambda row: None,
) -> Generator[None, None, list[Row]]:
    """Train; hand over after each update; return a row per epoch.

    On a GPU the caller makes the stream current on which the run shall work whenever it resumes it. Numbers of an epoch
    are read when they are there, without waiting for them.

    Args:
        run: settings.
        source: what `load` gave for the model.
        engine: "one-pass" or "loop", for updates of several micro-batches.
        graphs: make updates CUDA graphs on a GPU.
        compiled: compile the model.
        on_epoch: hears of each epoch when its numbers are known.
    """
    run = check(run)
    total = min(run.samples or source.count, source.count)
    take = total // run.max_batch_size * run.max_batch_size
    if not take:
        raise ValueError(
            f"{total} samples make no update of max_batch_size={run.max_batch_size}; use more samples or a smaller one"
        )
    gpu = source.device.type == "cuda"
    model = make_model(run, source)
    optimizer = Optimizer(run, model, source.device)
    warmup = warmup_cosine(run.warmup_samples, run.warmup_samples + 1, floor=1.0) if run.warmup_samples else None
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
            values = dict(
                zip(("train_loss", "train_accuracy", "test_loss", "test_accuracy"), numbers.tolist(), strict=True)
            )
            now = time.perf_counter()
            rows.append({**row, **values, "seconds": now - clock})
            clock = now
            on_epoch(rows[-1])

    for number in range(run.epochs):
        batch, made = run.batch_at(number), 0
        epoch_data.begin(number)
        if update is None or batch != optimizer.batch:
            optimizer.resize(batch)
            plain = update = Update(run, model, optimizer, source, epoch_data, engine, compiled)
            if gpu and graphs and take // batch >= FIRST:
                update, made = _captured(plain, prepare, number * take), FIRST
        for i in range(made, take // batch):
            prepare(number * take + i * batch)
            update()
            read()
            if gpu:
                running.append(_event())
                while len(running) > AHEAD and not running[0].query():
                    yield
                    read()
                if len(running) > AHEAD:
                    running.popleft()
            yield
        numbers = torch.cat((epoch_data.totals / (take // batch), evaluate(model, source)))
        if gpu:
            numbers = torch.empty(4, dtype=numbers.dtype, pin_memory=True).copy_(numbers, non_blocking=True)
        lr = optimizer.lr(optimizer.rate)
        waiting.append(
            (_event() if gpu else None, numbers, {"epoch": number + 1, "samples": (number + 1) * take, "lr": lr})
        )
    while waiting:
        read(wait=not gpu)
        yield
    return rows


def _event() -> Any:
    event = torch.cuda.Event()
    event.record()
    return event


@torch.no_grad()
def evaluate(model: nn.Module, source: Source) -> Tensor:
    """Return mean loss and share of right answers on the test set, on the device."""
    totals = torch.zeros(2, dtype=torch.float64, device=source.device)
    count = 0
    model.eval()
    with source.autocast():
        for samples in source.test():
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
        works: what to call a run, and the run; asked for the next one whenever a place is free.
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

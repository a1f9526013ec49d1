"""Make the runs of a grid: several at once in a process, in one process or in many."""

from __future__ import annotations

import multiprocessing
import queue
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from ..bench import timing
from ..training import data, tokens, train
from ..training.runs import RECIPES, SMALL_VOCABULARY, Run
from ..training.source import Source, load
from ..training.train import Row
from . import store
from .cost import Pace, cost, costs, estimate
from .grid import MADE_UP_IMAGES, Grid
from .store import Setup, finished, run_id

Tell = Callable[[str, Run, Any], None]  # ("epoch" | "done" | "skipped" | "error" | "note", run, row or text)


def made_up(model: str) -> data.Images | data.Text:
    """Return data for a model that needs no download."""
    if RECIPES[model].dataset == "cifar10":
        return data.synthetic(MADE_UP_IMAGES, MADE_UP_IMAGES // 2)
    words = ["batch", "size", "of", "one", "and", "then", "another", "moment"]
    if RECIPES[model].vocabulary:  # more of it, as a token is a word or more
        text = " ".join(words[(i * i + i // 3) % 8] for i in range(6_000))
        return tokens.encode([text], SMALL_VOCABULARY)
    return data.encode(" ".join(words[(i * i + i // 3) % 8] for i in range(1_500)))


def prepare(grid: Grid, setup: Setup, tell: data.Tell = lambda text: None) -> data.Images | data.Text:
    """Find the dataset of a grid before any run begins, and refuse a grid that needs more samples.

    Args:
        grid: its runs share their number of samples and their largest batch size.
        setup: where the dataset is.
        tell: is told where it is looked for.
    """
    found = _find(grid.model, setup, tell)
    count = load(grid.model, torch.device("cpu"), small=setup.small, found=found).count
    run = grid.runs[0]
    if run.samples > count:
        if RECIPES[grid.model].once:
            each = f"{count // run.epochs:,}, so that its {run.epochs} epochs share no sample of"
            raise ValueError(f"samples must be at most {each} the {count:,} there are, got {run.samples // run.epochs}")
        raise ValueError(f"samples must be at most the {count:,} of the training set, got {run.samples}")
    part = "" if not RECIPES[grid.model].once else f" of each of epochs={run.epochs}"
    count //= run.epochs if part else 1
    if run.max_batch_size > count:
        raise ValueError(
            f"max_batch_size must be at most the {count:,} training samples{part}, got {run.max_batch_size}"
        )
    return found


def _find(model: str, setup: Setup, tell: data.Tell = lambda text: None) -> data.Images | data.Text:
    if setup.made_up:
        return made_up(model)
    if RECIPES[model].dataset == "cifar10":
        return data.cifar10(setup.path, tell)[0]
    if RECIPES[model].vocabulary:
        if setup.path is None:
            raise data.DataError(f"{model} trains on a text of your own; name a file or a folder by --data")
        return tokens.tokens(setup.path, SMALL_VOCABULARY if setup.small else RECIPES[model].vocabulary, tell)
    return data.tinyshakespeare(tell=tell)[0] if setup.path is None else data.text(setup.path)


def serve(setup: Setup, runs: Iterable[Run], tell: Tell, found: data.Images | data.Text | None = None) -> None:
    """Make runs in this process, several at once, and write each when it is finished.

    Args:
        setup: how.
        runs: in the order in which they are begun.
        tell: is told of epochs and ends.
        found: what `prepare` found; None: it is looked for.
    """
    device = torch.device(setup.device)
    sources: dict[str, Source] = {}
    known, _ = costs(setup.out, setup.device, setup.small)
    writers = _Logs(setup)
    at_once = setup.lanes * setup.workers
    pace = Pace(2 * setup.lanes)
    begun: dict[Run, tuple[float, float, list[int]]] = {}  # when, the estimate, and the lanes in use at each epoch

    def works() -> Iterator[tuple[Run, Any]]:
        for run in runs:
            estimated = (estimate(run, known) or 0.0) * at_once
            needed = pace.needs(estimated)
            if setup.deadline is not None and time.time() + needed > setup.deadline:
                why = "the budget is spent"
                if needed:
                    times = f", {pace.factor:.1f} times its estimate" * (pace.factor > 1.0)
                    why = f"it would need about {max(needed, 1):.0f} s{times}"
                tell("skipped", run, why)
                continue
            if run.model not in sources:
                samples = _find(run.model, setup) if found is None else found
                sources[run.model] = load(
                    run.model, device, small=setup.small, found=samples, precision=setup.precision
                )
            log = writers.open(run)
            begun[run] = time.time(), estimated, []

            def on_epoch(row: Row, run: Run = run, log: Callable[[Row], None] = log) -> None:
                log(row)
                begun[run][-1].append(len(begun))
                tell("epoch", run, row)

            source, engine, graphs = sources[run.model], setup.engine, setup.graphs
            yield (
                run,
                train.train(run, source, engine=engine, graphs=graphs, compiled=setup.compiled, on_epoch=on_epoch),
            )

    fast = timing.fast_math() if device.type == "cuda" else nullcontext()
    with fast, timing.many_graphs() if setup.compiled else nullcontext():
        for run, outcome in train.lanes(works(), setup.lanes, device):
            writers.close(run)
            start, estimated, counts = begun.pop(run)
            if isinstance(outcome, Exception):
                tell("error", run, f"{type(outcome).__name__}: {outcome}")
                continue
            lanes = sorted(counts)[len(counts) // 2]
            store.save(run, outcome, setup, lanes)
            pace.took(time.time() - start, estimated)
            least = cost(outcome, lanes * setup.workers) / pace.factor
            known.setdefault((run.model, run.algorithm, run.batch_size), least)
            tell("done", run, outcome[-1])


class _Logs:
    """TensorBoard's files of the runs under way, where it is installed and asked for."""

    def __init__(self, setup: Setup) -> None:
        self.setup, self.writers = setup, dict[Run, Any]()

    def open(self, run: Run) -> Callable[[Row], None]:
        if not self.setup.tensorboard:
            return lambda row: None
        from torch.utils.tensorboard import SummaryWriter

        folder = self.setup.folder / "tensorboard" / run_id(run, self.setup)
        shutil.rmtree(folder, ignore_errors=True)  # of a stopped run: its curve would be drawn twice
        writer = self.writers[run] = SummaryWriter(str(folder))

        def log(row: Row) -> None:
            for key, value in row.items():
                if key not in ("epoch", "samples"):
                    writer.add_scalar(key, value, int(row["samples"]))

        return log

    def close(self, run: Run) -> None:
        writer = self.writers.pop(run, None)
        if writer is not None:
            writer.close()


def make(runs: list[Run], setup: Setup, tell: Tell, found: data.Images | data.Text | None = None) -> None:
    """Make the runs that are not finished, in this process or in several.

    Args:
        runs: in the order in which they are begun.
        setup: how.
        tell: is told of epochs and ends, in this process.
        found: what `prepare` found, so that one process need not look again.
    """
    todo = [run for run in runs if finished(run, setup) is None]
    if setup.workers == 1 or len(todo) <= 1:
        threads = torch.get_num_threads()
        if setup.small:
            torch.set_num_threads(1)  # layers this small are faster on one thread
        try:
            serve(setup, todo, tell, found)
        finally:
            torch.set_num_threads(threads)
        return
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    tasks, messages = context.Queue(), context.Queue()
    count = min(setup.workers, len(todo))
    for run in [*todo, *[None] * count]:
        tasks.put(run)
    threads = 1 if setup.small else max(1, torch.get_num_threads() // count)
    processes = [
        context.Process(target=_worker, args=(setup, threads, tasks, messages), daemon=True) for _ in range(count)
    ]
    try:
        with _ignoring_interrupts():
            for process in processes:
                process.start()
        alive = count
        while alive:
            try:
                kind, run, what = messages.get(timeout=1.0)
            except queue.Empty:
                if not any(process.is_alive() for process in processes):
                    raise RuntimeError(
                        f"{alive} of {count} worker processes ended without a word, exit codes "
                        f"{[process.exitcode for process in processes]}; finished runs are kept, and the same command "
                        "goes on with the rest"
                    ) from None
                continue
            if kind == "end":
                alive -= 1
            else:
                tell(kind, run, what)
    finally:
        for process in processes:
            if process.is_alive():
                process.join(timeout=5.0 if alive == 0 else 0.0)
            if process.is_alive():
                process.terminate()


@contextmanager
def _ignoring_interrupts() -> Iterator[None]:
    """Ignore Ctrl-C, here and in the processes that are started here, which their parent ends."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread handles signals
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _worker(setup: Setup, threads: int, tasks: Any, messages: Any) -> None:
    torch.set_num_threads(threads)
    try:
        serve(setup, iter(tasks.get, None), lambda kind, run, what: messages.put((kind, run, what)))
    except Exception as error:
        messages.put(("error", None, f"{type(error).__name__}: {error}"))
    finally:
        messages.put(("end", None, None))
        messages.close()
        messages.join_thread()

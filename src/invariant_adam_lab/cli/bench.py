"""The commands `bench ...`: speed and memory on this machine."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from .console import fail, fail_to_write, help_of, new_table, print_json, stderr, stdout, stop
from .options import InPrecision, Json, Precision, Where, device_of, numbers, precision_of, words

if TYPE_CHECKING:
    from ..bench.one_pass import Case
    from ..record import Rows

app = typer.Typer(no_args_is_help=True, help="Measure speed and memory on this machine.")
Out = Annotated[Path | None, typer.Option(help="Where the rows go; those it has already are not measured again.")]
Rounds = Annotated[int, typer.Option(min=1, help="How often each is timed; the median counts.")]
Models = Annotated[
    list[str] | None,
    typer.Option("--model", help="A name below, timm:NAME, hf:TYPE or MODULE:FUNCTION; may be repeated."),
]
Batch = Annotated[int | None, typer.Option(min=1, help="Samples in the mini-batch; by default the model's own.")]
MicroBatches = Annotated[
    list[int] | None, typer.Option("--micro-batch", min=1, help="Samples in a micro-batch; may be repeated.")
]
Compiled = Annotated[bool | None, typer.Option("--compile/--eager", help="By default compiled on a GPU.")]
Graph = Annotated[bool, typer.Option("--graph", help="Capture each update, plain ones too, in a CUDA graph.")]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change the model: depth=2, tied=true; may be repeated."),
]


def bench_one_pass(
    model: Models = None,
    batch: Batch = None,
    micro_batch: MicroBatches = None,
    methods: Annotated[
        str, typer.Option(help="Some of plain, accumulate, loop, one-pass, into, with commas.")
    ] = "plain,loop,one-pass,into",
    compiled: Compiled = None,
    graph: Graph = False,
    mode: Annotated[
        str | None, typer.Option(help='With --compile: the mode of torch.compile, as "reduce-overhead".')
    ] = None,
    precision: InPrecision = None,
    options: Sets = None,
    device: Where = None,
    rounds: Rounds = 10,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Time a training step of each method over one plain pass with fused AdamW.

    Forward, backward and optimizer on random data; the methods alternate with plain passes. Each row is written when
    it is measured: stopped and started again, the command goes on where it was.

    Models: gpt2-124m, gpt2-350m, gpt-char, vit-b16, vit-cifar, resnet18 (for 32×32), resnet18-224, resnet50.

    Yours: timm:convnext_tiny, a model of timm. hf:gpt2, the default config of a model_type of transformers; change it
    as in hf:gpt2?n_layer=2&tokens=64. MODULE:FUNCTION, a function of your own, which returns (model, make_batch), where
    make_batch(samples) is a tuple or dict of tensors and model(batch) the mean loss or an output with .loss; or (model,
    loss_fn, (x, y)), where loss_fn(model(x), y) is the mean loss. Weights are random; nothing is downloaded.

    Below the table stands what limits each method, and which operations take longer than in a plain pass.

    Example: [cyan]invariant-adam bench one-pass --model timm:convnext_tiny --batch 128 --micro-batch 8[/cyan]
    """
    from ..bench import one_pass as bench

    where = device_of(device)
    try:
        chosen = bench.check_methods(words(methods))
        wanted = _cases(model, batch, micro_batch, compiled, precision, options, where, graph, mode)
    except ValueError as error:
        fail(error)
    rows = _rows(out, "one-pass", where, "a training step over one plain pass with torch.optim.AdamW(fused=True)")
    todo = bench.jobs(wanted, chosen, rows)
    _bench(rows, len(todo), lambda tell: bench.measure(todo, rows, rounds=rounds, tell=tell), bench, as_json)


def bench_step(
    tensors: Annotated[
        list[str] | None,
        typer.Option(help="A model's name, or a number of tensors times their size, as 100x1e7; may be repeated."),
    ] = None,
    work: Annotated[
        str | None, typer.Option(help="Some of kernels, alone, handed, net, with commas; by default all on the CPU.")
    ] = None,
    kappa: Annotated[list[int] | None, typer.Option(min=1, help="Micro-batches in an update; may be repeated.")] = None,
    device: Where = None,
    rounds: Rounds = 15,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Time the optimizer alone: folding and stepping over fused AdamW and over a copy.

    By default on a GPU GPT-2 124M's 148 tensors and 10⁹ parameters in 100, one micro-batch per update; on the CPU 10⁷
    parameters in 100 tensors, 1, 4 and 16 micro-batches.

    Example: [cyan]invariant-adam bench step --tensors resnet50 --kappa 8[/cyan]
    """
    from ..bench import step as bench

    where = device_of(device)
    gpu = where == "cuda"
    names = tensors or (["gpt2-124m", "100x1e7"] if gpu else ["100x99856"])
    works = words(work or ("kernels,alone" if gpu else "kernels,alone,handed,net"))
    try:
        bench.check(names, works)
    except ValueError as error:
        fail(error)
    rows = _rows(out, "step", where, "fold and step over torch.optim.AdamW(fused=True)")
    todo = bench.jobs(names, works, kappa or ([1] if gpu else [1, 4, 16]), rows)
    number = bench.number_of_rows(todo)
    _bench(rows, number, lambda tell: bench.measure(todo, rows, device=where, rounds=rounds, tell=tell), bench, as_json)


def bench_memory(
    model: Models = None,
    batch: Batch = None,
    micro_batch: MicroBatches = None,
    methods: Annotated[
        str, typer.Option(help="Some of plain, accumulate, loop, one-pass, into, with commas.")
    ] = "plain,accumulate,loop,one-pass,into",
    compiled: Compiled = False,
    precision: InPrecision = None,
    options: Sets = None,
    device: Where = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Count the bytes of an update by each method: state and gradients, and everything at the peak.

    "plain" is AdamW over the whole mini-batch, "accumulate" AdamW over a loop of micro-batches.

    Example: [cyan]invariant-adam bench memory --model gpt-char --batch 8[/cyan]
    """
    from ..bench import memory as bench
    from ..bench.one_pass import check_methods, jobs

    where = device_of(device)
    try:
        chosen = check_methods(words(methods))
        wanted = _cases(model, batch, micro_batch, compiled, precision, options, where)
    except ValueError as error:
        fail(error)
    rows = _rows(out, "memory", where, "memory of an update")
    todo = jobs(wanted, chosen, rows)
    _bench(rows, len(todo), lambda tell: bench.measure(todo, rows, tell=tell), bench, as_json)


def bench_peers(
    rounds: Rounds = 11,
    nets: Annotated[str, typer.Option(help="Which nets, with commas.")] = "mlp,cnn,gpt",
    memory: Annotated[bool, typer.Option(help="Also measure peak memory, each cell in a fresh process.")] = True,
    out: Annotated[Path, typer.Option(help="Where the result goes.")] = Path("runs/bench/peers-cpu.json"),
    as_json: Json = False,
) -> None:
    """Compare one pass with the loop, BackPACK, Opacus and vmap(grad) on the CPU.

    Three small nets, M = 1, 4, 16: time over a plain forward and backward, growth of the peak memory, and whether the
    squares equal the loop's. Rivals that are not installed are left out.

    Example: [cyan]invariant-adam bench peers --nets mlp --rounds 5[/cyan]
    """
    from .. import record
    from ..bench import peers as bench

    chosen = tuple(words(nets))
    if not chosen or not set(chosen) <= set(bench.NETS):
        fail(f"--nets must be some of {', '.join(bench.NETS)}, got {nets!r}")

    try:
        with _Lines(bench.number_of_cells(chosen)) as lines:
            result = bench.run(rounds, memory, chosen, lines.begin, lines.finish)
        record.write_json(out, result)
    except KeyboardInterrupt:
        stop("; nothing was written.")
    except OSError as error:
        fail_to_write(out, error, "file")
    if as_json:
        print_json(result)
        return
    for net in chosen:
        what = "time over a plain forward and backward" + " / growth of the peak, MB" * memory
        stdout.print(f"[bold]{net}[/bold]: {what}")
        table = new_table()
        for i, head in enumerate(("", *(f"M = {M}" for M in bench.MICRO))):
            table.add_column(head, justify="right" if i else "left", no_wrap=True)
        for method in bench.METHODS:
            table.add_row(method, *(bench.cell(result, net, M, method) for M in bench.MICRO))
        stdout.print(table)
    stdout.print(f"wrote {out}", markup=False, soft_wrap=True)


class _Lines:
    """Draw a benchmark's progress: a bar that names what is being measured, and a line for each row that is done."""

    def __init__(self, work: int) -> None:
        columns = BarColumn(20), MofNCompleteColumn(), TextColumn("{task.description}", markup=False)
        self.bar = Progress(*columns, console=stderr, transient=True)
        self.task = self.bar.add_task("", total=work)

    def __enter__(self) -> _Lines:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def begin(self, text: str) -> None:
        self.bar.update(self.task, description=text)

    def finish(self, line: str) -> None:
        self.bar.advance(self.task)
        done = self.bar.tasks[0]
        self.bar.console.print(f"[{done.completed:.0f}/{done.total:.0f}] {line}", markup=False, soft_wrap=True)


def labelled(head: tuple[str, ...], cells: tuple[str, ...]) -> str:
    """Write a row of a table in a line, each number after its name.

    >>> labelled(("method", "M", "ms", "peak GiB"), ("loop", "2", "1.50", ""))
    'loop, M 2, ms 1.50'
    """
    named = [f"{name} {cell}" for name, cell in zip(head[1:], cells[1:], strict=False) if cell]
    return ", ".join([cells[0], *named])


def bench_rivals(
    batch_sizes: Annotated[
        str, typer.Option(help="Batch sizes, with commas; the smallest is the micro-batch.")
    ] = "8,32,128",
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the digits at each batch size.")] = 10,
    lr: Annotated[float, typer.Option(help="Learning rate at the smallest batch size.")] = 2e-4,
    rounds: Rounds = 15,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Compare ours with AdamW, optimi and AdamA: spread, step time, memory.

    Each trains the demo's network on digits at several batch sizes, from the same hyperparameters at the smallest, and
    scales as its users do. An update of 8 micro-batches of a wider net is timed on the CPU, and the bytes of state and
    gradients are counted. optimi is a package of its own: pip install torch-optimi.

    Example: [cyan]invariant-adam bench rivals --batch-sizes 16,128 --epochs 5[/cyan]
    """
    from ..bench import rivals as bench
    from ..demo import Settings, check

    try:
        sizes = check(Settings(numbers("--batch-sizes", batch_sizes, int) or (), lr, epochs)).batch_sizes
    except ValueError as error:
        fail(error)
    rows = _rows(out, "rivals", "cpu", "optimizers over batch sizes")
    shared = bench.settings_of(sizes, epochs, lr, rounds)
    todo = bench.jobs(shared, rows)
    _bench(rows, len(todo), lambda tell: bench.measure(todo, shared, rows, tell=tell), bench, as_json)


for _name, _command in (
    ("one-pass", bench_one_pass),
    ("step", bench_step),
    ("memory", bench_memory),
    ("peers", bench_peers),
    ("rivals", bench_rivals),
):
    app.command(_name, help=help_of(_command))(_command)


def _cases(
    models: list[str] | None,
    batch: int | None,
    micro_batches: list[int] | None,
    compiled: bool | None,
    precision: Precision | None,
    options: list[str] | None,
    device: str,
    graph: bool = False,
    mode: str | None = None,
) -> list[Case]:
    from ..bench.one_pass import USUAL, cases
    from ..bench.subjects import parse

    gpu = device == "cuda"
    common = dict(_option(text) for text in options or ())
    found = []
    for name in models or USUAL[device]:
        model, own = parse(name)
        found += cases(
            [model],
            batch=batch,
            micro_batches=micro_batches,
            device=device,
            precision=precision_of(precision, device),
            compiled=gpu if compiled is None else compiled,
            options={**common, **dict(_option(f"{key}={value}") for key, value in own.items())},
            graph=graph,
            mode=mode,
        )
    return found


def _option(text: str) -> tuple[str, Any]:
    """Read KEY=VALUE: a number, numbers with commas, true, false or a word."""
    key, equals, value = text.partition("=")
    if not equals or not key.isidentifier() or not value:
        raise ValueError(f"--set takes KEY=VALUE, such as depth=2, got {text!r}")
    if value in ("true", "false"):
        return key, value == "true"
    try:
        return key, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return key, value


def _explain(bench: ModuleType, rows: list[dict[str, Any]]) -> None:
    """Print what limits each row, where the benchmark knows."""
    if not hasattr(bench, "remarks"):
        return
    for text, operations in bench.remarks(rows):
        stdout.print(text, markup=False)
        if operations:
            table = new_table()
            for i, head in enumerate(bench.where.HEAD):
                table.add_column(head, justify="right" if i else "left", no_wrap=True)
            for cells in operations:
                table.add_row(*cells)
            stdout.print(table)


def _rows(out: Path | None, command: str, device: str, benchmark: str) -> Rows:
    import torch

    from ..record import Rows

    try:
        path = out or Path(f"runs/bench/{command}-{device}.json")
        return Rows(path, f"invariant-adam bench {command}", benchmark, torch.device(device))
    except ValueError as error:
        fail(error)


def _bench(
    rows: Rows,
    work: int,
    measure: Callable[[Callable[[str], None]], Iterator[dict[str, Any]]],
    bench: ModuleType,
    as_json: bool,
) -> NoReturn:
    """Measure with a progress bar, print all rows of the file; exit code 1 when a new one is an error."""
    kept, failed = len(rows.rows), 0
    try:
        with _Lines(work) as lines:
            for row in measure(lines.begin):
                failed += "error" in row and not row["error"].startswith("not installed")
                lines.finish(f"{bench.title(row)}: {row.get('error') or labelled(bench.HEAD, bench.cells(row))}")
    except KeyboardInterrupt:
        stop(f". {len(rows.rows)} rows are in {rows.path}; the same command goes on from there.")
    except OSError as error:
        fail_to_write(rows.path, error, "file")
    if as_json:
        print_json(rows.result())
    else:
        stdout.print(f"[bold]{rows.head['benchmark']}[/bold], {rows.head['device']}", soft_wrap=True)
        for name in dict.fromkeys(map(bench.title, rows.rows)):
            stdout.print(name, style="italic", markup=False, soft_wrap=True)
            table = new_table()
            for i, head in enumerate(bench.HEAD):
                table.add_column(head, justify="right" if i else "left", no_wrap=True)
            group = [row for row in rows.rows if bench.title(row) == name]
            for row in group:
                table.add_row(*bench.cells(row))
            stdout.print(table)
            for row in (row for row in group if "error" in row):
                stdout.print(f"{row['method']}: {row['error']}", markup=False, soft_wrap=True)
            _explain(bench, group)
        stdout.print(f"{len(rows.new)} measured, {kept} found; wrote {rows.path}", markup=False, soft_wrap=True)
    raise typer.Exit(1 if failed else 0)

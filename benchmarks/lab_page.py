"""docs/results.md from the lab's results: tables in blocks that are filled again, words around them that stay.

A block of an experiment that has no results yet is empty, heading and all. The page comes with the first results.
"""

import math
import statistics
from pathlib import Path

from invariant_adam.lab import record
from invariant_adam.lab import results as lab
from invariant_adam.lab.results import METRICS, MODELS, rate

FIGURES = Path("docs/figures/lab")
SECONDS = Path("benchmarks/results/lab_seconds_h200.json")
TEMPLATE = """# Results

Does the trajectory depend on the batch size? The paper's experiments, run by [the lab](lab.md), and the questions that
they leave open. The measure is the *spread*: the mean over epochs of the largest minus the smallest log training loss
over the batch sizes. A spread of 0.01 is a difference of 1 % in the loss. It is taken within a seed, where every batch
size sees the same samples, augmented alike, in the same order, and then averaged over seeds. *Ratio* is the spread of
standard Adam with η ∝ √B over that of the row, over the same batch sizes, seeds and epochs. η₀ is the learning rate at
the largest batch size.

<!-- sources -->
<!-- /sources -->

<!-- spreads -->
<!-- /spreads -->

<!-- critical -->
<!-- /critical -->

<!-- warmup -->
<!-- /warmup -->

<!-- rivals -->
<!-- /rivals -->

<!-- tuned -->
<!-- /tuned -->

<!-- rules -->
<!-- /rules -->

<!-- micro -->
<!-- /micro -->

<!-- ramp -->
<!-- /ramp -->

<!-- norm -->
<!-- /norm -->

<!-- seconds -->
<!-- /seconds -->

<!-- remarks -->
<!-- /remarks -->
"""


def blocks(root, folder):
    """The blocks of the page by name, each a function that yields its lines."""
    found = lab.load(folder)
    rows = lab.spreads(found)
    plain, first, paper, pair = _chosen(found, rows)
    figure = _Figures(root, found)
    return {
        "sources": lambda: sources(found),
        "spreads": lambda: spread_rows(pair, figure),
        "critical": lambda: critical_rows(found, rows, figure),
        "warmup": lambda: warmup_rows(found, rows),
        "rivals": lambda: rival_rows(found, paper, figure),
        "tuned": lambda: tuned_rows(found, figure),
        "rules": lambda: rule_rows(plain, first),
        "micro": lambda: micro_rows(found, plain),
        "ramp": lambda: ramp_rows(found, figure),
        "norm": lambda: norm_rows(found, paper),
        "seconds": lambda: second_rows(found, record.read_json(root / SECONDS)),
        "remarks": lambda: remark_rows(found),
    }


def _chosen(found, rows):
    """What differs from the paper's comparison in one thing alone: rows without a warm-up, M of each model, those of
    that M, and of them the paper's own."""
    plain = [row for row in rows if not row.series.warmup_samples]
    first = {model: min((s.micro_batch_size for s in _ours(found, model)), default=0) for model in found.models}
    paper = [row for row in plain if row.series.algorithm != "invariant" or _is_paper(row.series, first[row.model])]
    return plain, first, paper, [r for r in paper if r.series.algorithm == "invariant" or r.series == r.series.rival]


def summary(folder):
    """The paper's comparison in a few lines, for the README."""
    found = lab.load(folder)
    more = ", and a GPT on Shakespeare" if "gpt" in found.models else ""
    yield f"The paper's experiments on CIFAR-10{more}: the same samples in the same order at every batch size."
    yield "How far apart the training curves are, as the log of the loss (mean over epochs of the largest difference)."
    lacking = sum(len(grid.get("missing", ())) for grid in found.grids.values())
    if lacking:
        yield f"{lacking} runs of these grids are still to be made; where batch sizes are missing, the cell says so."
    yield ""
    yield from spread_table(_chosen(found, lab.spreads(found))[-1])
    yield ""
    yield f"![the spread over batch sizes against the learning rate]({FIGURES.as_posix()}/spread.png)"


class _Figures:
    """Links to the figures that are kept."""

    def __init__(self, root, found):
        self.root, self.models = root, found.models

    def each(self, part, text):
        for model in self.models:
            yield from self.one(f"{model}-{part}", f"{MODELS.get(model, model)}: {text}")

    def one(self, name, text):
        if (self.root / FIGURES / f"{name}.png").exists():
            yield ""
            yield f"![{text}]({FIGURES.relative_to('docs').as_posix()}/{name}.png)"


def _ours(found, model):
    return [series for series in found.series(model) if series.algorithm == "invariant"]


def _is_paper(series, micro):
    return series.rule == "linear" and series.micro_batch_size == micro


def table(head, rows):
    yield "| " + " | ".join(head) + " |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield "| " + " | ".join(row) + " |"


def say(value, form=".2g"):
    return "" if math.isnan(value) else "∞" if math.isinf(value) else format(value, form)


def title(model):
    return MODELS.get(model, model)


def sizes(row):
    return "–".join(map(str, (row.spread.batch_sizes[0], row.spread.batch_sizes[-1])))


def sources(found):
    head = ("grid", "commands", "device", "torch", "date", "runs")
    rows = []
    for name, grid in found.grids.items():
        device = ", ".join(grid.get("devices", [])) or grid.get("machine", "")
        runs = f"{grid['finished']} of {grid['runs']}" if "finished" in grid else ""
        commands = "<br>".join(f"`{command}`" for command in grid.get("commands", ()))
        rows.append((name, commands, device, grid.get("torch", ""), str(grid.get("date", ""))[:10], runs))
    yield from table(head, rows)
    yield ""
    yield "Figures: `invariant-adam figures benchmarks/results/lab --out docs/figures/lab`, which also writes an"
    yield "interactive page."


def spread_rows(pair, figure):
    if not pair:
        return
    yield "## The trajectories"
    yield ""
    yield from spread_table(pair)
    yield from figure.each("curves", "losses and accuracies over epochs, invariant Adam beside standard Adam")
    yield from figure.each("batch-size", "training loss after the same samples against the batch size")


def spread_table(pair):
    yield "Spread of invariant Adam (η ∝ B), of standard Adam (η ∝ √B), and their ratio:"
    yield ""
    rates = sorted({row.lr0 for row in pair})
    rows = []
    for model in dict.fromkeys(row.model for row in pair):
        ours = {row.lr0: row for row in pair if (row.model, row.series.algorithm) == (model, "invariant")}
        theirs = {row.lr0: row for row in pair if (row.model, row.series.algorithm) == (model, "standard")}
        widest = max([*ours.values(), *theirs.values()], key=lambda row: len(row.spread.batch_sizes))
        cells = [f"{title(model)}, B = {sizes(widest)}, {widest.spread.epochs} epochs"]
        for lr0 in rates:
            sides = [side[lr0] for side in (ours, theirs) if lr0 in side]
            text = ", ".join(filter(None, (say(row.spread.value) for row in sides)))
            ratio = say(ours[lr0].ratio, ".0f") if lr0 in ours else ""
            fewer = [row for row in sides if text and sizes(row) != sizes(widest)]
            names = "" if len(fewer) == 2 and len({sizes(row) for row in fewer}) == 1 else "{}: "
            text += f": **{ratio}**" * bool(ratio)
            said = dict.fromkeys(f"{names.format(row.series.algorithm)}B = {sizes(row)}" for row in fewer)
            cells.append(text + (f" ({', '.join(said)})" if said else ""))
        rows.append(cells)
    yield from table(("", *(f"η₀ = {rate(lr0)}" for lr0 in rates)), rows)


def critical_rows(found, rows, figure):
    ranges = [r for r in lab.ranges(rows) if r.series.algorithm == "invariant"]
    if not ranges:
        return
    yield "## Where it breaks"
    yield ""
    yield f"Of the learning rates tried, the largest up to which no spread exceeds {lab.TOLERANCE:g}, and the smallest"
    yield "at which one does:"
    yield ""
    cells = [
        (title(r.model), found.label(r.model, r.series), *("none" if x is None else rate(x) for x in r[2:]))
        for r in ranges
    ]
    yield from table(("model", "optimizer", "holds up to η₀", "breaks at η₀"), cells)
    yield from figure.one("spread", "spread over batch sizes against the learning rate")


def warmup_rows(found, rows):
    cells = []
    for row in rows:
        cold = row.series._replace(warmup_samples=0)
        before = [r for r in rows if (r.model, r.series, r.lr0) == (row.model, cold, row.lr0)]
        if row.series.warmup_samples and before and not math.isnan(row.spread.value):
            label = f"{lab.NAMES[row.series.algorithm]}, {row.series.law}"
            values = (say(before[0].spread.value), say(row.spread.value), say(row.ratio, ".0f"))
            cells.append((title(row.model), label, rate(row.lr0), f"{row.series.warmup_samples:,}", *values))
    if cells:
        yield "## A warm-up in samples"
        yield ""
        yield from table(("model", "optimizer", "η₀", "samples", "spread without", "spread with", "ratio with"), cells)


RIVALS = (("standard", "linear"), ("adama", "square_root"), ("adama", "linear"), ("halflife", "none"))


def rival_rows(found, paper, figure):
    shown = [row for row in paper if not math.isnan(row.spread.value) and row.series.algorithm != "accumulate"]
    having = {row.model for row in shown if row.series[:2] in RIVALS}
    shown = [row for row in shown if row.model in having]
    if not shown:
        return
    yield "## The rivals"
    yield ""
    rates = sorted({row.lr0 for row in shown})
    cells = []
    for model, series in dict.fromkeys((row.model, row.series) for row in shown):
        values = {row.lr0: say(row.spread.value) for row in shown if (row.model, row.series) == (model, series)}
        cells.append((title(model), found.label(model, series), *(values.get(lr0, "") for lr0 in rates)))
    yield from table(("model", "optimizer", *(f"spread, η₀ = {rate(lr0)}" for lr0 in rates)), cells)
    yield from figure.each("all", "training loss and test accuracy of every optimizer")


def tuned_rows(found, figure):
    tables = []
    for model in found.models:
        by_metric = {m: lab.best(found, model, m) for m in ("train_loss", "test_accuracy")}
        if not any(row.tried > 2 for row in by_metric["train_loss"]):
            continue
        every = sorted({row.batch_size for rows in by_metric.values() for row in rows})
        cells = []
        for series in (s for s in found.series(model) if not s.warmup_samples):
            for metric, rows in by_metric.items():
                values = {row.batch_size: row for row in rows if row.series == series}
                if values:
                    texts = (_best(values[size], metric) if size in values else "" for size in every)
                    cells.append((found.label(model, series), METRICS[metric], *texts))
        tables.append((title(model), ("optimizer", "", *(f"B = {size}" for size in every)), cells))
    if not tables:
        return
    yield "## (a) At its best learning rate"
    yield ""
    yield "What each optimizer reaches at each batch size with the best of the learning rates tried at all of them,"
    yield "after the same samples, and that learning rate. In italics where it is the smallest or largest tried: a"
    yield "better one may lie beyond."
    for name, head, cells in tables:
        yield ""
        yield f"{name}:"
        yield ""
        yield from table(head, cells)
    yield from figure.each("best", "what the best learning rate reaches at each batch size")


def _best(row, metric):
    text = f"{row.value:.1%}".replace("%", " %") if metric.endswith("accuracy") else f"{row.value:.4g}"
    text = f"{text} ({rate(row.lr0)})"
    return f"*{text}*" if row.at_edge else text


def rule_rows(plain, first):
    cells = []
    for row in plain:
        s = row.series
        if (s.algorithm, s.rule, s.micro_batch_size) == ("invariant", "exponential", first[row.model]):
            other = [r for r in plain if (r.model, r.series, r.lr0) == (row.model, s._replace(rule="linear"), row.lr0)]
            if other:
                values = (say(other[0].spread.value), say(row.spread.value))
                cells.append((title(row.model), rate(row.lr0), *values))
    if cells:
        yield "## (b) The linear or the exponential rule"
        yield ""
        yield from table(("model", "η₀", "spread, linear", "spread, exponential"), cells)


def micro_rows(found, plain):
    cells = []
    for model in found.models:
        ours = [s for s in _ours(found, model) if s.rule == "linear" and not s.warmup_samples]
        if len({s.micro_batch_size for s in ours}) < 2:
            continue
        for series in ours:
            runs = found.group(model, series)
            samples = lab.fixed_samples(r for r in found.runs if r.model == model and not r.ramp)
            largest = max(run.batch_size for run in runs)
            for lr0 in sorted({run.lr0 for run in runs}):
                seeds = [run for run in runs if (run.lr0, run.batch_size) == (lr0, largest)]
                if not seeds:
                    continue
                row = next(r for r in plain if (r.model, r.series, r.lr0) == (model, series, lr0))
                values = [lab.at_samples(seeds, metric, samples) for metric in ("train_loss", "test_accuracy")]
                texts = (say(row.spread.value), str(largest), say(values[0], ".4g"), say(values[1], ".3f"))
                cells.append((title(model), str(series.micro_batch_size), rate(lr0), *texts))
    if cells:
        yield "## (c) What M does"
        yield ""
        yield from table(("model", "M", "η₀", "spread", "at B =", "training loss", "test accuracy"), cells)


def ramp_rows(found, figure):
    cells = []
    for model in found.models:
        for (series, lr0, ramp), runs in found.ramps(model).items():
            constant = lab.by_batch_size(found.group(model, series, lr0))
            ends = [size for size in map(int, ramp.split("-")) if size in constant]
            texts = []
            for size in ends:
                base = dict(zip(*lab.mean_curve(constant[size], "train_loss"), strict=True))
                curve = dict(zip(*lab.mean_curve(runs, "train_loss"), strict=True))
                gaps = {epoch: curve[epoch] / base[epoch] - 1 for epoch in curve if epoch in base}
                worst = max(gaps.values(), key=abs, default=math.nan)
                last = gaps[max(gaps)] if gaps else math.nan
                texts.append(f"B = {size}: {100 * last:+.2f} % at the end, {100 * worst:+.2f} % at most")
            cells.append(
                (title(model), found.label(model, series), rate(lr0), ramp.replace("-", " → "), "; ".join(texts))
            )
    if cells:
        yield "## (d) A batch size that changes in mid-run"
        yield ""
        yield "The training loss of runs whose batch size changes after half of the epochs, over that of constant ones:"
        yield ""
        yield from table(("model", "optimizer", "η₀", "B", "difference from constant"), cells)
        yield from figure.each("ramp", "a ramped batch size over constant ones")


def norm_rows(found, paper):
    if not any(row.series.algorithm == "accumulate" for row in paper):
        return
    yield "## (e) Batch norm against layer norm"
    yield ""
    yield "Standard Adam sees batch norm over the whole batch, or accumulates micro-batches, each with its own;"
    yield "invariant Adam always does the latter."
    yield ""
    wanted = [r for r in paper if r.model in ("resnet-bn", "resnet-ln") and not math.isnan(r.spread.value)]
    wanted = [r for r in wanted if r.series.algorithm in ("invariant", "standard", "accumulate") and
              r.series.rule in ("linear" if r.series.algorithm == "invariant" else "square_root",)]  # fmt: skip
    cells = [(title(r.model), found.label(r.model, r.series), rate(r.lr0), say(r.spread.value)) for r in wanted]
    yield from table(("model", "optimizer", "η₀", "spread"), cells)


WAYS = ("loop", "lab")  # of benchmarks/lab_seconds.py


def second_rows(found, alone):
    yield "## Seconds per epoch"
    yield ""
    if alone is None:
        yield from _grid_seconds(found)
        return
    yield f"One run at a time, by `{alone['command']}` ({alone['device']}, torch {alone['torch']}): micro-batch by"
    yield "micro-batch with every kernel launched by the host, and as the lab runs it, with one CUDA graph per update"
    yield "and one pass where there are several micro-batches:"
    yield ""
    taken = {(r["model"], r["algorithm"], r["batch_size"], r["way"]): r["seconds"] for r in alone["rows"]}
    rows = [
        (
            title(model),
            lab.NAMES[algorithm],
            str(batch),
            *(f"{taken[model, algorithm, batch, way]:.3g}" for way in WAYS),
        )
        for model, algorithm, batch, way in taken
        if way == WAYS[0] and (model, algorithm, batch, WAYS[1]) in taken
    ]
    yield from table(("model", "optimizer", "B", "a loop", "the lab"), rows)


def _grid_seconds(found):
    groups = {}
    for run in found.runs:
        if not run.ramp and run.series.algorithm in ("invariant", "standard"):
            key = (run.model, run.series.algorithm, run.series.micro_batch_size)
            groups.setdefault(key, {}).setdefault(run.batch_size, []).extend(run.columns["seconds"])
    columns = sorted({size for times in groups.values() for size in times})
    cells = []
    for (model, algorithm, micro), times in groups.items():
        label = lab.NAMES[algorithm] + (f", M = {micro}" if micro else "")
        medians = [f"{statistics.median(times[size]):.3g}" if size in times else "" for size in columns]
        cells.append((title(model), label, *medians))
    yield "Medians over epochs and runs, as they ran in the grid (several at once on the device):"
    yield ""
    yield from table(("model", "optimizer", *(f"B = {size}" for size in columns)), cells)


def remark_rows(found):
    said = [remark for remark in lab.remarks(found) if not remark.endswith("one batch size: nothing to compare")]
    if said:
        yield "## Runs to know of"
        yield ""
        for remark in said:
            yield f"- {remark}"

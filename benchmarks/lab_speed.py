"""Blocks of docs/results.md about speed: spreads against final loss, the order floor, growing in, every metric."""

import math
import textwrap
from pathlib import Path

from invariant_adam_lab.results import curves as lab
from invariant_adam_lab.results import measures
from invariant_adam_lab.results.curves import METRICS, MODELS, rate

TINY = Path("benchmarks/results/lab_tiny")
SHOWN = ("train_loss", "end_train_loss", "test_loss", "test_accuracy")


def say(value, form=".2g"):
    return "not measured" if math.isnan(value) else "∞" if math.isinf(value) else format(value, form)


def times(value):
    return say(value, ".0f" if value >= 10 else ".2g")


def table(head, rows):
    yield "| " + " | ".join(head) + " |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield "| " + " | ".join(row) + " |"


def prose(text):
    """A paragraph as lines of at most 120 characters."""
    return textwrap.wrap(text, 120, break_long_words=False, break_on_hyphens=False)


def at_loss(found, model, series, lr0, metric="train_loss", sizes=()):
    """The ratio at equal final loss in a cell, or why there is none."""
    result = measures.matched(found, model, series, lr0, metric, sizes)
    return result.why or f"**{times(result.ratio)}**"


def pairs(found):
    """The paper's pair of each model at each learning rate that both have, with the spread of both over the same."""
    for model in found.models:
        pair = found.paper_pair(model)
        if len(pair) == 2:
            rival, ours = pair
            for lr0 in sorted({run.lr0 for run in found.group(model, ours)}):
                below, above = measures.compare([found.group(model, s, lr0) for s in (ours, rival)])
                if not math.isnan(below.value) and not math.isnan(above.value):
                    yield model, rival, ours, lr0, above, below


def speed_rows(found, figure):
    rows = []
    for model, rival, ours, lr0, above, below in pairs(found):
        ends = [measures.final(found.group(model, s, lr0)) for s in (rival, ours)]
        least = measures.floor(found, model, ours, lr0)
        rows.append(
            (
                MODELS.get(model, model),
                rate(lr0),
                ", ".join(map(str, below.batch_sizes)),
                *(say(end, ".3g") for end in ends),
                say(above.value),
                say(below.value),
                times(measures.ratio(below.value, above.value)),
                at_loss(found, model, ours, lr0),
                say(least),
            )
        )
    if not rows:
        return
    yield "## At the same speed"
    yield from figure.one("speed", "spread over batch sizes against the final training loss, a panel for each model")
    yield ""
    yield from prose(
        "At equal η₀ invariant Adam takes smaller steps, and slower runs lie closer together. So standard Adam's "
        "spread is also read off at the final loss that invariant Adam reached: between two learning rates, spread "
        "and loss are interpolated in their logarithms. The final loss is that of the last epoch, as a geometric mean "
        "over batch sizes. *Outside the range tried*: standard Adam was not run at rates that slow. *Not reached*: its "
        "loss is higher at every rate tried. The *order floor* is the least that can be reached: how far runs at B = M "
        "lie apart when only the order of micro-batches inside each block of B_max samples changes."
    )
    yield ""
    head = ("final loss, standard", "final loss, invariant", "spread, standard", "spread, invariant")
    more = ("ratio at equal η₀", "ratio at equal loss", "order floor")
    yield from table(("model", "η₀", "batch sizes", *head, *more), rows)
    yield from figure.one("speed-test", "spread of the test loss against the final test loss, a panel for each model")


def metric_rows(found):
    rows = []
    for model, rival, ours, lr0, _, _ in pairs(found):
        cells = []
        for metric in SHOWN:
            below, above = measures.compare([found.group(model, s, lr0) for s in (ours, rival)], metric)
            if math.isnan(below.value) or math.isnan(above.value):
                cells.append("not measured")
                continue
            scale = 100 if metric.endswith("accuracy") else 1
            two = f"{say(scale * above.value)}, {say(scale * below.value)}"
            cells.append(f"{two}: {times(measures.ratio(below.value, above.value))}")
        rows.append((MODELS.get(model, model), rate(lr0), *cells))
    if not rows:
        return
    yield "## Every metric"
    yield ""
    yield from prose(
        "Spreads of standard and invariant Adam and their ratio at equal η₀. The running training loss is the mean "
        "over the updates of an epoch, which lags by half an update. The others are taken at its end: the training "
        "loss on a fixed part of the training set without augmentation, the test loss and accuracy on the test set. "
        "The spread of an accuracy is in points."
    )
    yield ""
    names = [METRICS[metric] + ", running" * (metric == "train_loss") for metric in SHOWN]
    yield from table(("model", "η₀", *names), rows)


def grown_table(found, metric, warmup=False):
    """Growing in beside not, and beside standard Adam: a row for each model and learning rate that has all three."""
    rows = []
    for model in found.models:
        for grown in (s for s in found.paper(model) if s.grow and bool(s.warmup_samples) == warmup):
            plain = grown._replace(grow=0.0)
            for lr0 in sorted({run.lr0 for run in found.group(model, grown)}):
                sides = [found.group(model, s, lr0) for s in (grown.rival, plain, grown)]
                spreads = measures.compare(sides, metric)
                if any(math.isnan(spread.value) for spread in spreads) or len(spreads[0].batch_sizes) < 2:
                    continue
                sizes = spreads[0].batch_sizes
                ends = [measures.final([run for run in side if run.batch_size in sizes], metric) for side in sides]
                cells = [f"{say(s.value)} ({say(end, '.3g')})" for s, end in zip(spreads, ends, strict=True)]
                ratios = [times(measures.ratio(s.value, spreads[0].value)) for s in spreads[1:]]
                ratios += [at_loss(found, model, s, lr0, metric, sizes) for s in (plain, grown)]
                least = say(measures.floor(found, model, grown, lr0, metric))
                rows.append((MODELS.get(model, model), rate(lr0), ", ".join(map(str, sizes)), *cells, least, *ratios))
    head = ("model", "η₀", "batch sizes", "standard", "invariant", "invariant, grown in", "order floor")
    if rows:
        yield ""
        yield from table((*head, "ratio", "ratio, grown in", "at equal loss", "at equal loss, grown in"), rows)


def grown_rows(root, full):
    """Growing in: the four models, and a grid that a CPU makes in minutes."""
    tiny = lab.load(root / TINY) if any((root / TINY).glob("*/results.csv")) else None
    large, warm = (list(grown_table(full, "train_loss", warmup)) for warmup in (False, True))
    small = [] if tiny is None else list(grown_table(tiny, "end_train_loss"))
    if not large and not small:
        return
    yield "## Growing in"
    yield ""
    yield from prose(
        "A first update is never small: debiasing makes it all that m̂ and v̂ hold. *Growing in* cuts the first "
        "mini-batches into updates that are at most a tenth of what was seen before. In the tables stand spreads, in "
        "brackets the final loss. The four ratios are standard Adam's spread over that of invariant Adam, as it is "
        "and grown in. The floor is of two orders, and so a rough one."
    )
    if large:
        yield ""
        yield "The four models, by the running training loss:"
        yield from large
    if warm:
        yield ""
        yield "With a warm-up of half an epoch (GPT: one epoch), standard Adam too:"
        yield from warm
    if small:
        yield ""
        yield "A small GPT on tiny Shakespeare, on a CPU, by the training loss at the end of an epoch:"
        yield from small
        if (root / "docs" / "figures" / "lab_tiny" / "speed.png").exists():
            yield ""
            yield "![a small GPT: spread against the final loss, with the order floor](figures/lab_tiny/speed.png)"
        yield ""
        made = (
            (
                name,
                "<br>".join(f"`{command}`" for command in grid.get("commands", ())),
                ", ".join(grid.get("devices", [])),
                grid.get("torch", ""),
            )
            for name, grid in tiny.grids.items()
        )
        yield from table(("grid", "commands", "device", "torch"), made)

"""docs/results.md from the lab's results: tables in blocks that are filled again, words around them that stay.

A block of an experiment that has no results yet is empty, heading and all. The page comes with the first results.
"""

import math
import statistics
from pathlib import Path

import lab_once
import lab_speed

from invariant_adam_lab import record
from invariant_adam_lab.results import curves as lab
from invariant_adam_lab.results import measures
from invariant_adam_lab.results.curves import MODELS, ONCE, rate
from invariant_adam_lab.results.measures import ratio

FIGURES = Path("docs/figures/lab")
SECONDS = Path("benchmarks/results/lab_seconds_h200.json")
PAPER = ("invariant", "linear")  # algorithm and rule
TEMPLATE = """# Results

Does the trajectory depend on the batch size? This page has the paper's experiments, run by [the lab](lab.md), and the
questions that they leave open.

- The *spread* is the measure: the largest minus the smallest log training loss over the batch sizes, as a mean over
  epochs. A spread of 0.01 is a difference of 1 % in the loss. It is taken within a seed, then averaged over seeds.
  Within a seed every batch size sees the same samples, augmented alike, in the same order.
- The *ratio* is the spread of standard Adam with η ∝ √B over that of the row. Both are over the same batch sizes, seeds
  and epochs.
- η₀ is the learning rate at the largest batch size.

<!-- speed -->
<!-- /speed -->

<!-- grown -->
<!-- /grown -->

<!-- metrics -->
<!-- /metrics -->

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

<!-- once -->
<!-- /once -->

<!-- seconds -->
<!-- /seconds -->

<!-- remarks -->
<!-- /remarks -->

<!-- sources -->
<!-- /sources -->
"""


def blocks(root, folder):
    """The blocks of the page by name, each a function that yields its lines."""
    every = lab.load(folder)
    found = every._replace(runs=[run for run in every.runs if run.model not in ONCE])  # which have a block of their own
    rows = measures.spreads(found)
    plain, first, paper, pair = _chosen(found, rows)
    figure = _Figures(root, found)
    return {
        "sources": lambda: sources(every),
        "speed": lambda: lab_speed.speed_rows(found, figure),
        "grown": lambda: lab_speed.grown_rows(root, found),
        "metrics": lambda: lab_speed.metric_rows(found),
        "spreads": lambda: spread_rows(found, pair, figure),
        "critical": lambda: critical_rows(found, rows, figure),
        "warmup": lambda: warmup_rows(found, rows, figure),
        "rivals": lambda: rival_rows(found, paper, figure),
        "tuned": lambda: tuned_rows(found, figure),
        "rules": lambda: rule_rows(found, plain, first, figure),
        "micro": lambda: micro_rows(found, figure),
        "ramp": lambda: ramp_rows(found, figure),
        "norm": lambda: norm_rows(found, paper, figure),
        "once": lambda: lab_once.rows(every, figure),
        "seconds": lambda: second_rows(found, record.read_json(root / SECONDS)),
        "remarks": lambda: remark_rows(found),
    }


def _chosen(found, rows):
    """What differs from the paper's comparison in one thing alone: rows without a warm-up and not grown in, M of each
    model, those of that M, and of them the paper's own."""
    plain = [row for row in rows if not row.series.warmup_samples and not row.series.grow]
    first = {model: _first(found, model) for model in found.models}
    paper = [row for row in plain if row.series.algorithm != "invariant" or _is_paper(row.series, first[row.model])]
    return plain, first, paper, [r for r in paper if r.series.algorithm == "invariant" or r.series == r.series.rival]


class _Figures:
    """Links to the figures that are kept."""

    def __init__(self, root, found):
        self.root, self.models = root, found.models

    def each(self, part, text, models=None):
        for model in self.models if models is None else dict.fromkeys(models):
            yield from self.one(f"{model}-{part}", f"{MODELS.get(model, model)}: {text}")

    def one(self, name, text):
        if (self.root / FIGURES / f"{name}.png").exists():
            yield ""
            yield f"![{text}]({FIGURES.relative_to('docs').as_posix()}/{name}.png)"


def _first(found, model):
    """The M of most runs: that of the paper's comparison, which the others are beside."""
    sizes = [run.series.micro_batch_size for run in found.runs if (run.model, run.series[:2]) == (model, PAPER)]
    return max(sorted(set(sizes)), key=sizes.count, default=0)


def _is_paper(series, micro):
    return series[:2] == PAPER and series.micro_batch_size == micro


def table(head, rows):
    yield "| " + " | ".join(head) + " |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield "| " + " | ".join(row) + " |"


def say(value, form=".2g"):
    return "" if math.isnan(value) else "∞" if math.isinf(value) else format(value, form)


def title(model):
    return MODELS.get(model, model)


def times(value):
    return say(value, ".0f" if value >= 10 else ".2g")


def percent(value):
    return "" if math.isnan(value) else f"{100 * value:.1f} %"


def listed(values):
    return ", ".join(map(str, values))


def alike(found, *keys):
    """The spreads of model, series and learning rate each over what all of them have; none where that is too little."""
    spreads = measures.compare([found.group(*key) for key in keys])
    return [] if any(math.isnan(spread.value) for spread in spreads) else spreads


def over(spread):
    """What a row is over: its batch sizes, and its seeds where there are several."""
    return listed(spread.batch_sizes) + (f"; {len(spread.per_seed)} seeds" if len(spread.per_seed) > 1 else "")


def sources(found):
    yield "## Where the numbers are from"
    yield ""
    head = ("grid", "commands", "device", "torch", "date", "runs")
    rows = []
    for name, grid in found.grids.items():
        device = ", ".join(grid.get("devices", [])) or grid.get("machine", "")
        runs = f"{grid['finished']} of {grid['runs']}" if "finished" in grid else ""
        commands = "<br>".join(f"`{command}`" for command in grid.get("commands", ()))
        rows.append((name, commands, device, grid.get("torch", ""), str(grid.get("date", ""))[:10], runs))
    yield from table(head, rows)
    yield ""
    yield "`invariant-adam figures benchmarks/results/lab --out docs/figures/lab` draws the figures and writes an"
    yield "interactive page."


def spread_rows(found, pair, figure):
    if not pair:
        return
    yield "## The trajectories"
    yield ""
    yield from spread_table(found, pair, shorter=True)
    yield ""
    yield "Here and in the tables below, numbers beside each other are over the same batch sizes, seeds and epochs."
    yield "The row names the batch sizes; a cell that has fewer names its own."
    yield from figure.each("curves", "losses and accuracies over epochs, invariant Adam beside standard Adam")
    yield from figure.each("batch-size", "training loss after the same samples against the batch size")


def spread_table(found, pair, *, shorter=False):
    """The paper's comparison; `shorter`: also without the largest batch size."""
    first = {}
    for model in dict.fromkeys(row.model for row in pair):
        # of most runs: betas at another batch size would be a stray
        ours = max((row.series for row in pair if row.model == model), key=lambda s: len(found.group(model, s)))
        first[model] = next((r.series for r in pair if (r.model, r.series.rival) == (model, ours.rival)), ours)
    having = {lr0: sum(bool(_beside(found, model, ours, lr0)[0]) for model, ours in first.items())
                for lr0 in sorted({row.lr0 for row in pair})}  # fmt: skip
    tried = [lr0 for lr0, models in having.items() if models]
    rates = [lr0 for lr0 in tried if 2 * having[lr0] > len(first)] or tried  # what few have is blank in most rows
    yield "Spreads of standard (η ∝ √B) and invariant Adam (η ∝ B), their ratio, and the ratio at equal final loss" + (
        ":" if rates == tried else "\nat the learning rates that most models have:"
    )
    yield ""
    rows = []
    for model, ours in first.items():
        cells = [_beside(found, model, ours, lr0) for lr0 in rates]
        widest = max((sizes for _, sizes in cells), key=len)
        epochs = max(len(run.losses) for run in found.group(model, ours))
        micro = f", M = {ours.micro_batch_size}" * bool(ours.micro_batch_size)
        name = f"{title(model)}{micro}, B = {listed(widest)}, {epochs} epochs"
        rows.append([name, *_named(cells, widest)])
        cells = [_beside(found, model, ours, lr0, without=widest[-1]) for lr0 in rates] if shorter and widest else []
        if any(text for text, _ in cells):
            rows.append([f"the same without B = {widest[-1]}", *_named(cells, widest[:-1])])
    yield from table(("", *(f"η₀ = {rate(lr0)}" for lr0 in rates)), rows)


def _beside(found, model, ours, lr0, without=None):
    """Invariant Adam beside standard Adam in a cell, and the batch sizes of both."""
    sides = [found.group(model, series, lr0) for series in (ours, ours.rival)]
    sides = [[run for run in side if run.batch_size != without] for side in sides]
    below, above = measures.compare(sides)
    if math.isnan(below.value) or math.isnan(above.value):
        alone = ((s.algorithm, measures.measure(side)) for s, side in zip((ours, ours.rival), sides, strict=True))
        alone = [(name, spread) for name, spread in alone if not math.isnan(spread.value)]
        return next(((f"{name} alone: {say(s.value)}", s.batch_sizes) for name, s in alone), ("", []))
    text = f"{say(above.value)}, {say(below.value)}"
    text += f": **{times(ratio(below.value, above.value))}**" if math.isfinite(below.value) else ""
    text += _seeds(sides, below, above)
    if without is None:
        text += f"; at equal loss {lab_speed.at_loss(found, model, ours, lr0, sizes=below.batch_sizes)}"
    return text, below.batch_sizes


def _seeds(sides, below, above):
    """How far seeds lie apart, where there are several; over fewer batch sizes, if not all seeds have all."""
    by_seed = {}
    for run in sides[0]:
        if any((run.batch_size, run.seed) == (other.batch_size, other.seed) for other in sides[1]):
            by_seed.setdefault(run.seed, set()).add(run.batch_size)
    shared = set.intersection(*([sizes for sizes in by_seed.values() if len(sizes) > 1] or [set()]))
    fewer = len(shared) > 1 and shared != set(below.batch_sizes)
    if fewer:
        below, above = measures.compare([[run for run in side if run.batch_size in shared] for side in sides])
    values = [(below.per_seed[seed], above.per_seed[seed]) for seed in below.per_seed if seed in above.per_seed]
    values = [(a, b, ratio(a, b)) for a, b in values]
    if len(values) < 2 or not all(map(math.isfinite, (x for row in values for x in row))):
        return ""
    columns = zip((say, say, times), zip(*values, strict=True), strict=True)
    a, b, c = (f"{form(min(column))}–{form(max(column))}" for form, column in columns)
    return f" ({len(values)} seeds{f', B = {listed(below.batch_sizes)}' * fewer}: {b}, {a}: {c})"


def _named(cells, usual):
    return [text + f" (B = {listed(sizes)})" * bool(text and sizes != usual) for text, sizes in cells]


def critical_rows(found, rows, figure):
    ranges = [r for r in measures.ranges(rows) if r.series.algorithm == "invariant"]
    if not ranges:
        return
    yield "## Where it breaks"
    yield ""
    yield f"A row holds up to the largest learning rate tried up to which no spread exceeds {measures.TOLERANCE:g}. It"
    yield "breaks at the smallest at which one does. Only learning rates tried at the row's largest batch size count:"
    yield "it breaks first."
    yield ""
    cells = []
    for r in ranges:
        tried = {lr0: sizes for lr0, sizes in ((r.holds_up_to, r.holds_over), (r.breaks_at, r.breaks_over)) if lr0}
        once = len(set(map(tuple, tried.values()))) == 1
        said = (f"{listed(sizes)}" + ("" if once else f" at {rate(lr0)}") for lr0, sizes in tried.items())
        values = ("none" if lr0 is None else rate(lr0) for lr0 in (r.holds_up_to, r.breaks_at))
        cells.append((title(r.model), found.label(r.model, r.series), *values, "; ".join(dict.fromkeys(said))))
    yield from table(("model", "optimizer", "holds up to η₀", "breaks at η₀", "batch sizes"), cells)
    yield from figure.one("spread", "spread over batch sizes against the learning rate")


def warmup_rows(found, rows, figure):
    cells, models = [], []
    for row in rows:
        model, warm, lr0 = row[:3]
        cold = warm._replace(warmup_samples=0)
        pair = alike(found, (model, cold, lr0), (model, warm, lr0)) if warm != cold else []
        if not pair:
            continue
        ratios = ["", "", "", ""]
        if warm != warm.rival:
            four = alike(found, *((model, series, lr0) for series in (cold, warm, cold.rival, warm.rival)))
            said = f" (B = {over(four[0])})" if four and over(four[0]) != over(pair[0]) else ""
            ratios = [times(ratio(four[i].value, four[i + 2].value)) + said for i in (0, 1)] if four else ratios
            sizes = pair[0].batch_sizes
            ratios = ratios[:2] + [lab_speed.at_loss(found, model, s, lr0, sizes=sizes) for s in (cold, warm)]
        label = f"{lab.NAMES[warm.algorithm]}, {warm.law}"
        values = (*(say(spread.value) for spread in pair), *ratios)
        models.append(model)
        cells.append((title(model), label, rate(lr0), f"{warm.warmup_samples:,}", over(pair[0]), *values))
    if cells:
        yield "## A warm-up in samples"
        yield ""
        head = ("model", "optimizer", "η₀", "samples", "batch sizes", "spread without", "spread with", "ratio without")
        yield from table((*head, "ratio with", "at equal loss, without", "at equal loss, with"), cells)
        yield from figure.each("curves-warmup", "losses and accuracies over epochs with a warm-up", models)


RIVALS = (("standard", "linear"), ("adama", "square_root"), ("adama", "linear"), ("halflife", "none"))


def rival_rows(found, paper, figure):
    cells, models = [], []
    for model, series, lr0 in (row[:3] for row in paper if row.series[:2] in RIVALS):
        for ours in dict.fromkeys(r.series for r in paper if (r.model, r.series[:2]) == (model, PAPER)):
            if ours.rival == series.rival:
                spreads = alike(found, *((model, s, lr0) for s in (series, ours.rival, ours)))
                label = f"{lab.NAMES[series.algorithm]}, {series.law}"
                if spreads:
                    models.append(model)
                    ends = [measures.final(found.group(model, s, lr0)) for s in (series, ours.rival, ours)]
                    values = (f"{say(s.value)} ({say(end, '.3g')})" for s, end in zip(spreads, ends, strict=True))
                    cells.append((title(model), rate(lr0), over(spreads[0]), label, *values))
    if not cells:
        return
    yield "## The rivals"
    yield ""
    yield "Spreads at equal η₀, each with the final training loss of its runs: what trains slower lies closer together."
    yield ""
    names = ("Standard Adam, η ∝ √B", "Invariant Adam, η ∝ B")
    yield from table(("model", "η₀", "batch sizes", "rival", "its spread", *names), cells)
    yield from figure.each("all", "training loss and test accuracy of every optimizer", models)


def tuned_rows(found, figure):
    tables = []
    for model in found.models:
        chosen = {}  # batch size, series: the best by training loss and by test accuracy
        for row in (row for metric in ("train_loss", "test_accuracy") for row in measures.best(found, model, metric)):
            if len(row.tried) >= measures.TRIED:
                chosen.setdefault((row.batch_size, row.series), []).append(row)
        columns = [series for series in found.series(model) if any(series == other for _, other in chosen)]
        columns.sort(key=lambda series: series.algorithm != "standard")  # the paper's order
        cells = []
        for size in sorted({size for size, _ in chosen}):
            row = {series: chosen[size, series] for series in columns if (size, series) in chosen}
            if len(row) > 1:
                texts = (_best(*row[series]) if series in row else "" for series in columns)
                cells.append((str(size), _tried(found, model, row), *texts))
        if cells:
            samples = next(iter(chosen.values()))[0].samples
            head = ("B", "η₀ tried", *(found.label(model, series) for series in columns))
            tables.append((f"{title(model)}, after {samples:,.0f} samples", head, cells))
    if not tables:
        return
    yield "## (a) At its best learning rate"
    yield ""
    yield "The tables have the lowest training loss and the highest test accuracy of each optimizer at each batch"
    yield f"size, with the learning rate of each. At least {measures.TRIED} learning rates were tried. A result is in"
    yield "italics where its learning rate is the smallest or largest of them: a better one may lie beyond."
    for name, head, cells in tables:
        yield ""
        yield f"{name}:"
        yield ""
        yield from table(head, cells)
    yield from figure.each("best", "what the best learning rate reaches at each batch size")


def _tried(found, model, row):
    """The learning rates of a row; what tried others is named."""
    by_rates = {}
    for series, (first, *_) in row.items():
        text = listed(map(rate, first.tried)) + (f"; {len(first.seeds)} seeds" if len(first.seeds) > 1 else "")
        by_rates.setdefault(text, []).append(series)
    if len(by_rates) == 1:
        return next(iter(by_rates))
    return "<br>".join(f"{_short(every)}: {text}" for text, every in by_rates.items())


def _short(every):
    """Series in few words: standard Adam, or the M of invariant Adam."""
    micro = [series.micro_batch_size for series in every if series.micro_batch_size]
    return listed([f"M = {listed(micro)}"] * bool(micro) + ["standard"] * any(not s.micro_batch_size for s in every))


def _best(loss, accuracy):
    values = (f"{loss.value:.4g}", percent(accuracy.value))
    texts = [f"{value} ({rate(row.lr0)})" for value, row in zip(values, (loss, accuracy), strict=True)]
    texts = [f"*{text}*" if row.at_edge else text for text, row in zip(texts, (loss, accuracy), strict=True)]
    return ", ".join(texts)


def rule_rows(found, plain, first, figure):
    cells = []
    for model, series, lr0 in (row[:3] for row in plain):
        if series[:3] == ("invariant", "exponential", first[model]):
            spreads = alike(found, *((model, series._replace(rule=rule), lr0) for rule in ("linear", "exponential")))
            if spreads:
                cells.append((title(model), rate(lr0), over(spreads[0]), *(say(spread.value) for spread in spreads)))
    if cells:
        yield "## (b) The linear or the exponential rule"
        yield ""
        yield from table(("model", "η₀", "batch sizes", "spread, linear", "spread, exponential"), cells)
        yield from figure.each("rules", "difference between batch sizes over epochs, by either rule")


def micro_rows(found, figure):
    cells = []
    for model in found.models:
        every = [s for s in found.series(model) if s[:2] == PAPER and not s.warmup_samples and not s.grow]
        for betas in sorted({s.max_batch_size for s in every}):
            ours = [s for s in every if s.max_batch_size == betas]
            for lr0 in sorted({run.lr0 for s in ours for run in found.group(model, s)}):
                cells += _micro(found, model, lr0, [s for s in ours if found.group(model, s, lr0)])
    if cells:
        yield "## (c) What M does"
        yield ""
        yield "The spread is over the batch sizes that every M with several batch sizes has. Where they have fewer"
        yield "than two in common, each M has its own. Loss and accuracy are those at the largest batch size that most"
        yield "M have, after the same samples."
        yield ""
        head = ("model", "η₀", "M", "spread", "over B =", "training loss", "test accuracy", "at B =")
        yield from table(head, cells)
        yield from figure.each("micro", "what each M reaches against the learning rate, at one batch size")


def _micro(found, model, lr0, ours):
    """The rows of one learning rate: a row for each M."""
    runs = {series: lab.by_batch_size(found.group(model, series, lr0)) for series in ours}
    size = measures.common_size(runs.values())
    at = {series: groups[size] for series, groups in runs.items() if size in groups}
    if len(at) < 2:
        return
    several = [series for series, groups in runs.items() if len(groups) > 1]
    spreads = alike(found, *((model, series, lr0) for series in several)) if several else []
    spreads = spreads or [measures.measure(found.group(model, series, lr0)) for series in several]
    spreads = {series: spread for series, spread in zip(several, spreads, strict=True) if not math.isnan(spread.value)}
    seeds = set.intersection(*({run.seed for run in group} for group in at.values()))
    at = {series: [run for run in group if run.seed in seeds] for series, group in at.items()}
    samples = measures.fixed_samples(run for group in at.values() for run in group)
    for series in ours:
        mine = spreads.get(series)
        texts = (say(mine.value), over(mine)) if mine else ("", "")
        if at.get(series):
            reached = [measures.at_samples(at[series], metric, samples) for metric in ("train_loss", "test_accuracy")]
            texts += (say(reached[0], ".4g"), percent(reached[1]), str(size))
        yield (title(model), rate(lr0), str(series.micro_batch_size), *texts, *[""] * (5 - len(texts)))


def ramp_rows(found, figure):
    cells = []
    for model in found.models:
        for (series, lr0, ramp), runs in found.ramps(model).items():
            sizes = [int(size) for size in ramp.split("-")]
            gaps = {size: _gaps(found, runs, model, series, lr0, size) for size in sizes}
            half = max((epoch for gap in gaps.values() for epoch in gap), default=0) / 2
            before = [abs(gap) for epoch, gap in gaps[sizes[0]].items() if epoch <= half]
            texts = [f"{max(before):.2f} %" if before else ""]
            for gap in gaps.values():
                after = [change for epoch, change in sorted(gap.items()) if epoch > half]
                worst = max(after, key=abs, default=math.nan)
                texts.append(f"{after[-1]:+.2f} %, {worst:+.2f} %" if after else "")
            cells.append((title(model), found.label(model, series), rate(lr0), ramp.replace("-", " → "), *texts))
    if cells:
        yield "## (d) A batch size that changes in mid-run"
        yield ""
        yield "The batch size of these runs changes after half of the epochs. The table compares their training loss"
        yield "with that of constant batch sizes: at the end, and where they are farthest apart after the change."
        yield "Before the change a ramp and its first batch size are two runs of equal settings. They differ by"
        yield "rounding alone, which is the noise of the comparison."
        yield ""
        head = ("before, at most", "after, from the first B", "after, from the second B")
        yield from table(("model", "optimizer", "η₀", "B", *head), cells)
        yield from figure.each("ramp", "a ramped batch size over constant ones")


def _gaps(found, runs, model, series, lr0, size):
    """How many percent the training loss of a ramp is above that of a constant batch size, by epoch; same seeds."""
    seeds = {run.seed for run in runs}
    constant = [run for run in found.group(model, series, lr0) if run.batch_size == size and run.seed in seeds]
    same = [run for run in runs if run.seed in {other.seed for other in constant}]
    return dict(zip(*measures.difference(same, constant), strict=True)) if constant else {}


def norm_rows(found, paper, figure):
    if not any(row.series.algorithm == "accumulate" for row in paper):
        return
    yield "## (e) Batch norm against layer norm"
    yield ""
    yield "Standard Adam normalises over the whole batch, or accumulates micro-batches that are normalised one by one."
    yield "Invariant Adam always normalises micro-batches one by one."
    yield ""
    cells = []
    for model, series, lr0 in (row[:3] for row in paper if row.series.algorithm == "accumulate"):
        for ours in dict.fromkeys(r.series for r in paper if (r.model, r.series[:2]) == (model, PAPER)):
            if ours.rival != series.rival:
                continue
            three = [(model, s, lr0) for s in (ours.rival, series, ours)]
            other = [("resnet-ln", s, lr0) for s in (ours.rival, ours)] if model == "resnet-bn" else []
            rows = [alike(found, *three), alike(found, *three, *other) if other else []]
            if rows[1] and over(rows[0][0]) == over(rows[1][0]):
                del rows[0]
            for spreads in filter(None, rows):
                texts = [say(spread.value) for spread in spreads]
                cells.append((title(model), rate(lr0), over(spreads[0]), *texts, *[""] * (5 - len(texts))))
    names = ("standard", "standard, accumulated", "invariant", "layer norm: standard", "layer norm: invariant")
    yield from table(("model", "η₀", "batch sizes", *(f"spread, {name}" for name in names)), cells)
    yield from figure.each("norm", "difference between batch sizes over epochs, beside layer norm")


WAYS = ("loop", "lab")  # of benchmarks/lab_seconds.py


def second_rows(found, alone):
    yield "## Seconds per epoch"
    yield ""
    if alone is None:
        yield from _grid_seconds(found)
        return
    yield f"One run at a time, by `{alone['command']}` ({alone['device']}, torch {alone['torch']}). The loop takes one"
    yield "micro-batch after the other, and the host launches every kernel. The lab makes each update one CUDA graph,"
    yield "and uses one pass where there are several micro-batches. Measured over about a tenth of an epoch, test"
    yield "included:"
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
    said = [remark for remark in measures.remarks(found) if not remark.endswith("one batch size: nothing to compare")]
    if said:
        yield "## Runs to know of"
        yield ""
        for remark in said:
            yield f"- {remark}"

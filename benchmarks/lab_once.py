"""The block of docs/results.md about models that see their data once: each run, spreads, and what was not run."""

import math

from lab_speed import SHOWN, prose, say, table

from invariant_adam_lab.results import measures
from invariant_adam_lab.results.curves import METRICS, MODELS, NAMES, ONCE, rate
from invariant_adam_lab.training.runs import RECIPES

SEEN = (0.1, 0.5, 1)  # of the data, where test losses are shown


def rows(found, figure):
    for model in (model for model in found.models if model in ONCE):
        yield f"## {MODELS[model]}, in one pass"
        yield ""
        yield from prose(
            "The model sees each sequence once, with a warm-up, a cosine and weight decay "
            "([the lab](lab.md#gpt-2-on-a-text-of-your-own)). η₀ is the highest learning rate at B_max, and an epoch a "
            "tenth of the pass. Test losses after a tenth, half and all of it:"
        )
        yield ""
        yield from table(("optimizer", "η₀", "B", "mini-batches", "10 %", "50 %", "100 %"), run_rows(found, model))
        spreads = list(spread_rows(found, model))
        if spreads:
            yield ""
            yield "Spreads over batch sizes; the order floor is that of the running training loss:"
            yield ""
            names = (METRICS[metric] + ", running" * (metric == "train_loss") for metric in SHOWN)
            yield from table(("optimizer", "η₀", "batch sizes", *names, "order floor"), spreads)
        yield ""
        yield from prose(f"Not run: {'; '.join(missing(found, model))}.")
        yield from figure.each("curves", "losses and accuracies over tenths of a pass", [model])
        yield from figure.each("curves-grown", "losses and accuracies over tenths of a pass, grown in", [model])


def made(found, model):
    """Each run once: one with B = M is a curve of several series."""
    runs = {id(run.columns): run for run in reversed(found.runs) if run.model == model}
    names = list(NAMES)
    return sorted(
        runs.values(), key=lambda r: (r.lr0, names.index(r.series.algorithm), r.batch_size, r.order, r.seed, r.series)
    )


def run_rows(found, model):
    several = len({run.seed for run in made(found, model)}) > 1
    for run in made(found, model):
        label = (
            found.label(model, run.series) + f", order {run.order}" * bool(run.order) + f", seed {run.seed}" * several
        )
        losses, all_of = run.columns["test_loss"], run.columns["samples"][-1]
        cells = (losses[max(0, round(part * len(losses)) - 1)] for part in SEEN)
        texts = ("diverged" if math.isnan(loss) else f"{loss:.3f}" for loss in cells)
        yield (label, rate(run.lr0), str(run.batch_size), f"{all_of / run.batch_size:,.0f}", *texts)


def spread_rows(found, model):
    for series in found.series(model):
        for lr0 in sorted({run.lr0 for run in found.group(model, series)}):
            runs = found.group(model, series, lr0)
            spread = measures.measure(runs)
            if math.isnan(spread.value):
                continue
            values = (measures.measure(runs, metric=metric).value for metric in SHOWN)
            cells = [
                f"{say(100 * v)} points" if m == "test_accuracy" else say(v) for m, v in zip(SHOWN, values, strict=True)
            ]
            least = say(measures.floor(found, model, series, lr0))
            sizes = ", ".join(map(str, spread.batch_sizes))
            yield (found.label(model, series), rate(lr0), sizes, *cells, least)


def missing(found, model):
    """What the lab's grid has and no run, and what there is one of."""
    runs, recipe = made(found, model), RECIPES[model]
    rates, sizes = sorted({run.lr0 for run in runs}), sorted({run.batch_size for run in runs})
    for name, whole, some in (
        ("η₀ = {}", map(rate, recipe.lrs), map(rate, rates)),
        ("B = {}", map(str, recipe.batch_sizes), map(str, sizes)),
    ):
        some = set(some)
        left = [text for text in whole if text not in some]
        if left:
            yield name.format(", ".join(left))
    for lr0 in rates:
        for algorithm in ("invariant", "standard"):
            have = {run.batch_size for run in runs if (run.lr0, run.series.algorithm, run.order) == (lr0, algorithm, 0)}
            left = [str(size) for size in sizes if size not in have]
            if left:
                yield f"{NAMES[algorithm]} at η₀ = {rate(lr0)}, B = {', '.join(left)}"
    if not any(run.order for run in runs):
        yield "the order floor"
    if len({run.seed for run in runs}) == 1:
        yield "other seeds"

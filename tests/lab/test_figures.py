import itertools
import json
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lab_results import FULL, PAIR, rows, same, uneven, write
from matplotlib.figure import Figure
from typer.testing import CliRunner

from invariant_adam_lab.cli import app, console
from invariant_adam_lab.results import figures, page, style
from invariant_adam_lab.results.curves import load
from invariant_adam_lab.results.measures import (
    best,
    compare,
    fixed_samples,
    level,
    mean_curve,
    measure,
    ranges,
    remarks,
    spread,
    spreads,
    table,
    usual,
)

SMALL = {"sizes": (25, 100, 400), "rates": (1e-4, 1e-3), "epochs": 3}


def run(*arguments):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(console.stdout, "width", 250)  # of whatever test came first, otherwise
        return CliRunner().invoke(app, ["figures", *map(str, arguments)], env={"COLUMNS": "250"})


def row_of(results, algorithm, lr0):
    return next(r for r in spreads(results) if (r.series.algorithm, r.lr0) == (algorithm, lr0))


def change(rows, values, **settings):
    """Give the rows with these settings other values; how many there were is checked."""
    chosen = [row for row in rows if same(row, **settings)]
    assert chosen
    for row in chosen:
        row.update(values)
    return rows


# --------------------------------------------------------------------------- the measure

curves = st.lists(st.lists(st.floats(1e-3, 1e3), min_size=4, max_size=4), min_size=2, max_size=5)


@given(curves, st.floats(1e-2, 1e2), st.randoms())
def test_the_spread_ignores_order_and_scale_and_is_never_negative(losses, factor, random):
    value = spread(losses)
    assert value >= 0
    assert spread([[factor * x for x in curve] for curve in losses]) == pytest.approx(value, abs=1e-12)
    mixed = [*losses, random.choice(losses)]  # a copy adds nothing
    random.shuffle(mixed)
    assert spread(mixed) == pytest.approx(value, abs=1e-15)
    assert spread([losses[0], losses[0]]) == 0


def test_the_spread_is_measured_within_a_seed_and_then_averaged(tmp_path):
    found = rows(seeds=(0, 1), **SMALL)
    change(found, {"train_loss": 1.0}, algorithm="invariant", lr0=1e-4)
    # Seeds differ tenfold: a mean over seeds first would hide that each has a gap of its own.
    change(found, {"train_loss": 10.0}, algorithm="invariant", lr0=1e-4, seed=1)
    change(found, {"train_loss": math.e}, algorithm="invariant", lr0=1e-4, seed=0, batch_size=400, epoch=2)
    row = row_of(load(write(tmp_path, found)), "invariant", 1e-4)
    assert row.spread.per_seed == pytest.approx({0: 1 / 3, 1: 0})
    assert row.spread.value == pytest.approx(1 / 6)
    assert not row.spread.notes


def test_epoch_0_is_no_epoch_of_training(tmp_path):
    found = rows(**SMALL)
    value = row_of(load(write(tmp_path / "a", found)), "invariant", 1e-4).spread
    zero = [row | {"epoch": 0, "samples": 0, "train_loss": 2.3} for row in found if row["epoch"] == 1]
    assert row_of(load(write(tmp_path / "b", zero + found)), "invariant", 1e-4).spread == value


@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.0, -1.0])
def test_a_diverged_run_makes_the_spread_infinite_and_is_named(tmp_path, bad):
    found = rows(seeds=(0, 1), **SMALL)
    change(found, {"train_loss": bad}, algorithm="standard", lr0=1e-3, batch_size=400, seed=1, epoch=2)
    results = load(write(tmp_path, found))
    row = row_of(results, "standard", 1e-3)
    assert row.spread.value == math.inf
    assert row.spread.per_seed[1] == math.inf
    assert 0 < row.spread.per_seed[0] < math.inf
    assert 0 < row.spread.finite < math.inf
    assert row.spread.notes == ["diverged: B = 400, seed 1, in epoch 2"]
    assert row_of(results, "invariant", 1e-3).ratio == math.inf
    assert any("diverged: B = 400, seed 1" in remark for remark in remarks(results))
    told = json.loads(json.dumps(table(results), allow_nan=False))  # JSON proper: no Infinity, no NaN
    assert "inf" in [r["spread"] for r in told["spreads"]]


def test_a_run_that_stopped_when_it_diverged_does_not_shorten_the_others(tmp_path):
    found = rows(**SMALL)
    change(found, {"train_loss": math.nan}, algorithm="invariant", lr0=1e-3, batch_size=400, epoch=1)
    found = [r for r in found if not (same(r, algorithm="invariant", lr0=1e-3, batch_size=400) and r["epoch"] > 1)]
    row = row_of(load(write(tmp_path, found)), "invariant", 1e-3)
    assert (row.spread.value, row.spread.epochs, row.ratio) == (math.inf, 3, 0)


def test_where_every_run_diverged_nothing_is_claimed(tmp_path):
    found = change(rows(**SMALL), {"train_loss": math.nan}, lr0=1e-3, epoch=1)
    results = load(write(tmp_path, found))
    row = row_of(results, "invariant", 1e-3)
    assert math.isnan(row.spread.value)
    assert math.isnan(row.ratio)
    assert "every run diverged: nothing to compare" in row.spread.notes
    assert all(r.holds_up_to == 1e-4 and r.breaks_at is None for r in ranges([row_of(results, "invariant", 1e-4)]))


def test_unequal_numbers_of_epochs_are_cut_to_those_all_have_and_named(tmp_path):
    found = rows(**SMALL)
    whole = load(write(tmp_path / "whole", found))
    short = [r for r in found if not (same(r, algorithm="invariant", batch_size=100, lr0=1e-4) and r["epoch"] > 2)]
    results = load(write(tmp_path / "short", short))
    row = row_of(results, "invariant", 1e-4)
    assert row.spread.epochs == 2
    assert row.spread.notes == ["short: B = 100, seed 0 has 2 of 3 epochs; all are compared over 2"]
    runs = whole.group("resnet-bn", row.series, 1e-4)
    assert row.spread.value == measure(runs, epochs=(1, 2)).value
    # The rival has 3 epochs, but is compared over the same 2.
    rival = whole.group("resnet-bn", row.series.rival, 1e-4)
    assert row.ratio == pytest.approx(measure(rival, epochs=(1, 2)).value / row.spread.value)


def test_the_ratio_compares_equal_batch_sizes_and_says_so(tmp_path):
    found = [r for r in rows(**SMALL) if not same(r, algorithm="standard", batch_size=400, lr0=1e-4)]
    results = load(write(tmp_path, found))
    row = row_of(results, "invariant", 1e-4)
    assert row.spread.batch_sizes == [25, 100, 400]
    assert row.ratio_over == "B = 25, 100; seeds 0; 3 epochs"
    ours = [r for r in results.group("resnet-bn", row.series, 1e-4) if r.batch_size < 400]
    theirs = results.group("resnet-bn", row.series.rival, 1e-4)
    assert row.ratio == pytest.approx(measure(theirs).value / measure(ours).value)
    assert row_of(results, "standard", 1e-4).spread.notes == ["missing: B = 400"]


def test_a_seed_that_lacks_a_batch_size_is_left_out_and_named(tmp_path):
    found = [r for r in rows(seeds=(0, 1), **SMALL) if not same(r, algorithm="invariant", batch_size=400, seed=1)]
    row = row_of(load(write(tmp_path, found)), "invariant", 1e-4)
    assert list(row.spread.per_seed) == [0]
    assert row.spread.notes == ["missing: B = 400, seed 1; the seed is left out"]


def test_one_batch_size_has_no_spread(tmp_path):
    results = load(write(tmp_path, rows(algorithms=FULL, **SMALL)))
    row = row_of(results, "micro", 1e-4)
    assert math.isnan(row.spread.value)
    assert row.spread.notes == ["one batch size: nothing to compare"]


def test_where_it_breaks_lies_between_two_learning_rates(tmp_path):
    found = rows(sizes=(25, 400), rates=(1e-5, 1e-4, 1e-3, 1e-2), epochs=2)
    change(found, {"train_loss": 1.0}, algorithm="invariant")
    for lr0, loss in ((1e-4, 1.005), (1e-3, 1.02), (1e-2, 1.001)):
        change(found, {"train_loss": loss}, algorithm="invariant", lr0=lr0, batch_size=400)
    measured = ranges(spreads(load(write(tmp_path, found))))
    ours = next(r for r in measured if r.series.algorithm == "invariant")
    assert (ours.holds_up_to, ours.breaks_at) == (1e-4, 1e-3)  # holding again at 1e-2 does not count


def test_the_best_learning_rate_is_chosen_at_equal_samples_and_the_edge_is_marked(tmp_path):
    found = rows(sizes=(25, 400), rates=(1e-5, 1e-4, 1e-3), epochs=3)
    for lr0, accuracy in ((1e-5, 0.3), (1e-4, 0.9), (1e-3, 0.6)):
        change(found, {"test_accuracy": accuracy}, lr0=lr0)
    change(found, {"train_loss": math.nan}, lr0=1e-3, algorithm="standard", batch_size=400, epoch=3)
    results = load(write(tmp_path, found))
    assert fixed_samples(results.runs) == 150_000
    chosen = best(results, "resnet-bn", "test_accuracy")
    assert {(b.lr0, b.value, b.at_edge) for b in chosen} == {(1e-4, 0.9, False)}
    by_loss = {(b.series.algorithm, b.batch_size): b for b in best(results, "resnet-bn", "train_loss")}
    assert by_loss["invariant", 400].lr0 == 1e-3
    assert by_loss["invariant", 400].at_edge
    assert by_loss["standard", 400].lr0 == 1e-4  # the diverged one is not a candidate


def test_sides_are_compared_over_what_all_of_them_have(tmp_path):
    results = load(write(tmp_path, uneven()))
    ours = next(s for s in results.series("resnet-bn") if s.algorithm == "invariant")
    warm = ours._replace(warmup_samples=25_000)
    for other, sizes, seeds in ((warm, [25, 800], [0]), (ours.rival, [25, 100, 400, 800], [0, 1, 2])):
        sides = [results.group("resnet-bn", series, 1e-4) for series in (ours, other)]
        for side, measured in zip(sides, compare(sides), strict=True):
            assert (measured.batch_sizes, list(measured.per_seed)) == (sizes, seeds)
            by_hand = measure([run for run in side if run.batch_size in sizes and run.seed in seeds])
            assert measured.value == by_hand.value
    alone = compare([sides[0], []])
    assert all(math.isnan(side.value) for side in alone)


def test_a_short_run_shortens_the_sides_beside_it_and_a_diverged_one_does_not(tmp_path):
    found = [r for r in rows(**SMALL) if not (same(r, algorithm="standard", batch_size=25) and r["epoch"] > 2)]
    change(found, {"train_loss": math.nan}, algorithm="standard", lr0=1e-3, batch_size=25, epoch=1)
    results = load(write(tmp_path, found))
    ours = row_of(results, "invariant", 1e-4).series
    for lr0, epochs in ((1e-4, 2), (1e-3, 3)):
        sides = compare([results.group("resnet-bn", series, lr0) for series in (ours, ours.rival)])
        assert {side.epochs for side in sides} == {epochs}
        assert math.isinf(sides[1].value) == (lr0 == 1e-3)


def test_curves_are_means_over_seeds_that_have_all_batch_sizes(tmp_path):
    found = rows(seeds=(0, 1), **SMALL)
    found = [r for r in found if not same(r, algorithm="invariant", batch_size=100, seed=1)]
    results = load(write(tmp_path, found))
    row = row_of(results, "invariant", 1e-4)
    for series, seeds in ((row.series, {0}), (row.series.rival, {0, 1})):
        kept = level(results.group("resnet-bn", series, 1e-4))
        assert {run.seed for run in kept} == seeds
        assert len(kept) == 3 * len(seeds)


def test_the_usual_batch_sizes_are_not_those_of_a_stray_run(tmp_path):
    found = rows(**SMALL) + rows(algorithms=PAIR[:1], sizes=(200,), rates=(1e-4,), epochs=3, largest=400)
    measured = spreads(load(write(tmp_path, found)))
    assert usual(measured) == [25, 100, 400]
    assert usual(measured[:1]) == [25, 100, 200, 400]
    assert usual([]) == []


def test_it_holds_only_where_the_largest_batch_size_was_tried(tmp_path):
    results = load(write(tmp_path, change(uneven(), {"train_loss": 1.0}, algorithm="invariant", model="resnet-bn")))
    found = {r.series.micro_batch_size: r for r in ranges(spreads(results)) if r.model == "resnet-bn" and
             r.series.algorithm == "invariant" and not r.series.warmup_samples}  # fmt: skip
    assert found[25][2:] == (1e-3, None, [25, 100, 400, 800], [])
    assert found[100][2:] == (1e-3, None, [100, 400], [])
    assert 400 not in found  # one batch size
    broken = change(uneven(), {"train_loss": 1.0}, algorithm="invariant", model="resnet-bn")
    broken = [r for r in broken if not same(r, batch_size=800, lr0=1e-3)]
    found = ranges(spreads(load(write(tmp_path, broken))))
    ours = next(r for r in found if (r.model, r.series.algorithm) == ("resnet-bn", "invariant"))
    assert ours.holds_up_to == 1e-4


def test_the_best_is_chosen_of_what_a_series_tried_at_that_batch_size(tmp_path):
    few, many, more = [1e-5, 1e-4, 1e-3], [1e-5, 1e-4, 3e-4, 1e-3], [1e-4, 3e-4, 1e-3]
    by_size = {}
    for row in best(load(write(tmp_path, uneven())), "resnet-bn", "train_loss"):
        by_size.setdefault(row.batch_size, {})[row.series.micro_batch_size] = row
    assert {size: {micro: row.tried for micro, row in found.items()} for size, found in by_size.items()} == {
        25: {25: few, 0: few},
        100: {25: many, 100: more, 0: many},
        400: {25: many, 100: more, 400: more, 0: many},
        800: {25: few, 0: few},  # neither the rivals at one learning rate nor the stray run
    }
    # The seed that all have, where one learning rate has three.
    assert all(row.seeds == [0] for found in by_size.values() for row in found.values())


def test_a_learning_rate_more_takes_nothing_from_the_others(tmp_path):
    found = rows(sizes=(100, 400), rates=(1e-5, 1e-4, 1e-3), epochs=3)
    found += rows(algorithms=PAIR[:1], sizes=(100, 400), rates=(1e-3, 3e-3, 1e-2), epochs=3, micro=100)
    chosen = best(load(write(tmp_path, found)), "resnet-bn", "train_loss")
    assert {(row.series.micro_batch_size, tuple(row.tried)) for row in chosen} == {
        (0, (1e-5, 1e-4, 1e-3)), (25, (1e-5, 1e-4, 1e-3)), (100, (1e-3, 3e-3, 1e-2))
    }  # fmt: skip


def test_a_run_of_one_micro_batch_stands_for_every_algorithm_with_its_rule(tmp_path):
    found = rows(algorithms=(*PAIR, ("standard", "linear"), ("accumulate", "square_root")), sizes=(25, 100), epochs=2)
    found += rows(algorithms=(("adama", "square_root"), ("halflife", "none")), sizes=(25, 100), epochs=2)
    alone = {("invariant", "linear"), ("standard", "square_root")}
    kept = [r for r in found if r["batch_size"] == 100 or (r["algorithm"], r["rule"]) in alone]
    results = load(write(tmp_path, kept))
    assert results.made == len(kept) / 2 < len(results.runs)
    assert f"<p>{results.made} runs of " in page.report(results)
    for series in results.series("resnet-bn"):
        at_one = [run for run in results.group("resnet-bn", series) if run.batch_size == 25]
        if series.algorithm == "halflife":  # its β₁ is another
            assert at_one == []
            continue
        source = ("invariant", "linear") if series.rule == "linear" else ("standard", "square_root")
        assert {run.lr0: run.columns["train_loss"] for run in at_one} == {
            lr0: loss(kept, algorithm=source[0], rule=source[1], batch_size=25, lr0=lr0) for lr0 in (1e-5, 1e-4, 1e-3)
        }
    # One that was made itself is not replaced, and one of several micro-batches stands for nothing else.
    again = load(write(tmp_path, found))
    (own,) = (s for s in again.series("resnet-bn") if s.algorithm == "accumulate")
    assert again.group("resnet-bn", own, 1e-4)[0].columns["train_loss"] == loss(
        found, algorithm="accumulate", batch_size=25, lr0=1e-4
    )
    fewer = load(write(tmp_path, [r for r in found if not same(r, algorithm="accumulate", batch_size=100)]))
    (own,) = (s for s in fewer.series("resnet-bn") if s.algorithm == "accumulate")
    assert {run.batch_size for run in fewer.group("resnet-bn", own)} == {25}


@pytest.mark.parametrize(
    ("other", "stands"),
    [
        ({}, True),
        ({"micro_batch_size": 50}, False),
        ({"batch_size": 50}, False),
        ({"batch_size": 50, "micro_batch_size": 50}, False),
        ({"model": "resnet-ln"}, False),
        ({"rule": "exponential"}, False),
        ({"max_batch_size": 800}, False),
        ({"warmup_samples": 1_000}, False),
        ({"lr0": 1e-3}, False),
        ({"seed": 1}, False),
        ({"ramp": "25-100"}, False),
    ],
)
def test_a_run_stands_for_no_other_where_anything_else_differs(other, stands, tmp_path):
    one = {"rates": (1e-4,), "epochs": 2, "largest": 400}
    (donor,) = {r["lr0"]: r for r in rows(algorithms=(("invariant", "linear"),), sizes=(25,), **one)}.values()
    has = rows(algorithms=(("adama", "linear"),), sizes=(100,), **one)
    results = load(write(tmp_path, [donor | other, *has]))
    (series,) = {run.series for run in results.runs if run.series.algorithm == "adama"}
    found = [run for run in results.runs if run.series == series and run.batch_size != 100]
    assert [(run.model, run.batch_size, run.ramp) for run in found] == ([("resnet-bn", 25, "")] if stands else [])


def test_where_all_tried_few_learning_rates_the_best_is_of_those(tmp_path):
    results = load(write(tmp_path, rows(sizes=(25, 100), rates=(1e-5, 1e-4), epochs=2)))
    assert {tuple(row.tried) for row in best(results, "resnet-bn", "train_loss")} == {(1e-5, 1e-4)}


def test_a_mean_over_seeds_is_no_number_where_one_seed_has_none(tmp_path):
    found = rows(seeds=(0, 1), **SMALL)
    change(found, {"train_loss": math.nan}, algorithm="invariant", lr0=1e-3, batch_size=25, seed=1, epoch=3)
    results = load(write(tmp_path, found))
    series = row_of(results, "invariant", 1e-3).series
    seeds = [r for r in results.group("resnet-bn", series, 1e-3) if r.batch_size == 25]
    epochs, losses = mean_curve(seeds, "train_loss")
    assert epochs == [1, 2, 3]
    assert [math.isfinite(y) for y in losses] == [True, True, False]


# --------------------------------------------------------------------------- reading


def test_conditions_are_kept_apart_and_named(tmp_path):
    found = rows(algorithms=FULL, warmups=(0, 50_000), **SMALL)
    found += rows(algorithms=PAIR[:1], micro=100, **SMALL | {"sizes": (100, 400)})
    results = load(write(tmp_path, found))
    labels = [results.label("resnet-bn", series) for series in results.series("resnet-bn")]
    assert len(set(labels)) == len(labels) == 2 * len(FULL) + 1
    assert labels[:3] == [
        "Invariant Adam, η ∝ B, linear, M = 25",
        "Invariant Adam, η ∝ B, linear, M = 100",
        "Invariant Adam, η ∝ B, exponential, M = 25",
    ]
    assert "Standard Adam, η ∝ √B, warm-up 50,000" in labels


def test_a_label_tells_a_series_from_the_others_of_its_model(tmp_path):
    found = rows(**SMALL) + rows("vit", FULL[:3], **SMALL) + rows("gpt", micro=8, **SMALL)
    found += rows("vit", PAIR[:1], micro=100, **SMALL | {"sizes": (100, 400)})
    results = load(write(tmp_path, found))
    ours = {model: results.series(model)[0] for model in results.models}
    assert {model: results.label(model, series) for model, series in ours.items()} == {
        "resnet-bn": "Invariant Adam, η ∝ B",
        "vit": "Invariant Adam, η ∝ B, linear, M = 25",
        "gpt": "Invariant Adam, η ∝ B",
    }
    exponential = ours["vit"]._replace(rule="exponential")
    assert results.label("vit", ours["vit"], among=[ours["vit"], exponential]) == "Invariant Adam, η ∝ B, linear"


def test_grids_in_folders_are_read_together(tmp_path):
    for model in ("resnet-ln", "vit"):
        write(tmp_path / model, rows(model, **SMALL), model=model)
    results = load(tmp_path)
    assert results.models == ["resnet-ln", "vit"]
    assert results.grids["vit"]["model"] == "vit"
    write(tmp_path / "again", rows("vit", **SMALL))  # grids share runs
    assert len(load(tmp_path).runs) == len(results.runs)
    other = change(rows("vit", **SMALL), {"test_loss": 7.0}, batch_size=25, lr0=1e-4, epoch=3)
    write(tmp_path / "again", other)
    with pytest.raises(ValueError, match=r"different numbers for vit, Invariant Adam, η₀ = 1e-4, B = 25, seed 0"):
        load(tmp_path)
    write(tmp_path / "again", rows("vit", samples=2_000, **SMALL | {"rates": (1e-2,)}))
    with pytest.raises(ValueError, match=r"runs of vit with epochs of 2,000 and 50,000 samples"):
        load(tmp_path)


def test_a_grid_without_a_run_does_not_keep_others_from_being_drawn(tmp_path):
    write(tmp_path / "a", [])
    with pytest.raises(ValueError, match=r"results\.csv has no rows: no run of this grid is finished"):
        load(tmp_path)
    write(tmp_path / "b", rows(**SMALL))
    assert len(load(tmp_path).runs) == len(load(tmp_path / "b").runs)
    result = run(tmp_path / "b" / "results.csv", "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    (tmp_path / "a" / "results.csv").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"a.results\.csv is damaged: "):
        load(tmp_path)


def test_what_cannot_be_read_is_refused_by_file_and_line(tmp_path):
    with pytest.raises(ValueError, match=r"no results\.csv in .*: `invariant-adam reproduce` writes one"):
        load(tmp_path)
    found = rows(**SMALL)
    for change_of, message in (
        ({"train_loss": ""}, r"line 3: train_loss must be a number \(nan where a run diverged\), got ''"),
        ({"algorithm": "sgd"}, r"line 3: algorithm must be one of invariant, .*, got 'sgd'"),
        ({"batch_size": 2.5}, r"line 3: batch_size must be a whole number, got '2\.5'"),
        ({"batch_size": 0}, r"line 3: batch_size must be a finite number above 0, got '0'"),
        ({"max_batch_size": -1}, r"line 3: max_batch_size must be a finite number above 0, got '-1'"),
        ({"lr0": math.nan}, r"line 3: lr0 must be a finite number above 0, got 'nan'"),
        ({"lr0": math.inf}, r"line 3: lr0 must be a finite number above 0, got 'inf'"),
        ({"epoch": 1}, r"line 3: epoch 1 comes after epoch 1 of the same run"),
    ):
        with pytest.raises(ValueError, match=message):
            load(write(tmp_path, [found[0], found[1] | change_of, *found[2:]]))
    text = (write(tmp_path, found) / "results.csv").read_text()
    (tmp_path / "results.csv").write_text(text[: text.rindex(",")])
    with pytest.raises(ValueError, match=r"line 37 is cut off"):
        load(tmp_path)
    (tmp_path / "results.csv").write_text("\ufeff" + text, encoding="utf-8")  # as a spreadsheet saves it
    for damaged in ("[1]", "3", "{"):
        (tmp_path / "grid.json").write_text(damaged)
        assert list(load(tmp_path).grids.values()) == [{}]
    (tmp_path / "results.csv").write_text(text.replace("train_loss", "loss"))
    with pytest.raises(ValueError, match="lacks the column train_loss"):
        load(tmp_path)
    (tmp_path / "results.csv").write_text(text.splitlines()[0] + "\n")
    with pytest.raises(ValueError, match="has no rows: no run of this grid is finished"):
        load(tmp_path)


# --------------------------------------------------------------------------- figures and the command


def test_the_command_draws_everything_there_are_runs_for(tmp_path):
    found = rows(algorithms=FULL, ramps=("25-400",), **SMALL) + rows(warmups=(50_000,), **SMALL)
    result = run(write(tmp_path / "grid", found), "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    names = {path.name for path in (tmp_path / "out").iterdir()}
    parts = ("curves", "curves-warmup", "all", "batch-size", "best", "rules", "ramp")
    drawn = {f"resnet-bn-{part}.{form}" for part in parts for form in ("png", "svg")}
    drawn |= {f"{name}.{form}" for name in ("spread", "speed", "speed-test") for form in ("png", "svg")}
    assert names == drawn | {"spreads.json", "report.html"}
    for name in names:
        assert f"wrote {tmp_path / 'out' / name}" in result.stderr
    assert "one batch size: nothing to compare" in result.stdout
    lines = [line for line in result.stdout.splitlines() if line.strip().startswith("resnet-bn")]
    names = ["Standard Adam, η ∝ √B", "Invariant Adam, η ∝ B, linear"]  # the paper's order, then with a warm-up
    first, second = ([i for i, line in enumerate(lines) if f"{name}  " in line] for name in names)
    assert max(first) < min(second)
    warmed = [next(i for i, line in enumerate(lines) if f"{name}, warm-up" in line) for name in names]
    assert max(second) < warmed[0] < warmed[1]
    for path in (tmp_path / "out").glob("*.svg"):
        assert "<dc:date>" not in path.read_text()
    told = json.loads((tmp_path / "out" / "spreads.json").read_text())
    ours = next(r for r in told["spreads"] if (r["algorithm"], r["rule"], r["lr0"]) == ("invariant", "linear", 1e-4))
    assert ours["ratio"] == pytest.approx(
        next(r["spread"] for r in told["spreads"] if (r["rule"], r["lr0"]) == ("square_root", 1e-4)) / ours["spread"]
    )


def test_panels_of_unequal_batch_sizes_say_so(tmp_path):
    results = load(write(tmp_path, uneven()))
    drawn = dict(figures.figures(results))

    def titles(name):
        return [re.sub(r"\s+", " ", ax.get_title(loc="left")) for ax in drawn[name].axes if ax.get_title(loc="left")]

    every = titles("resnet-bn-all")
    assert "Invariant Adam, η ∝ B, M = 100, B = 100, 400, 800" in every  # with the stray run
    assert any(title.endswith("warm-up 25,000, B = 25, 800") for title in every)
    assert not any("B = 25" in title for title in titles("resnet-bn-curves"))  # both have the same
    assert titles("spread") == [
        "ResNet-18, batch norm, B = 25, 100, 400, 800",
        "ResNet-18, layer norm, B = 100, 400, 800",
        "ViT, QK-norm, B = 25, 100, 400",
    ]
    labels = [text.get_text() for text in drawn["spread"].legends[0].get_texts()]
    # Hollow: η₀ = 3e-4, at B = 100 and 400. What is not drawn does not lengthen the names of what is.
    assert labels == ["Invariant Adam, η ∝ B", "Standard Adam, η ∝ √B", "hollow: fewer batch sizes"]
    ticks = [text.get_text() for text in drawn["resnet-bn-best"].axes[0].get_xticklabels()]
    assert ticks == ["25", "100", "400", "800"]


def test_a_warm_up_at_one_batch_size_has_no_figure_of_its_own(tmp_path):
    cold, warm = rows(**SMALL), {"warmups": (50_000,), "largest": 400, "rates": (1e-4,), "epochs": 3}
    for sizes in ((400,), (100, 400)):
        results = load(write(tmp_path, cold + rows(sizes=sizes, **warm)))
        assert ("resnet-bn-curves-warmup" in dict(figures.figures(results))) == (len(sizes) > 1)


def test_points_of_fewer_batch_sizes_are_hollow_and_on_no_line(tmp_path):
    found = [r for r in rows(**SMALL) if not same(r, algorithm="standard", batch_size=25)]
    found += rows(sizes=(25, 100), rates=(3e-4,), epochs=3, largest=400)
    figure = dict(figures.figures(load(write(tmp_path, found))))["spread"]
    lines = [line for line in figure.axes[0].lines if line.get_marker() in "os"]
    drawn = [(line.get_markerfacecolor() == "white", line.get_linestyle(), list(line.get_xdata())) for line in lines]
    assert drawn == [
        (False, "-", [1e-4, 1e-3]),
        (True, "None", [3e-4]),
        (False, "-", []),
        (True, "None", [1e-4, 3e-4, 1e-3]),
    ]


def loss(found, **settings):
    """The training losses over epochs of the run with these settings, from the rows of the file."""
    settings = {"model": "resnet-bn", "seed": 0, "warmup_samples": 0, "micro_batch_size": 25, "ramp": ""} | settings
    return [row["train_loss"] for row in found if same(row, **settings)]


def test_the_rules_are_drawn_beside_each_other_over_what_both_have(tmp_path):
    found = uneven()
    figure = dict(figures.figures(load(write(tmp_path, found))))["vit-rules"]
    assert [ax.get_title(loc="left").split()[-1] for ax in figure.axes[:2]] == ["linear", "exponential"]
    for i, ax in enumerate(figure.axes):  # a row for each η₀, a column for each rule
        run = {"model": "vit", "algorithm": "invariant", "rule": ("linear", "exponential")[i % 2]}
        small, large = (loss(found, lr0=(1e-4, 1e-3)[i // 2], batch_size=size, **run) for size in (100, 400))
        base, other = (line.get_ydata() for line in ax.lines if len(line.get_xdata()) == 3)  # not the one at 0
        assert list(base) == [0, 0, 0]
        assert list(other) == pytest.approx([100 * (b / a - 1) for a, b in zip(small, large, strict=True)])
        assert ax.get_ylim() == figure.axes[i - i % 2].get_ylim()
    assert figure.axes[2].get_ylabel() == "η₀ = 10⁻³: difference\nfrom B = 100, %"


@pytest.mark.parametrize(("lacking", "panels"), [((), 5), ((100, 400), 3)])
def test_norms_are_drawn_beside_each_other_over_what_all_have(tmp_path, lacking, panels):
    found = [r for r in uneven() if r["model"] != "resnet-ln" or r["batch_size"] not in lacking]
    figure = dict(figures.figures(load(write(tmp_path, found))))["resnet-bn-norm"]
    shown = [ax for ax in figure.axes if ax.lines]
    titles = [re.sub(r"\s+", " ", ax.get_title(loc="left")) for ax in shown]
    norms = ["ResNet-18, batch norm: "] * 3 + ["ResNet-18, layer norm: "] * 2 if panels == 5 else [""] * 3
    names = ("Invariant Adam, η ∝ B", "Standard Adam, η ∝ √B", "Standard Adam, accumulated, η ∝ √B")
    assert titles == [norm + name for norm, name in zip(norms, names + names[:2], strict=False)]
    sizes = 3 if panels == 5 else 4  # layer norm has no B = 25; of one micro-batch accumulated Adam is Adam
    assert {len(ax.lines) for ax in shown} == {sizes + 1}  # and the line at 0
    assert len({ax.get_ylim() for ax in shown}) == 1


def test_what_each_micro_batch_size_reaches_is_drawn_at_one_batch_size(tmp_path):
    found = uneven()
    drawn = dict(figures.figures(load(write(tmp_path, found))))
    assert [name for name in drawn if name.endswith("-micro")] == ["resnet-bn-micro"]
    figure = drawn["resnet-bn-micro"]
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    ours = {25: (1e-5, 1e-4, 3e-4, 1e-3), 100: (1e-4, 3e-4, 1e-3), 400: (1e-4, 3e-4, 1e-3)}
    assert sorted(filter(None, names)) == [
        *sorted(f"Invariant Adam, η ∝ B, M = {M}" for M in ours), "Standard Adam, η ∝ √B"
    ]  # fmt: skip
    lines = {line.get_label(): line for line in figure.axes[0].lines}
    for M, rates in ours.items():
        line = lines[f"Invariant Adam, η ∝ B, M = {M}"]
        run = {"algorithm": "invariant", "rule": "linear", "batch_size": 400, "micro_batch_size": M}
        # One seed, the one that all have, where M = 25 has three.
        assert dict(zip(*line.get_data(), strict=True)) == {lr0: loss(found, lr0=lr0, **run)[-1] for lr0 in rates}
    assert list(lines["Standard Adam, η ∝ √B"].get_xdata()) == list(ours[25])
    assert figure.get_suptitle().endswith("B = 400, after 150,000 samples")


def test_a_thin_line_joins_what_was_chosen_of_other_learning_rates(tmp_path):
    drawn = dict(figures.figures(load(write(tmp_path, uneven()))))
    said = "thin: not the same η₀ were tried"
    for model, joined in (("resnet-bn", [[25], [100, 400], [800]]), ("vit", [[25, 100, 400]])):
        figure = drawn[f"{model}-best"]
        assert (said in [text.get_text() for text in figure.legends[0].get_texts()]) == (len(joined) > 1)
        colour = style.ALGORITHMS["standard"]
        lines = [line for line in figure.axes[0].lines if line.get_color() == colour and line.get_linestyle() == "-"]
        wide = [list(line.get_xdata()) for line in lines if line.get_linewidth() == 2]
        thin = [list(line.get_xdata()) for line in lines if line.get_linewidth() < 1]
        assert wide == joined
        assert thin == [[one[-1], two[0]] for one, two in itertools.pairwise(joined)]


def test_the_paper_s_curves_leave_out_learning_rates_of_few_batch_sizes(tmp_path):
    drawn = dict(figures.figures(load(write(tmp_path, uneven()))))
    legends = {name: [text.get_text() for text in drawn[name].legends[0].get_texts()] for name in drawn}
    fine = "η₀ = 3·10⁻⁴"  # at B = 100 and 400
    assert fine in legends["resnet-bn-batch-size"]
    for name in ("resnet-bn-curves", "resnet-bn-all"):
        assert fine not in legends[name]
        assert "η₀ = 10⁻³" in legends[name]


def test_what_was_tried_at_one_batch_size_has_no_panel(tmp_path):
    found = rows(**SMALL) + rows(algorithms=(("micro", "none"), ("adama", "linear")), sizes=(25,), rates=(1e-4,))
    found += rows(algorithms=(("halflife", "none"),), **SMALL)
    drawn = dict(figures.figures(load(write(tmp_path, [row for row in found if row["epoch"] <= 3]))))
    one, two = ["Invariant Adam", "Standard Adam", "Adam"], ["Standard Adam", "Invariant Adam", "Adam"]
    for name, order in (("resnet-bn-all", one), ("resnet-bn-batch-size", two)):
        titles = [ax.get_title(loc="left") for ax in drawn[name].axes]
        assert [title.split(",")[0] for title in titles if title] == order


def test_a_learning_rate_has_one_colour_in_all_figures(tmp_path):
    results = load(write(tmp_path, uneven()))
    colours = style.rate_colours(results)
    assert list(colours) == [1e-5, 1e-4, 3e-4, 1e-3, 3e-3]
    assert len(set(colours.values())) == 5
    named = {f"η₀ = {style.power_of_ten(lr0)}": colour for lr0, colour in colours.items()}
    seen = set()
    for _, figure in figures.figures(results):
        for line, text in zip(figure.legends[0].get_lines(), figure.legends[0].get_texts(), strict=True):
            if text.get_text() in named:
                assert line.get_color() == named[text.get_text()]
                seen.add(text.get_text())
    assert seen == set(named) - {"η₀ = 3·10⁻³"}  # of one run that fits nowhere


def test_a_model_that_sees_its_data_once_changes_no_figure_of_the_others(tmp_path):
    short = rows("gpt", **SMALL)
    once = rows("gpt2", sizes=(8, 256), rates=(1.2e-3,), micro=8)
    once = [row for row in once if row["algorithm"] == "invariant" or row["batch_size"] == 256]
    once = [row | {"grow": 0.1 * (row["algorithm"] == "invariant" and row["batch_size"] > 8)} for row in once]
    without, both = (load(write(tmp_path / name, found)) for name, found in (("a", short), ("b", short + once)))
    before, after = (dict(figures.figures(results)) for results in (without, both))
    # The run at B = M is a curve among those that were grown in; alone it is no comparison.
    assert set(after) - set(before) == {"gpt2-curves-grown", "gpt2-batch-size"}
    for name, figure in before.items():
        assert style.render(after[name], "svg") == style.render(figure, "svg"), name
    titles = [ax.get_title(loc="left").replace("\n", " ") for ax in after["gpt2-curves-grown"].axes]
    assert [title for title in titles if title] == [
        "Standard Adam, η\u00a0∝\u00a0√B, B\u00a0=\u00a0256",
        "Invariant Adam, η\u00a0∝\u00a0B, grown in, B\u00a0=\u00a08,\u00a0256",
    ]


@pytest.mark.parametrize("count", [1, 2, 3, 6, 7, 20])
def test_there_are_colours_for_any_number_of_learning_rates(tmp_path, count):
    results = load(write(tmp_path, rows(sizes=(25,), rates=[1e-5 * (i + 1) for i in range(count)], epochs=1)))
    assert len(set(style.rate_colours(results).values())) == count


@given(st.floats(1e-4, 1e3), st.floats(1.001, 1e6))
def test_a_logarithmic_axis_has_three_ticks_at_least_and_not_too_many(low, factor):
    ax = Figure().subplots()
    ax.plot([0, 1], [low, low * factor])
    style.dress(ax, log=True)
    below, above = ax.get_ylim()
    assert 3 <= sum(below <= tick <= above for tick in ax.yaxis.get_majorticklocs()) <= 12


@pytest.mark.parametrize(("small", "scale"), [(0.2, "symlog"), (10.0, "linear"), (0.0, "linear")])
def test_small_differences_are_seen_beside_large_ones(small, scale):
    row = Figure().subplots(1, 2, sharey=True)
    for ax, reach in zip(row, (30.0, small), strict=True):
        ax.plot([1, 2, 3], [0, -reach / 3, reach])
    style.difference_axes(row)
    assert {ax.get_yscale() for ax in row} == {scale}
    low, high = row[0].get_ylim()
    assert low < -10 < 30 < high


def test_the_headline_says_what_curves_are_means_over(tmp_path):
    three = rows(seeds=(0, 1, 2), **SMALL)
    for found, said in (
        (rows(**SMALL), "one seed"),
        (three, "mean over seeds"),
        ([r for r in three if r["seed"] == 0 or r["batch_size"] > 25], "one seed"),  # the others lack a batch size
        ([r for r in three if r["seed"] == 0 or r["lr0"] == 1e-4], "mean over seeds where there are several"),
    ):
        figure = dict(figures.figures(load(write(tmp_path, found))))["resnet-bn-curves"]
        assert figure.get_suptitle() == f"ResNet-18, batch norm: {said}"


@pytest.mark.slow
def test_the_same_results_give_the_same_bytes(tmp_path):
    results = load(write(tmp_path, rows(**SMALL)))
    for (_, one), (_, two) in zip(figures.figures(results), figures.figures(results), strict=True):
        assert style.render(one, "svg") == style.render(two, "svg")


@pytest.mark.parametrize(
    "case", ["one epoch", "one rate", "all diverged", "no accuracy", "only invariant", "first epoch"]
)
def test_sparse_grids_are_drawn_without_a_warning(tmp_path, case):
    found = rows(
        sizes=(25, 400), rates=(1e-3,) if case == "one rate" else (1e-4, 1e-3), epochs=1 + (case != "one epoch")
    )
    if case == "all diverged":
        change(found, {"train_loss": math.nan, "test_loss": math.nan}, algorithm="standard")
    if case == "no accuracy":
        change(found, {"train_accuracy": "", "test_accuracy": ""}, model="resnet-bn")
    if case == "only invariant":
        found = [row for row in found if same(row, algorithm="invariant")]
    if case == "first epoch":
        change(found, {"train_loss": math.inf}, algorithm="invariant", batch_size=400)
    results = load(write(tmp_path, found))
    names = []
    for name, figure in figures.figures(results):
        names.append(name)
        assert style.render(figure, "svg")
    assert "resnet-bn-batch-size" in names
    assert ("resnet-bn-best" in names) == (case != "one rate")
    assert ("resnet-bn-curves" in names) == (case != "only invariant")


def test_json_is_all_of_stdout_and_a_mistake_is_named(tmp_path):
    result = run(write(tmp_path, rows(sizes=(25, 400), rates=(1e-4,), epochs=2)), "--json")
    told = json.loads(result.stdout)
    assert {row["label"] for row in told["spreads"]} == {"Invariant Adam, η ∝ B", "Standard Adam, η ∝ √B"}
    assert str(tmp_path / "figures" / "report.html") in told["written"]
    wrong = run(tmp_path / "nowhere")
    assert wrong.exit_code == 2
    assert re.search(r"error: no results\.csv in .*nowhere", wrong.stderr)

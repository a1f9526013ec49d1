"""Spreads at the same final loss, the order floor, and metrics that older runs lack."""

import math
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lab_results import PAIR, rows, write

from invariant_adam_lab.results.curves import NOT_ALWAYS, Results, load
from invariant_adam_lab.results.measures import BELOW, NOT_MEASURED, OUTSIDE, final, floor, matched, measure

INVARIANT, STANDARD = PAIR


def results_of(tmp_path, points, **more):
    """Results whose runs have, at each algorithm and η₀, this final loss and this spread over two batch sizes."""
    found = []
    for (algorithm, lr0), (loss, apart) in points.items():
        for row in rows(algorithms=(algorithm,), sizes=(25, 800), rates=(lr0,), epochs=2, **more):
            row["train_loss"] = loss * math.exp(apart / 2 if row["batch_size"] == 25 else -apart / 2)
            found.append(row)
    return load(write(tmp_path, found))


def at(results: Results, lr0: float, **more):
    (ours,) = (s for s in results.series("resnet-bn") if s.algorithm == "invariant")
    return matched(results, "resnet-bn", ours, lr0, **more)


@given(st.floats(0.0, 1.0), st.floats(0.5, 1.5), st.floats(0.001, 0.1))
def test_between_two_learning_rates_loss_and_spread_are_interpolated_in_their_logarithms(part, slope, own):
    """A rival whose spread is a power of its final loss has the same power everywhere between."""
    loss = math.exp((1 - part) * math.log(1.4) + part * math.log(0.6))
    points = {(STANDARD, lr0): (x, 0.1 * x**-slope) for lr0, x in ((1e-5, 1.5), (1e-4, 0.5))}
    with tempfile.TemporaryDirectory() as folder:
        found = at(results_of(Path(folder), points | {(INVARIANT, 1e-3): (loss, own)}), 1e-3)
    assert found.loss == pytest.approx(loss)
    assert found.ratio == pytest.approx(0.1 * loss**-slope / own, rel=1e-6)
    assert found.between == (1e-5, 1e-4)


def test_what_lies_outside_of_what_was_tried_is_said_and_not_guessed(tmp_path):
    points = {(STANDARD, 1e-5): (1.5, 0.1), (STANDARD, 1e-4): (0.5, 0.2), (STANDARD, 1e-3): (2.0, 0.3)}
    points |= {(INVARIANT, lr0): (loss, 0.01) for lr0, loss in ((1e-5, 1.8), (1e-4, 0.4), (1e-3, 1.2))}
    results = results_of(tmp_path, points)
    # 1.8 is reached by a learning rate that is too large alone, which is no slower rival but a worse one.
    assert [(found.why, found.ratio) for found in (at(results, lr0) for lr0 in (1e-5, 1e-4))] == [
        (why, pytest.approx(math.nan, nan_ok=True)) for why in (OUTSIDE, BELOW)
    ]
    assert at(results, 1e-3).between == (1e-5, 1e-4)
    assert at(results, 1e-3, metric="end_train_loss").why == NOT_MEASURED


def test_only_rivals_with_all_batch_sizes_count_and_seeds_are_those_of_all(tmp_path):
    points = {(STANDARD, 1e-5): (1.5, 0.1), (STANDARD, 1e-4): (0.5, 0.2), (INVARIANT, 1e-4): (1.0, 0.01)}
    whole = results_of(tmp_path / "whole", points)
    lacking = [run for run in whole.runs if (run.lr0, run.batch_size) != (1e-5, 800)]
    assert at(whole, 1e-4).why == ""
    assert at(whole._replace(runs=lacking), 1e-4).why == OUTSIDE
    more = results_of(tmp_path / "more", {(INVARIANT, 1e-4): (2.0, 0.5)}, seeds=(1,))
    assert at(whole._replace(runs=[*whole.runs, *more.runs]), 1e-4) == at(whole, 1e-4)


def test_the_order_floor_is_over_orders_within_a_seed(tmp_path):
    found = []
    for order, factor in ((0, 1.0), (1, 1.1), (2, 0.9)):
        for row in rows(algorithms=(INVARIANT,), sizes=(25,), rates=(1e-4,), seeds=(0, 1), epochs=3, largest=800):
            found.append(row | {"order": order, "train_loss": 2.0 * factor})
    found += rows(sizes=(100, 800), rates=(1e-4,), epochs=3, largest=800)
    results = load(write(tmp_path, found))
    (ours,) = (s for s in results.series("resnet-bn") if s.algorithm == "invariant")
    assert floor(results, "resnet-bn", ours, 1e-4) == pytest.approx(math.log(1.1 / 0.9))
    assert math.isnan(floor(results, "resnet-bn", ours, 1e-3))
    assert math.isnan(floor(results, "resnet-bn", ours.rival, 1e-4))  # its learning rate at B = M is another
    assert {run.order for run in results.group("resnet-bn", ours)} == {0}
    grown = ours._replace(grow=0.1)
    cut = [run._replace(series=grown) for run in results.group("resnet-bn", ours) if run.batch_size > 25]
    assert math.isnan(floor(results._replace(runs=cut), "resnet-bn", grown, 1e-4))


def test_one_micro_batch_is_the_run_of_a_series_that_is_grown_in(tmp_path):
    found = rows(algorithms=(INVARIANT,), rates=(1e-4,))
    found += [row | {"grow": 0.1} for row in found if row["batch_size"] > 25]
    results = load(write(tmp_path, found))
    plain, grown = results.series("resnet-bn")
    assert (plain.grow, grown.grow) == (0.0, 0.1)
    assert results.label("resnet-bn", grown) == "Invariant Adam, η ∝ B, grown in"
    assert {run.batch_size for run in results.group("resnet-bn", grown)} == {25, 100, 400, 800}
    assert grown.rival.grow == 0.0


def test_spreads_of_every_metric(tmp_path):
    found = rows(algorithms=(INVARIANT,), sizes=(25, 800), rates=(1e-4,), epochs=2)
    for row in found:
        large = row["batch_size"] == 800
        row |= {"test_accuracy": 0.5 + 0.02 * large, "test_loss": math.exp(0.03 * large), "end_train_loss": 2.0}
    found[0].pop("end_train_loss")  # one epoch of one run
    runs = load(write(tmp_path, found)).runs
    assert measure(runs, metric="test_accuracy").value == pytest.approx(0.02)
    assert measure(runs, metric="test_loss").value == pytest.approx(0.03)
    assert math.isnan(measure(runs, metric="end_train_loss").value)
    assert final(runs, "test_loss") == pytest.approx(math.exp(0.015))
    assert "end_train_loss" in NOT_ALWAYS

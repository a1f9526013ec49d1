"""`scale-up`: at B₀ every method is AdamW, runs are kept, and the table is their difference to B₀."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from lab_runs import CPU
from typer.testing import CliRunner

from invariant_adam_lab import record, scale_up
from invariant_adam_lab.cli import app
from invariant_adam_lab.grids.store import Setup
from invariant_adam_lab.training import data as lab_data
from invariant_adam_lab.training import train as lab_train
from invariant_adam_lab.training.runs import check

ROOT = Path(__file__).parents[2]
TEXT = "".join(chr(97 + (i * i // 7 + i // 3) % 23) for i in range(60_000))
TINY = scale_up.Preset(256, 1, (1e-3,), (0,))
LAB = ("resnet-ln", "gpt2")
SMALL = Setup(Path(), "scale-up", "cpu", "made-up", True, made_up=True)


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    return lab_data.text(tmp_path / "text.txt")


class Told(list):
    """What is told of runs."""

    def __call__(self, kind, case, what):
        self.append((kind, case, what))


def rows_in(out):
    return record.Rows(out, "made by a test", "scale-up", CPU)


def invoke(*words):
    return CliRunner().invoke(app, ["scale-up", *map(str, words)], env={"COLUMNS": "200"})


def losses_of(model, cases):
    """The losses that the lab has for cases of a small model."""
    told = Told()
    scale_up.by_lab(model, scale_up.PRESETS[model]["smoke"], SMALL)(list(cases), told)
    assert {kind for kind, *_ in told} == {"done"}
    return {case: measured["loss"] for _, case, measured in told}


def test_at_the_tuned_batch_every_method_is_adamw(text):
    data = scale_up.cut(text, TINY.samples, CPU)
    losses = {
        method: scale_up.train(scale_up.Case(1e-3, 0, scale_up.MICRO, method, 256, 1), data)
        for method in ("tuned", "adam, √", "exponential", "linear", "long_momentum", "power 0.5, grown in")
    }
    assert max(losses.values()) - min(losses.values()) < 1e-4
    far = scale_up.train(scale_up.Case(1e-3, 0, 4 * scale_up.MICRO, "adam, unchanged", 256, 1), data)
    assert far > losses["tuned"] + 0.01


@pytest.mark.parametrize("model", LAB)
def test_at_the_tuned_batch_every_method_of_the_lab_is_adamw(model):
    methods = ("tuned", *scale_up.FIRST, *scale_up.LATER)
    losses = losses_of(model, [scale_up.Case(1e-3, 0, 5, method, 80, 1) for method in methods])
    assert len(losses) == len(methods) - 1  # AdamW unchanged is the tuned run itself
    assert max(losses.values()) - min(losses.values()) < 1e-4
    larger = losses_of(model, [scale_up.Case(1e-3, 0, 20, method, 80, 2) for method in methods[1:]])
    assert len(set(larger.values())) == len(larger)  # and elsewhere no two are one
    assert len(larger) == len(methods) - 1


def test_growing_in_cuts_the_first_batches(text):
    data = scale_up.cut(text, TINY.samples, CPU)
    losses = [
        scale_up.train(scale_up.Case(1e-3, 0, 64, method, 256, 1), data)
        for method in ("tuned", "exponential", "exponential, grown in")
    ]
    assert losses[1] == losses[0] != losses[2]  # one rule, and another first update


@pytest.mark.parametrize("model", scale_up.PRESETS)
@pytest.mark.parametrize("preset", ["smoke", "short", "full"])
def test_each_learning_rate_is_finished_before_the_next(model, preset):
    chosen = scale_up.PRESETS[model][preset]
    cases = scale_up.cases(chosen)
    assert len(set(cases)) == len(cases)
    assert chosen.samples % (16 * chosen.micro) == 0
    assert {case.batch for case in cases} == {chosen.micro, 4 * chosen.micro, 16 * chosen.micro}
    assert cases[0] == scale_up.Case(chosen.lrs[0], 0, chosen.micro, "tuned", chosen.samples, chosen.epochs)
    first = chosen.methods[0]
    linear = "linear" in first  # which ends at ργ₁ = 1
    part = cases[1 : 2 * len(first) + 1 - linear]
    assert {case.lr for case in part} == {chosen.lrs[0]}
    assert [case.method for case in part] == [*first, *(name for name in first if name != "linear")]
    assert {case.method for case in cases} == {"tuned", *(name for group in chosen.methods for name in group)}
    if model in LAB:
        runs = {check(scale_up.run_of(case, model, chosen)) for case in cases}
        assert len(runs) == len(cases)
        assert {run.anchor for run in runs} == {chosen.micro}


def test_runs_are_kept_and_the_table_is_made_of_them(text, tmp_path, monkeypatch):
    monkeypatch.setattr(scale_up, "FACTORS", (4,))
    preset = scale_up.choose(TINY, methods=("exponential", "adam:sqrt"))
    out, told = tmp_path / "out.json", Told()
    make = scale_up.by_loop(text, preset, CPU)
    result = scale_up.measure(preset, rows_in(out), make, told)
    assert [row["method"] for row in result["rows"]] == ["tuned", "exponential", "adam, √"]
    tuned, ours, adam = (row["loss"] for row in result["rows"])
    assert list(scale_up.table(result)) == [
        ["", "0.001, B = 64"],
        ["AdamW, B₀ = 16", f"{tuned:.3f}"],
        ["exponential", f"{ours - tuned:+.3f}"],
        ["adam, √", f"{adam - tuned:+.3f}"],
    ]
    monkeypatch.setattr(scale_up, "train", None)  # nothing is trained again
    assert scale_up.measure(preset, rows_in(out), make, told) == result
    assert told[:3] == told[3:]
    assert [what for *_, what in told[:3]] == result["rows"]


@pytest.mark.parametrize("model", LAB)
def test_a_stopped_command_goes_on_with_the_runs_that_are_missing(model, tmp_path):
    out = tmp_path / "out.json"
    words = ["--model", model, "--device", "cpu", "--methods", "adam:sqrt,long_momentum:grown-in", "--out", out]
    shown = invoke(*words, "--budget", 0)
    assert shown.exit_code == 0, shown.output
    assert "--budget was too small for 5 runs, first tuned, B = 5, lr 0.01: the budget is spent" in shown.stderr
    assert not out.exists()
    shown = invoke(*words[:-3], "adam:sqrt", *words[-2:])
    assert shown.exit_code == 0, shown.output
    kept = json.loads(out.read_text(encoding="utf-8"))["rows"]
    assert [(row["method"], row["batch"]) for row in kept] == [("tuned", 5), ("adam, √", 20), ("adam, √", 80)]
    shown = invoke(*words, "--json")
    assert shown.exit_code == 0, shown.output
    result = json.loads(shown.stdout)
    assert result == json.loads(out.read_text(encoding="utf-8"))
    assert result["rows"][:3] == kept  # as they were, dates and seconds too
    assert [row["method"] for row in result["rows"][3:]] == ["long_momentum, grown in"] * 2
    assert all(math.isfinite(row[key]) for row in result["rows"] for key in ("loss", "train_loss", "seconds"))
    assert result["benchmark"] == f"scale-up {model}, data made-up"
    assert result["command"] == f"invariant-adam scale-up --model {model} --preset smoke"


@pytest.mark.parametrize("option", ["--lanes", pytest.param("--workers", marks=pytest.mark.slow)])
def test_several_runs_at_once_are_the_runs_alone(option, tmp_path):
    words = ["--model", "resnet-ln", "--device", "cpu", "--methods", "exponential", "--json", "--out"]
    alone, together = (
        {(row["method"], row["batch"]): row["loss"] for row in json.loads(shown.stdout)["rows"]}
        for shown in (invoke(*words, tmp_path / "a.json"), invoke(*words, tmp_path / "b.json", option, 3))
    )
    assert alone == together
    assert len(alone) == 3


def test_a_run_that_fails_is_named_and_the_others_are_made(tmp_path, monkeypatch):
    whole = lab_train.train

    def broken(run, source, **how):
        if run.rule == "square_root":
            raise RuntimeError("out of memory")
        return (yield from whole(run, source, **how))

    monkeypatch.setattr(lab_train, "train", broken)
    out = tmp_path / "out.json"
    shown = invoke("--model", "resnet-ln", "--device", "cpu", "--methods", "adam:linear,adam:sqrt", "--out", out)
    assert shown.exit_code == 1
    assert "adam, √, B = 20, lr 0.01 failed: RuntimeError: out of memory" in shown.stderr
    made = [row["method"] for row in json.loads(out.read_text(encoding="utf-8"))["rows"]]
    assert made == ["tuned", "adam, linear", "adam, linear"]


def test_a_run_that_diverges_is_said_to(tmp_path):
    assert losses_of("resnet-ln", [scale_up.Case(1e30, 0, 5, "tuned", 80, 2)]).popitem()[1] is None
    settings = {"lr": 1.0, "seed": 0, "samples": 80, "epochs": 1}
    rows = [settings | {"batch": 5, "method": "tuned", "loss": 2.0}]
    larger = settings | {"batch": 20, "method": "adam, √"}
    rows += [larger | {"loss": None}, larger | {"loss": 3.0, "seed": 1}]
    assert list(scale_up.table({"rows": rows}))[2] == ["adam, √", "diverged"]
    rows[1]["loss"] = 2.5  # the other seed has no run at B₀
    assert list(scale_up.table({"rows": rows}))[2] == ["adam, √", "+0.500"]
    assert list(scale_up.table({"rows": rows[1:]})) == [[""], ["AdamW, B₀ = 0"]]
    assert list(scale_up.table({"rows": []})) == [[""], ["AdamW, B₀ = 0"]]


def test_the_budget_of_gpt_ends_between_two_runs(text):
    told = Told()
    preset = TINY._replace(methods=(("adam, √",),))
    scale_up.by_loop(text, preset, CPU, time.time() - 1)(scale_up.cases(preset), told)
    assert [(kind, what) for kind, _, what in told] == [("skipped", "the budget is spent")] * 3


def test_the_command_prints_what_the_file_holds(text, tmp_path, monkeypatch):
    monkeypatch.setattr(scale_up, "FACTORS", (4,))
    out = tmp_path / "out.json"
    threads = torch.get_num_threads()
    words = ["--data", tmp_path / "text.txt", "--samples", 256, "--methods", "adam:sqrt", "--out", out]
    shown = invoke(*words, "--json")
    assert shown.exit_code == 0, shown.output
    assert json.loads(shown.stdout) == json.loads(out.read_text(encoding="utf-8"))
    assert json.loads(shown.stdout)["command"] == "invariant-adam scale-up --preset smoke --samples 256"
    assert torch.get_num_threads() == threads
    shown = invoke(*words)
    assert "AdamW, B₀ = 16" in shown.stdout
    assert "adam, √" in shown.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--lrs", "0"], "--lrs must be finite numbers above 0, got 0.0"),
        (["--lrs", "x"], "--lrs must be numbers with commas between them, got 'x'"),
        (["--lrs", ""], "--lrs must name at least one, got none"),
        (["--seeds", "-1"], "--seeds must be from 0 to 2**53 - 1, got -1"),
        (["--samples", "1000"], "--samples must be a multiple of the largest batch, 256, so that all batches see the"),
        (["--samples", "1000"], "got 1000; use 1024"),
        (["--epochs", "0"], "--epochs must be at least 1, got 0"),
        (["--methods", "adam"], "--methods must be some of exponential, exponential:grown-in, linear, long_momentum"),
        (["--model", "gpt2", "--methods", "power-0.5:grown-in"], "adam:sqrt, adam:unchanged, adam:linear"),
        (["--lanes", "2"], "--lanes is for --model resnet-ln and gpt2; gpt makes one run after the other"),
        (["--data", "none"], "--data: none does not exist"),
        (["--model", "gpt2", "--preset", "short"], "gpt2 trains on a text of your own; name a file or a folder by"),
        (["--model", "gpt2", "--data", "x"], "--preset smoke trains on made-up data; leave it out"),
        (["--model", "gpt2", "--samples", "800"], "share no sample of the"),
    ],
)
def test_bad_input_is_named_with_its_remedy(words, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("INVARIANT_ADAM_DATA", str(tmp_path))
    shown = invoke(*words, "--device", "cpu")
    assert shown.exit_code == 2
    assert said in shown.stderr
    assert "Traceback" not in shown.output
    assert shown.stderr.count("error:") == 1
    assert not list(tmp_path.rglob("*.json"))


def test_one_file_holds_one_experiment(tmp_path):
    out = tmp_path / "out.json"
    words = ["--device", "cpu", "--methods", "linear", "--out", out]
    assert invoke("--model", "resnet-ln", *words).exit_code == 0
    shown = invoke("--model", "gpt2", *words)
    assert shown.exit_code == 2
    assert "one file holds rows that can be compared; choose another file" in shown.stderr


def test_the_page_says_of_which_models_there_are_no_results():
    page = (ROOT / "docs" / "scale_up.md").read_text(encoding="utf-8")
    for model in LAB:
        kept = ROOT / "benchmarks" / "results" / f"scale_up_{model}.json"
        assert (f"no results of `{model}` yet" in page) != kept.exists()


def test_results_of_other_models_are_tables_of_their_own(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import pages

    results = tmp_path / "benchmarks" / "results"
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    assert list(pages.scale_up_model_rows()) == []
    for model in LAB:
        rows = record.Rows(results / f"scale_up_{model}.json", "a command", "scale-up", CPU)
        found = ("tuned", 8, 2.0), ("adam, √", 32, 2.5), ("adam, linear", 32, 1.9), ("adam, √", 128, None)
        for method, batch, loss in found:
            settings = {"lr": 1e-3, "seed": 0, "batch": batch, "method": method, "samples": 1280, "epochs": 2}
            rows.add(settings, {"loss": loss})
    lines = list(pages.scale_up_model_rows())
    assert lines[0] == "ResNet-18, layer norm (`resnet-ln`), M = B₀ = 8, 2,560 samples in 2 epochs, one seed:"
    assert lines.count("| lr at B₀, batch | 0.001, B = 32 | 0.001, B = 128 |") == len(LAB)
    assert lines.count("| adam, √ | +0.500 | diverged |") == len(LAB)
    assert "AdamW at B₀ alone: 2.000 at 0.001." in lines
    assert lines[-3].endswith("kept as `scale_up_gpt2.json`.")
    assert lines[-1] == "Lowest loss: adam, linear at 0.001, B = 32 (-0.100; then adam, √, +0.500)."


def test_what_the_page_says_is_in_the_results():
    rows = json.loads((ROOT / "benchmarks" / "results" / "scale_up.json").read_text(encoding="utf-8"))["rows"]
    each = defaultdict(list)
    for row in rows:
        each[row["lr"], row["batch"], row["method"]].append(row["loss"])
    assert {len(losses) for losses in each.values()} == {3}  # seeds
    loss = {key: statistics.mean(losses) for key, losses in each.items()}
    lrs, best, ours = (3e-4, 1e-3, 3e-3, 1e-2), 1e-2, "long_momentum, grown in"
    tuned = {lr: x for (lr, _, method), x in loss.items() if method == "tuned"}
    assert min(tuned, key=tuned.get) == best
    assert min(tuned) < best < max(tuned)  # inside the range

    def lowest(lr, batch):
        found = {method: x for (a, b, method), x in loss.items() if (a, b) == (lr, batch)}
        return min(found, key=found.get), max(found, key=found.get)

    def noise(key):
        gaps = [a - b for a, b in zip(each[key], each[key[0], 16, "tuned"], strict=True)]
        return statistics.stdev(gaps) / 3**0.5

    assert lowest(best, 64)[0] == lowest(best, 256)[0] == "adam, unchanged"
    assert lowest(best, 256)[1] == "adam, linear"
    assert lowest(3e-4, 64) == lowest(1e-3, 64) == ("adam, linear", "adam, unchanged")
    gaps = {(lr, b): loss[lr, b, ours] - loss[lr, b, "adam, √"] for lr in lrs for b in (64, 256)}
    assert sum(gap < -0.01 for gap in gaps.values()) == 5
    assert {key for key, gap in gaps.items() if gap > 0.01} == {(3e-3, 256), (1e-2, 64)}
    for (lr, b), gap in gaps.items():
        assert gap < 2 * (noise((lr, b, ours)) ** 2 + noise((lr, b, "adam, √")) ** 2) ** 0.5
    for lr in lrs:
        half, quarter, none = (loss[lr, 64, m] for m in ("power 0.5, grown in", ours, "power 0.0, grown in"))
        assert half < quarter + 0.002
        assert none > half
        half, quarter, none = (loss[lr, 256, m] for m in ("power 0.5, grown in", ours, "power 0.0, grown in"))
        assert (quarter < half) == (lr != 1e-3)
        assert none > min(half, quarter)
        assert quarter < loss[lr, 256, "long_momentum"]
        assert (loss[lr, 256, "exponential, grown in"] < loss[lr, 256, "exponential"]) == (lr != best)
        for method in ("exponential", "long_momentum"):
            assert abs(loss[lr, 64, method] - loss[lr, 64, f"{method}, grown in"]) < 0.02
    assert max(noise((lr, 64, m)) for lr, b, m in loss if lr <= 3e-3 and b == 64) < 0.02
    assert max(noise(key) for key in loss if key[1] > 16) < 0.1
    near = {m: abs(x - tuned[3e-4]) for (lr, b, m), x in loss.items() if (lr, b) == (3e-4, 64)}
    assert near["exponential"] == pytest.approx(min(near.values()), abs=1e-3)
    near = {m: abs(x - tuned[3e-4]) for (lr, b, m), x in loss.items() if (lr, b) == (3e-4, 256)}
    assert near[ours] == min(near.values())


def test_what_the_page_says_of_resnet_is_in_the_results():
    page = " ".join((ROOT / "docs" / "scale_up.md").read_text(encoding="utf-8").split())
    rows = json.loads((ROOT / "benchmarks" / "results" / "scale_up_resnet-ln.json").read_text("utf-8"))["rows"]
    tuned = {row["lr"]: row["loss"] for row in rows if row["method"] == "tuned"}
    gaps = {
        (row["lr"], row["batch"], row["method"]): row["loss"] - tuned[row["lr"]] for row in rows if row["lr"] in tuned
    }

    def of(lr, batch):
        return {method: gap for (a, b, method), gap in gaps.items() if (a, b) == (lr, batch) and method != "tuned"}

    assert "AdamW with lr ∝ √B loses the least" in page
    for lr in tuned:
        assert min(of(lr, 400), key=of(lr, 400).get) == "adam, √"
        assert min(of(lr, 400).values()) > 0.2  # much
        assert (
            min(gap for method, gap in of(lr, 100).items() if "grown in" in method) < 0.03
        )  # a few hundredths at most
    better = of(min(tuned, key=tuned.get), 100)
    assert min(better, key=better.get) == "long_momentum, grown in"

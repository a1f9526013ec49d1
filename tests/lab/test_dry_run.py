"""What runs cost, by what others took, and what a dry run says of it."""

import json
import os
import re
import subprocess
import sys

import pytest
from lab_runs import TINY, Told, invoke

from invariant_adam_lab.grids import cost, grid, store, workers
from invariant_adam_lab.grids.grid import Choice
from invariant_adam_lab.grids.store import Setup
from invariant_adam_lab.results.curves import PER_EPOCH, rate
from invariant_adam_lab.training import data
from invariant_adam_lab.training.runs import Run


def test_the_pace_forgets():
    pace = cost.Pace(2)
    assert pace.needs(4.0) == 4.0
    pace.took(1.0, 0.0)
    assert pace.needs(4.0) == 4.0
    pace.took(6.0, 2.0)
    pace.took(1.0, 2.0)
    assert pace.needs(4.0) == 12.0
    pace.took(3.0, 2.0)
    assert pace.needs(4.0) == 6.0
    pace.took(1.0, 2.0)
    pace.took(1.0, 2.0)
    assert pace.needs(4.0) == 4.0


def test_costs_come_from_finished_runs(tmp_path, monkeypatch):
    setup = Setup(tmp_path, "a-grid", "cpu", "some data", lanes=2)
    monkeypatch.setattr(cost, "SECONDS", tmp_path / "seconds.json")
    run = Run("resnet-bn", "standard", "square_root", 100, 25, 800, 1e-4, 0, 2, samples=8_000)
    row = dict.fromkeys(PER_EPOCH, 1.0) | {"epoch": 1, "samples": 8_000, "seconds": 16.0}
    store.save(run, [row, {**row, "epoch": 2, "samples": 16_000}], setup)
    # The least of equal ones; neither small models nor ramps, which have two batch sizes.
    for other, seconds in (({"seed": 1}, 32.0), ({"small": True}, 1.0), ({"ramp": "100-800"}, 1.0)):
        store.save(run._replace(**other), [row | {"seconds": seconds}] * 2, setup)
    known, source = cost.costs(tmp_path, "cpu")
    assert known == {("resnet-bn", "standard", 100): 0.001}
    assert str(tmp_path) in source
    assert cost.estimate(run, known) == pytest.approx(16.0)
    assert cost.estimate(run._replace(samples=0, epochs=1), known) == pytest.approx(50.0)
    assert cost.estimate(run._replace(batch_size=25), known) > 16.0
    assert cost.estimate(run._replace(model="vit"), known) is None
    assert cost.costs(tmp_path, "cuda") == ({}, "")
    cost.ship(tmp_path, "cpu")
    shipped, source = cost.costs(tmp_path / "nothing", "cuda")
    assert shipped == known
    assert source.startswith("runs on ")
    # They are a GPU's and of whole models: a CPU's run, or a small one's, would be thought to take seconds, or hours.
    assert cost.costs(tmp_path / "nothing", "cpu") == cost.costs(tmp_path, "cpu", small=True) == ({}, "")
    assert cost.costs(tmp_path / "nothing", "cuda", small=True) == ({}, "")
    alone = {"model": "resnet-bn", "algorithm": "standard", "seconds": 5.0}
    cost.ship(tmp_path, "cpu", alone=[{**alone, "batch_size": size} for size in (100, 800)])
    shipped, _ = cost.costs(tmp_path / "nothing", "cuda")
    assert shipped == {("resnet-bn", "standard", size): 1e-4 for size in (100, 800)}


def test_an_algorithm_without_a_cost_borrows_one():
    known = {("vit", "invariant", 25): 3.0, ("vit", "standard", 25): 2.0, ("vit", "standard", 400): 1.0}
    known |= {("vit", "accumulate", 400): 9.0, ("resnet-bn", "adama", 100): 9.0}
    run = Run("vit", "adama", "square_root", 50, 25, 400, 1e-4, 0, 1, samples=400)
    assert cost.lender(run, known) == ("vit", "invariant", 25)  # the nearest batch size, and there the dearest
    assert cost.lender(run._replace(batch_size=200), known) == ("vit", "standard", 400)
    assert cost.estimate(run._replace(batch_size=25), known) == pytest.approx(3.0 * 400)
    alone = {("vit", "accumulate", 400): 9.0}
    assert cost.lender(run, alone) is None
    assert cost.lender(run._replace(algorithm="accumulate"), known) == ("vit", "accumulate", 400)
    assert cost.estimate(run._replace(algorithm="accumulate", model="resnet-bn"), known) is None
    own = known | {("vit", "adama", 400): 5.0}
    assert cost.lender(run, own) == ("vit", "adama", 400)


def dry(monkeypatch, *words: str) -> str:
    """What a dry run shows at a terminal of 80 columns."""
    monkeypatch.setattr(sys, "argv", ["invariant-adam", "reproduce", *words, "--dry-run"])
    found = invoke(*words, "--dry-run")
    assert found.exit_code == 0, found.output
    return found.stdout


def test_the_dry_run_shows_the_grid_its_cost_and_the_commands(tmp_path):
    words = ["resnet-bn", "--preset", "paper", "--dry-run", "--gpus", "2", "--out", str(tmp_path)]
    shown = invoke(*words)
    assert shown.exit_code == 0, shown.output
    assert "144 runs of 200 epochs, 0 finished" in shown.stdout
    assert "--shard $i/2" in shown.stdout
    assert list(tmp_path.iterdir()) == []
    found = json.loads(invoke(*words, "--json").stdout)
    assert len(found["runs"]) == 144
    assert len(found["commands"]) == 3
    assert found["cost"]["borrowed"] == found["cost"]["unknown"] == []
    assert "--shard" not in invoke(*words, "--gpus", "1").stdout


@pytest.mark.parametrize("model", ["resnet-bn", "gpt"])
@pytest.mark.parametrize("name", grid.GRIDS)
@pytest.mark.parametrize("preset", grid.PRESETS)
@pytest.mark.parametrize("more", [[], ["--warmup", "0,50000", "--seeds", "0,1,2,3"]])
def test_the_dry_run_breaks_no_number_at_80_columns(model, name, preset, more, monkeypatch):
    shown = dry(monkeypatch, model, "--preset", preset, "--grid", name, "--out", "o", *more)
    runs = grid.plan(model, preset, name, Choice(warmup_samples=(0, 50_000) if more else (0,))).runs
    assert all(len(line) <= 80 for line in shown.splitlines())
    words = set(shown.split())
    assert words >= {str(run.batch_size) for run in runs}
    assert words >= {rate(run.lr0) for run in runs}
    assert ("warm-up" in words) == ("50,000" in words) == bool(more)
    assert "…" not in shown


def test_the_dry_run_borrows_costs_and_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(cost, "SECONDS", tmp_path / "seconds.json")
    words = ["vit", "--grid", "rivals", "--out", str(tmp_path)]
    assert "No cost is known" in dry(monkeypatch, *words)
    row = {"model": "vit", "algorithm": "invariant", "batch_size": 25, "seconds": 0.01}
    cost.SECONDS.write_text(json.dumps({"device": "a test", "rows": [row]}))
    shown = dry(monkeypatch, *words)
    assert re.search(r"invariant +linear +9 +\d+\.\d\d ", shown)
    assert len(re.findall(r"(?:adama|halflife|standard) .* 9 +\d+\.\d\d\*", shown)) == 4
    assert "* borrowed" in shown
    left = r"What is left takes about [\d.]+ hours on one GPU, [\d.]+ hours on 8, by runs on a test\."
    assert re.search(left, " ".join(shown.split()))
    shown = dry(monkeypatch, "vit", "--grid", "norm", "--out", str(tmp_path))
    assert re.search(r"accumulate .* \?", shown)
    assert "takes at least" in shown
    assert "9 runs of accumulate, of which nothing was measured" in shown
    told = json.loads(invoke(*words, "--algorithms", "adama,accumulate", "--dry-run", "--json").stdout)["cost"]
    assert (told["borrowed"], told["unknown"]) == (["adama"], ["accumulate"])
    assert told["seconds"] > 0
    assert "No cost is known" in dry(monkeypatch, *words, "--device", "cpu")  # a GPU's says nothing of a CPU


def test_the_dry_runs_commands_run(monkeypatch, tmp_path):
    """A shell that runs what is printed calls the command once for each GPU, and then to gather."""
    words = ["vit", "--shard", "1/3", "--out", f"{tmp_path}/a folder, and a rather long one", "--gpus=3"]
    lines = dry(monkeypatch, *words).partition("To run it")[2].splitlines()[1:]
    script = "\n".join(line for line in lines if line.startswith("  "))
    fake = tmp_path / "bin" / "invariant-adam"
    fake.parent.mkdir()
    fake.write_text(
        f"#!{sys.executable}\nimport json, os, sys\n"
        "print(json.dumps([os.environ.get('CUDA_VISIBLE_DEVICES'), sys.argv[1:]]))\n"
    )
    fake.chmod(0o755)
    paths = f"{fake.parent}{os.pathsep}{os.environ['PATH']}"
    environment = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"} | {"PATH": paths}
    last = subprocess.run(
        ["sh", "-e"], input=script, text=True, check=True, cwd=tmp_path, env=environment, stdout=subprocess.PIPE
    )
    kept = ["reproduce", "vit", "--out", words[4]]
    assert json.loads(last.stdout) == [None, kept]
    for i in range(1, 4):
        told = json.loads((tmp_path / f"shard-{i}.log").read_text())
        assert told == [str(i - 1), [*kept, "--shard", f"{i}/3", "--no-figures"]]


def test_a_dry_run_writes_nothing_and_counts_what_is_done(setup, monkeypatch):
    words = ["vit", "--preset", "smoke", "--device", "cpu", "--out", str(setup.out), "--epochs", "1", "--images", "40"]
    words += ["--lrs", "1e-3", "--batch-sizes", "5,20"]
    found = grid.plan("vit", "smoke", choice=TINY)
    workers.make(found.runs[:1], setup, Told())
    before = sorted(setup.out.rglob("*"))
    shown = dry(monkeypatch, *words, "--grid", "rivals")
    assert "10 runs of 1 epoch, 1 finished" in shown
    assert re.search(r"invariant +linear +2 +1 ", shown)
    assert "it takes seconds" in shown
    assert sorted(setup.out.rglob("*")) == before
    workers.make(found.runs[1:], setup, Told())
    shown = dry(monkeypatch, *words)
    assert "Nothing is left to do. To gather and draw it:\n  invariant-adam reproduce vit " in shown
    assert "--dry-run" not in shown


def test_a_dry_run_for_gpus_counts_their_runs_where_there_is_none(setup, monkeypatch):
    choice = TINY._replace(batch_sizes=(400,), samples=800)
    there = setup._replace(
        grid="vit-curves-short-e1-n800", device="cuda", precision="bfloat16", digest=data.CIFAR10_DIGEST
    )
    for run in grid.plan("vit", "short", choice=choice).runs[:1]:
        store.save(run, [dict.fromkeys(PER_EPOCH, 1.0)], there._replace(device="cpu"))
        wrong, right = (there.folder / f"{store.run_id(run, s)}.json" for s in (there._replace(device="cpu"), there))
        wrong.rename(right)
    words = ["vit", "--epochs", "1", "--images", "800", "--lrs", "1e-3", "--batch-sizes", "400"]
    words += ["--out", str(setup.out)]
    assert "2 runs of 1 epoch, 1 finished" in dry(monkeypatch, *words)
    assert "2 runs of 1 epoch, 0 finished" in dry(monkeypatch, *words, "--device", "cpu")


def test_a_dry_run_for_one_device_speaks_of_one(monkeypatch, tmp_path):
    """However long its command is."""
    words = ["vit", "--out", str(tmp_path / "a folder with a name that makes the command longer than a line"), "--lrs"]
    words += ["1e-5,1e-4,1e-3"]
    for more in (["--gpus", "1"], ["--device", "cpu"], ["--device", "cpu", "--gpus", "4"]):
        shown = dry(monkeypatch, *words, *more)
        assert "--shard" not in shown
        assert " \\\n" in shown
        assert len(json.loads(invoke(*words, *more, "--dry-run", "--json").stdout)["commands"]) == 1

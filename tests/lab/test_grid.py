"""Which runs a grid has, how they are made and kept, and the command that does it."""

import csv
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from lab_runs import TINY, Told, invoke

import invariant_adam
from invariant_adam_lab.grids import grid, store, workers
from invariant_adam_lab.grids.grid import Choice
from invariant_adam_lab.results.curves import COLUMNS
from invariant_adam_lab.training import data
from invariant_adam_lab.training.runs import RECIPES, Run


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "results.csv").open(newline="") as file:
        return list(csv.DictReader(file))


# ---------------------------------------------------------------- what is run


def test_the_papers_grid():
    found = grid.plan("resnet-bn", "paper")
    assert len(found.runs) == 2 * 6 * 4 * 3
    assert {run.epochs for run in found.runs} == {200}
    assert {run.max_batch_size for run in found.runs} == {800}
    assert {run.micro_batch_size for run in found.runs} == {25}
    assert {run.batch_size for run in grid.plan("vit", "paper").runs} == {25, 50, 100, 200, 400}
    assert {run.batch_size for run in grid.plan("gpt", "short").runs} == {8, 32, 128, 256}
    assert {run.batch_size for run in grid.plan("resnet-ln", "short").runs} == {25, 100, 400, 800}


@pytest.mark.parametrize("name", grid.GRIDS)
@pytest.mark.parametrize("model", RECIPES)
@pytest.mark.parametrize("preset", grid.PRESETS)
def test_every_grid_is_whole(name, model, preset):
    found = grid.plan(model, preset, name)
    assert len(set(found.runs)) == len(found.runs) >= 4
    assert len({run.name for run in found.runs}) == len(found.runs)
    algorithms = {(run.algorithm, run.rule) for run in found.runs}
    assert algorithms == set(grid.GRIDS[name])


def test_the_sharpest_comparison_comes_first():
    runs = grid.plan("resnet-bn", "paper").runs
    first = [(run.lr0, run.seed, run.batch_size, run.algorithm) for run in runs[:4]]
    assert first == [(1e-4, 0, b, a) for b in (800, 25) for a in ("invariant", "standard")]
    assert [run.seed for run in runs] == sorted(run.seed for run in runs)
    assert list(dict.fromkeys(run.lr0 for run in runs)) == [1e-4, 1e-5, 1e-3, 1e-6]


def test_questions_have_their_runs():
    tuned = grid.plan("resnet-bn", "short", "tuned").runs
    assert {run.micro_batch_size for run in tuned if run.algorithm == "invariant"} == {25, 100, 400}
    assert {run.micro_batch_size for run in tuned if run.algorithm == "standard"} == {25}
    ramp = grid.plan("resnet-bn", "short", "ramp").runs
    assert {(run.batch_size, run.ramp) for run in ramp} == {(25, ""), (800, ""), (25, "25-800")}
    assert {run.algorithm for run in grid.plan("resnet-bn", "short", "norm").runs} >= {"accumulate"}


def test_the_user_has_the_last_word():
    choice = Choice(3, 2_000, (1e-2,), (50,), (7,), (("adama", "linear"),), 50, 400, (0, 500))
    found = grid.plan("resnet-ln", "short", "curves", choice)
    assert found.name == "resnet-ln-curves-short-e3-n2000"
    assert [run.warmup_samples for run in found.runs] == [0, 500]
    run = found.runs[0]
    assert run == Run("resnet-ln", "adama", "linear", 50, 50, 400, 1e-2, 7, 3, 2_000)
    with pytest.raises(ValueError, match="must divide"):
        grid.plan("resnet-ln", "short", "curves", Choice(batch_sizes=(75,)))
    for wrong, message in (
        (Choice(batch_sizes=()), "batch_sizes must name at least one"),
        (Choice(samples=799), "at least max_batch_size=800"),
    ):
        with pytest.raises(ValueError, match=message):
            grid.plan("resnet-ln", "short", "curves", wrong)
    with pytest.raises(ValueError, match="two or more for a ramp, got 100"):
        grid.plan("resnet-ln", "short", "ramp", Choice(batch_sizes=(100,)))
    with pytest.raises(ValueError, match="some of"):
        grid.read_algorithms("sgd", "curves")
    assert grid.read_algorithms("standard", "rivals") == (("standard", "square_root"),)


def test_growing_in_and_orders_are_settings_of_runs():
    grown = grid.plan("resnet-bn", "short", choice=Choice(grow=(0.0, 0.1), lrs=(1e-4,))).runs
    cut = {(size, ratio) for size in (100, 400, 800) for ratio in (0.0, 0.1)}
    assert {(run.batch_size, run.grow) for run in grown} == {(25, 0.0)} | cut
    floor = grid.plan("resnet-bn", "short", choice=Choice(orders=(1, 2), lrs=(1e-4,))).runs
    assert {(run.algorithm, run.batch_size, run.order) for run in floor} == {
        (name, 25, order) for name in ("invariant", "standard") for order in (1, 2)
    }
    assert len({run.name for run in grown + floor}) == len(grown) + len(floor)


def test_runs_from_before_growing_in_are_still_finished(setup):
    """Those of the repository have their names, and files without later settings and metrics are read and gathered."""
    results = Path(__file__).parents[2] / "benchmarks" / "results" / "lab"
    known = list(store.files(results, "*/*-lr*.json"))
    assert len(known) > 100
    for path, run, found in known:
        held = store.Setup(results, "", found["device_type"], found["dataset"], precision=found["precision"])
        assert path.stem == store.run_id(run, held)
    plan = grid.plan("vit", "smoke", choice=TINY)
    workers.make(plan.runs[:2], setup, Told())
    for path in setup.folder.glob("*-lr*.json"):
        found = json.loads(path.read_text())
        for name in store.LATER:
            del found["run"][name]
        for row in found["rows"]:
            del row["end_train_loss"]
        path.write_text(json.dumps(found))
    assert store.finished(plan.runs[0], setup) is not None
    assert store.gather(plan, setup, "")["finished"] == 2
    assert {row["end_train_loss"] for row in rows_of(setup.folder)} == {""}


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_shards_are_a_partition_of_about_equal_work(parts):
    runs = grid.plan("resnet-bn", "paper").runs
    shares = [grid.shard(runs, i + 1, parts) for i in range(parts)]
    assert sorted(run.name for share in shares for run in share) == sorted(run.name for run in runs)
    loads = [sum(grid.work(run) for run in share) for share in shares]
    assert max(loads) < 1.1 * min(loads)
    for share in shares:
        assert share == [run for run in runs if run in set(share)]
    with pytest.raises(ValueError, match="I from 1 to N"):
        grid.shard(runs, 0, parts)


# ---------------------------------------------------------------- running


def test_a_stopped_grid_goes_on(setup):
    found = grid.plan("vit", "smoke", choice=TINY)
    told = Told()

    def stop(kind, run, what):
        told(kind, run, what)
        if len(told.of("done")) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        workers.make(found.runs, setup, stop)
    kept = {path.name: path.read_bytes() for path in setup.folder.glob("*.json")}
    assert len(kept) == 2
    again = Told()
    workers.make(found.runs, setup, again)
    assert len(again.of("done")) == 2
    assert {path.name for path in setup.folder.glob("*.json")} > set(kept)
    assert all((setup.folder / name).read_bytes() == content for name, content in kept.items())
    assert not list(setup.folder.glob(".*"))
    result = store.gather(found, setup, "a command")
    assert result["finished"] == result["runs"] == 4
    assert result["missing"] == []
    rows = rows_of(setup.folder)
    assert list(rows[0]) == list(COLUMNS)
    assert len(rows) == 4
    assert {row["samples"] for row in rows} == {"40"}
    assert all(float(row["train_loss"]) > 0 for row in rows)
    saved = json.loads((setup.folder / "grid.json").read_text())
    assert saved["dataset"] == {"name": "made-up", "sha256": "made-up"}
    assert saved["preset"] == "smoke"


@pytest.mark.slow  # which pyarrow is installed for
def test_results_are_a_parquet_file_too(setup, monkeypatch):
    parquet = pytest.importorskip("pyarrow.parquet")
    found = grid.plan("vit", "smoke", choice=TINY)
    row = dict.fromkeys(("train_loss", "train_accuracy", "test_loss", "test_accuracy", "lr", "seconds"), 1.5)
    for run in found.runs:  # without the loss at the end of the epoch, as older runs
        store.save(run, [{**row, "epoch": 1, "samples": 40}], setup)
    store.gather(found, setup, "")
    path = setup.folder / "results.parquet"
    table = parquet.read_table(path)
    assert table.column_names == list(COLUMNS)
    read, csv_rows = table.to_pylist(), rows_of(setup.folder)
    assert [each["batch_size"] for each in read] == [int(each["batch_size"]) for each in csv_rows]
    assert {(each["ramp"], each["end_train_loss"], each["train_loss"]) for each in read} == {("", None, 1.5)}
    monkeypatch.setitem(sys.modules, "pyarrow", None)  # not installed
    store.gather(found, setup, "")
    assert not path.exists()


def test_a_grid_made_in_parts_is_gathered_whole(setup):
    found = grid.plan("vit", "smoke", choice=TINY)
    small, large = ([run for run in found.runs if (run.batch_size == 5) == part] for part in (True, False))
    (setup.folder / "broken-lr.json").parent.mkdir(parents=True)
    (setup.folder / "broken-lr.json").write_text("{}")
    (setup.folder / "of-another-version-lr.json").write_text('{"run": {"model": "vit", "colour": 1}, "rows": [{}]}')
    workers.make(small, setup, Told())
    first = store.gather(found._replace(runs=small), setup, "first")
    assert (first["finished"], first["runs"]) == (len(small), len(small))
    part = store.gather(found, setup, "all of it")
    assert part["missing"] == [run.name for run in found.runs if run in large]
    workers.make(large, setup, Told())
    whole = store.gather(found._replace(runs=large), setup, "second")
    assert (whole["finished"], whole["runs"], whole["missing"]) == (4, 4, [])
    assert whole["commands"] == ["first", "all of it", "second"]
    assert len(rows_of(setup.folder)) == 4


def test_a_run_of_another_largest_batch_is_another_run(setup):
    small, large = (grid.plan("vit", "smoke", choice=TINY._replace(max_batch_size=size)) for size in (20, 40))
    workers.make(small.runs[:1], setup, Told())
    assert small.runs[0].name in {run.name for run in large.runs}
    assert store.gather(large, setup, "with 40")["missing"] == [run.name for run in large.runs]


def test_half_a_file_is_not_a_run(setup):
    run = grid.plan("vit", "smoke", choice=TINY).runs[0]
    path = setup.folder / f"{store.run_id(run, setup)}.json"
    path.parent.mkdir(parents=True)
    path.write_text('{"rows": [')
    assert store.finished(run, setup) is None
    path.write_text('{"rows": []}')
    assert store.finished(run, setup) is None


def test_what_is_no_whole_run_is_made_again_and_gathered(setup):
    """What counts as finished and what is gathered are the same files."""
    found = grid.plan("vit", "smoke", choice=TINY)
    workers.make(found.runs[:1], setup, Told())
    path = setup.folder / f"{store.run_id(found.runs[0], setup)}.json"
    whole = json.loads(path.read_text())
    without = [{key: value for key, value in whole.items() if key != name} for name in store.FIELDS]
    cut = {key: value for key, value in whole["rows"][0].items() if key != "test_loss"}
    for damaged in (
        [], *without, {"rows": 3}, whole | {"rows": 1}, whole | {"rows": [1]}, whole | {"rows": [{}]},
        whole | {"rows": [cut]}, whole | {"rows": whole["rows"] * 2}, whole | {"run": None},
        whole | {"run": whole["run"] | {"lr0": 0.5}},
    ):  # fmt: skip
        path.write_text(json.dumps(damaged))
        assert store.finished(found.runs[0], setup) is None
        assert store.gather(found, setup, "again")["finished"] == 0
    workers.make(found.runs[:1], setup, Told())
    for damaged in ([1], {"commands": 3, "missing": "all"}):
        (setup.folder / "grid.json").write_text(json.dumps(damaged))
        result = store.gather(found, setup, "again")
        assert (result["finished"], len(result["missing"]), result["commands"]) == (1, len(found.runs) - 1, ["again"])


def test_a_run_of_another_grid_is_taken_over(setup):
    found = grid.plan("vit", "smoke", choice=TINY)
    workers.make(found.runs[:1], setup, Told())
    other = setup._replace(grid="vit-rivals-smoke-e1-n40")
    assert store.finished(found.runs[0], other, take=False) is not None
    assert not other.folder.exists()
    assert store.finished(found.runs[0], other) is not None
    assert len(list(other.folder.glob("*.json"))) == 1
    assert store.finished(found.runs[0], setup._replace(digest="other data")) is None
    assert store.finished(found.runs[0]._replace(epochs=2), setup) is None
    assert store.finished(found.runs[0], setup._replace(precision="bfloat16")) is None


@pytest.mark.slow
def test_processes_make_what_one_makes(setup):
    found = grid.plan("vit", "smoke", choice=TINY)
    told = Told()
    workers.make(found.runs, setup._replace(workers=2), told)
    assert len(told.of("done")) == 4
    store.gather(found, setup, "")
    several = {(row["algorithm"], row["batch_size"]): float(row["train_loss"]) for row in rows_of(setup.folder)}
    alone = setup._replace(out=setup.out / "alone", lanes=2)
    workers.make(found.runs, alone, Told())
    store.gather(found, alone, "")
    one = {(row["algorithm"], row["batch_size"]): float(row["train_loss"]) for row in rows_of(alone.folder)}
    assert one == pytest.approx(several, rel=1e-6)


def test_data_that_are_too_few_are_refused_before_a_run_begins(setup):
    found = workers.prepare(grid.plan("vit", "smoke"), setup)
    assert isinstance(found, data.Images)
    with pytest.raises(ValueError, match="samples must be at most the 120 of the training set, got 121"):
        workers.prepare(grid.plan("vit", "smoke", choice=Choice(samples=121)), setup)
    with pytest.raises(ValueError, match="max_batch_size must be at most the 120 training samples, got 200"):
        workers.prepare(grid.plan("vit", "smoke", choice=Choice(max_batch_size=200)), setup)


def test_a_text_of_ones_own_is_trained_on(setup, tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("not by Shakespeare\n" * 500)
    found = workers.prepare(
        grid.plan("gpt", "short", choice=Choice(max_batch_size=8, batch_sizes=(8,))),
        setup._replace(small=False, made_up=False, path=path),
    )
    assert found.digest() == store.digest("gpt", False, path) == data.text(path).digest()
    for digest, name in ((found.digest(), "a text of the user's"), (data.SHAKESPEARE_DIGEST, "tinyshakespeare")):
        own = setup._replace(small=False, digest=digest)
        assert store.gather(grid.plan("gpt", "short"), own, "")["dataset"] == {"name": name, "sha256": digest}


def test_a_budget_that_is_spent_begins_nothing(setup):
    found = grid.plan("vit", "smoke", choice=TINY)
    told = Told()
    workers.make(found.runs, setup._replace(deadline=time.time() - 1), told)
    assert len(told.of("skipped")) == 4
    assert told.of("done") == []
    assert store.gather(found, setup, "")["finished"] == 0
    assert rows_of(setup.folder) == []


def test_a_run_is_given_the_time_of_the_slowest_of_the_last(setup, monkeypatch, tmp_path):
    """By the least costs the second fits into the budget; the first took far more than that, so would the second."""
    first, *_ = grid.plan("vit", "smoke", choice=TINY).runs
    second = first._replace(algorithm="standard", rule="square_root")
    known = {("vit", "invariant", first.batch_size): 1e-9, ("vit", "standard", first.batch_size): 1.0}
    monkeypatch.setattr(workers, "costs", lambda *_: (known, ""))
    bounded = setup._replace(deadline=time.time() + 1_000)
    told = Told()
    workers.make([second], bounded._replace(out=tmp_path / "alone"), told)
    assert told.of("done") == [second]
    told = Told()
    workers.make([first, second], bounded, told)
    assert (told.of("done"), told.of("skipped")) == ([first], [second])
    assert "times its estimate" in told[-1][2]


def test_the_last_run_of_a_grid_has_the_device_to_itself(setup):
    """Its seconds are not divided among lanes that were empty."""
    runs = grid.plan("vit", "smoke", choice=TINY._replace(epochs=3)).runs[:3]
    wide = setup._replace(lanes=2)
    workers.make(runs, wide, Told())
    found = [store.finished(run, wide) for run in runs]
    assert sorted(each["at_once"] for each in found if each is not None) == [1, 2, 2]


def test_a_failed_run_is_told_and_the_others_go_on(setup):
    found = grid.plan("vit", "smoke", choice=TINY)
    bad = found.runs[0]._replace(samples=3)
    told = Told()
    workers.make([bad, *found.runs[1:2]], setup, told)
    assert told.of("error") == [bad]
    assert len(told.of("done")) == 1


def test_a_run_that_diverged_is_kept_and_says_nan(setup):
    found = grid.plan("vit", "smoke", choice=TINY)
    row = dict.fromkeys(("train_loss", "train_accuracy", "test_loss", "test_accuracy", "lr", "seconds"), 1.0)
    for run in found.runs:
        store.save(run, [{**row, "epoch": 1, "samples": 40, "train_loss": math.nan}], setup)
    content = next(setup.folder.glob("*.json")).read_text()
    assert json.loads(content, parse_constant=pytest.fail)["rows"][0]["train_loss"] is None
    store.gather(found, setup, "")
    assert {row["train_loss"] for row in rows_of(setup.folder)} == {"nan"}


def test_tensorboard_logs_are_written(setup):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = grid.plan("vit", "smoke", choice=TINY).runs[0]
    folder = setup.folder / "tensorboard" / store.run_id(run, setup)
    for _ in range(2):  # the first time it is stopped before its file is written: its logs are not added to
        workers.make([run], setup._replace(tensorboard=True), Told())
        stored = store.finished(run, setup)
        (setup.folder / f"{store.run_id(run, setup)}.json").unlink()
    found = events.EventAccumulator(str(folder))
    found.Reload()
    (scalar,) = found.Scalars("train_loss")
    assert stored is not None
    assert scalar.step == 40
    assert scalar.value == pytest.approx(stored["rows"][0]["train_loss"])


# ---------------------------------------------------------------- the command


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # torch warns of itself while tracing
def test_the_command_compiles(tmp_path):
    words = ["vit", "--preset", "smoke", "--device", "cpu", "--out", str(tmp_path), "--epochs", "1", "--images", "40"]
    words += ["--lrs", "1e-3", "--batch-sizes", "5,20", "--algorithms", "invariant", "--no-figures"]
    assert invoke(*words).exit_code == 0
    files = {path: json.loads(path.read_text()) for path in tmp_path.glob("*/vit-*.json")}
    for path in files:
        path.unlink()
    result = invoke(*words, "--compile")
    assert result.exit_code == 0, result.output
    for path, eager in files.items():  # the same runs, up to rounding, under the same names
        compiled = json.loads(path.read_text())
        assert (eager["compiled"], compiled["compiled"]) == (False, True)
        assert compiled["rows"][0]["train_loss"] == pytest.approx(eager["rows"][0]["train_loss"], rel=1e-4)


def test_the_command_makes_a_grid(tmp_path):
    words = ["vit", "--preset", "smoke", "--device", "cpu", "--out", str(tmp_path), "--epochs", "1", "--images", "40"]
    words += ["--lrs", "1e-3", "--batch-sizes", "5,20", "--algorithms", "invariant", "--warmup", "0,20"]
    found = invoke(*words, "--json")
    assert found.exit_code == 0, found.output
    result = json.loads(found.stdout)
    assert result["finished"] == 4
    rows = rows_of(tmp_path / "vit-curves-smoke-e1-n40")
    assert {row["warmup_samples"] for row in rows} == {"0", "20"}
    again = invoke(*words, "--no-figures")
    assert again.exit_code == 0
    assert "4 of 4 runs" in again.stdout
    assert "kept from before" in again.stderr


def test_a_budget_too_small_is_one_line(tmp_path):
    words = ["vit", "--preset", "smoke", "--device", "cpu", "--out", str(tmp_path), "--budget", "0"]
    found = invoke(*words)
    assert found.exit_code == 0, found.output
    (line,) = (line for line in found.stderr.splitlines() if "vit-" in line)
    assert line.startswith("--budget was too small for 12 runs, first vit-invariant-linear-B20-")
    assert "-M5: the budget is spent; the same command goes on" in line
    assert "0 of 12 runs" in found.stdout
    empty = invoke(*words, "--shard", "13/13")
    assert empty.exit_code == 0
    assert "note: --shard 13/13 is empty, as the grid has 12 runs" in empty.stderr


@contextmanager
def under_way(out: Path, epochs: int) -> Iterator[subprocess.Popen[str]]:
    """A grid of 12 runs in two processes, from the first run that is finished."""
    words = ["reproduce", "vit", "--preset", "smoke", "--device", "cpu", "--epochs", str(epochs), "--workers", "2"]
    source = str(Path(invariant_adam.__file__).parents[1])
    with subprocess.Popen(
        [sys.executable, "-m", "invariant_adam", *words, "--no-figures", "--out", str(out)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": source, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # the tests may run in the background
    ) as process:
        deadline = time.monotonic() + 100
        while not list(out.glob("*/vit-*.json")) and time.monotonic() < deadline:
            time.sleep(0.05)
        yield process


def test_interrupted_it_says_how_to_go_on(tmp_path):
    """As Ctrl-C does, which all processes at a terminal hear."""
    with under_way(tmp_path, 20) as process:
        os.killpg(process.pid, signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    kept = len(list(tmp_path.glob("*/vit-*.json")))
    assert process.returncode == 130, stderr
    assert 1 <= kept < 12
    assert re.search(r"Stopped\. \d+ of 12 runs are kept; the same command goes on with the rest\.", stderr)
    assert "Traceback" not in stderr
    assert len(rows_of(tmp_path / "vit-curves-smoke-e20")) == 20 * kept


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds a worker by Linux's list of processes")
@pytest.mark.slow
def test_a_worker_that_is_killed_loses_its_run_alone(tmp_path):
    """As the kernel kills one when memory is short."""
    with under_way(tmp_path, 6) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        worker = next(pid for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes())
        time.sleep(0.1)  # one run is told, another under way
        os.kill(int(worker), signal.SIGKILL)
        _, stderr = process.communicate(timeout=100)
    kept = len(list(tmp_path.glob("*/vit-*.json")))
    assert process.returncode == 2, stderr
    assert kept >= 11
    assert "error: 1 of 2 worker processes ended without a word, exit codes" in stderr
    assert "the same command goes on with the rest" in stderr
    assert len(rows_of(tmp_path / "vit-curves-smoke-e6")) == 6 * kept


def test_it_asks_before_it_downloads_for_a_cpu(tmp_path, monkeypatch):
    monkeypatch.setenv("INVARIANT_ADAM_DATA", str(tmp_path / "nothing"))
    found = invoke("gpt", "--device", "cpu", "--out", str(tmp_path / "runs"))
    assert found.exit_code == 2
    said = (
        "gpt-curves-short trains on tinyshakespeare, which is not on this machine, and runs on the CPU: --yes downloads"
    )
    assert said in " ".join(found.stderr.split())
    assert list(tmp_path.iterdir()) == []


def test_smoke_says_that_it_is_a_test(tmp_path):
    found = invoke("gpt", "--preset", "smoke", "--budget", "0", "--no-figures", "--out", str(tmp_path))
    assert "--preset smoke only tests that everything works" in found.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["vit", "--batch-sizes", "a,b"], "whole numbers"),
        (["vit", "--batch-sizes", "30"], "must divide --max-batch 400, so that all"),
        (["vit", "--micro-batch", "10"], "multiple of --micro-batch 10; choose other --batch-sizes"),
        (["vit", "--batch-sizes", "100", "--grid", "ramp"], "--batch-sizes must be two or more for a ramp"),
        (["vit", "--lrs", ""], "--lrs must name at least one"),
        (["vit", "--warmup", ","], "--warmup must name at least one"),
        (["vit", "--algorithms", ","], "--algorithms must name at least one"),
        (["vit", "--images", "10"], "--images must be at least --max-batch 400"),
        (["vit", "--preset", "smoke", "--images", "121"], "--images must be at most the 120 of the training set"),
        (["vit", "--data", "nowhere"], "--data: nowhere does not exist"),
        (["gpt", "--data", "nowhere"], "--data: nowhere does not exist"),
        (["gpt", "--data", __file__, "--preset", "smoke"], "--data: --preset smoke trains on made-up data"),
        (["vit", "--out", __file__], "is a file; choose another folder"),
        (["vit", "--out", __file__, "--dry-run"], "is a file; choose another folder"),
        (["vit", "--shard", "3/2"], "I from 1 to N"),
        (["vit", "--shard", "two"], "I/N"),
        (["vit", "--algorithms", "sgd"], "some of"),
        (["vit", "--lrs", "0"], "--lrs must be"),
        (["vit", "--seeds", str(2**53)], "--seeds must be below 2**53"),
    ],
)
def test_the_command_refuses_by_name(words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = invoke(*words)
    assert found.exit_code == 2
    assert message in " ".join(found.stderr.split())
    assert list(tmp_path.iterdir()) == []  # before anything changes


@pytest.mark.gpu
def test_a_grid_on_a_gpu(tmp_path):
    words = ["resnet-bn", "--preset", "smoke", "--device", "cuda", "--out", str(tmp_path), "--no-figures"]
    found = invoke(*words)
    assert found.exit_code == 0, found.output
    assert torch.cuda.is_available()

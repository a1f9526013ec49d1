"""The runs that committed results lack are the ones that are made, each by a command that means it alone."""

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from invariant_adam_lab.grids import grid
from invariant_adam_lab.results.curves import load

PATH = Path(__file__).parents[2] / "benchmarks" / "lab_missing.py"


@pytest.fixture
def lab_missing():
    spec = importlib.util.spec_from_file_location("lab_missing", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_options_of_a_run_mean_that_run_alone(lab_missing):
    seen = 0
    for _, _, plan in lab_missing.plans():
        for run in plan.runs:
            assert grid.plan(run.model, lab_missing.PRESET, "curves", lab_missing.choice_of(run)).runs == [run]
            seen += 1
    assert seen > 50


def test_a_choice_is_what_reproduce_makes_of_its_words(lab_missing):
    words = lab_missing.words_of(lab_missing.GROWN._replace(lrs=(1e-4,), warmup_samples=(25_000,), seeds=(1, 2)))
    said = dict(zip(words[::2], words[1::2], strict=True))
    assert said.pop("--algorithms") == "invariant:linear"
    assert said == {"--lrs": "0.0001", "--seeds": "1,2", "--warmup": "25000", "--grow": "0.1"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--at-once", "0"], "--at-once must be at least 1"),
        (["--seconds", "9"], "--seconds more than 15"),
        ([], "call this from the repository"),
    ],
)
def test_bad_input_is_refused_before_anything_is_made(lab_missing, tmp_path, monkeypatch, capsys, words, said):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        lab_missing.main(words)
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_runs_end_with_the_command_that_makes_them(tmp_path):
    """A killed command leaves no process on the GPU."""
    (tmp_path / "benchmarks" / "results" / "lab").mkdir(parents=True)
    how = ["--device", "cpu", "--at-once", "1", "--seconds", "600", "--work", str(tmp_path / "work")]
    env = os.environ | {"PYTHONPATH": str(PATH.parents[1] / "src")}
    made = subprocess.Popen([sys.executable, PATH, *how], cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True)
    for _ in range(600):
        if list(tmp_path.glob("work/*.log")):
            break
        time.sleep(0.1)
    made.send_signal(signal.SIGTERM)
    assert ": stopped" in made.communicate(timeout=60)[0]
    left = subprocess.run(["pgrep", "-f", str(tmp_path / "work")], capture_output=True, text=True, check=False).stdout
    assert not left


@pytest.mark.slow
def test_what_is_missing_is_made_and_gathered(lab_missing, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(lab_missing, "LAB", tmp_path / "lab")
    monkeypatch.setattr(lab_missing, "PRESET", "smoke")
    wanted = grid.Choice(algorithms=lab_missing.OURS, lrs=(1e-4,), batch_sizes=(5, 20))
    monkeypatch.setattr(lab_missing, "STAGES", [("a first look", ("gpt",), wanted)])
    (tmp_path / "lab").mkdir()
    how = ["--device", "cpu", "--work", str(tmp_path / "work")]
    assert len(lab_missing.missing("cpu")) == 2
    lab_missing.main([*how, "--at-once", "1", "--seconds", "300"])
    assert "2 runs made, 0 are missing" in capsys.readouterr().out
    assert {run.batch_size for run in load(tmp_path / "lab").runs} == {5, 20}
    lab_missing.main([*how, "--list"])
    assert "0 runs" in capsys.readouterr().out

"""The runs that committed results lack are the ones that are made, each by a command that means it alone."""

import importlib.util
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
            options = lab_missing.choice(lab_missing.options_of(run))
            assert grid.plan(run.model, lab_missing.PRESET, "curves", options).runs == [run]
            seen += 1
    assert seen > 50


@pytest.mark.slow
def test_what_is_missing_is_made_and_gathered(lab_missing, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(lab_missing, "LAB", tmp_path / "lab")
    monkeypatch.setattr(lab_missing, "PRESET", "smoke")
    wanted = {"algorithms": "invariant", "lrs": "1e-4", "batch-sizes": "5,20"}
    monkeypatch.setattr(lab_missing, "STAGES", [("a first look", ("gpt",), wanted)])
    how = ["--device", "cpu", "--work", str(tmp_path / "work")]
    assert len(lab_missing.missing("cpu")) == 2
    lab_missing.main([*how, "--at-once", "1", "--seconds", "300"])
    assert "2 runs made, 0 are missing" in capsys.readouterr().out
    assert {run.batch_size for run in load(tmp_path / "lab").runs} == {5, 20}
    lab_missing.main([*how, "--list"])
    assert "0 runs" in capsys.readouterr().out

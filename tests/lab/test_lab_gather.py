"""Runs that were made elsewhere are taken in with the commands that made them, and without that machine's folders."""

import importlib.util
import json
from pathlib import Path

import pytest

from invariant_adam_lab.results.curves import load

ROOT = Path(__file__).parents[2]
GRID = "gpt2-curves-short-n99840"


@pytest.fixture
def lab_gather():
    spec = importlib.util.spec_from_file_location("lab_gather", ROOT / "benchmarks" / "lab_gather.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_runs_from_several_folders_become_one_grid(lab_gather, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lab_gather.LAB.mkdir(parents=True)
    kept = ROOT / "benchmarks" / "results" / "lab" / GRID
    about, paths = json.loads((kept / "grid.json").read_text("utf-8")), sorted(kept.glob("*-lr*.json"))
    for number, path in enumerate(paths):
        place = tmp_path / "elsewhere" / str(number) / GRID
        place.mkdir(parents=True)
        (place / path.name).write_bytes(path.read_bytes())
        command = (
            f"invariant-adam reproduce gpt2 --data /elsewhere/tokens.npz --seeds {number} --out /elsewhere/{number}"
        )
        (place / "grid.json").write_text(json.dumps(about | {"commands": [command]}), "utf-8")
    (tmp_path / "elsewhere" / "lost" / GRID / "tensorboard").mkdir(parents=True)  # of a run that was stopped
    lab_gather.main([str(folder) for folder in sorted((tmp_path / "elsewhere").iterdir())])
    made = tmp_path / lab_gather.LAB / GRID
    assert sorted(path.name for path in made.iterdir()) == sorted(path.name for path in kept.iterdir())
    assert (made / "results.csv").read_bytes() == (kept / "results.csv").read_bytes()
    found = json.loads((made / "grid.json").read_text("utf-8"))
    assert found["commands"] == [
        f"invariant-adam reproduce gpt2 --data tokens.npz --seeds {number} --out benchmarks/results/lab"
        for number in range(len(paths))
    ]
    same = ("dataset", "devices", "finished", "runs", "missing", "seconds", "torch", "date")
    assert {key: found[key] for key in same} == {key: about[key] for key in same}
    assert load(lab_gather.LAB).made == len(paths)


def test_it_is_called_from_the_repository(lab_gather, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        lab_gather.main(["elsewhere"])
    assert "call this from the repository" in capsys.readouterr().err


def test_what_is_there_is_not_replaced(lab_gather, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    kept = ROOT / "benchmarks" / "results" / "lab" / GRID
    run = next(kept.glob("*-lr*.json"))
    for place in (lab_gather.LAB / GRID, tmp_path / "elsewhere" / GRID):
        place.mkdir(parents=True)
        (place / "grid.json").write_bytes((kept / "grid.json").read_bytes())
        (place / run.name).write_bytes(run.read_bytes())
    there = tmp_path / lab_gather.LAB / GRID / run.name
    there.write_text("{}", "utf-8")
    for folder, message in (("elsewhere", "made another time"), ("nowhere", "there is no folder nowhere")):
        with pytest.raises(SystemExit):
            lab_gather.main([folder])
        assert message in capsys.readouterr().err
    assert there.read_text("utf-8") == "{}"

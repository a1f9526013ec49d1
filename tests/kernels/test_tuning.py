"""Configurations measured once and kept on disk."""

from __future__ import annotations

import json
from typing import NamedTuple

import pytest
import torch

tuning = pytest.importorskip("invariant_adam.kernels.tuning")
pytest.importorskip("triton")

CPU = torch.device("cpu")


class Config(NamedTuple):
    width: int = 1
    deep: bool = False


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("INVARIANT_ADAM_CACHE", str(tmp_path / "kept"))
    tuning._load.cache_clear()
    yield
    tuning._load.cache_clear()


def best(shape, runs, *, broken=()):
    """The configuration of least width is the fastest; those in `broken` do not run."""

    def run(config):
        runs.append(config)
        if config.width in broken:
            raise RuntimeError("out of resource: shared memory")
        return config.width

    candidates = [Config(5), Config(2, True), Config(3)]
    return tuning.best("kernel", shape, CPU, Config(4), lambda: candidates, run, timer=lambda function: function())


def test_the_kernel_s_own_choice_stands_until_tuning_is_asked_for(monkeypatch):
    runs = []
    assert best((8, "float32"), runs) == Config(4)
    assert runs == []
    monkeypatch.setenv("INVARIANT_ADAM_TUNE", "0")
    assert best((8, "float32"), runs) == Config(4)


def test_measured_once_and_found_by_later_processes(monkeypatch):
    monkeypatch.setenv("INVARIANT_ADAM_TUNE", "1")
    runs = []
    assert best((8, "float32"), runs) == Config(2, True)
    assert len(runs) == 4
    monkeypatch.delenv("INVARIANT_ADAM_TUNE")
    tuning._load.cache_clear()  # as a new process
    assert best((8, "float32"), runs) == Config(2, True)
    assert len(runs) == 4
    assert best((9, "float32"), runs) == Config(4)


def test_a_configuration_that_does_not_fit_is_passed_over(monkeypatch):
    monkeypatch.setenv("INVARIANT_ADAM_TUNE", "1")
    assert best((8,), [], broken=(2,)) == Config(3)
    with pytest.raises(RuntimeError, match="out of resource"):
        best((9,), [], broken=(4,))


def test_what_other_processes_kept_meanwhile_stays(monkeypatch):
    monkeypatch.setenv("INVARIANT_ADAM_TUNE", "1")
    best((1,), [])
    file = next(tuning.folder().iterdir())
    kept = json.loads(file.read_text())
    kept["kernel"]["2"] = [7, True]
    kept["other"] = {"1": [1]}
    file.write_text(json.dumps(kept))
    best((3,), [])
    assert set(json.loads(file.read_text())["kernel"]) == {"1", "2", "3"}
    assert json.loads(file.read_text())["other"] == {"1": [1]}


@pytest.mark.parametrize("content", ["", "{", "[]", '{"kernel": {"8": [1, 2, 3]}}'])
def test_a_damaged_file_costs_nothing_but_time(content):
    file = tuning._file(CPU)
    file.parent.mkdir(parents=True)
    file.write_text(content)
    assert best((8,), []) == Config(4)


def test_a_folder_that_cannot_be_written_is_no_error(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("INVARIANT_ADAM_CACHE", str(tmp_path / "file" / "below"))
    monkeypatch.setenv("INVARIANT_ADAM_TUNE", "1")
    runs = []
    assert best((8,), runs) == best((8,), runs) == Config(2, True)
    assert len(runs) == 4  # remembered in this process

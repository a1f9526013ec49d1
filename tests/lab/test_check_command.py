"""`invariant-adam check module:function`: exit codes, JSON, a figure, and errors that name the remedy."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from invariant_adam_lab.cli import app

SETUP = """
import torch
from torch import nn

x = torch.randn(512, 4, generator=torch.Generator().manual_seed(0))
asked = {"batch_sizes": (8, 16), "lr": 1e-3, "samples": 224}


def loss(model, batch):
    return (model(batch) - batch.sum(1, keepdim=True)).square().mean()


def good():
    return (lambda: nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 1)), loss, x, asked)


def bad():
    return {"make_model": lambda: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)),
            "loss_fn": loss, "data": x, **asked}


def short():
    return (nn.Linear(4, 1), loss, x)


def wrong():
    return 3


def asks(lr):
    return good()
"""


@pytest.fixture
def check(tmp_path, monkeypatch):
    (tmp_path / "my_run.py").write_text(SETUP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return lambda *words: CliRunner().invoke(app, ["check", *words])


def test_an_invariant_run_ends_with_0_and_writes_a_figure(check, tmp_path):
    done = check("my_run:good", "--plot", "check.png", "--json")
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert result["ok"]
    assert [run["batch_size"] for run in result["runs"]] == [8, 16]
    assert (tmp_path / "check.png").stat().st_size > 10_000


def test_a_run_that_is_not_ends_with_1_and_names_the_cause(check):
    done = check("my_run:bad")
    assert done.exit_code == 1
    assert "Samples see each other in '1', BatchNorm1d" in done.stdout
    assert check("my_run:bad", "--coupled", "micro-batch").exit_code == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["my_run"], "must be module:function"),
        (["no_run:good"], "there is no module 'no_run'"),
        (["my_run:none"], "has no function 'none'"),
        (["my_run:wrong"], "must return a dict"),
        (["my_run:asks"], "my_run:asks must take no arguments: missing a required argument: 'lr'"),
        (["my_run:short"], "gives no batch_sizes, lr"),
        (["my_run:good", "--lr", "-1"], "lr must be a finite number above 0"),
        (["my_run:good", "--plot", "no/check.png"], "there is no folder no"),
        (["my_run:good", "--plot", "check.nothing"], "cannot write to --plot check.nothing"),
        (["my_run:good", "--device", "nowhere"], "use --device cpu"),
    ],
)
def test_errors_end_with_2_and_name_the_remedy(check, words, message):
    done = check(*words)
    assert done.exit_code == 2
    assert message in done.stderr

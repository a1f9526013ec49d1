"""Models that are not the lab's: timm, transformers and functions of the user, built with random weights."""

from __future__ import annotations

import importlib.util
import json

import pytest
import torch
import zoo  # which finds timm
from test_cli import run

from invariant_adam_lab.bench import subjects, where
from invariant_adam_lab.bench.one_pass import Case, CaseStep

CPU = torch.device("cpu")
MINE = """
import torch
from torch import nn
from torch.nn import functional as F

class Regression(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 1)

    def forward(self, x, y):
        return F.mse_loss(self.layer(x), y)

def named():
    return Regression(), lambda n: {"x": torch.randn(n, 6), "y": torch.randn(n, 1)}

def in_order():
    return Regression(), lambda n: (torch.randn(n, 6), torch.randn(n, 1))

def scored(width=8):
    model = nn.Sequential(nn.Linear(6, width), nn.GELU(), nn.Linear(width, 3))
    return model, F.cross_entropy, (torch.randn(8, 6), torch.randint(3, (8,)))

def odd():
    return nn.Linear(2, 2)

def short():
    return Regression(), lambda n: (torch.randn(n, 6), torch.randn(1))

number = 3
"""
GPT = {"n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 31, "tokens": 6, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
GPT |= {"attn_pdrop": 0.0}
VIT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "image_size": 32}
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 31, "tokens": 6}
BERT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 31}


@pytest.fixture
def mine(tmp_path, monkeypatch):
    name = f"mine_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return name


@pytest.mark.parametrize("function", ["named", "in_order", "scored"])
def test_a_function_of_the_users(mine, function):
    for method in ("plain", "loop", "one-pass", "into"):
        loss = CaseStep(Case(f"{mine}:{function}", 8, 2, "cpu", "float32"), method)()
        assert loss.isfinite()


@pytest.mark.parametrize(
    ("kind", "options"),
    [("gpt2", GPT), ("vit", VIT), ("t5", T5), ("bert", BERT | {"tokens": 6})],
    ids=["causal", "images", "sequence to sequence", "masked"],
)
def test_models_of_transformers(kind, options):
    pytest.importorskip("transformers")
    subjects.check(f"hf:{kind}", options)
    model, whole, batch = subjects.make(f"hf:{kind}", options, 4, CPU)
    assert {len(x) for x in batch} == {4}
    assert whole(*batch).dim() == 0
    assert sum(p.numel() for p in model.parameters()) < 200_000  # the options have come


def test_one_pass_of_a_model_of_transformers_is_the_loop():
    pytest.importorskip("transformers")
    steps = {m: CaseStep(Case("hf:gpt2", 4, 2, "cpu", "float32", options=GPT), m) for m in ("loop", "one-pass")}
    for step in steps.values():
        for _ in range(2):
            step()
    one, other = (list(step.model.parameters()) for step in steps.values())
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.slow  # which timm is installed for
def test_a_model_of_timm():
    pytest.importorskip("timm")
    zoo.zoo_module("timm.models")
    _, whole, batch = subjects.make("timm:test_vit", {}, 2, CPU)
    assert whole(*batch).isfinite()
    with pytest.raises(ValueError, match="did you mean"):
        subjects.check("timm:convnext_tini", {})


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("hf:gpt22", "no model_type 'gpt22' with a loss over tokens or images; did you mean gpt2"),
        ("hf:gpt2?n_layers=2", "its config has no 'n_layers'; did you mean n_layer"),
        ("hf:gpt2?n_layer", "after ? come KEY=VALUE with & between them, got 'n_layer'"),
        ("nowhere:model", "no module 'nowhere' in this folder or installed; a model is timm:convnext_tiny"),
        ("{mine}:other", "has no 'other'"),
        ("{mine}:number", "number is a int, not a function"),
        ("gpt3", "no --model is named 'gpt3'; there are gpt2-124m, "),
    ],
)
def test_what_is_not_there_is_named(mine, name, words):
    if name.startswith("hf:"):
        pytest.importorskip("transformers")
    result = run("bench", "one-pass", "--device", "cpu", "--model", name.format(mine=mine))
    assert result.exit_code == 2
    assert words in " ".join(result.stderr.split())


@pytest.mark.skipif(importlib.util.find_spec("timm") is not None, reason="timm is installed")
def test_a_missing_package_is_named():
    with pytest.raises(ValueError, match="--model timm:convnext_tiny needs timm: pip install timm"):
        subjects.check("timm:convnext_tiny", {})


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("odd", r"must return \(model, make_batch\) or \(model, loss_fn, \(x, y\)\), got Linear"),
        ("short", r"first dimension is 4 samples \(--batch\), got shape \(1,\)"),
        ("scored", "gives a batch of 8 samples; --batch 16 asks for more"),
    ],
)
def test_what_a_function_must_give(mine, function, words):
    with pytest.raises(ValueError, match=words):
        subjects.make(f"{mine}:{function}", {}, 16 if function == "scored" else 4, CPU)


@pytest.mark.slow
def test_the_command_says_what_limits_each_method(mine, tmp_path):
    out = tmp_path / "rows.json"
    how = ["--device", "cpu", "--batch", "8", "--micro-batch", "4", "--rounds", "1", "--out", str(out)]
    result = run("bench", "one-pass", "--model", f"{mine}:scored?width=16", "--methods", "plain,loop,one-pass", *how)
    assert result.exit_code == 0, result.output
    assert max(map(len, result.stdout.splitlines())) <= 80 + len(str(out))
    for words in ("1st GiB", "one-pass on a CPU: operations", "limited by", "more ms", "LinearBackward"):
        assert words in " ".join(result.stdout.split())
    rows = {row["method"]: row for row in json.loads(out.read_text())["rows"]}
    assert rows["plain"]["options"] == {"width": 16}
    found = rows["one-pass"]["where"]
    assert found["operations_ms"] + found["host_ms"] == pytest.approx(rows["one-pass"]["ms"], rel=0.1)
    assert "LinearBackward" in found["operations"]


def test_differences_are_those_that_cost_most():
    rows = [{"where": {"operations": ops}} for ops in ({"a": 1.0, "b": 5.0}, {"a": 4.0, "b": 5.0, "c": 1.0, "d": 0.0})]
    assert where.differences(*rows) == [("a", "1.00", "4.00", "+3.00"), ("c", "0.00", "1.00", "+1.00")]


@pytest.mark.parametrize(
    ("method", "kernels", "host", "said"),
    [
        ("one-pass", 10.0, 18.0, "limited by the host: Python, autograd and the optimizer; a CUDA graph leaves it out"),
        ("plain", 10.0, 18.0, "limited by the host: Python, autograd and the optimizer"),
        ("one-pass", 18.0, 10.0, "limited by its kernels"),
    ],
)
def test_what_waits_for_the_host_is_told_the_remedy(method, kernels, host, said):
    line = where.verdict({"method": method, "where": {"kernels_ms": kernels, "host_ms": host}})
    assert said in line
    assert ("ia.capture" in line) == ("CUDA graph" in said)

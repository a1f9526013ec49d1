"""`explain`: one row per parameter, true to what one pass does."""

from __future__ import annotations

import torch
from test_one_pass_engine import Apply
from test_one_pass_models import GPT, resnet18
from torch import nn

from invariant_adam.one_pass import explain
from invariant_adam.one_pass.exchange import Open


def test_explains_each_parameter() -> None:
    model = GPT()
    report = explain(model, torch.randint(11, (8, 5)), 2)
    assert report.supported
    rows = {r.name: r for r in report.rows}
    assert rows.keys() == dict(model.named_parameters()).keys()
    assert rows["tok.weight"].rule == "embedding, linear (shared)"
    assert rows["blocks.0.f.0.weight"].kernel == "gemm_square (products)"
    assert rows["blocks.0.f.0.weight"].rows == 10
    assert rows["blocks.0.n1.weight"].kernel == "sum_square"
    assert rows["pos.weight"].kernel == "copies per micro-batch"
    text = str(report)
    assert text.splitlines()[0].split() == [
        "parameter",
        "shape",
        "rule",
        "rows",
        "kernel",
        "memory",
    ]
    assert text.endswith("8 samples in 4 micro-batches of 2: equal to the loop")
    assert all(type(p) is nn.Parameter and p.grad is None for p in model.parameters())


def test_explains_convolutions_and_batch_norm() -> None:
    model = resnet18(nn.BatchNorm2d)
    buffers = [b.clone() for b in model.buffers()]
    report = explain(model, torch.randn(8, 3, 16, 16), 4)
    assert {r.kernel for r in report.rows} == {"conv_square", "sum_square", "gemm_square (products)"}
    assert all(torch.equal(a, b) for a, b in zip(buffers, model.buffers(), strict=True))


def test_explains_a_refusal() -> None:
    model = Apply(lambda s, x: s.m[1](s.m[0](x) - s.m[0](x).mean(0)), nn.Linear(3, 3), nn.Linear(3, 3))
    report = explain(model, (torch.randn(8, 3),), 2)
    assert not report.supported
    assert "m.1.weight" in report.problem
    assert "refused" in str(report)
    assert Open.mini_batch is None


def test_explains_keyword_arguments_and_one_micro_batch() -> None:
    report = explain(nn.Linear(3, 2), {"input": torch.randn(4, 3)}, 4)
    assert {r.kernel for r in report.rows} == {"square of the gradient"}

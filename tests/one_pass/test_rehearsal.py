"""The rehearsal of the first update: it leaves nothing behind, and after it the update compiles nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import invariant_adam as ia
from invariant_adam.kernels import Serving
from invariant_adam.one_pass.verify import rehearsal

B, M = 12, 3


class Net(nn.Module):
    """Every kind of kernel, a tied table, a checkpoint, random numbers and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.conv, self.norm = nn.Embedding(20, 16), nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.mix, self.last = nn.Linear(128, 16), nn.LayerNorm(16)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.table(ids)
        h = nn.functional.dropout(self.norm(self.conv(h[:, None])).relu(), 0.2, self.training)
        h = checkpoint(lambda t: self.mix(t.movedim(1, 2).flatten(2)), h, use_reentrant=False)
        return self.last(h) @ self.table.weight.T


def trained(into: bool, seed: int = 0) -> tuple[Net, ia.InvariantAdam, Tensor]:
    """A model after two updates, its optimizer, and the state of the generator."""
    torch.manual_seed(seed)
    model, ids = Net().double(), torch.randint(20, (2, B, 5))
    opt = ia.InvariantAdam(model.parameters(), lr=1e-2, micro_batch_size=M, state_dtype=torch.float64)
    opt.expect(B // M)
    for batch in ids:
        with ia.one_pass(model, M, into=opt if into else None):
            nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten()).backward()
        opt.step()
    return model, opt, torch.get_rng_state()


@pytest.mark.filterwarnings("ignore:the first update")
@pytest.mark.parametrize("into", [False, True])
def test_a_rehearsal_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch, into: bool) -> None:
    """Weights, moments, running statistics and random numbers are those of a run without it."""
    model, opt, drawn = trained(into)
    rehearsed = []

    def rehearses(device: torch.device) -> bool:
        rehearsed.append(device)
        return True

    monkeypatch.setattr(rehearsal, "rehearses", rehearses)
    twin, other, redrawn = trained(into)
    assert len(rehearsed) == 2  # the forward alone, then the whole; in the first update only
    assert Serving.noted is None
    assert torch.equal(drawn, redrawn)
    for a, b in zip(model.state_dict().values(), twin.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(opt.state[p][key], other.state[q][key])
    assert opt.samples_seen == other.samples_seen == 2 * B


class Picky(nn.Module):
    """A model that fails in the backward of a rehearsal, or runs out of memory there."""

    def __init__(self, error: type[Exception]) -> None:
        super().__init__()
        self.layer, self.error = nn.Linear(4, 4), error

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if Serving.noted is not None:
            raise self.error("not in a rehearsal")
        return y


@pytest.mark.parametrize("error", [ValueError, torch.OutOfMemoryError])
def test_a_rehearsal_that_fails_is_left_out(monkeypatch: pytest.MonkeyPatch, error: type[Exception]) -> None:
    monkeypatch.setattr(rehearsal, "rehearses", lambda device: True)
    model, x = Picky(error), torch.randn(B, 4)
    with ia.one_pass(model, M):
        model(x).square().mean().backward()
    assert Serving.noted is None
    assert model.layer.weight.grad_kappa == B / M


@pytest.mark.parametrize("hooked", ["parameter", "module", "module before"])
def test_hooks_see_no_rehearsal(monkeypatch: pytest.MonkeyPatch, hooked: str) -> None:
    """They would be given gradients that were never made."""
    monkeypatch.setattr(rehearsal, "rehearses", lambda device: True)
    model, x, seen = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(B, 4), []
    register = {
        "parameter": model[1].weight.register_hook,
        "module": model[1].register_full_backward_hook,
        "module before": model[1].register_full_backward_pre_hook,
    }[hooked]
    register(lambda *_: seen.append(Serving.noted))
    with ia.one_pass(model, M):
        model(x).square().mean().backward()
    assert seen
    assert all(noted is None for noted in seen)


SCRIPT = """
import json, sys, threading
import torch
import triton.compiler.compiler as compiler
import invariant_adam as ia
from test_rehearsal import Net

by, inner = {"main": [], "others": []}, compiler.ASTSource.make_ir


def make_ir(self, *args, **kwargs):
    main = threading.current_thread() is threading.main_thread()
    if not self.fn.__name__.startswith("triton_"):  # the compiler's own
        by["main" if main else "others"].append(self.fn.__name__)
    return inner(self, *args, **kwargs)


compiler.ASTSource.make_ir = make_ir
torch.manual_seed(0)
model, ids = Net().cuda(), torch.randint(20, (64, 32), device="cuda")
opt = ia.InvariantAdam(model.parameters(), micro_batch_size=8)
opt.expect(8)
run = torch.compile(model) if sys.argv[2] == "compiled" else model
with ia.one_pass(run, 8, into=opt if sys.argv[1] == "into" else None):
    with torch.autocast("cuda", torch.bfloat16):
        y = run(ids)
    before = len(by["main"])
    torch.nn.functional.cross_entropy(y.float().flatten(0, 1), ids.flatten()).backward()
opt.step()
finite = all(bool(p.isfinite().all()) for p in model.parameters())
print(json.dumps(by | {"backward": by["main"][before:], "finite": finite}))
"""


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["eager", "compiled"])
@pytest.mark.parametrize("into", ["into", "pairs"])
def test_after_a_rehearsal_a_backward_compiles_nothing_but_folds(tmp_path: Path, into: str, how: str) -> None:
    """In a process of its own, whose caches are empty."""
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT, into, how], capture_output=True, text=True,
        env=os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["finite"]
    assert found["others"]
    assert {name for name in found["backward"] if name != "_step" and not name.startswith("_fold")} == set(), found

"""Other chips than the one at hand: every kernel compiles for them, and fits.

Triton compiles for any chip without having it. The compiled code cannot be run here: that its arithmetic is right is
for the other tests, interpreted or on a GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton")
chip = pytest.importorskip("invariant_adam.kernels.chip")

SCRIPT = Path(__file__).with_name("compile_for_chip.py")
KILOBYTES = {  # of shared memory that a block may have, by the makers' manuals
    "sm_80": 163,
    "sm_89": 99,
    "sm_90": 227,
    "sm_100": 227,
    "sm_120": 99,
    "gfx90a": 64,
    "gfx942": 64,
}
# Bytes of a thread's registers in memory. Three tiles of 128 × 128 in float32 fill three quarters of a multiprocessor's
# registers; addresses that are worked out before and after the loop may have to give way. Tiles would be a kilobyte.
SPILLED = 1000


def compile_for(name, *how):
    if name.startswith("gfx") and "amd" not in triton.backends.backends:
        pytest.skip(f"Triton {triton.__version__} here was built without AMD's backend: nothing compiles for {name}")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", SCRIPT, name, *how], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr[-4000:]
    *compiled, last = map(json.loads, done.stdout.splitlines())
    assert not last["never"], "kernels that compile_for_chip.py does not launch"
    return compiled


def check(name, compiled):
    assert compiled
    for kernel in compiled:
        assert kernel["shared"] <= KILOBYTES[name] << 10, kernel
        assert kernel["spilled"] < SPILLED, kernel


def test_kernels_fit_the_smallest_shared_memory():
    check("sm_89", compile_for("sm_89", "few"))


@pytest.mark.slow
@pytest.mark.parametrize("name", KILOBYTES)
def test_every_kernel_compiles_and_fits(name):
    compiled = compile_for(name)
    check(name, compiled)
    loads = {kernel["options"].get("DESCRIPTORS") for kernel in compiled if kernel["dtype"] == "torch.bfloat16"}
    assert (True in loads) == (name in ("sm_90", "sm_100", "sm_120"))  # tile loads where there are any


@pytest.mark.parametrize(
    ("has", "stages", "precision"),
    [
        (chip.Chip(132, 227 << 10, tile_loads=True, tf32=True, publishes=True), 5, "tf32"),
        (chip.Chip(142, 99 << 10, tile_loads=False, tf32=True, publishes=True), 3, "tf32"),
        (chip.Chip(304, 64 << 10, tile_loads=False, tf32=False, publishes=False), 2, "ieee"),
    ],
    ids=["H200", "L40S", "MI300X"],
)
def test_launches_ask_the_chip(monkeypatch, has, stages, precision):
    monkeypatch.setattr(chip, "of", lambda device: has)
    device = torch.device("cpu")
    assert chip.stages(device, 32 << 10, 5) == stages
    assert chip.precision(device, True) == precision
    assert chip.precision(device, False) == "ieee"
    gemm = pytest.importorskip("invariant_adam.kernels.gemm_square_triton")
    gemm._cut.cache_clear()
    p = gemm.plan(32, 1024, 1536, 1536, torch.bfloat16, device, gemm.Config())
    gemm._cut.cache_clear()
    assert p.aligned == has.tile_loads
    if not has.publishes:
        assert p.cut is None  # pieces are added by the block that comes last: it must see what the others stored

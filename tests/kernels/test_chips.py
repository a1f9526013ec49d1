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
# Bytes that a thread keeps in memory for want of registers. The product kernels hold three float32 tiles of 128 × 128,
# 768 bytes of the 1020 that a thread has, and make way for addresses after their loops, by how much depends on the
# compiler's version. Beyond this the tiles themselves would go back and forth.
SPILLED = 1500


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
    assert (last["main"] == 0) == ("ahead" in how)
    return compiled


def check(name, compiled):
    assert compiled
    for kernel in compiled:
        assert kernel["shared"] <= KILOBYTES[name] << 10, kernel
        assert kernel["spilled"] < SPILLED, kernel


@pytest.mark.slow
def test_kernels_fit_the_smallest_shared_memory():
    check("sm_89", compile_for("sm_89", "few"))


@pytest.mark.slow
def test_what_a_rehearsal_compiles_is_what_launches_find():
    """Side by side, by other threads: the launches that follow compile nothing."""
    alone, ahead = compile_for("sm_90", "few"), compile_for("sm_90", "few", "ahead")
    assert sorted(map(str, alone)) == sorted(map(str, ahead))


@pytest.mark.slow
@pytest.mark.parametrize("name", KILOBYTES)
def test_every_kernel_compiles_and_fits(name):
    compiled = compile_for(name)
    check(name, compiled)
    loads = {kernel["options"].get("DESCRIPTORS") for kernel in compiled if kernel["dtype"] == "torch.bfloat16"}
    assert (True in loads) == (name in ("sm_90", "sm_100", "sm_120"))  # tile loads where there are any


H200 = chip.Chip(132, 227 << 10, tile_loads=True, tf32=True, publishes=True)
L40S = chip.Chip(142, 99 << 10, tile_loads=False, tf32=True, publishes=True)
MI300X = chip.Chip(304, 64 << 10, tile_loads=False, tf32=False, publishes=False)


@pytest.mark.parametrize(
    ("has", "stages", "precision"),
    [(H200, 5, "tf32"), (L40S, 3, "tf32"), (MI300X, 2, "ieee")],
    ids=["H200", "L40S", "MI300X"],
)
def test_launches_ask_the_chip(monkeypatch, has, stages, precision):
    monkeypatch.setattr(chip, "of", lambda device: has)
    device = torch.device("cpu")
    assert chip.stages(device, 32 << 10, 5) == stages
    assert chip.precision(device, True) == precision
    assert chip.precision(device, False) == "ieee"
    gemm = pytest.importorskip("invariant_adam.kernels.gemm_square.triton")
    gemm._cut.cache_clear()
    even, odd, narrow = (
        torch.empty(32, 1024, n, dtype=torch.bfloat16, device="meta") for n in (1536, 50257, gemm.WIDE // 2)
    )

    def launch(G, X):
        return gemm.GemmLaunch(G, X, gemm.GemmConfig(), (False, False), weighted=False, into=False, tf32=False)

    p = launch(even, even)
    for G, X, copies in ((even, even, (False, False)), (odd, even, (True, False)), (even, odd, (False, True))):
        assert (launch(G, X).loads is not None) == has.tile_loads
        assert launch(G, X).copies == copies
    assert launch(odd, narrow).loads is None
    gemm._cut.cache_clear()
    if not has.publishes:
        assert p.cut is None  # pieces are added by the block that comes last: it must see what the others stored


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter stands for the other chip")
@pytest.mark.parametrize("has", [L40S, MI300X], ids=["L40S", "MI300X"])
def test_the_launches_of_other_chips_give_the_same_sums(monkeypatch, has):
    """Operands that tile loads would fetch here come by address there, from tiles that may not be cut."""
    from invariant_adam.kernels.conv_square import Geometry, conv_groups, ways
    from invariant_adam.kernels.gemm_square import triton as gemm

    monkeypatch.setattr(chip, "of", lambda device: has)
    monkeypatch.setattr(gemm, "_known", {})
    monkeypatch.setattr(ways, "_plans", {})
    gemm._cut.cache_clear()
    G, X = (torch.randn(4, 40, width) for width in (72, 136))
    pairs = [(gemm.gemm_square(G, X), G.double().transpose(1, 2) @ X.double())]
    assert [p.loads for p in gemm._known.values()] == [None]
    gemm._cut.cache_clear()
    geo = Geometry((24, 64, 3, 3), (1, 1), (1, 1), (1, 1), False, (0, 0), 1)
    G, X = torch.randn(4, 2, 24, 8, 8), torch.randn(4, 2, 64, 8, 8)
    with torch.backends.cudnn.flags(allow_tf32=False):
        config = ways.candidates(G, X, geo)[0]
        pairs.append((ways.conv_square(G, X, geo, config=config), conv_groups(G.double(), X.double(), geo)))
    for got, each in pairs:
        for tensor, want in zip(got, (each.sum(0), each.square().sum(0)), strict=True):
            assert (tensor.double() - want).norm() / want.norm() < 1e-5


def test_plain_torch_takes_the_place_of_kernels_that_are_not_wanted():
    """Every module of kernels says that it is not there, which its twin is prepared for."""
    modules = sorted(f"{path.parent.name}.triton" for path in Path(chip.__file__).parent.glob("*/triton.py"))
    assert len(modules) == 6
    code = f"""
import importlib
for name in {[*modules, "conv_square.ways"]}:
    try:
        importlib.import_module("invariant_adam.kernels." + name)
    except ImportError as problem:
        assert "INVARIANT_ADAM_TRITON" in str(problem), problem
    else:
        raise AssertionError(name)
from invariant_adam.kernels import adam
assert adam._triton() is None
"""
    environment = os.environ | {"INVARIANT_ADAM_TRITON": "0"}
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], env=environment, check=True)

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "train_gpt.py"
SMALL = [
    "--width=16",
    "--depth=1",
    "--context=16",
    "--micro-batch=2",
    "--batch=12",
    "--grow-from=4",  # of two ranks under FSDP2, which must have equal shares
    "--lr=3e-3",
    "--samples=360",
    "--dtype=float64",
]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}


def train(out, *arguments, ranks=0):
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks else []
    command = [sys.executable, *launcher, str(EXAMPLE), *SMALL, f"--out={out}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=ENVIRONMENT)
    # Gloo's threads now and then abort a rank that has ended its work, without this package too.
    aborted = ranks and "terminate called without an active exception" in done.stderr
    ended = aborted and "held-out text:" in done.stdout
    assert done.returncode == 0 or ended, done.stdout + done.stderr
    return done.stdout


def held_out(text):
    return float(re.findall(r"held-out text: ([\d.]+)", text)[-1])


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """One process, one pass."""
    return train(tmp_path_factory.mktemp("alone"))


def test_it_is_short():
    assert len(EXAMPLE.read_text().splitlines()) <= 200


def test_updates_grow(tmp_path):
    shown = train(tmp_path, "--every=1", "--ramp=0")
    sizes = [int(x) for x in re.findall(r"batch +(\d+)", shown)]
    assert sizes[:10] == [4] * 10
    assert sorted(set(sizes)) == [4, 8, 12]
    assert sizes[-5:] == [12] * 5
    assert sum(sizes) == 360


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--batch=6", "--grow-from=4"], "--batch 6 is no multiple of 4, which is --grow-from; use 4 or 8"),
        (["--samples=100", "--batch=16"], "--samples 100 is no multiple of 16, which is --batch; use 96 or 112"),
        (["--micro-batch=0"], "--micro-batch 0 is no multiple of 1, which is one sample; use 1 or 2"),
        (["--context=9999999"], "--context 9999999 is too long for "),
    ],
)
@pytest.mark.slow
def test_a_wrong_argument_is_named_with_its_remedy(arguments, text, tmp_path):
    command = [sys.executable, str(EXAMPLE), f"--out={tmp_path}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=ENVIRONMENT)
    assert done.returncode == 1
    assert text in done.stderr
    assert "Traceback" not in done.stderr


def test_it_learns(alone):
    losses = [float(x) for x in re.findall(r" loss ([\d.]+)", alone)]
    assert held_out(alone) < losses[0] < 5.2


@pytest.mark.parametrize(
    ("arguments", "ranks"),
    [
        (("--loop",), 0),
        (("--mode=ddp",), 2),
        (("--mode=fsdp2", "--dtype=float32"), 2),  # FSDP2 with float64 is refused
        # Six micro-batches: two ranks have two, two have one.
        pytest.param(("--mode=ddp", "--loop"), 4, marks=pytest.mark.slow),
    ],
    ids=["loop", "ddp", "fsdp2", "ddp-uneven"],
)
def test_every_mode_gives_the_same_loss(tmp_path, alone, arguments, ranks):
    assert held_out(train(tmp_path, *arguments, ranks=ranks)) == pytest.approx(held_out(alone), abs=2e-6)


@pytest.mark.slow
def test_it_goes_on_after_a_kill(tmp_path, alone):
    command = [sys.executable, str(EXAMPLE), *SMALL, f"--out={tmp_path}", "--every=36"]
    process = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(1200):
            if list(tmp_path.glob("samples-*")) or process.poll() is not None:
                break
            time.sleep(0.05)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    text = train(tmp_path, "--every=36")
    assert "from samples-" in text
    assert held_out(text) == pytest.approx(held_out(alone), abs=2e-6)


@pytest.mark.slow
def test_a_text_of_ones_own(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be, that is the question. " * 200)
    shown = train(tmp_path / "out", f"--text={text}", "--ramp=0")
    assert held_out(shown) < torch.log(torch.tensor(16.0))  # the characters in it


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["single", "ddp", "fsdp2"])
@pytest.mark.parametrize("by", ["--ramp=1", "--loop"])  # one pass, or a loop
def test_it_runs_on_a_gpu_as_it_is(tmp_path, mode, by):
    arguments = (f"--mode={mode}", "--dtype=float32", by)
    shown = train(tmp_path, *arguments, ranks=0 if mode == "single" else 1)
    assert "cuda: from the start" in shown
    assert held_out(shown) < 4.6
    again = train(tmp_path, *arguments, ranks=0 if mode == "single" else 1)
    assert "from samples-000000000360" in again
    assert held_out(again) == held_out(shown)

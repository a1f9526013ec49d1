import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("accelerate")

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "train_transformers.py"
SMALL = ["--samples=192", "--context=16", "--width=16", "--accumulation", "1", "4"]


def losses(out, *arguments, launcher=()):
    """Return the loss on held-out text at each of the two batch sizes."""
    done = subprocess.run(
        [sys.executable, *launcher, str(EXAMPLE), *SMALL, *arguments, f"--out={out}"],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    small, large = (float(loss) for loss in re.findall(r"held-out text ([\d.]+) after 192 samples", done.stdout))
    return small, large


@pytest.mark.slow
@pytest.mark.parametrize("by", [[], ["--one-pass"]], ids=["loop", "one pass"])
def test_batch_sizes_agree(tmp_path, by):
    small, large = losses(tmp_path, *by)
    assert small == pytest.approx(large, abs=0.01)
    assert small < 5.5  # of ln 256 = 5.545


@pytest.mark.slow
def test_two_processes_do_what_one_does(tmp_path):
    one = losses(tmp_path / "one", "--accumulation", "2", "4")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    two = losses(tmp_path / "two", "--accumulation", "1", "2", launcher=launcher)
    assert two == pytest.approx(one, abs=1e-3)  # growing in, the first updates have a micro-batch of each process

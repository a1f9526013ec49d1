import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("accelerate")

ROOT = Path(__file__).parents[2]
SMALL = ["--samples=192", "--context=16", "--width=16", "--accumulation", "1", "4"]


@pytest.mark.parametrize("by", [[], ["--one-pass"]], ids=["loop", "one pass"])
def test_batch_sizes_agree(tmp_path, by):
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "train_transformers.py"), *SMALL, *by, f"--out={tmp_path}"],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    small, large = (float(loss) for loss in re.findall(r"held-out text ([\d.]+) after 192 samples", done.stdout))
    assert small == pytest.approx(large, abs=0.01)
    assert small < 5.5  # of ln 256 = 5.545

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("matplotlib")
pytest.importorskip("transformers", minversion="5")

ROOT = Path(__file__).parents[2]


def run(folder, *options):
    script = ROOT / "benchmarks" / "trainer_transfer.py"
    words = ["--out", folder / "rows.json", "--figure", folder / "figure.png", "--data", folder / "text.txt", *options]
    return subprocess.run(
        [sys.executable, "-W", "error::UserWarning:matplotlib", str(script), *map(str, words)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.slow
def test_the_script_measures_draws_and_goes_on_where_it_was(tmp_path):
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question. " * 4_000)
    small = ["--samples=128", "--accumulation", "1", "4"]
    done = run(tmp_path, *small)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert len(rows) == len(done.stdout.splitlines()) == 4 + 3 * (2 + 2 + 1)  # AdamW's run at B = 4 has both rules
    assert len({row["losses"][0] for row in rows}) == 1  # before the first update all are one
    assert all(row["losses"][-1] < row["losses"][0] for row in rows)
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    again = run(tmp_path, *small)
    assert (again.returncode, again.stdout) == (0, "")


def test_samples_that_make_no_whole_updates_are_refused(tmp_path):
    done = run(tmp_path, "--samples=100")
    assert done.returncode == 1
    assert "--samples 100 is no multiple of 1024" in done.stderr

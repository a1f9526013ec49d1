import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(tmp_path, *arguments):
    """Run the command of the docs page, which leaves no process behind, and return its result."""
    out = tmp_path / "result.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "faults.py"), *arguments, "--out", str(out)]
    done = subprocess.run([*command, "--keep", str(tmp_path / "runs")], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(out.read_text())


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "kills"), [("ddp", 10), ("fsdp2", 4)])
def test_a_killed_run_ends_where_the_undisturbed_one_does(tmp_path, mode, kills):
    result = run(tmp_path, "kills", "--mode", mode, "--kills", str(kills))
    assert {"fold", "reduction", "write", "any moment"} == {row["kind"] for row in result["rows"]}
    assert len(result["rows"]) == kills
    for row in result["rows"]:
        # What was saved when the rank died is there, and nothing older is taken.
        assert row["resumed"] >= row["saved"]
    assert result["damaged"] == []
    assert result["samples"] == result["samples_alone"]
    for key in ("weights", "exp_avg", "exp_avg_sq"):
        assert result[key] <= 1e-6, key
    assert result["loss"] == result["loss_alone"]


@pytest.mark.slow
def test_ranks_that_lose_another_stop_with_an_error_and_do_not_hang(tmp_path):
    result = run(tmp_path, "silence", "--timeout", "10")
    for row in result["rows"]:
        assert row["exit_codes"] == [1, 1]
        assert set(row["errors"]) == {"0", "2"}
        assert row["seconds"] <= result["timeout"] + 5  # the call that times out began after the stop
        for message in row["errors"].values():
            assert "another rank" in message
            assert "checkpoint" in message

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_figures_of_the_pages_are_those_of_the_results():
    script = ROOT / "benchmarks" / "pages.py"
    result = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_the_claims_of_the_theory_page_hold_in_the_results():
    results = ROOT / "benchmarks" / "results"
    assert json.loads((results / "verify.json").read_text())["passed"]
    assert not json.loads((results / "verify-standard.json").read_text())["passed"]
    for path in results.glob("demo*.json"):
        assert json.loads(path.read_text())["ratio"] >= 10, path.name
    # "∝ √B makes its large batches slower, ∝ B makes them faster"
    for name, faster in (("demo", False), ("demo-standard-linear", True)):
        runs = [r for r in json.loads((results / f"{name}.json").read_text())["runs"] if r["optimizer"] == "standard"]
        final = [r["losses"][-1] for r in sorted(runs, key=lambda r: r["batch_size"])]
        assert final == sorted(final, reverse=faster)

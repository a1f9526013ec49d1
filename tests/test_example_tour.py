"""The notebook runs from top to bottom, and shows what it says."""

import json
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[1] / "examples" / "tour.ipynb"


def test_the_notebook_runs_and_its_curves_coincide(monkeypatch, capsys):
    pytest.importorskip("matplotlib").use("Agg")
    import matplotlib.pyplot as plt

    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    names = {"__name__": "__main__"}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert not cell["outputs"]  # kept without: a diff of the notebook is then one of its code
            exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
    assert len(plt.get_fignums()) >= 2
    plt.close("all")

    def spread(curves):
        last = [losses[-1] for losses in curves.values()]
        return max(last) - min(last)

    assert spread(names["invariant"]) < 0.02 * spread(names["adamw"])
    assert "spread" in capsys.readouterr().out

import re
import runpy
import sys
from pathlib import Path

import pytest

pytest.importorskip("lightning")

EXAMPLE = Path(__file__).parents[2] / "examples" / "classify_lightning.py"

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec"),
]


@pytest.fixture
def run(monkeypatch, capsys):
    """Return a function that runs the example and returns what it prints."""

    def printed(*arguments):
        monkeypatch.setattr(sys, "argv", [str(EXAMPLE), *arguments])
        runpy.run_path(str(EXAMPLE), run_name="__main__")
        return capsys.readouterr().out

    return printed


def losses(text):
    return [float(loss) for loss in re.findall(r"per update: loss ([\d.]+), .* after 3072 samples", text)]


def test_batch_sizes_agree(run):
    one, four, sixteen = losses(run("--epochs=2", "--batch-size", "8", "32", "128"))
    assert one < 1.0  # of ln 10 = 2.303
    assert four == pytest.approx(one, rel=0.01)
    assert sixteen == pytest.approx(one, rel=0.02)


def test_one_pass_is_the_loop(run):
    # 1,536 images are no multiple of 10 or 40: the last update and its last micro-batch are short.
    sizes = ["--epochs=2", "--micro-batch=10", "--batch-size", "40", "120"]
    loop, one_pass = losses(run(*sizes)), losses(run(*sizes, "--one-pass"))
    assert len(loop) == 2
    assert one_pass == pytest.approx(loop, abs=2e-4)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--batch-size", "8", "12"], "--batch-size 12 is no multiple of --micro-batch 8; use 8 or 16"),
        (["--batch-size", "4"], "--batch-size 4 is no multiple of --micro-batch 8; use 8 or 16"),
        (["--micro-batch", "0"], "--micro-batch: must be at least 1, got 0"),
    ],
)
def test_sizes_that_cannot_be_are_refused(run, capsys, arguments, said):
    with pytest.raises(SystemExit):
        run(*arguments)
    assert said in capsys.readouterr().err

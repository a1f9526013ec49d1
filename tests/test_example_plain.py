import re
import runpy
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[1] / "examples" / "train_plain.py"


@pytest.fixture
def run(capsys):
    """Return a function that runs a script and returns the losses it prints, a pair for each line."""

    def printed(path):
        runpy.run_path(str(path), run_name="__main__")
        rows = re.findall(r"^ *(\d+) +([\d.]+) +([\d.]+)$", capsys.readouterr().out, re.MULTILINE)
        assert [int(seen) for seen, _, _ in rows] == list(range(2_048, 16_385, 2_048))
        return [(float(small), float(large)) for _, small, large in rows]

    return printed


def test_it_is_short():
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) <= 40


def test_batch_sizes_lie_on_each_other(run):
    losses = run(EXAMPLE)
    assert losses[-1][0] < 0.45  # of ln 4 = 1.386
    for small, large in losses:
        assert large == pytest.approx(small, rel=5e-3)


def test_the_loop_of_its_comment_does_the_same(run, tmp_path):
    text = EXAMPLE.read_text(encoding="utf-8")
    one_pass = re.search(r"            with ia\.one_pass.*\n.*\n", text)[0]
    loop = re.sub(r"^( +)# (for a)", r"\1\2", text.replace(one_pass, ""), flags=re.MULTILINE)
    assert loop.count(".backward()") == 1
    (tmp_path / "loop.py").write_text(loop, encoding="utf-8")
    for looped, at_once in zip(run(tmp_path / "loop.py"), run(EXAMPLE), strict=True):
        assert looped == pytest.approx(at_once, abs=2e-4)

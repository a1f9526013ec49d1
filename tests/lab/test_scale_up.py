"""`scale-up`: at B₀ every method is AdamW, runs are kept, and the table is their difference to B₀."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from invariant_adam_lab import scale_up
from invariant_adam_lab.cli import app
from invariant_adam_lab.training import data as lab_data

ROOT = Path(__file__).parents[2]
TEXT = "".join(chr(97 + (i * i // 7 + i // 3) % 23) for i in range(60_000))
TINY = scale_up.Preset(256, 1, (1e-3,), (0,))


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    return lab_data.text(tmp_path / "text.txt")


def test_at_the_tuned_batch_every_method_is_adamw(text):
    data = scale_up.cut(text.ids, text.test_ids, len(text.vocab), TINY.samples)
    losses = {
        method: scale_up.train(scale_up.Case(1e-3, 0, scale_up.MICRO, method, 256, 1), data)
        for method in ("tuned", "adam, √", "exponential", "linear", "long_momentum", "power 0.5, grown in")
    }
    assert max(losses.values()) - min(losses.values()) < 1e-4
    far = scale_up.train(scale_up.Case(1e-3, 0, 4 * scale_up.MICRO, "adam, unchanged", 256, 1), data)
    assert far > losses["tuned"] + 0.01


def test_growing_in_cuts_the_first_batches(text):
    data = scale_up.cut(text.ids, text.test_ids, len(text.vocab), TINY.samples)
    losses = [
        scale_up.train(scale_up.Case(1e-3, 0, 64, method, 256, 1), data)
        for method in ("tuned", "exponential", "exponential, grown in")
    ]
    assert losses[1] == losses[0] != losses[2]  # one rule, and another first update


def test_runs_are_kept_and_the_table_is_made_of_them(text, tmp_path, monkeypatch):
    monkeypatch.setattr(scale_up, "METHODS", ("exponential", "adam, √"))
    monkeypatch.setattr(scale_up, "FACTORS", (4,))
    out, told = tmp_path / "out.json", []
    result = scale_up.measure(TINY, out, text, "made by a test", told.append)
    assert [row["method"] for row in result["rows"]] == ["tuned", "exponential", "adam, √"]
    tuned, ours, adam = (row["loss"] for row in result["rows"])
    assert list(scale_up.table(result)) == [
        ["", "0.001, B = 64"],
        ["AdamW, B₀ = 16", f"{tuned:.3f}"],
        ["exponential", f"{ours - tuned:+.3f}"],
        ["adam, √", f"{adam - tuned:+.3f}"],
    ]
    monkeypatch.setattr(scale_up, "train", None)  # nothing is trained again
    assert scale_up.measure(TINY, out, text, "made by a test", told.append) == result
    assert len(told) == 6


def test_the_command_prints_what_the_file_holds(text, tmp_path, monkeypatch):
    monkeypatch.setattr(scale_up, "PRESETS", {"smoke": TINY})
    monkeypatch.setattr(scale_up, "METHODS", ("adam, √",))
    monkeypatch.setattr(scale_up, "FACTORS", (4,))
    out = tmp_path / "out.json"
    threads = torch.get_num_threads()
    arguments = ["scale-up", "--data", str(tmp_path / "text.txt"), "--out", str(out)]
    shown = CliRunner().invoke(app, [*arguments, "--json"])
    assert shown.exit_code == 0, shown.output
    assert json.loads(shown.stdout) == json.loads(out.read_text(encoding="utf-8"))
    assert torch.get_num_threads() == threads
    short = CliRunner().invoke(app, [*arguments[:-1], str(tmp_path / "x.json"), "--data", str(tmp_path / "none")])
    assert short.exit_code == 2


def test_what_the_page_says_is_in_the_results():
    rows = json.loads((ROOT / "benchmarks" / "results" / "scale_up.json").read_text(encoding="utf-8"))["rows"]
    each = defaultdict(list)
    for row in rows:
        each[row["lr"], row["batch"], row["method"]].append(row["loss"])
    assert {len(losses) for losses in each.values()} == {3}  # seeds
    loss = {key: statistics.mean(losses) for key, losses in each.items()}
    lrs, best, ours = (3e-4, 1e-3, 3e-3, 1e-2), 1e-2, "long_momentum, grown in"
    tuned = {lr: x for (lr, _, method), x in loss.items() if method == "tuned"}
    assert min(tuned, key=tuned.get) == best
    assert min(tuned) < best < max(tuned)  # inside the range

    def lowest(lr, batch):
        found = {method: x for (a, b, method), x in loss.items() if (a, b) == (lr, batch)}
        return min(found, key=found.get), max(found, key=found.get)

    def noise(key):
        gaps = [a - b for a, b in zip(each[key], each[key[0], 16, "tuned"], strict=True)]
        return statistics.stdev(gaps) / 3**0.5

    assert lowest(best, 64)[0] == lowest(best, 256)[0] == "adam, unchanged"
    assert lowest(best, 256)[1] == "adam, linear"
    assert lowest(3e-4, 64) == lowest(1e-3, 64) == ("adam, linear", "adam, unchanged")
    gaps = {(lr, b): loss[lr, b, ours] - loss[lr, b, "adam, √"] for lr in lrs for b in (64, 256)}
    assert sum(gap < -0.01 for gap in gaps.values()) == 5
    assert {key for key, gap in gaps.items() if gap > 0.01} == {(3e-3, 256), (1e-2, 64)}
    for (lr, b), gap in gaps.items():
        assert gap < 2 * (noise((lr, b, ours)) ** 2 + noise((lr, b, "adam, √")) ** 2) ** 0.5
    for lr in lrs:
        half, quarter, none = (loss[lr, 64, m] for m in ("power 0.5, grown in", ours, "power 0.0, grown in"))
        assert half < quarter + 0.002
        assert none > half
        half, quarter, none = (loss[lr, 256, m] for m in ("power 0.5, grown in", ours, "power 0.0, grown in"))
        assert (quarter < half) == (lr != 1e-3)
        assert none > min(half, quarter)
        assert quarter < loss[lr, 256, "long_momentum"]
        assert (loss[lr, 256, "exponential, grown in"] < loss[lr, 256, "exponential"]) == (lr != best)
        for method in ("exponential", "long_momentum"):
            assert abs(loss[lr, 64, method] - loss[lr, 64, f"{method}, grown in"]) < 0.02
    assert max(noise((lr, 64, m)) for lr, b, m in loss if lr <= 3e-3 and b == 64) < 0.02
    assert max(noise(key) for key in loss if key[1] > 16) < 0.1
    near = {m: abs(x - tuned[3e-4]) for (lr, b, m), x in loss.items() if (lr, b) == (3e-4, 64)}
    assert near["exponential"] == pytest.approx(min(near.values()), abs=1e-3)
    near = {m: abs(x - tuned[3e-4]) for (lr, b, m), x in loss.items() if (lr, b) == (3e-4, 256)}
    assert near[ours] == min(near.values())

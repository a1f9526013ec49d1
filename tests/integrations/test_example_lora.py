import re
import runpy
import sys
from pathlib import Path

import pytest

pytest.importorskip("trl")
pytest.importorskip("peft")

EXAMPLE = Path(__file__).parents[2] / "examples" / "finetune_lora.py"


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Return a function that runs the example and returns what it prints."""

    def printed(*arguments):
        monkeypatch.setattr(sys, "argv", [str(EXAMPLE), f"--out={tmp_path / 'out'}", *arguments])
        runpy.run_path(str(EXAMPLE), run_name="__main__")
        return capsys.readouterr().out

    return printed


def losses(text, samples):
    """Return the loss on held-out text before and after training."""
    before, after = re.findall(rf"held-out text ([\d.]+) after (?:0|{samples}) samples", text)
    return float(before), float(after)


def test_batch_sizes_agree_and_adapters_are_saved(run, tmp_path):
    small = "--samples=498", "--length=32"  # the last update, and its last micro-batch, are short
    one, four = run(*small, "--batch-size=4"), run(*small, "--batch-size=16")
    assert "4 samples per update: 1 (accumulation) × 4 (micro-batch) × 1 (processes)" in one
    assert "16 samples per update: 4 (accumulation) × 4 (micro-batch) × 1 (processes)" in four
    before, after = losses(one, 498)
    assert before - after > 0.5
    assert losses(four, 498) == (before, pytest.approx(after, abs=0.03 * (before - after)))
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()


def test_a_model_and_a_text_of_ones_own(run, tmp_path):
    model, tokenizer = runpy.run_path(str(EXAMPLE))["small"]()
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be\nthat is the question\n\n" * 96, encoding="utf-8")
    before, after = losses(run(f"--model={tmp_path / 'model'}", f"--data={text}", "--lr=0.01"), 64)
    assert after < before - 0.3


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--batch-size=10"], "--batch-size 10 is no multiple of 4, which is --micro-batch 4 × 1 processes; use 8 or"),
        (["--micro-batch=0"], "--micro-batch 0 must be at least 1 sample"),
        (["--data=nowhere.txt"], "--data nowhere.txt is no file; give a text file"),
    ],
)
def test_arguments_that_cannot_be_are_refused(run, capsys, arguments, said):
    with pytest.raises(SystemExit):
        run(*arguments)
    assert said in capsys.readouterr().err


def test_a_text_that_is_too_short_is_refused(run, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("one\n\ntwo\n", encoding="utf-8")
    with pytest.raises(SystemExit, match="has 2 samples, and 32 of them are held out; give more"):
        run(f"--data={text}")

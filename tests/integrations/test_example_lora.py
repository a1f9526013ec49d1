import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # peft and trl are installed for the slow tests alone

pytest.importorskip("trl")
pytest.importorskip("peft")

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "finetune_lora.py"


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


def test_two_processes_do_what_one_does(run, tmp_path):
    small = "--samples=96", "--length=16", "--batch-size=16"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [sys.executable, *launcher, str(EXAMPLE), *small, f"--out={tmp_path / 'two'}"],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("16 samples per update: 2 (accumulation) × 4 (micro-batch) × 2 (processes)") == 1
    # Growing in, the first updates have a micro-batch of each process.
    assert losses(done.stdout, 96) == pytest.approx(losses(run(*small), 96), abs=3e-3)


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
        (["--micro-batch=0"], "--micro-batch: must be at least 1, got 0"),
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

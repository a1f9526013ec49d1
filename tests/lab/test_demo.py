import json
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import browser
import pytest
import torch
from typer.testing import CliRunner

import invariant_adam
from invariant_adam_lab.cli import app
from invariant_adam_lab.demo import TRAIN, DemoRun, Settings, build_model, check, load_digits, samples, spread, train

TINY = ["--batch-sizes", "64,256", "--epochs", "2"]
FILES = ("demo.html", "demo.json", "demo.png", "demo.svg")


def run(*arguments):
    return CliRunner().invoke(app, ["demo", *map(str, arguments)], env={"COLUMNS": "200"})


def kept(result):
    return " ".join(result.stderr.split()).count("kept from before")  # a line may be broken


def finished(out):
    return {path.name: path.stat().st_mtime_ns for path in (out / "runs").glob("*.json")}


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """One tiny demo through the real command, shared by the tests that only look at it."""
    out = tmp_path_factory.mktemp("demo")
    result = run(*TINY, "--out", out)
    assert result.exit_code == 0, result.output
    return out, result


def test_it_writes_what_it_says_and_says_what_it_found(done):
    out, result = done
    for name in FILES:
        assert (out / name).stat().st_size > 1000
        assert f"wrote {out / name}" in result.stderr
    assert (out / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert "times smaller" in result.stdout
    told = json.loads((out / "demo.json").read_text())
    assert [(r["optimizer"], r["batch_size"], len(r["losses"])) for r in told["runs"]] == [
        ("standard", 64, 2),
        ("standard", 256, 2),
        ("invariant", 64, 2),
        ("invariant", 256, 2),
    ]
    assert told["ratio"] == told["spread"]["standard"] / told["spread"]["invariant"]
    assert [(r["batch_size"], r["order"]) for r in told["reordered"]] == [(64, 1), (64, 2)]
    assert 0 < told["order_floor"] < told["spread"]["standard"]
    assert f"order floor     {told['order_floor']:.5f}" in result.stdout
    assert told["settings"]["tuned_betas"] == pytest.approx([1 - 0.1 / 4, 1 - 0.001 / 4])


def test_the_optimizers_coincide_where_both_are_tuned(done):
    runs = json.loads((done[0] / "demo.json").read_text())["runs"]
    standard, invariant = (r["losses"] for r in runs if r["batch_size"] == 64)
    assert invariant == pytest.approx(standard, rel=1e-5)


def test_the_page_needs_no_network(done):
    page = (done[0] / "demo.html").read_text()
    assert page.count("<svg") == 3
    ids = re.findall(r' id="([^"]*)"', page)
    assert len(set(ids)) == len(ids)
    assert all(name[1:] in ids for name in re.findall(r'href="(#[^"]*)"', page))
    assert page.count("<tr>") == 1 + 4
    assert not re.search(r"https?:|//[a-z]|@import|<link|<script|<img|<iframe", page)
    references = re.findall(r'(?:src|href)="([^"]*)"', page) + re.findall(r"url\(([^)]*)\)", page)
    assert all(reference.startswith("#") for reference in references)


def test_started_again_it_keeps_the_finished_runs_and_trains_the_missing_one(done):
    out, _ = done
    before = finished(out)
    assert len(before) == 6
    again = run(*TINY, "--out", out)
    assert kept(again) == 6
    assert finished(out) == before
    victim = next(path for path in (out / "runs").glob("invariant-256-*"))
    whole = json.loads(victim.read_text())
    victim.write_text(victim.read_text()[:40])  # as if cut off
    third = run(*TINY, "--out", out)
    assert third.exit_code == 0
    assert kept(third) == 5
    assert json.loads(victim.read_text())["losses"] == whole["losses"]


def test_other_settings_are_trained_anew_and_json_is_all_of_stdout(done):
    out, _ = done
    result = run(*TINY, "--seed", "1", "--out", out, "--json")
    assert result.exit_code == 0
    assert "kept from before" not in result.stderr
    assert json.loads(result.stdout)["settings"]["seed"] == 1
    assert len(finished(out)) == 12


@pytest.mark.slow
def test_interrupted_it_says_how_to_go_on(tmp_path):
    source = str(Path(invariant_adam.__file__).parents[1])
    command = [sys.executable, "-m", "invariant_adam", "demo", "--batch-sizes", "64,256", "--epochs", "60"]
    process = subprocess.Popen(
        [*command, "--out", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": source, "COLUMNS": "200"},
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # the tests may run in the background
    )
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("runs/*.json")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    kept = len(finished(tmp_path))
    assert process.returncode == 130, stderr
    assert 1 <= kept < 6
    assert f"{kept} of 6 runs are kept; the same command resumes with the rest." in stderr
    assert "Traceback" not in stderr


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "taken").write_text("a file")
    result = run("--batch-sizes", "512,1536", "--epochs", "1", "--out", tmp_path / "taken" / "demo")
    assert result.exit_code == 2
    assert "cannot write to --out" in result.stderr


def test_every_batch_size_sees_the_same_samples():
    settings = check(Settings(batch_sizes=(24, 8, 16)))
    assert settings.batch_sizes == (8, 16, 24)
    assert settings.samples_per_epoch == TRAIN
    assert check(Settings(batch_sizes=(8, 40))).samples_per_epoch == 1520


def test_the_images_are_whole_and_the_model_is_as_described():
    digits = load_digits()
    assert len(digits.y) + len(digits.held_out_y) == 1797
    assert (digits.x.min(), digits.x.max()) == (0, 1)
    assert sum(p.numel() for p in build_model(0).parameters()) == 9930


def test_the_spread_is_the_mean_gap_of_the_log_loss():
    runs = [DemoRun("standard", b, losses, 1.0, 0.0) for b, losses in ((8, [1.0, 0.5]), (16, [1.0, 0.25]))]
    assert spread(runs) == pytest.approx(0.5 * 0.6931471805599453)


@pytest.mark.slow
def test_the_demo_keeps_its_promise(tmp_path):
    result = run("--out", tmp_path, "--json")
    told = json.loads(result.stdout)
    assert told["ratio"] >= 10
    assert min(r["accuracy"] for r in told["runs"] if r["optimizer"] == "invariant") > 0.9


def test_invariant_adam_is_nearer_to_the_small_batch_already_in_one_epoch():
    settings, data = check(Settings(batch_sizes=(8, 128), epochs=1)), load_digits()
    base = train(settings, "standard", 8, data)
    gaps = {name: spread([base, train(settings, name, 128, data)]) for name in ("standard", "invariant")}
    assert gaps["standard"] > 10 * gaps["invariant"]


def test_growing_in_brings_the_large_batch_nearer_and_leaves_the_small_one_as_it_is():
    grown, data = check(Settings(batch_sizes=(8, 128), epochs=1)), load_digits()
    whole = grown._replace(grow=False)
    base = train(grown, "invariant", 8, data)
    assert base.losses == train(whole, "invariant", 8, data).losses
    gaps = [spread([base, train(s, "invariant", 128, data)]) for s in (grown, whole)]
    assert 3 * gaps[0] < gaps[1]


def test_another_order_moves_micro_batches_inside_their_block_only():
    settings = check(Settings(batch_sizes=(8, 32)))
    usual, other = samples(settings, 3), samples(settings, 3, order=1)
    assert not torch.equal(usual, other)
    assert not torch.equal(other, samples(settings, 3, order=2))
    for ours, theirs in zip(usual.split(32), other.split(32), strict=True):
        assert sorted(map(tuple, ours.view(4, 8).tolist())) == sorted(map(tuple, theirs.view(4, 8).tolist()))


@pytest.mark.browser
@pytest.mark.skipif(not (browser.BROWSER and browser.DRIVER), reason="needs chromium and chromedriver")
def test_the_page_suits_a_phone_and_a_dark_room(done, tmp_path):
    def tell(command, **parameters):
        window.ask("POST", "/goog/cdp/execute", {"cmd": f"Emulation.{command}", "params": parameters})

    with browser.start(tmp_path) as window:
        for width in (390, 1300):
            tell("setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 500)
            for theme in ("light", "dark"):
                tell("setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])
                window.open(done[0] / "demo.html")
                assert window.js("return document.documentElement.scrollWidth <= innerWidth")  # only tables scroll
                across = window.js(
                    "return new Set([...document.querySelectorAll('svg')].map((e) => e.offsetLeft || "
                    "e.getBoundingClientRect().left)).size"
                )
                assert across == (1 if width == 390 else 3)
                # What is written in a drawing has the colour of the page's own text.
                fills = window.js(
                    "const all = [...document.querySelectorAll('svg .text, svg g[id*=text] > g')];"
                    "return [...new Set(all.map((e) => getComputedStyle(e).fill)),"
                    " getComputedStyle(document.body).color, getComputedStyle(document.querySelector('dt')).color]"
                )
                assert set(fills[:-2]) <= set(fills[-2:]), fills
        assert window.log() == []


def test_standard_adam_may_follow_the_linear_rule_too():
    settings = check(Settings(standard_rule="linear"))
    assert settings.at("standard", 128).lr == settings.at("invariant", 128).lr == pytest.approx(16 * settings.lr)
    with pytest.raises(ValueError, match="--standard-rule must be one of square_root, linear, got 'cubic'"):
        check(Settings(standard_rule="cubic"))

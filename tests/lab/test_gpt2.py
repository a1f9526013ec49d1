"""`reproduce gpt2`: any text as byte-pair tokens, one pass over it, in pieces that fit into memory."""

from __future__ import annotations

import csv
import math
import random
import shutil
import sys

import pytest
import torch
from lab_runs import CPU, invoke, run, small_source

import invariant_adam as ia
from invariant_adam_lab.grids import grid, store
from invariant_adam_lab.grids.grid import Choice
from invariant_adam_lab.training import data, tokens, train
from invariant_adam_lab.training.runs import RECIPES
from invariant_adam_lab.training.source import load
from invariant_adam_lab.training.updates import ScaledOptimizer

WORDS = ["samples", "of", "one", "batch", "and", "é", "漢", "(x1)", "<|endoftext|>", "another", "moment\n\tend"]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("INVARIANT_ADAM_DATA", str(tmp_path / "cache"))
    return tmp_path / "cache"


def words(count: int, seed: int = 0) -> str:
    draw = random.Random(seed)
    return " ".join(draw.choice(WORDS) for _ in range(count))


@pytest.fixture
def folder(tmp_path):
    """Three texts, one of them twice, and what is no text."""
    place = tmp_path / "texts"
    (place / "inner").mkdir(parents=True)
    for name, seed in (("a.txt", 0), ("b.md", 1), ("inner/c.c", 2), ("inner/again.txt", 0)):
        (place / name).write_bytes(words(2_000, seed).encode())
    (place / "image.png").write_bytes(b"\x89PNG\r\n\xff\xfe")
    (place / "zeros.bin").write_bytes(b"\0" * 100)
    return place


def test_documents_are_the_texts_of_a_folder_each_once_whatever_their_names(folder):
    texts, digest = tokens.documents(folder)
    assert sorted(texts) == sorted(words(2_000, seed) for seed in range(3))
    (folder / "a.txt").rename(folder / "z.rst")
    assert tokens.documents(folder) == (texts, digest)
    (folder / "b.md").write_text("other")
    assert tokens.documents(folder)[1] != digest


def test_tokens_are_the_text_and_are_made_once(folder, cache, monkeypatch):
    told: list[str] = []
    found = tokens.tokens(folder, 300, told.append)
    texts, digest = tokens.documents(folder)
    assert found.decode() == "".join(text + tokens.END for text in texts)
    assert len(found.vocab) <= 300
    assert (torch.cat((found.ids, found.test_ids)) == found.vocab.index(tokens.END)).sum() == len(texts)
    assert len(found.test_ids) == round(0.1 * (len(found.ids) + len(found.test_ids)))
    assert [path.name for path in cache.iterdir()] == [f"tokens-{digest[:16]}-300.npz"]
    assert len(told) == 1
    monkeypatch.setattr(tokens, "_make", None)  # nothing is trained again
    again = tokens.tokens(folder, 300, told.append)
    assert torch.equal(again.ids, found.ids)
    assert again.vocab == found.vocab
    next(cache.iterdir()).write_bytes(b"half")
    with pytest.raises(data.DataError, match=r"damaged .*delete it"):
        tokens.tokens(folder, 300)


def test_cached_tokens_stand_for_the_text_on_another_machine(folder, cache, tmp_path):
    command = ["gpt2", "--preset", "tiny", "--device", "cpu", "--out", str(tmp_path / "runs"), "--no-figures"]
    command += ["--micro-batch", "4", "--batch-sizes", "4", "--max-batch", "16", "--epochs", "2", "--images", "160"]
    command += ["--lrs", "3e-3", "--algorithms", "invariant", "--data"]
    assert invoke(*command, str(folder)).exit_code == 0
    copy = next(cache.iterdir()).rename(tmp_path / "copy.npz")
    digest = tokens.documents(folder)[1]
    shutil.rmtree(folder)
    assert tokens.digest(copy) == digest
    again = invoke(*command, str(copy))
    assert again.exit_code == 0, again.output
    assert "1 of 1 runs are kept" in again.stderr
    shutil.rmtree(tmp_path / "runs")
    assert invoke(*command, str(copy)).exit_code == 0
    assert list(cache.iterdir()) == []
    with pytest.raises(data.DataError, match=r"vocabulary of 512, and this model has 32,768; name the text"):
        tokens.tokens(copy, 32_768)
    copy.write_bytes(b"half")
    with pytest.raises(data.DataError, match=r"copy.npz is damaged"):
        tokens.digest(copy)


def test_pieces_of_a_long_text_and_a_large_vocabulary(monkeypatch):
    text = words(3_000)
    monkeypatch.setattr(tokens, "PIECE", 1_000)
    monkeypatch.setattr(tokens, "VOCABULARY_CHARACTERS", 4_000)
    assert tokens.encode([text], 400).decode() == text + tokens.END
    every = tokens.encode(["".join(map(chr, range(1, 3_000)))], tokens.MOST_TOKENS)
    assert every.ids.min() >= 0
    with pytest.raises(ValueError, match=r"vocabulary must be 257 .* to 32768, got 40000"):
        tokens.encode([text], 40_000)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none", None, "does not exist"),
        ("file", b"\xff\xfe\0", "is no UTF-8 text"),
        ("blank", b" \n", "holds no UTF-8 text"),
    ],
)
def test_what_is_no_text_is_refused(name, content, message, tmp_path):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    found = invoke("gpt2", "--preset", "tiny", "--data", str(tmp_path / name), "--out", str(tmp_path / "runs"))
    assert found.exit_code == 2
    assert message in " ".join(found.stderr.split())


def test_without_tokenizers_the_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(data.DataError, match=r"need tokenizers: pip install 'invariant-adam\[text\]'"):
        tokens.encode(["a text"], 300)


def test_the_grid_is_one_pass_and_invariant_adam_grows_in():
    found = grid.plan("gpt2", "short")
    assert {(r.algorithm, r.batch_size, r.grow) for r in found.runs} == {
        *(("invariant", size, 0.1 * (size > 8)) for size in (8, 32, 128, 256)),
        *(("standard", size, 0.0) for size in (8, 32, 128, 256)),
    }
    assert {r.max_batch_size for r in found.runs} == {256}
    assert {r.grow for r in grid.plan("gpt2", "short", choice=Choice(grow=(0.0,))).runs} == {0.0}
    assert {r.grow for r in grid.plan("gpt", "short").runs} == {0.0}
    with pytest.raises(ValueError, match="in each of epochs=10, got 2559"):
        grid.plan("gpt2", "short", choice=Choice(samples=2_559))
    with pytest.raises(data.DataError, match="name a file or a folder by --data"):
        store.digest("gpt2", False, None)


def test_epochs_are_parts_of_one_pass():
    numbered = tokens.Tokens(torch.arange(32_000, dtype=torch.int16), torch.arange(100, dtype=torch.int16), ("a", "b"))
    source = load("gpt2", CPU, small=True, found=numbered)
    take = source.count // 4
    parts = [source.epoch(3, number, 0, take)[0] for number in range(4)]
    firsts = torch.cat(parts)[:, 0]
    assert len(firsts.unique()) == len(firsts) == 4 * take  # no sequence is there twice
    assert len((firsts % 32).unique()) == 1  # and none overlaps with another
    assert not torch.equal(source.epoch(4, 0, 0, take)[0], parts[0])


def test_the_learning_rate_warms_up_and_falls_along_a_cosine_at_every_batch_size(monkeypatch):
    source, seen = small_source("gpt2"), {}
    true = ScaledOptimizer.set_lr
    for batch in (5, 20):
        factors = seen[batch] = []

        def note(self, factor, factors=factors):
            factors.append(factor)
            true(self, factor)

        monkeypatch.setattr(ScaledOptimizer, "set_lr", note)
        train.finish(train.train(run("gpt2", batch=batch, samples=160, epochs=2), source))
    schedule = ia.warmup_cosine(8, 160, floor=0.1)
    assert seen[5][-1] == pytest.approx(schedule.mean(155, 160))
    means = [sum(seen[5][i : i + 4]) / 4 for i in range(0, 32, 4)]
    assert means == pytest.approx(seen[20])
    assert max(seen[20]) < 1


@pytest.mark.parametrize(("algorithm", "rule"), [("invariant", "linear"), ("standard", "square_root")])
def test_matrices_decay_and_betas_are_those_of_language_models(algorithm, rule):
    source = small_source("gpt2")
    settings = run("gpt2", algorithm, rule, 20)
    model = train.make_model(settings, source)
    assert model.head.weight is model.tokens.weight
    groups = ScaledOptimizer(settings, model, CPU).inner.param_groups
    decay = {p: group["weight_decay"] for group in groups for p in group["params"]}
    assert {p: 0.1 * (p.dim() > 1) for p in model.parameters()} == decay
    assert {group["betas"] for group in groups} == {(0.9, 0.95)}


@pytest.mark.parametrize(("algorithm", "rule"), [("invariant", "linear"), ("standard", "square_root")])
@pytest.mark.parametrize("most", [5, 10, 15])
def test_an_update_in_pieces_is_the_same_update(algorithm, rule, most, monkeypatch):
    source = small_source("gpt2")
    settings = run("gpt2", algorithm, rule, 20, samples=80, epochs=2)
    whole = train.finish(train.train(settings, source))
    monkeypatch.setitem(RECIPES, "gpt2", RECIPES["gpt2"]._replace(most=most))
    pieces = train.finish(train.train(settings, source))
    for one, other in zip(whole, pieces, strict=True):
        for key in ("train_loss", "test_loss", "train_accuracy", "end_train_loss"):
            assert other[key] == pytest.approx(one[key], rel=1e-5), key


def test_the_noise_scale_is_kept_along_the_run():
    source = small_source("gpt2")
    rows = train.finish(train.train(run("gpt2", samples=80), source))
    assert all(row["noise_scale"] > 0 for row in rows)
    other = train.finish(train.train(run("gpt2", "standard", "square_root", samples=80), source))
    assert not any("noise_scale" in row for row in other)


def test_the_command_trains_on_a_folder_of_texts_and_goes_on(folder, tmp_path):
    command = ["gpt2", "--preset", "tiny", "--device", "cpu", "--data", str(folder), "--out", str(tmp_path / "runs")]
    command += ["--micro-batch", "4", "--batch-sizes", "4,16", "--max-batch", "16", "--epochs", "2", "--images", "160"]
    found = invoke(*command, "--lrs", "3e-3")
    assert found.exit_code == 0, found.output
    assert "4 of 4 runs" in found.stdout
    here = tmp_path / "runs" / "gpt2-curves-tiny-e2-n160"
    with (here / "results.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {(row["algorithm"], row["batch_size"], row["grow"]) for row in rows} == {
        ("invariant", "4", "0.0"), ("invariant", "16", "0.1"), ("standard", "4", "0.0"), ("standard", "16", "0.0"),
    }  # fmt: skip
    assert {row["samples"] for row in rows} == {"80", "160"}
    assert all(math.isfinite(float(row["noise_scale"])) for row in rows if row["algorithm"] == "invariant")
    assert (here / "figures" / "report.html").exists()
    kept = {path.name: path.read_bytes() for path in here.glob("*-lr*.json")}
    again = invoke(*command, "--lrs", "3e-3,1e-2", "--no-figures")
    assert again.exit_code == 0, again.output
    assert "4 of 8 runs are kept" in again.stderr
    assert kept.items() <= {path.name: path.read_bytes() for path in here.glob("*-lr*.json")}.items()


def test_smoke_needs_no_text(tmp_path):
    words = ["gpt2", "--preset", "smoke", "--device", "cpu", "--out", str(tmp_path), "--lrs", "1e-2", "--no-figures"]
    found = invoke(*words)
    assert found.exit_code == 0, found.output
    assert "6 of 6 runs" in found.stdout


def test_a_text_too_short_is_refused_before_a_run_begins(tmp_path):
    (tmp_path / "text.txt").write_text("a few words and no more")
    found = invoke("gpt2", "--device", "cpu", "--data", str(tmp_path / "text.txt"), "--out", str(tmp_path / "runs"))
    assert found.exit_code == 2
    assert "held-out tokens has no sequence of 1024; use a longer text" in " ".join(found.stderr.split())
    with pytest.raises(data.DataError, match="a text of your own"):
        load("gpt2", CPU)

import functools
import itertools
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
from lab_results import FULL, PAIR, rows, same, uneven, write

from invariant_adam_lab.results.curves import load
from invariant_adam_lab.results.measures import best, compare, floor, matched, measure, spreads
from invariant_adam_lab.training.runs import RECIPES

ROOT = Path(__file__).parents[2]


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
    # "At the end of a long run the batch sizes still agree"
    for path in results.glob("demo-200-epochs*.json"):
        long = json.loads(path.read_text())
        assert long["spread"]["invariant"] < 2 * long["order_floor"]
        runs = [r for r in long["runs"] if r["optimizer"] == "invariant"]
        assert len({r["accuracy"] for r in runs}) == 1
        assert all(r["losses"][19] > 100 * r["losses"][-1] for r in runs)


def test_the_claims_of_the_speed_page_hold_in_the_results():
    for row in json.loads((ROOT / "benchmarks" / "results" / "memory_cpu.json").read_text())["rows"]:
        assert round(row["tensors"], 1) == (4 if row["method"] in ("plain", "accumulate") else 3), row["method"]


def said(name):
    """The words of a page, without its line breaks."""
    return " ".join((ROOT / "docs" / name).read_text(encoding="utf-8").split())


def result(name):
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))


def test_the_claims_of_the_pages_about_kernels_and_steps_hold_in_the_results():
    rows = result("gemm_square_h200")["rows"]
    ratios = [row["ratio"] for row in rows if row["o"] % 8 == 0]
    assert f"[{min(ratios):.1f} to {max(ratios):.2f} times]" in said("kernels.md")
    (odd,) = (row["ratio"] for row in rows if row["o"] == 50257)
    assert f"Of GPT-2's 50,257 columns it takes {odd:.2f} times as long" in said("kernels.md")
    totals = {row["model"]: row["ratio"] for row in result("conv_square_h200")["rows"] if "all_plain_ms" in row}
    assert f"ResNet-18 together take {totals['resnet18']:.2f} times" in said("kernels.md")
    assert f"ResNet-50 {totals['resnet50']:.2f} times" in said("kernels.md")
    assert "**Compiled transformers** of ours cost within 3 % of AdamW" in said("speed.md")
    theirs = [
        row["ratio"]
        for row in result("models_h200")["rows"]
        if row["method"] == "one-pass" and row["compiled"] and row["model"].startswith(("hf:", "timm:vit"))
    ]
    assert f"those of timm and transformers above, {min(theirs):.2f} to {max(theirs):.2f}" in said("speed.md")
    for row in result("one_pass_h200")["rows"]:
        if row["method"] in ("one-pass", "into") and row["compiled"] and row["model"].startswith(("gpt", "vit")):
            assert row["ratio"] < 1.035


def test_the_claims_of_the_one_pass_page_hold_in_the_results():
    cells = json.loads((ROOT / "benchmarks" / "results" / "peers_cpu.json").read_text())["cells"]
    for ours in (c for c in cells if c["method"] == "ours"):
        same = [c for c in cells if (c["net"], c["M"]) == (ours["net"], ours["M"]) and "ratio" in c]
        plain = next(c for c in same if c["method"] == "plain")
        rivals = [c["ratio"] for c in same if c["exact"] and c["method"] != "ours"]
        # Fastest up to 64 rows per group, but for M = 1, where BackPACK is level with it.
        limit = 1.15 if ours["rows_per_group"] > 64 else 1.05 if ours["M"] == 1 else 1.0
        assert ours["exact"]
        assert ours["ratio"] <= limit * min(rivals), (ours["net"], ours["M"])
        assert ours["peak_mb"] <= 1.3 * plain["peak_mb"] + 16, (ours["net"], ours["M"])


def test_the_claims_of_the_trainers_page_hold_in_the_results(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from trainer_transfer import PARTS, by_method, spreads

    rows = json.loads((ROOT / "benchmarks" / "results" / "trainer_transfer.json").read_text())["rows"]
    page = " ".join((ROOT / "docs" / "trainer_results.md").read_text(encoding="utf-8").split())
    best, tenth, thirtieth = (by_method(rows, part)[2] for part in PARTS)

    def loss(runs, size):
        return runs[size][-1]

    def spread(runs, largest):
        return f"{spreads({size: losses for size, losses in runs.items() if size <= largest})[-1]:#.2g}"

    ours, plain, root = best.values()
    for rival in (plain, root):
        assert all(theirs < mine for theirs, mine in zip(spreads(rival), spreads(ours), strict=True))
        assert all(loss(rival, size) < loss(ours, size) for size in (16, 32, 128))
    assert f"{loss(plain, 128):.2f} against {loss(ours, 128):.2f} at B = 128" in page
    assert loss(plain, 128) == min(loss(runs, 128) for by in (best, tenth, thirtieth) for runs in by.values())
    other = " ".join((ROOT / "docs" / "when_not.md").read_text(encoding="utf-8").split())
    assert f"it ends at {loss(ours, 16):.2f}, AdamW left alone at {loss(plain, 16):.2f}" in other
    assert f"at 8 times it is {loss(ours, 32):.2f} against {loss(plain, 32):.2f}" in other
    lowest = loss(ours, 4)
    assert f"cost {loss(ours, 16) - lowest:.2f} of the loss" in " ".join((ROOT / "docs" / "faq.md").read_text().split())
    ours, plain, root = tenth.values()
    said = "the spread at the end is {}, that of AdamW {}, under √B {}."
    assert said.format(*(spread(runs, 32) for runs in (ours, plain, root))) in page
    assert f"its loss of {loss(ours, 128):.2f} is above that of √B, {loss(root, 128):.2f}" in page
    ours, plain, root = thirtieth.values()
    said = "32 times the batch size transfer: {} against {} and {}."
    assert said.format(*(spread(runs, 128) for runs in (ours, plain, root))) in page
    assert f"At B = 4 it is {loss(ours, 4):.2f}, and the best learning rate has {lowest:.2f}" in page


@pytest.fixture
def pages(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import pages

    return pages


def filled(pages, root):
    """What `benchmarks/pages.py` makes of the page of the lab's results."""
    ((page, blocks),) = pages.lab_pages(root).items()
    return pages.fill(blocks, pages.before(root, page), page)


def headings(text):
    return [line[3:] for line in text.splitlines() if line.startswith("## ")]


def test_the_page_of_the_results_comes_with_the_first_results(pages, tmp_path):
    assert pages.lab_pages(tmp_path) == {}
    short = {"sizes": (25, 100, 400), "rates": (1e-5, 1e-4), "epochs": 3}
    write(
        tmp_path / pages.LAB / "resnet-ln", rows("resnet-ln", **short), commands=["invariant-adam reproduce resnet-ln"]
    )
    text = filled(pages, tmp_path)
    assert "`invariant-adam reproduce resnet-ln`" in text
    # No heading of an experiment that was not made.
    assert headings(text) == [
        "At the same speed", "Every metric", "The trajectories", "Where it breaks", "Seconds per epoch",
        "Where the numbers are from",
    ]  # fmt: skip
    figure = tmp_path / "docs" / "figures" / "lab" / "resnet-ln-curves.png"
    figure.parent.mkdir(parents=True)
    figure.touch()
    assert "](figures/lab/resnet-ln-curves.png)" in filled(pages, tmp_path)


def test_the_page_of_the_results_keeps_what_was_written_by_hand(pages, tmp_path):
    short = {"sizes": (25, 100, 400), "rates": (1e-5, 1e-4, 1e-3), "epochs": 3}
    found = rows(algorithms=(*FULL, ("accumulate", "square_root")), ramps=("25-400",), **short)
    found += rows(warmups=(50_000,), **short)
    found += rows(algorithms=PAIR[:1], micro=100, **short | {"sizes": (100, 400)})
    write(tmp_path / pages.LAB / "all", found)
    text = filled(pages, tmp_path)
    assert [heading[:3] for heading in headings(text) if heading.startswith("(")] == ["(a)", "(b)", "(c)", "(d)", "(e)"]
    path = tmp_path / pages.LAB_PAGE
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text.replace("<!-- rules -->", "By hand.\n\n<!-- rules -->"), encoding="utf-8")
    for row in found:
        row["train_loss"] *= 1 + row["batch_size"] / 1e4
    write(tmp_path / pages.LAB / "all", found)
    again = filled(pages, tmp_path)
    assert "By hand.\n\n<!-- rules -->" in again
    assert again != path.read_text(encoding="utf-8")  # and --check would say so


def tables(text, block):
    """The rows of the tables of a block, as dictionaries by the names of their columns."""
    part = text.split(f"<!-- {block} -->")[1].split(f"<!-- /{block} -->")[0]
    found, head = [], []
    for line in part.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if not cells:
            head = []
        elif not head:
            head = cells
        elif set(line) != set("|-"):
            found.append(dict(zip(head, cells, strict=True)))
    return found


def by_hand(found, sizes, **settings):
    """The spread of the runs with these settings, from the rows of the file."""
    settings = {"seed": 0, "warmup_samples": 0, "micro_batch_size": 25, "model": "resnet-bn"} | settings
    logs = {}
    for row in found:
        if same(row, **settings) and row["batch_size"] in sizes:
            logs.setdefault(row["epoch"], []).append(math.log(row["train_loss"]))
    assert all(len(values) == len(sizes) for values in logs.values())
    return sum(max(values) - min(values) for values in logs.values()) / len(logs)


OURS = {"algorithm": "invariant", "rule": "linear"}
THEIRS = {"algorithm": "standard", "rule": "square_root"}


@pytest.fixture
def uneven_page(pages, tmp_path):
    found = uneven()
    write(tmp_path / pages.LAB / "uneven", found)
    return found, filled(pages, tmp_path)


def test_a_warm_up_is_compared_over_the_batch_sizes_it_has(uneven_page):
    found, text = uneven_page
    shown = tables(text, "warmup")
    assert [(row["optimizer"], row["η₀"], row["batch sizes"]) for row in shown] == [
        (name, lr0, "25, 800")
        for name in ("Invariant Adam, η ∝ B", "Standard Adam, η ∝ √B")
        for lr0 in ("1e-5", "1e-4")
    ]
    cold, warm = (by_hand(found, (25, 800), lr0=1e-4, warmup_samples=n, **OURS) for n in (0, 25_000))
    assert (shown[1]["spread without"], shown[1]["spread with"]) == (f"{cold:.2g}", f"{warm:.2g}")
    rivals = [by_hand(found, (25, 800), lr0=1e-4, warmup_samples=n, **THEIRS) for n in (0, 25_000)]
    for name, below, above in zip(("ratio without", "ratio with"), (cold, warm), rivals, strict=True):
        assert float(shown[1][name]) == pytest.approx(above / below, rel=0.06)
    assert shown[2]["ratio with"] == ""  # a rival has none


def test_rivals_rules_and_norms_are_compared_over_the_batch_sizes_they_have(uneven_page):
    found, text = uneven_page
    rivals = tables(text, "rivals")
    assert [row["rival"] for row in rivals] == [
        "Standard Adam, η ∝ B", "AdamA, η ∝ B", "Adam, half-life of v in samples, η constant"
    ]  # fmt: skip
    assert not any(row["model"].startswith("ViT") for row in rivals)  # a stray run is no comparison
    for row in rivals:
        # Of one micro-batch the first two are Adam with the learning rate of invariant Adam, which has the run.
        sizes = (100, 400, 800) if "half-life" in row["rival"] else (25, 100, 400, 800)
        values = [by_hand(found, sizes, lr0=1e-4, **side) for side in (THEIRS, OURS)]
        assert (row["η₀"], row["batch sizes"]) == ("1e-4", ", ".join(map(str, sizes)))
        assert [cell.split(" (")[0] for cell in list(row.values())[-2:]] == [f"{value:.2g}" for value in values]
    rules = tables(text, "rules")
    assert [(row["η₀"], row["batch sizes"]) for row in rules] == [("1e-4", "100, 400"), ("1e-3", "100, 400")]
    for row, lr0 in zip(rules, (1e-4, 1e-3), strict=True):
        for rule in ("linear", "exponential"):
            value = by_hand(found, (100, 400), lr0=lr0, model="vit", algorithm="invariant", rule=rule)
            assert row[f"spread, {rule}"] == f"{value:.2g}"
    wide, norm = tables(text, "norm")
    assert (wide["batch sizes"], norm["batch sizes"]) == ("25, 100, 400, 800", "100, 400, 800")
    for name, settings in (
        ("invariant", OURS),
        ("standard", THEIRS),
        ("standard, accumulated", {"algorithm": "accumulate"}),
        ("layer norm: invariant", {"model": "resnet-ln", **OURS}),
        ("layer norm: standard", {"model": "resnet-ln", **THEIRS}),
    ):
        assert norm[f"spread, {name}"] == f"{by_hand(found, (100, 400, 800), lr0=1e-4, **settings):.2g}"


def test_layer_norm_with_fewer_batch_sizes_does_not_take_them_from_batch_norm(pages, tmp_path):
    found = [row for row in uneven() if not same(row, model="resnet-ln", batch_size=800)]
    write(tmp_path / pages.LAB / "uneven", found)
    wide, narrow = tables(filled(pages, tmp_path), "norm")
    assert (wide["batch sizes"], wide["spread, layer norm: standard"]) == ("25, 100, 400, 800", "")
    assert narrow["batch sizes"] == "100, 400"
    assert narrow["spread, standard"] == f"{by_hand(found, (100, 400), lr0=1e-4, **THEIRS):.2g}"


def test_every_micro_batch_size_is_compared_where_the_others_are(uneven_page):
    found, text = uneven_page
    shown = tables(text, "micro")
    # Learning rates that one M alone has are not in it, nor is the stray run.
    assert [(row["η₀"], row["M"]) for row in shown] == [
        (lr0, M) for lr0 in ("1e-4", "3e-4", "1e-3") for M in ("25", "100", "400")
    ]
    for row, lr0 in zip(shown, [1e-4] * 3 + [3e-4] * 3 + [1e-3] * 3, strict=True):
        M = int(row["M"])
        assert row["at B ="] == "400"
        if M < 400:
            value = by_hand(found, (100, 400), lr0=lr0, micro_batch_size=M, **OURS)
            assert (row["spread"], row["over B ="]) == (f"{value:.2g}", "100, 400")
        else:
            assert (row["spread"], row["over B ="]) == ("", "")
        wanted = {"batch_size": 400, "lr0": lr0, "seed": 0, "epoch": 3, "micro_batch_size": M, "warmup_samples": 0}
        (last,) = (r for r in found if same(r, **wanted, **OURS, model="resnet-bn"))
        assert row["training loss"] == f"{last['train_loss']:.4g}"


def test_a_micro_batch_size_that_has_no_other_beside_it_has_its_own_spread(pages, tmp_path):
    found = [r for r in uneven() if not same(r, batch_size=100, micro_batch_size=100, lr0=1e-4)]
    found = [r for r in found if not same(r, algorithm="standard", rule="linear")]  # it would stand for it
    write(tmp_path / pages.LAB / "uneven", found)
    shown = {(row["η₀"], row["M"]): row for row in tables(filled(pages, tmp_path), "micro")}
    assert shown["3e-4", "25"]["over B ="] == "100, 400"  # beside M = 100
    row = shown["1e-4", "25"]
    value = sum(by_hand(found, (25, 100, 400, 800), lr0=1e-4, seed=seed, **OURS) for seed in (0, 1, 2)) / 3
    assert (row["spread"], row["over B ="]) == (f"{value:.2g}", "25, 100, 400, 800; 3 seeds")
    assert shown["1e-4", "100"]["spread"] == ""


def test_the_best_learning_rates_name_those_that_were_tried(uneven_page):
    _, text = uneven_page
    shown = [row for row in tables(text, "tuned") if any("M = 400" in name for name in row)]
    few, many, more = "1e-5, 1e-4, 1e-3", "1e-5, 1e-4, 3e-4, 1e-3", "1e-4, 3e-4, 1e-3"
    assert {row["B"]: row["η₀ tried"] for row in shown} == {
        "25": few,
        "100": f"M = 25, standard: {many}<br>M = 100: {more}",
        "400": f"M = 25, standard: {many}<br>M = 100, 400: {more}",
        "800": few,
    }
    empty = {row["B"]: [name for name, cell in row.items() if not cell] for row in shown}
    micro = "Invariant Adam, η ∝ B, M = {}".format
    assert empty == {"25": [micro(100), micro(400)], "100": [micro(400)], "400": [], "800": [micro(100), micro(400)]}
    assert re.fullmatch(r"\*[\d.]+ \(1e-3\)\*, \*[\d.]+ % \(1e-3\)\*", shown[0][micro(25)])  # at the edge
    assert "ResNet-18, batch norm, after 150,000 samples:" in text


def test_the_spreads_name_their_batch_sizes_and_how_far_seeds_lie_apart(uneven_page):
    found, text = uneven_page
    shown = {row[""]: row for row in tables(text, "spreads")}
    row = shown["ResNet-18, batch norm, M = 25, B = 25, 100, 400, 800, 3 epochs"]
    sides = [
        [by_hand(found, (25, 100, 400, 800), lr0=1e-4, seed=seed, **side) for seed in (0, 1, 2)]
        for side in (OURS, THEIRS)
    ]
    means = [sum(side) / 3 for side in sides]
    ratios = [above / below for below, above in zip(*sides, strict=True)]
    cell = row["η₀ = 1e-4"]
    assert cell.startswith(f"{means[1]:.2g}, {means[0]:.2g}: **{means[1] / means[0]:.0f}** (3 seeds: ")
    assert f": {min(ratios):.0f}–{max(ratios):.0f}); at equal loss " in cell
    assert min(ratios) < means[1] / means[0] < max(ratios)
    assert "seeds" not in row["η₀ = 1e-5"]
    assert shown["ResNet-18, layer norm, M = 25, B = 100, 400, 800, 3 epochs"]["η₀ = 1e-3"] == ""
    without = next(row for row in tables(text, "spreads") if row[""] == "the same without B = 800")
    below, above = (by_hand(found, (25, 100, 400), lr0=1e-5, **side) for side in (OURS, THEIRS))
    assert without["η₀ = 1e-5"] == f"{above:.2g}, {below:.2g}: **{above / below:.0f}**"


def test_the_spreads_are_at_learning_rates_that_most_models_have(pages, uneven_page, tmp_path):
    found, text = uneven_page
    names = [f"η₀ = {lr0}" for lr0 in ("1e-5", "1e-4", "1e-3")]
    assert list(tables(text, "spreads")[0]) == ["", *names]  # neither 3e-4 of batch norm alone nor the stray run
    assert "at equal final loss\nat the learning rates that most models have:" in text
    write(tmp_path / pages.LAB / "uneven", [row for row in found if same(row, model="resnet-bn")])
    text = filled(pages, tmp_path)
    row = tables(text, "spreads")[0]
    assert list(row) == ["", *names[:2], "η₀ = 3e-4", *names[2:]]
    assert row["η₀ = 3e-4"].endswith(" (B = 100, 400)")
    assert "the ratio at equal final loss:" in text


def test_figures_are_linked_of_the_models_in_the_table(pages, tmp_path):
    short = {"sizes": (25, 400), "rates": (1e-4,), "epochs": 3}
    found = rows(algorithms=(*PAIR, ("adama", "linear")), **short) + rows("vit", warmups=(0, 50_000), **short)
    write(tmp_path / pages.LAB / "both", found)
    figures = tmp_path / "docs" / "figures" / "lab"
    figures.mkdir(parents=True)
    for name in ("all", "curves-warmup", "rules", "micro", "norm"):
        for model in ("resnet-bn", "vit"):
            (figures / f"{model}-{name}.png").touch()
    assert re.findall(r"figures/lab/(.*)\.png", filled(pages, tmp_path)) == ["vit-curves-warmup", "resnet-bn-all"]


def test_every_question_has_its_figure(pages, tmp_path):
    write(tmp_path / pages.LAB / "uneven", uneven())
    figures = tmp_path / "docs" / "figures" / "lab"
    figures.mkdir(parents=True)
    kept = {"tuned": "vit-best", "rules": "vit-rules", "micro": "resnet-bn-micro", "norm": "resnet-bn-norm"}
    for name in kept.values():
        (figures / f"{name}.png").touch()
    text = filled(pages, tmp_path)
    for block, name in kept.items():
        assert f"](figures/lab/{name}.png)\n<!-- /{block} -->" in text


def test_what_one_side_lacks_is_not_in_the_spread_of_the_other(pages, tmp_path):
    found = [r for r in uneven() if not same(r, model="resnet-bn", algorithm="standard", batch_size=25, lr0=1e-5)]
    found = [r for r in found if not (same(r, model="resnet-bn", lr0=1e-4) and r["seed"] and r["batch_size"] == 400)]
    found = [r for r in found if not same(r, model="resnet-ln", algorithm="standard", lr0=1e-5)]
    write(tmp_path / pages.LAB / "uneven", found)
    shown = {row[""]: row for row in tables(filled(pages, tmp_path), "spreads")}
    row = shown["ResNet-18, batch norm, M = 25, B = 25, 100, 400, 800, 3 epochs"]
    below, above = (by_hand(found, (100, 400, 800), lr0=1e-5, **side) for side in (OURS, THEIRS))
    assert row["η₀ = 1e-5"].startswith(f"{above:.2g}, {below:.2g}: **{above / below:.0f}**; at equal loss ")
    assert row["η₀ = 1e-5"].endswith(" (B = 100, 400, 800)")
    assert " (3 seeds, B = 25, 100, 800: " in row["η₀ = 1e-4"]  # no mean over other batch sizes
    alone = by_hand(found, (100, 400, 800), lr0=1e-5, model="resnet-ln", **OURS)
    row = shown["ResNet-18, layer norm, M = 25, B = 100, 400, 800, 3 epochs"]
    assert row["η₀ = 1e-5"] == f"invariant alone: {alone:.2g}"


def test_a_stray_micro_batch_size_does_not_take_the_place_of_the_papers(pages, tmp_path):
    found = rows(epochs=3) + rows(algorithms=PAIR[:1], sizes=(5, 25), rates=(1e-4,), epochs=3, micro=5, largest=800)
    found += rows(sizes=(400,), rates=(3e-4,), epochs=3, largest=800)
    write(tmp_path / pages.LAB / "stray", found)
    (row, _) = tables(filled(pages, tmp_path), "spreads")
    assert list(row)[1:] == [f"η₀ = {lr0}" for lr0 in ("1e-5", "1e-4", "1e-3")]  # one batch size has no column
    below = by_hand(found, (25, 100, 400, 800), lr0=1e-4, **OURS)
    assert f", {below:.2g}: " in row["η₀ = 1e-4"]


def test_a_ramp_is_compared_within_its_seeds(pages, tmp_path):
    found = rows(sizes=(25, 400), rates=(1e-4,), epochs=3, ramps=("25-400",))
    write(tmp_path / pages.LAB / "ramp", found)
    before = tables(filled(pages, tmp_path), "ramp")
    write(tmp_path / pages.LAB / "ramp", found + rows(sizes=(25, 400), rates=(1e-4,), epochs=3, seeds=(1, 2)))
    assert tables(filled(pages, tmp_path), "ramp") == before


def seen_once(sizes=(8, 256), algorithms=PAIR, rates=(1.2e-3,), **settings):
    """Rows of runs of GPT-2: invariant Adam is grown in, but for B = M, and standard Adam has the largest B alone."""
    found = rows("gpt2", algorithms, sizes, rates, micro=8, largest=256, epochs=10, samples=9984, **settings)
    found = [row for row in found if row["algorithm"] == "invariant" or row["batch_size"] == 256]
    return [row | {"grow": 0.1 * (row["algorithm"] == "invariant" and row["batch_size"] > 8)} for row in found]


def test_a_model_that_sees_its_data_once_is_in_a_block_of_its_own(pages, tmp_path):
    short = rows("resnet-ln", sizes=(25, 100, 400), rates=(1e-5, 1e-4), epochs=3)
    for name, found in (("without", short), ("with", short + seen_once())):
        write(tmp_path / name / pages.LAB / "all", found)
    without, text = (filled(pages, tmp_path / name) for name in ("without", "with"))
    block = re.search(r"<!-- once -->\n(.*)<!-- /once -->\n", text, flags=re.DOTALL)[1]
    assert text.replace(block, "") == without  # no other table changes
    shown = [row for row in tables(text, "once") if "mini-batches" in row]
    assert [(row["optimizer"], row["B"], row["mini-batches"]) for row in shown] == [
        ("Invariant Adam, η ∝ B", "8", "12,480"),
        ("Invariant Adam, η ∝ B, grown in", "256", "390"),
        ("Standard Adam, η ∝ √B", "256", "390"),
    ]
    losses = [row["test_loss"] for row in seen_once() if row["algorithm"] == "standard"]
    assert [shown[2][part] for part in ("10 %", "50 %", "100 %")] == [f"{losses[i]:.3f}" for i in (0, 4, 9)]
    (spread,) = (row for row in tables(text, "once") if "order floor" in row)
    assert (spread["optimizer"], spread["batch sizes"]) == ("Invariant Adam, η ∝ B, grown in", "8, 256")
    value = by_hand([row for row in seen_once() if row["algorithm"] == "invariant"], (8, 256), model="gpt2",
                    micro_batch_size=8)  # fmt: skip
    assert (spread["training loss, running"], spread["order floor"]) == (f"{value:.2g}", "not measured")
    lacks = "Not run: η₀ = 3e-4, 6e-4; B = 32, 128; Standard Adam at η₀ = 1.2e-3, B = 8; the order floor; other seeds."
    assert lacks in " ".join(block.split())


def test_runs_that_come_later_are_no_longer_missing(pages, tmp_path):
    found = seen_once() + rows("gpt2", PAIR[1:], (8,), (1.2e-3,), micro=8, largest=256, samples=9984)
    order = rows("gpt2", PAIR[:1], (8,), (1.2e-3,), micro=8, largest=256, samples=9984)
    found += [row | {"order": 1, "train_loss": 1.01 * row["train_loss"]} for row in order]
    write(tmp_path / pages.LAB / "gpt2", found)
    text = filled(pages, tmp_path)
    assert "Not run: η₀ = 3e-4, 6e-4; B = 32, 128; other seeds." in text
    shown = tables(text, "once")
    assert [row["optimizer"] for row in shown if "mini-batches" in row] == [
        "Invariant Adam, η ∝ B", "Invariant Adam, η ∝ B, order 1", "Invariant Adam, η ∝ B, grown in",
        "Standard Adam, η ∝ √B", "Standard Adam, η ∝ √B",
    ]  # fmt: skip
    assert [(row["optimizer"], row["order floor"]) for row in shown if "order floor" in row] == [
        ("Standard Adam, η ∝ √B", "not measured"), ("Invariant Adam, η ∝ B, grown in", "0.01")
    ]  # fmt: skip


@pytest.fixture(scope="module")
def lab_results():
    return load(ROOT / "benchmarks" / "results" / "lab")


def side(found, model, algorithm, lr0, sizes=None, warmup=0):
    """The runs of the paper's comparison at M of the model, of these batch sizes or all."""
    rule = {"invariant": "linear", "halflife": "none"}.get(algorithm, "square_root")
    if algorithm == "linear":
        algorithm, rule = "standard", "linear"
    micro = 8 if model == "gpt" else 25
    (series,) = (
        s
        for s in found.series(model)
        if (*s[:2], s.warmup_samples, s.grow) == (algorithm, rule, warmup, 0) and s.micro_batch_size in (0, micro)
    )
    return [run for run in found.group(model, series, lr0) if sizes is None or run.batch_size in sizes]


def spread_of(found, model, algorithm, lr0, sizes=None, warmup=0):
    return measure(side(found, model, algorithm, lr0, sizes, warmup)).value


def ratio_of(found, model, lr0, sizes=None, warmup=0):
    below, above = compare([side(found, model, name, lr0, sizes, warmup) for name in ("invariant", "standard")])
    return above.value / below.value


def gap(found, model, algorithm, size, epoch, base=25):
    """How many percent the log loss at a batch size is above that at another, at η₀ = 1e-4 with seed 0."""
    losses = {r.batch_size: r.losses[epoch] for r in side(found, model, algorithm, 1e-4) if r.seed == 0}
    return 100 * math.log(losses[size] / losses[base])


SMALLER = {"gpt": (8, 32, 128), "resnet-ln": (25, 100, 400)}


def test_the_short_answers_of_the_results_page_are_those_of_the_results(lab_results):
    page = " ".join((ROOT / "docs" / "results.md").read_text(encoding="utf-8").split())  # lines are wrapped
    at = functools.partial(ratio_of, lab_results)
    bn, ln, vit, gpt = (round(at(model, 1e-5)) for model in ("resnet-bn", "resnet-ln", "vit", "gpt"))
    assert f"lie {bn} (batch norm), {ln} (layer norm) and {vit} times (ViT) closer" in page
    assert f"in a GPT {gpt} times." in page
    bn, vit = (round(at(model, 1e-4)) for model in ("resnet-bn", "vit"))
    ln, gpt = (f"{at(model, 1e-4):.1f}" for model in ("resnet-ln", "gpt"))
    assert f"{bn} times with batch norm and {vit} in the ViT, but {ln} with layer norm and {gpt} in the GPT" in page
    ln, gpt = (round(at(model, 1e-4, SMALLER[model])) for model in ("resnet-ln", "gpt"))
    assert f"part in the first epochs: {ln} and {gpt} without them" in page
    warm = at("resnet-ln", 1e-4, None, 25_000), at("resnet-ln", 1e-4, SMALLER["resnet-ln"], 25_000)
    assert f"makes it {warm[0]:.1f} with layer norm ({warm[1]:.0f} without B = 800)" in page
    assert f"but for batch norm ({at('resnet-bn', 1e-3):.1f})" in page
    assert all(at(model, 1e-3) <= 2.5 for model in ("resnet-ln", "vit", "gpt"))


def test_the_ratios_at_equal_loss_of_the_results_page_are_those_of_the_results(lab_results):
    page = " ".join((ROOT / "docs" / "results.md").read_text(encoding="utf-8").split())

    def at(model, lr0):
        (ours,) = (s for s in lab_results.paper_pair(model) if s.algorithm == "invariant")
        return matched(lab_results, model, ours, lr0)

    models = ("resnet-bn", "vit", "gpt", "resnet-ln")
    bn, vit, gpt, ln = (at(model, 1e-4).ratio for model in models)
    assert f"{bn:.0f} (batch norm), {vit:.1f} (ViT), {gpt:.1f} (GPT) and {ln:.1f} (layer norm) at 1e-4" in page
    bn, vit, gpt, ln = (at(model, 1e-3).ratio for model in models)
    assert f"At 1e-3 it is {bn:.1f} with batch norm, and below 1 elsewhere" in page
    assert max(vit, gpt, ln) < 1
    assert {at(model, 1e-5).why for model in models} == {"outside the range tried"}


def test_growing_in_on_a_cpu_is_what_the_results_page_says_it_is():
    page = " ".join((ROOT / "docs" / "results.md").read_text(encoding="utf-8").split())
    found = load(ROOT / "benchmarks" / "results" / "lab_tiny")
    (grown,) = (s for s in found.paper("gpt") if s.grow)
    as_is, cut = (measure(found.group("gpt", s, 3e-3), metric="end_train_loss").value
                  for s in (grown._replace(grow=0.0), grown))  # fmt: skip
    least = floor(found, "gpt", grown, 3e-3, "end_train_loss")
    assert f"falls from {as_is:.2g} to {cut:.2g} at η₀ = 3e-3, where the order floor is {least:.2g}" in page


def test_growing_in_on_a_gpu_is_what_the_results_page_says_it_is(lab_results):
    page = " ".join((ROOT / "docs" / "results.md").read_text(encoding="utf-8").split())
    (ours,) = (s for s in lab_results.paper_pair("gpt") if s.algorithm == "invariant")
    grown = ours._replace(grow=0.1)

    def ratio(series, lr0):
        sides = [lab_results.group("gpt", s, lr0) for s in (series, series.rival)]
        below, above = compare(sides)
        return above.value / below.value

    equal = matched(lab_results, "gpt", grown, 1e-4).ratio
    assert f"{ratio(grown, 1e-4):.0f} times of {ratio(ours, 1e-4):.1f} at 1e-4 ({equal:.0f} at equal loss)" in page
    assert f"and {ratio(grown, 1e-5):.0f} of {ratio(ours, 1e-5):.0f} at 1e-5" in page


def test_growing_in_on_the_papers_models_is_what_the_pages_say_it_is(lab_results):
    page, paper = (" ".join((ROOT / "docs" / name).read_text("utf-8").split()) for name in ("results.md", "paper.md"))

    def of(model, lr0):
        """Spread grown in; ratios to standard Adam grown in and not, over the same batch sizes."""
        (ours,) = (s for s in lab_results.paper_pair(model) if s.algorithm == "invariant")
        series = ours._replace(grow=0.1), ours, ours.rival
        cut, whole, rival = compare([lab_results.group(model, s, lr0) for s in series])
        assert 25 in cut.batch_sizes
        assert max(cut.batch_sizes) == (400 if model == "vit" else 800)
        return cut.value, rival.value / cut.value, rival.value / whole.value

    def both(model, lr0, form=".0f"):
        _, grown, as_is = of(model, lr0)
        return f"{grown:{form}} of {as_is:{'.0f' if as_is > 10 else '.2g'}}"

    (ln,) = (s for s in lab_results.paper_pair("resnet-ln") if s.algorithm == "invariant")
    equal = matched(lab_results, "resnet-ln", ln._replace(grow=0.1), 1e-4).ratio
    layers = f"{both('resnet-ln', 1e-5)} at 1e-5, and {both('resnet-ln', 1e-4)} at 1e-4"
    assert f"with layer norm {layers} ({equal:.1f} at equal loss)" in page
    assert f"little there: {both('resnet-bn', 1e-4)}, and {both('vit', 1e-4)}." in page

    def least(model):
        """The order floor."""
        (ours,) = (s for s in lab_results.paper_pair(model) if s.algorithm == "invariant")
        return floor(lab_results, model, ours, 1e-4)

    above = [f"{of(model, 1e-4)[0] / least(model):.1f}" for model in ("vit", "resnet-bn", "resnet-ln")]
    said = "It is {} times the [order floor](#at-the-same-speed) in the ViT, {} with batch norm and {} with layer norm"
    assert said.format(*above) in page
    best = of("vit", 1e-4)[0] * of("vit", 1e-4)[1] / least("vit")
    assert f"no method could be closer than {best:.0f} times in the ViT" in page
    apart = f"lie {100 * of('vit', 1e-3)[0]:.2g} % apart"
    assert f"At 1e-3 it makes {both('vit', 1e-3)} in the ViT, whose batch sizes then {apart}" in page

    def first_epoch(model):
        (ours,) = (s for s in lab_results.paper_pair(model) if s.algorithm == "invariant")
        series = ours, ours._replace(grow=0.1)
        found = (measure(lab_results.group(model, s, 1e-4), epochs=[1]).value for s in series)
        return "from {:.2g} to {:.2g}".format(*found)

    layers, patches = first_epoch("resnet-ln"), first_epoch("vit")
    assert f"In the first epoch at 1e-4 the spread falls {layers} with layer norm and {patches} in the ViT" in page
    layers = both("resnet-ln", 1e-3, ".1f")
    assert f"and {both('resnet-bn', 1e-3)} with batch norm, but {layers} with layer norm" in page
    assert f"the batch sizes {apart}" in paper
    as_is = spread_of(lab_results, "resnet-ln", "invariant", 1e-4)
    assert f"from {as_is:.2g} to {of('resnet-ln', 1e-4)[0]:.2g}, which is still more than 1 %" in paper


def test_gpt2_on_a_text_is_what_the_pages_say_it_is(lab_results):
    runs = {
        (run.series.algorithm, run.batch_size): run
        for run in lab_results.runs
        if (run.model, run.lr0, run.seed, run.order) == ("gpt2", 1.2e-3, 0, 0)
    }
    assert sorted(runs) == [("invariant", 8), ("invariant", 256), ("standard", 8), ("standard", 256)]
    assert runs["invariant", 256].series.grow == 0.1
    assert not any(runs["standard", size].series.grow for size in (8, 256))
    ends = {key: run.columns["test_loss"][-1] for key, run in runs.items()}
    ours, plain = ((ends[name, 8], ends[name, 256]) for name in ("invariant", "standard"))
    of = [f"from {small:.2f} to {large:.2f}" for small, large in (ours, plain)]
    more = [f"{large - small:.2f}" for small, large in (ours, plain)]
    page, lab, home, log = (
        " ".join((ROOT / path).read_text(encoding="utf-8").split())
        for path in ("docs/results.md", "docs/lab.md", "README.md", "CHANGELOG.md")
    )
    both = f"{of[0]} (+{more[0]}) with invariant Adam, grown in, and {of[1]} (+{more[1]}) with"
    assert f"its final test loss goes {both} standard Adam." in page
    assert f"the test loss goes {both} AdamW, lr ∝ √B." in home
    assert f"the test loss goes {of[0]} with invariant Adam and {of[1]} with standard Adam." in lab
    assert f"with invariant Adam by {more[0]} in test loss, with standard Adam by {more[1]}." in log
    assert f"rises by {more[0]} with invariant Adam and by {more[1]} with standard Adam" in page
    (times,) = (row.ratio for row in spreads(lab_results) if row.model == "gpt2" and row.ratio > 0)
    assert f"the ratio of their spreads is {times:.2g}." in page
    right = [runs[name, 8].columns["test_accuracy"][-1] for name in ("invariant", "standard")]
    tokens = "invariant Adam predicts {:.1%} of the tokens and standard Adam {:.1%}.".format(*right).replace("%", " %")
    assert f"At B = 8 the two end alike, {ours[0] - plain[0]:.3f} apart in test loss, though {tokens}" in page
    assert f"both have the same η₀ and betas, and invariant Adam ends {plain[1] - ours[1]:.2f} lower." in page
    samples = {run.columns["samples"][-1] for run in runs.values()}
    assert samples == {99_840}
    assert round(99_840 * 1024 / 1e6) == 102
    minutes = [sum(run.columns["seconds"]) / 60 for run in runs.values()]
    assert f"took {min(minutes):.0f} to {max(minutes):.0f} minutes of an H200" in lab
    # "it is the highest of the grid", "not small in 390 updates", "one seed", "not tried at another η₀"
    recipe = RECIPES["gpt2"]
    assert max(recipe.lrs) == 1.2e-3
    assert [round(1 - beta, 2) for beta in recipe.betas] == [0.1, 0.05]
    assert 99_840 // 256 == 390
    assert {(run.lr0, run.seed) for run in lab_results.runs if run.model == "gpt2"} == {(1.2e-3, 0)}
    (about,) = (grid for grid in lab_results.grids.values() if grid["model"] == "gpt2")
    assert f"tokens-{about['dataset']['sha256'][:16]}-{recipe.vocabulary}.npz" in lab


def test_the_speed_page_quotes_the_thread_that_backwards_run_in():
    rows = json.loads((ROOT / "benchmarks" / "results" / "calling_thread_h200.json").read_text("utf-8"))["rows"]
    ms = {(row["model"], row["method"], row["own_thread"]): row["ms"] for row in rows}
    page = " ".join((ROOT / "docs" / "speed.md").read_text(encoding="utf-8").split())
    vit, resnet = (ms[model, "one-pass", False] / ms[model, "plain", True] for model in dict.fromkeys(k[0] for k in ms))
    assert f"[{vit:.2f} of plain's time]" in page
    assert f"and ResNet-18 {resnet:.2f}." in page


def test_the_speed_page_says_what_models_as_people_bring_them_cost():
    rows = json.loads((ROOT / "benchmarks" / "results" / "models_h200.json").read_text("utf-8"))["rows"]
    page = " ".join((ROOT / "docs" / "speed.md").read_text(encoding="utf-8").split())
    ours = [row for row in rows if row["method"] == "one-pass"]
    newest = next(row["code"] for row in ours if row["model"] == "resnet50")
    new = [row for row in ours if row["code"] == newest]
    plains = [row for row in rows if row["method"] == "plain" and row["code"] == newest and "where" in row]
    layers = {(row["model"], row["compiled"], row.get("mode")): row for row in plains}

    def more(row):
        """Microseconds of the host per layer more than plain's."""
        plain = layers[row["model"], row["compiled"], row.get("mode")]
        return 1e3 * (row["where"]["host_ms"] - plain["where"]["host_ms"]) / row["layers"]

    eager = [row for row in new if not (row["compiled"] or row["graph"] or row.get("beside"))]
    assert {row["model"] for row in eager} >= {"resnet18", "resnet50", "timm:convnext_tiny", "timm:efficientnet_b0"}
    costs = sorted(more(row) for row in eager)
    assert f"The host needs {costs[0]:.0f} to {costs[-1]:.0f} µs more per layer" in page
    waiting = sorted(row["ratio"] for row in eager if row["where"]["host_ms"] > row["where"]["kernels_ms"])
    assert f"they take {waiting[0]:.2f} to {waiting[-1]:.2f} of plain's time" in page
    (vit,) = (row for row in new if row.get("mode") == "reduce-overhead" and row["model"].startswith("timm"))
    resnets = {row.get("mode"): row for row in ours if row["compiled"] and row["model"] == "resnet18"}
    vits = {row.get("mode"): row for row in ours if row["compiled"] and row["model"].startswith("timm:vit")}
    resnet = resnets["reduce-overhead"]
    (graph,) = (row for row in new if row["graph"])
    assert f"{graph['ratio']:.2f} for ConvNeXt-T by `ia.capture`, {vit['ratio']:.2f} for ViT-S/16" in page
    assert f"and {resnet['ratio']:.2f} for ResNet-18 by `reduce-overhead`" in page
    assert f"ViT-S/16 takes {vits[None]['ratio']:.2f}." in page
    assert f"joined the graph, takes {resnets[None]['ratio']:.2f}, and" in page
    assert f"{resnets[None]['peak_gib']:.1f} GiB of plain's {resnets[None]['plain_peak_gib']:.1f}" in page
    beside = json.loads((ROOT / "benchmarks" / "results" / "resnet18_beside_h200.json").read_text("utf-8"))["rows"]
    again = next(row for row in beside if row["method"] == "one-pass" and row.get("mode") is None)
    assert f"{again['peak_gib']:.1f}" == f"{again['first_gib']:.1f}" == f"{again['plain_peak_gib']:.1f}"
    assert f"beside other commands, it has {again['peak_gib']:.1f} GiB in all updates" in page
    swin, convnext = (
        next(row["ratio"] for row in ours if row["compiled"] and row["model"].startswith(f"timm:{name}"))
        for name in ("swin", "convnext")
    )
    assert f"Swin-T takes {swin:.2f} and ConvNeXt-T {convnext:.2f}." in page
    peaks = sorted(
        row["first_gib"] / max(row["plain_peak_gib"], row["plain_first_gib"]) for row in new if not row["graph"]
    )
    assert f"at most {peaks[-1]:.2f} times the peak that plain AdamW has in any update" in page
    (cold,) = (row for row in new if row["model"] == "resnet50")
    assert f"ResNet-50's took {cold['first_s']:.0f} s with empty caches" in page
    warm = sorted(row["first_s"] for row in eager if row is not cold)
    assert f"the other eager ones that ran alone took {warm[0]:.0f} to {warm[-1]:.0f} s" in page


def test_where_the_page_about_the_paper_disagrees(lab_results):
    spread = functools.partial(spread_of, lab_results)
    assert spread("vit", "invariant", 1e-3) > 0.01 > spread("vit", "invariant", 1e-3, (25, 100))
    (vit,) = (s for s in lab_results.paper_pair("vit") if s.algorithm == "invariant")
    assert matched(lab_results, "vit", vit, 1e-3).ratio < 1
    assert spread("resnet-ln", "invariant", 1e-4) > 0.01 > spread("resnet-ln", "invariant", 1e-4, (25, 100, 400))
    assert spread("resnet-ln", "invariant", 1e-3) > spread("resnet-ln", "standard", 1e-3)


def test_the_claims_of_the_results_page_about_trajectories_hold(lab_results):
    spread = functools.partial(spread_of, lab_results)
    good = [(model, 1e-5) for model in ("gpt", "resnet-bn", "resnet-ln", "vit")] + [("resnet-bn", 1e-4), ("vit", 1e-4)]
    for name, low, high in (("invariant", 0.00005, 0.0035), ("standard", 0.005, 0.095)):
        assert all(low <= spread(model, name, lr0) <= high for model, lr0 in good)
    gaps = functools.partial(gap, lab_results, "resnet-ln")
    assert [round(gaps("invariant", 800, epoch)) for epoch in (1, 10)] == [8, 3]
    assert [round(gaps("standard", 800, epoch)) for epoch in (1, 10)] == [14, 32]
    assert round(gaps("invariant", 400, 1)) == 3
    assert round(100 * spread("resnet-ln", "invariant", 1e-4, SMALLER["resnet-ln"])) == 1
    assert round(ratio_of(lab_results, "resnet-ln", 3e-5)) == 16
    # A warm-up takes so much of the spread.
    for model, samples, low, high in (
        ("resnet-ln", 25_000, 0.5, 0.75),
        ("gpt", 4_000, 0.5, 0.77),
        ("resnet-bn", 25_000, 0.17, 0.29),
        ("vit", 25_000, 0.0, 0.1),
    ):
        for lr0 in (1e-5, 1e-4):
            warm = side(lab_results, model, "invariant", lr0, warmup=samples)
            cold = side(lab_results, model, "invariant", lr0)
            before, after = (one.value for one in compare([cold, warm]))
            assert low <= 1 - after / before <= high, (model, lr0)
    for model, samples, percent in (("gpt", 4_000, 40), ("vit", 25_000, 31), ("resnet-ln", 25_000, 19)):
        sides = [side(lab_results, model, "standard", 1e-4, warmup=n) for n in (0, samples)]
        before, after = (one.value for one in compare(sides))
        assert round(100 * (1 - after / before)) == percent, model


def test_the_claims_of_the_results_page_about_rivals_and_norms_hold(lab_results):
    spread = functools.partial(spread_of, lab_results)
    assert spread("resnet-bn", "linear", 1e-4) == pytest.approx(0.47, abs=0.05)  # "half of the loss"
    assert spread("resnet-bn", "linear", 1e-4) / spread("resnet-bn", "standard", 1e-4, warmup=0) == pytest.approx(
        9, abs=1.2
    )
    sizes = (8, 32, 256)
    assert spread("gpt", "linear", 1e-4) == pytest.approx(spread("gpt", "invariant", 1e-4, sizes), rel=0.1)
    between = [spread("resnet-ln", name, 1e-4, (25, 400, 800)) for name in ("invariant", "linear", "standard")]
    assert between == sorted(between)
    gaps = functools.partial(gap, lab_results, "resnet-bn")
    assert round(gaps("accumulate", 800, 10)) == 7
    assert [round(gaps("standard", size, 10)) for size in (400, 800)] == [-7, -4]
    seed = [[r for r in side(lab_results, "resnet-bn", a, 1e-4) if r.seed == 0] for a in ("standard", "accumulate")]
    assert [round(one.value, 2) for one in compare(seed)] == [0.05, 0.05]
    for name, times in (("invariant", 25), ("standard", 4)):
        bn = measure(side(lab_results, "resnet-bn", name, 1e-4)).value
        assert round(spread("resnet-ln", name, 1e-4) / bn) == times


def test_the_claims_of_the_results_page_about_ramps_hold(lab_results):
    def above(model, size):
        """How many percent the ramp is above a constant batch size, in the epochs after the change."""
        ((ramp,),) = (runs for (_, lr0, _), runs in lab_results.ramps(model).items() if lr0 == 1e-4)
        (base,) = (r for r in side(lab_results, model, "invariant", 1e-4, (size,)) if r.seed == ramp.seed)
        return [100 * (ramp.losses[epoch] / base.losses[epoch] - 1) for epoch in range(6, 11)]

    assert [round(above("resnet-bn", size)[-1], 1) for size in (25, 800)] == [0.2, 0.3]
    assert max(map(abs, above("resnet-ln", 800))) < 1.25


def test_the_claims_of_the_results_page_about_the_best_learning_rates_hold(lab_results):
    def behind(model, size, micro, metric):
        rows = {r.series.micro_batch_size: r.value for r in best(lab_results, model, metric) if
                r.batch_size == size and r.series.algorithm in ("invariant", "standard") and not r.series.grow
                }  # fmt: skip
        return rows[0] - rows[micro]

    points = functools.partial(behind, metric="test_accuracy")
    for model, size, gains in (("vit", 400, [1.7, 0.3]), ("resnet-ln", 800, [3.0, 2.5])):  # of a larger M
        last = [points(model, size, micro) for micro in (25, 100, 400)]
        assert [round(100 * (a - b), 1) for a, b in itertools.pairwise(last)] == gains
    assert [round(100 * points("vit", size, 25), 1) for size in (100, 400)] == [1.7, 2.0]
    assert abs(points("vit", 400, 100)) < 0.005
    assert abs(behind("vit", 100, 25, "train_loss")) < 0.005
    assert round(100 * points("resnet-ln", 100, 25), 1) == -1.4
    assert [round(100 * points("resnet-ln", size, 25)) for size in (400, 800)] == [3, 3]
    assert abs(behind("resnet-ln", 100, 25, "train_loss")) < 0.01
    assert abs(points("gpt", 32, 8)) < 0.005
    assert all(points("gpt", size, 8) > 0.005 for size in (128, 256))
    assert all(behind("resnet-bn", size, 25, "train_loss") < 0 for size in (25, 100, 400, 800))
    assert all(points("resnet-bn", size, 25) < 0 for size in (400, 800))

    def ahead(model, size):
        """By how many points of test accuracy invariant Adam is ahead that has grown in."""
        rows = [r for r in best(lab_results, model, "test_accuracy") if r.batch_size == size]
        (grown,) = (r.value for r in rows if r.series.grow)
        (standard,) = (r.value for r in rows if r.series.algorithm == "standard")
        return round(100 * (grown - standard), 1)

    assert [ahead("resnet-ln", size) for size in (400, 800)] == [3.4, 1.7]  # on the page and in "When not to use it"
    assert [ahead("gpt", size) for size in (128, 256)] == [9.6, 5.3]
    assert abs(ahead("vit", 400)) < 0.5


def test_the_claims_of_the_distributed_page_hold_in_the_results():
    for mode in ("ddp", "fsdp2"):
        kills, elastic = (
            json.loads((ROOT / "benchmarks" / "results" / f"faults_{what}_{mode}.json").read_text())
            for what in ("kills", "elastic")
        )
        assert len(kills["rows"]) == 10
        assert all(row["resumed"] >= row["saved"] for row in kills["rows"])
        assert kills["weights"] == kills["exp_avg"] == kills["exp_avg_sq"] == 0  # "bit for bit the same"
        assert [row["ranks"] for row in elastic["rows"]] == [4, 2, 3]
        assert kills["damaged"] == elastic["damaged"] == []
        for result in (kills, elastic):
            assert f"{result['loss']:.6f}" == f"{result['loss_alone']:.6f}"

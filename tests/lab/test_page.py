import json
import math
import os
import re

import pytest
from browser import BROWSER, DRIVER, start
from lab_results import FULL, PAIR, rows, same, write

from invariant_adam_lab.results import page, style
from invariant_adam_lab.results.curves import load

FOUND = bool(BROWSER and DRIVER)
needs_browser = [
    pytest.mark.browser,
    pytest.mark.skipif(not FOUND and not os.environ.get("REQUIRE_BROWSER"), reason="no chromium with chromedriver"),
]
EVIL = '</script><b id="evil">'


def results():
    """Two models, two seeds, a ramp, a run that diverged, and a name that would break out of a careless page."""
    found = rows("resnet-ln", sizes=(25, 100, 400), rates=(1e-5, 1e-3), seeds=(0, 1), epochs=4, ramps=("25-400",))
    for row in found:
        if same(row, algorithm="standard", batch_size=400, lr0=1e-3, seed=1) and row["epoch"] > 2:
            row["train_loss"] = math.nan
    return found + rows(EVIL, sizes=(25, 400), rates=(1e-4,), epochs=2)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    return page.write(load(write(folder, results())), folder / "report.html")


@pytest.fixture(scope="module")
def window(tmp_path_factory):
    with start(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture
def browser(window, path):
    window.open(path)
    yield window
    assert window.log() == []  # no error, no warning, no request refused


def choose(browser, name, value):
    browser.js(
        "const s = document.getElementById(arguments[0]); s.value = arguments[1]; s.dispatchEvent(new Event('change'))",
        name,
        value,
    )


def drawn(browser):
    """The curves of each panel, as learning rate and batch size."""
    return browser.js(
        "return [...document.querySelectorAll('#panels figure')].map((f) => [f.querySelector('figcaption').textContent,"
        "[...f.querySelectorAll('path[data-rate]')].map((p) => `${p.dataset.rate} ${p.dataset.size}`)])"
    )


def panel(browser, number=0):
    return browser.js(
        "const s = document.querySelectorAll('#panels svg')[arguments[0]]; s.scrollIntoView({block: 'center'});"
        "const b = s.getBoundingClientRect(); return {x: b.left, y: b.top, width: b.width, height: b.height}",
        number,
    )


def test_the_page_asks_for_nothing_and_holds_proper_json(path):
    text = path.read_text(encoding="utf-8")
    assert EVIL not in text
    outside = re.sub(r"http://www\.w3\.org/2000/svg", "", text)  # the name of a namespace, not an address
    assert not re.search(r"https?:|@import|<link|<img|<iframe|\bfetch\(|XMLHttpRequest|\bimport\(", outside)
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL).group(1))
    assert [model["name"] for model in data["models"]] == ["ResNet-18, layer norm", EVIL]
    assert len(data["runs"]) == 2 * (2 * 3 * 2) + 2 * 2 + 2 * 2
    assert {run["diverged"] for run in data["runs"]} == {None, 3}


class TestInABrowser:
    pytestmark = needs_browser

    def test_it_draws_a_panel_for_each_optimizer_and_a_curve_for_each_batch_size(self, browser):
        (theirs, standard), (ours, invariant) = drawn(browser)
        assert (ours, theirs) == ("Invariant Adam, η ∝ B", "Standard Adam, η ∝ √B")
        sizes = ("25", "100", "400")
        assert standard == [f"{rate} {size}" for rate in ("0.00001", "0.001") for size in sizes]
        assert invariant == [f"{rate} {size}" for rate in ("0.00001", "0.001") for size in (*sizes, "ramp 25-400")]
        assert browser.js("return document.querySelectorAll('path.diverged').length") == 1
        assert browser.js("return document.getElementById('evil')") is None

    def test_pointing_reads_every_batch_size_at_that_epoch(self, browser):
        box = panel(browser, 1)
        browser.point(box["x"] + 0.9 * box["width"], box["y"] + 0.7 * box["height"])
        tip = browser.js("return document.getElementById('tip').innerText")
        assert tip.splitlines()[0].startswith("η₀ = ")
        found = dict(re.findall(r"(B = \d+|ramp 25-400)\s+([\d.]+)", tip))
        assert list(found) == ["B = 25", "B = 100", "B = 400", "ramp 25-400"]
        rate, epoch = re.search(r"η₀ = (\S+), epoch (\d+)", tip).groups()
        expected = [
            row["train_loss"]
            for row in results()
            if same(row, model="resnet-ln", algorithm="invariant", lr0=float(rate), epoch=int(epoch), ramp="")
            and row["batch_size"] == 100
        ]
        assert float(found["B = 100"]) == pytest.approx(sum(expected) / 2, rel=1e-4)
        browser.point(2, 2)
        assert browser.js("return document.getElementById('tip').hidden")

    def test_the_keyboard_reads_too_and_it_is_spoken(self, browser):
        browser.js("document.querySelector('#panels svg').focus()")
        browser.press("right")
        spoken = "return document.getElementById('spoken').textContent"
        assert browser.js(spoken).startswith("Standard Adam, η ∝ √B, η₀ = 1e-5, epoch 1, B = 25: ")
        browser.press("right", "up")
        assert browser.js(spoken).startswith("Standard Adam, η ∝ √B, η₀ = 1e-5, epoch 2, B = 100: ")
        browser.press("left", "down", "escape")
        assert browser.js("return document.getElementById('tip').hidden")
        label = browser.js("return document.querySelector('#panels svg').getAttribute('aria-label')")
        assert label == "Standard Adam, η ∝ √B: training loss over epoch, 6 curves. Arrow keys read the values."

    def test_runs_are_toggled_by_learning_rate_batch_size_and_optimizer(self, browser):
        browser.click("#rates label", "1e-3")
        browser.click("#sizes label", "100")
        browser.click("#series label", "Standard")
        assert drawn(browser) == [
            ["Invariant Adam, η ∝ B", ["0.00001 25", "0.00001 400", "0.00001 ramp 25-400"]],
        ]
        browser.click("#rates label", "1e-5")
        assert drawn(browser) == []
        assert "Nothing to draw" in browser.js("return document.getElementById('panels').innerText")
        browser.click("#rates label", "1e-3")
        assert len(drawn(browser)[0][1]) == 3

    def test_metric_axis_scale_seeds_and_model_are_chosen(self, browser):
        texts = "return [...document.querySelectorAll('#panels svg:first-of-type text')].map((t) => t.textContent)"
        choose(browser, "metric", "test_accuracy")
        choose(browser, "axis", "samples")
        labels = browser.js(texts)
        assert "test accuracy" in labels
        assert "200,000" in labels
        choose(browser, "axis", "updates")
        assert all("ramp" not in curve for _, found in drawn(browser) for curve in found)
        choose(browser, "axis", "epoch")
        choose(browser, "seeds", "each")
        assert len(drawn(browser)[0][1]) == 2 * 3 * 2
        choose(browser, "metric", "train_loss")
        choose(browser, "show", "difference")
        box = panel(browser)
        browser.point(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        assert re.search(r"B = 25, seed \d\s+0\.000 %", browser.js("return document.getElementById('tip').innerText"))
        for scale in ("log", "linear"):
            choose(browser, "scale", scale)
        choose(browser, "model", "1")
        assert [len(found) for _, found in drawn(browser)] == [2, 2]

    def test_a_row_of_the_table_shows_its_learning_rate_alone(self, browser):
        shown = browser.js("return document.getElementById('spreads').innerText")
        assert "∞" in shown
        assert "diverged: B = 400, seed 1, in epoch 3" in shown
        browser.click("#spreads button", "1e-3")
        assert {curve.split()[0] for _, found in drawn(browser) for curve in found} == {"0.001"}

    def test_it_opens_on_what_the_paper_compares(self, browser, tmp_path):
        pair = ["Standard Adam, η ∝ √B", "Invariant Adam, η ∝ B, linear, M = 25"]
        small = {"sizes": (25, 100), "epochs": 2}
        found = rows("gpt", rates=(3e-4,), **small) + rows("resnet-bn", FULL, rates=(1e-4, 1e-3), **small)
        found += rows("resnet-bn", PAIR[:1], rates=(1e-3,), micro=5, **small) + rows(warmups=(50,), **small)
        results = load(write(tmp_path, found))
        browser.open(page.write(results, tmp_path / "report.html"))
        assert browser.js("return document.getElementById('model').selectedOptions[0].text") == "ResNet-18, batch norm"
        assert [name for name, _ in drawn(browser)] == pair
        offered = browser.js("return [...document.querySelectorAll('#series label')].map((l) => l.textContent)")
        assert offered[:2] == pair
        assert len(offered) == len(results.series("resnet-bn"))
        browser.click("#series label", "AdamA")
        choose(browser, "model", "0")
        assert [name for name, _ in drawn(browser)] == ["Standard Adam, η ∝ √B", "Invariant Adam, η ∝ B"]
        choose(browser, "model", "1")
        assert [name for name, _ in drawn(browser)] == [*pair, "AdamA, η ∝ B"]
        assert browser.js("return [...document.querySelectorAll('#spreads details')].map((d) => d.open)") == [
            False,
            True,
        ]
        assert dict(browser.js("return data.colours")) == style.rate_colours(results)

    @pytest.mark.parametrize("low", [0.0123, 1.55, 0.98, 7.9, 333.0])
    @pytest.mark.parametrize("factor", [1.01, 1.4, 2.0, 3.9, 15.0, 900.0, 1e6])
    def test_an_axis_has_three_ticks_at_least_and_not_too_many(self, browser, low, factor):
        for ticks in browser.js(
            "return [logTicks, linearTicks].map((f) => f(arguments[0], arguments[1]))", low, low * factor
        ):
            assert 3 <= len(ticks) <= 12
            assert all(low <= tick <= low * factor for tick in ticks)

    @pytest.mark.parametrize("value", [0.1, 1.0, 2.3])
    @pytest.mark.parametrize("log", ["true", "false"])
    def test_values_that_differ_by_rounding_have_an_axis(self, browser, value, log):
        """As means over seeds do of an accuracy that never moves: an axis from one to the other would never end."""
        ticks = browser.js(f"return scale([{value!r}, {math.nextafter(value, 9)!r}], {log}, 0, 1).ticks")
        assert len(ticks) == len(set(ticks)) >= 3
        assert ticks[0] < value < ticks[-1]

    def test_no_table_is_cut_off(self, browser):
        wide = "return [...document.querySelectorAll('.table')].filter((t) => t.scrollWidth > t.clientWidth).length"
        assert browser.js(wide) == 0

    def test_light_and_dark(self, browser):
        paper = "return getComputedStyle(document.body).backgroundColor"
        before = browser.js(paper)
        browser.click("#theme")
        after = browser.js(paper)
        assert {before, after} == {"rgb(251, 251, 253)", "rgb(20, 23, 30)"}
        browser.click("#theme")
        assert browser.js(paper) == before

    def test_every_control_has_a_name_and_the_page_is_no_wider_than_the_window(self, browser):
        nameless = browser.js(
            "return [...document.querySelectorAll('select, input, button')]"
            ".filter((e) => !(e.labels && e.labels.length) && !e.textContent.trim()).length"
        )
        assert nameless == 0
        assert browser.js("return document.documentElement.scrollWidth <= innerWidth")

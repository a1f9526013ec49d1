"""The documentation as it is built: strictly, without the network, and walked page by page in a real browser."""

import os
import re
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest
from browser import BROWSER, DRIVER, start

ROOT = Path(__file__).parents[2]
FOUND = bool(BROWSER and DRIVER)
PHONE = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site; `make docs` installs what builds it."""
    if not os.environ.get("REQUIRE_BROWSER"):  # in CI it must be there
        pytest.importorskip("mkdocs")
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(out)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT / "src"), "http_proxy": "http://0"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


class Links(HTMLParser):
    """What a page loads, where it links to, and the anchors it has."""

    def __init__(self, page):
        super().__init__()
        self.loads, self.targets, self.anchors = [], [], {"", "__consent"}
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.anchors |= {attributes[key] for key in ("id", "name") if key in attributes}
        if tag == "a":
            self.targets.append(attributes.get("href", ""))
        elif tag != "link" or attributes.get("rel") not in ("canonical", "prev", "next"):
            self.loads += [attributes[key] for key in ("href", "src") if key in attributes]


@pytest.fixture(scope="module")
def pages(site):
    return {page: Links(page) for page in sorted(site.glob("*.html")) if page.name != "404.html"}


def test_every_page_of_the_folder_is_in_the_site(pages):
    written = {page.stem for page in (ROOT / "docs").glob("*.md")}
    assert {page.stem for page in pages} == written | {"index", "contributing", "changelog", "examples", "report"}


def test_nothing_is_loaded_from_elsewhere_and_no_link_is_dead(pages):
    lost = []
    for page, links in pages.items():
        for target in links.loads:
            if not target.startswith("data:") and not (page.parent / target.split("?")[0]).is_file():
                lost.append((page.name, target))
        for target in links.targets:
            file, _, anchor = target.partition("#")
            if target.startswith(("https://", "mailto:")):
                continue
            other = page.parent / file if file else page
            if not other.exists() or (other in pages and anchor not in pages[other].anchors):
                lost.append((page.name, target))
    assert lost == []


def test_formulas_are_mathml(site):
    text = (site / "theory.html").read_text(encoding="utf-8")
    assert text.count("<math ") > 10
    assert not re.search(r"arithmatex|\\frac", re.sub(r"<annotation.*?</annotation>", "", text))


@pytest.fixture(scope="module")
def window(tmp_path_factory):
    with start(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.mark.browser
@pytest.mark.skipif(not FOUND and not os.environ.get("REQUIRE_BROWSER"), reason="no chromium with chromedriver")
class TestInABrowser:
    @staticmethod
    def tell(window, command, **parameters):
        window.ask("POST", "/goog/cdp/execute", {"cmd": f"Emulation.{command}", "params": parameters})

    @pytest.mark.parametrize("scheme", ["light", "dark"])
    def test_no_page_complains_or_is_wider_than_a_phone(self, window, pages, scheme):
        self.tell(window, "setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.tell(window, "setDeviceMetricsOverride", **PHONE)
        for page in pages:
            window.open(page)
            assert window.log() == [], page.name
            assert window.js("return document.documentElement.scrollWidth") <= PHONE["width"], page.name
            images = "return [...document.images].filter((i) => i.complete && !i.naturalWidth).map((i) => i.src)"
            assert window.js(images) == [], page.name

    def test_the_search_answers_from_the_disk(self, window, site):
        self.tell(window, "clearDeviceMetricsOverride")
        window.open(site / "index.html")
        window.js(
            "const field = document.querySelector('.md-search__input'); field.focus();"
            "field.value = 'ragged'; field.dispatchEvent(new Event('keyup', {bubbles: true}));"
            "field.dispatchEvent(new Event('input', {bubbles: true}))"
        )
        count, deadline = 0, time.monotonic() + 30
        while not count and time.monotonic() < deadline:
            time.sleep(0.1)
            count = window.js("return document.querySelectorAll('.md-search-result__item').length")
        assert count
        assert window.log() == []

    def test_the_report_is_live_in_its_page(self, window, site):
        window.open(site / "results.html")
        window.js("document.querySelector('iframe.report').scrollIntoView()")
        assert window.js("return document.querySelector('iframe.report').clientHeight") > 300
        window.open(site / "report.html")
        assert window.js("return document.querySelectorAll('#panels svg path').length") > 4

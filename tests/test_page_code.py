"""Every Python block of a page runs, in the order of the page; of a diff, what it makes of the code runs."""

import os
import re
import subprocess
import sys
import textwrap
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import page_names
import pytest
import torch

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
NAMES = {
    "distributed.md": "ranks",
    "from_adamw.md": "from_adamw",
    "one_pass.md": "one_pass",
    "trainers.md": "trainers",
}  # what a page takes for granted: a function of page_names; `plain` for the others
OWN_PROCESS = {"distributed.md", "from_adamw.md", "trainers.md"}  # a process group, or trainers that change torch
NOT_RUN = {}  # page and first line of a block: the reason


def blocks(page):
    """Return the blocks of a page as code, each with the number of its first line."""
    text = page.read_text(encoding="utf-8")
    for found in re.finditer(r"^( *)```(python|diff)\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL):
        code = textwrap.dedent(found[3])
        if found[2] == "diff":
            code = textwrap.dedent("\n".join(line[1:] for line in code.splitlines() if not line.startswith("-")))
        yield text[: found.start(3)].count("\n") + 1, code


WITH_CODE = [page for page in PAGES if any(blocks(page))]


def run(page):
    """Run the blocks of a page, one after the other, with the page's names."""
    names = getattr(page_names, NAMES.get(page.name, "plain"))()
    for line, code in blocks(page):
        if (page.name, code.splitlines()[0]) not in NOT_RUN:
            exec(compile("\n" * (line - 1) + code, str(page), "exec"), names)
    return names


def test_the_pages_that_have_code_are_found():
    names = {page.name for page in WITH_CODE}
    assert names >= {"README.md", "start.md", "from_adamw.md", "guide.md", *NAMES}
    first = {(page.name, code.splitlines()[0]) for page in PAGES for _, code in blocks(page)}
    assert set(NOT_RUN) <= first


@pytest.mark.parametrize(
    "page", [page for page in WITH_CODE if page.name not in {*OWN_PROCESS, "start.md"}], ids=lambda page: page.name
)
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(page)


def test_the_first_run_prints_what_its_page_says(capsys):
    page = ROOT / "docs" / "start.md"
    names = run(page)
    said = re.search(r"```text\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)[1]
    said, printed = ([float(word) for word in text.split()] for text in (said, capsys.readouterr().out))
    assert printed == pytest.approx(said, abs=0.002)
    # "With torch.optim.AdamW ... the second column would end at 1.22"
    names["ia"] = SimpleNamespace(InvariantAdam=adamw, BatchGrowth=Whole, one_pass=lambda *_, **__: nullcontext())
    assert names["train"](256)[-1] == pytest.approx(1.22, abs=0.01)


def adamw(parameters, lr, **_):
    """AdamW under the name of InvariantAdam: it clears gradients and counts samples of 256 per update."""
    opt = torch.optim.AdamW(parameters, lr=lr)
    opt.samples_seen = 0

    def stepped(*_):
        opt.zero_grad()
        opt.samples_seen += 256

    opt.register_step_post_hook(stepped)
    return opt


class Whole:
    """A BatchGrowth that cuts nothing."""

    def __init__(self, optimizer):
        pass

    def split(self, *batch):
        yield batch


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(OWN_PROCESS))
def test_the_code_of_a_page_runs_in_a_process_of_its_own(name, tmp_path):
    for package in ("transformers", "lightning"):
        pytest.importorskip(package)
    path = os.pathsep.join([str(ROOT / "tests"), str(ROOT / "src")])
    done = subprocess.run(
        [sys.executable, __file__, name],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stdout + done.stderr


if __name__ == "__main__":
    run(ROOT / "docs" / sys.argv[1])
    os._exit(0)  # gloo's threads may abort while the process ends

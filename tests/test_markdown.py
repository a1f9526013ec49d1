"""The pages as text: lines that fit, links and paths that lead somewhere, commands that exist, imports as drawn."""

import ast
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LIBRARY = ROOT / "src" / "invariant_adam"
FOLDERS = ("benchmarks/", "docs/", "examples/", "src/", "tests/")
PAGES = sorted([*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))])
LONGEST = 120

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())


def parts(page):
    """Return the lines of a page outside of code blocks, with their numbers, and the lines of the blocks."""
    text, code, inside = [], [], False
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if line.lstrip().startswith("```"):
            inside = not inside
        else:
            (code if inside else text).append((number, line))
    assert not inside, f"{page.name}: a code block does not end"
    return text, code


def is_one_link(line):
    return re.fullmatch(r"\s*([-*] )?!?\[[^\]]*\]\([^)]*\)[.,:;]?", line) is not None


def test_all_pages_are_looked_at():
    assert {page.relative_to(ROOT).as_posix() for page in PAGES} >= {"README.md", "CONTRIBUTING.md", "docs/guide.md"}


def test_every_page_is_in_the_menu_of_the_site_once():
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:\n")[1]
    listed = re.findall(r"(\w+)\.md$", menu, re.MULTILINE)
    made = {"index", "examples", "contributing", "changelog"}  # from files outside of docs/
    assert sorted(listed) == sorted({page.stem for page in (ROOT / "docs").glob("*.md")} | made)


def test_every_public_name_is_in_the_reference():
    import invariant_adam

    named = re.findall(r"^::: invariant_adam\.([\w.]+)", (ROOT / "docs" / "api.md").read_text("utf-8"), re.MULTILINE)
    assert sorted(set(invariant_adam.__all__) - {name.partition(".")[0] for name in named}) == []


@each_page
def test_lines_of_prose_fit(page):
    text, _ = parts(page)
    prose = [(number, line) for number, line in text if not line.lstrip().startswith("|") and not is_one_link(line)]
    assert [number for number, line in prose if len(line) > LONGEST] == []


def slug(heading):
    """The anchor that GitHub makes of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def anchors(page):
    text, _ = parts(page)
    return {slug(line.lstrip("#").strip()) for _, line in text if line.startswith("#")}


@each_page
def test_links_lead_somewhere(page):
    text, _ = parts(page)
    lost = []
    for number, line in text:
        for target in re.findall(r"\]\(([^)\s]+)\)", line):
            file, _, anchor = target.partition("#")
            if file.startswith("https://"):
                continue
            path = page.parent / file if file else page
            if not path.exists() or (anchor and anchor not in anchors(path)):
                lost.append((number, target))
    assert lost == []


INSIDE = (ROOT, ROOT / "src", LIBRARY, ROOT / "benchmarks" / "results", ROOT / "docs")
SUFFIXES = (".py", ".md", ".toml", ".cff", ".json", ".txt")
# Files that a user has or a command writes, and names that are explained as examples.
MADE = {"grid.json", "site/", "tinyshakespeare.txt", "utils.py", "torch.py", "triton.py", "__init__.py"}
PLANNED = {"src/invariant_adam/integrations/"}  # said to come


def is_path(word):
    if not re.fullmatch(r"[\w./-]+", word):
        return False
    return word.startswith(FOLDERS) or word.endswith(SUFFIXES) or re.fullmatch(r"[a-z_]+(/[a-z_]+)*/", word) is not None


def exists(word):
    if word in MADE or word in PLANNED or any((base / word).exists() for base in INSIDE):
        return True
    return "/" not in word and any(LIBRARY.rglob(word))  # a module by its name alone


def named_paths(page):
    """Return the words of a page that look like paths of the repository: in backticks, and in commands."""
    text, code = parts(page)
    spans = re.findall(r"`([^`\n]+)`", "\n".join(line for _, line in text))
    words = [word for span in spans for word in span.split()]
    words += [word for _, line in code for word in line.split() if word.startswith(FOLDERS)]
    return [word for word in words if is_path(word)]


@each_page
def test_paths_exist(page):
    assert sorted({word for word in named_paths(page) if not exists(word)}) == []


def test_what_looks_like_a_path_is_looked_for():
    for word in ("benchmarks/step.py", "src/invariant_adam/gone/", "gone.json", "kernels/gone/"):
        assert is_path(word)
        assert not exists(word)
    assert not any(map(is_path, ("opt.step()", "invariant-adam", "p.grad", "n/M", "../x y")))


def commands(page):
    """Return the commands of a page, each as its words: those of `invariant-adam` and of make."""
    text, code = parts(page)
    lines = re.findall(r"`([^`\n]+)`", "\n".join(line for _, line in text))
    lines += [re.split(r"\s#|\s\\$", line)[0] for _, line in code]
    for line in lines:
        line = re.sub(r"^(\S+=\S+ )*", "", line)  # variables of the environment
        line = re.sub(r"^(\S*/)?(python -m invariant_adam|invariant-adam)\b", "invariant-adam", line)
        words = line.split()
        if len(words) > 1 and words[0] in ("invariant-adam", "make"):
            yield words


@each_page
def test_targets_of_make_exist(page):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert [words for words in commands(page) if words[0] == "make" and words[1] not in targets] == []


@pytest.fixture
def help_of(monkeypatch, capsys):
    """Return what `--help` says of a command."""
    from invariant_adam.__main__ import main

    known = {}

    def said(*names):
        if names not in known:
            monkeypatch.setattr(sys, "argv", ["invariant-adam", *names, "--help"])
            monkeypatch.setenv("COLUMNS", "200")
            with pytest.raises(SystemExit) as stop:
                main()
            assert not stop.value.code, names
            known[names] = capsys.readouterr().out
        return known[names]

    return said


def test_commands_and_their_options_exist(help_of):
    found = {tuple(words[1:]) for page in PAGES for words in commands(page) if words[0] == "invariant-adam"}
    assert len(found) > 20
    for words in found:
        names = words[:2] if words[0] == "bench" else words[:1]
        options = [word.partition("=")[0] for word in words if word.startswith("--")]
        if names[0].startswith("-"):
            continue
        text = help_of(*names)
        assert [option for option in options if not re.search(rf"{option}\b", text)] == [], words


def test_each_box_of_the_picture_is_a_file():
    picture = (ROOT / "docs" / "figures" / "architecture.svg").read_text(encoding="utf-8")
    boxes = [box for box in re.findall(r'class="t">([^<]+)<', picture) if is_path(box)]
    assert len(boxes) > 12
    assert [box for box in boxes if not (LIBRARY / box).exists()] == []


def test_the_tree_of_the_page_is_that_of_the_library():
    _, code = parts(ROOT / "docs" / "architecture.md")
    shown, above = set(), []
    for _, line in code:
        indent, word = re.match(r"( *)(\S*)", line).groups()
        if re.fullmatch(r"[a-z_/]+(/|\.py)", word) and (word.startswith("src/") or (indent and above)):
            above = [*above[: len(indent) // 2], word]
            shown.add("".join(above))
    assert [path for path in sorted(shown) if not (ROOT / path).exists()] == []
    there = {f"src/invariant_adam/{path.name}{'/' * path.is_dir()}" for path in LIBRARY.glob("[a-z]*")}
    there = {path for path in there if path.endswith(("/", ".py")) and "__pycache__" not in path}
    assert sorted(there - shown) == []


def imports(module):
    """Return the modules of the library that a module imports when it runs, by their first names."""
    package = module.relative_to(LIBRARY).parts[:-1]
    waiting = [ast.parse(module.read_text(encoding="utf-8"))]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting += node.orelse
            continue
        waiting += ast.iter_child_nodes(node)
        if isinstance(node, ast.ImportFrom) and node.level:
            path = [*package[: len(package) + 1 - node.level], *(node.module or "").split(".")]
            path = [name for name in path if name]
            yield from path[:1] or [alias.name for alias in node.names]


def test_modules_import_what_the_table_says():
    text, _ = parts(ROOT / "docs" / "architecture.md")
    rows = [re.findall(r"`(\w+)`", line) for _, line in text if re.match(r"\| `\w+` \|", line)]
    allowed = {name: set(others) for name, *others in rows}
    assert {"fold", "one_pass", "distributed", "kernels", "optimizer"} <= allowed.keys()
    wrong = []
    for module in LIBRARY.rglob("*.py"):
        name = module.relative_to(LIBRARY).parts[0].removesuffix(".py")
        for other in set(imports(module)) & allowed.keys() - {name}:
            if name in allowed and other not in allowed[name]:
                wrong.append(f"{module.relative_to(LIBRARY)} imports {other}")
    assert wrong == []

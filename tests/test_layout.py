"""What the layout of src/ promises: the library does not know the lab, and no module is too long to read."""

import ast
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src"
LIBRARY = SRC / "invariant_adam"
LONGEST = 550  # lines of a module


def imported(code):
    """Return the modules that a module's code imports by their full names, wherever in it."""
    nodes = list(ast.walk(ast.parse(code)))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and not node.level]
    calls = [node for node in nodes if isinstance(node, ast.Call) and "import" in ast.unparse(node.func)]
    return names + [arg.value for call in calls for arg in call.args if isinstance(arg, ast.Constant)]


def of_lab(code):
    return [name for name in imported(code) if str(name).partition(".")[0] == "invariant_adam_lab"]


@pytest.mark.parametrize(
    "code",
    [
        "import invariant_adam_lab",
        "import invariant_adam_lab.models as models",
        "def f():\n    from invariant_adam_lab import record",
        "from invariant_adam_lab.models import GPT",
        "import importlib\nimportlib.import_module('invariant_adam_lab.models')",
        "__import__('invariant_adam_lab')",
    ],
)
def test_an_import_of_the_lab_is_found(code):
    assert of_lab(code)


def test_the_library_never_imports_the_lab():
    modules = [path for path in LIBRARY.rglob("*.py") if path != LIBRARY / "__main__.py"]
    assert len(modules) > 30
    found = {str(path.relative_to(SRC)): of_lab(path.read_text(encoding="utf-8")) for path in modules}
    assert {module: names for module, names in found.items() if names} == {}


def test_no_module_is_too_long_to_read():
    lengths = {
        str(path.relative_to(SRC)): len(path.read_text(encoding="utf-8").splitlines()) for path in SRC.rglob("*.py")
    }
    assert {module: lines for module, lines in lengths.items() if lines > LONGEST} == {}

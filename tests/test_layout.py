"""What the layout of src/ promises: the library does not know the lab, and no module is too long to read."""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src"
LIBRARY = SRC / "invariant_adam"
PYPROJECT = SRC.parent / "pyproject.toml"
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


def test_no_private_name_of_ours_is_exempt_from_ruff():
    """A name in ruff's list of torch's private names would be free to use across our modules as well."""
    listed = re.search(r"ignore-names = \[(.*?)\n\]", PYPROJECT.read_text(encoding="utf-8"), re.DOTALL)
    names = {ast.literal_eval(name) for name in re.findall(r'"_\w+"', listed[1])}
    assert len(names) > 30
    ours = set()
    for path in SRC.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                ours.add(node.name)
            elif (
                isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and ast.unparse(node.value) == "self"
            ):
                ours.add(node.attr)
    assert names & ours == set()


WITHOUT = """
import torch, invariant_adam as ia

net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 1))
opt = ia.InvariantAdam(net.parameters(), micro_batch_size=2)
for x in torch.randn(2, 2, 3):
    net(x).square().mean().backward()
opt.step()
with ia.one_pass(net, micro_batch_size=2, into=opt):
    net(torch.randn(8, 3)).square().mean().backward()
opt.step()
opt.load_state_dict(opt.state_dict())
print(opt.samples_seen, ia.explain(net, torch.randn(8, 3), 2).supported, opt.noise_scale().batch > 0)
"""


def test_the_library_runs_without_distributed(tmp_path):
    shutil.copytree(LIBRARY, tmp_path / "invariant_adam", ignore=shutil.ignore_patterns("distributed", "__pycache__"))
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, env=environment)
    assert done.stdout.split() == ["12", "True", "True"], done.stderr


def test_an_old_torch_is_refused_by_name():
    code = "import torch; torch.__version__ = type(torch.__version__)('2.10.1'); import invariant_adam"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "ImportError: invariant_adam needs torch 2.11 or newer" in done.stderr

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import invariant_adam
from invariant_adam_lab.cli import app

SOURCE = str(Path(invariant_adam.__file__).parents[1])


EVERY = ("verify", "scale", "check", "demo", "data", "figures", "reproduce", "bench", "bench rivals")


def run(*arguments):
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})


def python(*arguments):
    """Run the interpreter for real: what a user meets, tracebacks and all."""
    environment = os.environ | {"PYTHONPATH": SOURCE, "COLUMNS": "200"}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment)


def without(module, *arguments):
    """Run `python -m invariant_adam` as if `module` were not installed: importing it raises ModuleNotFoundError."""
    return python(
        "-c",
        f"import sys, runpy; sys.modules[{module!r}] = None; sys.argv[1:] = {list(arguments)!r}; "
        "runpy.run_module('invariant_adam', run_name='__main__', alter_sys=True)",
    )


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            ["demo", "--batch-sizes", "8,x"],
            "--batch-sizes must be whole numbers with commas between them, got '8,x'",
        ),
        (
            ["demo", "--batch-sizes", "8"],
            "--batch-sizes must be two or more different sizes of at least 1, got '8'",
        ),
        (["demo", "--batch-sizes", "8,20"], "20 is no multiple of 8; use 16 or 24"),
        (["demo", "--batch-sizes", "7,77,91,119"], "only come together after 17017 samples"),
        (["demo", "--lr", "0"], "--lr must be a finite number above 0, got 0.0"),
        (["demo", "--epochs", "0"], "--epochs must be at least 1, got 0"),
    ],
)
def test_a_wrong_argument_is_named_with_its_remedy(arguments, text):
    result = run(*arguments)
    assert result.exit_code == 2
    assert text in result.stderr
    assert "Traceback" not in result.output
    assert not result.stdout


def test_help_helps():
    top = run("--help").output
    for word in ("demo", "verify", "scale", "bench", "invariant-adam scale --lr 3e-4"):
        assert word in top
    for command in ("demo", "verify", "scale"):
        result = run(command, "--help")
        assert result.exit_code == 0
        assert f"invariant-adam {command}" in result.output
        assert "--json" in result.output


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], *([*name.split(), "--help"] for name in EVERY)])
def test_help_and_version_import_neither_torch_nor_matplotlib(arguments):
    code = (
        "import sys; from invariant_adam_lab.__main__ import main\n"
        f"sys.argv[1:] = {arguments!r}\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code\n"
        "slow = {'torch', 'numpy', 'matplotlib', 'invariant_adam'} & set(sys.modules)\n"
        "assert not slow, slow"
    )
    result = python("-c", code)
    assert result.returncode == 0, result.stderr
    assert "invariant-adam" in result.stdout


@pytest.mark.parametrize("command", ["verify", "demo", "figures", "reproduce", "bench one-pass", "bench peers"])
def test_the_terminal_breaks_the_paragraphs_of_a_help_text(command):
    told = CliRunner().invoke(app, [*command.split(), "--help"], env={"COLUMNS": "80"}).output
    text = told.split("╭")[0]
    for line, following in zip(text.splitlines(), text.splitlines()[1:], strict=False):
        first = following.split()[:1]
        if line.strip() and first:  # a line ends where the next word does not fit
            assert len(line.rstrip()) + 1 + len(first[0]) > 78, line


def test_the_module_and_its_version():
    result = python("-m", "invariant_adam", "--version")
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"invariant-adam {invariant_adam.__version__}\n"


@pytest.mark.parametrize(
    ("module", "arguments"), [("typer", ["--help"]), ("rich", ["scale"]), ("matplotlib", ["demo"])]
)
@pytest.mark.slow
def test_without_the_extra_one_line_says_which(module, arguments):
    result = without(module, *arguments)
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr == (
        f'invariant-adam: the command line needs {module}; install it: pip install "invariant-adam[lab]"\n'
    )


def test_another_missing_module_is_not_blamed_on_the_extra():
    result = without("json", "--help")
    assert result.returncode == 1
    assert "lab" not in result.stderr.splitlines()[-1]

"""`python -m invariant_adam_lab`, and the `invariant-adam` script."""

from __future__ import annotations

import sys
import warnings

LAB = ("matplotlib", "numpy", "rich", "typer")  # what the extra `lab` brings


def main() -> None:
    """Run the command line, or say in one line which extra it needs."""
    # How a run of the lab begins is one of its settings, and what a benchmark times is no training.
    warnings.filterwarnings("ignore", "the first update has")
    try:
        from .cli import app

        app(prog_name="invariant-adam")
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in LAB:
            raise
        sys.exit(f'invariant-adam: the command line needs {missing}; install it: pip install "invariant-adam[lab]"')


if __name__ == "__main__":
    main()

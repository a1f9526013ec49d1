"""Say what a check is doing, where it takes long."""

from __future__ import annotations

import logging
import sys
import time

PATIENCE = 3.0  # seconds until anything is said
log = logging.getLogger(__name__.partition(".")[0])


class Progress:
    """A line for each part of a check that begins after some seconds: to the log, and to a terminal."""

    def __init__(self) -> None:
        self.start = time.monotonic()

    def __call__(self, what: str) -> None:
        """Tell what begins now."""
        seconds = time.monotonic() - self.start
        if seconds < PATIENCE:
            return
        line = f"one_pass checks the model on its first mini-batch, {seconds:.0f} s: {what}"
        log.info(line)
        if sys.stderr is not None and sys.stderr.isatty():
            print(line, file=sys.stderr, flush=True)

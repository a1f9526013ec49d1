"""Have torch.compile see parameters inside tuples.

`torch.cat((token, x), 1)` calls the dispatcher of a `token` in a tuple. A trace by torch.compile looks for such
arguments in lists and dictionaries only (torch 2.11 to 2.13), and would join the plain values, whose gradients then
miss their squares. While a context is open, traces look into tuples as well.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any


class Tuples:
    """Traces look into tuples from here on, until `remove`.

    Nothing is done where nothing can be compiled yet, or where torch finds arguments in another way: what a graph
    leaves out is still refused after the backward.
    """

    def __init__(self) -> None:
        home: Any = sys.modules.get("torch._dynamo.variables.torch_function")
        self.home = home
        self.plain: Any = getattr(home, "_flatten_vts", None)
        if self.plain is not None:
            home._flatten_vts = self._flatten

    def remove(self) -> None:
        """Let traces look where torch does."""
        if self.plain is not None:
            self.home._flatten_vts = self.plain

    def _flatten(self, variables: Iterable[Any]) -> list[Any]:
        from torch._dynamo.variables.lists import TupleVariable

        found: list[Any] = []
        for v in self.plain(variables):
            found += self._flatten(v.items) if v.is_realized() and isinstance(v, TupleVariable) else [v]
        return found

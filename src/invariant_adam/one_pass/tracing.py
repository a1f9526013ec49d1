"""Where torch.compile looks: for parameters inside tuples too, and not at the dispatcher alone.

`torch.cat((token, x), 1)` calls the dispatcher of a `token` in a tuple. A trace by torch.compile looks for such
arguments in lists and dictionaries only (torch 2.11 to 2.13), and would join the plain values, whose gradients then
miss their squares, in part where the parameter is seen elsewhere. While a context is open, traces look into tuples as
well, named ones and others of their own class included.

Where a trace breaks off inside a loop, as over experts, torch.compile leaves that function to Python and makes graphs
of those that it calls. Of the dispatcher it would make one for each operation, which it has to make again for the next
update, and in which rows picked by index are not known. So the dispatcher is `part_of_traces` only.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

from torch._C._dynamo import eval_frame


def part_of_traces(function: Callable[..., Any]) -> None:
    """Have torch.compile make no graph that begins at this function or at what it calls; traces go through it.

    Nothing is done with a torch that is told so in another way.
    """
    strategy, action = (getattr(eval_frame, name, None) for name in ("_FrameExecStrategy", "_FrameAction"))
    if strategy is not None and action is not None:
        eval_frame.set_code_exec_strategy(function.__code__, strategy(action.SKIP, action.SKIP))


def asked_by_traces(function: Callable[..., Any]) -> Callable[..., Any]:
    """Have a trace call this function and take its answer for a constant, as `torch.compiler.assume_constant_result`.

    That would import torch's compiler. Nothing else lets torch 2.11 see the name of a property that is asked for.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


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
        found: list[Any] = []
        for v in self.plain(variables):
            inside = _inside(v)
            found += [v] if inside is None else self._flatten(inside)
        return found


def _inside(v: Any) -> list[Any] | None:
    """What is in a tuple or in an object of a class made from one or from a list; None for anything else."""
    from torch._dynamo.variables.lists import TupleVariable
    from torch._dynamo.variables.user_defined import UserDefinedObjectVariable

    if not v.is_realized():
        if not issubclass(v.peek_type(), (tuple, list)):
            return None  # nothing is asked of it that the graph would have to guard
        v = v.realize()
    if isinstance(v, UserDefinedObjectVariable):
        held = (getattr(v, name, None) for name in ("_base_vt", "_tuple_vt", "_list_vt"))  # of torch 2.13 and 2.11
        v = next((h for h in held if h is not None), v)
        items = getattr(v, "items", None)
        return items if isinstance(items, list) else None
    return v.items if isinstance(v, TupleVariable) else None

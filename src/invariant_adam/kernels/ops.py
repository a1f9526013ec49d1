"""Operators that `torch.compile` takes as they are: a kernel behind one hop of the dispatcher.

`torch.library.custom_op` does the same with wrappers in Python around each call, which costs more than the call: a
model of fifty layers waits milliseconds for them in every update. Here the dispatcher calls the plain function.
No operator has a gradient: they are called from backwards and optimizers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_library = torch.library.Library("invariant_adam", "FRAGMENT")


def operator(schema: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a function an operator `torch.ops.invariant_adam.<name>`; what is returned calls it.

    Args:
        schema: its name, arguments and results; what it writes to is marked, "Tensor(a!) x".
        fake: the same arguments -> results of the right shape, dtype and layout, without values.
    """
    name = schema.partition("(")[0]

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        _library.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"invariant_adam::{name}", fake, lib=_library)
        call: Callable[..., Any] = getattr(torch.ops.invariant_adam, name).default
        return call

    return register

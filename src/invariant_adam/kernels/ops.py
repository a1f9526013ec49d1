"""Operators that `torch.compile` leaves in its graph: the dispatcher calls a plain function.

`torch.library.custom_op` wraps each call in Python code that takes longer than the call: a model of fifty layers would
wait milliseconds for it in every update. The operators have no gradient: backwards and optimizers call them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

FLOATS = (torch.bfloat16, torch.float16, torch.float32)  # what Triton's kernels take
_library = torch.library.Library("invariant_adam", "FRAGMENT")


def operator(
    schema: str, fake: Callable[..., Any], *, replays: bool = True
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a function the operator `torch.ops.invariant_adam.<name>`, and return the operator.

    Args:
        schema: name, arguments and results; arguments that are written to are marked: "Tensor(a!) x".
        fake: takes the arguments, returns results of the right shape, dtype and layout, without values.
        replays: whether a CUDA graph of torch.compile (mode="reduce-overhead") may hold it. Not where the host counts
            calls, or gives a kernel other scalars each time: torch cuts the graph there.
    """
    name = schema.partition("(")[0]

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        unsafe = () if replays else (torch.Tag.cudagraph_unsafe,)
        _library.define(schema, tags=(torch.Tag.pt2_compliant_tag, *unsafe))
        _library.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"invariant_adam::{name}", fake, lib=_library)
        call: Callable[..., Any] = getattr(torch.ops.invariant_adam, name).default
        return call

    return register


def pair_of(like: Tensor, shape: Sequence[int], channels_last: bool = False) -> tuple[Tensor, Tensor]:
    """Room for dW and S in float32, on the device of `like`."""
    how: Any = {"dtype": torch.float32, "device": like.device}
    if channels_last:
        how["memory_format"] = torch.channels_last
    return torch.empty(shape, **how), torch.empty(shape, **how)

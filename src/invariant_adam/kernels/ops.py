"""Operators that `torch.compile` leaves in its graph: the dispatcher calls a plain function.

`torch.library.custom_op` wraps each call in Python code that takes longer than the call: a model of fifty layers would
wait milliseconds for it in every update. The operators have no gradient: backwards and optimizers call them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from . import rehearsal_of_graph, rehearses

log = logging.getLogger(__name__.partition(".")[0])
FLOATS = (torch.bfloat16, torch.float16, torch.float32)  # what Triton's kernels take
_library = torch.library.Library("invariant_adam", "FRAGMENT")


def operator(
    schema: str, fake: Callable[..., Any], *, replays: bool = True, any_layout: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a function the operator `torch.ops.invariant_adam.<name>`, and return the operator.

    Args:
        schema: name, arguments and results; arguments that are written to are marked: "Tensor(a!) x".
        fake: takes the arguments, returns results of the right shape, dtype and layout, without values.
        replays: whether a CUDA graph of torch.compile (mode="reduce-overhead") may hold it. Not where the host counts
            calls, or gives a kernel other scalars each time: torch makes no CUDA graph of its graph.
        any_layout: whether tensors may come as they lie in the compiler's memory. Otherwise they lie as in the trace,
            which may cost a copy.
    """
    name = schema.partition("(")[0]

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        tags = [torch.Tag.pt2_compliant_tag]
        tags += [torch.Tag.flexible_layout] * any_layout + [torch.Tag.cudagraph_unsafe] * (not replays)
        _library.define(schema, tags=tags)
        _library.impl(name, function, "CompositeExplicitAutograd")

        def traced(*args: Any) -> Any:
            if not replays:
                _refuse_cuts()
            _rehearse(name, function, args)
            return fake(*args)

        torch.library.register_fake(f"invariant_adam::{name}", traced, lib=_library)
        call: Callable[..., Any] = getattr(torch.ops.invariant_adam, name).default
        return call

    return register


def _refuse_cuts() -> None:
    """Refuse to be where torch would cut a CUDA graph: it may lose what is made before the cut and used behind it."""
    from torch._inductor import config

    if config.triton.cudagraphs and config.graph_partition:
        raise RuntimeError(
            'a backward of one_pass(..., into=opt) is compiled to CUDA graphs (mode="reduce-overhead" or '
            '"max-autotune") in another thread than its context: call backward in the thread that opened it, or leave '
            "into= out"
        )


_rehearsed: set[Any] = set()


def _rehearse(name: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Put down the kernels of a call that a trace has met, so that those of a whole graph are compiled side by side.

    The trace has shapes and no memory, so that the function is called with memory of these shapes and no meaning. Where
    that cannot be, the kernels are compiled one by one when they are started.
    """
    tensors = [a for a in args if isinstance(a, Tensor)]
    if not all(rehearses(t.device) for t in tensors):
        return
    sizes = [n for t in tensors for n in (*t.shape, *t.stride())] + [a for a in args if isinstance(a, torch.SymInt)]
    if not all(isinstance(n, int) for n in sizes):
        return  # a size that is to vary
    outlines = [(a.shape, a.stride(), a.dtype, a.device) if isinstance(a, Tensor) else a for a in args]
    key = name, str(outlines)
    if key in _rehearsed:
        return  # a trace asks several times
    _rehearsed.add(key)
    try:
        with _disable_current_modes(), torch.no_grad(), rehearsal_of_graph():
            function(*(_memory(*a) if isinstance(t, Tensor) else t for a, t in zip(outlines, args, strict=True)))
    except Exception as problem:  # no memory, most likely
        log.debug("the kernels of %s are compiled when they are started: %s", name, problem)


def _memory(shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype, device=device)


def pair_of(like: Tensor, shape: Sequence[int], channels_last: bool = False) -> tuple[Tensor, Tensor]:
    """Room for dW and S in float32, on the device of `like`."""
    how: Any = {"dtype": torch.float32, "device": like.device}
    if channels_last:
        how["memory_format"] = torch.channels_last
    return torch.empty(shape, **how), torch.empty(shape, **how)

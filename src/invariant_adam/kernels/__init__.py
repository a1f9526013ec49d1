"""The arithmetic over tensors, a folder for each kernel.

`torch.py` runs everywhere; `triton.py` has the same functions for a GPU; `__init__.py` chooses between them. Inside
such a package the name `torch` is its own module, so an `__init__.py` imports what it needs of torch by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib import import_module
from threading import get_ident
from typing import Any

import torch
from torch import Tensor

from . import tuning


def cast(t: Tensor, dtype: torch.dtype) -> Tensor:
    """`t.to(dtype)`, which is not called where t has that dtype: torch takes longer to find that out."""
    return t if t.dtype == dtype else t.to(dtype)


def twin(package: str, module: str = "triton", *, anywhere: bool = False) -> Any:
    """Return a module of a kernel's package that needs Triton, and a GPU if not `anywhere`; None where these lack."""
    if anywhere or torch.cuda.is_available():
        with suppress(ImportError):
            return import_module(f"{package}.{module}")
    return None


class Serving:
    """Which kernels serve, and whether they are started."""

    fused = True  # Triton's, where they can
    noted: list[Any] | None = None  # launches, which a `rehearsal` puts down here instead of starting them
    rehearsing = 0  # the thread whose launches they are: others train on


@contextmanager
def plain_torch() -> Iterator[None]:
    """Plain torch serves in here, also where Triton could: no kernel is compiled for what runs once."""
    before, Serving.fused = Serving.fused, False
    try:
        yield
    finally:
        Serving.fused = before


@contextmanager
def rehearsal(tell: Callable[[str], None] = lambda what: None) -> Iterator[None]:
    """Triton's kernels are not started in here; at the end all that were called are compiled, side by side.

    What they would have written stays as it was: for a run whose results nobody looks at. The forward of batch norm
    is made by plain torch beside it, so that a model draws and picks by real numbers.
    """
    with _noting() as noted:
        yield
    if noted:
        _launch().compile_all(noted, tell)


@contextmanager
def rehearsal_of_graph() -> Iterator[None]:
    """The same for calls of a graph that is traced: compiled when the first kernel is started, all side by side."""
    with _noting() as noted:
        yield
    _launch().waiting += noted


@contextmanager
def _noting() -> Iterator[list[Any]]:
    before = Serving.noted, Serving.rehearsing
    noted: list[Any] = []
    Serving.noted, Serving.rehearsing = noted, get_ident()
    try:
        yield noted
    finally:
        Serving.noted, Serving.rehearsing = before


def rehearses(device: torch.device) -> bool:
    """Whether there is something to rehearse on a device. Not where the first calls are timed, to choose by."""
    launch = _launch() if device.type == "cuda" else None
    return launch is not None and launch.SIDE_BY_SIDE and not tuning.wanted()


@cache
def _launch() -> Any:
    return twin(__name__, "launch")


def make_ready(device: torch.device) -> None:
    """Have at hand what kernels on the current stream of a device share; before they are launched, and cheap."""
    if device.type == "cuda" and _launch() is not None:
        _launch().keep_counters(device)

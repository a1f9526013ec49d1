"""The arithmetic over tensors, a folder for each kernel.

`torch.py` runs everywhere; `triton.py` has the same functions for a GPU; `__init__.py` chooses between them. Inside
such a package the name `torch` is its own module, so an `__init__.py` imports what it needs of torch by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor


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
    """Which kernels serve."""

    fused = True  # Triton's, where they can


@contextmanager
def plain_torch() -> Iterator[None]:
    """Plain torch serves in here, also where Triton could: no kernel is compiled for what runs once."""
    before, Serving.fused = Serving.fused, False
    try:
        yield
    finally:
        Serving.fused = before


@cache
def _launch() -> Any:
    return twin(__name__, "launch")


def make_ready(device: torch.device) -> None:
    """Have at hand what kernels on the current stream of a device share; before they are launched, and cheap."""
    if device.type == "cuda" and _launch() is not None:
        _launch().keep_counters(device)

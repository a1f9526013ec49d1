"""The arithmetic over tensors, a folder for each kernel.

`torch.py` runs everywhere; `triton.py` has the same functions for a GPU; `__init__.py` chooses between them. Inside
such a package the name `torch` is its own module, so an `__init__.py` imports what it needs of torch by name.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

import torch


def twin(package: str, module: str = "triton", *, anywhere: bool = False) -> ModuleType | None:
    """Return the Triton module of a kernel's package; None where there is no Triton, or no GPU.

    Args:
        package: the package's name.
        module: the module's name in it.
        anywhere: whether no GPU is needed.
    """
    if not (anywhere or torch.cuda.is_available()):
        return None
    try:
        return import_module(f"{package}.{module}")
    except ImportError:
        return None

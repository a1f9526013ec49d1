"""Batch size invariant Adam for PyTorch: the names meant for users, and nothing else."""

from typing import TYPE_CHECKING

import torch

if torch.__version__ < "2.11":  # torch compares them as versions
    raise ImportError(
        f"invariant_adam needs torch 2.11 or newer, the oldest it is tested with, and this is {torch.__version__}; "
        "update torch"
    )

from . import reference, scaling
from .diagnostics import invariance_check, largest_invariant_lr, log_to
from .fold.checks import FirstUpdateWarning
from .graphs import capture
from .growth import BatchGrowth
from .one_pass import UnsupportedUse, explain, one_pass
from .optimizer import InvariantAdam
from .schedules import InvariantEMA, SampleLambdaLR, warmup_cosine
from .unwrap import unwrap

if TYPE_CHECKING:
    from . import distributed

__version__ = "0.2.0"

__all__ = [
    "BatchGrowth",
    "FirstUpdateWarning",
    "InvariantAdam",
    "InvariantEMA",
    "SampleLambdaLR",
    "UnsupportedUse",
    "capture",
    "distributed",
    "explain",
    "invariance_check",
    "largest_invariant_lr",
    "log_to",
    "one_pass",
    "reference",
    "scaling",
    "unwrap",
    "warmup_cosine",
]


def __getattr__(name: str) -> object:
    if name == "distributed":  # not before it is asked for: torch.distributed.checkpoint takes a second to import
        import importlib

        return importlib.import_module(".distributed", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

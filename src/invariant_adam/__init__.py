"""Batch size invariant Adam for PyTorch: the names meant for users, and nothing else."""

from . import reference, scaling
from .graphs import capture
from .one_pass import UnsupportedUse, explain, one_pass
from .optimizer import InvariantAdam
from .schedules import InvariantEMA, SampleLambdaLR, warmup_cosine

__version__ = "0.1.0"

__all__ = [
    "InvariantAdam",
    "InvariantEMA",
    "SampleLambdaLR",
    "UnsupportedUse",
    "capture",
    "explain",
    "one_pass",
    "reference",
    "scaling",
    "warmup_cosine",
]

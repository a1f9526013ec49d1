"""Batch size invariant Adam for PyTorch: the names meant for users, and nothing else."""

from . import reference, scaling
from .optimizer import InvariantAdam
from .schedules import InvariantEMA, SampleLambdaLR, warmup_cosine

__version__ = "0.1.0"

__all__ = ["InvariantAdam", "InvariantEMA", "SampleLambdaLR", "reference", "scaling", "warmup_cosine"]

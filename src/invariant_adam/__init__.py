"""Batch size invariant Adam for PyTorch: the names meant for users, and nothing else."""

from . import reference, scaling
from .optimizer import InvariantAdam

__version__ = "0.1.0"

__all__ = ["InvariantAdam", "reference", "scaling"]

"""Batch size invariant Adam for PyTorch."""

__version__ = "0.1.0"

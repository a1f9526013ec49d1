"""Training on several ranks: checkpoints that survive any of them."""

from .checkpoint import latest, load_latest, save

__all__ = ["latest", "load_latest", "save"]

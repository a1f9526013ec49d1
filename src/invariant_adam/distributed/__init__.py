"""Training on several ranks: their micro-batches in one update, and checkpoints that survive any of them."""

from .checkpoint import latest, load_latest, save
from .prepare import last_backward, prepare
from .wire import LostRankError

__all__ = ["LostRankError", "last_backward", "latest", "load_latest", "prepare", "save"]

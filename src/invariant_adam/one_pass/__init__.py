"""ONE backward over a mini-batch -> mean g and mean g² of its micro-batches."""

from . import ops as ops  # every operation registers itself
from .context import one_pass
from .explain import Explanation, explain
from .groups import UnsupportedUse

__all__ = ["Explanation", "UnsupportedUse", "explain", "one_pass"]

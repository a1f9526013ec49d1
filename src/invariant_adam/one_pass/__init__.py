"""ONE backward over a mini-batch -> mean g and mean g² of its micro-batches."""

from . import attention as _attention  # noqa: F401 - these three register the rules
from . import recurrent as _recurrent  # noqa: F401
from . import rules as _rules  # noqa: F401
from .context import one_pass
from .explain import Explanation, explain
from .groups import UnsupportedUse

__all__ = ["Explanation", "UnsupportedUse", "explain", "one_pass"]

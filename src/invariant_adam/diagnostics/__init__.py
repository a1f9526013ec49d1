"""What a user asks of a run: is it invariant, up to which learning rate, and how does it go?"""

from .invariance import invariance_check
from .report import Cause, InvarianceResult

__all__ = ["Cause", "InvarianceResult", "invariance_check"]

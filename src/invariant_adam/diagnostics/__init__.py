"""What a user asks of a run: is it invariant, up to which learning rate, and how does it go?"""

from .dashboard import Log, log_to
from .invariance import invariance_check
from .largest import Search, largest_invariant_lr
from .report import Cause, InvarianceResult

__all__ = ["Cause", "InvarianceResult", "Log", "Search", "invariance_check", "largest_invariant_lr", "log_to"]

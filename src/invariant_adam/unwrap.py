"""The InvariantAdam inside a trainer's wrapper."""

from __future__ import annotations

from typing import Any

from .optimizer import InvariantAdam


def unwrap(optimizer: Any) -> InvariantAdam:
    """The `InvariantAdam` inside `optimizer`: itself, or what an AcceleratedOptimizer or LightningOptimizer holds.

    Ask and tell the inner one (`samples_seen`, `expect`, `loss_divisor = ...`): an attribute that is set on a wrapper
    stays there. Every function of this package that takes an optimizer unwraps it.

    Args:
        optimizer: an `InvariantAdam`, or a wrapper with the wrapped one in its attribute `optimizer`, at any depth.
    """
    found = optimizer
    while getattr(found, "optimizer", None) is not None:  # first: Lightning's wrapper passes for an InvariantAdam
        found = found.optimizer
    if not isinstance(found, InvariantAdam):
        inside = "" if found is optimizer else f" around {type(found).__name__}"
        raise TypeError(
            f"optimizer must be an InvariantAdam, or a wrapper around one, got {type(optimizer).__name__}{inside}"
        )
    return found

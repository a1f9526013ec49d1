"""Inputs of another length: need the model be looked at again?

What a rule makes of a tensor depends on which of its sizes are the batch's. So a length that two checks have seen vary
is looked at again only where it may make some size inside of the model one that could be taken for the batch's.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import log
from typing import NamedTuple

from torch import Tensor
from torch.utils._pytree import tree_leaves

from .probe import Probe, Trial


class Look(NamedTuple):
    """The sizes that a check has seen, those of the batch left out."""

    inputs: tuple[int, ...]
    inside: tuple[tuple[int, bool, bool], ...]  # of what parameters met: a size, and whether it, or a multiple, matters

    def has(self, batch: int) -> bool:
        """Whether a size inside could be taken for a batch of so many samples."""
        return any(matters and (n == batch or (multiples and n % batch == 0)) for n, matters, multiples in self.inside)


def input_sizes(trial: Trial) -> tuple[int, ...]:
    """The sizes of the inputs, those of the batch left out."""
    axis, inputs = trial.mini.groups.axis, [t for t in tree_leaves(trial.inputs) if isinstance(t, Tensor)]
    return tuple(n for t in inputs for d, n in enumerate(t.shape) if d != axis)


def look(trial: Trial, base: Probe) -> Look:
    """What a recorded run has shown."""
    axis, found = trial.mini.groups.axis, []
    for r in (r for site in sorted(base.records) for r in base.records[site]):
        # The batch is found first in its own dimension, whatever the others are; elsewhere a multiple may hide it.
        matters, multiples = r.axis != axis and r.ids is None, r.axis not in (None, axis)
        found += [(n, matters, multiples) for d, n in enumerate(r.shape) if d != r.axis]
    return Look(input_sizes(trial), tuple(found))


def surprising(first: Look, second: Look, inputs: tuple[int, ...], batch: int, micro: int) -> bool:
    """Whether inputs of these sizes have to be looked at, after two others.

    They need not where one length alone varies, and no size inside that grows with it, or with a power of it, comes
    near that of the batch or of a micro-batch.
    """
    if len({len(first.inputs), len(second.inputs), len(inputs)}) > 1 or len(first.inside) != len(second.inside):
        return True
    varying = {each for each in zip(first.inputs, second.inputs, inputs, strict=True) if len(set(each)) > 1}
    if len(varying) != 1:
        return True
    a, b, c = varying.pop()
    # Far enough apart, so that a size that does not change from one to the other is no part of the length, but for very
    # small ones; a size of one may be meant for any other.
    if min(a, b, c) < 2 or max(a, b) < 2 * min(a, b) or not min(a, b) <= 2 * c <= 4 * max(a, b):
        return True
    way = (c - a) / (b - a)
    margin = 1 + abs(way) + abs(1 - way)  # each size is rounded
    least = min(batch, micro) if micro > 1 else batch
    for (d, *how), (e, *again) in {
        ((a, True, False), (b, True, False)),
        *zip(first.inside, second.inside, strict=True),
    }:
        if how != again or (d == e and d < 3 and least <= 3):
            return True
        if d == e:
            continue
        straight = d + (e - d) * way
        curved = d * (c / a) ** (log(e / d) / log(b / a)) if d and e else straight
        matters, multiples = how
        for n in (straight, curved):
            times = max(1, round(n / batch)) if multiples else 1
            if (micro > 1 and abs(n - micro) < margin) or (matters and abs(n - times * batch) < margin):
                return True
    return False


def extremes(looks: Iterable[Look]) -> tuple[Look, ...]:
    """The looks at the shortest and at the longest inputs."""
    ordered = sorted(looks, key=lambda each: sum(each.inputs))
    return (ordered[0], ordered[-1]) if len(ordered) > 1 else tuple(ordered)

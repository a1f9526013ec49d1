"""The random generators that a forward may draw from: torch's, on the CPU and on some GPUs, Python's and NumPy's."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch


def states(devices: Sequence[int]) -> list[Any]:
    """What the generators will draw, to be compared."""
    found: list[Any] = [t.tolist() for t in (torch.get_rng_state(), *map(torch.cuda.get_rng_state, devices))]
    kind, keys, *rest = _numpy().get_state() if _numpy() else ("", b"")
    return [*found, random.getstate(), kind, bytes(keys), rest]


@contextmanager
def forked(devices: Sequence[int]) -> Iterator[None]:
    """The generators are afterwards as they were before."""
    host, numpy = random.getstate(), _numpy()
    numbers = numpy.get_state() if numpy else None
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(host)
        if numpy:
            numpy.set_state(numbers)


@contextmanager
def redrawn(devices: Sequence[int]) -> Iterator[None]:
    """Other random numbers than outside; the generators are then as they were."""
    seed = torch.initial_seed() + 1
    with forked(devices):
        torch.default_generator.manual_seed(seed)
        for device in devices:  # these only: torch.manual_seed would leave every other one seeded
            torch.cuda.default_generators[device].manual_seed(seed)
        random.seed(seed)
        if _numpy():
            _numpy().seed(seed % 2**32)
        yield


def _numpy() -> Any:
    """`numpy.random`, where a model can have imported it."""
    return getattr(sys.modules.get("numpy"), "random", None)

"""What other packages may ask of an open `one_pass`, and tell it: the whole of its interface to `distributed`.

`one_pass` imports none of them. A package registers what it knows of models here, and asks here for the mini-batch
under way and for squares that have arrived.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from threading import Lock
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor, nn

from .groups import UnsupportedUse

if TYPE_CHECKING:
    from .mini_batch import MiniBatch
    from .weight import Entry

# A model -> the parameters that its forward and backward really use, by name; None for a model it does not know.
Source = Callable[[nn.Module], Iterable[tuple[str, Tensor]] | None]

sources: list[Source] = []  # asked for the parameters of each model: FSDP2 computes with others than the module holds
trusted: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # each a `DistributedDataParallel` that reduces no gradients


class Open:
    """The open context: the process's, since backwards may run in threads of their own."""

    mini_batch: ClassVar[MiniBatch | None] = None  # the one under way
    lock: ClassVar[Lock] = Lock()  # held from the opening of a context to its end


def source_of(model: nn.Module) -> Iterable[tuple[str, Tensor]] | None:
    """What the first source that knows the model says its parameters are; None where none does."""
    answers = (source(model) for source in sources)
    return next((found for found in answers if found is not None), None)


def has_square(p: Tensor) -> bool:
    """Whether a square has arrived for `p`, a parameter of the open context."""
    entry: Entry | None = getattr(p, "one_pass_entry", None)
    return entry is not None and entry.companion.grad is not None


def is_table(p: Tensor) -> bool:
    """Whether `p`, a parameter of the open context, is embedding and head: its square needs `Groups.bounded`."""
    entry: Entry | None = getattr(p, "one_pass_entry", None)
    return entry is not None and bool(entry.table)


def take_square(p: Tensor) -> Tensor:
    """Take the square that has arrived for `p`, in its shape; it counts as handed over."""
    entry: Entry = p.one_pass_entry  # type: ignore[attr-defined]
    if (entry.arrived or entry.fired) > 1 or entry.done:
        raise UnsupportedUse(
            f"{entry.name} is used more than once, and was squared in parts, without their cross terms; have the "
            "model checked before fully_shard, by one backward in one_pass on the plain model"
        )
    square, entry.companion.grad = entry.companion.grad, None
    entry.done = True
    assert square is not None
    return entry.shaped(square)

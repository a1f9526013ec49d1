"""What the fold queue asks of the process group: `Reducer`, here for a process that trains alone.

A rank folds what its own backwards bring. The queue calls `before_fold` and `after_fold` around each fold, and the
optimizer calls `reduce_update` at `step()`. Whatever a mode of `distributed` sends, after `reduce_update` each
parameter's moments hold the micro-batches of all ranks, each once, and its count is theirs; everything that follows is
what one process would do. Modes override what they need; `distributed.prepare` puts one into the queue.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from . import checks
from .pair import Pair
from .scalars import Tally

if TYPE_CHECKING:
    from .queue import FoldQueue


class Reducer:
    """One process that trains alone."""

    kernels_fold = True  # whether a kernel may fold into the moments by itself
    pieces = False  # whether `local` and `gradient` may cut something off
    # Whether ranks decide on each update together, on the host. Moments are then reduced before the weights move, and
    # no gradient may wait to be folded as they do.
    size = 1  # ranks
    several = False
    last_backward = False  # the backward that runs is the last of this rank's update

    def begin(self, tally: Tally) -> Tally:
        """Begin a parameter's tally as this rank's."""
        return tally

    def before_fold(self, queue: FoldQueue, p: Tensor) -> None:
        """Make ready for a fold of `p`."""

    def take_reduced(self, queue: FoldQueue, p: Tensor) -> Pair | None:
        """Take a gradient off `p` that its backward has reduced over the ranks already; None: it is this rank's."""
        return None

    def send(self, queue: FoldQueue, params: list[Tensor], tallies: list[Tally], pairs: list[Pair]) -> bool:
        """Send gradients that are folded on other ranks; False leaves the fold to the queue."""
        return False

    def after_fold(self, queue: FoldQueue, params: list[Tensor]) -> None:
        """Note that gradients of `params` were folded, or queued to be."""

    def end_last_backward(self, queue: FoldQueue) -> None:
        """Note that this rank's last backward of the update has ended."""

    def reduce_update(self, queue: FoldQueue, check: Callable[[], None]) -> None:
        """Make the update all ranks'; `check` refuses what is wrong on this one."""
        checks.refuse_ranks()  # first: a gradient that DDP has assigned would be refused with another remedy
        check()

    def abandon_update(self, queue: FoldQueue) -> None:
        """Make ready to give the update up."""

    def drop_update(self, queue: FoldQueue) -> None:
        """Make ready to forget the open update, where a state is loaded in its middle."""

    def after_step(self, queue: FoldQueue) -> None:
        """Send what the step has changed."""

    def add_parameters(self, queue: FoldQueue) -> None:
        """Note that the optimizer has more parameters than before."""

    def local(self, t: Tensor) -> Tensor:
        """This rank's piece of a weight, a gradient or a moment."""
        return t

    def gradient(self, p: Tensor, grad: Tensor) -> Tensor:
        """This rank's piece of a gradient of `p`."""
        return grad

    def weight(self, p: Tensor) -> Tensor:
        """The piece of `p` that this rank's moments move."""
        return p

"""What the optimizer asks of the ranks that train one model with it: `Ranks` for one alone, `Team` for several.

A rank folds what its own backwards bring. The optimizer calls `before` and `after` around each fold, and `agree` at
`step()`: whatever a mode does on the wire, after `agree` each parameter's moments hold the micro-batches of all ranks,
each once, and its count is theirs, so that everything that follows is what one process would do.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import checks, scalars

if TYPE_CHECKING:
    import torch.distributed as dist

    from ..optimizer import InvariantAdam
    from .update import Update

ONES = (1.0, 1.0)
# This rank's piece of a mean gradient; of the mean square, None where the gradient is one micro-batch's; their κ, and
# the factors still to be put on them.
Received = tuple[Tensor, "Tensor | None", float, tuple[float, float]]


class Ranks:
    """A process that trains alone, and what the ways of several override."""

    takes_kernels = True  # whether a kernel may fold into the moments by itself
    waits = True  # whether a gradient may wait for the step, to be folded as the weights move
    last = False  # the backward that runs is the last of this rank's update

    def begin(self, part: scalars.Part) -> scalars.Part:
        """Plan a parameter's part in an update as this rank's."""
        return part

    def before(self, optimizer: InvariantAdam, p: Tensor) -> None:
        """Make ready for a fold of `p`."""

    def receive(self, optimizer: InvariantAdam, p: Tensor) -> Received | None:
        """Take a gradient off `p` that is all ranks' by the time its backward leaves it there; None: it is not."""
        return None

    def absorb(
        self, optimizer: InvariantAdam, params: list[Tensor], parts: list[scalars.Part], arrivals: list[Any]
    ) -> bool:
        """Take gradients that are not to be folded here and now; False leaves the fold to the optimizer."""
        return False

    def after(self, optimizer: InvariantAdam, params: list[Tensor]) -> None:
        """Note that gradients of `params` were folded, or queued to be."""

    def finish_last(self, optimizer: InvariantAdam) -> None:
        """Note that this rank's last backward of the update has ended."""

    def agree(self, optimizer: InvariantAdam, check: Callable[[], None]) -> None:
        """Make the update all ranks'; `check` refuses what is wrong on this one."""
        check()
        checks.refuse_ranks()

    def abandon(self, optimizer: InvariantAdam) -> None:
        """Make ready to give the update up."""

    def drop(self, optimizer: InvariantAdam) -> None:
        """Make ready to forget the update that is open, where a state is loaded in its middle."""

    def local(self, t: Tensor) -> Tensor:
        """This rank's piece of a weight, a gradient or a moment."""
        return t

    def gradient(self, p: Tensor, grad: Tensor) -> Tensor:
        """This rank's piece of a gradient of `p`."""
        return grad

    def weight(self, p: Tensor) -> Tensor:
        """The piece of `p` that this rank's moments move."""
        return p

    def moved(self, optimizer: InvariantAdam) -> None:
        """Note that the weights have moved."""

    def outgrown(self, optimizer: InvariantAdam) -> Ranks:
        """Return the ranks of an optimizer that is about to get more parameters."""
        return self


class Outgrown(Ranks):
    """Ranks that were prepared for fewer parameters than the optimizer has now."""

    def before(self, optimizer: InvariantAdam, p: Tensor) -> None:  # noqa: D102 - as Ranks has it
        raise RuntimeError(
            "parameters were added to the optimizer after distributed.prepare(), which has not made them the same on "
            "all ranks; call prepare(model, opt) again, on every rank, before the next backward"
        )

    def agree(self, optimizer: InvariantAdam, check: Callable[[], None]) -> None:  # noqa: D102
        self.before(optimizer, next(optimizer._params()))


class Team(Ranks):
    """Ranks of a process group that agree on each update before a weight moves.

    One small sum over the ranks per update carries the counts, and with them what must be known of each other: that
    a rank refuses (then all do, instead of waiting for it), and that their hyperparameters are the same.

    Args:
        groups: the ranks whose micro-batches make an update, by the dimensions of their mesh; none where there is no
            other rank.
    """

    waits = False  # the moments are sent before the weights move
    even = False  # whether all ranks must bring as many micro-batches

    def __init__(self, groups: list[dist.ProcessGroup]) -> None:
        self.groups = groups
        self.size = prod(group.size() for group in groups)
        self.alone = self.size == 1  # with nobody to send to; benchmarks set it to False, to have collectives of one
        self.update: Update | None = None  # the one under way
        self.agreed: Update | None = None  # the one that is closed here, stepped or not
        self.late = False  # a gradient came after the moments were sent
        self.buffers: list[Tensor] = []  # of the model, which are to be the first rank's after each step

    def before(self, optimizer: InvariantAdam, p: Tensor) -> None:  # noqa: D102 - as Ranks has it
        if optimizer._update is self.agreed:
            raise RuntimeError(
                "a gradient came after the ranks had closed the update in a step() that raised; step() again, or drop "
                "the update with opt.abandon() on all ranks, before the next backward"
            )
        self._begin_update(optimizer)

    def _begin_update(self, optimizer: InvariantAdam) -> None:
        if optimizer._update is self.update:
            return
        if not self._there():
            raise RuntimeError(
                "the process group that distributed.prepare() was given has been destroyed; call prepare(model, opt) "
                "again, on every rank of the new one, before the next backward"
            )
        self.update = optimizer._update
        self.open(optimizer)

    def _there(self) -> bool:
        """Whether the process groups still are."""
        dist = torch.distributed
        return dist.is_initialized() and all(g in dist.distributed_c10d._world.pg_group_ranks for g in self.groups)

    def outgrown(self, optimizer: InvariantAdam) -> Ranks:  # noqa: D102
        if optimizer._update.parts:
            raise RuntimeError(
                f"add_param_group() in the middle of an update that {self.size} ranks share; call it after step(), on "
                "all of them, and prepare(model, opt) again"
            )
        return Outgrown()

    def open(self, optimizer: InvariantAdam) -> None:
        """Begin an update."""

    def reduce(self, optimizer: InvariantAdam) -> None:
        """Bring what all ranks folded into everyone's moments."""

    def again(self, optimizer: InvariantAdam) -> None:
        """Do it once more, for gradients that came after it."""

    def count(self, optimizer: InvariantAdam, p: Tensor) -> float:
        """Micro-batches of `p` that this rank brought."""
        part = optimizer._update.parts.get(p)
        return 0.0 if part is None else part.kappa

    def agree(self, optimizer: InvariantAdam, check: Callable[[], None]) -> None:  # noqa: D102
        update = optimizer._update
        if update is self.agreed:
            return
        self._begin_update(optimizer)  # unless a gradient did
        error: Exception | None = None
        try:
            check()
            if update.parts:
                update.check_whole(optimizer._name)
        except Exception as e:
            error = e
        optimizer._flush()
        self.reduce(optimizer)
        params = list(optimizer._params())
        own = [
            float(error is not None),
            float(self.late),
            float(_nonfinite(optimizer)),
            float(_digest(optimizer)),
            sum(update.micro_batches.values()),
            *(self.count(optimizer, p) for p in params),
        ]
        failed, late, nonfinite, digest, seen, *counts = self.sum(own, params[0].device)
        if late:
            self.again(optimizer)
        self.agreed = update
        for p, kappa in zip(params, counts, strict=True):
            self._take_count(optimizer, p, kappa)
        if seen:
            update.micro_batches = {0: seen}
        if error is not None:
            raise error
        if failed:
            raise RuntimeError(
                f"{failed:g} of {self.size} ranks refused this update or gave it up; their own errors say why. No "
                "weight has moved: call opt.abandon() on this rank too, or stop"
            )
        if digest != own[3] * self.size:
            raise RuntimeError(
                "the ranks disagree on lr, betas or another hyperparameter, on samples_seen or expect(kappa): set them "
                "alike on every rank (kappa counts the micro-batches of all ranks). No weight has moved; drop the "
                "update with opt.abandon()"
            )
        if self.even and any(abs(k - n * self.size) > 1e-9 * k for k, n in zip(counts, own[5:], strict=True)):
            raise RuntimeError(
                "the ranks brought unequal numbers of micro-batches, or unequal weights of ragged ones, and FSDP2 has "
                "averaged them as equals; give every rank as many samples in each backward. No weight has moved, but "
                "the moments hold them: go back to the last checkpoint"
            )
        if nonfinite and not own[2]:
            raise RuntimeError(
                f'{nonfinite:g} gradient elements were not finite on other ranks, and on_nonfinite="raise"; the '
                "weights have not moved"
            )

    def _take_count(self, optimizer: InvariantAdam, p: Tensor, kappa: float) -> None:
        """Make the micro-batches of `p` those of all ranks."""
        parts = optimizer._update.parts
        part = parts.get(p)
        if kappa:
            assert part is not None
            part.kappa = kappa
        elif part is not None:
            # No rank had a gradient of it, but its moments were made ready for one: what they lost is owed back.
            del parts[p]
            if part.a is not None:
                optimizer.state[p]["norm1"], optimizer.state[p]["norm2"] = part.a

    def sum(self, values: list[float], device: torch.device) -> list[float]:
        """Add up over the ranks, exactly for whole numbers; on the CPU where the group can, so as not to wait."""
        if self.alone:
            return values
        cpu = all(any(d.type == "cpu" for d in group._device_types) for group in self.groups)
        total = torch.tensor(values, dtype=torch.float64, device="cpu" if cpu else device)
        for group in self.groups:
            torch.distributed.all_reduce(total, group=group)
        result: list[float] = total.tolist()
        return result

    def abandon(self, optimizer: InvariantAdam) -> None:  # noqa: D102
        def gives_up() -> None:
            raise _GivenUp

        if not self._there():
            return  # nobody is left to be told
        with suppress(_GivenUp):
            self.agree(optimizer, gives_up)

    def drop(self, optimizer: InvariantAdam) -> None:  # noqa: D102
        if optimizer._update.parts and not self.alone and self._there():
            raise RuntimeError(
                f"load_state_dict() in the middle of an update that {self.size} ranks share: what is on its way would "
                "be counted in the next one. Drop it first with opt.abandon(), on all of them"
            )

    def local(self, t: Tensor) -> Tensor:  # noqa: D102
        local: Tensor = getattr(t, "_local_tensor", t)  # what to_local() returns in no_grad, after asking more
        return local

    def gradient(self, p: Tensor, grad: Tensor) -> Tensor:  # noqa: D102
        if getattr(grad, "placements", None) != getattr(p, "placements", None):
            # A sum that is still spread over ranks must be added up before it is squared.
            grad = grad.redistribute(placements=p.placements)  # type: ignore[attr-defined]
        return self.local(grad)

    def weight(self, p: Tensor) -> Tensor:  # noqa: D102
        return self.local(p)

    def moved(self, optimizer: InvariantAdam) -> None:  # noqa: D102
        if self.buffers:
            copy_first(self.buffers, self.groups[0])


class LostRankError(RuntimeError):
    """Another rank has died, or has not answered within the process group's timeout."""


# gloo's failures are plain RuntimeErrors.
_OF_THE_WIRE = re.compile("gloo|NCCL|connection|timed out", re.IGNORECASE)


@contextmanager
def in_touch(doing: str) -> Iterator[None]:
    """Say what was going on, and how to go on, when a collective in this context fails.

    A rank that dies closes its connections, so that the others fail at once; one that hangs lets them run into the
    process group's timeout. Either way those that are left cannot finish the update.

    Args:
        doing: what the collective is for, in words that follow "while".
    """
    try:
        yield
    except LostRankError:
        raise
    except RuntimeError as error:
        dist = torch.distributed
        if not (dist.is_available() and dist.is_initialized()):
            raise
        if not isinstance(error, dist.DistError) and not _OF_THE_WIRE.search(str(error)):
            raise
        raise LostRankError(
            f"rank {dist.get_rank()} of {dist.get_world_size()} lost touch with another rank while {doing}: that one "
            "has died or no longer answers, and its own error says why. No rank can go on without it: stop them all "
            f"and start again from the latest checkpoint, as torchrun --max-restarts does. The transport says: {error}"
        ) from error


def copy_first(tensors: list[Tensor], group: dist.ProcessGroup) -> None:
    """Give every rank the values of the group's first, in one broadcast for each kind of tensor."""
    first = torch.distributed.get_global_rank(group, 0)
    kinds: dict[Any, list[Tensor]] = {}
    for t in tensors:
        kinds.setdefault((t.device, t.dtype), []).append(t)
    for alike in kinds.values():
        together = torch.cat([t.detach().reshape(-1) for t in alike])
        torch.distributed.broadcast(together, first, group=group)
        for t, values in zip(alike, together.split([t.numel() for t in alike]), strict=True):
            t.detach().copy_(values.view(t.shape))


class _GivenUp(Exception):  # noqa: N818 - no error
    pass


_ALIKE = (
    "eps", "weight_decay", "maximize", "decoupled_weight_decay", "micro_batch_size", "tuned_batch_size", "rule",
    "samples_seen",
)  # fmt: skip


def _digest(optimizer: InvariantAdam) -> int:
    """A number that differs between ranks whose hyperparameters do; sums of it are exact."""
    values = [(float(g["lr"]), *map(float, g["betas"]), *(g[key] for key in _ALIKE)) for g in optimizer.param_groups]
    return zlib.crc32(repr((optimizer._update.expected, optimizer.loss_divisor, values)).encode())


def _nonfinite(optimizer: InvariantAdam) -> int:
    return optimizer.nonfinite - optimizer._reported if optimizer._on_nonfinite == "raise" else 0


def placed(value: Tensor, like: Tensor) -> Tensor:
    """Place a whole tensor as the DTensor `like` is; others are as they should be."""
    if hasattr(like, "device_mesh") and not hasattr(value, "device_mesh"):
        from torch.distributed.tensor import distribute_tensor

        value = distribute_tensor(value.to(like.device), like.device_mesh, like.placements)  # type: ignore[attr-defined]
    return value


def whole(t: Tensor) -> Tensor:
    """The whole of a tensor that may be in pieces; then all ranks must ask for it together."""
    gathered: Tensor = t.full_tensor() if hasattr(t, "full_tensor") else t
    return gathered


def in_pieces(piece: Tensor, mesh: Any, placements: Any, shape: torch.Size, stride: tuple[int, ...]) -> Tensor:
    """The tensor of which this rank has `piece`, in a buffer with others perhaps."""
    from torch.distributed.tensor import DTensor

    made = DTensor.from_local(torch.empty_like(piece), mesh, placements, run_check=False, shape=shape, stride=stride)
    # Only now: made of a view, a DTensor takes its place in the buffer for its own, and torch cannot save or copy it.
    made._local_tensor = piece
    return made

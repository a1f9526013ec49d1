"""Growing in: the first mini-batches -> several smaller updates each.

Debiasing makes the first update all that m̂ and v̂ have, whatever γ is. A first update of many micro-batches is therefore
not small, and the runs of different batch sizes part there. So no update is larger than a part of what was seen before:

    κ_t = min(κ, max(1, ⌊r · micro-batches seen⌋))
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_unflatten

from .unwrap import unwrap


def grown_kappa(
    limit: int, seen: float, ratio: float = 0.1, *, whole: int | None = None, powers_of_two: bool = False
) -> int:
    """How many micro-batches an update has after so many: κ_t = min(limit, max(1, ⌊ratio · seen⌋)).

    Args:
        limit: micro-batches that are left of the mini-batch.
        seen: micro-batches of all updates before.
        ratio: r, the size of the largest update relative to what was seen before it; `math.inf` cuts nothing.
        whole: micro-batches of the whole mini-batch; None: `limit`.
        powers_of_two: whether an update that is not a whole mini-batch must have a power of two of them.

    >>> [grown_kappa(32, seen) for seen in (0, 19, 20, 100, 1_000)]
    [1, 1, 2, 10, 32]
    >>> [grown_kappa(24, seen, powers_of_two=True) for seen in (0, 19, 20, 100, 1_000)]
    [1, 1, 2, 8, 24]
    """
    whole = limit if whole is None else whole
    bound = ratio * seen + 1e-9 if ratio < math.inf else whole  # the product may be a rounding below a whole number
    kappa = max(1, int(min(bound, limit)))
    if not powers_of_two or kappa == whole:
        return kappa
    return 1 << (kappa.bit_length() - 1)


class BatchGrowth:
    """Cuts mini-batches into updates that grow with what was seen; after a few dozen updates it cuts nothing any more.

    It has no state: how much was seen is `samples_seen` of the optimizer, so that a resumed run goes on right.

    Args:
        optimizer: an `InvariantAdam`.
        ratio: r, the size of the largest update relative to what was seen before it. `math.inf` cuts nothing, and
            says that a large first update is meant (see `FirstUpdateWarning`).
        powers_of_two: cut into powers of two of micro-batches, so that few sizes come and each can be a CUDA graph
            (`capture(..., by_size=True)`).

    A mini-batch of 64 samples, M = 2: the first updates have one micro-batch, later ones more.

    >>> import torch
    >>> from invariant_adam import InvariantAdam
    >>> model = torch.nn.Linear(3, 1)
    >>> opt = InvariantAdam(model.parameters(), micro_batch_size=2)
    >>> growth, sizes = BatchGrowth(opt, ratio=0.25), []
    >>> for x, y in growth.split(torch.randn(64, 3), torch.randn(64, 1)):
    ...     for x1, y1 in zip(x.split(2), y.split(2)):
    ...         (model(x1) - y1).square().mean().backward()
    ...     opt.step()
    ...     sizes.append(len(x))
    >>> sizes
    [2, 2, 2, 2, 2, 2, 2, 2, 4, 4, 6, 6, 8, 10, 10]
    """

    def __init__(self, optimizer: Optimizer, ratio: float = 0.1, *, powers_of_two: bool = False) -> None:
        if not ratio > 0:
            raise ValueError(f"ratio must be positive, got {ratio}; 0.1 is where smaller ones stop to pay")
        self.optimizer, self.ratio, self.powers_of_two = unwrap(optimizer), ratio, powers_of_two
        self.optimizer.queue.grows = True

    def next_kappa(self, limit: int, whole: int | None = None) -> int:
        """How many micro-batches the coming update has on this rank; the optimizer is told, by `expect`.

        Args:
            limit: micro-batches that are left of the mini-batch, the same on all ranks. An update does not cross its
                end.
            whole: micro-batches of the whole mini-batch; None: as many as are left. Only powers of two ask for it.
        """
        opt = self.optimizer
        if limit < 1:
            raise ValueError(f"limit must be at least one micro-batch, got {limit}")
        opt.queue.update.refuse_open("BatchGrowth", "an update cannot be cut once it is open. Call step() first")
        ranks = opt.queue.reducer.size
        seen = opt.samples_seen / (opt.micro_batch_size or 1) / ranks
        kappa = grown_kappa(limit, seen, self.ratio, whole=whole, powers_of_two=self.powers_of_two)
        opt.queue.update.part = kappa < (limit if whole is None else whole)
        if opt.queue.update.part:
            opt.queue.watch.forget()
        opt.expect(kappa * ranks)
        return kappa

    def split(self, *batch: Any) -> Iterator[Any]:
        """Cut a mini-batch into the batches of its updates; call `opt.step()` for each.

        Args:
            batch: tensors with the samples in their first dimension, or one nested batch of them. NumPy arrays and
                lists of strings or numbers, as many as samples, are cut as well; other leaves are handed on as they
                are.
        """
        size = self.optimizer.micro_batch_size
        if size is None:
            raise ValueError("split() cuts samples, and this InvariantAdam counts none; give it micro_batch_size")
        whole = [dict(part) if isinstance(part, Mapping) else part for part in batch]
        tree = whole[0] if len(whole) == 1 else tuple(whole)
        leaves, structure = tree_flatten(tree, is_leaf=_is_listing)
        lengths = {len(t) for t in leaves if isinstance(t, Tensor) and t.ndim}
        if len(lengths) != 1:
            raise ValueError(f"split() needs tensors with as many samples each, got {sorted(lengths)} in dimension 0")
        samples = lengths.pop()
        kappas = -(-samples // size)
        first = 0
        while first < samples:
            kappa = self.next_kappa(-(-(samples - first) // size), kappas)
            last = min(first + kappa * size, samples)
            if last - first < kappa * size:  # the last micro-batch is short
                self.optimizer.expect((last - first) / size * self.optimizer.queue.reducer.size)
            yield tree_unflatten([t[first:last] if _has_samples(t, samples) else t for t in leaves], structure)
            first = last


def _is_listing(t: Any) -> bool:
    """Whether t lists strings or numbers: what a loader makes of the texts of samples, or of their sizes.

    A tuple of numbers is more likely to be one shape.
    """
    kinds = (str, bytes, int, float) if isinstance(t, list) else (str, bytes)
    return isinstance(t, (list, tuple)) and bool(t) and all(isinstance(x, kinds) for x in t)


def _has_samples(t: Any, samples: int) -> bool:
    """Whether a leaf has an item for each sample."""
    shape = getattr(t, "shape", None)  # of a tensor or a NumPy array
    if isinstance(shape, tuple):
        return len(shape) > 0 and shape[0] == samples
    return _is_listing(t) and len(t) == samples

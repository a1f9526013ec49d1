"""A loss that is made outside of the model: is it a mean, and does each micro-batch have its share of it?

torch's cross entropy divides by the weights of its targets, of which micro-batches may have unequal sums where there is
an `ignore_index` or where classes have weights. Its node in the autograd graph has kept both. It is looked at with each
check of the model, right before the backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..groups import Groups, UnsupportedUse
from ..mini_batch import MiniBatch

MEAN, SUM = 1, 2  # torch's numbers for these reductions
NODES = 256  # of a loss, at most
CUTS = ("Gather", "Index", "MaskedSelect", "Select", "Slice", "Split", "Take", "Unbind")  # nodes that may drop samples
_autograd: Any = torch.autograd


class Watch:
    """Looks at each loss that backward is called on, until `remove`."""

    def __init__(self, mini: MiniBatch) -> None:
        self.mini = mini
        self.made: set[Any] = {None}  # the nodes of the model's outputs, where a loss begins
        self.plain = _autograd.backward
        _autograd.backward = self._backward

    def remove(self) -> None:
        """Leave torch as it was, and let go of the graph."""
        _autograd.backward, self.made = self.plain, {None}

    def _backward(self, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if self.mini.reduction == "mean" and not self.mini.single:
            for loss in [tensors] if isinstance(tensors, Tensor) else tensors:
                self._look(loss.grad_fn, self.mini.groups)
        return self.plain(tensors, *args, **kwargs)

    def _look(self, node: Any, groups: Groups) -> None:
        if node not in self.made and getattr(node, "_saved_reduction", MEAN) == SUM:
            raise UnsupportedUse(
                'the loss is a sum over samples (reduction="sum"), which one_pass takes for their mean; say '
                'one_pass(..., reduction="sum"), or let it be a mean'
            )
        for each in self._nodes(node):
            if each.name() in ("NllLossBackward0", "NllLoss2DBackward0") and not self._of_a_part(each, groups):
                _refuse_unequal(each, groups)

    def _of_a_part(self, node: Any, groups: Groups) -> bool:
        """Whether a loss is of some of the samples, as of one micro-batch in a sum over all of them."""
        return any(
            each.name().startswith(CUTS) and getattr(each, "_saved_dim", 0) in (0, groups.axis)
            for each in self._nodes(node)
        )

    def _nodes(self, node: Any) -> Iterator[Any]:
        """What a value is made by, back to the model's outputs."""
        found, seen = [node], {*self.made}
        for each in found:  # which grows
            if each not in seen and len(seen) <= NODES:
                seen.add(each)
                found += [parent for parent, _ in each.next_functions]
                yield each


def _refuse_unequal(node: Any, groups: Groups) -> None:
    """Refuse a mean of cross entropy that does not give each micro-batch the share that its samples have."""

    def saved(name: str) -> Any:
        return getattr(node, f"_saved_{name}")

    target, weight, ignored = saved("target"), saved("weight"), saved("ignore_index")
    if saved("reduction") != MEAN or target.ndim == 0 or target.numel() % groups.batch:
        return
    kept = target != (ignored - (1 << 64) if ignored >> 63 else ignored)  # which has no sign there
    counts = kept.double() if weight is None else kept * weight.double()[target.where(kept, 0)]
    if groups.axis == 0:
        counts = counts.reshape(groups.batch, -1).sum(1)
    elif target.ndim == 1:  # of (time, batch)
        counts = counts.reshape(-1, groups.batch).sum(0)
    else:
        return
    own = _sums(counts, groups)
    fair = _sums(torch.ones_like(counts), groups) * (counts.sum() / groups.batch)
    if not bool(((own - fair).abs() <= 1e-5 * fair).all()):
        numbers = ", ".join(f"{x:.4g}" for x in own[:4].tolist())
        raise UnsupportedUse(
            "the loss is a mean over targets with an ignore_index or class weights, and the targets of micro-batches "
            f"weigh {numbers}{', ...' if len(own) > 4 else ''}: each would count by its share of this mini-batch. Pass "
            "weights=, what each sample's or token's target weighs, best with usual_weight=; or use a plain mean"
        )


def _sums(each: Tensor, groups: Groups) -> Tensor:
    """The sums over the samples of each micro-batch."""
    pieces: Iterable[Tensor] = each.split(groups.micro)
    return torch.stack([piece.sum() for piece in pieces])

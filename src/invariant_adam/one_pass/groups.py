"""Which rows of a tensor belong to which micro-batch.

A mini-batch of B samples is κ = ⌈B/M⌉ groups of M neighbouring samples; the last may be ragged.
With a loss that is a (weighted) mean over the mini-batch, group k's share of a gradient is s_k =
(W_k/W) g_k, where g_k is the gradient of that group's own mean and W_k its weight (its number of
samples, where no weights are given). Then

    mean g  = Σ_k (W_k/W) g_k  = Σ_k s_k
    mean g² = Σ_k (W_k/W) g_k² = Σ_k (W/W_k) s_k²

so a ragged group of n samples counts n/M in both moments. Groups of equal weight give κ Σ_k s_k².
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class UnsupportedUse(RuntimeError):  # noqa: N818 - it names what happened
    """A parameter is used in a way that one pass cannot square exactly."""


def without_samples(names: str, what: str) -> UnsupportedUse:
    """The refusal of a value made of parameters alone that meets no sample: a penalty, or a factor of the loss.

    Args:
        names: of the parameters.
        what: happens to the value.
    """
    return UnsupportedUse(
        f"a value made of {names} alone {what}: it belongs to no sample, so that no micro-batch has a share of its "
        "gradient. Add a penalty to the loss of each sample inside the model, and multiply by a factor there (factor * "
        "losses + penalty, whose mean is then taken), decouple it (weight_decay= of the optimizer), or loop over "
        "micro-batches; return value.detach() where it is only to be looked at"
    )


class Part(NamedTuple):
    """A run of groups of one size: groups [lo, hi), samples [first, last)."""

    lo: int
    hi: int
    first: int
    last: int


class Groups:
    """The division of one mini-batch into micro-batches."""

    def __init__(self, batch: int, micro: int, axis: int, c: Tensor | None = None) -> None:
        self.batch = batch  # samples
        self.micro = micro  # samples
        self.axis = axis  # where the batch is looked for first
        full, rest = divmod(batch, micro)
        self.kappa = full + (rest > 0)  # groups, the ragged one included
        self.parts = [Part(0, full, 0, full * micro)] if full else []
        if rest:
            self.parts.append(Part(full, full + 1, full * micro, batch))
        # One coefficient W/(κ W_k) per group; None where all are 1.
        self.c = c

    def scale(self, reduction: str) -> tuple[float, float]:
        """The factors that make mean g and mean g² of the sums Σ s_k and Σ c_k s_k² of a backward."""
        return (1.0, float(self.kappa)) if reduction == "mean" else (1 / self.kappa, 1 / self.kappa)

    def axis_of(self, shape: torch.Size, leading: int) -> int | None:
        """The batch dimension among the first `leading` dimensions of `shape`, or None.

        A dimension of exactly B at `axis`, else a first dimension that is a multiple of B (B·T
        flattened batch first), else any of exactly B. Sizes only suggest; `check.py` establishes
        it.
        """
        if leading > self.axis and shape[self.axis] == self.batch:
            return self.axis
        if leading > 0 and shape[0] > 0 and shape[0] % self.batch == 0:
            return 0
        for axis in range(leading):
            if shape[axis] == self.batch:
                return axis
        return None

    def split(self, x: Tensor, axis: int, event: int) -> list[Tensor]:
        """Per part, x as (groups, rows per group, *its last `event` dimensions)."""
        x = x.movedim(axis, 0) if axis else x
        tail = x.shape[x.ndim - event :]
        return [rows.reshape(p.hi - p.lo, -1, *tail) for p, rows in zip(self.parts, self.pieces(x), strict=True)]

    def stack(self, x: Tensor, axis: int) -> list[Tensor]:
        """Per part, x as (groups, samples per group, *the other dimensions), the batch moved
        first."""
        x = x.movedim(axis, 0) if axis else x
        tail = x.shape[1:]
        return [rows.reshape(p.hi - p.lo, -1, *tail) for p, rows in zip(self.parts, self.pieces(x), strict=True)]

    def pieces(self, x: Tensor) -> list[Tensor]:
        """Per part, its rows of x, whose batch is first."""
        if len(self.parts) == 1:
            return [x]
        times = x.shape[0] // self.batch
        return [x[p.first * times : p.last * times] for p in self.parts]

    def cut(self, t: Tensor) -> list[Tensor]:
        """Per part, its groups of t, whose groups are first."""
        return [t] if len(self.parts) == 1 else [t[p.lo : p.hi] for p in self.parts]

    def merge(self, parts: list[Tensor], axis: int) -> Tensor:
        """The inverse of `stack`."""
        rows = [y.flatten(0, 1) for y in parts]
        x = rows[0] if len(rows) == 1 else torch.cat(rows)
        return x.movedim(0, axis) if axis else x

    def coefficients(self, part: Part) -> Tensor | None:
        """The coefficients of the squares of one part."""
        return None if self.c is None else self.c[part.lo : part.hi]

"""Which rows of a tensor belong to which micro-batch.

A mini-batch of B samples is κ = ⌈B/M⌉ groups of M neighbouring samples; the last may be ragged. The loss is a
(weighted) mean over the mini-batch. Group k has the weight W_k, its number of samples where no weights are given, and
the gradient g_k of its own mean. Its share of the mini-batch's gradient is s_k = (W_k/W) g_k. Then

    mean g  = Σ_k (W_k/W) g_k  = Σ_k s_k
    mean g² = Σ_k (W_k/W) g_k² = Σ_k (W/W_k) s_k²

so a ragged group of n samples counts n/M in both moments. Groups of equal weight give κ Σ_k s_k².

Weights with a usual weight n̄ only normalise: g_k = ∇(Σ w l)/n̄ counts by its samples, and s_k = n̄/(κW) g_k.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor


class UnsupportedUse(RuntimeError):  # noqa: N818 - it names what happened
    """A parameter is used in a way that one pass cannot square exactly."""

    probe: Any = None  # what a run of the check has seen until it was refused


def without_samples(names: str, what: str) -> UnsupportedUse:
    """The refusal of a value that is made of parameters alone and meets no sample: a penalty, a factor of the loss."""
    return UnsupportedUse(
        f"a value made of {names} alone {what}: it belongs to no sample, so that no micro-batch has a share of its "
        "gradient. Add a penalty to the loss of each sample inside the model, and multiply by a factor there (factor * "
        "losses + penalty, whose mean is then taken), decouple it (weight_decay= of the optimizer), or loop over "
        "micro-batches; return value.detach() where it is only to be looked at"
    )


class Stretch(NamedTuple):
    """Neighbouring groups of one size: groups [lo, hi), samples [first, last)."""

    lo: int
    hi: int
    first: int
    last: int


class Groups:
    """The division of one mini-batch into micro-batches."""

    def __init__(self, batch: int, micro: int, axis: int, c: Tensor | None = None, factor: float = 1.0) -> None:
        self.batch = batch  # samples
        self.micro = micro  # samples
        self.axis = axis  # where the batch is looked for first
        full, rest = divmod(batch, micro)
        self.kappa = full + (rest > 0)  # groups, the ragged one included
        self.stretches = [Stretch(0, full, 0, full * micro)] if full else []
        if rest:
            self.stretches.append(Stretch(full, full + 1, full * micro, batch))
        self.c = c  # one coefficient W/(κ W_k) per group; None where all are 1
        self.factor = factor  # W/(κn̄), on every gradient; 1 where there is no usual weight

    def axis_of(self, shape: torch.Size, leading: int | None = None) -> int | None:
        """The batch dimension among the first `leading` dimensions of `shape`, or among all; or None.

        It is the dimension `axis` if its size is B, else the first if its size is a multiple of B (B·T flattened batch
        first), else any of size B. Sizes only suggest; the check establishes it.
        """
        leading = len(shape) if leading is None else leading
        if leading > self.axis and shape[self.axis] == self.batch:
            return self.axis
        if leading > 0 and shape[0] > 0 and shape[0] % self.batch == 0:
            return 0
        for axis in range(leading):
            if shape[axis] == self.batch:
                return axis
        return None

    def split(self, x: Tensor, axis: int, event: int) -> list[Tensor]:
        """Per stretch, x as (groups, rows per group, *its last `event` dimensions)."""
        x = x.movedim(axis, 0) if axis else x
        tail = x.shape[x.ndim - event :]
        if len(self.stretches) == 1:
            return [x.reshape(self.kappa, -1, *tail)]
        return [rows.reshape(s.hi - s.lo, -1, *tail) for s, rows in zip(self.stretches, self.pieces(x), strict=True)]

    def stack(self, x: Tensor, axis: int) -> list[Tensor]:
        """Per stretch, x as (groups, samples per group, *the other dimensions), the batch moved first."""
        return self.split(x, axis, x.ndim - 1)

    def pieces(self, x: Tensor) -> list[Tensor]:
        """Per stretch, its rows of x, whose batch is first."""
        if len(self.stretches) == 1:
            return [x]
        times = x.shape[0] // self.batch
        return [x[s.first * times : s.last * times] for s in self.stretches]

    def cut(self, t: Tensor) -> list[Tensor]:
        """Per stretch, its groups of t, whose groups are first."""
        return [t] if len(self.stretches) == 1 else [t[s.lo : s.hi] for s in self.stretches]

    def merge(self, stacked: list[Tensor], axis: int) -> Tensor:
        """The inverse of `stack`."""
        x = join([y.flatten(0, 1) for y in stacked])
        return x.movedim(0, axis) if axis else x

    def coefficients(self, stretch: Stretch) -> Tensor | None:
        """The coefficients of the squares of one stretch."""
        return self.c if self.c is None or len(self.stretches) == 1 else self.c[stretch.lo : stretch.hi]

    def bounded(self, S: Tensor, dW: Tensor) -> Tensor:
        """S = Σ_k c_k s_k² that is a sum of signed terms, without what these leave below its least value.

        With dW = Σ_k s_k and Σ 1/c_k = κ that is dW²/κ (Cauchy and Schwarz). A rounding below zero would make a weight
        NaN at the next step; one below the bound would make its step larger than Adam's can be.
        """
        return torch.maximum(S, dW.to(S.dtype).square() / self.kappa)


def join(pieces: Sequence[Tensor]) -> Tensor:
    """One tensor of one tensor per stretch, in their order."""
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces))


@lru_cache(maxsize=64)
def _even(batch: int, micro: int, axis: int, factor: float) -> Groups:
    """The same one for the same division: what is found out of it can be remembered."""
    return Groups(batch, micro, axis, factor=factor)


def divided(
    batch: int, micro: int, axis: int, weights: Tensor | None, usual: float | None, ragged: str, reduction: str,
    device: torch.device | None,
) -> Groups:  # fmt: skip
    """The division of `batch` samples into groups of `micro`, as the arguments of `one_pass` ask."""
    size = min(micro, batch)
    rest, kappa = batch % size, -(-batch // size)
    if rest and ragged == "refuse":
        raise ValueError(
            f"micro_batch_size={micro} does not divide the mini-batch of {batch} samples; drop the last {rest}, or "
            f'pass ragged="weight" to count them as {rest}/{micro} of a micro-batch'
        )
    if (rest or batch < micro) and reduction == "sum":
        raise ValueError(
            f'a ragged micro-batch ({batch} samples, micro_batch_size={micro}) sums over fewer; use reduction="mean"'
        )
    if weights is not None and weights.shape[0] != batch:
        raise ValueError(f"weights has {weights.shape[0]} rows for a mini-batch of {batch} samples")
    factor = 1.0
    if weights is not None and usual is not None:
        factor, weights = float(weights.sum()) * micro / (usual * batch), None
    if weights is None and not rest:
        return _even(batch, size, axis, factor)
    w = torch.ones(batch, device=device) if weights is None else weights.detach()
    w = w.to(device, torch.float64).reshape(batch, -1).sum(1)
    ids = torch.arange(batch, device=device) // size
    W = torch.zeros(kappa, dtype=torch.float64, device=device).index_add(0, ids, w)
    # W/(κ W_k); a group of no weight has no gradient either.
    return Groups(batch, size, axis, torch.where(W > 0, W.sum() / (kappa * W), 0.0), factor)

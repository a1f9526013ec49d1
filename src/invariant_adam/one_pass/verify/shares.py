"""Does each micro-batch have its share of what the model returns: of a loss, or of the rows that a loss is made of?

Losses that are made outside of the model are for `loss` to look at.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ..groups import Groups, UnsupportedUse
from ..routing import routed
from .against_loop import evaluating
from .probe import TOLERANCE, Record, Trial


def check_losses(trial: Trial, outputs: list[Any]) -> None:
    """A scalar output must be a sum over micro-batches, and the mean of what they give alone, by their samples.

    A model that draws random numbers is let pass by the mean: alone, its micro-batches draw others.
    """
    losses = [i for i, o in enumerate(outputs) if isinstance(o, Tensor) and o.ndim == 0 and o.requires_grad]
    groups, last = trial.mini.groups, trial.mini.groups.kappa - 1
    if not losses:
        return

    def run(other: Trial) -> dict[int, Tensor]:
        return dict(other.run(lambda outs: {i: outs[i].detach() for i in losses})[1])

    first, second, both = (run(trial.exchanged(*changed)[0]) for changed in ((0,), (last,), (0, last)))
    for i in losses:
        whole, a, b, ab = (float(value.detach()) for value in (outputs[i], first[i], second[i], both[i]))
        tolerance = 10 * TOLERANCE.get(outputs[i].dtype, 1e-3)
        if abs(ab - b - a + whole) > tolerance * max(map(abs, (whole, a, b, ab))):
            raise UnsupportedUse(
                "the model's scalar output is not a mean over micro-batches: changing two of them together changes it "
                f"by {ab - whole:.6g}, one by one by {a + b - 2 * whole:.6g}. Unequal numbers of tokens need weights=; "
                "batch-wide terms (load balancing, in-batch negatives) need the loop"
            )
    if trial.mini.reduction != "mean" or groups.c is not None:
        return
    with torch.no_grad(), trial.plainly():
        alone = [run(trial.cut(k)) for k in range(groups.kappa)]
        still = not trial.cut(0).draws()
    if any(isinstance(o, Record) and o.varies for o in outputs):
        with nullcontext() if still else evaluating(trial.model):
            _check_shares(trial, losses)
    if not still:
        return
    for i in losses:
        mean, whole = sum(float(out[i]) for out in alone) / groups.kappa, float(outputs[i].detach())
        tolerance = 1e3 * TOLERANCE.get(outputs[i].dtype, 1e-4)
        if abs(mean - whole) > tolerance * max(abs(mean), abs(whole)):
            raise UnsupportedUse(
                f"the model's scalar output is not a mean over micro-batches: it is {whole:.6g}, theirs have the mean "
                f"{mean:.6g}. Unequal numbers of tokens need weights=, a sum over samples "
                'reduction="sum", batch-wide terms the loop'
            )


def _check_shares(trial: Trial, losses: list[int]) -> None:
    """Each micro-batch must have 1/κ of a loss: by the slope of the loss at the outputs that have samples.

    Where the losses of all samples are about the same, as in a new model, the mean itself does not tell their shares.
    """
    groups = trial.mini.groups

    def slopes(outputs: list[Any]) -> list[Tensor | None]:
        batched = [o for o in outputs if isinstance(o, Tensor) and o.requires_grad and o.ndim]
        found: list[Tensor | None] = []
        for i in losses if batched else ():
            found += torch.autograd.grad(outputs[i], batched, retain_graph=True, allow_unused=True)
        return found

    whole = trial.run(slopes, backward=True)[1]
    for k in range(groups.kappa if any(s is not None for s in whole) else 0):
        rows = slice(k * groups.micro, (k + 1) * groups.micro)
        with trial.plainly():
            alone = trial.cut(k).run(slopes, backward=True)[1]
        for got, own in zip(whole, alone, strict=False):
            if got is None or own is None or got.shape[1:] != own.shape[1:] or got.shape[0] != groups.batch:
                continue
            share, own = got[rows].double() * groups.kappa, own.double()
            if (share - own).norm() > (0.05 if got.dtype.itemsize < 4 else 0.01) * own.norm():
                raise UnsupportedUse(
                    f"the model's scalar output is not a mean over micro-batches: number {k} has "
                    f"{share.norm() / own.norm():.3g} of its share. Unequal numbers of tokens need weights=, a sum "
                    'over samples reduction="sum", batch-wide terms the loop'
                )


def refuse_unequal_rows(groups: Groups, outputs: list[Any]) -> None:
    """Refuse outputs of picked rows, of which micro-batches have unequal shares: a mean over them has unequal shares.

    A loss that the model returns is looked at itself.
    """
    tensors = [o for o in outputs if isinstance(o, Tensor) and o.requires_grad]
    for o in [] if any(o.ndim == 0 for o in tensors) else tensors:
        found = routed(o, groups)
        if found is None:
            continue
        counts = found.ids.bincount(minlength=groups.kappa).tolist()
        sizes = [(s.last - s.first) // (s.hi - s.lo) for s in groups.stretches for _ in range(s.lo, s.hi)]
        if any(n * groups.batch != len(found.ids) * size for n, size in zip(counts, sizes, strict=True)):
            raise UnsupportedUse(
                f"the model returns rows that it picked by index, {', '.join(map(str, counts[:4]))}"
                f"{', ...' if len(counts) > 4 else ''} of its micro-batches: a mean over them does not give each "
                "micro-batch its share. Pass weights=, the rows of each sample, or loop over micro-batches"
            )

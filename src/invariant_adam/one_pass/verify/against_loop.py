"""Hold the gradients and squares of one pass against a loop over micro-batches, cut from the same inputs.

Two micro-batches are compared where outputs can be masked to two; all, where the only output is a scalar. A model is
refused by its numbers in float64 alone, where it can be run in that.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_leaves, tree_map_only

from ..groups import UnsupportedUse
from ..routing import sample_groups
from ..weight import Entry
from .probe import Trial, close, differentiable, setting

# How far a gradient may be from the loop's, relative, by bytes per element. float64 leaves room for models that compute
# parts in float32; the others are for models that cannot run in float64, where a ReLU may turn on rounding.
AGREEMENT = {8: 1e-4, 4: 2e-2, 2: 0.15}


def check_gradients(trial: Trial) -> None:
    """Hold the gradients and squares of every parameter against a loop over a few micro-batches.

    Where another size is the batch's, a few do not tell whether one was taken for the other. Then it is also held
    against a loop over all, in the model's own precision: float64 takes several times the memory of an update, and is
    for what disagrees. A model that draws random numbers is held in eval mode, since the loop would draw others.
    """
    few = few_of(trial)
    if few < trial.mini.groups.kappa:
        try:
            with trial.of_few(few) as small:
                _check_gradients(small)
            if coincides(trial):
                _check_gradients(trial, precise=False)
            return
        except UnsupportedUse:
            pass  # perhaps by rounding alone, or because another size is that of the few
    _check_gradients(trial)


def coincides(trial: Trial) -> bool:
    """Whether another size is the batch's, so that one may be taken for the other."""
    return trial.mini.groups.batch in _sizes(trial)


def _sizes(trial: Trial) -> set[int]:
    """All sizes in sight that are not the batch's own."""
    inputs = [t for t in tree_leaves(trial.inputs) if isinstance(t, Tensor)]
    others = {n for t in inputs for d, n in enumerate(t.shape) if d != trial.mini.groups.axis}
    return others | {n for entry in trial.mini.facts.order for n in entry.param.shape}


def few_of(trial: Trial) -> int:
    """How many micro-batches to hold against the loop: four or so, unless that would make a coincidence."""
    groups = trial.mini.groups
    if groups.c is not None:
        return groups.kappa
    sizes = _sizes(trial)
    fit = [k for k in (4, 5, 6, 7, 3) if k * groups.micro < groups.batch and k * groups.micro not in sizes]
    # A length that is a multiple could be taken for the batch's as well.
    return min(fit, key=lambda k: any(n % (k * groups.micro) == 0 for n in sizes), default=groups.kappa)


def _check_gradients(trial: Trial, precise: bool = True) -> None:
    one = trial.cut(0)
    try:
        with trial.plainly():
            first = differentiable(one.outputs())
            with trial.redrawn():
                second = differentiable(one.outputs())
    except Exception as error:
        raise UnsupportedUse(
            "the model does not run on one micro-batch cut from its inputs, so it cannot be checked against the loop "
            f"({error}); give every batched input the batch in batch_dim, or pass check=False"
        ) from error
    still = all(close(a, b) for a, b in zip(first, second, strict=False))
    del first, second
    with nullcontext() if still else evaluating(trial.model):
        for double in (True, False) if precise else (False,):  # or the model insists on its own precision
            try:
                with _in_double(trial) if double else nullcontext(trial) as twin:
                    _hold_against_loop(twin)
                return
            except (RuntimeError, TypeError, NotImplementedError) as error:
                if "use_reentrant" in str(error):
                    return  # cannot be differentiated to chosen leaves; arrivals are still counted in backward
                if isinstance(error, UnsupportedUse) or not double:
                    raise


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model is in eval mode in here."""
    with ExitStack() as stack:
        for m in model.modules():
            stack.enter_context(setting(m, "training", m.training))
        model.eval()
        yield


@contextmanager
def _in_double(trial: Trial) -> Iterator[Trial]:
    """The model and its inputs in float64, so that rounding is not taken for a mistake, nor a mistake for rounding.

    In float32 one activation that rounds to the other side of a ReLU moves a gradient by a thousandth.
    """
    model = trial.model
    with ExitStack() as stack:
        for kind in {p.device.type for p in model.parameters()}:
            stack.enter_context(torch.autocast(kind, enabled=False))
        for t in (*model.parameters(), *model.buffers()):
            if t.is_floating_point():
                stack.enter_context(setting(t, "data", t.data.double()))
        for entry in trial.mini.facts.order:
            zero = torch.zeros((), dtype=torch.float64, device=entry.companion.device)
            stack.enter_context(setting(entry, "companion", zero.expand(entry.companion.shape).requires_grad_()))
        double = tree_map_only(Tensor, lambda t: t.detach().double() if t.is_floating_point() else t, trial.inputs)
        yield trial._replace(inputs=double)


def _hold_against_loop(trial: Trial) -> None:
    mini, groups, entries = trial.mini, trial.mini.groups, trial.mini.facts.order
    params, companions = [e.param for e in entries], [e.companion for e in entries]
    full = differentiable(trial.outputs())
    batched = any(groups.batch in o.shape for o in full)
    kept = sorted({0, groups.kappa - 1} if batched else set(range(groups.kappa)))
    with trial.plainly():
        small = differentiable(trial.cut(0).outputs())
    if len(small) != len(full):
        raise UnsupportedUse("the model returns other outputs for one micro-batch than for the mini-batch")
    # The same random cotangents for both, zero outside the micro-batches that are kept; one for a scalar.
    generator = torch.Generator().manual_seed(0)
    left_out = [k not in kept for k in sample_groups(groups, groups.batch, torch.device("cpu")).tolist()]
    seeds: list[Tensor] = []
    axes: list[int | None] = []
    for o, piece in zip(full, small, strict=True):
        like = [(*o.shape[:d], groups.micro, *o.shape[d + 1 :]) for d in range(o.ndim)]
        where = [d for d, n in enumerate(o.shape) if n == groups.batch and piece.shape == like[d]]
        seed = torch.randn(o.shape, generator=generator, dtype=torch.float64)
        if where:
            seed.movedim(where[0], 0)[left_out] = 0
        else:  # not samples: the loss, where there is nothing else
            seed.fill_(o.ndim == 0 and not batched)
        seeds.append(seed.to(o))
        axes.append(where[0] if where else None)
    if not any(bool(s.any()) for s in seeds):
        return
    c = [1.0] * groups.kappa if groups.c is None else groups.c.tolist()
    wants: dict[int, Tensor] = {}
    squares: dict[int, Tensor] = {}
    for k in kept:
        lo, hi = k * groups.micro, min((k + 1) * groups.micro, groups.batch)
        # A micro-batch's own mean is W/W_k = κ c_k times its share of the mini-batch's, which is what the cotangents
        # are in one pass. So are the loop's, that many times as large: a hook that clamps them is seen.
        times = groups.kappa * c[k] if mini.reduction == "mean" else 1.0
        larger = times or 1.0
        theirs = [s if d is None else larger * s.narrow(d, lo, hi - lo) for s, d in zip(seeds, axes, strict=True)]
        with trial.plainly():
            grads = _grad(trial.cut(k), params, theirs)
        share = 1 / larger if batched or times else 0.0
        for i, g in enumerate(grads):
            if g is not None:
                s = share * g.double()
                wants[i] = wants.get(i, 0) + s
                squares[i] = squares.get(i, 0) + c[k] * s.square()
    _compare(entries, _grad(trial, params + companions, seeds), wants, squares)


def _grad(trial: Trial, leaves: list[Tensor], seeds: list[Tensor]) -> list[Tensor | None]:
    def differentiate(outputs: list[Any]) -> list[Tensor | None]:
        trial.mini.probe = None  # checkpoints recompute their forward in here
        # Edges instead of parameters, which would send the whole backward through `dispatch`.
        with torch._C.DisableTorchFunctionSubclass():
            edges = [get_gradient_edge(t) for t in leaves]
        return list(torch.autograd.grad(differentiable(outputs), edges, seeds, allow_unused=True))

    return list(trial.run(differentiate)[1])


def _rms(t: Tensor) -> float:
    return float(t.double().square().mean().sqrt()) if t.numel() else 0.0


def _compare(entries: list[Entry], got: list[Any], wants: dict[int, Tensor], squares: dict[int, Tensor]) -> None:
    """Every parameter's gradient and square, by the root mean square of what differs."""
    largest = max(map(_rms, wants.values()), default=0.0)
    wrong = []
    for i, entry in enumerate(entries):
        entry.reached, entry.arrived = i in wants, 0
        entry.restart()
        if i not in wants or not entry.size:
            continue
        reduced = torch.is_autocast_enabled(entry.param.device.type)
        tolerance = AGREEMENT[2] if reduced else AGREEMENT.get(entry.param.dtype.itemsize, AGREEMENT[2])
        grad, sq = got[i], got[i + len(entries)]
        sq = None if sq is None else entry.shaped(sq)
        floor = 1e-3 * largest  # a gradient that is zero but for rounding has no scale of its own
        for kind, a, b, least in (("gradient", grad, wants[i], floor), ("square", sq, squares[i], floor**2)):
            size = max(_rms(b), least)
            difference = float("inf") if a is None else _rms(a.double() - b)
            if size and not difference <= tolerance * size:
                wrong.append(f"{entry.name}: its {kind} is off by {difference / size:.1g} (through {entry.through})")
                break
    if wrong:
        raise UnsupportedUse(
            "one pass and the loop over micro-batches disagree on this model:\n  " + "\n  ".join(wrong) + "\nEither "
            "samples of two micro-batches influence each other, or an operation is not covered, or a hook or backward "
            "of yours is not linear in the gradient (it clamps?), smaller in one pass; loop over micro-batches"
        )

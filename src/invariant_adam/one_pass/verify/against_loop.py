"""Hold the gradients and squares of one pass against a loop over micro-batches, cut from the same inputs.

A few samples are enough, since the rest of the check has looked at all of them, and take less memory than the step. The
loop and one pass are compared in float32 without autocast, some parameters at a time. A model is refused by its numbers
in float64 alone, where it can be run in that.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_leaves, tree_map_only

from ...kernels import plain_torch
from ...kernels.gemm_square import wide
from ..groups import Groups, UnsupportedUse
from ..routing import sample_groups
from ..weight import Entry
from .probe import Trial, differentiable, setting

# How far a gradient may be from the loop's, relative: in float32 (or else float64 decides) and in float64, which leaves
# room for models that compute parts in float32. In the model's own precision, by bytes per element, where it insists on
# that: a ReLU may turn on rounding.
CLOSE = 1e-4
AGREEMENT = {8: 1e-4, 4: 2e-2, 2: 0.15}
ROOM = 1 << 20  # elements that are compared at a time
SHOWN = 10  # parameters that a message names
PIECES = 8  # the parameters are compared in so many pieces,
PIECE = 1 << 18  # or fewer of at least so many elements


def check_gradients(trial: Trial, tell: Callable[[str], None]) -> None:
    """Hold the gradients and squares of every parameter against a loop over a few micro-batches.

    Where another size is the batch's, a few do not tell whether one was taken for the other. Then all micro-batches are
    looked at too, in the model's own precision: float64 takes several times the memory of an update, and is for what
    disagrees. A model that draws random numbers is held in eval mode, since the loop would draw others.
    """
    for few, micro in _fews(trial):
        try:
            with trial.of_few(few, micro) as small:
                _check_gradients(small, tell)
        except UnsupportedUse:
            continue  # perhaps because another size is that of the few
        if not coincides(trial) or _sums_agree(trial, tell):
            return
        break
    _check_gradients(trial, tell)


def coincides(trial: Trial) -> bool:
    """Whether another size is the batch's, so that one may be taken for the other."""
    return trial.mini.groups.batch in sizes(trial)


def sizes(trial: Trial) -> set[int]:
    """All sizes in sight that are not the batch's own."""
    inputs = [t for t in tree_leaves(trial.inputs) if isinstance(t, Tensor)]
    others = {n for t in inputs for d, n in enumerate(t.shape) if d != trial.mini.groups.axis}
    return others | {n for entry in trial.mini.facts.order for n in entry.param.shape}


def few_of(trial: Trial) -> int:
    """How many micro-batches to hold against the loop: two or so, unless that would make a coincidence."""
    return next((few for few, _ in _fews(trial)), trial.mini.groups.kappa)


def _fews(trial: Trial) -> list[tuple[int, int]]:
    """Numbers of micro-batches, and of the samples in each, that are few of all; the best ones first.

    Where micro-batches are large they are cut to fewer samples, as many as a batch norm needs: in float64, a sixteenth
    of the batch takes a quarter of the memory that all of it takes in bfloat16. An even number stays even, and an odd
    one odd: what is done to every other sample is the loop's where M is even.
    """
    groups, taken = trial.mini.groups, sizes(trial)
    least = max(2, groups.batch // 32)
    micro = groups.micro if groups.c is not None else min(groups.micro, least + (least - groups.micro) % 2)
    fit = [k for k in (2, 3, 4, 5, 6, 7) if k * micro < groups.batch and k * micro not in taken]
    # A length that is a multiple could be taken for the batch's as well.
    fit.sort(key=lambda k: any(n % (k * micro) == 0 for n in taken) and 4 * k * micro < groups.batch)
    return [(k, micro) for k in fit[:3]]


def _sums_agree(trial: Trial, tell: Callable[[str], None]) -> bool:
    """Whether all micro-batches together, in the model's own precision, show no row in another one's sum.

    Held against a loop, a deep model in bfloat16 cannot show it: the loop rounds otherwise, and one activation that
    rounds to the other side of a ReLU moves all before it. So the micro-batches are made alike. Then each has the same
    gradient g, whatever it is rounded to, and κ Σ g² = (Σ g)² in one run. Sums over rows that were taken for the
    batch's are not alike. What treats all micro-batches the same way is for the few to show. Weighted micro-batches and
    a short last one are held against the loop.
    """
    groups = trial.mini.groups
    with _still(trial):
        try:
            if groups.c is None and groups.kappa * groups.micro == groups.batch:
                tell(f"its sums over {groups.batch} samples, all micro-batches alike")
                found = _differences_of_alike(trial.with_rows(partial(_alike, micro=groups.micro)))
                if not any(difference.size[0] for difference in found):
                    return False  # the first micro-batch has no gradient, and zeros agree with anything
                _judge(found, None)
            else:
                tell(f"its gradients beside those of a loop over {groups.batch} samples")
                _hold_against_loop(trial, None)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, TypeError, NotImplementedError) as error:
            return _is_reentrant(error)  # what else it is, the loop decides; rounding, perhaps
        finally:
            _restart(trial.mini.facts.order)
    return True


def _alike(rows: Tensor, micro: int) -> Tensor:
    """The rows of the first micro-batch in the place of all others'."""
    new = rows.clone()  # in the memory format that it has
    for lo in range(micro, len(rows), micro):
        new[lo : lo + micro] = rows[:micro]
    return new


def _differences_of_alike(trial: Trial) -> list[Difference]:
    """How far κ times the square of each parameter is from the square of its gradient."""
    groups, entries = trial.mini.groups, trial.mini.facts.order
    outputs = differentiable(trial.outputs())
    axes = _batch_axes(trial, outputs)
    batched = any(axis is not None for axis in axes)
    generator = torch.Generator().manual_seed(0)
    seeds = []
    for o, axis in zip(outputs, axes, strict=True):
        if axis is None:
            seeds.append(torch.full_like(o, float(o.ndim == 0 and not batched)))
            continue
        rows = torch.randn((groups.batch, *o.shape[:axis], *o.shape[axis + 1 :]), generator=generator)
        seeds.append(_alike(rows, groups.micro).movedim(0, axis).to(o))
    found: list[Difference] = []
    for part in _pieces(entries):
        got = _grad(trial, [e.param for e in part] + [e.companion for e in part], seeds)
        for i, entry in enumerate(part):
            g, arrived = got[i], got[i + len(part)]
            got[i] = got[i + len(part)] = None
            if g is not None and entry.size:
                sq = None if arrived is None else entry.shaped(arrived).mul(groups.kappa)
                g = g.to(wide(g.dtype))
                found.append(Difference.of(entry, (g, sq), (g, g.square())))
    return found


def _batch_axes(trial: Trial, outputs: list[Tensor]) -> list[int | None]:
    """Which dimension of each output is the batch's: a micro-batch's output is as large as a micro-batch there."""
    groups = trial.mini.groups
    with trial.plainly():
        small = differentiable(trial.cut(0).outputs())
    if len(small) != len(outputs):
        raise UnsupportedUse("the model returns other outputs for one micro-batch than for the mini-batch")
    found = []
    for o, piece in zip(outputs, small, strict=True):
        like = [(*o.shape[:d], groups.micro, *o.shape[d + 1 :]) for d in range(o.ndim)]
        fit = (d for d, n in enumerate(o.shape) if n == groups.batch and piece.shape == like[d])
        found.append(next(fit, None))
    return found


@contextmanager
def _still(trial: Trial) -> Iterator[None]:
    """The model draws no random numbers in here: it is in eval mode, if it does."""
    try:
        with trial.plainly():
            still = not trial.cut(0).draws()
    except Exception as error:
        raise UnsupportedUse(
            "the model does not run on one micro-batch cut from its inputs, so it cannot be checked against the loop "
            f"({error}); give every batched input the batch in batch_dim, or pass check=False"
        ) from error
    with nullcontext() if still else evaluating(trial.model):
        yield


def _check_gradients(trial: Trial, tell: Callable[[str], None]) -> None:
    own = {entry.param.dtype for entry in trial.mini.facts.order}
    with _still(trial):
        wider: tuple[torch.dtype | None, ...] = (torch.float64,) if own == {torch.float64} else _WIDER
        for dtype in (*wider, None):
            try:
                how = "its own precision" if dtype is None else str(dtype).removeprefix("torch.")
                tell(f"its gradients beside those of a loop over {trial.mini.groups.batch} samples, in {how}")
                with nullcontext(trial) if dtype is None else _in(dtype, trial) as twin:
                    _hold_against_loop(twin, CLOSE if dtype is not None else None)
                return
            except (RuntimeError, TypeError, NotImplementedError) as error:
                if _is_reentrant(error):
                    return
                if dtype is torch.float32:
                    continue  # float64 decides
                if isinstance(error, UnsupportedUse) or dtype is None:
                    raise  # else the model insists on its own precision


_WIDER = (torch.float32, torch.float64)


def _is_reentrant(error: Exception) -> bool:
    """Whether a checkpoint cannot be differentiated to chosen leaves; arrivals are still counted in the backward."""
    return "use_reentrant" in str(error)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model is in eval mode in here."""
    with ExitStack() as stack:
        for m in model.modules():
            stack.enter_context(setting(m, "training", m.training))
        model.eval()
        yield


@contextmanager
def _in(dtype: torch.dtype, trial: Trial) -> Iterator[Trial]:
    """The model and its inputs in this dtype, or a wider one of their own, and no autocast.

    Rounding is then not taken for a mistake, nor a mistake for rounding: in float32 one activation that rounds to the
    other side of a ReLU moves a gradient by a thousandth, and float64 decides.
    """
    model = trial.model

    def widened(t: Tensor) -> Tensor:
        return t.to(dtype) if t.is_floating_point() and t.dtype.itemsize < dtype.itemsize else t

    kinds = {p.device.type for p in model.parameters()}
    with ExitStack() as stack:
        stack.enter_context(plain_torch())  # as in float64, which Triton's kernels do not take
        for kind in kinds:
            stack.enter_context(torch.autocast(kind, enabled=False))
        if "cuda" in kinds:
            stack.enter_context(_without_tf32())
        for t in (*model.parameters(), *model.buffers()):
            if widened(t.data) is not t.data:
                stack.enter_context(setting(t, "data", widened(t.data)))
        for entry in trial.mini.facts.order:
            if entry.companion.dtype.itemsize < dtype.itemsize:
                zero = torch.zeros((), dtype=dtype, device=entry.companion.device)
                stack.enter_context(setting(entry, "companion", zero.expand(entry.companion.shape).requires_grad_()))
        yield trial._replace(inputs=tree_map_only(Tensor, lambda t: widened(t.detach()), trial.inputs))


@contextmanager
def _without_tf32() -> Iterator[None]:
    """Products and convolutions in float32 proper; where torch lets nobody choose, float64 decides more often."""
    with ExitStack() as stack, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch has an older and a newer way to say it
        with suppress(RuntimeError):
            before = torch.get_float32_matmul_precision()
            torch.set_float32_matmul_precision("highest")
            stack.callback(torch.set_float32_matmul_precision, before)
            stack.enter_context(setting(torch.backends.cudnn, "allow_tf32", False))
        yield


def _hold_against_loop(trial: Trial, tolerance: float | None) -> None:
    """Compare one pass with a loop, both from the same cotangents, and refuse what is further apart than `tolerance`.

    The cotangents stand for the gradient of a loss: the model's outputs are there, and its loss may not be.
    """
    groups, entries = trial.mini.groups, trial.mini.facts.order
    outputs = differentiable(trial.outputs())
    batched = any(groups.batch in o.shape for o in outputs)
    # Two neighbours and the last: what a model does to every other sample, by its place, is otherwise the same for all.
    kept = sorted({0, 1, groups.kappa - 1} if batched else set(range(groups.kappa)))
    axes = _batch_axes(trial, outputs)
    seeds = _cotangents(groups, outputs, axes, kept, batched)
    if not any(bool(s.any()) for s in seeds):
        return
    turns = [_turn(trial, k, seeds, axes, batched) for k in kept]
    found: list[Difference] = []
    for part in _pieces(entries):
        wants = _loop(trial, [e.param for e in part], turns)
        got = _grad(trial, [e.param for e in part] + [e.companion for e in part], seeds)
        for i, entry in enumerate(part):
            entry.reached = i in wants
            if i in wants and entry.size:
                arrived = got[i + len(part)]
                sq = None if arrived is None else entry.shaped(arrived)
                found.append(Difference.of(entry, (got[i], sq), wants.pop(i)))
            got[i] = got[i + len(part)] = None  # freed one by one
    _restart(entries)
    _judge(found, tolerance, partial(_strays, trial, seeds, axes) if batched else None)


def _cotangents(
    groups: Groups, outputs: list[Tensor], axes: list[int | None], kept: list[int], batched: bool
) -> list[Tensor]:
    """Random cotangents of the outputs, zero outside of the micro-batches that are kept.

    A scalar, the loss, has the cotangent 1 if no output has samples (`batched`); beside such outputs it has 0.
    """
    generator = torch.Generator().manual_seed(0)
    left_out = [k not in kept for k in sample_groups(groups, groups.batch, torch.device("cpu")).tolist()]
    seeds: list[Tensor] = []
    for o, axis in zip(outputs, axes, strict=True):
        seed = torch.randn(o.shape, generator=generator, dtype=torch.float64)
        if axis is not None:
            seed.movedim(axis, 0)[left_out] = 0
        else:
            seed.fill_(o.ndim == 0 and not batched)
        seeds.append(seed.to(o))
    return seeds


class Turn(NamedTuple):
    """What the loop does with one micro-batch."""

    k: int
    seeds: list[Tensor]  # the cotangents of its outputs
    share: float  # times its gradient: its part of what one pass has
    weight: float  # c_k, of its square


def _turn(trial: Trial, k: int, seeds: list[Tensor], axes: list[int | None], batched: bool) -> Turn:
    """The turn of micro-batch k, from the cotangents of the mini-batch.

    A micro-batch's own mean is W/W_k = κ c_k times its share of the mini-batch's, which is what the cotangents are in
    one pass. So are the loop's, that many times as large: a hook that clamps them is seen.
    """
    groups = trial.mini.groups
    lo, hi = k * groups.micro, min((k + 1) * groups.micro, groups.batch)
    weight = _weight(groups, k)
    times = groups.kappa * weight if trial.mini.reduction == "mean" else 1.0
    larger = times or 1.0
    own = [s if d is None else larger * s.narrow(d, lo, hi - lo) for s, d in zip(seeds, axes, strict=True)]
    return Turn(k, own, 1 / larger if batched or times else 0.0, weight)


def _weight(groups: Groups, k: int) -> float:
    """c_k, the weight of micro-batch k's square."""
    return 1.0 if groups.c is None else float(groups.c[k])


def _loop(trial: Trial, params: list[Tensor], turns: list[Turn]) -> dict[int, tuple[Tensor, Tensor]]:
    """Σ s_k and Σ c_k s_k² over the turns of a loop, by the number of a parameter; none of those without a gradient."""
    sums: dict[int, tuple[Tensor, Tensor]] = {}
    for k, seeds, share, weight in turns:
        with trial.plainly():
            grads = _grad(trial.cut(k), params, seeds)
        for i, g in enumerate(grads):
            if g is None:
                continue
            own = share * g.to(wide(g.dtype))
            if i in sums:
                sums[i][0].add_(own)
                sums[i][1].add_(own.square_().mul_(weight))
            else:
                sums[i] = own, own.square().mul_(weight)
        del grads  # before the next turn makes its own
    return sums


def _strays(trial: Trial, seeds: list[Tensor], axes: list[int | None], entry: Entry) -> bool:
    """Whether the cotangents of one micro-batch's outputs arrive at another's rows: then Σ c_k s_k² ≠ c_0 g²."""
    groups = trial.mini.groups
    own = [s if d is None else torch.zeros_like(s) for s, d in zip(seeds, axes, strict=True)]
    for mine, s, d in zip(own, seeds, axes, strict=True):
        if d is not None:
            mine.narrow(d, 0, groups.micro).copy_(s.narrow(d, 0, groups.micro))
    g, arrived = _grad(trial, [entry.param, entry.companion], own)
    _restart(trial.mini.facts.order)
    if g is None or arrived is None:
        return False
    g = g.to(wide(g.dtype))
    return _rms(entry.shaped(arrived), _weight(groups, 0) * g.square()) > 0.01 * _rms(g.square())


def _restart(entries: list[Entry]) -> None:
    """Forget what has arrived: each backward has passed by all of them."""
    for entry in entries:
        entry.arrived = 0
        entry.restart()


def _pieces(entries: list[Entry]) -> Iterator[list[Entry]]:
    """The parameters, some at a time: all their gradients at once, of the loop and of one pass, would be many."""
    room = max(PIECE, sum(e.size for e in entries) // PIECES)
    piece: list[Entry] = []
    for entry in entries:
        if piece and sum(e.size for e in piece) + entry.size > room:
            yield piece
            piece = []
        piece.append(entry)
    yield piece


def _grad(trial: Trial, leaves: list[Tensor], seeds: list[Tensor]) -> list[Tensor | None]:
    def differentiate(outputs: list[Any]) -> list[Tensor | None]:
        trial.mini.probe = None  # checkpoints recompute their forward in here
        return differentiated(differentiable(outputs), leaves, seeds)

    found = list(trial.run(differentiate, backward=True)[1])
    with torch._C.DisableTorchFunctionSubclass():
        entries = trial.mini.facts.order
        left = [e.name for e in entries if e.param.grad is not None or e.companion.grad is not None]
        for e in entries if left else ():
            e.param.grad = e.companion.grad = None
    if left:  # although gradients were only asked for
        raise UnsupportedUse(
            f"{left[0]} gets its gradient from a backward that runs inside of the model's backward (a reversible "
            "layer? another custom autograd.Function?), which cannot be held against a loop; loop over micro-batches"
        )
    return found


def differentiated(outputs: list[Tensor], leaves: list[Tensor], seeds: list[Tensor]) -> list[Tensor | None]:
    """The gradients that leaves get from these cotangents of outputs."""
    # Edges instead of parameters, which would send the whole backward through `dispatch`.
    with torch._C.DisableTorchFunctionSubclass():
        edges = [get_gradient_edge(t) for t in leaves]
    grads = torch.autograd.grad(outputs, edges, seeds, allow_unused=True)
    return [g.to_dense() if g is not None and g.is_sparse else g for g in grads]


def _rms(t: Tensor, other: Tensor | None = None) -> float:
    """The root mean square of t, or of its difference to another, without a copy of either in float64."""
    rest = [None] * (t.numel() // ROOM + 1) if other is None else other.reshape(-1).split(ROOM)
    pieces = zip(t.reshape(-1).split(ROOM), rest, strict=False)
    total = sum((x.double() if y is None else x.double() - y).square().sum() for x, y in pieces)
    return math.sqrt(float(total) / max(1, t.numel()))


class Difference(NamedTuple):
    """How far a parameter's gradient and square are from the loop's, each by its root mean square, and how large."""

    entry: Entry
    apart: tuple[float, float]
    size: tuple[float, float]

    @classmethod
    def of(cls, entry: Entry, got: tuple[Any, Any], wants: tuple[Tensor, Tensor]) -> Difference:
        """Compare, where nothing has arrived as well."""
        sizes = _rms(wants[0]), _rms(wants[1])
        far = [float("inf") if a is None else _rms(a, b) for a, b in zip(got, wants, strict=True)]
        return cls(entry, (far[0], far[1]), sizes)


def _judge(found: list[Difference], tolerance: float | None, strays: Callable[[Entry], bool] | None = None) -> None:
    """Refuse what is further apart than `tolerance`, or than its own precision allows."""
    largest = max((d.size[0] for d in found), default=0.0)
    no_numbers = [d.entry.name for d in found if any(map(math.isnan, (*d.apart, *d.size)))]
    if no_numbers:
        raise UnsupportedUse(
            "the mini-batch on which one_pass would check the model gives gradients that are not finite "
            f"({', '.join(no_numbers[:5])}{', ...' if len(no_numbers) > 5 else ''}), which cannot be compared; look "
            "for NaN and infinities in samples and weights, leave this mini-batch out, or loop over micro-batches"
        )
    wrong, first = [], None
    for entry, apart, sizes in found:
        own = entry.param.dtype.itemsize
        reduced = torch.is_autocast_enabled(entry.param.device.type) or own not in AGREEMENT
        limit = AGREEMENT[2 if reduced else own] if tolerance is None else tolerance
        floor = 1e-3 * largest  # a gradient that is zero but for rounding has no scale of its own
        for kind, far, size, least in zip(("gradient", "square"), apart, sizes, (floor, floor**2), strict=True):
            scale = max(size, least)
            if scale and not far <= limit * scale:
                how = f"is off by {far / scale:.1g}" if far < math.inf else "is missing"
                wrong.append(f"{entry.name}: its {kind} {how} (through {entry.through})")
                first = first or entry
                break
    if first is not None:
        why = (
            "the gradient of one micro-batch's outputs arrives at rows of another: samples meet inside the model, as "
            "in attention or a product over the batch, or rows are not where batch_dim says"
            if strays is not None and strays(first)
            else "either samples of two micro-batches influence each other, or an operation is not covered, or a hook "
            "or backward of yours is not linear in the gradient (it clamps?), smaller in one pass"
        )
        raise UnsupportedUse(
            f"one pass and the loop over micro-batches disagree on this model: {why}; loop over micro-batches."
            + "".join(f"\n  {each}" for each in wrong[:SHOWN])
            + f"\n  and {len(wrong) - SHOWN} more" * (len(wrong) > SHOWN)
        )

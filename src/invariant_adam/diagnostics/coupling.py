"""Find what lets samples of one micro-batch see each other, by exchanging a sample's neighbours.

A micro-batch is run, forward and backward, and then again with one of its samples kept and all others replaced. Where
samples are apart, nothing that belongs to the kept sample changes:

    a module whose input rows of the kept samples are as before and whose output rows are not: it couples samples;
    a module whose output rows are as before and whose gradient there is not: what comes after it, the loss, does.

A gradient that changes by one factor alone is that of a loss with a common divisor, such as the number of tokens.
The same micro-batch run twice tells what is random without a seed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from itertools import takewhile
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from .runs import LossFn, loss_of, randomness, seeded, unchanged
from .samples import Batch, cut, length

# How much may change, relative to the largest value, by bytes per element: rows of one shape round alike.
_ALIKE = {8: 1e-7, 4: 1e-4, 2: 2e-2, 1: 0.2}

Keep = tuple[int, ...]  # the samples that are not replaced
Rows = tuple[tuple[int, int], Tensor]  # how the sample was found in a tensor, and what is there


class Found(NamedTuple):
    """What couples samples, or is random without a seed."""

    kind: str  # "layer", "loss", "factor" or "random"
    where: str  # the module's name; "" for the model itself
    what: str  # the module's class
    alike: int = 0  # other modules of that class


class _Seen(NamedTuple):
    """What one comparison of runs has shown."""

    kind: str  # as in `Found`
    where: str
    evaluated: bool = False  # of a loss: seen in eval mode, where the layers that couple samples are switched off


class _Call(NamedTuple):
    """One call of a module: what the kept samples have in its inputs and outputs."""

    name: str
    inputs: list[list[Rows]]
    outputs: list[list[Rows]]
    sums: list[Tensor]  # of each whole output, by which one is known that no sample has a part in
    grads: list[list[Rows] | None]  # of the outputs; filled in backward


def find_coupling(model: nn.Module, loss_fn: LossFn, batch: Batch, other: Batch, seed: int) -> list[Found]:
    """Find the modules that couple samples, a loss that does, and modules that are random without a seed.

    Args:
        model: as it is trained; its modes, buffers and random numbers are given back as they were.
        loss_fn: `loss_fn(model, batch)`.
        batch: a micro-batch, on the model's device.
        other: where the other neighbours come from.
        seed: of the random numbers, the same for each run of the model.
    """
    seen: list[_Seen] = []
    with randomness(), torch.compiler.set_stance("force_eager"):
        samples = length(batch)
        keeps: list[Keep] = [(i,) for i in sorted({0, samples // 2, samples - 1})]
        if samples > 2:  # several samples tell a factor that they share from one that is each one's own
            keeps.append(tuple(range(0, samples, 2)))
        for keep in keeps:
            run = _runner(model, loss_fn, seed, samples, keep)
            base, again = run(batch), run(batch)
            more = [run(batch) for _ in range(4)] if keep is keeps[0] else []  # what is random now and then
            random = [name for each in (again, *more) for name in _random(base, each)]
            seen += [_Seen("random", name) for name in random]
            if samples == 1:
                break
            exchanged = _neighbours_changed(batch, other, keep)
            changed = run(exchanged)
            layers = _layers(base, again, changed)
            seen += [_Seen("layer", name) for name in layers]
            if layers:  # a loss behind them is seen where they are switched off
                base, again, changed = (run(b, train=False) for b in (batch, batch, exchanged))
                if _layers(base, again, changed):
                    continue
            kind, where = ("", "") if random else _loss(base, again, changed, len(keep) == 1 and samples > 2)
            if kind:
                seen.append(_Seen(kind, where, bool(layers)))
    return _causes(model, seen)


def _causes(model: nn.Module, seen: list[_Seen]) -> list[Found]:
    """The causes in what was seen: a cause changes what comes after it too, which is not named beside it."""
    classes = {name: type(module).__name__ for name, module in model.named_modules()}
    count = Counter(classes.values())
    found: dict[tuple[str, str], Found] = {}

    def add(kind: str, name: str) -> None:
        what = classes.get(name, "")
        key = kind, what if kind == "layer" else name  # layers of one class are named once
        found.setdefault(key, Found(kind, name, what, count[what] - 1))

    for kind, name, _ in seen:
        if kind in ("random", "layer"):
            add(kind, name)
    # What is random by itself differs without any exchange, and so does all that comes after it.
    if any(one.kind == "random" for one in found.values()):
        known = {name for name, module in model.named_modules() if isinstance(module, _BatchNorm)}
        return [one for one in found.values() if one.kind == "random" or one.where in known]
    # A layer that couples samples changes their gradients too, and those of some places alone, as a cumsum does.
    # Beside such a layer a loss counts only if it was seen while the layer was switched off.
    behind = any(one.kind == "layer" for one in found.values())
    for kind in ("loss", "factor"):
        names = sorted(name for k, name, evaluated in seen if k == kind and evaluated >= behind)
        if names:
            add(kind, names[0])  # the outermost
            break
    return list(found.values())


def writes_state(model: nn.Module, loss_fn: LossFn, batch: Batch, seed: int) -> list[str]:
    """The buffers that a forward in training changes."""
    with randomness(), unchanged(model), torch.no_grad():
        seeded(seed)
        before = {name: b.clone() for name, b in model.named_buffers()}
        loss_fn(model, batch)
        return [
            name
            for name, b in model.named_buffers()
            if name not in before or b.shape != before[name].shape or not torch.equal(b, before[name])
        ]


def draws(model: nn.Module, loss_fn: LossFn, batch: Batch, seed: int) -> bool:
    """Whether a forward in training draws random numbers."""
    with randomness(), unchanged(model), torch.no_grad():
        seeded(seed)
        before = _states()
        loss_fn(model, batch)
        return any(not torch.equal(a, b) for a, b in zip(before, _states(), strict=True))


def _states() -> list[Tensor]:
    cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if cuda else [])]


def _neighbours_changed(batch: Batch, other: Batch, keep: Keep) -> Batch:
    """The batch with all samples replaced but some: by those of another, or by one of its own where shapes differ."""
    samples = length(batch)
    leaves, structure = tree_flatten(batch)
    others, other_structure = tree_flatten(other)
    fits = structure == other_structure and all(
        not isinstance(a, Tensor) or a.shape == b.shape for a, b in zip(leaves, others, strict=True)
    )
    if not fits or other is batch:
        return cut(batch, [i if i in keep else (keep[0] + 1) % samples for i in range(samples)])
    rows = []
    for a, b in zip(leaves, others, strict=True):
        if isinstance(a, Tensor) and a.ndim:
            b = b.clone()
            b[list(keep)] = a[list(keep)]
        rows.append(b)
    return tree_unflatten(rows, structure)


# ---------------------------------------------------------------- one run, and what it leaves of the kept samples


def _runner(model: nn.Module, loss_fn: LossFn, seed: int, samples: int, keep: Keep) -> Callable[..., list[_Call]]:
    """A function that runs a batch forward and backward and returns what belongs to the samples at `keep`."""

    def run(batch: Batch, train: bool = True) -> list[_Call]:
        calls: list[_Call] = []
        with unchanged(model), _recording(model, calls, samples, keep), torch.enable_grad():
            if not train:
                model.eval()
            seeded(seed)
            loss = loss_of(loss_fn, model, batch)
            params = [p for p in model.parameters() if p.requires_grad]
            torch.autograd.grad(loss.sum(), params, allow_unused=True)  # not backward: nobody's hooks are to see it
        return calls

    return run


@contextmanager
def _recording(model: nn.Module, calls: list[_Call], samples: int, keep: Keep) -> Iterator[None]:
    entered: list[list[list[Rows]]] = []  # the inputs of the calls under way, before anything is written over them

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        entered.append([_rows(t, samples, keep) for t in _tensors((args, kwargs))])

    def hook(name: str) -> Callable[..., None]:
        def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            outputs = [t for t in _tensors(output) if t.requires_grad]  # others have no part in the loss
            grads: list[list[Rows] | None] = [None] * len(outputs)
            rows = [_rows(t, samples, keep) for t in outputs]
            sums = [torch.stack([t.detach().double().sum(), t.detach().double().square().sum()]) for t in outputs]
            calls.append(_Call(name, entered.pop(), rows, sums, grads))
            for i, t in enumerate(outputs):
                t.register_hook(lambda g, i=i: _note_gradient(grads, i, g, samples, keep))

        return note

    modules = {n: m for n, m in model.named_modules() if not isinstance(m, torch.jit.ScriptModule)}
    handles = [m.register_forward_pre_hook(enter, with_kwargs=True) for m in modules.values()]
    handles += [m.register_forward_hook(hook(name), with_kwargs=True) for name, m in modules.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _note_gradient(grads: list[list[Rows] | None], i: int, g: Tensor, samples: int, keep: Keep) -> None:
    grads[i] = _rows(g, samples, keep)


def _tensors(value: Any) -> list[Tensor]:
    """The tensors in what a module takes or returns."""
    found: list[Tensor] = []
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif isinstance(leaf, Mapping):
            found += _tensors(list(leaf.values()))
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            found += _tensors([getattr(leaf, f.name) for f in fields(leaf)])
    return found


def _rows(t: Tensor, samples: int, keep: Keep) -> list[Rows]:
    """What a tensor has of one sample, in each way in which its shape may hold the samples.

    A dimension is that of the samples, or has several rows for each of them, one sample after the other or in turn.
    A tensor with none of these is taken as a whole.
    """
    if t.layout != torch.strided or t.is_nested:
        return []
    t = t.detach()
    found: list[Rows] = []
    for d, n in enumerate(t.shape):
        if n == 0 or n % samples:
            continue
        each, rows = n // samples, torch.tensor(keep, device=t.device)
        found.append(((d, 0), t.unflatten(d, (samples, each)).index_select(d, rows)))
        if each > 1:
            found.append(((d, 1), t.unflatten(d, (each, samples)).index_select(d + 1, rows)))
    return found or [((-1, 0), t.clone())]


# ---------------------------------------------------------------- comparing runs


def _same(a: list[Rows], b: list[Rows], noise: list[Rows]) -> bool:
    """Whether a sample's rows are the same in two runs, in one of the ways in which they may be its rows."""
    if len(a) != len(b):
        return False
    if not a:
        return True
    return any(
        x.shape == y.shape and _difference(x, y) <= _allowed(x) + 10 * _difference(x, z)
        for (_, x), (_, y), (_, z) in zip(a, b, noise, strict=True)
    )


def _difference(x: Tensor, y: Tensor) -> float:
    if x.shape != y.shape or not x.numel():
        return 0.0
    if not x.is_floating_point():
        return float((x != y).any())
    difference = (x.double() - y.double()).abs()
    # Both masked with the same infinity, or both not a number.
    return float(torch.where((x == y) | (x.isnan() & y.isnan()), 0.0, difference).nan_to_num(torch.inf).max())


def _allowed(x: Tensor) -> float:
    if not x.is_floating_point():
        return 0.5
    finite = x[x.isfinite()]
    return _ALIKE.get(x.dtype.itemsize, 1e-4) * float(finite.abs().max()) if finite.numel() else 0.0


def _both(first: list[_Call], second: list[_Call], third: list[_Call]) -> Iterator[tuple[_Call, _Call, _Call]]:
    for a, b, c in zip(first, second, third, strict=False):
        if not a.name == b.name == c.name:
            return  # the model took another way
        yield a, b, c


def _alike(a: list[list[Rows]], b: list[list[Rows]], noise: list[list[Rows]]) -> bool:
    return len(a) == len(b) and all(_same(x, y, z) for x, y, z in zip(a, b, noise, strict=True))


def _random(base: list[_Call], again: list[_Call]) -> list[str]:
    """The innermost modules that give other outputs, or take another way, for the same inputs and seed."""
    found: list[str] = []
    for a, b in zip(base, again, strict=False):
        if a.name != b.name:
            parts = zip(f"{a.name}.".split("."), f"{b.name}.".split("."), strict=False)
            return [*found, ".".join(x for x, _ in takewhile(lambda both: both[0] == both[1], parts))]
        if not _alike(a.inputs, b.inputs, a.inputs) or _alike(a.outputs, b.outputs, a.outputs):
            continue
        if not any(_inside(name, a.name) for name in found):
            found.append(a.name)
    return found


def _layers(base: list[_Call], again: list[_Call], changed: list[_Call]) -> list[str]:
    """The innermost modules whose output for the kept samples changes and whose input does not."""
    found: list[str] = []
    for a, noise, b in _both(base, again, changed):
        # Outputs without rows, such as a loss, are no sample's.
        rows = [i for i, x in enumerate(a.outputs) if x and x[0][0][0] >= 0]
        outputs = [[each.outputs[i] for i in rows if i < len(each.outputs)] for each in (a, b, noise)]
        if not _alike(a.inputs, b.inputs, noise.inputs) or _alike(*outputs):
            continue
        if not any(_inside(name, a.name) for name in found):
            found.append(a.name)
    return found


def _inside(name: str, outer: str) -> bool:
    return not outer or name == outer or name.startswith(outer + ".")


def _loss(base: list[_Call], again: list[_Call], changed: list[_Call], single: bool) -> tuple[str, str]:
    """Whether what follows a module couples samples: the kept samples' gradient of its output must not change.

    Returns a kind, "" for none, and the last module before what couples them.

    Args:
        base: a run.
        again: the same once more.
        changed: with other neighbours.
        single: one sample is kept, and a single number of it is always a multiple of another.
    """
    factor = ("", "")
    for a, noise, b in reversed(list(_both(base, again, changed))):
        if not a.outputs or len(a.grads) != len(b.grads) or len(a.grads) != len(noise.grads):
            continue
        for i, rows in enumerate(a.outputs):
            x, y, z = a.grads[i], b.grads[i], noise.grads[i]
            constant = torch.equal(a.sums[i], b.sums[i])  # such as an embedding of places
            if x is None or y is None or z is None or constant or not rows or rows[0][0][0] < 0 or _same(x, y, z):
                continue
            if single and all(r.numel() < 2 for _, r in x):
                continue
            if not _proportional(x, y):
                return "loss", a.name
            factor = factor if factor[0] else ("factor", a.name)
    return factor


def _proportional(a: list[Rows], b: list[Rows]) -> bool:
    """Whether all that changed is a factor: what is left of the change without it is small, in one way to see rows."""
    for (_, x), (_, y) in zip(a, b, strict=False):
        if x.shape != y.shape or x.numel() < 2:
            continue
        u, v = x.double().flatten(), y.double().flatten()
        factor = (u @ v) / (u @ u).clamp_min(1e-300)
        rounding = 0.2 * _ALIKE.get(x.dtype.itemsize, 1e-4) * float(u.norm())
        if float((v - factor * u).norm()) <= 0.05 * float((v - u).norm()) + rounding:
            return True
    return False

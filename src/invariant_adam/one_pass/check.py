"""Establish, by running the model, that the rows a parameter sees stay with their samples.

Sizes alone cannot tell a batch from a sequence of the same length, or rows in order from rows that
were permuted. So the first time a model meets a shape of input it is run again with one micro-batch
exchanged for another's samples:

    every row that a rule assigns to another micro-batch must be as before;
    what a rule takes for a constant must be as before;
    the model's outputs for other samples must be as before (nothing couples samples);
    a scalar output (a loss) must be a sum over micro-batches: f(a',b') - f(a',b) - f(a,b') + f(a,b)
    = 0.

Then the gradients and squares themselves are held against a loop over micro-batches, cut from the
inputs (two of them, where outputs can be masked to two; all, where the only output is a scalar).
The runs leave buffers, random generators and gradients as they were.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.utils._pytree import tree_leaves, tree_map

from .groups import Groups, UnsupportedUse
from .routing import sample_groups

if TYPE_CHECKING:
    from .engine import Engine
    from .handles import Entry

# How far values that should be equal may differ, relative to the largest: rounding of the same
# sums in another order.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}


# How far a gradient may be from the loop's, relative, by bytes per element. float64 leaves room for models that compute
# parts in float32; the others are for models that cannot run in float64, where a ReLU may turn on rounding.
AGREEMENT = {8: 1e-4, 4: 2e-2, 2: 0.15}


class Record(NamedTuple):
    """One use of a parameter: the tensor it met, and where its batch is."""

    x: Tensor
    ids: Tensor | None
    axis: int | None  # None and no ids: taken for a constant
    varies: bool = True  # x is differentiable, so it comes from the batch


class Probe:
    """What the rules saw in one run."""

    def __init__(self, groups: Groups) -> None:
        self.groups = groups
        self.records: dict[tuple[str, str], list[Record]] = defaultdict(list)

    def rows(self, names: str, name: str, x: Tensor, ids: Tensor | None, axis: int | None) -> None:
        """Record a use with the batch."""
        self.records[names, name].append(Record(x.detach(), ids, axis, x.requires_grad))

    def constant(self, names: str, name: str, x: Tensor) -> None:
        """Record a use with what is taken for a constant."""
        self.records[names, name].append(Record(x.detach(), None, None))

    def compare(
        self,
        call: Any,
        name: str,
        names: str,
        leaves: list[Any],
        handles: list[Any],
        batched: list[bool],
        out: Any,
    ) -> None:
        """A fallback: record its inputs, and hold its result against the plain operation's."""
        for a, h, b in zip(leaves, handles, batched, strict=True):
            if b:
                self.rows(names, name, a, None, self.groups.axis_of(a.shape, a.ndim))
            elif isinstance(a, Tensor) and h is None:
                self.constant(names, name, a)
        with torch.no_grad():
            plain = call(
                *[
                    h.value if h is not None else a
                    for a, h, b in zip(leaves, handles, batched, strict=True)
                    if h is not None or b
                ]
            )
        for got, want in zip(tree_leaves(out), tree_leaves(plain), strict=True):
            if isinstance(want, Tensor) and (got.shape != want.shape or not _close(got, want, slack=100)):
                raise UnsupportedUse(
                    f"{names} goes through {name}, which does not act on each micro-batch alone; "
                    "loop over micro-batches, or write the operation per sample"
                )


def _close(a: Tensor, b: Tensor, slack: float = 1) -> bool:
    if a.shape != b.shape:
        return False
    if not a.is_floating_point():
        return bool((a == b).all())
    tolerance = slack * TOLERANCE.get(a.dtype, 1e-2 / slack)
    if torch.is_autocast_enabled(a.device.type):
        tolerance = max(tolerance, 1e-2 if slack == 1 else 5e-2)
    a, b = a.detach().double(), b.detach().double()
    same = (a == b) | (a.isnan() & b.isnan())
    if bool(same.all()):
        return True
    finite = b[b.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 0.0
    return bool((same | ((a - b).abs() <= tolerance * scale)).all())


def _outside(record: Record, groups: Groups, changed: int) -> Tensor:
    """The rows of a record that do not belong to group `changed`."""
    x, ids = record.x, record.ids
    if ids is None:
        x = x.movedim(record.axis, 0) if record.axis else x
        ids = sample_groups(groups, x.shape[0], x.device)
    return x[ids != changed]


def leaves_of(value: Any) -> list[Any]:
    """The leaves of nested outputs, dataclasses included."""
    out = []
    for leaf in tree_leaves(value):
        if is_dataclass(leaf) and not isinstance(leaf, type):
            out += [v for f in fields(leaf) for v in leaves_of(getattr(leaf, f.name))]
        else:
            out.append(leaf)
    return out


def _exchange(value: Any, groups: Groups, changed: tuple[int, ...]) -> tuple[Any, bool]:
    """The inputs with the samples of some groups replaced by another group's; whether that changed
    anything."""
    visible = False

    def replace(t: Any) -> Any:
        nonlocal visible
        a = groups.axis
        if not isinstance(t, Tensor) or t.ndim <= a or t.shape[a] != groups.batch:
            return t
        rows = t.detach().movedim(a, 0).clone()
        source = rows.clone()
        for k in changed:
            lo, hi = k * groups.micro, min((k + 1) * groups.micro, groups.batch)
            other = groups.micro if k == 0 else 0
            n = min(hi - lo, groups.batch - other)
            rows[lo : lo + n] = source[other : other + n]
        visible = visible or not bool(((rows == source) | (rows != rows)).all())
        return rows.movedim(0, a)

    return tree_map(replace, value), visible


def run(
    engine: Engine,
    model: nn.Module,
    args: Any,
    kwargs: Any,
    then: Callable[[list[Any]], Any] | None = None,
) -> tuple[Probe, Any]:
    """One recorded forward: its record and its outputs, or what `then` makes of them before buffers
    are restored."""
    probe = engine.probe = Probe(engine.groups)
    engine.uses = {}
    normed, engine.normed = engine.normed, {}
    for entry in engine.entries.values():
        entry.shared = None
    devices = sorted({e.param.device.index or 0 for e in engine.entries.values() if e.param.is_cuda})
    buffers = [
        (path, m, n, b, b.clone()) for path, m in model.named_modules() for n, b in m._buffers.items() if b is not None
    ]
    engine.written = set()
    try:
        with torch.random.fork_rng(devices=devices):
            outputs = leaves_of(model(*args, **kwargs))
            return probe, outputs if then is None else then(outputs)
    finally:
        engine.probe = None
        engine.renormed |= any(len(uses) > 1 for uses in engine.normed.values())
        engine.normed = normed
        with torch.no_grad():
            for path, module, name, b, saved in buffers:
                if module._buffers[name] is not b or not torch.equal(b, saved):
                    engine.written.add(f"{path}.{name}".lstrip("."))
                module._buffers[name] = b  # a forward may bind another tensor to the name
                if not torch.equal(b, saved):
                    b.copy_(saved)


def signature(engine: Engine, model: nn.Module, args: Any, kwargs: Any, additive: bool) -> Any:
    """What a check holds for: the inputs' shapes and plain values, the mini-batch, the loss and the modes.

    Every shape is another one: inside the model any length may come out as the batch's.
    """

    def what(t: Any) -> Any:
        if isinstance(t, Tensor):
            return tuple(t.shape)
        return t if isinstance(t, (bool, int, str, type(None))) else str(type(t))

    leaves = tuple(what(t) for t in tree_leaves((args, kwargs)))
    modes = tuple(m.training for m in model.modules())
    return leaves, engine.groups.batch, engine.groups.c is None, additive, engine.reduction, modes


def verify(engine: Engine, module: nn.Module, args: Any, kwargs: Any, additive: bool = True) -> None:
    """Check the model on these inputs, once per shape."""
    model = getattr(module, "_orig_mod", module)
    key = signature(engine, model, args, kwargs, additive)
    if key in engine.checked:
        return
    groups = engine.groups
    last = groups.kappa - 1
    ghosts = any(isinstance(m, _BatchNorm) and (m.training or m.running_mean is None) for m in model.modules())
    seen = False  # whether any two micro-batches differ, so that there was something to see
    with torch.compiler.set_stance("force_eager"):
        for _ in range(8):
            base, outputs = run(engine, model, args, kwargs)
            uses, written = dict(engine.uses), engine.written
            _find_leaks(engine, outputs)
            outputs = _freed(outputs)
            if not ghosts:
                _compare_forward(engine, model, args, kwargs, outputs)
            settled = True
            for k in {0, last}:
                (a, kw), visible = _exchange((args, kwargs), groups, (k,))
                if not visible:
                    continue
                seen = True
                other, changed = run(engine, model, a, kw, _freed)
                settled = _compare_uses(engine, base, other, k)
                if not settled:
                    break  # reclassified: what was recorded no longer holds
                _compare_outputs(groups, outputs, changed, k)
            if settled:
                break
        else:
            raise UnsupportedUse("the check of the model does not settle; loop over micro-batches")
        _check_buffers(engine, model, args, kwargs, written)
        if additive:
            _check_additive(engine, model, args, kwargs, outputs)
            _check_mean(engine, model, args, kwargs, outputs)
        for entry in engine.entries.values():
            entry.tied = entry.tied or uses.get(entry.name, 0) > 1
        if not engine.compilable or _coincidence(engine, args, kwargs):
            check_gradients(engine, model, args, kwargs)
    if seen:
        engine.checked.add(key)
    engine.compilable = True


def _compare_forward(engine: Engine, model: nn.Module, args: Any, kwargs: Any, outputs: list[Any]) -> None:
    """The forward through the rules must be the model's own (batch norm apart, whose statistics
    change)."""
    with _plainly(engine):
        _, plain = run(engine, model, args, kwargs)
    for a, b in zip(outputs, plain, strict=False):
        if isinstance(a, Tensor) and isinstance(b, Tensor) and not _close(a, b, slack=100):
            raise UnsupportedUse(
                "the model's forward in one_pass differs from its own: an operation writes over a "
                "value made from parameters, or an operation's rule does not cover its use; "
                "please report it, and loop over micro-batches"
            )


def _compare_uses(engine: Engine, base: Probe, other: Probe, changed: int) -> bool:
    """Compare two runs; returns False where a use had to be reclassified and the runs must be
    repeated."""
    groups = engine.groups
    settled = True
    for site in base.records.keys() | other.records.keys():
        names, name = site
        first, second = base.records.get(site, []), other.records.get(site, [])
        if any(r.axis is None and r.ids is None for r in first):
            pairs = zip(first, second, strict=False)
            moved = any(not _close(r.x, s.x) for r, s in pairs if r.axis is None and r.ids is None)
            if moved:
                if site in engine.bound:
                    raise _unclear(names, name)
                engine.free.discard(site)  # it was only the same for the samples exchanged before
                engine.bound.add(site)
                settled = False
                continue
        if not _rows_agree(first, second, groups, changed):
            axis = _other_axis(first, second, groups, changed)
            if axis is not None and site not in engine.axes:
                engine.axes[site] = axis
                settled = False
                continue
            raise UnsupportedUse(
                f"{names} goes through {name} on rows that change when samples of another "
                "micro-batch change: the samples are mixed, permuted or not where batch_dim says; "
                "keep the batch in its dimension and samples apart, or loop over micro-batches"
            )
        for r, s in zip(first, second, strict=False):
            if r.axis is None or r.varies or not r.x.numel():
                continue
            along = r.x.movedim(r.axis, 0)
            if r.x.shape == s.x.shape and _close(r.x, s.x) and not _close(along[:1].expand_as(along), along):
                # Not touched by the exchange and not the same for all samples: a constant whose
                # size happens to fit.
                if site not in engine.bound:
                    engine.free.add(site)
                    settled = False
                break
    return settled


def _rows_agree(first: list[Record], second: list[Record], groups: Groups, changed: int) -> bool:
    """Whether the rows of the groups that were left alone are the same in two runs."""
    left, right = (
        [
            x
            for r in records
            if r.axis is not None or r.ids is not None
            for x in [_outside(r, groups, changed)]
            if len(x)
        ]
        for records in (first, second)
    )
    return len(left) == len(right) and all(_close(x, y) for x, y in zip(left, right, strict=True))


def _other_axis(first: list[Record], second: list[Record], groups: Groups, changed: int) -> int | None:
    """Another dimension of size B that holds the batch in all records of a use, if there is one."""
    if any(r.axis is None for r in (*first, *second)) or not first:
        return None
    for axis in range(min(r.x.ndim for r in (*first, *second))):
        if all(r.x.shape[axis] == groups.batch for r in (*first, *second)):
            moved = [[r._replace(axis=axis) for r in records] for records in (first, second)]
            if _rows_agree(moved[0], moved[1], groups, changed):
                return axis
    return None


def _unclear(names: str, name: str) -> UnsupportedUse:
    return UnsupportedUse(
        f"{names} goes through {name} both with the batch and with constants of the batch's size; "
        "choose another batch size, or loop over micro-batches"
    )


def _compare_outputs(groups: Groups, outputs: list[Any], changed: list[Any], k: int) -> None:
    for a, b in zip(outputs, changed, strict=False):
        if not isinstance(a, Tensor) or not a.requires_grad or a.shape != b.shape:
            continue
        axes = [d for d, n in enumerate(a.shape) if n == groups.batch]
        if axes and not any(
            _close(_outside(Record(a, None, d), groups, k), _outside(Record(b, None, d), groups, k)) for d in axes
        ):
            raise UnsupportedUse(
                "the model's output for one sample depends on samples of other micro-batches, so "
                "its loss is not a mean over micro-batches (batch statistics? in-batch "
                "negatives?); loop over micro-batches"
            )


def _check_buffers(engine: Engine, model: nn.Module, args: Any, kwargs: Any, written: set[str]) -> None:
    """Buffers that a forward changes must be after it as after the loop: it would change them κ times."""
    for path, m in model.named_modules():
        if isinstance(m, _SpectralNorm) and m.training:  # nearly converged at first, so that a comparison could miss it
            raise UnsupportedUse(
                f"{path} is a spectral norm, whose power iteration the loop would run for each micro-batch; put it in "
                "eval mode, loop over micro-batches, or pass check=False if once per mini-batch will do"
            )
    norms = {path for path, m in model.named_modules() if isinstance(m, _BatchNorm)}
    names = sorted(name for name in written if name.rpartition(".")[0] not in norms)
    if not names:
        return

    def values(_: Any) -> list[Tensor]:
        return [model.get_buffer(name).clone() for name in names]

    def loop(_: Any) -> list[Tensor]:
        for k in range(1, engine.groups.kappa):
            a, kw = _cut((args, kwargs), engine.groups, k)
            model(*a, **kw)
        return values(None)

    got = run(engine, model, args, kwargs, values)[1]
    with _plainly(engine):
        a, kw = _cut((args, kwargs), engine.groups, 0)
        wants = run(engine, model, a, kw, loop)[1]
    for name, x, y in zip(names, got, wants, strict=True):
        if not _close(x, y):
            raise UnsupportedUse(
                f"the buffer {name} is changed in the forward, and would be changed otherwise by a loop over "
                "micro-batches (running statistics of your own? a power iteration?); put its module in eval mode, loop "
                "over micro-batches, or pass check=False if the difference is welcome"
            )


def _check_additive(engine: Engine, model: nn.Module, args: Any, kwargs: Any, outputs: list[Any]) -> None:
    """A scalar output that is not a sum over micro-batches has no micro-batch gradients that add up
    to it."""
    losses = [i for i, o in enumerate(outputs) if isinstance(o, Tensor) and o.ndim == 0 and o.requires_grad]
    if not losses:
        return
    last = engine.groups.kappa - 1
    values = []
    for changed in ((), (0,), (last,), (0, last)):
        (a, kw), _ = _exchange((args, kwargs), engine.groups, changed)
        values.append(run(engine, model, a, kw, _freed)[1])
    for i in losses:
        v = [float(out[i].detach()) for out in values]
        scale = max(abs(x) for x in v)
        tolerance = 10 * TOLERANCE.get(outputs[i].dtype, 1e-3)
        if abs(v[3] - v[2] - v[1] + v[0]) > tolerance * scale:
            raise UnsupportedUse(
                "the model's scalar output is not a mean over micro-batches: changing two of them "
                f"together changes it by {v[3] - v[0]:.6g}, one by one by "
                f"{v[1] + v[2] - 2 * v[0]:.6g}. Unequal numbers of tokens need weights=; "
                "batch-wide terms (load balancing, in-batch negatives) need the loop"
            )


def _check_mean(engine: Engine, model: nn.Module, args: Any, kwargs: Any, outputs: list[Any]) -> None:
    """A scalar output must be the mean of what the micro-batches give alone, by their samples.

    A model that draws random numbers is let pass: alone, its micro-batches draw others.
    """
    groups = engine.groups
    losses = [i for i, o in enumerate(outputs) if isinstance(o, Tensor) and o.ndim == 0 and o.requires_grad]
    if not losses or engine.reduction != "mean" or groups.c is not None:
        return
    with torch.no_grad(), _plainly(engine):
        alone = [run(engine, model, *_cut((args, kwargs), groups, k))[1] for k in range(groups.kappa)]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(torch.initial_seed() + 1)
            again = run(engine, model, *_cut((args, kwargs), groups, 0))[1]
    for i in losses:
        if not _close(alone[0][i], again[i]):
            return
        mean, whole = sum(float(out[i]) for out in alone) / groups.kappa, float(outputs[i].detach())
        tolerance = 1e3 * TOLERANCE.get(outputs[i].dtype, 1e-4)
        if abs(mean - whole) > tolerance * max(abs(mean), abs(whole)):
            raise UnsupportedUse(
                f"the model's scalar output is not a mean over micro-batches: it is {whole:.6g}, theirs have the mean "
                f"{mean:.6g}. Unequal numbers of tokens need weights=; batch-wide terms need the loop"
            )


def _find_leaks(engine: Engine, outputs: list[Any]) -> None:
    """A custom autograd.Function takes parameters without being seen: find it in the graph."""
    from . import functions

    ours = {v for v in vars(functions).values() if isinstance(v, type)}
    by_param = {id(e.param): e for e in engine.entries.values()}
    stack = [o.grad_fn for o in outputs if isinstance(o, Tensor) and o.grad_fn is not None]
    seen = set(stack)
    while stack:
        node = stack.pop()
        maker = getattr(node, "_forward_cls", None)
        for parent, _ in node.next_functions:
            if parent is None:
                continue
            entry = by_param.get(id(getattr(parent, "variable", None)))
            if entry is not None and maker is not None and maker not in ours:
                raise UnsupportedUse(
                    f"{entry.name} goes through {maker.__name__}, a custom autograd.Function that "
                    "hides it; write it with torch operations, or loop over micro-batches"
                )
            if parent not in seen:
                seen.add(parent)
                stack.append(parent)


def _cut(value: Any, groups: Groups, k: int, count: int = 1) -> Any:
    """Micro-batch k of the inputs, or `count` from there on."""
    lo, hi = k * groups.micro, min((k + count) * groups.micro, groups.batch)

    def cut(t: Any) -> Any:
        if isinstance(t, Tensor) and t.ndim > groups.axis and t.shape[groups.axis] == groups.batch:
            return t.detach().narrow(groups.axis, lo, hi - lo)
        return t

    return tree_map(cut, value)


def _freed(outputs: list[Any]) -> list[Any]:
    """The outputs without the graph behind them, which holds every activation of its run."""
    return [o.detach().requires_grad_(o.requires_grad) if isinstance(o, Tensor) else o for o in outputs]


def _outputs(outputs: list[Any]) -> list[Tensor]:
    return [o for o in outputs if isinstance(o, Tensor) and o.requires_grad]


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modes = [(m, m.training) for m in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for m, mode in modes:
            m.training = mode


def check_gradients(engine: Engine, model: nn.Module, args: Any, kwargs: Any) -> None:
    """Hold the gradients and squares of every parameter against a loop over a few micro-batches.

    A model that draws random numbers is held against it in eval mode: the loop would draw others.
    """
    groups = engine.groups
    few = _few(engine, args, kwargs)
    if few < groups.kappa:
        args, kwargs = _cut((args, kwargs), groups, 0, few)
        engine.groups = Groups(few * groups.micro, groups.micro, groups.axis)
    try:
        _check_gradients(engine, model, args, kwargs)
    finally:
        engine.groups = groups


def _sizes(engine: Engine, args: Any, kwargs: Any) -> set[int]:
    """All sizes in sight that are not the batch's own."""
    sizes = {n for entry in engine.entries.values() for n in entry.param.shape}
    for t in tree_leaves((args, kwargs)):
        if isinstance(t, Tensor):
            sizes.update(n for d, n in enumerate(t.shape) if d != engine.groups.axis)
    return sizes


def _coincidence(engine: Engine, args: Any, kwargs: Any) -> bool:
    """Whether another size is the batch's, so that one may be taken for the other."""
    return engine.groups.batch in _sizes(engine, args, kwargs)


def _few(engine: Engine, args: Any, kwargs: Any) -> int:
    """How many micro-batches to hold against the loop: four or so, unless that would hide or make a coincidence."""
    groups = engine.groups
    if groups.c is not None or _coincidence(engine, args, kwargs):
        return groups.kappa
    sizes = _sizes(engine, args, kwargs)
    full = groups.batch // groups.micro
    return next((k for k in (4, 5, 6, 7, 3) if k < full and k * groups.micro not in sizes), groups.kappa)


def _check_gradients(engine: Engine, model: nn.Module, args: Any, kwargs: Any) -> None:
    small = _cut((args, kwargs), engine.groups, 0)
    try:
        with _plainly(engine):
            first = _outputs(run(engine, model, *small)[1])
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(torch.initial_seed() + 1)
                second = _outputs(run(engine, model, *small)[1])
    except Exception as error:
        raise UnsupportedUse(
            "the model does not run on one micro-batch cut from its inputs, so it cannot be checked against the loop "
            f"({error}); give every batched input the batch in batch_dim, or pass check=False"
        ) from error
    still = all(_close(a, b) for a, b in zip(first, second, strict=False))
    del first, second
    with nullcontext() if still else _evaluating(model):
        try:
            with _in_double(engine, model, args, kwargs) as (a, kw):
                _hold_against_loop(engine, model, a, kw)
            return
        except (RuntimeError, TypeError, NotImplementedError) as error:
            if isinstance(error, UnsupportedUse):
                raise
            if "use_reentrant" in str(error):
                return  # cannot be differentiated to chosen leaves; arrivals are still counted in backward
        _hold_against_loop(engine, model, args, kwargs)  # the model insists on its own precision


@contextmanager
def _in_double(engine: Engine, model: nn.Module, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
    """The model and its inputs in float64, so that rounding is not taken for a mistake, nor a mistake for rounding.

    In float32 one activation that rounds to the other side of a ReLU moves a gradient by a thousandth.
    """
    held: list[tuple[Tensor, Tensor]] = []
    companions = [(entry, entry.companion) for entry in engine.entries.values()]
    try:
        with ExitStack() as stack:
            for kind in {p.device.type for p in model.parameters()}:
                stack.enter_context(torch.autocast(kind, enabled=False))
            with torch._C.DisableTorchFunctionSubclass():
                for t in (*model.parameters(), *model.buffers()):
                    if t.is_floating_point():
                        held.append((t, t.data))
                        t.data = t.data.double()
            for entry, old in companions:
                zero = torch.zeros((), dtype=torch.float64, device=old.device)
                entry.companion = zero.expand(old.shape).requires_grad_()
            yield tree_map(_as_double, (args, kwargs))
    finally:
        with torch._C.DisableTorchFunctionSubclass():
            for t, data in held:
                t.data = data
        for entry, old in companions:
            entry.companion = old


def _as_double(t: Any) -> Any:
    return t.detach().double() if isinstance(t, Tensor) and t.is_floating_point() else t


def _hold_against_loop(engine: Engine, model: nn.Module, args: Any, kwargs: Any) -> None:
    groups = engine.groups
    entries = list(engine.entries.values())
    params, companions = [e.param for e in entries], [e.companion for e in entries]
    full = _outputs(run(engine, model, args, kwargs)[1])
    batched = any(groups.batch in o.shape for o in full)
    kept = sorted({0, groups.kappa - 1} if batched else set(range(groups.kappa)))
    with _plainly(engine):
        small = _outputs(run(engine, model, *_cut((args, kwargs), groups, 0))[1])
    if len(small) != len(full):
        raise UnsupportedUse("the model returns other outputs for one micro-batch than for the mini-batch")
    # The same random cotangents for both, zero outside the micro-batches that are kept; one for a
    # scalar.
    generator = torch.Generator().manual_seed(0)
    seeds: list[Tensor] = []
    axes: list[int | None] = []
    for o, piece in zip(full, small, strict=True):
        rows = min(groups.micro, groups.batch)
        where = [
            d
            for d, n in enumerate(o.shape)
            if n == groups.batch and piece.shape == (*o.shape[:d], rows, *o.shape[d + 1 :])
        ]
        axes.append(where[0] if where else None)
        seed = torch.randn(o.shape, generator=generator, dtype=torch.float64).to(o)
        if not where:  # not samples: the loss, where there is nothing else
            seed = torch.ones_like(o) if o.ndim == 0 and not batched else torch.zeros_like(o)
        seeds.append(seed)
    if not any(bool(s.any()) for s in seeds):
        return
    c = [1.0] * groups.kappa if groups.c is None else groups.c.tolist()
    wants: list[Any] = [None] * len(entries)
    squares: list[Any] = [None] * len(entries)
    for k in kept:
        lo, hi = k * groups.micro, min((k + 1) * groups.micro, groups.batch)
        cut = [s if d is None else s.narrow(d, lo, hi - lo) for s, d in zip(seeds, axes, strict=True)]
        with _plainly(engine):
            a, kw = _cut((args, kwargs), groups, k)
            grads = _grad(engine, model, a, kw, params, cut)
        # A scalar is the micro-batch's own mean, of which the mini-batch's holds the share W_k/W =
        # 1/(κ c_k).
        share = 1 / (groups.kappa * c[k]) if c[k] else 0.0
        if batched or engine.reduction == "sum":
            share = 1.0
        for i, g in enumerate(grads):
            if g is not None:
                s = share * g.double()
                wants[i] = s if wants[i] is None else wants[i] + s
                square = c[k] * s.square()
                squares[i] = square if squares[i] is None else squares[i] + square
    for s, d in zip(seeds, axes, strict=True):
        if d is not None:
            ids = sample_groups(groups, groups.batch, s.device)
            left_out = torch.tensor([k not in kept for k in range(groups.kappa)], device=s.device)
            s.movedim(d, 0)[left_out[ids]] = 0
    got = _grad(engine, model, args, kwargs, params + companions, seeds)
    for i, entry in enumerate(entries, len(entries)):
        square = got[i]
        got[i] = None if square is None else entry.shaped(square)
    for entry in entries:
        entry.arrived, entry.shared = 0, None
    _compare_gradients(entries, got, wants, squares)


@contextmanager
def _plainly(engine: Engine) -> Iterator[None]:
    """Every operation runs as it is."""
    engine.single = True
    try:
        yield
    finally:
        engine.single = False


def _grad(
    engine: Engine,
    model: nn.Module,
    args: Any,
    kwargs: Any,
    leaves: list[Tensor],
    seeds: list[Tensor],
) -> list[Tensor | None]:
    def differentiate(outputs: list[Any]) -> list[Tensor | None]:
        engine.probe = None  # checkpoints recompute their forward in here
        # Edges instead of parameters, which would send the whole backward through `dispatch`.
        with torch._C.DisableTorchFunctionSubclass():
            edges = [get_gradient_edge(t) for t in leaves]
        return list(torch.autograd.grad(_outputs(outputs), edges, seeds, allow_unused=True))

    result: list[Tensor | None] = run(engine, model, args, kwargs, differentiate)[1]
    return result


def _rms(t: Tensor) -> float:
    return float(t.double().square().mean().sqrt()) if t.numel() else 0.0


def _compare_gradients(entries: list[Entry], got: list[Any], wants: list[Any], squares: list[Any]) -> None:
    """Every parameter's gradient and square, by the root mean square of what differs."""
    largest = max([_rms(w) for w in wants if w is not None] or [0.0])
    wrong = []
    for i, entry in enumerate(entries):
        want, square = wants[i], squares[i]
        entry.reached = want is not None
        if want is None or not want.numel():
            continue
        reduced = torch.is_autocast_enabled(entry.param.device.type)
        tolerance = AGREEMENT[2] if reduced else AGREEMENT.get(entry.param.dtype.itemsize, AGREEMENT[2])
        grad, sq = got[i], got[i + len(entries)]
        floor = 1e-3 * largest  # a gradient that is zero but for rounding has no scale of its own
        for kind, a, b, least in (("gradient", grad, want, floor), ("square", sq, square, floor**2)):
            size = max(_rms(b), least)
            difference = float("inf") if a is None else _rms(a.double() - b)
            if size and not difference <= tolerance * size:
                through = ", ".join(sorted(entry.operations)) or "an operation torch does not show"
                wrong.append(f"{entry.name}: its {kind} is off by {difference / size:.1g} (through {through})")
                break
    if wrong:
        raise UnsupportedUse(
            "one pass and the loop over micro-batches disagree on this model:\n  " + "\n  ".join(wrong) + "\nEither "
            "samples of different micro-batches influence each other, or an operation is not "
            "covered; loop over micro-batches"
        )

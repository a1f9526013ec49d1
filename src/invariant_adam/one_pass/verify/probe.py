"""A recorded run of a model inside `one_pass`: what the rules saw, and the tools to compare two of them.

A run leaves buffers, random generators and gradients as they were.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves, tree_map

from ...kernels import plain_torch
from ..groups import Groups, UnsupportedUse
from ..mini_batch import MiniBatch, Mode
from ..model import Site
from ..routing import Routed
from ..weight import same
from . import chance

# How far values that should be equal may differ, relative to the largest: rounding of the same sums in another order.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}
PIECE = 1 << 22  # elements that are compared at a time
RUN = 256  # elements that a summary has one sum and one norm of


class Record(NamedTuple):
    """One use of a parameter: where the batch is in the tensor x that it met, and a summary of x.

    A summary takes 1/32 of the memory of x: sums and norms over runs of elements (`summary`). Those of equal tensors
    are equal.
    """

    shape: torch.Size  # of x
    dtype: torch.dtype
    rows: dict[int, Tensor]  # by dimension that may be the batch's: a row per index there; -1: x as one row
    ids: Tensor | None = None  # rows in any order: the group of each, by their places in the batch
    axis: int | None = None
    varies: bool = True  # x is differentiable, so it comes from the batch

    @classmethod
    def of(cls, x: Tensor, batch: int, axis: int | None = None) -> Record:
        """What is kept of x, whose batch of so many samples is in the dimension `axis`."""
        places = {d for d, n in enumerate(x.shape) if n == batch}
        rows = {d: summary(x, d) for d in (places if axis is None else places | {axis})}
        return cls(x.shape, x.dtype, rows or {-1: summary(x)}, None, axis, x.requires_grad)

    @property
    def whole(self) -> Tensor:
        """All that is known of x."""
        return next(iter(self.rows.values()))

    @property
    def placed(self) -> bool:
        """Whether it is known where the batch is, so that x is not taken for a constant."""
        return self.axis is not None or self.ids is not None


class Probe:
    """What the rules saw in one run."""

    def __init__(self, batch: int = 1) -> None:
        self.batch = batch  # samples
        self.records: dict[Site, list[Record]] = defaultdict(list)
        self.uses: Counter[str] = Counter()  # by parameter: those that deliver squares
        self.served: dict[str, list[str]] = defaultdict(list)  # by parameter: the operations that use it, in order
        self.written: set[str] = set()  # buffers that the run has changed
        self.drew = False  # random numbers

    def saw(self, names: str, name: str, x: Tensor, axis: int | None = None, routed: Routed | None = None) -> None:
        """Record a use; rows in any order by their places in the batch: a sort by expert need not be stable."""
        if routed is None:
            record = Record.of(x, self.batch, axis)
        else:
            order = routed.places.argsort(stable=True)
            record = Record(
                x.shape, x.dtype, {0: summary(x.detach()[order], 0)}, routed.ids[order], None, x.requires_grad
            )
        self.records[names, name].append(record)

    def compare(self, names: str, name: str, results: list[Tensor], plain: list[Tensor]) -> None:
        """Hold the results of a fallback against the plain operation's."""
        if not all(close(got, want, slack=100) for got, want in zip(results, plain, strict=True)):
            raise UnsupportedUse(
                f"{names} goes through {name}, which does not act on each micro-batch alone; loop over micro-batches, "
                "or write the operation per sample"
            )


@contextmanager
def setting(thing: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute has this value in here, and then the one it had."""
    before = getattr(thing, name)
    try:
        setattr(thing, name, value)
        yield
    finally:
        setattr(thing, name, before)


class Trial(NamedTuple):
    """A model under check, with inputs: (args, kwargs)."""

    mini: MiniBatch
    model: nn.Module
    inputs: Any

    def run(
        self, then: Callable[[list[Any]], Any] | None = None, *, backward: bool = False, probe: Probe | None = None
    ) -> tuple[Probe, Any]:
        """A recorded forward: its record and its outputs, or what `then` makes of them before buffers are restored.

        Without a `backward` in `then` nothing is kept for one: a run then takes the memory of an evaluation.
        """
        try:
            return self._run(then, nullcontext() if backward else saved_tensors_hooks(_forget, _recall), probe)
        except RuntimeError as error:  # the model differentiates in its forward; torch.func takes no hooks at all
            if not isinstance(error, Forgotten) and "saved tensor hooks" not in str(error):
                raise
            return self._run(then, nullcontext(), probe)

    def seen(self) -> Probe:
        """The record of a forward as far as it comes: up to what is refused, or fails on these samples."""
        probe = Probe(self.mini.groups.batch)
        with suppress(Exception):
            self.run(freed, probe=probe)
        return probe

    def _run(self, then: Any, kept: AbstractContextManager[Any], probe: Probe | None) -> tuple[Probe, Any]:
        mini, facts = self.mini, self.mini.facts
        mode, normed = mini.mode, mini.normed
        probe = mini.probe = probe or Probe(mini.groups.batch)
        mini.normed = {}
        mini.mode = mode if mode is Mode.PLAIN else Mode.CHECKING
        for entry in facts.order:
            entry.restart()
        modules = self.model.named_modules()
        buffers = [(path, m, n, b, b.clone()) for path, m in modules for n, b in m._buffers.items() if b is not None]
        args, kwargs = self.inputs
        try:
            with chance.forked(self.devices), kept:
                before = chance.states(self.devices)
                outputs = leaves(self.model(*args, **kwargs))
                probe.drew = before != chance.states(self.devices)
                return probe, outputs if then is None else then(outputs)
        except UnsupportedUse as error:
            error.probe = probe
            raise
        finally:
            if not facts.findings.renormed and any(len(uses) > 1 for uses in mini.normed.values()):
                facts.find(renormed=True)
            mini.probe, mini.mode, mini.normed = None, mode, normed
            with torch.no_grad():
                for path, module, name, b, saved in buffers:
                    if module._buffers[name] is not b or not torch.equal(b, saved):
                        probe.written.add(f"{path}.{name}".lstrip("."))
                    module._buffers[name] = b  # a forward may bind another tensor to the name
                    if not torch.equal(b, saved):
                        b.copy_(saved)

    def outputs(self) -> list[Any]:
        """The outputs of a run, without the graph behind them."""
        return list(self.run(freed)[1])

    def draws(self) -> bool:
        """Whether its outputs depend on random numbers, however little: a loss hardly changes with a dropout's."""
        probe, first = self.run(freed)
        with chance.redrawn(self.devices):
            second = self.outputs()
        pairs = [(a, b) for a, b in zip(first, second, strict=False) if isinstance(a, Tensor)]
        return not all(close(a, b) and (not probe.drew or bool(same(a, b).all())) for a, b in pairs)

    def cut(self, k: int, count: int = 1) -> Trial:
        """The trial of micro-batch k of the inputs, or of `count` from there on."""
        micro = self.mini.groups.micro
        return self.with_rows(lambda rows: rows[k * micro : (k + count) * micro])

    def with_rows(self, change: Callable[[Tensor], Tensor]) -> Trial:
        """The trial of other inputs: `change` is given each tensor that has the batch, with the batch first."""
        axis, batch = self.mini.groups.axis, self.mini.groups.batch

        def changed(t: Any) -> Any:
            if not isinstance(t, Tensor) or t.ndim <= axis or t.shape[axis] != batch:
                return t
            return change(t.detach().movedim(axis, 0)).movedim(0, axis)

        return self._replace(inputs=tree_map(changed, self.inputs))

    def exchanged(self, *changed: int) -> tuple[Trial, bool]:
        """The trial with the samples of some groups replaced by another group's; whether that changed anything."""
        groups = self.mini.groups
        visible = []

        def replace(rows: Tensor) -> Tensor:
            new = rows.clone()
            for k in changed:
                lo, other = k * groups.micro, groups.micro if k == 0 else 0
                n = min(groups.micro, groups.batch - lo, groups.batch - other)
                new[lo : lo + n] = rows[other : other + n]
            visible.append(not bool(((new == rows) | (new != new)).all()))
            return new

        return self.with_rows(replace), any(visible)

    @contextmanager
    def of_few(self, few: int, micro: int | None = None) -> Iterator[Trial]:
        """The trial of `few` micro-batches, which are all there are in here; of `micro` samples, if that is given.

        Plain torch serves it: Triton would compile its kernels for sizes and dtypes that no update has.
        """
        groups, c = self.mini.groups, None
        micro = micro or groups.micro
        if groups.c is not None:  # c_k = W/(κ W_k), and W is now that of a few
            own = groups.c[:few]
            c = own * (torch.where(own > 0, 1 / own, 0.0).sum() / few)
        small = self.with_rows(lambda rows: rows[: few * micro])
        with setting(self.mini, "groups", Groups(few * micro, micro, groups.axis, c)), plain_torch():
            yield small

    def plainly(self) -> AbstractContextManager[None]:
        """Every operation runs as it is."""
        return setting(self.mini, "mode", Mode.PLAIN)

    @property
    def devices(self) -> list[int]:
        """The GPUs of the parameters."""
        return sorted({e.param.device.index or 0 for e in self.mini.facts.order if e.param.is_cuda})


def summary(x: Tensor, axis: int | None = None) -> Tensor:
    """A row of sums and norms, in float64, for each index of a dimension of x; one row for all of x without one."""
    x = x.detach()
    if not x.numel():
        return torch.zeros(1 if axis is None else x.shape[axis], 0, dtype=torch.float64, device=x.device)
    rows = x.reshape(1, -1) if axis is None else x.movedim(axis, 0).reshape(x.shape[axis], -1)
    made = []
    for piece in rows.split(max(1, PIECE // rows.shape[1])):
        for part in (piece,) if axis is not None else piece.split(PIECE, 1):
            wide = part.double()
            whole = wide.shape[1] // RUN * RUN
            runs = [wide[:, :whole].unflatten(1, (-1, RUN))] if whole else []
            runs += [wide[:, None, whole:]] if whole < wide.shape[1] else []
            made.append(torch.cat([f for r in runs for f in (r.sum(-1), torch.linalg.vector_norm(r, dim=-1))], 1))
    return torch.cat(made, 0 if axis is not None else 1)


def close(a: Tensor, b: Tensor, slack: float = 1, dtype: torch.dtype | None = None) -> bool:
    """Whether two results of the same computation are equal, up to `slack` times its rounding, in `dtype` or theirs."""
    if a.shape != b.shape:
        return False
    dtype = dtype or a.dtype
    if not dtype.is_floating_point:
        return bool((a == b).all())
    tolerance = slack * TOLERANCE.get(dtype, 1e-2 / slack)
    if torch.is_autocast_enabled(a.device.type):
        tolerance = max(tolerance, 1e-2 if slack == 1 else 5e-2)
    scale, equal = 0.0, True
    for x, y in _pieces(a, b):
        equal = equal and bool(same(x, y).all())
        finite = y[y.isfinite()]
        scale = max(scale, float(finite.abs().max()) if finite.numel() else 0.0)
    return equal or all(bool((same(x, y) | ((x - y).abs() <= tolerance * scale)).all()) for x, y in _pieces(a, b))


def _pieces(a: Tensor, b: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Two tensors in float64, a piece at a time: a model's outputs may be the largest tensors that there are."""
    for x, y in zip(*(t.detach().reshape(-1).split(PIECE) for t in (a, b)), strict=True):
        yield x.double(), y.double()


class Forgotten(RuntimeError):  # noqa: N818 - it names what happened
    """A backward needs what a run has not kept."""


def _forget(t: Tensor) -> Any:
    """Keep of what autograd saves only indices, by which rows are followed (`routing`)."""
    return None if t.is_floating_point() else t


def _recall(kept: Any) -> Tensor:
    if kept is None:
        raise Forgotten("a check's run keeps nothing for a backward")
    return kept  # type: ignore[no-any-return]


def leaves(value: Any) -> list[Any]:
    """The leaves of nested outputs, dataclasses included."""
    out = []
    for leaf in tree_leaves(value):
        nested = is_dataclass(leaf) and not isinstance(leaf, type)
        out += leaves([getattr(leaf, f.name) for f in fields(leaf)]) if nested else [leaf]
    return out


def freed(outputs: list[Any]) -> list[Any]:
    """The outputs without the graph behind them, which holds every activation of its run."""
    return [o.detach().requires_grad_(o.requires_grad) if isinstance(o, Tensor) else o for o in outputs]


def summed_up(outputs: list[Any], batch: int) -> list[Any]:
    """The outputs as records, since they may be the largest tensors that there are; scalars as they are."""
    return [Record.of(o, batch) if isinstance(o, Tensor) and o.ndim else o for o in freed(outputs)]


def differentiable(outputs: list[Any]) -> list[Tensor]:
    """The outputs that a loss can be made of."""
    return [o for o in outputs if isinstance(o, Tensor) and o.requires_grad]

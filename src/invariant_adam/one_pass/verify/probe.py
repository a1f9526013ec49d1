"""A recorded run of a model inside `one_pass`: what the rules saw, and the tools to compare two of them.

A run leaves buffers, random generators and gradients as they were.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ..groups import Groups, UnsupportedUse
from ..mini_batch import MiniBatch, Mode
from ..routing import Routed
from ..weight import same

# How far values that should be equal may differ, relative to the largest: rounding of the same sums in another order.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}
PIECE = 1 << 22  # elements that are compared at a time


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
        self.uses: Counter[str] = Counter()  # by parameter: those that deliver squares
        self.written: set[str] = set()  # buffers that the run has changed

    def rows(self, names: str, name: str, x: Tensor, routed: Routed | None, axis: int | None) -> None:
        """Record a use with the batch; rows in any order by their places there: a sort by expert need not be stable."""
        record = Record(x.detach(), None, axis, x.requires_grad)
        if routed is not None:
            order = routed.places.argsort(stable=True)
            record = Record(x.detach()[order], routed.ids[order], None, x.requires_grad)
        self.records[names, name].append(record)

    def constant(self, names: str, name: str, x: Tensor) -> None:
        """Record a use with what is taken for a constant."""
        self.records[names, name].append(Record(x.detach(), None, None))

    def compare(
        self, call: Any, name: str, names: str, leaves: list[Any], handles: list[Any], batched: list[bool], out: Any
    ) -> None:
        """A fallback: record its inputs, and hold its result against the plain operation's."""
        values = []
        for a, h, b in zip(leaves, handles, batched, strict=True):
            if h is not None or b:
                values.append(a if h is None else h.value)
            if b:
                self.rows(names, name, a, None, self.groups.axis_of(a.shape))
            elif isinstance(a, Tensor) and h is None:
                self.constant(names, name, a)
        with torch.no_grad():
            plain = call(*values)
        for got, want in zip(tree_leaves(out), tree_leaves(plain), strict=True):
            if isinstance(want, Tensor) and (got.shape != want.shape or not close(got, want, slack=100)):
                raise UnsupportedUse(
                    f"{names} goes through {name}, which does not act on each micro-batch alone; "
                    "loop over micro-batches, or write the operation per sample"
                )


class Trial(NamedTuple):
    """A model under check, with inputs: (args, kwargs)."""

    mini: MiniBatch
    model: nn.Module
    inputs: Any

    def run(self, then: Callable[[list[Any]], Any] | None = None) -> tuple[Probe, Any]:
        """A recorded forward: its record and its outputs, or what `then` makes of them before buffers are restored."""
        mini, facts = self.mini, self.mini.facts
        mode, normed = mini.mode, mini.normed
        probe = mini.probe = Probe(mini.groups)
        mini.normed = {}
        if mode is not Mode.PLAIN:
            mini.mode = Mode.CHECKING
        for entry in facts.order:
            entry.shared = None
        modules = self.model.named_modules()
        buffers = [(path, m, n, b, b.clone()) for path, m in modules for n, b in m._buffers.items() if b is not None]
        args, kwargs = self.inputs
        try:
            with torch.random.fork_rng(devices=self.devices):
                outputs = _leaves(self.model(*args, **kwargs))
                return probe, outputs if then is None else then(outputs)
        finally:
            if any(len(uses) > 1 for uses in mini.normed.values()):
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

    def cut(self, k: int, count: int = 1) -> Trial:
        """The trial of micro-batch k of the inputs, or of `count` from there on."""
        groups = self.mini.groups
        lo, hi = k * groups.micro, min((k + count) * groups.micro, groups.batch)

        def narrow(t: Any) -> Any:
            if isinstance(t, Tensor) and t.ndim > groups.axis and t.shape[groups.axis] == groups.batch:
                return t.detach().narrow(groups.axis, lo, hi - lo)
            return t

        return self.on(tree_map(narrow, self.inputs))

    def on(self, inputs: Any) -> Trial:
        """The trial of other inputs."""
        return self._replace(inputs=inputs)

    @contextmanager
    def of_few(self, few: int) -> Iterator[Trial]:
        """The trial of the first `few` micro-batches, which are all there are in here."""
        mini, groups = self.mini, self.mini.groups
        small = self.cut(0, few)
        mini.groups = Groups(few * groups.micro, groups.micro, groups.axis)
        try:
            yield small
        finally:
            mini.groups = groups

    @contextmanager
    def plainly(self) -> Iterator[None]:
        """Every operation runs as it is."""
        mode, self.mini.mode = self.mini.mode, Mode.PLAIN
        try:
            yield
        finally:
            self.mini.mode = mode

    @contextmanager
    def redrawn(self) -> Iterator[None]:
        """Other random numbers than outside; the generators are then as they were."""
        seed = torch.initial_seed() + 1
        with torch.random.fork_rng(devices=self.devices):
            torch.default_generator.manual_seed(seed)
            for device in self.devices:  # these only: torch.manual_seed would leave every other one seeded
                torch.cuda.default_generators[device].manual_seed(seed)
            yield

    @property
    def devices(self) -> list[int]:
        """The GPUs of the parameters."""
        return sorted({e.param.device.index or 0 for e in self.mini.facts.order if e.param.is_cuda})


def close(a: Tensor, b: Tensor, slack: float = 1) -> bool:
    """Whether two results of the same computation are equal, up to `slack` times its rounding."""
    if a.shape != b.shape:
        return False
    if not a.is_floating_point():
        return bool((a == b).all())
    tolerance = slack * TOLERANCE.get(a.dtype, 1e-2 / slack)
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


def _leaves(value: Any) -> list[Any]:
    """The leaves of nested outputs, dataclasses included."""
    out = []
    for leaf in tree_leaves(value):
        if is_dataclass(leaf) and not isinstance(leaf, type):
            out += [v for f in fields(leaf) for v in _leaves(getattr(leaf, f.name))]
        else:
            out.append(leaf)
    return out


def freed(outputs: list[Any]) -> list[Any]:
    """The outputs without the graph behind them, which holds every activation of its run."""
    return [o.detach().requires_grad_(o.requires_grad) if isinstance(o, Tensor) else o for o in outputs]


def differentiable(outputs: list[Any]) -> list[Tensor]:
    """The outputs that a loss can be made of."""
    return [o for o in outputs if isinstance(o, Tensor) and o.requires_grad]

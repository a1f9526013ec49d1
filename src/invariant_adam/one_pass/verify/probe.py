"""One recorded run of a model inside `one_pass`: what the rules saw, and the tools to compare two of them.

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

    def rows(self, names: str, name: str, x: Tensor, ids: Tensor | None, axis: int | None) -> None:
        """Record a use with the batch."""
        self.records[names, name].append(Record(x.detach(), ids, axis, x.requires_grad))

    def constant(self, names: str, name: str, x: Tensor) -> None:
        """Record a use with what is taken for a constant."""
        self.records[names, name].append(Record(x.detach(), None, None))

    def compare(
        self, call: Any, name: str, names: str, leaves: list[Any], handles: list[Any], batched: list[bool], out: Any
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
            if isinstance(want, Tensor) and (got.shape != want.shape or not close(got, want, slack=100)):
                raise UnsupportedUse(
                    f"{names} goes through {name}, which does not act on each micro-batch alone; "
                    "loop over micro-batches, or write the operation per sample"
                )


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
    """Two tensors in float64, a part at a time: a model's outputs may be the largest that there are."""
    for x, y in zip(*(t.detach().reshape(-1).split(PIECE) for t in (a, b)), strict=True):
        yield x.double(), y.double()


def leaves_of(value: Any) -> list[Any]:
    """The leaves of nested outputs, dataclasses included."""
    out = []
    for leaf in tree_leaves(value):
        if is_dataclass(leaf) and not isinstance(leaf, type):
            out += [v for f in fields(leaf) for v in leaves_of(getattr(leaf, f.name))]
        else:
            out.append(leaf)
    return out


def run(
    mini: MiniBatch, model: nn.Module, args: Any, kwargs: Any, then: Callable[[list[Any]], Any] | None = None
) -> tuple[Probe, Any]:
    """One recorded forward: its record and its outputs, or what `then` makes of them before buffers are restored."""
    facts, mode, normed = mini.facts, mini.mode, mini.normed
    probe = mini.probe = Probe(mini.groups)
    mini.normed = {}
    if mode is not Mode.PLAIN:
        mini.mode = Mode.CHECKING
    for entry in facts.order:
        entry.shared = None
    buffers = [
        (path, m, n, b, b.clone()) for path, m in model.named_modules() for n, b in m._buffers.items() if b is not None
    ]
    try:
        with torch.random.fork_rng(devices=_devices(mini)):
            outputs = leaves_of(model(*args, **kwargs))
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


def _devices(mini: MiniBatch) -> list[int]:
    return sorted({e.param.device.index or 0 for e in mini.facts.order if e.param.is_cuda})


@contextmanager
def redrawn(mini: MiniBatch) -> Iterator[None]:
    """Other random numbers than outside; the generators are then as they were."""
    devices = _devices(mini)
    seed = torch.initial_seed() + 1
    with torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(seed)
        for device in devices:  # these only: torch.manual_seed would leave every other one seeded
            torch.cuda.default_generators[device].manual_seed(seed)
        yield


@contextmanager
def plainly(mini: MiniBatch) -> Iterator[None]:
    """Every operation runs as it is."""
    mode, mini.mode = mini.mode, Mode.PLAIN
    try:
        yield
    finally:
        mini.mode = mode


def cut(value: Any, groups: Groups, k: int, count: int = 1) -> Any:
    """Micro-batch k of the inputs, or `count` from there on."""
    lo, hi = k * groups.micro, min((k + count) * groups.micro, groups.batch)

    def narrow(t: Any) -> Any:
        if isinstance(t, Tensor) and t.ndim > groups.axis and t.shape[groups.axis] == groups.batch:
            return t.detach().narrow(groups.axis, lo, hi - lo)
        return t

    return tree_map(narrow, value)


def freed(outputs: list[Any]) -> list[Any]:
    """The outputs without the graph behind them, which holds every activation of its run."""
    return [o.detach().requires_grad_(o.requires_grad) if isinstance(o, Tensor) else o for o in outputs]


def differentiable(outputs: list[Any]) -> list[Tensor]:
    """The outputs that a loss can be made of."""
    return [o for o in outputs if isinstance(o, Tensor) and o.requires_grad]

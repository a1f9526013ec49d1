"""`one_pass(..., into=opt)`: gradients and squares go into the moments as they are made, and are never left in memory.

A parameter used by one layer gets its pair in that layer's backward. Instead of returning it, the Function hands it
to the optimizer here: the product of a linear layer or a 2-d convolution folds itself into m and v, tile by tile; other
pairs are folded whole, one at a time. Parameters that are shared, reshaped or met by an operation without a rule take
the ordinary way, by `pair.put`.

A compiled graph keeps only what it returns. There the handover is an operator whose result, a number without
meaning, is the "gradient" of a leaf of no dimension, the ticket.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, ClassVar, ParamSpec

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from ..fold import pair
from ..kernels import conv_square as convolutions
from ..kernels import gemm_square as kernels
from ..kernels.conv_square import Geometry
from ..kernels.ops import operator
from .groups import UnsupportedUse
from .handles import Entry, Handle

if TYPE_CHECKING:
    from ..optimizer import InvariantAdam


# Elements of a vector up to which a compiled graph returns its pair like any gradient, so that it may wait for others
# to share a launch with: what an operator is given must be folded at once.
SMALL = 1 << 16
P = ParamSpec("P")


def _quietly(method: Callable[P, None]) -> Callable[P, None]:
    """A method that looks at parameters without asking their dispatcher each time."""

    @wraps(method)
    def quiet(*args: P.args, **kwargs: P.kwargs) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            method(*args, **kwargs)

    return quiet


class Sink:
    """The optimizer that takes the pairs of an open context."""

    open: ClassVar[Sink | None] = None

    def __init__(
        self, optimizer: InvariantAdam, entries: list[Entry], wait: Callable[[Entry, pair.Pair], None]
    ) -> None:
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        missing = [entry.name for entry in entries if id(entry.param) not in held]
        if missing:
            raise ValueError(
                f"into= must hold all trainable parameters of the model, and has not {', '.join(missing[:5])}"
                f"{' and others' if len(missing) > 5 else ''}; add them to the optimizer or freeze them"
            )
        if any(entry.taker is None for entry in entries):  # nobody takes its pairs
            raise ValueError(
                'into= needs an optimizer that folds in backward, InvariantAdam(fold="backward"), which is the latest '
                'one built on these parameters; with fold="call" leave into= out and call opt.fold()'
            )
        self.optimizer, self.wait = optimizer, wait
        self.passed = False  # a backward came by that was not to accumulate
        self.edges: list[GradientEdge] = []  # of the tickets: a backward over all leaves comes by there
        self.entries = {entry.key: entry for entry in entries}
        self.kappa = 0.0  # micro-batches in the mini-batch, a ragged one n/M
        self.scale = (1.0, 1.0)  # what makes the means of a pair from the sums of a backward

    @_quietly
    def products(self, key: int, G: Tensor, X: Tensor, c: Tensor | None) -> None:
        """Fold the weight gradient and square of a linear layer, from what `gemm_square` makes them of."""
        entry = self._claim(key)
        if entry is not None:
            self._products(entry, G, X, c)

    @_quietly
    def convolution(self, key: int, G: Tensor, X: Tensor, geo: Geometry, c: Tensor | None) -> None:
        """Fold the weight gradient and square of a convolution, from what `conv_square` makes them of."""
        entry = self._claim(key)
        if entry is None:
            return None
        X = X.to(G.dtype)
        fused = convolutions.fused
        if fused is not None and convolutions.takes_fused(G, X, geo):
            config = fused.best(G, X, geo, c)
            if fused.folds(config, G, geo, entry.param):
                target = self.optimizer.queue.target(entry.param, self.kappa, self.scale)
                if target is not None:
                    fused.conv_square(G, X, geo, c, into=target, config=config)
                    return None
        return self._hand(entry, *convolutions.conv_square(G, X, geo, c))

    def _products(self, entry: Entry, G: Tensor, X: Tensor, c: Tensor | None) -> None:
        fused = kernels.fused
        if fused is not None and kernels.takes_fused(G) and entry.param.is_contiguous():
            target = self.optimizer.queue.target(entry.param, self.kappa, self.scale)
            if target is not None:
                fused.gemm_square(G, X.to(G.dtype), c, into=target)
                return
        dW, S = kernels.gemm_square(G, X, c)
        self._hand(entry, dW.view(entry.param.shape), S.view(entry.param.shape))

    @_quietly
    def pair(self, key: int, dW: Tensor, S: Tensor, *, borrowed: bool = False) -> None:
        """Fold a pair that is made; at once, where its memory is borrowed (see `pair.put`)."""
        entry = self._claim(key)
        if entry is not None:
            self._hand(entry, dW, S, borrowed)

    def _claim(self, key: int) -> Entry | None:
        """The parameter whose pair is made now; None in a backward that parameters are no part of."""
        entry = self.entries.get(key)
        if entry is None or not self.kappa:
            raise RuntimeError(
                "a backward of one_pass(..., into=opt) ran in another context than its forward; call both in one, and "
                "drop the update with opt.abandon()"
            )
        if not any(torch._C._will_engine_execute_node(edge.node) for edge in self.edges):
            self.passed = True
            return None  # torch.autograd.grad, or backward(inputs=...): nothing is to accumulate
        if entry.done:
            raise UnsupportedUse(
                f"{entry.name}: a second square arrived after the first was folded, without their cross terms; drop "
                "the update with opt.abandon(), and call the model once and backward once per mini-batch, or loop"
            )
        entry.done, entry.arrived = True, 1
        return entry

    def _hand(self, entry: Entry, dW: Tensor, S: Tensor, borrowed: bool = False) -> None:
        made = pair.Pair(dW.to(entry.param.dtype), S, self.kappa, self.scale, borrowed)
        if borrowed:
            pair.put(entry.param, made, entry.taker)
        else:
            self.wait(entry, made)


def products(handle: Handle, G: Tensor, X: Tensor, c: Tensor | None) -> Any:
    """Hand over a linear layer's pair by its operands; what is returned is the gradient of the ticket."""
    key = _key(handle)
    if torch.compiler.is_compiling():
        return _into_products(G, X, c, key)
    return _open().products(key, G, X, c)


def convolution(handle: Handle, G: Tensor, X: Tensor, geo: Geometry, c: Tensor | None) -> Any:
    """Hand over a convolution's pair by its operands; what is returned is the gradient of the ticket."""
    key = _key(handle)
    if torch.compiler.is_compiling():
        sizes = [list(part) for part in (geo.weight, geo.stride, geo.padding, geo.dilation, geo.output_padding)]
        flags = geo.transposed, geo.channels_last
        return _into_convolution(G, X, c, *sizes, geo.groups, *flags, key)
    return _open().convolution(key, G, X, geo, c)


def give(handle: Handle, dW: Tensor, S: Tensor) -> Any:
    """Hand over a pair; what is returned is the gradient of the ticket."""
    key = _key(handle)
    if torch.compiler.is_compiling():
        return _into_pair(dW, S, key)
    return _open().pair(key, dW, S)


def _key(handle: Handle) -> int:
    assert handle.entry is not None
    return handle.entry.key


def _open() -> Sink:
    if Sink.open is None:
        raise RuntimeError("a backward of one_pass(..., into=opt) ran after its context was closed; call it inside")
    return Sink.open


def _ticket_shape(like: Tensor, *_: Any) -> Tensor:
    return like.new_empty((), dtype=torch.float32)


@operator("into_products(Tensor G, Tensor X, Tensor? c, int key) -> Tensor", _ticket_shape)
def _into_products(G: Tensor, X: Tensor, c: Tensor | None, key: int) -> Tensor:
    _open().products(key, G, X, c)
    return _ticket(G)


@operator(
    "into_convolution(Tensor G, Tensor X, Tensor? c, int[] weight, int[] stride, int[] padding, int[] dilation, "
    "int[] output_padding, int groups, bool transposed, bool channels_last, int key) -> Tensor",
    _ticket_shape,
)
def _into_convolution(
    G: Tensor,
    X: Tensor,
    c: Tensor | None,
    weight: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    output_padding: list[int],
    groups: int,
    transposed: bool,
    channels_last: bool,
    key: int,
) -> Tensor:
    sizes = (tuple(weight), tuple(stride), tuple(padding), tuple(dilation))
    geo = Geometry(*sizes, transposed, tuple(output_padding), groups, channels_last)
    _open().convolution(key, G, X, geo, c)
    return _ticket(G)


@operator("into_pair(Tensor dW, Tensor S, int key) -> Tensor", _ticket_shape)
def _into_pair(dW: Tensor, S: Tensor, key: int) -> Tensor:
    _open().pair(key, dW, S, borrowed=True)  # the graph takes their memory back
    return _ticket(S)


def _ticket(like: Tensor) -> Tensor:
    make = torch.zeros if torch.is_anomaly_enabled() else torch.empty  # nobody reads it but anomaly detection
    return make((), dtype=torch.float32, device=like.device)

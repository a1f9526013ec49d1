# ruff: noqa: D102 - forward and backward
# torch leaves Function.apply untyped:
# mypy: disable-error-code="no-untyped-call,no-any-return"
"""What the files of this folder have in common. Each holds one family of operations, and registers them by `operation`:

    the rule        finds where the batch is in the operation's input (`use_of`) and calls its Function
    the Function    a `Squaring`, whose backward gives gradients together with their squares (`deliver`)
    the line        that `explain` prints for a parameter that goes through it

There are no side effects in backward beyond counting arrivals, which compiled graphs leave out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.utils._pytree import tree_flatten, tree_unflatten

from ...kernels import cast, sums
from ...kernels.gemm_square import sum_square, wide
from .. import into
from ..groups import Groups, UnsupportedUse, join
from ..weight import Handle, Lifted, Weight, names_of

if TYPE_CHECKING:
    from ..mini_batch import MiniBatch


class Seen(NamedTuple):
    """One use of a parameter, as `explain` has seen it."""

    x: Tensor  # the input of the operation
    axis: int  # of the batch in it
    ids: Tensor | None  # or the group of each of its rows
    groups: Groups
    shape: tuple[int, ...]  # of the parameter
    itemsize: int  # bytes of one element of its square

    def per_group(self, rows: int) -> int:
        """Rows of one micro-batch, of so many in the mini-batch."""
        if self.ids is not None:
            return -(-rows // self.groups.kappa)
        return rows * self.groups.micro // self.groups.batch

    @property
    def square(self) -> int:
        """Bytes of the square."""
        return torch.Size(self.shape).numel() * self.itemsize


class Line(NamedTuple):
    """What `explain` prints of a use."""

    rows: int  # per micro-batch
    kernel: str
    extra: int  # bytes alive while the square is formed, besides itself


COPIES = "copies per micro-batch"


def by_copies(seen: Seen) -> Line:
    """Each micro-batch meets its own copy of the parameter."""
    return Line(seen.per_group(seen.x.shape[seen.axis]), COPIES, seen.groups.kappa * seen.square)


def by_sums(seen: Seen) -> Line:
    """The shares of the micro-batches are sums over their rows."""
    return by_copies(seen)._replace(kernel="sum_square")


Handler = Callable[..., Any]


class Operation(NamedTuple):
    """An operation that one pass knows."""

    rule: Handler
    line: Callable[[Seen], Line]


OPERATIONS: dict[str, Operation] = {}


def operation(*names: str, line: Callable[[Seen], Line] = by_copies) -> Callable[[Handler], Handler]:
    """Register a rule for the torch functions of these names, with the line that `explain` prints.

    A rule is called with the mini-batch, the torch function and its arguments. It returns the result, or
    NotImplemented to leave the case to the fallback.
    """

    def register(rule: Handler) -> Handler:
        OPERATIONS.update(dict.fromkeys(names, Operation(rule, line)))
        return rule

    return register


# What a rule does.


class Use:
    """One use of weights by an operation: what its Function needs besides tensors."""

    def __init__(self, groups: Groups, axis: int, routed: Any, weights: Sequence[Weight], settings: Any = None) -> None:
        self.groups = groups
        self.axis, self.routed = axis, routed  # of the batch in the operation's input; or where its rows come from
        self.weights = weights  # in the order in which the Function takes them
        self.settings = settings  # the operation's own
        self.given: list[Any] = []  # the values and the tags of the weights
        for w in weights:
            self.given += (w.value, w.tag)


def use_of(
    mini: MiniBatch, name: str, x: Any, event: int, weights: Sequence[Any], settings: Any = None, *,
    axis: int | None = None, any_order: bool = False,
) -> Use | None:  # fmt: skip
    """The use of `weights` by the operation `name` on x, whose last `event` dimensions make one row.

    None leaves it to the fallback: x itself is made of parameters alone, or is a constant, or a weight comes from the
    batch. A rule that knows the batch dimension of x gives `axis`. Its Function may serve rows in `any_order`.
    """
    key = () if axis is not None or torch.compiler.is_compiling() else (name, event, *map(id, weights))
    known = mini.recall(key, x) if key else None
    if known is not None:
        return known if known.settings == settings else Use(known.groups, known.axis, None, known.weights, settings)
    if mini.holds(x):
        return None
    held = []  # no comprehensions: this is done for every operation, and each would be a call more
    for w in weights:
        held.append(mini.handle_of(w))
        if held[-1] is None and isinstance(w, Tensor) and w.requires_grad:
            return None
    place = mini.place(x, event, name, held, any_order) if axis is None else mini.place_at(x, axis, name, held)
    if place is None:
        return None
    found = []
    for i, w in enumerate(weights):  # a Function for rows in any order returns its pairs
        found.append(mini.weight_of(held[i], w, name, i if place.routed is None else None))
    use = Use(mini.groups, place.axis, place.routed, found, settings)
    if key:
        mini.remember(key, x, use)
    return use


def table_of(weight: Weight) -> Any:
    """The entry of a weight that is both embedding and head; None of another."""
    h = weight.handle
    return h.entry if h is not None and not h.grouped and h.entry is not None and h.entry.table else None


def varies(mini: MiniBatch, w: Any) -> bool:
    """Whether a tensor that should be a parameter comes from the batch."""
    return isinstance(w, Tensor) and w.requires_grad and not mini.holds(w)


def autocast(x: Tensor) -> Tensor:
    """x as autocast would hand it to a matrix product: a Function has to ask, and then saves the small copy."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and x.is_floating_point() and x.dtype != torch.float64:
        return cast(x, torch.get_autocast_dtype(kind))
    return x


def reduced(w: Any, x: Tensor) -> Any:
    """A weight as autocast hands it to a product with x, for its forward and its backward; None where it does not.

    Torch keeps such a copy for its own backward too, and chooses kernels by whether it is differentiable. A trace
    leaves it to the compiler.
    """
    if w is None or w.dtype == x.dtype or torch.compiler.is_compiling() or not torch.is_autocast_enabled(x.device.type):
        return None
    if not w.is_floating_point() or w.dtype == torch.float64:
        return None
    return w.detach().to(x.dtype).requires_grad_(w.requires_grad)


# What a Function does.


class Squaring(Function):
    """An operation whose backward gives squares. The check trusts no other Function with parameters.

    forward(ctx, x, use, w, tag of w, b, tag of b, ..., *others) leaves ctx.use; backward(ctx, g) ends in `returned`.
    """


def call(function: type[Squaring], x: Any, use: Use, *others: Any) -> Any:
    """`function.apply(x, use, w, tag, ..., *others)` without what it does for functorch, where that is not at work."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return function.apply(x, use, *use.given, *others)
    x = torch._C._functorch.unwrap_if_dead(x)
    return super(Function, function).apply(x, use, *use.given, *others)  # type: ignore[misc]


def unfollowed() -> AbstractContextManager[Any]:
    """A context in which a backward looks at parameters without asking the dispatcher, which would let it pass.

    But for a backward that is to be differentiated again: there the dispatcher has something to do.
    """
    return nullcontext() if torch.is_grad_enabled() else torch._C.DisableTorchFunctionSubclass()


def wanted(ctx: Any, i: int) -> Weight | None:
    """The weight number i of a use, if it wants a square."""
    return ctx.use.weights[i] if ctx.needs_input_grad[2 * i + 3] else None


Gradients = tuple[Tensor | None, Tensor | None]  # of a weight's value and of its tag
NOTHING: Gradients = (None, None)


def returned(ctx: Any, dx: Tensor | None, *pairs: Gradients) -> tuple[Any, ...]:
    """What backward returns: the gradient of x, and for each weight those of its value and of its tag."""
    grads: list[Any] = [dx, None]
    for (dW, S), w in zip(pairs, ctx.use.weights, strict=True):
        grads += (dW if dW is None or dW.dtype == w.handle.dtype else dW.to(w.handle.dtype), S)
    grads += [None] * (len(ctx.needs_input_grad) - len(grads))
    return tuple(grads)


class Kernel(NamedTuple):
    """How a weight gradient and its squares are made of operands, which are given per stretch of groups."""

    square: Callable[..., tuple[Tensor, Tensor]]  # (*operands, c) -> dW and S
    shares: Callable[..., Tensor]  # (*operands) -> every group's share (groups, *w.shape)
    into: Callable[..., Any] | None = None  # (key, *operands, c) -> the ticket's gradient; folds what it forms


SUMS = Kernel(sum_square, lambda shares: shares)  # of shares that are already formed


def deliver(groups: Groups, weight: Weight | None, kernel: Kernel, operands: Iterable[tuple[Any, ...]]) -> Gradients:
    """The gradients of a weight and of its tag, from the operands of a kernel for each stretch."""
    if weight is None:
        return NOTHING
    if weight.handle.grouped:
        return None, join([kernel.shares(*args) for args in operands])
    if len(groups.stretches) == 1:
        (args,) = operands
        if weight.into and kernel.into is not None:
            return None, kernel.into(weight.handle.entry.key, *args, groups.c)
        return hand_over(weight, *kernel.square(*args, groups.c))
    dW: Any = None
    S: Any = None
    for stretch, args in zip(groups.stretches, operands, strict=True):
        d, s = kernel.square(*args, groups.coefficients(stretch))
        dW, S = (d, s) if dW is None else (dW + d, S + s)
    return hand_over(weight, dW, S)


def deliver_at_once(groups: Groups, weight: Weight, kernel: Kernel, *operands: Any) -> Gradients:
    """`deliver` for operands that hold all groups, whatever their sizes."""
    if weight.handle.grouped:
        return None, kernel.shares(*operands)
    return hand_over(weight, *kernel.square(*operands, groups.c))


def deliver_sums(groups: Groups, weight: Weight | None, shares: list[Tensor]) -> Gradients:
    """`deliver` for shares that are already formed, (groups, *w.shape) per stretch."""
    if weight is not None and len(shares) == 1:
        return (None, shares[0]) if weight.handle.grouped else hand_over(weight, *sum_square(shares[0], groups.c))
    return deliver(groups, weight, SUMS, [(t,) for t in shares])


def deliver_rows(groups: Groups, weight: Weight, rows: list[Tensor]) -> Gradients:
    """`deliver` for a gradient that is the sum of a group's rows, (groups, rows, *w.shape) per stretch."""
    if len(rows) == 1 and rows[0].ndim == 3 and sums.takes_fused(rows[0]):  # as nearly always on a GPU
        grouped = weight.handle.grouped
        each, pair = sums.fused.row_sums(rows[0], groups.c, grouped)
        return (None, each) if grouped else hand_over(weight, *pair.unbind(0))
    if rows[0].ndim != 3 or not all(sums.takes_fused(t) for t in rows):
        return deliver_sums(groups, weight, [t[:, 0] if t.shape[1] == 1 else t.sum(1) for t in rows])
    made = [sums.row_sums(t, groups.coefficients(s)) for s, t in zip(groups.stretches, rows, strict=True)]
    if weight.handle.grouped:
        return None, join([each for each, _ in made])  # type: ignore[misc]
    return hand_over(weight, *_added([pair for _, pair in made]).unbind(0))


def deliver_places(groups: Groups, weight: Weight, images: list[Tensor]) -> Gradients:
    """`deliver_rows` for images (groups, samples, C, *spatial), whose samples and places are the rows."""
    last = [t.movedim(2, -1) for t in images]
    if all(sums.takes_fused(t) for t in last):
        return deliver_rows(groups, weight, [t.flatten(1, -2) for t in last])
    return deliver_sums(groups, weight, [t.sum((1, *range(3, t.ndim))) for t in images])


def deliver_both(
    w: Weight | None, b: Weight | None, each: Sequence[Any], pairs: Sequence[Tensor], shape: tuple[int, ...] = (-1,),
) -> list[Gradients]:  # fmt: skip
    """`deliver` for a norm's weight and bias, from the pairs (4, C) of each stretch.

    `each` has its shares (groups, 2, C), where one of the two is grouped.
    """
    rows = _added(pairs).unbind(0)
    made: list[Gradients] = []
    for i, weight in enumerate((w, b)):
        if weight is None:
            made.append(NOTHING)
        elif weight.handle.grouped:
            made.append((None, join([t[:, i].unflatten(1, shape).to(wide(weight.handle.dtype)) for t in each])))
        else:
            dW, S = rows[2 * i : 2 * i + 2]
            if len(shape) > 1:
                dW, S = dW.view(shape), S.view(shape)
            made.append(hand_over(weight, dW, S))
    return made


def hand_over(weight: Weight, dW: Tensor, S: Tensor) -> Gradients:
    """`deliver` for a pair that is made."""
    entry = weight.handle.entry
    if weight.into:
        return None, into.give(entry.key, dW, S)
    if entry is not None and not torch.compiler.is_compiling():
        entry.arrived += 1  # a parameter that is not shared must get exactly one
    return dW, S


def _added(each: Sequence[Tensor]) -> Tensor:
    """The sum of one tensor per stretch."""
    return each[0] if len(each) == 1 else torch.stack(list(each)).sum(0)


def owned(y: Tensor) -> Tensor:
    """y as no view of anything: autograd forbids writing in place over a view that a Function returns."""
    if torch.compiler.is_compiling():
        return torch.ops.aten._unsafe_view(y, y.shape)
    return y.data


class Own(Function):
    """The model's own result of an operation, in place of the one that its rule follows: same gradients."""

    @staticmethod
    def forward(ctx: Any, followed: Tensor, own: Tensor) -> Tensor:
        ctx.dtype = followed.dtype
        return owned(own)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g.to(ctx.dtype), None


def as_called(followed: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
    """The result of the very call that the model made, which a rule follows by other operations.

    These may round otherwise, or give another dtype under autocast. The arguments may hold parameters.
    """
    if torch.compiler.is_compiling():  # a trace has no leaves, and compiled kernels round by themselves
        with torch.no_grad():
            own = func(*args, **kwargs)
    else:  # torch chooses some kernels by what is differentiable
        given, form = tree_flatten((args, kwargs))
        args, kwargs = tree_unflatten([_leaf(t) for t in given], form)
        with torch.enable_grad():
            own = func(*args, **kwargs)
    leaves, spec = tree_flatten(followed)
    mine = tree_flatten(own)[0]
    return tree_unflatten([_as_own(a, b) for a, b in zip(leaves, mine, strict=True)], spec)


def _leaf(t: Any) -> Any:
    """An argument cut off from the graph, as differentiable as it is."""
    if not isinstance(t, Tensor):
        return t
    lifted = isinstance(t, Lifted) and t.is_floating_point()  # it hides its way back
    return (t.handle.value if isinstance(t, Lifted) else t).detach().requires_grad_(lifted or t.requires_grad)


def _as_own(followed: Any, own: Any) -> Any:
    if not isinstance(followed, Tensor):
        return own
    return Own.apply(followed, own.detach()) if followed.requires_grad else own


def refuse_penalty(name: str, use: Use) -> None:
    """Refuse a backward that is to be differentiated again, where it takes weights or statistics for constants."""
    if not torch.compiler.is_compiling() and torch.is_grad_enabled():
        names = names_of(w.handle for w in use.weights) or "a value"
        raise UnsupportedUse(
            f"{names} goes through {name} in a backward with create_graph=True (a gradient penalty?), and what it owes "
            "to the weights is lost; leave it out, or loop over micro-batches. Drop an open update by opt.abandon()"
        )


class Expand(Squaring):
    """w -> its κ copies (κ, *w.shape) without memory; backward squares what comes back for each."""

    @staticmethod
    def forward(ctx: Any, x: None, use: Use, w: Tensor, tag: Tensor) -> Tensor:
        ctx.use = use
        return w.detach().unsqueeze(0).expand(use.groups.kappa, *w.shape)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return returned(ctx, None, hand_over(ctx.use.weights[0], *sum_square(g, ctx.use.groups.c)))


def copies(groups: Groups, h: Handle) -> Tensor:
    """The κ copies of a value, of which every one gets its own gradient."""
    if h.grouped:
        return h.tag
    return Expand.apply(None, Use(groups, 0, None, (Weight(h.value, h.tag, h),)), h.value, h.tag)

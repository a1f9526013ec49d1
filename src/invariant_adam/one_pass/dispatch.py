# ruff: noqa: D102 - forward and backward
# torch leaves Function.apply and hooks untyped:
# mypy: disable-error-code="no-untyped-call,no-any-return"
"""Every operation that touches a parameter in an open context comes through `dispatch`.

A known operation goes to its rule. A value made from parameters alone is lifted. Any other operation of parameters with
the batch runs once per group under `vmap`, each group with its own copy of the parameters: exact for every operation
that treats samples alike, at the price of κ gradients of that parameter.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.utils._pytree import tree_flatten, tree_unflatten

from .exchange import Open
from .groups import UnsupportedUse, without_samples
from .mini_batch import MiniBatch, Mode
from .ops.base import OPERATIONS, as_called
from .tracing import asked_by_traces
from .weight import Followed, Handle, lift, names_of

PROPERTIES = {name for name in dir(Tensor) if type(getattr(Tensor, name)).__name__ in ("getset_descriptor", "property")}
# Operations that only look at a tensor or leave autograd, and properties that compute no value: they run as they are.
UNFOLLOWED = frozenset(
    "size dim ndimension numel nelement stride is_contiguous is_floating_point is_complex "  # noqa: SIM905
    "element_size detach item tolist data_ptr storage_offset get_device requires_grad_ register_hook retain_grad "
    "backward __len__ __repr__ __format__ __hash__ __bool__ __set__ __delete__ is_same_size is_pinned has_names numpy "
    "zeros_like ones_like empty_like full_like rand_like randn_like new_zeros new_ones new_empty new_full new_tensor "
    "equal is_shared untyped_storage is_nonzero register_post_accumulate_grad_hook _is_view is_inference is_conj "
    "is_neg is_signed __contains__ dim_order __reduce_ex__ __array__".split()
) | (PROPERTIES - {"T", "H", "mT", "mH", "real", "imag"})
# Operations that send each element to one place at most: the squares take the same way.
STRUCTURAL = frozenset(
    "view reshape t transpose permute unsqueeze squeeze flatten unflatten contiguous narrow "  # noqa: SIM905
    "select chunk split unbind movedim moveaxis swapaxes swapdims T mT H mH __getitem__ clone tensor_split view_as "
    "reshape_as split_with_sizes ravel adjoint".split()
)
# Conversions: the squares keep their own dtype.
CONVERSIONS = frozenset("to float double half bfloat16 type type_as cuda cpu".split())  # noqa: SIM905
# Operations whose tensor arguments line up from the right, so that a size of B under the batch is the batch.
ALIGNED = frozenset(
    "add sub subtract mul multiply div divide true_divide __add__ __radd__ __sub__ __rsub__ "  # noqa: SIM905
    "__mul__ __rmul__ __truediv__ __rtruediv__ __rdiv__ rsub cat concat concatenate stack where lerp addcmul maximum "
    "minimum pow __pow__ __rpow__ scaled_dot_product_attention dstack hstack atan2 remainder __mod__".split()
)
# The same for all but the last two dimensions.
PRODUCTS = frozenset("matmul __matmul__ __rmatmul__ bmm baddbmm".split())  # noqa: SIM905
# Operations that draw random numbers where they are in train mode.
RANDOM = frozenset(
    "dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout feature_dropout "  # noqa: SIM905
    "native_dropout bernoulli rrelu gumbel_softmax".split()
)
DRAWS = 8  # that are compared: two alone may be the same, of few numbers
IN_PLACE = {
    "__iadd__": torch.add, "add_": torch.add, "__isub__": torch.sub, "sub_": torch.sub,
    "__imul__": torch.mul, "mul_": torch.mul, "__itruediv__": torch.div, "div_": torch.div,
}  # fmt: skip
# Every other operation that writes in place. A set, because a compiled trace cannot look into a name.
WRITERS = frozenset(
    n for n in dir(Tensor) if (n[-1] == "_" and n[-2] != "_") or (n[:3] == "__i" and n[3:-2] in dir(operator))
) - {"__init__", "__invert__", "__index__", "__int__"} | {"__setitem__"}
# Arguments that are no tensors and hold none: it takes torch as long to look into others as an operation takes.
PLAIN = frozenset({int, float, bool, str, type(None), type(Ellipsis), torch.dtype, torch.device})


def name_of(func: Any) -> str:
    """The name of a torch function; a property's own name for its getter."""
    name: str = getattr(func, "__name__", None) or str(func)
    return _property(func) if name == "__get__" else name


@asked_by_traces
def _property(getter: Any) -> str:
    return str(getter.__self__.__name__)


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `func`, whose arguments hold parameters of the open context or values lifted from them."""
    mini = Open.mini_batch
    if mini is None or mini.mode is Mode.PLAIN or not torch.is_grad_enabled():
        return func(*args, **kwargs)
    name = name_of(func)
    known = OPERATIONS.get(name)
    if known is None and name in UNFOLLOWED:
        return func(*args, **kwargs)
    tracing = torch.compiler.is_compiling()
    if mini.mode is not Mode.GROUPED or tracing:
        mini.ready(name)
    if not tracing and torch._C._are_functorch_transforms_active():
        names = names_of(mini.handle_of(a) for a in tree_flatten((args, kwargs))[0] if isinstance(a, Tensor))
        raise UnsupportedUse(
            f"{names} goes through {name} inside of a transform of torch.func (vmap, grad, jacrev), which hides the "
            "batch from one_pass; write it for whole batches, or loop over micro-batches"
        )
    if known is not None:
        out = known.rule(mini, func, *args, **kwargs)
        if out is not NotImplemented:
            return out
    return fallback(mini, func, name, args, kwargs)


Followed.dispatch = staticmethod(dispatch)


def fallback(mini: MiniBatch, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Any operation without a rule of its own, or used in a way its rule does not cover."""
    if name in IN_PLACE and isinstance(args[0], Tensor) and mini.handle_of(args[0]) is None:
        func = IN_PLACE[name]  # x += p is x + p, dispatched again, and copied to x
        was = args[0].clone() if func in (torch.mul, torch.div) else args[0]  # their backward needs what was there
        return args[0].copy_(dispatch(func, (was, *args[1:]), kwargs))
    if kwargs.get("inplace"):
        kwargs = {**kwargs, "inplace": False}  # the value belongs to the parameters, not to this operation
    # `leaves` are the arguments; where one of them holds others, what it holds, and `spec` puts them together again.
    leaves, spec = [*args, *kwargs.values()], None
    if not all(isinstance(a, Tensor) or type(a) in PLAIN for a in leaves):
        leaves, spec = tree_flatten((args, kwargs))
    handles = [mini.handle_of(a) if isinstance(a, Tensor) else None for a in leaves]
    held = [h for h in handles if h is not None]
    names = names_of(held)
    for a in () if spec is None else leaves:
        if isinstance(a, (tuple, list)) and any(mini.holds(t) for t in a):
            raise UnsupportedUse(
                f"{names_of(mini.handle_of(t) for t in a)} goes through {name} in a {type(a).__name__}, which "
                "one_pass does not look into; give it a list, a tuple or a named tuple"
            )
    if name in WRITERS or kwargs.get("out") is not None:
        raise UnsupportedUse(
            f"{names} goes through {name}, which writes in place; one_pass follows values only: "
            f"write it out of place (x = x + p instead of x += p, torch.cat instead of x[:, i:j] = p)"
        )
    mini.note(held, name)
    # A tensor without a handle is the batch's or a constant.
    plain = [isinstance(a, Tensor) and h is None for a, h in zip(leaves, handles, strict=True)]
    batched = [p and mini.is_batched(a, names, name) for a, p in zip(leaves, plain, strict=True)]
    if mini.probe is not None:
        for a, p, b in zip(leaves, plain, batched, strict=True):
            if p:
                mini.probe.saw(names, name, a, _axis_in(mini, a, name, names) if b else None)
    # What differs from group to group: tensors of the batch, and handles; None for an argument that stays as it is.
    given = [a if b else h for a, h, b in zip(leaves, handles, batched, strict=True)]

    def call(*tensors: Any) -> Any:  # in the places of what is given
        it = iter(tensors)
        new = [a if g is None else next(it) for a, g in zip(leaves, given, strict=True)]
        if spec is None:
            return func(*new[: len(args)], **dict(zip(kwargs, new[len(args) :], strict=True)))
        a, k = tree_unflatten(new, spec)
        return func(*a, **k)

    if not any(batched):
        one_to_one = name in STRUCTURAL and len(held) == sum(isinstance(a, Tensor) for a in leaves)
        if name == "__getitem__":  # an index of another kind may name an element twice
            each = args[1] if isinstance(args[1], tuple) else (args[1],)
            one_to_one = one_to_one and all(i is None or i is Ellipsis or isinstance(i, (int, slice)) for i in each)
        return _lift_result(mini, call, name, held, one_to_one)
    labels = _labels(leaves, given) if name == "einsum" else None
    return _per_group(mini, call, name, names, [g for g in given if g is not None], labels)


def _lift_result(mini: MiniBatch, call: Any, name: str, held: list[Handle], one_to_one: bool) -> Any:
    """The result of an operation on parameters alone, as a value that is followed itself.

    Where each of its elements is an element of the one parameter, its tag is made of the parameter's in the same way,
    and Σ_k s_k² finds its way back. Any other is made of κ copies, which get a gradient each, to be squared at the end.
    """
    if name in RANDOM:
        first, *others = (tree_flatten(call(*[h.value for h in held]))[0] for _ in range(DRAWS))
        if not all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True)):
            raise UnsupportedUse(
                f"{names_of(held)} goes through {name} before it meets the batch; the loop would draw other numbers "
                "for each micro-batch: apply it to a value of the batch, or loop over micro-batches"
            )
    for h in held:
        if h.direct:
            mini.serve(h, f"a value of {name}", delivers=False)
    if len(held) == 1 and not held[0].grouped and (one_to_one or name in CONVERSIONS):
        h = held[0]
        values, spec = _apart(call(h.value))
        if not all(isinstance(v, Tensor) for v in values):
            return _together(values, spec)  # type() without an argument
        tags = [h.tag] * len(values) if name in CONVERSIONS else _apart(call(h.tag))[0]
        out = [lift(v, Handle(v, t, False, h.entry, label=h.label)) for v, t in zip(values, tags, strict=True)]
        return _together(out, spec)
    tracing = torch.compiler.is_compiling()
    values, spec = _apart(call(*[_differentiable(h.value, tracing) for h in held]))
    if not any((isinstance(v, Tensor) and v.requires_grad) or h.grouped for v in values for h in held):
        return _together(values, spec)
    tags = [mini.grouped(h) for h in held]
    out = []
    for i, v in enumerate(values):
        if not isinstance(v, Tensor) or not v.is_floating_point():
            out.append(v)
            continue

        def nth(*tensors: Tensor, i: int = i) -> Tensor:
            return _apart(call(*tensors))[0][i]

        once = not (tracing or one_to_one or name in CONVERSIONS)
        tag = Derive.apply(nth, mini.groups.kappa, v.detach(), *tags) if once else torch.func.vmap(nth)(*tags)
        out.append(lift(v, Handle(v, tag, True, None, label=names_of(held))))
    return _together(out, spec)


def _differentiable(value: Tensor, tracing: bool) -> Tensor:
    """A value as differentiable as it is in the model: torch chooses kernels by that."""
    if tracing:  # a trace refuses 1 - p for the class of a parameter, and takes it for a view's
        return value.view_as(value)
    return value if value.requires_grad or not value.is_floating_point() else value.detach().requires_grad_()


def _apart(result: Any) -> tuple[list[Any], Any]:
    """The tensors of a result, and what puts them together again."""
    return ([result], None) if isinstance(result, Tensor) else tree_flatten(result)


def _together(values: list[Any], spec: Any) -> Any:
    return values[0] if spec is None else tree_unflatten(values, spec)


class Derive(Function):
    """A value of parameters alone, which `fn` has made of theirs, expanded over the κ groups."""

    @staticmethod
    def forward(ctx: Any, fn: Any, kappa: int, value: Tensor, *tags: Tensor) -> Tensor:
        kind = tags[0].device.type
        ctx.fn, ctx.autocast = fn, (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        ctx.save_for_backward(*[t[0] for t in tags])
        return value.unsqueeze(0).expand(kappa, *value.shape)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        with torch.enable_grad(), torch.autocast(*ctx.autocast):  # which a backward is not in
            leaves = [t.detach().requires_grad_() for t in ctx.saved_tensors]
            value = ctx.fn(*leaves)
        grads = torch.autograd.grad(value, leaves, g, is_grads_batched=True, allow_unused=True)
        return (None, None, None, *grads)


def _labels(leaves: list[Any], given: list[Any]) -> list[str] | None:
    """The labels of an einsum's dimensions, for each of its operands that are `given` and for its result.

    None where it is not written with labels, or leaves some to an ellipsis.
    """
    equation = leaves[0]
    if not isinstance(equation, str) or "." in equation:
        return None
    left, arrow, right = equation.replace(" ", "").partition("->")
    if not arrow:
        right = "".join(sorted(label for label in set(left) - {","} if left.count(label) == 1))
    operands = [g for a, g in zip(leaves, given, strict=True) if isinstance(a, Tensor)]
    return [each for each, g in zip(left.split(","), operands, strict=False) if g is not None] + [right]


def _per_group(
    mini: MiniBatch, call: Any, name: str, names: str, given: list[Handle | Tensor], labels: list[str] | None
) -> Any:
    """One call per group under vmap, with the parameters' own copy for each."""
    groups = mini.groups
    axes = [_axis_of(mini, a, name, names) if isinstance(a, Tensor) else -1 for a in given]
    # Of the batched argument of most dimensions, by which the batch is found in values of parameters and in results.
    widest, axis, shape = 0, -1, torch.Size()
    for i, (a, at) in enumerate(zip(given, axes, strict=True)):
        if isinstance(a, Tensor) and a.ndim > len(shape):
            widest, axis, shape = i, at, a.shape
    # Where the labels of an einsum say that the batch is, in each argument and in the result; None without labels.
    under: list[int | None] = [None] * (len(given) + 1)
    if labels is not None:
        under = [each.find(labels[widest][axis]) for each in labels]
    pieces, rows = [], []  # of each argument: per stretch (groups, ...); of each batched one: the rows of a group
    for a, at, below in zip(given, axes, under, strict=False):
        if isinstance(a, Handle):
            pieces.append(own_copies(mini, name, a, axis, shape, below))
        else:
            stacked = groups.stack(a, at)
            pieces.append([x.movedim(1, at + 1) if at else x for x in stacked])
            rows.append(stacked[0].shape[1])
    try:
        results = [torch.func.vmap(call, randomness="different")(*inputs) for inputs in zip(*pieces, strict=True)]
    except (RuntimeError, ValueError, IndexError, NotImplementedError) as error:
        why = str(error).splitlines()[0]
        raise UnsupportedUse(
            f"{names} goes through {name}, which has no rule and does not run group by group ({why}); freeze the "
            "parameter, write the operation with ones that have rules, or loop over micro-batches"
        ) from error
    flat = [_apart(r) for r in results]
    merged = []
    for outs in zip(*[f[0] for f in flat], strict=True):
        first = outs[0]  # (groups, ...)
        likely = (axis if under[-1] is None else under[-1], *range(first.ndim - 1))
        where = [a for a in likely if 0 < a + 1 < first.ndim and first.shape[a + 1] in rows]
        if not where:
            raise UnsupportedUse(
                f"{names} goes through {name}, whose result of shape {tuple(first.shape[1:])} per "
                "group has no batch dimension; reduce over samples in the loss, not before"
            )
        a = where[0]
        merged.append(groups.merge([o.movedim(a + 1, 1) if a else o for o in outs], a))
    values = [a.value if isinstance(a, Handle) else a for a in given]
    if mini.probe is not None:
        with torch.no_grad():
            plain = call(*values)
        mini.probe.compare(names, name, merged, _apart(plain)[0])
    result = _together(merged, flat[0][1])
    if name in RANDOM:
        return result
    if not torch.compiler.is_compiling():
        values = [lift(a.value, a) if isinstance(a, Handle) else a for a in given]
    return as_called(result, call, *values)


def _axis_in(mini: MiniBatch, x: Tensor, name: str, names: str) -> int | None:
    """The batch dimension of x: the one that a check has found out, or the one that its shape suggests."""
    found = mini.facts.findings.axes
    axis = found.get((names, name)) if found else None
    if axis is not None and axis < x.ndim and x.shape[axis] == mini.groups.batch:
        return axis
    return mini.groups.axis_of(x.shape)


def _axis_of(mini: MiniBatch, x: Tensor, name: str, names: str) -> int:
    if x.ndim == 0:
        raise without_samples(names, f"goes through {name} with a scalar of the batch")
    axis = _axis_in(mini, x, name, names)
    if axis is None:
        raise UnsupportedUse(
            f"{names} goes through {name} with a tensor of shape {tuple(x.shape)}, in which no dimension is the batch "
            f"of {mini.groups.batch}; keep the batch in dimension {mini.groups.axis}"
        )
    return axis


def own_copies(
    mini: MiniBatch, name: str, h: Handle, axis: int, shape: torch.Size, under: int | None = None
) -> list[Tensor]:
    """Per stretch, the copies of a lifted value, cut to each group's samples where it lies along the batch's `axis`.

    Its own dimension there is `under`, or -1; None where the operation lines its arguments up from the right, or not.
    """
    groups, tag, size = mini.groups, mini.grouped(h), shape[axis]
    aligned = under is not None
    if under is None:
        under = axis - (len(shape) - h.value.ndim)
        aligned = name in ALIGNED or (name in PRODUCTS and under < h.value.ndim - 2)
    if not aligned or under < 0 or h.value.shape[under] != size or size == 1:
        return [tag[s.lo : s.hi] for s in groups.stretches]
    times, copies = size // groups.batch, []
    for s in groups.stretches:
        m = (s.last - s.first) // (s.hi - s.lo) * times
        if h.resize is not None and times == 1:
            copies.append(h.resize(s.lo, s.hi, m))
        else:
            n = s.hi - s.lo
            own = tag[s.lo : s.hi].narrow(under + 1, s.first * times, n * m).unflatten(under + 1, (n, m))
            copies.append(own.diagonal(0, 0, under + 1).movedim(-1, 0))  # group k's copy at group k's samples
    return copies

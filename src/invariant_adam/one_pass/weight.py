"""What is known of a parameter (`Entry`), of a value made of parameters (`Handle`), and of one use of it (`Weight`)."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from itertools import count
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from ..fold.pair import Taker
from ..kernels.gemm_square import wide
from .exchange import Open
from .groups import UnsupportedUse
from .tracing import part_of_traces

_keys = count()


class Link(NamedTuple):
    """The way from a table's later uses to an embedding's backward, which runs after theirs.

    With the share U_k of micro-batch k from each use, (Σ U_k)² has the cross terms 2 Σ U_k∘E_k. An embedding's E_k is
    zero but at its tokens' rows. So each later use returns its own U_k at these rows as the "gradient" of `rows`.
    """

    rows: Tensor  # (n, D): zeros without memory, a result of the embedding's Function
    tokens: Tensor  # (n,), micro-batch by micro-batch


class Entry:
    """A trainable parameter: its companion leaf, what is known of it, and what has happened in this mini-batch."""

    def __init__(self, name: str, param: Tensor) -> None:
        self.name = name
        self.module = name.rpartition(".")[0]  # the name of the one it belongs to
        self.key = next(_keys)
        self.param = param
        self.size = param.numel()
        # The square arrives as the "gradient" of this leaf: a zero of stride 0, so it costs no memory. Autograd keeps
        # gradients of such a leaf in the order of its dimensions, so these are in the order of the parameter's memory:
        # the square of a channels-last weight is left as it is made, and lies like its moments.
        with torch._C.DisableTorchFunctionSubclass():
            plain, strides = param.is_contiguous() or param.ndim < 4, param.stride()
            order = range(param.ndim) if plain else sorted(range(param.ndim), key=lambda d: -strides[d])
            zero = torch.zeros((), dtype=wide(param.dtype), device=param.device)
            self.companion = zero.expand([param.shape[d] for d in order]).requires_grad_()
        self.places = None if plain else [order.index(d) for d in range(param.ndim)]  # of its dimensions there
        # What a check, or the structure of the model, has said of it:
        self.tied = False  # used more than once in a forward
        self.table: bool | None = None  # of those: by embeddings, then by one linear layer, and by nothing else
        self.reached = False  # by the gradients of the model's outputs
        self.picked: frozenset[str] = frozenset()  # operations in which it has met rows that were picked by index
        self.tracked: Tensor | None = None  # num_batches_tracked of the batch norm it belongs to
        self.cumulative = False  # that batch norm averages over all updates, momentum=None
        # Who else is interested in it:
        self.hooks = 0  # on the parameter after a gradient, known to be this package's
        self.listens = False  # has a hook there itself
        self.taker: Taker | None = None  # wants its pairs as they are made
        self.watcher: Callable[[Entry], None] | None = None  # is told of each gradient, while a context is open
        # The mini-batch under way:
        self.before: Tensor | None = None  # p.grad as it was before
        self.operations: set[str] = set()  # it went through
        self.begin()
        self.restart()
        # No hook holds the entry. The parameter outlives what was known of it; and Python does not see a cycle through
        # a hook of the companion, so that no parameter would ever be freed. A graph holds the entry.
        me = weakref.ref(self)

        def fired(_: Tensor) -> None:
            entry = me()
            if entry is not None:
                entry.fire()

        self.companion.register_post_accumulate_grad_hook(fired)

    def listen(self) -> None:
        """Have the watcher told of gradients of the parameter, where no square will come with them."""
        if self.listens:
            return
        me = weakref.ref(self)

        def arrived(_: Tensor) -> None:
            mini, entry = Open.mini_batch, me()
            if mini is not None and mini.single and entry is not None and entry.watcher is not None:
                entry.watcher(entry)

        self.listens = True
        weakref.finalize(self, self.param.register_post_accumulate_grad_hook(arrived).remove)

    def begin(self) -> None:
        """Make ready for a mini-batch."""
        self.arrived = 0  # squares delivered in this backward; a compiled graph does not count
        self.fired = 0  # backwards that have reached the companion
        self.waits = False  # the pair is complete, and waits for others to be handed over with
        self.done = False  # the pair has been handed over

    def restart(self) -> None:
        """Make ready for a forward."""
        self.shared: Tensor | None = None  # the κ expanded copies that all uses of a tied parameter draw from
        self.links: tuple[Link, ...] = ()  # of a table: what its later uses owe to the earlier
        self.headed = False  # a table's last use has been

    def shaped(self, t: Tensor) -> Tensor:
        """The companion, or its gradient, in the parameter's shape."""
        return t if self.places is None else t.permute(self.places)

    @property
    def through(self) -> str:
        """The operations it went through, for messages."""
        return ", ".join(sorted(self.operations)) or "an operation that torch does not show"

    def refuse_hooks(self, *, called: bool) -> None:
        """Refuse hooks of others that could change a gradient and not its square.

        Hooks on the parameter itself are for `Watched` to see, where they are `called`.
        """
        if self.param._backward_hooks and not called:
            raise UnsupportedUse(
                f"{self.name} has a hook (register_hook), which into= would not call, since no gradient is left in "
                "memory; remove it, or leave into= out"
            )
        hooks = self.param._post_accumulate_grad_hooks or ()
        if len(hooks) != self.hooks:
            for hook in dict(hooks).values():
                self.refuse_after(hook)
            self.hooks = len(hooks)

    def refuse_after(self, hook: Callable[[Tensor], None]) -> None:
        """Refuse a hook after a gradient that is not this package's."""
        if not str(hook.__module__).startswith(__name__.partition(".")[0]):
            raise UnsupportedUse(
                f"{self.name} has a hook (register_post_accumulate_grad_hook) that would see the gradient of a whole "
                "mini-batch, and could change it without its square; remove it, or loop over micro-batches"
            )

    def refuse_second(self) -> None:
        """Refuse a square that comes after the pair is gone."""
        raise UnsupportedUse(
            f"{self.name}: a second square arrived after the first was folded, without their cross terms; drop the "
            "update with opt.abandon(), then call the model once, add up the losses and call backward once per "
            "mini-batch, or loop"
        )

    def fire(self) -> None:
        """Note that a backward has reached the companion."""
        if Open.mini_batch is None:
            raise RuntimeError(
                f"{self.name}: a backward of one_pass ran after its context was closed, and would leave a mini-batch's "
                "gradient for a micro-batch's; call it inside. Clear what is left by zero_grad(), or opt.abandon()"
            )
        self.fired += 1
        if self.watcher is not None:
            self.watcher(self)


def same(x: Tensor, y: Tensor) -> Tensor:
    """Where two tensors are equal; a not-a-number equals another."""
    return (x == y) | (x.isnan() & y.isnan())


class Handle:
    """A value of parameters with its tag, which leads squares back to them, in one of two modes.

    one use   the value is the parameter (or a view of it), the tag its companion's:
              backward returns dW for the value and Σ_k c_k s_k² for the tag
    grouped   the value is detached, the tag its stride-0 expansion over the κ groups:
              backward returns all s_k for the tag, so that the uses of a shared parameter add up before they are
              squared
    """

    def __init__(
        self, value: Tensor, tag: Tensor, grouped: bool, entry: Entry | None,
        resize: Callable[[int, int, int], Tensor] | None = None, label: str = "", direct: bool = False,
        own: bool = False,
    ) -> None:  # fmt: skip
        self.value = value
        self.tag = tag
        self.grouped = grouped
        self.entry = entry  # None where a delivery is not to be counted for a parameter
        self.named = label
        self.resize = resize  # of a value spread over the batch: (lo, hi, m) -> copies of m samples for each group
        self.direct = direct  # the parameter itself
        self.own = own or direct  # or its elements in another place: nothing was repeated for each sample
        self.dtype = value.dtype

    @property
    def label(self) -> str:
        """The parameters it comes from, by name; asked for only where it is needed, since a trace guards it."""
        return self.named or ("" if self.entry is None else self.entry.name)


Held = Iterable[Handle | None]


def names_of(held: Held) -> str:
    """The names of the parameters behind some handles."""
    return ", ".join(dict.fromkeys(h.label for h in held if h is not None))


class Weight(NamedTuple):
    """A parameter as one operation uses it: its value, its tag, and its handle; without the last two, a constant."""

    value: Any
    tag: Any = None
    handle: Any = None  # Handle | None
    into: bool = False  # its pair goes to the optimizer as it is made (see `into`); the tag is then a ticket


class Followed:
    """A tensor whose operations come to `dispatch`."""

    dispatch: ClassVar[Callable[..., Any]]  # the module of this name puts it here, which imports this one

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return Followed.dispatch(func, args, kwargs or {})


part_of_traces(Followed.__dict__["__torch_function__"].__func__)


class OnePassParameter(Followed, nn.Parameter):
    """A parameter inside an open context: its class is swapped for this one and swapped back."""

    one_pass_entry: Entry
    grad_armed = True  # its gradient is a mini-batch's: see `fold.pair`

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        with torch._C.DisableTorchFunctionSubclass():  # a copy is outside of the context
            copy = memo[id(self)] = nn.Parameter(self.data.clone(), self.requires_grad)
        return copy

    def register_hook(self, hook: Any) -> Any:
        """Refuse it: only the hooks that were there when the context opened are watched."""
        raise UnsupportedUse(
            f"{self.one_pass_entry.name} is given a hook (register_hook) inside one_pass, which does not watch it "
            "there; register it before"
        )

    def register_post_accumulate_grad_hook(self, hook: Any) -> Any:
        """Refuse those of others, as on entry."""
        self.one_pass_entry.refuse_after(hook)
        return super().register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]


class Lifted(Followed, torch.Tensor):
    """A value made from parameters alone, still to meet the batch: a transposed weight, a slice of a position table."""

    handle: Handle


def lift(value: Tensor, handle: Handle) -> Tensor:
    """A `Lifted` that looks like `value`."""
    plain = not torch.compiler.is_compiling() and not value.requires_grad
    out = (value if plain else apart(value)).as_subclass(Lifted)  # which is another tensor
    out.handle = handle
    return out


def apart(value: Tensor) -> Tensor:
    """A value without its way back to the parameters: that goes by the tag.

    A trace may overlook a `Lifted` among the arguments of an operation (see `tracing`). There the value keeps its way
    back, so that the gradient of what was overlooked arrives without a square, and is refused.
    """
    return value.view_as(value) if torch.compiler.is_compiling() else value.detach()

"""Micro-batch gradients -> m, v -> weights: `InvariantAdam`, a `torch.optim.Optimizer`.

The way of a gradient through this file: a hook (`fold="backward"`) or `fold()` (`fold="call"`) hands it to `_fold`,
which counts it (`_count`), adds it to the moments and drops it; `step` closes the update: it scales the hyperparameters
to the number of micro-batches that came, normalises and debiases by scalars alone, and moves the weights. A gradient
that is counted may wait: a small one for others to share a launch with, one that is known to be a whole update for
`step` to fold it and move the weights in the same pass over memory.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import chain
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, overload

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from .diagnostics import NoiseScale, noise_scale
from .fold import checks, hooks, pair, scalars
from .fold.ranks import Ranks, in_touch, placed
from .fold.update import Fold, Update
from .kernels import adam as kernels
from .scaling import RULES, check_decay, check_hyperparameters, check_keep, check_rho, find_rule

if TYPE_CHECKING:
    from .graphs import Tape

F = TypeVar("F", bound=Callable[..., Any])
# An update's scalars and counters live on the host: torch.compile breaks its graph here, once, and never recompiles.
_eager: Callable[[F], F] = torch.compiler.disable

_ONES = (1.0, 1.0)
# Where launches are worth sharing: gradients wait for others until the end of their backward, at most _QUEUE elements
# of them at a time: 32 MiB of float32 pairs.
_SHARING = frozenset({"cuda", "xpu", "mps"})
_QUEUE = 1 << 22
_promote = cache(torch.promote_types)
_COUNTERS = itemgetter(*scalars.fresh())

UpdateHook = Callable[["InvariantAdam", int, int], None]


class InvariantAdam(Optimizer):
    r"""Adam(W) whose trajectory does not depend on the batch size (Wang & Aitchison, Algorithm 3).

    Each of the κ micro-batches of an update is squared before it is averaged:

        m ← (1−γ₁′)m + γ₁′ mean_k g_k       v ← (1−γ₂′)v + γ₂′ mean_k g_k²
        w ← (1−η′λ)w − η′ m̂ / (√v̂ + ε)

    where η′ and γ′ = 1 − β′ are the hyperparameters scaled to this update's batch, ρ = κM/B₀ times the tuned one.
    How many micro-batches make an update is free, from update to update; a parameter that has no gradient in some of
    them is scaled by its own count.

    Args:
        params: parameters, named parameters or parameter groups, as for every `torch.optim.Optimizer`. A group may
            set its own `lr`, `betas`, `eps`, `weight_decay`, `maximize` and `decoupled`.
        lr: learning rate η of one update at the tuned batch size. A float, or a 0-d tensor on the CPU.
        betas: EMA coefficients of one update at the tuned batch size.
        eps: ε; it does not scale, since v is at the scale of one micro-batch whatever the batch size is.
        weight_decay: decay λ.
        micro_batch_size: M, samples in a micro-batch. None: unknown; the micro-batch itself is the unit.
        tuned_batch_size: B₀, samples per update for which `lr`, `betas` and `weight_decay` were tuned. None: one
            micro-batch.
        rule: "exponential", valid at any batch size, or "linear", the paper's (see `invariant_adam.scaling`).
        fold: "backward" folds each gradient in an autograd hook and frees it at once, so that `p.grad` is always
            None and no gradient accumulator exists. "call" leaves `p.grad` alone until `fold()`.
        loss_divisor: what the training loop divided each micro-batch loss by (many trainers divide by κ).
        decoupled: True for AdamW's decay; False for L2, λw added to each micro-batch gradient.
        maximize: ascend instead of descend.
        state_dtype: dtype of the moments at least; those of a wider parameter have its dtype.
        max_micro_norm: clip each micro-batch gradient to this norm: the norm over all parameters with fold="call",
            over each tensor with fold="backward". Unlike clipping the mean, this does not depend on the batch size.
        on_nonfinite: what to do about a NaN, an infinity or a square that overflows. Its element is left out of the
            moments in any case; "skip" then goes on and warns (see `nonfinite`), "raise" stops at `step()`.
        process_group: the ranks that see different data, where `distributed.prepare` is to take them from here.
        adamw_options: AdamW's own options, so that its call can be edited in one place: `fused` and `foreach` choose
            nothing here and are ignored; `amsgrad`, `capturable` and `differentiable` are refused unless False.

    A loop over four micro-batches of 8 samples, tuned at 8 samples per update:

    >>> _ = torch.manual_seed(0)
    >>> model = torch.nn.Linear(3, 1)
    >>> opt = InvariantAdam(model.parameters(), lr=1e-3, micro_batch_size=8)
    >>> for x in torch.randn(4, 8, 3):
    ...     model(x).square().mean().backward()
    >>> model.weight.grad is None, opt.kappa
    (True, 4.0)
    >>> opt.step()
    >>> opt.samples_seen
    32
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        micro_batch_size: int | None = None,
        tuned_batch_size: int | None = None,
        rule: str = "exponential",
        fold: str = "backward",
        loss_divisor: float = 1.0,
        decoupled: bool = True,
        maximize: bool = False,
        state_dtype: torch.dtype = torch.float32,
        max_micro_norm: float | None = None,
        on_nonfinite: str = "skip",
        process_group: Any = None,
        **adamw_options: Any,
    ) -> None:
        checks.check_adamw_options(adamw_options)
        checks.check_sizes(micro_batch_size, tuned_batch_size)
        find_rule(rule, ("exponential", "linear"))
        checks.check_choice("fold", fold, ("backward", "call"))
        checks.check_choice("on_nonfinite", on_nonfinite, ("skip", "raise"))
        if max_micro_norm is not None:
            checks.check_positive("max_micro_norm", max_micro_norm)
        checks.check_state_dtype(state_dtype)
        self.loss_divisor = loss_divisor
        self.max_micro_norm = max_micro_norm
        self._fold_in = fold
        self._state_dtype = state_dtype
        self._on_nonfinite = on_nonfinite
        self._group_index: dict[Tensor, int] = {}
        self._update_hooks: OrderedDict[int, UpdateHook] = OrderedDict()
        self._warned = False  # of an update whose size nobody announced
        self._weight = 1.0  # n/M of the micro-batch at hand
        self._hooked: set[Tensor] = set()  # parameters whose gradients come here by a hook
        self._bound: list[int] = []  # ids of all parameters, while each has its state and its hook
        # Elements that were not finite and were left out, counted on their device; and those the user was told of.
        self._skipped: dict[torch.device, Tensor] = {}
        self._reported = 0
        self._update = Update()
        self._tape: Tape | None = None  # of the graph that is being captured
        self.process_group = process_group
        self._ranks = Ranks()  # `distributed.prepare` puts its own here
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "decoupled_weight_decay": decoupled,  # torch's own key, so that Adam and AdamW read it
            "micro_batch_size": micro_batch_size,
            "tuned_batch_size": tuned_batch_size,
            "rule": rule,
            "samples_seen": 0,
            "kappa": 0.0,  # of the last update
        }
        super().__init__(params, defaults)
        if fold == "backward":
            hooks.watch()

    # ---------------------------------------------------------------- what the user asks and tells

    @property
    def micro_batch_size(self) -> int | None:
        """M, samples in a micro-batch; None when it was not given."""
        size: int | None = self.param_groups[0]["micro_batch_size"]
        return size

    @property
    def tuned_batch_size(self) -> int | None:
        """B₀, samples per update at which the hyperparameters hold; None for one micro-batch."""
        size: int | None = self.param_groups[0]["tuned_batch_size"]
        return size

    @property
    def kappa(self) -> float:
        """κ, micro-batches folded into the update that is open; a ragged one counts n/M."""
        return self._update.kappa

    @property
    def samples_seen(self) -> int:
        """Samples that finished updates consumed; micro-batches, where no `micro_batch_size` was given."""
        seen: int = self.param_groups[0]["samples_seen"]
        return seen

    @property
    def loss_divisor(self) -> float:
        """What the training loop divided each micro-batch loss by; may be set between updates."""
        return self._loss_divisor

    @loss_divisor.setter
    def loss_divisor(self, value: float) -> None:
        checks.check_positive("loss_divisor", value)
        self._loss_divisor = float(value)

    @property
    def nonfinite(self) -> int:
        """Gradient elements left out of the moments so far because they were not finite (waits for the device)."""
        return sum(int(count) for count in self._skipped.values())

    def noise_scale(self) -> NoiseScale:
        """Estimate the gradient's signal and noise from the moments; see `invariant_adam.diagnostics`."""
        return noise_scale(self)

    def expect(self, kappa: float) -> None:
        """Declare how many micro-batches the coming update has; without it, as many as the update before.

        A batch size that changes from one update to the next is then exact, not only to first order. It is a promise
        of at most κ: `step()` refuses more gradients of a parameter than that, which is how a second backward over
        the same micro-batch shows.

        `expect(1)` says that each gradient is a whole update. With fold="backward" they then wait for `step()`, as
        AdamW's do, which folds them and moves the weights in one pass over memory instead of two.
        """
        self._update.expect(kappa)

    @torch.no_grad()
    def abandon(self) -> None:
        """Give up the update that is open, without moving a weight: after a backward that failed, say.

        Gradients cannot be taken out of a sum. What was folded stays in the averages, properly normalised, as that of
        an update whose weights did not move; in the very first update the moments go back to zero. Nothing of it
        counts as seen.
        """
        self._flush()
        self._ranks.abandon(self)
        for p, part in self._update.parts.items():
            state = self.state[p]
            if part.a is None:
                state["exp_avg"].zero_()
                state["exp_avg_sq"].zero_()
            else:
                state.update(scalars.close(state, part, part.a), kappa=state["kappa"])
        self._update = Update()
        self.zero_grad()

    @contextmanager
    def ragged(self, samples: int) -> Iterator[None]:
        """Fold the gradients of this context as those of a smaller micro-batch, of `samples` < M samples.

        Its loss is the mean over its own samples, and it counts n/M micro-batches in both moments.
        """
        size = self.micro_batch_size
        if size is None:
            raise ValueError(
                f"ragged(samples={samples}) needs to know the size of a full micro-batch; give micro_batch_size to "
                "InvariantAdam"
            )
        if not 0 < samples <= size:
            raise ValueError(
                f"ragged(samples={samples}) must be between 1 and micro_batch_size={size}: the square of a larger "
                "micro-batch is on another scale; split it"
            )
        before, self._weight = self._weight, samples / size
        try:
            yield
        finally:
            self._weight = before

    def register_update_hook(self, hook: UpdateHook) -> RemovableHandle:
        """Have `hook(optimizer, start, stop)` called in each `step()` once κ is known and before a weight moves.

        The update consumes the samples from `start` to `stop`. Sample-based schedules set the learning rate here.
        """
        handle = RemovableHandle(self._update_hooks)
        self._update_hooks[handle.id] = hook
        return handle

    # ---------------------------------------------------------------- gradient -> moments

    @_eager
    @torch.no_grad()
    def fold(self) -> None:
        """Fold the `p.grad` of all parameters as one micro-batch and free them (fold="call")."""
        if self._fold_in != "call":
            raise RuntimeError(
                'fold() is for InvariantAdam(fold="call"); with fold="backward" each backward folds by itself: '
                "remove the call"
            )
        self._bind()
        params = [p for p in self._params() if p.grad is not None]
        if not params:
            raise RuntimeError(
                "fold() found no gradient: no backward reached the parameters of this optimizer since the last fold()"
            )
        plain = all(pair.peek(p) is None for p in params)
        self._fold(params)
        if plain:
            self._update.count_call(self._weight)

    def on_grad(self, p: Tensor) -> None:
        """Fold what a backward just left on `p`: a micro-batch gradient, or what FSDP2's ranks have made of theirs."""
        if torch.is_grad_enabled():  # create_graph=True; elsewhere the context would only cost time
            with torch.no_grad():
                self.on_grad(p)
            return
        received = self._ranks.receive(self, p)
        if received is not None:
            self._update.watch_backward(self._flush_queue)
            self._fold([p], [_Arrival(*received)])
            return
        if pair.is_there(p):
            self._update.watch_backward(self._flush_queue)
        else:
            self._update.count_backward(self._weight, self._flush_queue)
        self._fold([p])

    def on_pairs(self, params: list[Tensor], pairs: list[pair.Pair]) -> None:
        """Fold pairs of a one-pass mini-batch, just made by a backward."""
        if torch.is_grad_enabled():
            with torch.no_grad():
                self.on_pairs(params, pairs)
            return
        self._update.watch_backward(self._flush_queue)
        self._fold(params, list(map(self._arrival, params, pairs)))

    @property
    def room(self) -> int:
        """Elements of pairs that may wait, before they come here, to share a launch with others."""
        alone = self._ranks.waits  # others are to be sent each gradient as it comes
        return _QUEUE if alone and next(self._params()).device.type in _SHARING else 0

    def _fold(self, params: list[Tensor], arrivals: list[_Arrival] | None = None) -> None:
        """Fold the pairs of `params` that arrived, or take off and fold what is on them."""
        self._refuse_capture(params[0])
        if self.max_micro_norm is not None and (arrivals or any(pair.is_there(p) for p in params)):
            raise RuntimeError(
                f"max_micro_norm={self.max_micro_norm:g} clips each micro-batch gradient, and a one-pass mini-batch "
                "never has them apart; loop over micro-batches, or set opt.max_micro_norm = None"
            )
        update, ranks = self._update, self._ranks
        parts = [self._part(p) for p in params]  # refuses before anything changes
        if update.late or update.queue:
            for p, part in zip(params, parts, strict=True):
                if part.kappa and (p in update.late or p in update.queue):
                    self._flush()
        arrivals = arrivals or [self._take(p) for p in params]
        self._condition(params, arrivals)
        if ranks.absorb(self, params, parts, arrivals):
            return
        now = []
        # A list has waited for each other already.
        sharing = self._fold_in == "backward" and len(params) == 1 and torch._C._current_graph_task_id() >= 0
        for p, part, x in zip(params, parts, arrivals, strict=True):
            keep, gain, place = self._count(p, part, x.kappa, x.scale, x.square is not None, x.signed)
            fold = Fold(p, x.grad, x.square, keep, gain, place)
            if update.expected is not None and self._is_whole(part, x):
                update.late[p] = fold
            elif sharing and x.grad.numel() < _QUEUE and not x.borrowed and x.grad.device.type in _SHARING:
                # It waits for the end of the backward that is running, to share a launch with others.
                size = x.grad.numel()
                update.queued += size
                if update.queued > _QUEUE:
                    self._flush_queue()
                    update.queued = size
                update.queue[p] = fold
                ranks.after(self, [p])
            else:
                now.append(fold)
        if now:
            self._launch(now)

    def _is_whole(self, part: scalars.Part, x: _Arrival) -> bool:
        """Whether a gradient is all that its parameter gets in this update, so that it may wait for `step`.

        Only a declared κ tells. A pair never waits: its two tensors would cost more memory than the pass is worth. Nor
        do gradients that the user has in hand (fold="call") and may write over.
        """
        expected = self._update.expected
        if expected is None or x.square is not None or self._fold_in != "backward" or not self._ranks.waits:
            return False
        return part.kappa == x.kappa >= expected

    def _count(
        self, p: Tensor, part: scalars.Part, kappa: float, scale: tuple[float, float], paired: bool, signed: bool
    ) -> tuple[tuple[float, float], tuple[float, float], int]:
        """Count a gradient of `p`; return keep, gain and its place on the tape: m ← keep₁·m + gain₁·g.

        Args:
            p: the parameter.
            part: its part in this update.
            kappa: micro-batches in the gradient.
            scale: factors that make the mean of them from the gradient, the mean of squares from the square.
            paired: whether the square comes along.
            signed: whether `maximize` and `loss_divisor` are in the gradient already.
        """
        place = -1 if self._tape is None else self._tape.arrive(p, part, kappa, scale, paired, signed)
        sign = 1.0 if signed else self._sign(p)
        update = self._update
        if not part.kappa:
            update.parts[p] = part
        update.kinds.add(paired)
        keep, (b1, b2), (scale1, scale2) = part.keep, part.b, scale
        part.keep = _ONES
        part.kappa += kappa
        return keep, (b1 * kappa * sign * scale1, b2 * kappa * sign * sign * scale2), place

    def _sign(self, p: Tensor) -> float:
        return -self._loss_divisor if self._group(p)["maximize"] else self._loss_divisor

    def _launch(self, folds: list[Fold]) -> None:
        """Fold gradients that are counted, those with the same scalars in one launch."""
        for alike in self._alike(folds):
            fold = alike[0]
            states = [self.state[f.param] for f in alike]
            local = self._ranks.local
            kernels.fold(
                [f.grad for f in alike],
                None if fold.square is None else [f.square for f in alike if f.square is not None],
                [local(state["exp_avg"]) for state in states],
                [local(state["exp_avg_sq"]) for state in states],
                keep=fold.keep,
                gain=fold.gain,
                count=self._counter(fold.grad.device),
                slots=None if self._tape is None else self._tape.slots(states[0]["exp_avg"], [f.place for f in alike]),
            )
        self._ranks.after(self, [f.param for f in folds])

    def _alike(self, folds: list[Fold]) -> Iterable[list[Fold]]:
        """Sort folds by what one launch must share; by group too, since a captured launch outlives today's values."""
        if len(folds) == 1:
            return [folds]
        alike: dict[Any, list[Fold]] = defaultdict(list)
        several = len(self.param_groups) > 1
        for f in folds:
            index = self._group_index[f.param] if several else 0
            grad = f.grad
            alike[index, f.keep, f.gain, grad.device, grad.dtype, f.square is None].append(f)
        return alike.values()

    @torch.no_grad()
    def _flush_queue(self) -> None:
        """Fold the small gradients that wait for each other, in one launch."""
        update = self._update
        folds, update.queue, update.queued = list(update.queue.values()), {}, 0
        if folds:
            self._launch(folds)

    def _flush(self) -> None:
        """Fold all that waits, so that the moments hold what is counted."""
        self._flush_queue()
        folds, self._update.late = list(self._update.late.values()), {}
        if folds:
            self._launch(folds)

    def _target(self, p: Tensor, kappa: float, scale: tuple[float, float] = _ONES) -> kernels.Fold | None:
        """Let a kernel fold the pair of `p` itself, as it is made: count the fold and say where it goes and how.

        The kernel must then do m ← keep₁·m + gain₁·g and v ← keep₂·v + gain₂·g², once, with g = mean_k g_k and
        g² = mean_k g_k². None where that would not be all: the caller then makes the pair and hands it over.

        Args:
            p: a parameter of this optimizer.
            kappa: κ of the mini-batch.
            scale: factors that turn the sums the kernel has into the means of the pair.
        """
        group, state = self._group(p), self.state[p]
        l2 = group["weight_decay"] and not group["decoupled_weight_decay"]
        if l2 or self.max_micro_norm is not None:
            return None
        if not self._ranks.takes_kernels:
            return None
        part = self._part(p)
        m, v = state["exp_avg"], state["exp_avg_sq"]
        if m.dtype != torch.float32 or m.stride() != p.stride():
            return None
        self._refuse_capture(p)
        if p in self._update.late or p in self._update.queue:
            self._flush()
        self._update.watch_backward(self._flush_queue)
        keep, gain, place = self._count(p, part, kappa, scale, True, False)
        slots = None if self._tape is None else self._tape.slots(m, [place])
        return kernels.Fold(m, v, keep, gain, self._counter(p.device), slots)

    def _part(self, p: Tensor) -> scalars.Part:
        """The part of `p` in the update that is open."""
        self._ranks.before(self, p)
        return self._update.parts.get(p) or self._begin(p)

    def _begin(self, p: Tensor) -> scalars.Part:
        """Plan the part of `p` in the update whose first gradient has come."""
        index, state = self._index(p), self.state[p]
        m, dtype = state["exp_avg"], _promote(p.dtype, self._state_dtype)
        if m.dtype != dtype or m.device != p.device:  # a model.to(...) may have come after the optimizer was built
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = state[name].to(p.device, dtype)
        if state["debias1"] == 1.0:
            return self._ranks.begin(scalars.begin_free())
        history = (index, *_COUNTERS(state))
        part = self._update.begun.get(history)
        if part is None:
            group = self.param_groups[index]
            kappa = state["kappa"] or self._tuned / self._size
            expected = self._update.expected
            if expected is not None:  # of the whole update; of this parameter, its share in the last one
                kappa = expected * (state["kappa"] / group["kappa"] if state["kappa"] and group["kappa"] else 1.0)
            part = self._update.begun[history] = scalars.begin(state, self._betas(group, kappa), kappa)
        return self._ranks.begin(part.copy())

    def _take(self, p: Tensor) -> _Arrival:
        """Take the gradient or the pair off `p`."""
        found = pair.take(p) if pair.is_there(p) else None
        if found is not None:
            return self._arrival(p, found)
        grad = _detached(p.grad)
        p.grad = None
        if grad.layout != torch.strided:
            # A sparse gradient comes in pieces (uncoalesced), to be summed before the square: made dense, it is.
            grad = grad.to_dense()
        elif 0 in grad.stride():
            grad = grad.clone()  # expanded, not to be written to
        return _Arrival(self._ranks.gradient(p, grad), None, self._weight, _ONES)

    def _arrival(self, p: Tensor, found: pair.Pair) -> _Arrival:
        piece = self._ranks.gradient
        grad, square = _detached(piece(p, found.grad)), _detached(piece(p, found.grad_sq))
        return _Arrival(grad, square, found.kappa, found.scale, found.borrowed)

    def _condition(self, params: list[Tensor], arrivals: list[_Arrival]) -> None:
        """Make the gradients what is to be squared: clipped, with L2 decay inside."""
        if self.max_micro_norm is not None:
            for x in arrivals:  # before their norm is taken
                kernels.guard([x.grad], None, self._counter(x.grad.device))
            clipped = kernels.clip([x.grad for x in arrivals], self.max_micro_norm, self.loss_divisor)
            for x, grad in zip(arrivals, clipped, strict=True):
                x.grad = grad
        if not any(group["weight_decay"] and not group["decoupled_weight_decay"] for group in self.param_groups):
            return
        for p, x in zip(params, arrivals, strict=True):
            group = self._group(p)
            decay = group["weight_decay"]
            if decay and not group["decoupled_weight_decay"]:
                # mean_k (g_k + λw)² = mean_k g_k² + λw(2 mean_k g_k + λw), so the pair is enough.
                sign, dtype = self._sign(p), self.state[p]["exp_avg"].dtype
                grad, pull = x.grad.to(dtype).mul_(sign * x.scale[0]), self._ranks.local(p.detach()).to(dtype) * decay
                if x.square is not None:
                    x.square = x.square.to(dtype) * (sign**2 * x.scale[1]) + pull * (2 * grad + pull)
                x.grad, x.scale, x.signed, x.borrowed = grad.add_(pull), _ONES, True, False

    def _refuse_capture(self, p: Tensor) -> None:
        if self._tape is None:
            checks.refuse_capture(p)

    def _counter(self, device: torch.device) -> Tensor:
        if device not in self._skipped:
            self._skipped[device] = torch.zeros((), dtype=torch.int64, device=device)
        return self._skipped[device]

    # ---------------------------------------------------------------- moments -> weights

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @_eager
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Close the update: move the weights by all micro-batches folded since the last step.

        Args:
            closure: computes the loss and runs the backwards of the update, as for every optimizer.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        checks.refuse_scaled(self)
        with in_touch("closing an update"):
            self._ranks.agree(self, self._collect)
        self._update.check_whole(self._name)
        moves, stop = self._schedule()  # refuses before anything changes
        if self._on_nonfinite == "raise":  # asks before the weights move
            self._flush()
            self._report_nonfinite()
        self._move(moves)
        with in_touch("exchanging weights"):
            self._ranks.moved(self)
        if self._tape is None:
            self._close(moves, stop)
            if all(device.type == "cpu" for device in self._skipped):
                self._report_nonfinite()  # on an accelerator it would stop the host: told when the state is saved
        else:
            self._tape.close(self._update)
            self._update = Update()
        return loss

    def _move(self, moves: list[_Move]) -> None:
        """Move the weights, and fold what still waits in the same pass."""
        waiting = {**self._update.queue, **self._update.late}
        tape = self._tape
        for move in moves:
            ready = [p for p in move.params if p not in waiting] if waiting else move.params
            scalars = {"size": move.size, "eps": move.eps, "decay": move.decay}
            if ready:
                states = [self.state[p] for p in ready]
                kernels.step(
                    [self._ranks.weight(p) for p in ready],
                    [self._ranks.local(state["exp_avg"]) for state in states],
                    [self._ranks.local(state["exp_avg_sq"]) for state in states],
                    slots=None if tape is None else tape.slots(states[0]["exp_avg"], params=ready),
                    **scalars,
                )
            for alike in self._alike([waiting[p] for p in move.params if p in waiting] if waiting else []):
                fold = alike[0]
                states = [self.state[f.param] for f in alike]
                kernels.fold_step(
                    [f.param for f in alike],
                    [f.grad for f in alike],
                    None if fold.square is None else [f.square for f in alike if f.square is not None],
                    [state["exp_avg"] for state in states],
                    [state["exp_avg_sq"] for state in states],
                    keep=fold.keep,
                    gain=fold.gain,
                    count=self._counter(fold.grad.device),
                    slots=None
                    if tape is None
                    else tape.slots(states[0]["exp_avg"], [f.place for f in alike], [f.param for f in alike]),
                    **scalars,
                )

    def _close(self, moves: list[_Move], stop: int) -> None:
        """Count the update as done."""
        kappa, steps = self.kappa, []
        for move in moves:
            for p in move.params:
                state = self.state[p]
                state.update(move.counters)
                steps.append(state["step"])
        torch._foreach_add_(steps, torch.tensor(1.0), alpha=1.0)  # a number would become a tensor for each of them
        for group in self.param_groups:
            group["samples_seen"], group["kappa"] = stop, kappa
        self._update = Update()

    def _replan(self, tape: Tape) -> list[list[float]]:
        """Count a replay of a captured update, as an eager one would be, and return the scalars of its launches."""
        captured = tape.update
        assert captured is not None
        self._update = Update(expected=captured.expected, micro_batches=captured.micro_batches)
        try:
            folds = []
            for p, kappa, scale, paired, signed in tape.arrivals:
                part = self._part(p)
                keep, gain, _ = self._count(p, part, kappa, scale, paired, signed)
                folds.append((*keep, *gain))
            moves, stop = self._schedule()
            steps = {p: (move.size, move.eps, move.decay, 0.0) for move in moves for p in move.params}
            rows = [
                tape.row([folds[place] for place in launch.places], [steps[p] for p in launch.params])
                for launch in tape.launches
            ]
        except BaseException:
            self._update = Update()
            raise
        self._close(moves, stop)
        return rows

    def _collect(self) -> None:
        """Fold the pairs that one pass left for this step, and refuse gradients that no fold took."""
        lost = self._bind()
        params = list(self._params())
        left = [p for p in params if pair.is_there(p) and pair.peek(p) is not None]
        if left:
            self._fold(left)
        for p in params:
            if p.grad is not None:
                raise RuntimeError(self._unfolded(p, lost))

    def _unfolded(self, p: Tensor, lost: int) -> str:
        """Say why a gradient stands on a parameter at `step()`, where none should."""
        found = f"step() found a gradient on parameter {self._name(p)} that was never folded: "
        if self._fold_in == "call":
            return found + "call opt.fold() after each micro-batch's backward, before step()"
        if lost:
            return found + (
                f"the fold hooks of {lost} parameters were missing (the parameters were copied, replaced or unfrozen "
                "after the optimizer was built) and are registered now; call opt.abandon() and run the micro-batches "
                "of this update again"
            )
        return found + (
            "it was assigned after the backward, by hand or by a wrapper such as DistributedDataParallel; drop the "
            'update with opt.abandon(), and unwrap the model or use InvariantAdam(fold="call") and opt.fold()'
        )

    def _schedule(self) -> tuple[list[_Move], int]:
        """Let schedules see the samples of the update; return its moves, and the samples seen after it."""
        start = self.samples_seen
        stop = start + round(self.kappa * self._size)
        for hook in self._update_hooks.values():
            hook(self, start, stop)
        return self._plan(), stop

    def _plan(self) -> list[_Move]:
        """Turn what is folded into the scalars of the step, once for all parameters that share a history."""
        alike: dict[Any, list[Tensor]] = defaultdict(list)
        parts = self._update.parts
        for p, part in parts.items():
            key = (
                self._index(p),
                part.kappa,
                part.a,
                part.b,
                *_COUNTERS(self.state[p]),
                p.device,
                p.dtype,
            )
            alike[key].append(p)
        moves = []
        for (index, kappa, *_), params in alike.items():
            group, state, part = self.param_groups[index], self.state[params[0]], parts[params[0]]
            lr, decay = checks.as_float(group["lr"]), group["weight_decay"]
            check_hyperparameters(lr, group["betas"], group["eps"], decay)
            betas = self._betas(group, kappa)
            counters = scalars.close(state, part, betas)
            self._warn_of_surprise(part, betas[0])
            x, y = scalars.debias(counters)
            rule, rho = RULES[group["rule"]], kappa * self._size / self._tuned
            keep = 1.0
            if decay and group["decoupled_weight_decay"]:
                keep -= rule.decay(check_decay(lr, decay), rho)
                check_keep(keep, group["rule"], lr, decay, rho)
            moves.append(_Move(params, lr * rule.lr(rho) * y / x, group["eps"] * y, keep, counters))
        return moves

    def _warn_of_surprise(self, part: scalars.Part, beta: float) -> None:
        """Warn once when an update is so unlike the one before that its averages forget far more or less than meant."""
        if part.a is None or self._warned:
            return
        got = part.a[0] / (part.a[0] + part.b[0] * part.kappa)
        if abs(got - beta) > 0.1:
            self._warned = True
            warnings.warn(
                f"an update of {part.kappa:g} micro-batches came where the one before let another size expect: "
                f"m keeps {got:.2g} of its past instead of {beta:.2g}. Announce the size with opt.expect(kappa) before "
                "its first backward",
                RuntimeWarning,
                stacklevel=5,
            )

    def _report_nonfinite(self) -> None:
        """Tell of the elements left out since the last report (waits for the device)."""
        new = self.nonfinite - self._reported
        if not new:
            return
        self._reported += new
        message = (
            f"{new} gradient elements were not finite, or too large to square, after {self.samples_seen} samples; "
            "they were left out of the moments"
        )
        if self._on_nonfinite == "raise":
            raise RuntimeError(
                message + ", and the weights have not moved. Lower lr or set max_micro_norm; the next step() goes on "
                'without them, as on_nonfinite="skip" does'
            )
        warnings.warn(message, RuntimeWarning, stacklevel=3)

    # ---------------------------------------------------------------- state

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear `p.grad` and the squares that one pass left; refused where it would pretend to clear what is folded.

        With fold="call", what went through `fold()` stays part of the update.
        """
        if self._fold_in == "backward" and self._update.parts:
            raise RuntimeError(
                f"zero_grad() in the middle of an update: {self.kappa:g} micro-batches are folded into the moments and "
                "cannot be taken back. Call it after step() only. To keep a backward away from these parameters, "
                "freeze them (requires_grad_(False)) or name the others (loss.backward(inputs=...)); to drop the "
                "update, call opt.abandon()"
            )
        super().zero_grad(set_to_none)
        for p in self._params():
            pair.clear(p)
        self._bind()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with their own hyperparameters; those of the run (M, B₀, rule) are common to all."""
        if "decoupled" in param_group:
            param_group["decoupled_weight_decay"] = param_group.pop("decoupled")
        if self.param_groups:
            param_group["samples_seen"] = self.samples_seen
            param_group["kappa"] = self.param_groups[0]["kappa"]
        ranks = self._ranks.outgrown(self)
        super().add_param_group(param_group)
        try:
            checks.check_group(self.param_groups, gradients=self._fold_in == "call")
        except BaseException:
            self.param_groups.pop()
            raise
        self._ranks = ranks
        self._bind(take=True)

    @_eager
    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Return the state in torch's format, which `torch.optim.AdamW` loads too; refused in mid-update."""
        if self._update.parts:
            raise RuntimeError(
                f"state_dict() in the middle of an update: {self.kappa:g} micro-batches are folded and not stepped, "
                "and a checkpoint cannot hold half an update; save after step(). Nothing is lost"
            )
        for state in self.state.values():
            for key, norm in (("exp_avg", "norm1"), ("exp_avg_sq", "norm2")):
                if state[norm] != 1.0:
                    state[key].div_(state[norm])
                    state[norm] = 1.0
        self._report_nonfinite()
        return super().state_dict()

    @_eager
    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of InvariantAdam, Adam or AdamW; an update that is open is dropped.

        Adam's bias correction β^t goes on from the checkpoint's own betas. Its v is at the scale of its own batch, so
        the run is exact only if that was one micro-batch; otherwise v moves to the new scale in its half-life.
        """
        loaded: list[dict[str, Any]] = []

        def look(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
            checks.check_state(state_dict, optimizer)
            self._ranks.drop(self)
            loaded.append(state_dict)

        last = self.register_load_state_dict_pre_hook(look)  # after the user's own, which may change the dict
        try:
            super().load_state_dict(state_dict)
        finally:
            last.remove()
        state_dict = loaded[0]
        for key in ("tuned_batch_size", "rule"):
            self.defaults[key] = self.param_groups[0][key]
        ids = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        for i, p in zip(ids, self._params(), strict=True):
            saved = state_dict["state"].get(i)
            if not saved:
                self.state[p] = {}
                continue
            group, state = self._group(p), self.state[p]
            for key in ("exp_avg", "exp_avg_sq"):
                # Again from the checkpoint: torch has cast it to the dtype of the parameter, bfloat16 perhaps.
                state[key] = placed(saved[key].detach(), p).to(p.device, self._moment_dtype(p), copy=True)
            step = float(state["step"])
            state["step"] = torch.tensor(step)
            for key, value in scalars.after_adam(group["betas"], step).items():
                state.setdefault(key, value)
        self._update, self._bound = Update(), []
        self._bind()

    def __getstate__(self) -> dict[str, Any]:
        self._flush()
        own = (
            "_loss_divisor",
            "max_micro_norm",
            "_fold_in",
            "_state_dtype",
            "_on_nonfinite",
            "_update",
            "_weight",
            "_warned",
            "_skipped",
            "_reported",
        )
        return {**super().__getstate__(), **{name: self.__dict__[name] for name in own}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # a group of AdamW's checkpoint lacks ours
            for key, value in self.defaults.items():
                group.setdefault(key, value)
        if "_fold_in" in state:  # a copy or an unpickled optimizer, not load_state_dict
            self._hooked, self._group_index, self._bound = set(), {}, []
            self._update_hooks = OrderedDict()
            self._tape = None
            self.process_group, self._ranks = None, Ranks()
            self._bind(take=True)

    def _bind(self, take: bool = False) -> int:
        """Give state and a fold hook to each parameter that lacks one; return how many hooks were missing.

        Args:
            take: take parameters over from another optimizer that folds them, as a newly built one does.
        """
        ids = [id(p) for p in self._params()]
        if ids == self._bound and len(self.state) >= len(ids) and not take:
            return 0
        missing, self._bound = 0, ids
        for index, group in enumerate(self.param_groups):
            for p in group["params"]:
                self._group_index[p] = index
                state = self.state[p]
                if not state:  # made eagerly: torch.distributed.checkpoint looks for it before the first step
                    m, v = (torch.zeros_like(p, dtype=self._moment_dtype(p), requires_grad=False) for _ in "mv")
                    state |= {"step": torch.tensor(0.0), "exp_avg": m, "exp_avg_sq": v, **scalars.fresh()}
                if p in self._hooked:
                    continue
                if not p.requires_grad:
                    self._bound = []  # look again: it may be unfrozen
                    continue
                if not take and hooks.owner(p) is not None:
                    self._bound = []
                    raise RuntimeError(
                        f"parameter {self._name(p)} now belongs to an InvariantAdam that was built later on the same "
                        "parameters; drop one of the two"
                    )
                missing += 1
                self._hooked.add(p)
                hooks.own(p, self, hook=self._fold_in == "backward")
        return missing

    @property
    def queue(self) -> InvariantAdam:
        """What one pass hands its pairs to."""
        return self

    def bind(self) -> None:
        """Look for parameters that were unfrozen, and refuse those that another optimizer has taken over."""
        self._bind()

    def target(self, p: Tensor, kappa: float, scale: tuple[float, float] = _ONES) -> kernels.Fold | None:
        """Let a kernel fold the pair of `p` itself."""
        return self._target(p, kappa, scale)

    def on_taken(self, p: Tensor) -> None:
        """Note that another optimizer folds the gradients of `p` from now on."""
        self._hooked.discard(p)
        self._bound = []

    def _moment_dtype(self, p: Tensor) -> torch.dtype:
        return _promote(p.dtype, self._state_dtype)

    def _params(self) -> Iterator[Tensor]:
        return chain.from_iterable(group["params"] for group in self.param_groups)

    def _index(self, p: Tensor) -> int:
        """The place of the group of `p`, which is looked for only where there are several: this is asked often."""
        return self._group_index[p] if len(self.param_groups) > 1 else 0

    def _group(self, p: Tensor) -> dict[str, Any]:
        return self.param_groups[self._index(p)]

    def _name(self, p: Tensor) -> str:
        """A name for messages: the user's where `named_parameters()` was given, else the place and the shape."""
        index = self._group_index[p]
        group = self.param_groups[index]
        place = next(i for i, q in enumerate(group["params"]) if q is p)
        if "param_names" in group:
            return repr(group["param_names"][place])
        return f"{place} of group {index}, of shape {tuple(p.shape)},"

    @property
    def _size(self) -> int:
        return self.micro_batch_size or 1

    @property
    def _tuned(self) -> int:
        return self.tuned_batch_size or self._size

    def _betas(self, group: dict[str, Any], kappa: float) -> tuple[float, float]:
        """β₁′ and β₂′ of an update of κ micro-batches."""
        rule, batch = group["rule"], kappa * self._size
        check_rho(rule, batch / self._tuned, group["betas"], batch=batch, tuned=self._tuned)
        beta1, beta2 = (RULES[rule].beta(beta, batch / self._tuned) for beta in group["betas"])
        return beta1, beta2

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """What `GradScaler.step` asks first; with it, an update whose gradients are folded away still steps."""
        if self._fold_in == "backward":
            raise RuntimeError(
                'GradScaler cannot work with InvariantAdam(fold="backward"): the scaled gradients are folded before it '
                'can unscale them. Use bfloat16, which needs no scaler, or fold="call" with, per micro-batch, '
                "scaler.scale(loss).backward(); scaler.unscale_(opt); opt.fold(); scaler.update()"
            )
        return True


def _detached(grad: Tensor | None) -> Tensor:
    """A gradient as no part of a graph (create_graph=True)."""
    assert grad is not None
    return grad.detach() if grad.requires_grad else grad


@dataclass(slots=True)
class _Arrival:
    """A gradient taken off a parameter, of weight `kappa`; `scale` makes the means of it and of the square."""

    grad: Tensor
    square: Tensor | None
    kappa: float
    scale: tuple[float, float]
    borrowed: bool = False  # its memory is soon another's
    signed: bool = False  # `maximize` and `loss_divisor` are in it


class _Move(NamedTuple):
    """What `step` does to parameters that share a history: w ← decay·w − size·m/(√v+eps), and new counters."""

    params: list[Tensor]
    size: float
    eps: float
    decay: float
    counters: scalars.Counters

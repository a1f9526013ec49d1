"""Micro-batch gradients -> m and v: `FoldQueue`, which an optimizer fills and its `step` empties.

The way of a gradient: a hook or a call brings it as a `Pair` (`push`); it is counted in the open update, which makes it
a `Fold` (`count`); and it is folded, now or later. A small one waits for others to share a launch with; one that is
known to be a whole update waits for the step, which folds it and moves the weights in the same pass over memory.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..kernels import adam as kernels
from ..kernels.adam import Fold
from . import checks, hooks, pair, scalars
from .divisor import DivisorWatch
from .launcher import Launcher, Step
from .moments import Moments, NonFinite
from .pair import ONES, Pair
from .reducer import Reducer
from .scalars import Tally
from .update import Update

# Where launches are worth sharing: gradients wait for others until the end of their backward, at most ROOM elements
# of them at a time: 32 MiB of float32 pairs. On a CPU so many as stay in the cache.
SHARING = frozenset({"cuda", "xpu", "mps", "cpu"})
ROOM = 1 << 22
ROOM_IN_CACHE = 1 << 16


class FoldQueue:
    """Folds the gradients of an optimizer's parameters into their moments.

    Args:
        moments: where they go.
        in_backward: whether gradients come by autograd hooks (fold="backward"), or by `push` alone (fold="call").
        nonfinite: counts the elements that are left out.
    """

    def __init__(self, moments: Moments, *, in_backward: bool, nonfinite: NonFinite) -> None:
        self.moments, self.in_backward, self.nonfinite = moments, in_backward, nonfinite
        self.loss_divisor: float | Callable[[], float] = 1.0
        self.max_micro_norm: float | None = None
        self.weight = 1.0  # n/M of the micro-batch at hand
        self.watch = DivisorWatch()
        self.update = Update()
        self.surprised = False  # the user was warned of an update whose size nobody announced
        self.shares: list[tuple[float, float]] = []  # of the last update in m̂ and v̂, for each history
        self.grows = False  # how large the first updates are is chosen: `BatchGrowth` says so
        self._start()

    def _start(self) -> None:
        """What a copy does not take over: who else is there, and which parameters are hooked."""
        self.reducer = Reducer()  # `distributed.prepare` puts its own here
        self.launcher = Launcher()  # a capture puts its own here
        self.taker = hooks.Taker(self)  # one for all parameters, so that pairs with the same way may go together
        self._bound: Any = None  # what `bind` saw when each parameter had its state and its hook
        self._trained = 0  # parameters that then were not frozen

    def __getstate__(self) -> dict[str, Any]:
        left = ("reducer", "launcher", "taker", "_bound", "_trained")
        return {name: value for name, value in self.__dict__.items() if name not in left}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()

    # ---------------------------------------------------------------- which gradients come here

    def bind(self, take: bool = False) -> int:
        """Give state and a hook to each parameter that lacks one; return how many hooks were missing.

        Args:
            take: take parameters over from another optimizer that folds them, as a newly built one does.
        """
        moments = self.moments
        params = [(id(p), p.requires_grad) for p in moments.params()]
        if (params, pair.subscriptions) == self._bound and len(moments.state) >= self._trained and not take:
            return 0
        missing = 0
        for index, group in enumerate(moments.groups):
            for p in group["params"]:
                moments.ensure(p, index)
                owner = hooks.owner(p)
                if owner is self or (not p.requires_grad and (owner is not None or p.is_inference())):
                    continue
                if owner is not None and not take:
                    raise RuntimeError(
                        f"parameter {moments.name(p)} now belongs to an InvariantAdam that was built later on the same "
                        "parameters; drop one of the two"
                    )
                missing += p.requires_grad
                hooks.own(p, self)
        self._bound = params, pair.subscriptions
        self._trained = sum(trained for _, trained in params)
        return missing

    def on_grad(self, p: Tensor) -> None:
        """Fold what a backward just left on `p`: a micro-batch gradient, or one that FSDP2 has reduced."""
        if torch.is_grad_enabled():  # create_graph=True; elsewhere the context would only cost time
            with torch.no_grad():
                self.on_grad(p)
            return
        reduced = self.reducer.take_reduced(self, p)
        if reduced is not None:
            self.update.watch_backward(self.flush_queued)
            self.push([p], [reduced])
            return
        if pair.is_there(p):
            self.update.watch_backward(self.flush_queued)
        else:
            self.update.count_backward(self.weight, self.flush_queued)
        self.push([p])

    def on_pairs(self, params: list[Tensor], pairs: list[Pair]) -> None:
        """Fold pairs of a one-pass mini-batch, just made by a backward."""
        if torch.is_grad_enabled():
            with torch.no_grad():
                self.on_pairs(params, pairs)
            return
        self.update.watch_backward(self.flush_queued)
        graph = any(x.grad.requires_grad or x.grad_sq.requires_grad for x in pairs)  # type: ignore[union-attr]
        if graph or self.reducer.pieces:
            pairs = list(map(self._local, params, pairs))
        self.push(params, pairs)

    @property
    def room(self) -> int:
        """Elements of pairs that may wait, before they come here, to share a launch with others."""
        alone = not self.reducer.several  # others are to be sent each gradient as it comes
        return _room_on(next(self.moments.params()).device) if alone else 0

    @contextmanager
    def weighted(self, weight: float) -> Iterator[None]:
        """Fold the gradients of this context as those of a micro-batch of n < M samples, `weight` = n/M."""
        before, self.weight = self.weight, weight
        try:
            yield
        finally:
            self.weight = before

    # ---------------------------------------------------------------- Pair -> Fold

    def push_all(self) -> None:
        """Fold what is on all parameters as one micro-batch (fold="call")."""
        if self.in_backward:
            raise RuntimeError(
                'fold() is for InvariantAdam(fold="call"); with fold="backward" each backward folds by itself: '
                "remove the call"
            )
        self.bind()
        params = [p for p in self.moments.params() if p.grad is not None]
        if not params:
            raise RuntimeError(
                "fold() found no gradient: no backward reached the parameters of this optimizer since the last fold()"
            )
        plain = all(pair.peek(p) is None for p in params)
        self.push(params)
        if plain:
            self.update.count_call(self.weight)

    def push(self, params: list[Tensor], pairs: list[Pair] | None = None) -> None:
        """Count and fold pairs of `params`; by default what is on the parameters, which is taken off."""
        if not self.launcher.captures:
            checks.refuse_capture(params[0])
        if self.max_micro_norm is not None and (pairs or any(pair.is_there(p) for p in params)):
            raise RuntimeError(
                f"max_micro_norm={self.max_micro_norm:g} clips each micro-batch gradient, and a one-pass mini-batch "
                "never has them apart; loop over micro-batches, or set opt.max_micro_norm = None"
            )
        update, reducer = self.update, self.reducer
        tallies = [self.tally(p) for p in params]  # refuses before anything changes
        if update.late or update.queued:
            for p, tally in zip(params, tallies, strict=True):
                if tally.kappa and (p in update.late or p in update.queued):
                    self.flush()
        pairs = self._condition(params, pairs or [self._take(p) for p in params])
        if reducer.send(self, params, tallies, pairs):
            return
        update.kinds |= {x.grad_sq is not None for x in pairs}
        folds, now, room = self.count(params, tallies, pairs), [], 0
        # There is room to wait for one gradient that comes in a backward: more will. A list has waited already.
        if self.in_backward and len(params) == 1 and torch._C._current_graph_task_id() >= 0:
            room = _room_on(pairs[0].grad.device)
        if not room and update.expected is None:
            self._launch(folds)
            return
        for p, tally, x, fold in zip(params, tallies, pairs, folds, strict=True):
            if update.expected is not None and self._is_whole(tally, x):
                update.late[p] = fold  # for the step, which folds it and moves the weight at once
                update.versions[p] = x.grad._version
            elif (size := x.grad.numel()) < room and not x.borrowed:
                # It waits for the end of the backward that is running, to share a launch with others.
                update.elements += size
                if update.elements > room:
                    self.flush_queued()
                    update.elements = size
                update.queued[p] = fold
                reducer.after_fold(self, [p])
            else:
                now.append(fold)
        if now:
            self._launch(now)

    def _take(self, p: Tensor) -> Pair:
        """Take the gradient or the pair off `p`."""
        found = pair.take(p) if pair.is_there(p) else None
        if found is not None:
            return self._local(p, found)
        grad = _detached(p.grad)
        p.grad = None
        if grad.layout != torch.strided:
            # A sparse gradient comes in pieces (uncoalesced), to be summed before the square: made dense, it is.
            grad = grad.to_dense()
        elif 0 in grad.stride():
            grad = grad.clone()  # expanded, not to be written to
        return Pair(self.reducer.gradient(p, grad), None, self.weight)

    def _local(self, p: Tensor, found: Pair) -> Pair:
        """This rank's piece of a pair."""
        piece = self.reducer.gradient
        assert found.grad_sq is not None
        grad, square = _detached(piece(p, found.grad)), _detached(piece(p, found.grad_sq))
        return Pair(grad, square, found.kappa, found.scale, found.borrowed)

    def _condition(self, params: list[Tensor], pairs: list[Pair]) -> list[Pair]:
        """Make the gradients what is to be squared: clipped, with L2 decay inside."""
        if self.max_micro_norm is not None:
            for x in pairs:  # before their norm is taken
                kernels.guard([x.grad], None, self.nonfinite.counter(x.grad.device))
            clipped = kernels.clip([x.grad for x in pairs], self.max_micro_norm, self.divisor)
            pairs = [x._replace(grad=grad) for x, grad in zip(pairs, clipped, strict=True)]
        if not any(map(is_coupled, self.moments.groups)):
            return pairs
        return [self._with_decay(p, x) for p, x in zip(params, pairs, strict=True)]

    def _with_decay(self, p: Tensor, x: Pair) -> Pair:
        """A pair with L2 decay inside: mean_k (g_k + λw)² = mean_k g_k² + λw(2 mean_k g_k + λw)."""
        group = self.moments.group(p)
        if not is_coupled(group):
            return x
        sign, dtype = self.sign(p), self.moments.state[p]["exp_avg"].dtype
        grad = x.grad.to(dtype).mul_(sign * x.scale[0])
        pull, square = self.reducer.local(p.detach()).to(dtype) * group["weight_decay"], x.grad_sq
        if square is not None:
            square = square.to(dtype) * (sign**2 * x.scale[1]) + pull * (2 * grad + pull)
        return Pair(grad.add_(pull), square, x.kappa, signed=True)

    def tally(self, p: Tensor) -> Tally:
        """The tally of `p` in the open update, whose next gradient has come."""
        self.reducer.before_fold(self, p)
        return self.update.tallies.get(p) or self.begin(p)

    def begin(self, p: Tensor) -> Tally:
        """Begin the tally of `p`; it is part of the update once something is counted in it."""
        state, update = self.moments.follow(p), self.update
        if state["debias1"] == 1.0:
            return self.reducer.begin(scalars.begin_free())
        history = self.moments.history(p, state)
        tally = update.begun.get(history)
        if tally is None:
            group = self.moments.group(p)
            kappa = state["kappa"] or scalars.tuned_kappa(group)
            if update.expected is not None:  # of the whole update; of this parameter, its share in the last one
                share = state["kappa"] / group["kappa"] if state["kappa"] and group["kappa"] else 1.0
                kappa = update.expected * share
            tally = update.begun[history] = scalars.begin(state, scalars.betas_at(group, kappa), kappa)
        return self.reducer.begin(tally.copy())

    def count(self, params: list[Tensor], tallies: list[Tally], pairs: list[Pair]) -> list[Fold]:
        """Count pairs of `params` in the open update; return how they are folded."""
        moments, update, arrive, local = self.moments, self.update, self.launcher.arrive, self.reducer.local
        pieces = self.reducer.pieces
        signs: list[float] = []  # of the groups
        folds: list[Fold] = []
        device: Any = None
        counter: Any = None
        for p, tally, x in zip(params, tallies, pairs, strict=True):
            place, (grad, square, kappa, (scale1, scale2), _, signed) = arrive(p, tally, x), x
            if not tally.kappa:
                update.tallies[p] = tally
            if not signed and not signs:
                signs = self._signs()
            if p.device != device:
                device, counter = p.device, self.nonfinite.counter(p.device)
            sign, keep, (b1, b2) = 1.0 if signed else signs[moments.index(p)], tally.keep, tally.b
            gain = (b1 * kappa * sign * scale1, b2 * kappa * sign * sign * scale2)
            tally.keep = ONES
            tally.kappa += kappa
            state = moments.state[p]
            m, v = state["exp_avg"], state["exp_avg_sq"]
            if pieces:
                m, v = local(m), local(v)
            folds.append(Fold(m, v, keep, gain, counter, None, grad, square, p, place))
        return folds

    @property
    def divisor(self) -> float:
        """What the loss of the micro-batch at hand was divided by."""
        if not callable(self.loss_divisor):
            return self.loss_divisor
        value = float(self.loss_divisor())
        checks.check_positive("what loss_divisor() returns", value)
        return value

    def sign(self, p: Tensor) -> float:
        """What a gradient of `p` must be multiplied with: the loss divisor, negative to maximize."""
        return self._signs()[self.moments.index(p)]

    def _signs(self) -> list[float]:
        """The same for each group."""
        divisor = self.divisor
        return [-divisor if group["maximize"] else divisor for group in self.moments.groups]

    def _is_whole(self, tally: Tally, x: Pair) -> bool:
        """Whether a gradient is all that its parameter gets in this update, so that it may wait for the step.

        Only a declared κ tells. A pair never waits: its two tensors would cost more memory than the pass is worth.
        """
        expected = self.update.expected
        if expected is None or x.grad_sq is not None or self.reducer.several:
            return False
        return tally.kappa == x.kappa >= expected

    def target(self, p: Tensor, kappa: float, scale: tuple[float, float] = ONES) -> Fold | None:
        """Let a kernel fold the pair of `p` itself, as it is made: count it, and say where it goes and how.

        The kernel must then do what `Fold` says, once, with g = mean_k g_k and g² = mean_k g_k². None where that would
        not be all: the caller then makes the pair and hands it over.

        Args:
            p: a parameter of this queue.
            kappa: κ of the mini-batch.
            scale: factors that turn the sums the kernel has into the means of the pair.
        """
        if not self._kernels_fold(p):
            return None
        tally = self.tally(p)
        m = self.moments.state[p]["exp_avg"]
        if not _fits(m, p):
            return None
        if not self.launcher.captures:
            checks.refuse_capture(p)
        if p in self.update.late or p in self.update.queued:
            self.flush()
        self.update.watch_backward(self.flush_queued)
        self.update.kinds.add(True)
        (fold,) = self.count([p], [tally], [Pair(p, None, kappa, scale)])  # its gradient does not exist yet
        return fold._replace(grad=None, slots=self.launcher.slots(m, [fold.place]))

    def outline(self, p: Tensor) -> Fold | None:
        """What `target` returns, with other numbers and nothing counted: a kernel is compiled by it."""
        if not self._kernels_fold(p):
            return None
        state = self.moments.follow(p)
        m, v = state["exp_avg"], state["exp_avg_sq"]
        return Fold(m, v, ONES, ONES, self.nonfinite.counter(p.device)) if _fits(m, p) else None

    def _kernels_fold(self, p: Tensor) -> bool:
        """Whether a fold of `p` needs nothing but its own pair."""
        return not is_coupled(self.moments.group(p)) and self.max_micro_norm is None and self.reducer.kernels_fold

    # ---------------------------------------------------------------- Fold -> m, v

    def _launch(self, folds: list[Fold]) -> None:
        """Fold gradients that are counted, those with the same scalars in one launch."""
        for alike in self._alike(folds):
            self.launcher.fold(alike)
        self.reducer.after_fold(self, [f.param for f in folds])  # type: ignore[misc]

    def _alike(self, folds: list[Fold]) -> Iterable[list[Fold]]:
        """Sort folds by what one launch must share; by group too, since a captured launch outlives today's values."""
        if len(folds) == 1:
            return [folds]
        alike: dict[Any, list[Fold]] = defaultdict(list)
        index, before = self.moments.index, None
        same: list[Fold] = []
        for f in folds:
            grad: Any = f.grad
            key = f.keep, f.gain, grad.dtype, f.square is None, grad.device, index(f.param)  # type: ignore[arg-type]
            if key != before:  # as few are: a key costs more to look up than to compare
                before, same = key, alike[key]
            same.append(f)
        return alike.values()

    @torch.no_grad()
    def flush_queued(self) -> None:
        """Fold the small gradients that wait for each other, in one launch."""
        update = self.update
        folds, update.queued, update.elements = list(update.queued.values()), {}, 0
        if folds:
            self._launch(folds)

    def flush(self) -> None:
        """Fold all that waits, so that the moments hold what is counted."""
        self.update.check_late(self.moments.name)
        self.flush_queued()
        folds, self.update.late = list(self.update.late.values()), {}
        if folds:
            self._launch(folds)

    # ---------------------------------------------------------------- the end of an update

    def collect(self) -> None:
        """Fold the pairs that one pass left for this step, and refuse gradients that no fold took."""
        lost = self.bind()
        params = list(self.moments.params())
        left = [p for p in params if pair.is_there(p) and pair.peek(p) is not None]
        if left:
            self.push(left)
        for p in params:
            if p.grad is not None:
                raise RuntimeError(checks.unfolded(self.moments.name(p), self.in_backward, lost))

    def histories(self) -> Iterator[tuple[dict[str, Any], Tally, dict[str, Any], list[Tensor]]]:
        """What was folded, once for all parameters that share a history: group, tally, state and the parameters."""
        alike: dict[Any, list[Tensor]] = defaultdict(list)
        tallies, moments, before = self.update.tallies, self.moments, None
        same: list[Tensor] = []
        for p, tally in tallies.items():
            key = tally.kappa, tally.a, tally.b, p.device, p.dtype, moments.history(p)
            if key != before:
                before, same = key, alike[key]
            same.append(p)
        for params in alike.values():
            first = params[0]
            yield moments.group(first), tallies[first], moments.state[first], params

    def move(self, steps: list[Step]) -> None:
        """Move the weights, and fold what still waits in the same pass over memory."""
        waiting = {**self.update.queued, **self.update.late}
        reducer, state = self.reducer, self.moments.state
        for step in steps:
            ready = [p for p in step.params if p not in waiting] if waiting else step.params
            if ready:
                states = [state[p] for p in ready]
                ms, vs = ([reducer.local(each[key]) for each in states] for key in ("exp_avg", "exp_avg_sq"))
                self.launcher.step(ready, [reducer.weight(p) for p in ready], ms, vs, step)
            for alike in self._alike([waiting[p] for p in step.params if p in waiting] if waiting else []):
                self.launcher.fold_step(alike, step)

    def note_size(self, history: dict[str, Any], tally: Tally, betas: tuple[float, float], rho: float) -> None:
        """Keep the shares of an update that is closed, and warn of it once where it is not small and nobody said so.

        So it is if it is so unlike the one before that m forgets far more or less than β₁′; or if it is the first one,
        and larger than the tuned batch.
        """
        self.shares.append(scalars.shares(history, tally, betas))
        if tally.a is None and not self.grows and rho > 1 < tally.kappa and not self.moments.groups[0]["samples_seen"]:
            self.grows = True  # once
            checks.warn_of_first_update(tally.kappa, rho)
        message = None if self.surprised else checks.surprise(tally, betas[0])
        if message is not None:
            self.surprised = True
            warnings.warn(message, RuntimeWarning, stacklevel=7)  # the line that calls step()

    def reset(self) -> None:
        """Open the next update."""
        self.update = Update()

    def restart(self) -> None:
        """Go on from moments that were loaded."""
        self.reset()
        self.bind()
        self.shares = []
        self.watch = DivisorWatch()
        self.watch.look(self, loaded=True)

    def abandon(self) -> None:
        """Close the open update as one whose weights do not move; see `InvariantAdam.abandon`."""
        for p in self.update.written_over():  # nothing to fold: as if it had not come
            del self.update.late[p], self.update.tallies[p]
        self.flush()
        self.reducer.abandon_update(self)
        for p, tally in self.update.tallies.items():
            state = self.moments.state[p]
            if tally.a is None:
                state["exp_avg"].zero_()
                state["exp_avg_sq"].zero_()
            else:
                state.update(scalars.close(state, tally, tally.a), kappa=state["kappa"])
        self.reset()


def _room_on(device: torch.device) -> int:
    """Elements of gradients that may wait for each other on a device."""
    kind = device.type
    return 0 if kind not in SHARING else ROOM if kind != "cpu" else min(ROOM, ROOM_IN_CACHE)


def is_coupled(group: dict[str, Any]) -> bool:
    """Whether a group's weight decay is L2, a part of each micro-batch gradient."""
    return bool(group["weight_decay"]) and not group["decoupled_weight_decay"]


def _detached(grad: Tensor | None) -> Tensor:
    """A gradient as no part of a graph (create_graph=True)."""
    assert grad is not None
    return grad.detach() if grad.requires_grad else grad


def _fits(m: Tensor, p: Tensor) -> bool:
    """Whether a kernel finds the moments where it finds the gradient."""
    return m.dtype == torch.float32 and m.stride() == p.stride()

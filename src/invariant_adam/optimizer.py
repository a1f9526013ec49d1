"""Micro-batch gradients -> m, v -> weights: `InvariantAdam`, a `torch.optim.Optimizer`.

What a user calls is here, and the arithmetic of the step (`_steps`). How a gradient comes into m and v, by a hook or by
`fold()`, is in `fold/`: this class fills a `FoldQueue` and empties it at `step()`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar, overload

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from . import share
from .fold import checks, guards, pair, scalars
from .fold.launcher import Step
from .fold.moments import Moments, NonFinite
from .fold.queue import FoldQueue
from .noise import NoiseScale, noise_scale
from .scaling import INVARIANT, RULES, check_decay, check_hyperparameters, check_keep

F = TypeVar("F", bound=Callable[..., Any])
# An update's scalars and counters live on the host: torch.compile breaks its graph here, once, and never recompiles.
_eager: Callable[[F], F] = torch.compiler.disable

UpdateHook = Callable[["InvariantAdam", int, int], None]


class InvariantAdam(Optimizer):
    r"""Adam(W) whose trajectory does not depend on the batch size (Wang & Aitchison, Algorithm 3).

    Each of the κ micro-batches of an update is squared before it is averaged:

        m ← (1−γ₁′)m + γ₁′ mean_k g_k       v ← (1−γ₂′)v + γ₂′ mean_k g_k²
        w ← (1−η′λ)w − η′ m̂ / (√v̂ + ε)

    where η′ and γ′ = 1 − β′ are the hyperparameters scaled to this update's batch, ρ = κM/B₀ times the tuned one.
    You choose how many micro-batches make an update, and may change it any time. A parameter that has no gradient in
    some of them is scaled by its own count.

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
        rule: "exponential", for any batch size; "linear", the paper's; "long_momentum", for large steps (`scaling`).
        fold: "backward" folds each gradient in an autograd hook and frees it at once, so that `p.grad` is always
            None and no gradient accumulator exists. "call" leaves `p.grad` alone until `fold()`.
        loss_divisor: what the training loop divided each micro-batch loss by (many trainers divide by κ); or a
            function of no arguments that tells, asked at each micro-batch.
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
        loss_divisor: float | Callable[[], float] = 1.0,
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
        checks.check_choice("rule", rule, INVARIANT)
        checks.check_choice("fold", fold, ("backward", "call"))
        checks.check_choice("on_nonfinite", on_nonfinite, ("skip", "raise"))
        checks.check_state_dtype(state_dtype)
        # What folds, for the modules of this package that bring gradients or reduce them.
        self.queue = FoldQueue(
            Moments(state_dtype), in_backward=fold == "backward", nonfinite=NonFinite(on_nonfinite == "raise")
        )
        self.loss_divisor, self.max_micro_norm, self.process_group = loss_divisor, max_micro_norm, process_group
        self._update_hooks: OrderedDict[int, UpdateHook] = OrderedDict()
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
        guards.install(self.queue)

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
        return self.queue.update.kappa

    @property
    def samples_seen(self) -> int:
        """Samples that finished updates consumed; micro-batches, where no `micro_batch_size` was given."""
        return int(self.param_groups[0]["samples_seen"])

    @property
    def loss_divisor(self) -> float | Callable[[], float]:
        """What the training loop divided each micro-batch loss by, or a function of no arguments that tells."""
        return self.queue.loss_divisor

    @loss_divisor.setter
    def loss_divisor(self, value: float | Callable[[], float]) -> None:
        if not callable(value):
            checks.check_positive("loss_divisor", value)
        self.queue.loss_divisor = value if callable(value) else float(value)

    @property
    def max_micro_norm(self) -> float | None:
        """The norm that each micro-batch gradient is clipped to; may be set between updates."""
        return self.queue.max_micro_norm

    @max_micro_norm.setter
    def max_micro_norm(self, value: float | None) -> None:
        if value is not None:
            checks.check_positive("max_micro_norm", value)
        self.queue.max_micro_norm = value

    @property
    def nonfinite(self) -> int:
        """Gradient elements left out of the moments so far because they were not finite (waits for the device)."""
        return self.queue.nonfinite.total

    def noise_scale(self, smooth: int = 1) -> NoiseScale:
        """Estimate the gradient's signal and noise from the moments, over `smooth` calls; see `noise.noise_scale`."""
        return noise_scale(self, smooth)

    update_share = share.update_share  # how small the open or the last update is

    def expect(self, kappa: float) -> None:
        """Declare how many micro-batches the coming update has; without it, as many as the update before.

        A batch size that changes from one update to the next is then exact, not only to first order. It is a promise
        of at most κ: `step()` refuses more gradients of a parameter, as a second backward over a micro-batch brings.

        `expect(1)` says that each gradient is a whole update. They then wait for `step()`, as AdamW's do, which folds
        them and moves the weights in one pass over memory instead of two; until then, do not write over them.
        """
        self.queue.update.expect(kappa)

    @torch.no_grad()
    def abandon(self) -> None:
        """Give up the update that is open, without moving a weight: after a backward that failed, say.

        Gradients cannot be taken out of a sum. What was folded stays in the averages, properly normalised; in the very
        first update the moments go back to zero. Nothing of it counts as seen.
        """
        self.queue.abandon()
        self.zero_grad()

    def ragged(self, samples: int) -> AbstractContextManager[None]:
        """Fold the gradients of this context as those of a smaller micro-batch, of `samples` < M samples.

        Its loss is the mean over its own samples, and it counts n/M micro-batches in both moments.
        """
        checks.check_ragged(samples, self.micro_batch_size)
        return self.queue.weighted(samples / (self.micro_batch_size or 1))

    def register_update_hook(self, hook: UpdateHook) -> RemovableHandle:
        """Have `hook(optimizer, start, stop)` called in each `step()` once κ is known and before a weight moves.

        The update consumes the samples from `start` to `stop`. Sample-based schedules set the learning rate here.
        """
        handle = RemovableHandle(self._update_hooks)
        self._update_hooks[handle.id] = hook
        return handle

    @_eager
    @torch.no_grad()
    def fold(self) -> None:
        """Fold the `p.grad` of all parameters as one micro-batch and free them (fold="call")."""
        self.queue.push_all()

    # ---------------------------------------------------------------- m, v -> weights

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
        queue, moments = self.queue, self.queue.moments
        queue.reducer.reduce_update(queue, queue.collect)
        queue.update.check_whole(moments.name)
        kappa, start = queue.update.kappa, self.samples_seen
        stop = start + round(kappa * (self.micro_batch_size or 1))
        for hook in self._update_hooks.values():
            hook(self, start, stop)
        steps = self._steps()  # refuses before anything changes
        if queue.nonfinite.raises:  # asks before the weights move
            queue.flush()
            queue.nonfinite.report(start)
        queue.move(steps)
        queue.reducer.after_step(queue)
        if queue.launcher.finish(queue.update):
            moments.advance([(step.params, step.counters) for step in steps], samples_seen=stop, kappa=kappa)
            queue.watch.look(queue)
            if queue.nonfinite.on_cpu:  # on an accelerator it would stop the host: told when the state is saved
                queue.nonfinite.report(stop)
        queue.reset()
        return loss

    def _steps(self) -> list[Step]:
        """The arithmetic of the step, once for all parameters that share a group, a count κ and a history.

            w ← (1−η′λ)·w − η′·m̂/(√v̂+ε)        m̂ = m/(c₁(1−P₁))        v̂ = v/(c₂(1−P₂))

        The moments are folded already: m = a₁m + b₁Σg and v = a₂v + b₂Σg². They must still be divided by c = a + bκ,
        which makes an average of them, and by 1−P, which takes out the zero they began with (see `fold/scalars.py`).
        Both go into the step's own scalars, so that m, v and w are read once.
        """
        steps, self.queue.shares = [], []
        for group, tally, history, params in self.queue.histories():
            lr, eps, decay = checks.as_float(group["lr"]), group["eps"], group["weight_decay"]
            check_hyperparameters(lr, group["betas"], eps, decay)
            rule, rho = RULES[group["rule"]], scalars.rho_at(group, tally.kappa)  # ρ = κM/B₀
            betas = scalars.betas_at(group, tally.kappa)  # 1 − γ′
            new = scalars.close(history, tally, betas)  # c and P after this update
            self.queue.note_size(history, tally, betas, rho)
            x, y = scalars.debias(new)  # m̂ = m/x with x = c₁(1−P₁),  √v̂ = √v/y with y² = c₂(1−P₂)
            scaled_lr = lr * rule.lr(rho)  # η′
            keep = 1.0  # 1 − η′λ
            if decay and group["decoupled_weight_decay"]:
                keep -= rule.decay(check_decay(lr, decay), rho)
                check_keep(keep, group["rule"], lr, decay, rho)
            # keep·w − η′·m̂/(√v̂ + ε)  =  keep·w − (η′y/x)·m/(√v + εy)
            steps.append(Step(params, size=scaled_lr * y / x, eps=eps * y, decay=keep, counters=new))
        return steps

    # ---------------------------------------------------------------- state, as every optimizer has it

    # torch's own two attributes live in the moments, whoever assigns them.
    param_groups: Any = property(lambda o: o.queue.moments.groups, lambda o, x: setattr(o.queue.moments, "groups", x))
    state: Any = property(lambda o: o.queue.moments.state, lambda o, x: setattr(o.queue.moments, "state", x))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear `p.grad` and the squares that one pass left; refused where it would pretend to clear what is folded.

        With fold="call", what went through `fold()` stays part of the update.
        """
        if self.queue.in_backward:
            self.queue.update.refuse_open(
                "zero_grad()",
                "gradients cannot be taken back out of the moments. Call it after step() only. To keep a backward away "
                "from these parameters, freeze them (requires_grad_(False)) or name the others "
                "(loss.backward(inputs=...)); to drop the update, call opt.abandon()",
            )
        super().zero_grad(set_to_none)
        for p in self.queue.moments.params():
            pair.clear(p)
        self.queue.bind()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with their own hyperparameters; those of the run (M, B₀, rule) are common to all."""
        if "decoupled" in param_group:
            param_group["decoupled_weight_decay"] = param_group.pop("decoupled")
        if self.param_groups:
            param_group["samples_seen"] = self.samples_seen
            param_group["kappa"] = self.param_groups[0]["kappa"]
        super().add_param_group(param_group)
        try:
            checks.check_group(self.param_groups, gradients=not self.queue.in_backward)
            self.queue.reducer.add_parameters(self.queue)
        except BaseException:
            self.param_groups.pop()
            raise
        self.queue.bind(take=True)

    @_eager
    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Return the state in torch's format, which `torch.optim.AdamW` loads too; refused in mid-update."""
        self.queue.update.refuse_open("state_dict()", "a checkpoint cannot hold half of one. Save after step()")
        self.queue.moments.normalise()
        self.queue.nonfinite.report(self.samples_seen)
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
            self.queue.reducer.drop_update(self.queue)
            loaded.append(state_dict)

        last = self.register_load_state_dict_pre_hook(look)  # after the user's own, which may change the dict
        try:
            super().load_state_dict(state_dict)
        finally:
            last.remove()
        for key in ("tuned_batch_size", "rule"):
            self.defaults[key] = self.param_groups[0][key]
        self.queue.moments.restore(loaded[0])
        self.queue.restart()

    def __getstate__(self) -> dict[str, Any]:
        self.queue.flush()  # before the moments are copied
        return {**super().__getstate__(), "queue": self.queue}

    def __setstate__(self, state: dict[str, Any]) -> None:
        copied = "queue" in state  # a copy or an unpickled optimizer, not load_state_dict
        if copied:
            self.queue = state["queue"]
            self.process_group, self._update_hooks = None, OrderedDict()
        self.param_groups, self.state = state["param_groups"], state["state"]
        super().__setstate__({"defaults": state["defaults"]} if copied else {})  # torch writes them into __dict__
        self.defaults.pop("differentiable", None)  # torch's own, which other checkpoints would then be asked for
        for group in self.param_groups:  # a group of AdamW's checkpoint lacks ours
            for key, value in self.defaults.items():
                group.setdefault(key, value)
        if copied:
            self.queue.bind(take=True)
            guards.install(self.queue)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """What `GradScaler.step` asks first; with it, an update whose gradients are folded away still steps."""
        if self.queue.in_backward:
            checks.refuse_scaler()
        return True

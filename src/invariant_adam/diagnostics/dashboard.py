"""`log_to`: what an `InvariantAdam` does, as scalars of TensorBoard, W&B or anything with `log(dict)`."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from ..fold import scalars
from ..fold.checks import as_float
from ..optimizer import InvariantAdam
from ..scaling import RULES
from ..unwrap import unwrap

Write = Callable[[dict[str, float], int], Any]


class Log:
    """Writes the scalars of every n-th update. Made by `log_to`."""

    def __init__(self, optimizer: InvariantAdam, write: Write, every: int, smooth: int) -> None:
        self.optimizer, self.write, self.every, self.smooth = optimizer, write, every, smooth
        self.updates = 0
        self.remove: Callable[[], None] = lambda: None  # stop logging

    def __call__(self) -> None:
        """Count an update; write its scalars if it is one of every n. Each `step()` calls it, where log_to hooks it."""
        self.updates += 1
        if self.updates % self.every == 0:
            self.write(self.scalars(), self.optimizer.samples_seen)

    def scalars(self) -> dict[str, float]:
        """The scalars of the last update (waits for the device)."""
        opt = self.optimizer
        group = opt.param_groups[0]
        kappa = float(group["kappa"])
        found = {"kappa": kappa, "rho": scalars.rho_at(group, kappa), "samples_seen": float(opt.samples_seen)}
        for i, each in enumerate(opt.param_groups):
            name = "lr" if len(opt.param_groups) == 1 else f"lr/{i}"
            found[name] = as_float(each["lr"]) * RULES[each["rule"]].lr(scalars.rho_at(each, kappa))
        share = opt.update_share()
        found |= {"update_share": share.m, "update_share_v": share.v}
        if share.relative_step is not None:
            found["relative_step"] = float(share.relative_step)
        try:
            noise = opt.noise_scale(self.smooth)
        except RuntimeError:  # a single micro-batch so far, or beta1 = 0
            return found
        found |= {"noise_scale": noise.batch, "noise_scale_stderr": noise.stderr}
        return {name: value for name, value in found.items() if math.isfinite(value)}


def log_to(
    optimizer: Optimizer,
    writer: Any,
    every: int = 10,
    *,
    prefix: str = "invariant_adam/",
    smooth: int = 8,
    hook: bool = True,
) -> Log:
    """Log κ, ρ, learning rate, shares in m and v and relative step of every n-th update, and the noise scale.

    Only those updates wait for the device. Steps are counted in samples seen, so that runs at different batch sizes lie
    over each other.

    Args:
        optimizer: an `InvariantAdam`, or a wrapper around one.
        writer: TensorBoard's SummaryWriter or another object with `add_scalar(name, value, step)`; one with
            `log(dict)`, such as a run of W&B; a function of (dict, step); or None, on ranks that write nothing. All
            ranks must call `log_to`, since those that share moments read the noise scale together.
        every: updates.
        prefix: of the names.
        smooth: readings that the noise scale is averaged over.
        hook: False leaves it to you to call the `Log` after each update, as a captured one needs, which has no hooks.

    >>> import torch
    >>> from invariant_adam import InvariantAdam
    >>> model = torch.nn.Linear(3, 1)
    >>> opt = InvariantAdam(model.parameters(), lr=1e-3, micro_batch_size=2)
    >>> log = log_to(opt, lambda values, step: print(step, values["invariant_adam/kappa"]), every=2)
    >>> for _ in range(4):
    ...     model(torch.ones(2, 3)).square().mean().backward()
    ...     opt.step()
    4 1.0
    8 1.0
    """
    if not isinstance(every, int) or every < 1:
        raise ValueError(f"every must be a number of updates, at least 1, got {every}")
    inner = unwrap(optimizer)
    write = _writing(writer)
    log = Log(inner, lambda values, step: write({prefix + k: v for k, v in values.items()}, step), every, smooth)
    if hook:
        handle = inner.register_step_post_hook(lambda *_: log())
        log.remove = handle.remove
    return log


def _writing(writer: Any) -> Write:
    """How this writer takes scalars."""
    if writer is None:
        return lambda values, step: None
    if hasattr(writer, "add_scalar"):

        def write(values: dict[str, float], step: int) -> None:
            for name, value in values.items():
                writer.add_scalar(name, value, step)

        return write
    log = getattr(writer, "log", None)
    if callable(log):
        return _with_step(log)
    if callable(writer):
        return lambda values, step: writer(values, step)
    raise TypeError(
        f"writer must have add_scalar(name, value, step) or log(dict), or be a function of (dict, step), got "
        f"{type(writer).__name__}"
    )


def _with_step(log: Callable[..., Any]) -> Write:
    """Give the step to a `log` that takes one."""
    try:
        parameters = inspect.signature(log).parameters.values()
    except (TypeError, ValueError):  # written in C, say
        return lambda values, step: log(values)
    if any(p.name == "step" or p.kind is p.VAR_KEYWORD for p in parameters):
        return lambda values, step: log(values, step=step)
    return lambda values, step: log(values)

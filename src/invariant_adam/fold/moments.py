"""The state of a run: m and v of every parameter, with the counters that normalise and debias them.

`Moments` holds torch's own `state` and `param_groups`, which the optimizer shows under their usual names. So the state
has torch's format: `step`, `exp_avg` and `exp_avg_sq`, which AdamW writes and reads too, and our counters beside them
(see `scalars.fresh`).
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from itertools import chain
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from . import scalars

KEYS = ("exp_avg", "exp_avg_sq")
_promote = cache(torch.promote_types)
_counters = itemgetter(*scalars.fresh())


class Moments:
    """m and v of every parameter of an optimizer.

    Args:
        dtype: of the moments at least; those of a wider parameter have its dtype.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.groups: list[dict[str, Any]] = []  # torch's param_groups
        self.state: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)  # torch's state
        self.readings: list[Any] = []  # of the noise scale
        self._index: dict[Tensor, int] = {}

    def params(self) -> Iterator[Tensor]:
        """All parameters, in the order of their groups."""
        return chain.from_iterable(group["params"] for group in self.groups)

    def index(self, p: Tensor) -> int:
        """The place of the group of `p`; looked up only where there are several, since this is asked often."""
        return self._index[p] if len(self.groups) > 1 else 0

    def group(self, p: Tensor) -> dict[str, Any]:
        """The group of `p`."""
        return self.groups[self.index(p)]

    def name(self, p: Tensor) -> str:
        """A name for messages: the user's where `named_parameters()` was given, else the place and the shape."""
        index = self._index[p]
        group = self.groups[index]
        place = next(i for i, q in enumerate(group["params"]) if q is p)
        if "param_names" in group:
            return repr(group["param_names"][place])
        return f"{place} of group {index}, of shape {tuple(p.shape)},"

    def dtype_of(self, p: Tensor) -> torch.dtype:
        """The dtype of the moments of `p`."""
        return _promote(p.dtype, self.dtype)

    def ensure(self, p: Tensor, index: int) -> None:
        """Give `p`, of the group at `index`, moments of zero if it is trained and has none.

        They are made before the first gradient: torch.distributed.checkpoint looks for them before the first step.
        """
        self._index[p] = index
        if p.requires_grad and not self.state.get(p):
            state = self.state[p]
            m, v = (torch.zeros_like(p, dtype=self.dtype_of(p), requires_grad=False) for _ in KEYS)
            state |= {"step": torch.tensor(0.0), "exp_avg": m, "exp_avg_sq": v, **scalars.fresh()}

    def follow(self, p: Tensor) -> dict[str, Any]:
        """The state of `p`, its moments where `p` is now: a model.to(...) may have come after the optimizer."""
        state = self.state[p]
        if not state:  # unfrozen since the last update
            self.ensure(p, self._index[p])
        m, dtype = state["exp_avg"], p.dtype
        if dtype != self.dtype:
            dtype = self.dtype_of(p)
        if m.dtype != dtype or m.device != p.device:
            for key in KEYS:
                state[key] = state[key].to(p.device, dtype)
        return state

    def history(self, p: Tensor, state: dict[str, Any] | None = None) -> tuple[Any, ...]:
        """What parameters must share to have the same scalars in an update: group and counters.

        `state` is that of `p`, where it is at hand.
        """
        return self.index(p), _counters(self.state[p] if state is None else state)

    def advance(self, moved: list[tuple[list[Tensor], scalars.Counters]], samples_seen: int, kappa: float) -> None:
        """Count an update: what its parameters have as new counters, and the run."""
        steps = []
        for params, counters in moved:
            for p in params:
                state = self.state[p]
                state.update(counters)
                steps.append(state["step"])
        torch._foreach_add_(steps, torch.tensor(1.0), alpha=1.0)  # a number would become a tensor for each of them
        for group in self.groups:
            group["samples_seen"], group["kappa"] = samples_seen, kappa

    def normalise(self) -> None:
        """Divide m and v by what is owed (see `scalars`), so that they are the averages that AdamW knows."""
        for state in self.state.values():
            for key, norm in zip(KEYS, ("norm1", "norm2"), strict=True):
                if state[norm] != 1.0:
                    state[key].div_(state[norm])
                    state[norm] = 1.0

    def restore(self, saved: dict[str, Any]) -> None:
        """Finish what torch's load_state_dict began, from the state dict that it loaded.

        torch casts moments to the dtype of their parameter, bfloat16 perhaps: they are taken again. Adam's have no
        counters yet: its bias correction β^t goes on from the checkpoint's own betas.
        """
        self.readings.clear()
        ids = chain.from_iterable(group["params"] for group in saved["param_groups"])
        for i, p in zip(ids, self.params(), strict=True):
            found = saved["state"].get(i)
            if not found:
                self.state.pop(p, None)
                self.ensure(p, self._index[p])
                continue
            group, state = self.group(p), self.state[p]
            for key in KEYS:
                state[key] = _placed(found[key].detach(), p).to(p.device, self.dtype_of(p), copy=True)
            step = float(state["step"])
            state["step"] = torch.tensor(step)
            for key, value in scalars.after_adam(group["betas"], step).items():
                state.setdefault(key, value)


class NonFinite:
    """Gradient elements that were left out of the moments because they were not finite.

    They are counted on their device, so that nobody waits for them, and told of when somebody asks.

    Args:
        raises: whether to stop the run, or to warn and go on.
    """

    def __init__(self, raises: bool) -> None:
        self.raises = raises
        self._counts: dict[torch.device, Tensor] = {}
        self._reported = 0

    def counter(self, device: torch.device) -> Tensor:
        """Where kernels on `device` count."""
        if device not in self._counts:
            self._counts[device] = torch.zeros((), dtype=torch.int64, device=device)
        return self._counts[device]

    @property
    def total(self) -> int:
        """How many so far (waits for the devices)."""
        return sum(int(count) for count in self._counts.values())

    @property
    def new(self) -> int:
        """How many since the last report (waits for the devices)."""
        return self.total - self._reported

    @property
    def on_cpu(self) -> bool:
        """Whether asking costs nothing."""
        return all(device.type == "cpu" for device in self._counts)

    def report(self, samples: int) -> None:
        """Tell of the elements left out since the last report (waits for the devices).

        Args:
            samples: seen so far.
        """
        new = self.new
        if not new:
            return
        self._reported += new
        message = (
            f"{new} gradient elements were not finite, or too large to square, after {samples} samples; they were left "
            "out of the moments"
        )
        if self.raises:
            raise RuntimeError(
                message + ", and the weights have not moved. Lower lr or set max_micro_norm; the next step() goes on "
                'without them, as on_nonfinite="skip" does'
            )
        warnings.warn(message, RuntimeWarning, stacklevel=6)  # the line that calls step()


def _placed(value: Tensor, like: Tensor) -> Tensor:
    """A whole tensor cut as the DTensor `like` is; others are as they should be."""
    if hasattr(like, "device_mesh") and not hasattr(value, "device_mesh"):
        from torch.distributed.tensor import distribute_tensor

        value = distribute_tensor(value.to(like.device), like.device_mesh, like.placements)  # type: ignore[attr-defined]
    return value


def whole(t: Tensor) -> Tensor:
    """The whole of a tensor that may be cut over ranks (a DTensor); then all of them must ask for it together."""
    gathered: Tensor = t.full_tensor() if hasattr(t, "full_tensor") else t
    return gathered

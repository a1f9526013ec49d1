"""What the moments already know: the gradient's signal, its noise, and the batch size at which they balance.

Both moments average the same micro-batch gradients g = G + noise, but v squares first. With e = Σ of the squared
weights in the debiased m,

    E Σv̂ = |G|² + trΣ/M        E |m̂|² = |G|² + e·trΣ/M

are two equations for |G|² and trΣ. Each call of `noise_scale` is a *reading*: two numbers per parameter, left on their
device. Between two readings v gives the mean of g² over the interval alone, so that several readings do not lag as v
itself does, and their scatter gives the standard error.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .fold.moments import Moments

KEPT = 64  # readings that are kept
ENOUGH = 4  # readings whose scatter tells of their error


class Reading(NamedTuple):
    """The moments at one time: a number per parameter on the device, and what the host knows of each."""

    samples: int
    places: list[tuple[Tensor, Tensor, list[int]]]  # |m|, Σv and of which parameters they are
    norms: list[tuple[float, float]]  # what m and v must be divided by to be averages
    zero: list[tuple[float, float]]  # P of each: the share of the zero that they began with
    left: list[float]  # e; 1 where there was no gradient yet

    def tables(self) -> tuple[Tensor, Tensor]:
        """|m̂|² and ΣV of each parameter, V being v normalised and not yet debiased (waits for the device)."""
        m, v = torch.zeros(2, len(self.left), dtype=torch.float64)
        for norms, sums, which in self.places:
            m[which], v[which] = norms.double().cpu(), sums.double().cpu()
        c = torch.tensor(self.norms, dtype=torch.float64).T
        p = torch.tensor(self.zero, dtype=torch.float64).T
        seen = (1 - p[0]).clamp_min(1e-300)
        return torch.where(p[0] < 1, (m / (c[0] * seen)).square(), 0.0), v / c[1]


class NoiseScale:
    """Signal and noise of the gradient. Nothing waits for the device until a number is read.

    It unpacks as `signal, noise, batch`.
    """

    def __init__(self, series: Callable[[], _Series], of: Callable[[], dict[str, NoiseScale]], count: int) -> None:
        self._compute, self._of, self.readings = series, of, count

    @cached_property
    def _series(self) -> _Series:
        return self._compute()

    @property
    def signal(self) -> float:
        """|G|², squared norm of the mean gradient."""
        return self._series.signal

    @property
    def noise(self) -> float:
        """trΣ, variance of one sample's gradient, summed over the weights (of one micro-batch's, if M is None)."""
        return self._series.noise

    @property
    def batch(self) -> float:
        """trΣ/|G|², samples at which noise and signal balance; inf where no signal shows."""
        return self.noise / self.signal if self.signal > 0 else math.inf

    @property
    def stderr(self) -> float:
        """Standard error of `batch`, from the scatter of the readings; nan before there are four."""
        return self._series.stderr if self.signal > 0 else math.nan

    @cached_property
    def layers(self) -> dict[str, NoiseScale]:
        """The same of each layer: of the parameters whose names differ in their last part only."""
        return {name[1:]: one for name, one in self._of().items() if name.startswith("/")}

    @cached_property
    def groups(self) -> list[NoiseScale]:
        """The same of each parameter group."""
        return [one for name, one in self._of().items() if not name.startswith("/")]

    def efficiency(self, batch: float) -> float:
        """How much an update of `batch` samples gains per sample, relative to a very small one: 1/(1 + B/B_noise)."""
        return 1 / (1 + batch / self.batch) if self.batch > 0 else 0.0

    def advice(self) -> str:
        """Say in words what the noise scale means for the batch size."""
        if not self.noise and not self.signal:
            return "The moments are zero: no update has been made, or no gradient has come yet."
        if not math.isfinite(self.batch):
            return (
                "No signal shows above the noise: the noise scale is larger than what these averages can tell. A "
                "larger batch still pays; read it again later, with smooth=16, or with a larger beta1."
            )
        n = _round(self.batch)
        return (
            f"A batch of about {n} samples balances signal and noise. Up to about {_round(self.batch / 10)}, twice the "
            f"batch needs nearly half the updates; at {n} a sample is worth half as much as in a small batch; beyond "
            f"{_round(10 * self.batch)} a larger batch saves almost no updates."
        )

    def __iter__(self) -> Iterator[float]:
        return iter((self.signal, self.noise, self.batch))

    def __repr__(self) -> str:
        return (
            f"NoiseScale(signal={self.signal:.4g}, noise={self.noise:.4g}, batch={self.batch:.4g}, "
            f"stderr={self.stderr:.2g})"
        )

    def __str__(self) -> str:
        error = f" ± {_round(self.stderr)}" if math.isfinite(self.stderr) else ""
        count = f", {self.readings} readings" if self.readings > 1 else ""
        return (
            f"noise scale {_round(self.batch)}{error} samples "
            f"(|G|² = {self.signal:.3g}, trΣ = {self.noise:.3g}{count}). {self.advice()}"
        )


class _Series(NamedTuple):
    """Signal and noise as means over readings."""

    signal: float
    noise: float
    stderr: float


@torch.no_grad()
def noise_scale(optimizer: Any, smooth: int = 1) -> NoiseScale:
    """Estimate the simple noise scale of the gradient from an `InvariantAdam`'s state.

    Each call is a reading. One reading is as noisy as m̂ is, and speaks of the recent past: of the half-lives of m and
    v. `smooth=n` averages the last n readings; make them some updates apart, as `log_to` does. Where ranks hold pieces
    of the moments, all of them must call it together; they exchange two numbers per parameter.

    Args:
        optimizer: an `InvariantAdam` between updates, after at least two micro-batches.
        smooth: readings to average over, this one included; at most 64 are kept.

    >>> from invariant_adam import InvariantAdam
    >>> w = torch.nn.Parameter(torch.zeros(1000))
    >>> opt = InvariantAdam([w], lr=0.0, micro_batch_size=8)
    >>> _ = torch.manual_seed(0)
    >>> for _ in range(200):
    ...     (w * (1.0 + torch.randn(1000))).sum().backward()  # G = 1 and variance 1 per weight and micro-batch
    ...     opt.step()
    >>> round(opt.noise_scale().batch)
    8
    """
    if not 1 <= smooth <= KEPT:
        raise ValueError(f"smooth must be from 1 to {KEPT} readings, got {smooth}")
    optimizer.queue.update.refuse_open("noise_scale()", "the moments are no averages yet. Call it after step()")
    moments: Moments = optimizer.queue.moments
    params = [p for p in moments.params() if moments.state.get(p)]
    history: list[Reading] = moments.readings
    if history and (len(history[-1].left) != len(params) or history[-1].samples > optimizer.samples_seen):
        history.clear()  # of another run
    reading = _read(moments, params, optimizer.samples_seen)
    if history and history[-1].samples == reading.samples:
        history.pop()
    history.append(reading)
    del history[:-KEPT]
    return _result(list(history), smooth, optimizer.micro_batch_size or 1, moments, params)


def _read(moments: Moments, params: list[Tensor], samples: int) -> Reading:
    """Reduce the moments of every parameter to two numbers, in a few launches and without waiting for them."""
    norms, zero, left = [], [], []
    places: dict[Any, list[int]] = defaultdict(list)
    locals_: list[tuple[Tensor, Tensor]] = []
    for i, p in enumerate(params):
        state = moments.state[p]
        norms.append((state["norm1"], state["norm2"]))
        zero.append((state["debias1"], state["debias2"]))
        fresh = state["debias1"] == 1.0
        left.append(1.0 if fresh else state["noise"] / (1 - state["debias1"]) ** 2)
        if not fresh and not left[-1] < 1 - 1e-9:
            raise RuntimeError(
                "noise_scale() needs at least two micro-batches in the first moment; call it after more updates (at "
                "beta1 = 0 after one of several micro-batches)"
            )
        m, v = state["exp_avg"], state["exp_avg_sq"]
        groups: tuple[Any, ...] = ()
        if hasattr(m, "device_mesh"):  # a DTensor: ranks hold pieces, or copies, of it
            cut = [d for d, placement in enumerate(m.placements) if not placement.is_replicate()]
            groups = tuple(m.device_mesh.get_group(d) for d in cut)
            m, v = m.to_local(), v.to_local()
        locals_.append((m, v))
        places[m.device, m.dtype, groups].append(i)
    found = []
    for (_, dtype, groups), which in places.items():
        wide = torch.promote_types(dtype, torch.float32)
        m_norms = torch.stack(torch._foreach_norm([locals_[i][0] for i in which], 2, dtype=wide))
        v_sums = torch.stack(torch._foreach_norm([locals_[i][1] for i in which], 1, dtype=wide))  # v is not negative
        if groups:
            both = torch.stack([m_norms.double().square(), v_sums.double()])
            for group in groups:
                torch.distributed.all_reduce(both, group=group)
            m_norms, v_sums = both[0].sqrt(), both[1]
        found.append((m_norms, v_sums, which))
    return Reading(samples, found, norms, zero, left)


def _result(history: list[Reading], smooth: int, size: int, moments: Moments, params: list[Tensor]) -> NoiseScale:
    used = min(smooth, len(history))
    tables: list[tuple[Tensor, Tensor]] = []

    def parts() -> tuple[Tensor, Tensor]:
        """Signal and noise of each reading and parameter, each (readings, parameters); made once."""
        if not tables:
            tables.append(_parts(history))
        return tables[0]

    # The share of m that is the same at two neighbouring readings, at most: they count as fewer than they are.
    kept = _overlap(history[-max(used, 2) :], moments)

    def series(which: list[int]) -> _Series:
        signal, noise = (table[:, which].sum(1) for table in parts())
        s, n = float(signal[-used:].mean()), size * float(noise[-used:].mean())
        error = math.nan
        if len(signal) >= ENOUGH and s > 0:
            off = (size * noise - n / s * signal) / s  # a reading's part in the error of the ratio, to first order
            count = max(1.0, used * (1 - kept) / (1 + kept))
            error = float(off[-max(used, 16) :].std()) / math.sqrt(count)
        return _Series(s, n, error)

    def make(which: list[int], of: Callable[[], dict[str, NoiseScale]] = dict) -> NoiseScale:
        return NoiseScale(lambda: series(which), of, used)

    def members() -> dict[str, NoiseScale]:
        names: dict[str, list[int]] = defaultdict(list)
        for i, p in enumerate(params):
            names[str(moments.index(p))].append(i)
            names["/" + _layer(moments, p)].append(i)
        return {name: make(which) for name, which in names.items()}

    return make(list(range(len(params))), members)


def _parts(history: list[Reading]) -> tuple[Tensor, Tensor]:
    """|G|² and trΣ/M of each parameter at each reading (waits for the device)."""
    rows = []
    before: tuple[Tensor, Tensor] | None = None  # V and P at the reading before
    for reading in history:
        m_square, v = reading.tables()
        zero = torch.tensor([p for _, p in reading.zero], dtype=torch.float64)
        old_v, old_zero = before or (torch.zeros_like(v), torch.ones_like(v))
        # V = R·V_old + (1−R)·(mean g² since), R = P/P_old; from V = 0 and P = 1 that is the debiased v̂.
        share = torch.where(old_zero > 1e-300, zero / old_zero.clamp_min(1e-300), 0.0)
        square = ((v - share * old_v) / (1 - share).clamp_min(1e-12)).clamp_min(0.0)
        square = torch.where(share < 1, square, 0.0)
        left = torch.tensor(reading.left, dtype=torch.float64)
        started = left < 1
        noise = torch.where(started, (square - m_square) / (1 - left).clamp_min(1e-12), 0.0)
        rows.append((torch.where(started, square - noise, 0.0), noise))
        before = v, zero
    return torch.stack([s for s, _ in rows]), torch.stack([n for _, n in rows])


def _overlap(history: list[Reading], moments: Moments) -> float:
    """How much of m one reading has in common with the next: β₁^(samples between/B₀)."""
    if len(history) < 2:
        return 0.0
    group = moments.groups[0]
    tuned = group["tuned_batch_size"] or group["micro_batch_size"] or 1
    apart = (history[-1].samples - history[0].samples) / (len(history) - 1) / tuned
    return float(group["betas"][0] ** apart)


def _layer(moments: Moments, p: Tensor) -> str:
    """The layer that a parameter belongs to, by its name; where there are none, its place."""
    group = moments.group(p)
    place = next(i for i, q in enumerate(group["params"]) if q is p)
    if "param_names" not in group:
        return f"group {moments.index(p)}, parameter {place}"
    name: str = group["param_names"][place]
    return name.rpartition(".")[0] or name


def _round(number: float) -> str:
    """Write a number of samples with two or three digits.

    >>> _round(1234.5), _round(0.377)
    ('1,230', '0.38')
    """
    if not math.isfinite(number):
        return str(number)
    return f"{float(f'{number:.3g}'):,.0f}" if number >= 10 else f"{number:.2g}"

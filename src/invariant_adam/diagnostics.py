"""What the moments already know: the gradient's signal, its noise, and the batch size at which they balance."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from .fold import scalars
from .fold.moments import whole


class NoiseScale(NamedTuple):
    """Signal and noise of the gradient, estimated from moments already held."""

    signal: float  # |G|², squared norm of the mean gradient
    noise: float  # trΣ, variance of one sample's gradient, summed over the weights (of one micro-batch's, if M is None)
    batch: float  # trΣ/|G|², samples at which noise and signal balance; inf where no signal shows


@torch.no_grad()
def noise_scale(optimizer: Any) -> NoiseScale:
    """Estimate the simple noise scale of the gradient from an `InvariantAdam`'s state.

    Both moments average the same micro-batch gradients g = G + noise, but v squares first. With e = Σ of the squared
    weights in the debiased m,

        E Σv̂ = |G|² + trΣ/M        E |m̂|² = |G|² + e·trΣ/M

    are two equations for |G|² and trΣ. The averages reach back over their half-lives, v's further than m's, so the
    estimate is one of the recent past and lags where the gradient changes fast. Waits for the device.

    Args:
        optimizer: an `InvariantAdam` between updates, after at least two micro-batches.

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
    optimizer.queue.update.refuse_open("noise_scale()", "the moments are no averages yet. Call it after step()")
    signal = noise = 0.0
    for state in optimizer.state.values():
        if state["debias1"] == 1.0:
            continue  # no gradient yet
        x, y = scalars.debias(state)
        left = state["noise"] / (1 - state["debias1"]) ** 2
        if not left < 1 - 1e-9:
            raise RuntimeError(
                "noise_scale() needs the first moment to average at least two micro-batches, which cannot be at "
                "beta1 = 0 with one micro-batch per update; make more of them, or raise beta1"
            )
        m, v = (whole(state[key]) for key in ("exp_avg", "exp_avg_sq"))
        v_sum = v.sum().item() / y**2
        m_square = (torch.linalg.vector_norm(m).item() / x) ** 2
        part = (v_sum - m_square) / (1 - left)  # trΣ/M
        noise += part
        signal += v_sum - part
    noise *= optimizer.micro_batch_size or 1
    return NoiseScale(signal, noise, noise / signal if signal > 0 else math.inf)

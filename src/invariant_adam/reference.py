"""The paper's algorithms in float64, slow and plain: every other path is tested against these.

Each function makes one update: `(state, grads, h) -> state`. `grads` is one function w -> gradient per
micro-batch, so that the algorithms differ in nothing but where they evaluate, square and average. `h` holds the
hyperparameters of one update, already scaled (`scaling.scale`): of one micro-batch for Micro Adam, of the
mini-batch for the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .scaling import Hyperparameters

Gradient = Callable[[Tensor], Tensor]


class State(NamedTuple):
    """Weights, moments, and for each moment the product of all (1 − γ) so far, which debiases it."""

    w: Tensor
    m: Tensor
    v: Tensor
    debias: tuple[float, float] = (1.0, 1.0)


def start(w: Tensor) -> State:
    """Return the state before the first update."""
    w = w.detach().to(torch.float64).clone()
    return State(w, torch.zeros_like(w), torch.zeros_like(w))


def micro_adam(
    s: State, grads: Sequence[Gradient], h: Hyperparameters, *, eps: float = 1e-8, decoupled: bool = True
) -> State:
    """Algorithm 1: standard Adam on each micro-batch in turn, κ small updates."""
    for grad in grads:
        s = standard_adam(s, [grad], h, eps=eps, decoupled=decoupled)
    return s


def standard_adam(
    s: State, grads: Sequence[Gradient], h: Hyperparameters, *, eps: float = 1e-8, decoupled: bool = True
) -> State:
    """Algorithm 2: average, then square.

    >>> h = Hyperparameters(lr=0.1, betas=(0.9, 0.99), weight_decay=0.0)
    >>> s = start(torch.ones(1))
    >>> a, b = standard_adam(s, [lambda w: w, lambda w: -w], h), invariant_adam(s, [lambda w: w, lambda w: -w], h)
    >>> a.v.item(), round(b.v.item(), 15)  # the two gradients cancel before the square, but not after it
    (0.0, 0.01)
    """
    g = torch.stack(_gradients(s.w, grads, h, decoupled))
    return _update(s, g.mean(0), g.mean(0).square(), h, eps, decoupled)


def invariant_adam(
    s: State, grads: Sequence[Gradient], h: Hyperparameters, *, eps: float = 1e-8, decoupled: bool = True
) -> State:
    """Algorithm 3: square, then average."""
    g = torch.stack(_gradients(s.w, grads, h, decoupled))
    return _update(s, g.mean(0), g.square().mean(0), h, eps, decoupled)


def sgd(w: Tensor, grads: Sequence[Gradient], h: Hyperparameters) -> Tensor:
    """SGD with decoupled decay on the mean gradient: w ← (1 − ηλ)w − η mean_k g_k."""
    g = torch.stack([grad(w) for grad in grads]).mean(0)
    return (1 - h.lr * h.weight_decay) * w - h.lr * g


def _gradients(w: Tensor, grads: Sequence[Gradient], h: Hyperparameters, decoupled: bool) -> list[Tensor]:
    """All micro-batch gradients at the same weights; L2 decay is part of each of them."""
    l2 = 0.0 if decoupled else h.weight_decay
    return [grad(w) + l2 * w for grad in grads]


def _update(s: State, g: Tensor, g_sq: Tensor, h: Hyperparameters, eps: float, decoupled: bool) -> State:
    """Adam's update from the average gradient and the average square, wherever they came from."""
    beta1, beta2 = h.betas
    m = beta1 * s.m + (1 - beta1) * g
    v = beta2 * s.v + (1 - beta2) * g_sq
    debias = (s.debias[0] * beta1, s.debias[1] * beta2)
    m_hat, v_hat = m / (1 - debias[0]), v / (1 - debias[1])
    w = (1 - h.lr * h.weight_decay) * s.w if decoupled else s.w
    return State(w - h.lr * m_hat / (v_hat.sqrt() + eps), m, v, debias)

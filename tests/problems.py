"""Problems that the tests share: small nets, their data, and gradient functions for the reference."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from invariant_adam import reference
from invariant_adam.fold import pair
from invariant_adam.scaling import Hyperparameters, scale


def mlp(dtype: torch.dtype = torch.float64, seed: int = 0, device: str = "cpu") -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3), nn.Tanh(), nn.Linear(3, 1)).to(device, dtype)


def batches(
    n: int, size: int = 4, dtype: torch.dtype = torch.float64, seed: int = 1, device: str = "cpu"
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, 5, generator=generator, dtype=torch.float64).to(device, dtype) for _ in range(n)]


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x).squeeze(-1) - x.sum(-1).sin()).square().mean()


def failing(error: type[BaseException]) -> Callable[[Tensor], Tensor]:
    """A copy whose backward fails."""

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            raise error("out of memory")

    return Fails.apply


def flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([t.detach().reshape(-1).to("cpu", torch.float64) for t in tensors])


def gradient_of(model: nn.Module, x: Tensor, sign: float = 1.0) -> Callable[[Tensor], Tensor]:
    """The gradient of one micro-batch's loss as a function of all weights in one flat float64 vector."""
    twin = copy.deepcopy(model).to("cpu", torch.float64)
    x = x.to("cpu", torch.float64)

    def gradient(w: Tensor) -> Tensor:
        with torch.no_grad():
            torch.nn.utils.vector_to_parameters(w, twin.parameters())
        return flat(torch.autograd.grad(sign * loss(twin, x), list(twin.parameters())))

    return gradient


def reference_run(
    model: nn.Module,
    updates: Sequence[Sequence[Tensor]],
    h: Hyperparameters,
    *,
    tuned: float = 1.0,
    rule: str = "exponential",
    algorithm: Callable[..., reference.State] = reference.invariant_adam,
    decoupled: bool = True,
    sign: float = 1.0,
) -> reference.State:
    """Run the reference over updates of micro-batches, hyperparameters scaled to each (batches in micro-batches)."""
    state = reference.start(flat(model.parameters()))
    for micro in updates:
        at = scale(*h, from_batch=tuned, to_batch=len(micro), rule=rule)
        if not decoupled:
            at = at._replace(weight_decay=h.weight_decay)
        grads = [gradient_of(model, x, sign) for x in micro]
        state = algorithm(state, grads, at, decoupled=decoupled)
    return state


def moments(opt: torch.optim.Optimizer) -> tuple[Tensor, Tensor]:
    """Both moments of all parameters, normalised."""
    states = opt.state_dict()["state"]
    return flat(s["exp_avg"] for s in states.values()), flat(s["exp_avg_sq"] for s in states.values())


def distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def put(p, grad, grad_sq, kappa):
    """Make a pair of `p` complete, as one pass does."""
    pair.put(p, pair.Pair(grad, grad_sq, kappa), pair.taker_of(p))

"""The weight gradient of a convolution and the sum of its squared micro-batch parts.

G (κ, m, O, *out) and X (κ, m, C, *in) are output gradients and inputs of κ groups of m images. On a GPU, 2-d
convolutions have several `ways`; elsewhere, and for all others, the library makes each group's gradient (`torch`).
"""

from __future__ import annotations

from torch import Tensor
from torch.compiler import is_compiling

from .. import Serving, cast, twin
from . import torch as plain
from .torch import Geometry, conv_backward, conv_groups

__all__ = ["Geometry", "conv_backward", "conv_groups", "conv_square", "fused", "takes_fused"]

fused = twin(__name__, "ways")  # a constant, so that compiled code need not ask


def takes_fused(G: Tensor, X: Tensor, geo: Geometry, kappa: int) -> bool:
    """Whether `ways` serve; the gradient of a single group is the library's, and is then squared."""
    return fused is not None and Serving.fused and kappa > 1 and G.is_cuda and fused.serves(G, X, geo)


def conv_square(G: Tensor, X: Tensor, geo: Geometry, c: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """dW and S, each of the weight's shape; c (κ,) weighs the squares."""
    X = cast(X, G.dtype)
    if not takes_fused(G, X, geo, G.shape[0]):
        return plain.conv_square(G, X, geo, c)
    if is_compiling():
        return fused.conv_square_op(G.flatten(0, 1), X.flatten(0, 1), c, G.shape[0], *geo)
    return fused.conv_square(G, X, geo, c)

"""The gradient of an embedding table and the sum of its squared micro-batch parts.

For ids (κ, R) and G (κ, R, D), group k's gradient of row v is the sum of G over the places where ids = v. Repeated
tokens of a group add before they are squared; a table of κ × V rows is never formed.
"""

from __future__ import annotations

from torch import Tensor
from torch.compiler import is_compiling

from .. import Serving, twin
from . import torch as plain
from .torch import embedding_groups, embedding_rows

__all__ = ["embedding_groups", "embedding_rows", "embedding_square", "fused", "takes_fused"]

fused = twin(__name__)  # a constant, so that compiled code need not ask


def takes_fused(ids: Tensor, G: Tensor, rows: int) -> bool:
    """Whether Triton serves these operands."""
    return fused is not None and Serving.fused and G.is_cuda and fused.serves(ids, G, rows)


def embedding_square(ids: Tensor, G: Tensor, rows: int, c: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """dW (V, D) and S (V, D) for ids (κ, R), G (κ, R, D) and a table of `rows` = V rows; c (κ,) weighs the squares."""
    if not takes_fused(ids, G, rows):
        return plain.embedding_square(ids, G, rows, c)
    return (fused.embedding_square_op if is_compiling() else fused.embedding_square)(ids, G, rows, c)

"""Rows that were picked from the batch by index: which micro-batch does each belong to?

A mixture-of-experts layer sends `x[index]` to an expert, so the rows that a weight sees are no longer in batch order.
The autograd graph remembers the index; this module reads it back.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointError

from .groups import Groups, UnsupportedUse

# Nodes that keep rows apart and in order.
ROWWISE = frozenset({"torch::autograd::CopyBackwards", "CatBackward0"}) | frozenset(
    f"{name}Backward{i}"
    for name in (  # noqa: SIM905
        "Add Sub Mul Div Neg Silu Gelu Relu Sigmoid Tanh NativeDropout ToCopy Split SplitWithSizes Chunk Pow Clamp "
        "LeakyRelu Elu Celu Softplus Hardswish Hardtanh Hardsigmoid LogSigmoid Mish Abs Exp Clone Linear MaskedFill "
        "Slice"
    ).split()
    for i in (0, 1)
)
PARTS = frozenset(("SliceBackward0", "SplitBackward0", "SplitWithSizesBackward0"))  # of those, what may drop rows
DEPTH = 24
# In the metadata of a node: a walk from here has found nothing. A residual stream is walked once, not by each layer.
_NOTHING = "invariant_adam: rows in batch order"


def sample_groups(groups: Groups, rows: int, device: torch.device) -> Tensor:
    """The group of each of `rows` rows that lie in batch order."""
    return torch.arange(rows, device=device) // (groups.micro * (rows // groups.batch))


class Routed(NamedTuple):
    """Rows that were picked from `total` rows in batch order: the place of each there, and its group."""

    places: Tensor
    total: int
    ids: Tensor


def routed(x: Tensor, groups: Groups) -> Routed | None:
    """Where the rows of x come from, if x was picked by index along the batch."""
    found = _walk(x.grad_fn, x.output_nr, groups, 0)
    return found if found is not None and x.ndim > 0 and len(found.ids) == len(x) else None


def _walk(node: Any, output: int, groups: Groups, depth: int) -> Routed | None:
    """Where the rows of a result come from: the node that made it, and its number among that node's outputs."""
    if node is None or depth > DEPTH:
        return None
    name, found = node.name(), None
    if name == "IndexBackward0":
        indices = _read(node, "_saved_indices")
        sizes = node._saved_self_sym_sizes
        if not indices or indices[0] is None:
            return None
        index = indices[0]
    elif name == "IndexSelectBackward0" and node._saved_dim == 0:
        index, sizes = _read(node, "_saved_index"), node._saved_self_sym_sizes
    elif name in ROWWISE:
        if _NOTHING in node.metadata:
            return None
        found = _joined(node, groups, depth) if name == "CatBackward0" else _kept(node, name, output, groups, depth)
        if found is not None:
            return found
        if depth == 0:  # a walk that began further down may have ended early
            node.metadata[_NOTHING] = True
        return None
    else:
        return getattr(getattr(node, "use", None), "routed", None)  # of an operation on such rows
    if index.dtype in (torch.bool, torch.uint8):
        index = index.nonzero()[:, 0]
    parent, number = node.next_functions[0]
    source = _walk(parent, number, groups, depth + 1)
    if source is not None and len(source.places) != sizes[0]:
        source = None
    total = sizes[0] if source is None else source.total
    if index.ndim != 1 or total == 0 or total % groups.batch:
        return None
    places = index % total if source is None else source.places[index]
    return Routed(places, total, places // (groups.micro * (total // groups.batch)))


def _joined(node: Any, groups: Groups, depth: int) -> Routed | None:
    """The rows of a concatenation: those of its pieces one after the other, or of each where it is not along them."""
    pieces = [_walk(parent, number, groups, depth + 1) for parent, number in node.next_functions]
    found = [piece for piece in pieces if piece is not None]
    if not found or _signed(node._saved_dim) % len(node._input_metadata[0].shape) != 0:
        return found[0] if found else None
    if len(found) < len(pieces) or any(piece.total != found[0].total for piece in found):
        return None
    places, ids = (torch.cat([getattr(piece, name) for piece in found]) for name in ("places", "ids"))
    return Routed(places, found[0].total, ids)


def _kept(node: Any, name: str, output: int, groups: Groups, depth: int) -> Routed | None:
    """The rows of any other operation: those of the first operand that has some; of these a slice or a split's part."""
    written_over = name == "torch::autograd::CopyBackwards"  # its first operand is
    for parent, number in node.next_functions[written_over:]:
        found = _walk(parent, number, groups, depth + 1)
        if found is not None:
            break
    else:
        return None
    if name not in PARTS or _signed(node._saved_dim) % len(node._saved_self_sym_sizes) != 0:
        return found
    if name == "SliceBackward0":
        kept = slice(_signed(node._saved_start), _signed(node._saved_end), node._saved_step)
    elif name == "SplitBackward0":
        kept = slice(output * node._saved_split_size, (output + 1) * node._saved_split_size)
    else:
        first = sum(node._saved_split_sizes[:output])
        kept = slice(first, first + node._saved_split_sizes[output])
    return Routed(found.places[kept], found.total, found.ids[kept])


def _signed(n: Any) -> Any:
    """A number that a node holds without its sign, if it holds one."""
    return n if n is None or not n >> 63 else n - (1 << 64)


def _read(node: Any, name: str) -> Any:
    """What a node has saved; a checkpoint would run again for it, in the middle of its forward."""
    try:
        return getattr(node, name)
    except CheckpointError as error:
        raise UnsupportedUse(
            "rows are picked by index inside of a checkpoint, after an operation of a parameter: their places are not "
            "known there; checkpoint what comes before and the experts apart, or loop over micro-batches"
        ) from error


def behind_a_graph(x: Tensor) -> bool:
    """Whether the rows of x come out of a compiled graph, which does not tell where it has them from."""
    nodes = [(x.grad_fn, 0)]
    for node, depth in nodes:  # which grows
        if node is None or depth > DEPTH:
            continue
        if "CompiledFunction" in node.name():
            return True
        if node.name() in ROWWISE:
            nodes += [(parent, depth + 1) for parent, _ in node.next_functions]
    return False

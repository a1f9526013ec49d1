"""Data of any form -> micro-batches, drawn once, so that every run sees the same samples in the same order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate

Batch = Any  # what `loss_fn` gets: tensors with the samples in their first dimension, nested as the data are


def draw(data: Any, size: int, count: int, seed: int) -> list[Batch]:
    """Draw `count` micro-batches of `size` samples.

    Tensors and datasets are shuffled by `seed` and repeated as often as needed. A loader, or another iterable of
    batches, is read once, in its own order; its batches are cut, and it is read again where it was short.

    Args:
        data: a tensor, a tuple or dict of tensors, a Dataset, a DataLoader, or an iterable of batches.
        size: M, samples.
        count: micro-batches.
        seed: of the order.
    """
    if isinstance(data, TensorDataset):
        data = data.tensors
    if isinstance(data, IterableDataset):
        data = DataLoader(data, batch_size=size)
    if isinstance(data, Tensor | Mapping | tuple) or (isinstance(data, list) and _are_tensors(data)):
        nested = dict(data) if isinstance(data, Mapping) else data
        return _rows(nested, size, count, seed)
    if not isinstance(data, DataLoader) and hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        return _shuffled(lambda rows: default_collate([data[i] for i in rows]), len(data), size, count, seed)
    if isinstance(data, Iterable):
        return _cut(data, size, count)
    raise TypeError(
        f"data must be a tensor, a tuple or dict of tensors, a Dataset or a DataLoader, got {type(data).__name__}"
    )


def length(batch: Batch) -> int:
    """How many samples a batch has: the length that its tensors share."""
    lengths = {len(t) for t in tree_leaves(batch) if isinstance(t, Tensor) and t.ndim}
    if len(lengths) != 1:
        raise ValueError(
            f"data must have tensors with as many samples each, got {sorted(lengths)} in dimension 0; put the samples "
            "first, and let each tensor have one entry per sample"
        )
    return lengths.pop()


def cut(batch: Batch, rows: Any) -> Batch:
    """Some samples of a batch; leaves without samples are handed on as they are.

    Args:
        batch: nested tensors.
        rows: a slice, or a list or tensor of places.
    """
    return tree_map_only(Tensor, lambda t: t[rows] if t.ndim else t, batch)


def moved(batch: Batch, device: torch.device) -> Batch:
    """The batch on a device."""
    return tree_map_only(Tensor, lambda t: t.to(device), batch)


def _are_tensors(items: list[Any]) -> bool:
    return bool(items) and all(isinstance(t, Tensor) and t.ndim for t in items) and len({len(t) for t in items}) == 1


def _rows(data: Any, size: int, count: int, seed: int) -> list[Batch]:
    others = {type(t).__name__ for t in tree_leaves(data) if not isinstance(t, Tensor)}
    if others:
        raise TypeError(f"data must be tensors where it is a tuple or a dict, got {', '.join(sorted(others))} in it")
    return _shuffled(lambda rows: cut(data, rows), length(data), size, count, seed)


def _shuffled(pick: Callable[[list[int]], Batch], total: int, size: int, count: int, seed: int) -> list[Batch]:
    if total < size:
        raise ValueError(f"data has {total} samples, and micro_batch_size is {size}; give more samples, or a smaller M")
    generator = torch.Generator().manual_seed(seed)
    found: list[Batch] = []
    while len(found) < count:
        order = torch.randperm(total, generator=generator).tolist()
        firsts = range(0, total - size + 1, size)
        found += [pick(order[first : first + size]) for first in firsts[: count - len(found)]]
    return found


def _cut(loader: Iterable[Any], size: int, count: int) -> list[Batch]:
    found: list[Batch] = []
    while len(found) < count:
        before = len(found)
        for batch in _pieces(loader, size):
            found.append(batch)
            if len(found) == count:
                break
        if len(found) == before:
            raise ValueError(
                f"data gave fewer than {size} samples (micro_batch_size), or can be read only once and gave {before} "
                f"micro-batches of the {count} needed; give more samples, or ask for fewer (samples=)"
            )
    return found


def _pieces(loader: Iterable[Any], size: int) -> Iterator[Batch]:
    """Cut batches into micro-batches; what is left of one goes in front of the next, where their shapes fit."""
    rest: Batch = None
    for item in loader:
        batch = dict(item) if isinstance(item, Mapping) else item
        if rest is not None:
            batch = _joined(rest, batch)
        samples = length(batch)
        whole = samples // size * size
        yield from (cut(batch, slice(first, first + size)) for first in range(0, whole, size))
        rest = cut(batch, slice(whole, None)) if whole < samples else None


def _joined(first: Batch, second: Batch) -> Batch:
    left, structure = tree_flatten(first)
    right, other = tree_flatten(second)
    if structure == other and all(
        not isinstance(a, Tensor) or a.shape[1:] == b.shape[1:] for a, b in zip(left, right, strict=True)
    ):
        both = [torch.cat([a, b]) if isinstance(a, Tensor) and a.ndim else b for a, b in zip(left, right, strict=True)]
        return tree_unflatten(both, structure)
    return second  # of another length (padding): what was left over is dropped

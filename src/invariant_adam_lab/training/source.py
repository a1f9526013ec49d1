"""A dataset on a device -> the samples of an epoch, augmented, in their order -> what a model takes.

Runs of one seed see the same samples, augmented alike, in the same order, at every B. An epoch is augmented as a
whole, and the last epochs are kept for the next runs of the seed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from . import augment, data
from .runs import RECIPES, Recipe

KEPT_BYTES = 8 << 30  # of epochs that a GPU keeps for the next run; the CPU keeps one epoch
TEST_BATCH = 1_000  # samples
TEST_LOGITS = 1 << 29  # of sequences that are tested at once
FIXED_IMAGES, FIXED_SEQUENCES = 5_000, 500  # of the training set, whose loss is taken at the end of each epoch


class Source:
    """A dataset on a device: epochs in their order, the test set, and what a model takes of either.

    Args:
        found: images or a text.
        recipe: how it is augmented.
        device: where it goes.
        context: characters or tokens of a sequence, where it is a text.
        precision: "float32", or "bfloat16" for autocast with float32 weights.
    """

    def __init__(
        self,
        found: data.Images | data.Text,
        recipe: Recipe,
        device: torch.device,
        context: int = 0,
        precision: str = "float32",
    ) -> None:
        self.recipe, self.device, self.context, self.precision = recipe, device, context, precision
        moved = {name: part.to(device) for name, part in found._asdict().items() if isinstance(part, Tensor)}
        self.found: data.Images | data.Text = found._replace(**moved)  # type: ignore[arg-type]
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # runs read it on streams of their own
        self.kept: OrderedDict[Any, tuple[Tensor, ...]] = OrderedDict()
        if isinstance(found, data.Images):
            self.count = len(found.x)
            self.mean, self.std = (
                torch.tensor(value, device=device).view(3, 1, 1) for value in (data.CIFAR10_MEAN, data.CIFAR10_STD)
            )
        else:
            self.count = (len(found.ids) - context) // context  # for every start in the first `context` characters
            if self.count < 1 or len(found.test_ids) <= context:
                unit = "tokens" if recipe.vocabulary else "characters"
                raise ValueError(
                    f"a text of {len(found.ids):,} and {len(found.test_ids):,} held-out {unit} has no sequence of "
                    f"{context}; use a longer text"
                )
        self.channels_last = False

    def epoch(self, seed: int, epoch: int, samples: int, take: int) -> tuple[Tensor, ...]:
        """Return the samples of an epoch in their order, augmented.

        Args:
            seed: of the run.
            epoch: from 0.
            samples: used of the training set; 0: all.
            take: samples of an epoch; those left over are others in each epoch. In one pass the epochs share none.
        """
        key = (seed, epoch, samples, take)
        if key not in self.kept:
            made = self._make(seed, epoch, samples or self.count, take)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # other streams will read it
            size = sum(part.nbytes for part in made)
            while self.kept and (len(self.kept) + 1) * size > (KEPT_BYTES if self.device.type == "cuda" else size):
                self.kept.popitem(last=False)
            self.kept[key] = made
        self.kept.move_to_end(key)
        found = self.kept[key]
        if self.device.type == "cuda":
            for part in found:
                part.record_stream(torch.cuda.current_stream(self.device))
        return found

    def _make(self, seed: int, epoch: int, samples: int, take: int) -> tuple[Tensor, ...]:
        first = 0
        if self.recipe.once:
            epoch, first = 0, epoch * take
        order = augment.order(seed, epoch, samples, self.device)[first : first + take]
        if isinstance(self.found, data.Images):
            x = augment.augment(self.found.x[order], order, seed, epoch, flip=self.recipe.flip, auto=self.recipe.auto)
            return x, self.found.y[order]
        start = int(augment.draw(seed, epoch, torch.zeros(1, dtype=torch.int64), 1) * self.context)
        return (self._sequences(self.found.ids, start)[order],)

    def _sequences(self, ids: Tensor, start: int) -> Tensor:
        """Cut a text into sequences, each with the character that follows it."""
        return ids[start:].unfold(0, self.context + 1, self.context)

    def test(self) -> Iterator[tuple[Tensor, ...]]:
        """Yield the test set in batches."""
        if isinstance(self.found, data.Images):
            yield from zip(self.found.test_x.split(TEST_BATCH), self.found.test_y.split(TEST_BATCH), strict=True)
        else:
            for part in self._sequences(self.found.test_ids, 0).split(self._test_sequences()):
                yield (part,)

    def _test_sequences(self) -> int:
        """How many sequences are tested at once: their logits must fit into memory."""
        each = self.context * len(self.found.vocab) if isinstance(self.found, data.Text) else 1
        return max(1, min(TEST_BATCH // 4, TEST_LOGITS // each))

    def fixed(self, samples: int = 0) -> Iterator[tuple[Tensor, ...]]:
        """Yield a fixed part of the training set in batches, not augmented; of its first `samples`, 0: of all."""
        count = samples or self.count
        if isinstance(self.found, data.Images):
            part: tuple[Tensor, ...] = (self.found.x, self.found.y)
            count = min(count, FIXED_IMAGES)
        else:
            part = (self._sequences(self.found.ids, 0),)
            count = min(count, FIXED_SEQUENCES)
        batch = TEST_BATCH if len(part) == 2 else self._test_sequences()
        yield from zip(*(tensor[:count].split(batch) for tensor in part), strict=True)

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context in which models run."""
        if self.precision == "bfloat16":
            return torch.autocast(self.device.type, torch.bfloat16)
        return nullcontext()

    def inputs(self, samples: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Return the inputs of a model and its targets."""
        if not isinstance(self.found, data.Images):
            ids = samples[0].long()
            return ids[:, :-1], ids[:, 1:]
        x = (samples[0].float().div_(255) - self.mean) / self.std
        return (x.contiguous(memory_format=torch.channels_last) if self.channels_last else x), samples[1]


def load(
    model: str, device: torch.device, *, small: bool = False, found: Any = None, precision: str | None = None
) -> Source:
    """Return the dataset of a model on a device.

    Args:
        model: a key of `RECIPES`.
        device: where it goes.
        small: the model is the small one.
        found: images or a text to use instead of the model's own dataset.
        precision: by default bfloat16 on a GPU and float32 elsewhere.
    """
    recipe = RECIPES[model]
    if found is None:
        if recipe.dataset == "text":
            raise data.DataError(f"{model} trains on a text of your own: give it as `found`")
        found = (data.cifar10 if recipe.dataset == "cifar10" else data.tinyshakespeare)()[0]
    context = 0
    if isinstance(found, data.Text):
        context = {**recipe.options, **(recipe.small if small else {})}.get("context", 256)
    usual = "bfloat16" if device.type == "cuda" else "float32"
    return Source(found, recipe, device, context, precision or usual)

"""What all trainers need: the samples of a window, and the mean of each micro-batch.

A window is what a trainer calls the batches between two of its updates.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from ..growth import BatchGrowth
from ..optimizer import InvariantAdam

SAMPLES = "invariant_adam_samples"  # a batch's key for one number per sample


def follow_parameters(opt: InvariantAdam) -> None:
    """Give state to the parameters that Accelerate has put in the place of others for FSDP2, and forget those.

    A checkpoint is loaded into that state: it must be there before.
    """
    held = {id(p) for group in opt.param_groups for p in group["params"]}
    for p in [p for p in opt.state if id(p) not in held]:
        del opt.state[p]
    opt.queue.bind()


_without_autocast: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()


@contextmanager
def autocast_outside(model: nn.Module, accelerator: Any) -> Iterator[None]:
    """Have Accelerate's autocast around this context, and not inside of the model's forward, where it puts it.

    The check of one pass runs the model in float64 too, and would find the autocast on again.
    """
    from accelerate.utils import convert_outputs_to_fp32

    inside = [module for module in model.modules() if "_original_forward" in vars(module)]
    forwards = [vars(module)["forward"] for module in inside]
    for module in inside:
        if module not in _without_autocast:  # once: a compiled graph looks whether it is the same
            _without_autocast[module] = convert_outputs_to_fp32(vars(module)["_original_forward"])
        module.forward = _without_autocast[module]
    try:
        with accelerator.autocast():
            yield
    finally:
        for module, forward in zip(inside, forwards, strict=True):
            module.forward = forward


class Counting:
    """A collate function that also says how many samples it was given.

    The shape of a batch does not tell where sequences are packed into one row.

    Args:
        collate: list of samples -> batch.
    """

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self.collate = collate

    def __call__(self, samples: list[Any]) -> Any:
        """Return the batch, with one number per sample: trainers cut and join them like all other tensors."""
        batch = self.collate(samples)
        if isinstance(batch, MutableMapping):
            batch[SAMPLES] = torch.ones(len(samples), dtype=torch.bool)
        return batch


def take_count(batch: Any) -> int:
    """Return how many samples a batch has, and take the count of `Counting` out of it."""
    if isinstance(batch, MutableMapping) and SAMPLES in batch:
        return len(batch.pop(SAMPLES))
    if "cu_seq_lens_q" in batch or ("position_ids" in batch and batch["position_ids"].shape[0] == 1):
        raise ValueError(
            "this batch looks like several sequences packed into one row, so that its shape does not tell how many "
            "samples it has; let the trainer build the DataLoader, where they are counted, or turn packing off"
        )
    return batch_size(batch)


def batch_size(batch: Any) -> int:
    """Return the size of the first dimension, that of the batch's first tensor which has one."""
    for leaf in tree_leaves(dict(batch) if isinstance(batch, MutableMapping) else batch):
        if isinstance(leaf, Tensor) and leaf.ndim:
            return leaf.shape[0]
    raise ValueError(f"a batch of {type(batch).__name__} has no tensor to count its samples by")


class Window:
    """The batches that a trainer takes for one update, on this rank, and the updates that they are.

    That is one; more where `growth` cuts the window.
    """

    def __init__(self) -> None:
        self.growth: BatchGrowth | None = None
        self.samples = 0  # in all batches
        self._sizes: list[int] = []
        self._size = 1  # M, samples
        self._ranks, self._even = 1, True  # how many, and whether all have as many micro-batches
        self._everyone = 0  # samples that are left of the window, on all ranks
        self._whole = 0  # micro-batches of the window
        self._left = 0  # of them, those that are left
        self._open = 0  # of those, the ones of the update that is open; 0: the window's end closes it

    def open(self, batches: Iterable[Any], micro_batch_size: int) -> list[int]:
        """Begin a window of these batches; return its samples and micro-batches, for `announce`."""
        self._sizes = [take_count(batch) for batch in batches][::-1]
        self.samples, self._size = sum(self._sizes), micro_batch_size
        self._whole = self._left = sum(-(-n // micro_batch_size) for n in self._sizes)
        return [self.samples, self._whole]

    def announce(self, opt: InvariantAdam, everyone: list[list[int]]) -> None:
        """Tell the optimizer how large the coming update is.

        Args:
            everyone: what `open` returned, on each rank. Where ranks differ, the window is not cut.
        """
        self._everyone, self._ranks = sum(samples for samples, _ in everyone), len(everyone)
        self._even = all(count == everyone[0][1] for _, count in everyone)
        if self._everyone:
            self._begin(opt)

    def _begin(self, opt: InvariantAdam) -> None:
        self._open = 0
        if self.growth is not None and self._even:
            kappa = self.growth.next_kappa(self._left, self._whole)
            if kappa < self._left:
                self._open = kappa
                return
        opt.expect(self._everyone / self._size)  # a last one may be short

    def cut(self, opt: InvariantAdam, batch: dict[str, Any], n: int) -> Iterator[tuple[dict[str, Any], int]]:
        """Cut a batch of `n` samples into pieces with their samples, where an update ends in it; step between them."""
        first, M = 0, self._size
        while first < n:
            size = min(n - first, self._open * M or n)
            whole = size == n
            yield batch if whole else {key: _rows(x, n, first, first + size) for key, x in batch.items()}, size
            first += size
            self._left -= -(-size // M)
            if self._open:
                self._open -= -(-size // M)
                self._everyone -= size * self._ranks
                if not self._open:
                    opt.step()
                    self._begin(opt)

    def take(self) -> int:
        """Return how many samples the next batch has."""
        if not self._sizes:
            raise RuntimeError(
                "a training step came that no window has announced: a subclass has replaced get_batch_samples() "
                "without calling ours; call super().get_batch_samples()"
            )
        return self._sizes.pop()


class GrowingWindow:
    """Cuts a window of micro-batches that come one backward at a time, in a loop that steps at its end.

    Args:
        growth: which updates there are.
    """

    def __init__(self, growth: BatchGrowth) -> None:
        self.growth = growth
        self._done = 0  # micro-batches of the window that came
        self._open = 0  # that are still to come in the update

    def begin(self, window: int, share: float) -> None:
        """Announce the update that the coming backward begins, if it begins one.

        Args:
            window: micro-batches of the window on each rank.
            share: n/M of the coming micro-batch.
        """
        if self._open:
            return
        self._open = self.growth.next_kappa(max(1, window - self._done), window)
        if self._open == 1 and share < 1:
            opt = self.growth.optimizer
            opt.expect(share * opt.queue.reducer.size)

    def end(self, last: bool) -> None:
        """Count a backward; step where it ends an update, but leave the window's last one to the loop."""
        self._done, self._open = self._done + 1, self._open - 1
        if last:
            self.restart()
        elif not self._open:
            self.growth.optimizer.step()

    def restart(self) -> None:
        """Begin a window."""
        self._done = self._open = 0


def _rows(x: Any, n: int, first: int, last: int) -> Any:
    """The samples from `first` to `last` of a value that has `n`; others are for all samples."""
    return x[first:last] if isinstance(x, Tensor) and x.ndim and len(x) == n else x


class OwnMeans:
    """A loss over a mini-batch of n samples made of the losses of its micro-batches, each a mean of its own.

        L = Σ_k n_k/n · loss(micro-batch k)

    A mean over all tokens of the mini-batch would weight micro-batch k by its number of tokens, as no loop does.

    Args:
        loss: tensors, in whatever structure, batch first -> the loss.
        micro_batch_size: M, samples.

    >>> loss = OwnMeans(lambda x: x[x > 0].mean(), micro_batch_size=2)
    >>> float(loss(torch.tensor([1.0, 0.0, 4.0, 6.0])))
    3.0
    """

    def __init__(self, loss: Callable[..., Tensor], micro_batch_size: int) -> None:
        self.loss, self.micro_batch_size = loss, micro_batch_size
        self.batch = 0  # samples of the last call

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the loss of the micro-batches of the arguments."""
        leaves, structure = tree_flatten((args, kwargs))
        n, M = batch_size(leaves), self.micro_batch_size
        self.batch = n
        losses = []
        for first in range(0, n, M):
            rows = slice(first, first + M)
            part = [x[rows] if isinstance(x, Tensor) and x.ndim and x.shape[0] == n else x for x in leaves]
            some, named = tree_unflatten(part, structure)
            losses.append(self.loss(*some, **named) * (min(M, n - first) / n))
        return torch.stack(losses).sum()


_IGNORED = -100  # the label of a token that has no loss
_SHIFTS = {"ForCausalLMLoss": True, "ForMaskedLMLoss": False}  # whether a token's label is the next one's


class TokenMeans(OwnMeans):
    """`OwnMeans` of transformers' cross-entropy over tokens, by one call for all micro-batches.

    A call for each would cut the logits, a language model's largest tensor, and put their gradients together again.

    Args:
        loss: transformers' function.
        micro_batch_size: M, samples.
        apart: whether a compiled model's loss is to be a graph of its own. In the graph that returns the logits too,
            these would have a gradient of zeros, as large as they are, to be made and added in every backward.
    """

    def __init__(self, loss: Callable[..., Tensor], micro_batch_size: int, apart: bool = False) -> None:
        super().__init__(loss, micro_batch_size)
        self.apart = apart

    @staticmethod
    def takes(loss: Any) -> bool:
        """Whether this is such a loss."""
        return getattr(loss, "__module__", None) == "transformers.loss.loss_utils" and loss.__name__ in _SHIFTS

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the loss of the micro-batches of the arguments, which are those of transformers' function."""
        if self.apart and torch.compiler.is_compiling():
            torch._dynamo.graph_break()
        counted = len(args) > 3 or kwargs.get("num_items_in_batch") is not None  # then it is a sum, not a mean
        return super().__call__(*args, **kwargs) if counted else self._by_token(*args, **kwargs)

    def _by_token(
        self, logits: Tensor, labels: Any, vocab_size: int, num_items_in_batch: Any = None,
        ignore_index: int = _IGNORED, shift_labels: Any = None, **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        targets = shift_labels
        if targets is None:
            shifts = _SHIFTS[self.loss.__name__]
            targets = F.pad(labels, (0, 1), value=ignore_index)[..., 1:] if shifts else labels
        n, M = logits.shape[0], self.micro_batch_size
        self.batch = n
        wide = logits.float() if logits.dtype.itemsize < 4 else logits
        targets = targets.to(logits.device)
        each = F.cross_entropy(
            wide.view(-1, vocab_size), targets.reshape(-1), ignore_index=ignore_index, reduction="none"
        ).view(n, -1)
        sums = torch.stack([each.sum(1), targets.ne(ignore_index).view(n, -1).sum(1).to(each.dtype)])
        total, tokens = F.pad(sums, (0, -n % M)).view(2, -1, M).sum(2)
        means = total / tokens
        if n % M:  # the last has fewer samples
            return (means[:-1].sum() * M + means[-1] * (n % M)) / n
        return means.mean()


class OwnLosses:
    """Has the losses that Hugging Face's models compute be `OwnMeans`, while a mini-batch is under way.

    Args:
        model: it, and the models inside of it, are asked for their `loss_function`.
        micro_batch_size: M, samples.
        others: more losses, as objects and the names of their attributes.
    """

    def __init__(self, model: nn.Module, micro_batch_size: int, others: Iterable[tuple[Any, str]] = ()) -> None:
        library = sys.modules.get("transformers")
        models = [m for m in model.modules() if library is not None and isinstance(m, library.PreTrainedModel)]
        # The outermost, and others that have a loss of their own: to ask the rest for one makes it warn.
        own = [(m, "loss_function") for i, m in enumerate(models) if not i or getattr(m, "loss_type", None) is not None]
        # Made once: a compiled graph looks whether it is the same.
        losses = [(one, name, getattr(one, name)) for one, name in (*own, *others)]
        # A graph of the whole model, where that is asked for, cannot be cut.
        compiled = [module.dynamo_ctx for module in model.modules() if hasattr(module, "dynamo_ctx")]
        apart = bool(compiled) and not any(getattr(context, "fullgraph", True) for context in compiled)

        def means(loss: Callable[..., Tensor]) -> OwnMeans:
            if TokenMeans.takes(loss):
                return TokenMeans(loss, micro_batch_size, apart)
            return OwnMeans(loss, micro_batch_size)

        self._means = [(one, name, means(loss)) for one, name, loss in losses]
        self.micro_batch_size = micro_batch_size

    @contextmanager
    def of(self, samples: int | None, remedy: str, labels: Any = None) -> Iterator[None]:
        """Take each micro-batch's own mean; refuse a mean over tokens that went another way.

        Args:
            samples: in the mini-batch; None: not known yet.
            remedy: what to do where the mean of a micro-batch cannot be had.
            labels: of its tokens, -100 where there is no loss; anything else tells nothing.
        """
        for one, name, means in self._means:
            setattr(one, name, means)
            means.batch = 0
        try:
            yield
        finally:
            for one, name, means in self._means:
                setattr(one, name, means.loss)
        sizes = {means.batch for _, _, means in self._means} - {0}
        if samples is not None and sizes - {samples}:
            raise ValueError(
                f"the loss function was called with {sizes} rows for {samples} samples, so that it is not known which "
                f"belong to one micro-batch; call it with the batch first, or {remedy}"
            )
        if not sizes and _uneven(labels, self.micro_batch_size):
            raise ValueError(
                "the labels of the micro-batches have different numbers of tokens, and the loss is a mean over all of "
                f"them: no loss function was called that could be asked for each micro-batch's own mean; {remedy}"
            )


def _uneven(labels: Any, micro_batch_size: int) -> bool:
    """Whether micro-batches have different numbers of tokens with a loss, per sample."""
    if not isinstance(labels, Tensor) or labels.ndim < 2:
        return False
    counts = labels.ne(_IGNORED).flatten(1).sum(1).double()
    means = torch.stack([part.mean() for part in counts.split(micro_batch_size)])
    return bool((means != means[0]).any())

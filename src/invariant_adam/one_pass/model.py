"""`ModelFacts`: what is known of one model at one micro-batch size.

Which parameters are trainable and which are shared, and what a check has found out.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..fold import hooks, pair
from ..kernels.gemm_square import wide
from .exchange import source_of, trusted
from .groups import UnsupportedUse
from .weight import Entry, Handle

Site = tuple[str, str]  # the names of parameters, and of the operation that uses them


class Findings(NamedTuple):
    """What checks have found out; replaced as a whole."""

    passed: bool = False  # a check has passed, so that a compiled graph may rely on what is tied
    checked: frozenset[Any] = frozenset()  # the inputs' shapes (`check.signature`)
    looks: Mapping[Any, tuple[Any, ...]] = {}  # by the form of the inputs: the sizes of two checks (`lengths.Look`)
    constant: frozenset[Site] = frozenset()  # what sizes call batched and is not
    batched: frozenset[Site] = frozenset()  # the reverse
    picked: frozenset[Site] = frozenset()  # uses on rows that were picked by index, in any order
    chosen: frozenset[Site] = frozenset()  # an index from the batch, whose rows meet rows that were picked by index
    axes: Mapping[Site, int] = {}  # where the batch is in another dimension than sizes say
    renormed: bool = False  # a batch norm was used twice in a forward


class ModelFacts:
    """What is known of one model at one M and batch dimension; kept from step to step."""

    def __init__(self, micro: int, axis: int) -> None:
        self.micro = micro
        self.axis = axis
        self.findings = Findings()
        self.entries: dict[int, Entry] = {}  # by the id of the parameter, which an entry holds
        self.order: list[Entry] = []
        self.modules: list[nn.Module] = []  # while a context is open
        self.norms: list[_BatchNorm] = []  # of these, each once
        self.sharded = False  # a source named the parameters; gradients and squares are reduced elsewhere
        # Of parameters used once, by the key of the entry, and the companion it was made with. Kept here: an entry that
        # held its handle would be held by it, and the parameters freed late.
        self.handles: dict[int, tuple[Tensor, Handle]] = {}
        self.uses: dict[Any, Any] = {}  # of these, as `MiniBatch.remember` puts them down
        # The leaves whose gradients stand for handovers to the optimizer: one for each parameter of an operation.
        self.tickets: dict[torch.device, list[Tensor]] = {}
        self._structure: list[Any] = []  # as `refresh` found it the last time
        self._spans = False  # a module is there whose statistics may span micro-batches: look again every time
        self._subscriptions = -1  # `pair.subscriptions` when the entries asked for their takers

    def find(self, **found: Any) -> None:
        """Put down what a check has found out."""
        self.findings = self.findings._replace(**found)

    def find_batched(self, site: Site) -> None:
        """Put down that a use has the batch; it was the same for the samples that were exchanged before, if any."""
        self.find(constant=self.findings.constant - {site}, batched=self.findings.batched | {site})

    def refresh(self, model: nn.Module) -> list[Entry]:
        """The entries of the parameters that are trainable now."""
        structure, self.modules = _structure(model)
        self.norms = list({id(module): module for module in self.modules if isinstance(module, _BatchNorm)}.values())
        if structure != self._structure or self._spans:
            self._structure = []
            _refuse_modules(model)
            self._spans = any(issubclass(kind, nn.SyncBatchNorm) for kind in structure if isinstance(kind, type))
            self._find_entries(model)
            self._structure, self._subscriptions = structure, -1
        return self.order

    def find_takers(self) -> None:
        """Ask again who wants pairs as they are made, if anyone has subscribed since."""
        if self._subscriptions != pair.subscriptions:
            for entry in self.order:
                queue = hooks.owner(entry.param)
                size = None if queue is None else queue.moments.groups[0]["micro_batch_size"]
                if size not in (None, self.micro):
                    raise ValueError(
                        f"one_pass(micro_batch_size={self.micro}) on {entry.name}, whose InvariantAdam has "
                        f"micro_batch_size={size}: κ, samples_seen and the step would be off by {size / self.micro:g}. "
                        f"Give both the same; v is at the scale of one micro-batch, so a run cannot change it"
                    )
                entry.taker = pair.taker_of(entry.param)
            self._subscriptions = pair.subscriptions

    def _find_entries(self, model: nn.Module) -> None:
        seen: dict[int, Entry] = {}
        known = {entry.name: entry for entry in self.entries.values()}
        for name, p in self._source(model):
            if not p.requires_grad:
                continue
            key = id(p)
            if key in seen:
                seen[key].tied = True
                continue
            entry = self.entries.get(key)
            fits = entry is not None and entry.param is p and entry.companion.device == p.device
            if entry is None or not fits or entry.companion.dtype != wide(p.dtype):
                entry = Entry(name.removeprefix("_orig_mod."), p)
                entry.picked = known[entry.name].picked if entry.name in known else entry.picked
                # What a check found out before fully_shard replaced the parameters holds for the new ones.
                if self.sharded and entry.name in known:
                    entry.tied, entry.table = known[entry.name].tied, known[entry.name].table
            seen[key] = entry
        if seen.keys() != self.entries.keys() or any(self.entries[k] is not e for k, e in seen.items()):
            self.entries, self.handles, self.uses = seen, {}, {}
            self.find(checked=frozenset(), looks={})
        if any(entry.param._backward_hooks for entry in seen.values()):  # which may be new, and change gradients
            self.find(checked=frozenset(), looks={}, passed=False)
        self.order = list(seen.values())

    def _source(self, model: nn.Module) -> Iterable[tuple[str, Tensor]]:
        found = source_of(model)
        self.sharded = found is not None
        if found is not None:
            return found
        if any(hasattr(module, "_get_fsdp_state") for module in model.modules()):
            raise UnsupportedUse(
                "the model is sharded by fully_shard (FSDP2), which reduces gradients but not their squares; call "
                "invariant_adam.distributed.prepare(model, opt) first"
            )
        return model.named_parameters(remove_duplicate=False)


# Model -> (M, batch_dim) -> what is known.
_known: weakref.WeakKeyDictionary[nn.Module, dict[tuple[int, int], ModelFacts]] = weakref.WeakKeyDictionary()


def facts_of(model: nn.Module, micro: int, axis: int) -> ModelFacts:
    """What is known of a model at the micro-batch size `micro` and the batch dimension `axis`."""
    return _known.setdefault(model, {}).setdefault((micro, axis), ModelFacts(micro, axis))


def _structure(model: nn.Module) -> tuple[list[Any], list[nn.Module]]:
    """What `ModelFacts.refresh` depends on: the kinds of all modules, their parameters and what these are.

    And the modules.
    """
    found: list[Any] = []
    modules = [model]
    for module in modules:  # which grows
        found.append(type(module))
        for p in module._parameters.values():
            if p is not None:
                found += (id(p), p.requires_grad, p.dtype, p.device)
                if p._backward_hooks:
                    found += p._backward_hooks
        if module._modules:
            modules += [m for m in module._modules.values() if m is not None]
    return found, modules


def _refuse_modules(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.parallel.DistributedDataParallel) and module not in trusted:
            raise UnsupportedUse(
                "the model is wrapped in DistributedDataParallel, which reduces gradients but not their squares; "
                "call invariant_adam.distributed.prepare(model, opt) first"
            )
        if isinstance(module, nn.SyncBatchNorm) and module.training:
            raise UnsupportedUse(
                f"the module {name!r} is a SyncBatchNorm, whose statistics span workers and micro-batches; use "
                "BatchNorm (one_pass gives each micro-batch its own statistics, as the loop does) or GroupNorm"
            )

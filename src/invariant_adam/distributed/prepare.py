"""This rank's micro-batches -> everyone's: `prepare` an `InvariantAdam` for a process group, DDP or FSDP2.

Each rank's micro-batches are micro-batches, and κ counts them all, so a changed number of ranks is a changed batch size
and nothing else: no hyperparameter is touched.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel

from ..fold import guards
from ..fold.scalars import fresh
from ..optimizer import InvariantAdam
from ..unwrap import unwrap
from .fsdp import FullySharded, sharded_modules
from .replicated import Replicated, silence
from .sharded_state import ShardedState
from .wire import broadcast_first


def prepare(
    model: nn.Module,
    optimizer: InvariantAdam,
    *,
    process_group: dist.ProcessGroup | None = None,
    device_mesh: DeviceMesh | None = None,
    shard_state: bool = False,
    squares_dtype: torch.dtype | None = None,
) -> None:
    """Make the updates of `optimizer` those of all ranks; call it once, on every rank, before the first backward.

        m, v ← the fold of every micro-batch of every rank,   κ ← their number over all ranks

    What the model is decides how: a plain module or `DistributedDataParallel` (which then no longer reduces
    gradients itself) has its moments summed over the ranks once per update; `fully_shard` (FSDP2, HSDP) has its squares
    reduce-scattered with its gradients. Tensor-parallel parameters need nothing on the wire beyond what they do
    themselves. A plain module's weights and buffers are first made rank 0's.

    Args:
        model: the module that holds the parameters of `optimizer`, wrapped in whatever wraps it.
        optimizer: built on the parameters the model has now, after `fully_shard` or `parallelize_module`.
        process_group: the ranks that see different data. By default the optimizer's own, DDP's, or all.
        device_mesh: the same as a mesh of one dimension.
        shard_state: hold the moments of a plain module or of DDP in pieces, one per rank (ZeRO-1): 2P/W numbers on each
            instead of 2P. Gradients then travel in each backward, not once per update.
        squares_dtype: torch.bfloat16 to send squares in half the bytes, where squares are sent: with `shard_state` and
            under FSDP2. They are added up in float32 all the same.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            "distributed.prepare() found no process group; call torch.distributed.init_process_group() first (torchrun "
            "sets what it needs), or leave prepare() out in a single process"
        )
    optimizer = unwrap(optimizer)
    queue = optimizer.queue
    queue.update.refuse_open("distributed.prepare()", "others have not seen them. Call it before a backward")
    if squares_dtype not in (None, torch.bfloat16, torch.float32):
        raise ValueError(
            f"squares_dtype must be None, torch.float32 or torch.bfloat16, got {squares_dtype}: squares span twice the "
            "exponents of gradients, and float16 has too few"
        )
    _check_model(model, optimizer)
    guards.watch(model)
    queue.bind()
    if sharded_modules(model):
        if process_group is not None or device_mesh is not None:
            raise ValueError(
                "process_group and device_mesh are fully_shard's own for a model that it shards; leave them out"
            )
        if shard_state:
            raise ValueError("shard_state=True is for whole weights; under fully_shard the moments are sharded already")
        queue.reducer = _reducer_of_shards(model, optimizer, squares_dtype)
        return
    if squares_dtype is not None and not shard_state:
        raise ValueError(
            f"squares_dtype={squares_dtype} needs shard_state=True or FSDP2: replicas send v itself, which would stop "
            "moving in so few bits"
        )
    group = _group(model, optimizer, process_group, device_mesh)
    queue.reducer = _reducer_of_replicas(model, optimizer, group, shard_state, squares_dtype)


def _reducer_of_shards(model: nn.Module, optimizer: InvariantAdam, squares_dtype: torch.dtype | None) -> FullySharded:
    """The reducer of a model that FSDP2 shards."""
    reducer = FullySharded(model, optimizer.queue, squares_dtype)
    for group in reducer.groups:
        _check_alike(model, optimizer, group)
    reducer.attach(model, optimizer.queue)
    return reducer


def _reducer_of_replicas(
    model: nn.Module, optimizer: InvariantAdam, group: dist.ProcessGroup | None, shard_state: bool,
    squares_dtype: torch.dtype | None,
) -> ShardedState | Replicated:  # fmt: skip
    """The reducer of a plain module or of DDP, whose weights are made rank 0's; DDP then reduces no gradients itself.

    `group` are the ranks that see different data; None for a tensor-parallel model over all ranks, which see the same.
    """
    queue = optimizer.queue
    if shard_state and (group is None or any(hasattr(p, "device_mesh") for p in queue.moments.params())):
        raise ValueError("shard_state=True is for plain parameters; tensor-parallel ones have their moments in pieces")
    if group is not None:
        _check_alike(model, optimizer, group)
    buffers = [b for ddp in _ddp(model) for b in silence(ddp)]
    if group is not None:
        with torch.no_grad():  # also what DDP was told to ignore, and where its ranks are not these
            tensors = (*model.parameters(), *model.buffers())
            broadcast_first([t.to_local() if hasattr(t, "to_local") else t for t in tensors if t.numel()], group)
    reducer = ShardedState(group, squares_dtype) if shard_state and group is not None else Replicated(group)
    reducer.buffers = buffers
    if shard_state:
        reducer.open(queue)  # a checkpoint may be loaded before the first backward: into pieces
    return reducer


@contextmanager
def last_backward(optimizer: InvariantAdam) -> Iterator[None]:
    """Say that the backward in this context is this rank's last of the update, so that sums may begin within it.

    It changes when moments travel, never what the update is; without it, and without `opt.expect`, they travel at
    `step()`.
    """
    queue = unwrap(optimizer).queue
    reducer = queue.reducer
    reducer.last_backward = True
    try:
        yield
    finally:
        reducer.last_backward = False
    reducer.end_last_backward(queue)


def _ddp(model: nn.Module) -> list[nn.parallel.DistributedDataParallel]:
    """DDP, wherever it is: torch.compile and trainers wrap it once more."""
    return [module for module in model.modules() if isinstance(module, nn.parallel.DistributedDataParallel)]


def _check_model(model: nn.Module, optimizer: InvariantAdam) -> None:
    """Refuse wrappers that reduce gradients before they can be squared, and parameters that the model does not have."""
    for module in model.modules():
        if isinstance(module, FullyShardedDataParallel):
            raise ValueError(
                "FullyShardedDataParallel reduces gradients before they can be squared; use "
                "torch.distributed.fsdp.fully_shard (FSDP2) instead"
            )
        if hasattr(module, "set_requires_gradient_sync") and not hasattr(module, "_get_fsdp_state"):
            raise ValueError(
                "replicate() reduces gradients before they can be squared; leave it out, or use DistributedDataParallel"
            )
    held = {id(p) for p in model.parameters()}
    for p in optimizer.queue.moments.params():
        if id(p) not in held:
            raise ValueError(
                f"parameter {optimizer.queue.moments.name(p)} of the optimizer is not one of the model's: fully_shard, "
                "parallelize_module and copies replace parameters. Build InvariantAdam on model.parameters() after them"
            )


def _group(
    model: nn.Module, optimizer: InvariantAdam, group: dist.ProcessGroup | None, mesh: DeviceMesh | None
) -> dist.ProcessGroup | None:
    """The ranks that see different data."""
    if mesh is not None:
        if group is not None:
            raise ValueError("give process_group or device_mesh, not both")
        if mesh.ndim != 1:
            raise ValueError(
                f"device_mesh has {mesh.ndim} dimensions {mesh.mesh_dim_names}; give the one along which data differs, "
                'device_mesh=mesh["dp"]'
            )
        return mesh.get_group()
    group = group or optimizer.process_group
    if group is not None:
        if not isinstance(group, dist.ProcessGroup):
            raise ValueError(
                f"rank {dist.get_rank()} is not in the process_group that was given; prepare() on the ranks that are, "
                "or give each rank the group that it trains with"
            )
        return group
    for ddp in _ddp(model):
        ours: dist.ProcessGroup = ddp.process_group
        return ours
    meshes = {p.device_mesh for p in optimizer.queue.moments.params() if hasattr(p, "device_mesh")}
    if any(mesh.size() < dist.get_world_size() for mesh in meshes):
        raise ValueError(
            f"the model is parallel over {min(mesh.size() for mesh in meshes)} of {dist.get_world_size()} ranks, and "
            "which ranks see different data cannot be told; give process_group, or device_mesh=mesh['dp']"
        )
    return None if meshes else dist.group.WORLD


def _check_alike(model: nn.Module, optimizer: InvariantAdam, group: dist.ProcessGroup) -> None:
    """Refuse ranks whose models or optimizers are not the same, before anything is sent that must be."""
    queue = optimizer.queue
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    params = list(queue.moments.params())
    tensors = (*model.named_parameters(), *model.named_buffers())
    own: dict[str, Any] = {
        "model": [(name, tuple(t.shape), str(t.dtype)) for name, t in tensors],
        "parameters": [(names[p], str(queue.moments.dtype_of(p))) for p in params],
        "options": [queue.in_backward, queue.max_micro_norm, queue.divisor],
        "trainable": [p.requires_grad for p in params],
        "groups": [{k: v for k, v in g.items() if k not in ("params", "lr")} for g in optimizer.param_groups],
        "counters": [[optimizer.state[p][k] for k in fresh()] for p in params if p.requires_grad],
    }
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, own, group=group)
    for rank, other in enumerate(everyone):
        for what, value in own.items():
            if other[what] != value:
                raise RuntimeError(
                    f"ranks {group.rank()} and {rank} of the group differ in their {what}: {_first(value, other[what])}"
                    "; build the same model and optimizer, and load the same checkpoint, on every rank before prepare()"
                )


def _first(mine: list[Any], theirs: list[Any]) -> str:
    """The first thing in which two lists differ."""
    for a, b in zip(mine, theirs, strict=False):
        if a != b:
            if isinstance(a, dict):
                a, b = ({k: x.get(k) for k in {*a, *b} if a.get(k) != b.get(k)} for x in (a, b))
            return f"{a} here, {b} there"
    return f"{len(mine)} here, {len(theirs)} there"

"""FSDP2 and HSDP (`fully_shard`): `FullySharded` reduce-scatters the squares beside the gradients.

FSDP2 reduces each backward's gradients to mean_r g_r, in pieces, one per rank. Its reduce-scatter is replaced by one
that sends Σ g² along:

    rank r   (g_r, g_r²)   →   its piece of   (mean_r g_r, mean_r g_r²),   a pair of κ = number of ranks

which the optimizer folds into its piece of the moments as it folds the pair of a one-pass mini-batch. All of it is done
on the plain tensors that are this rank's pieces: a DTensor costs the host more than a kernel costs the device.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.weak import WeakTensorKeyDictionary

from ..fold import hooks, pair
from ..fold.pair import ONES, Pair
from ..fold.queue import FoldQueue
from ..fold.scalars import Tally
from ..one_pass import exchange
from ..one_pass.groups import UnsupportedUse
from .group import GroupReducer
from .wire import reduce_scatter, scatter_sum

# Parameter -> handle of the hook that puts the square beside its gradient, for an optimizer that folds by call.
_pairs = WeakTensorKeyDictionary()


class Squares:
    """The reduce-scatter of one parameter group of FSDP2: of gradients, as ever, and of their squares.

    Args:
        group: FSDP2's own object for parameters that travel together.
        dtype: what squares travel in; None for float32.
    """

    def __init__(self, group: Any, dtype: torch.dtype | None) -> None:
        self.group = group
        self.dtype = dtype
        self.mean: Tensor | None = None  # this rank's piece of mean_r g_r², in the layout of the gradients

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Make a buffer, as FSDP2 asks for it."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Reduce-scatter the gradients and their squares."""
        if self.group.gradient_divide_factor is not None or op not in (dist.ReduceOp.AVG, dist.ReduceOp.SUM):
            raise RuntimeError(
                "FSDP2 divides the gradients by a factor of the user's (set_gradient_divide_factor), which squares "
                "cannot follow; leave it out, and tell InvariantAdam what the loss was divided by (loss_divisor)"
            )
        squares, info = self._local(input_tensor), self.group.mesh_info
        reduce_scatter(output_tensor, input_tensor, op=op, group=group)
        if self.dtype is None:
            self.mean = torch.empty_like(output_tensor, dtype=torch.float32)
            reduce_scatter(self.mean, squares, op=op, group=group)
        else:
            rows = squares.to(self.dtype).view(group.size(), -1)
            self.mean = scatter_sum(rows, group, torch.float32)()
            if op == dist.ReduceOp.AVG:
                self.mean.div_(group.size())
        if op == dist.ReduceOp.SUM:
            self.mean.div_(info.shard_mesh_size * getattr(info, "replicate_mesh_size", 1))
        if torch._C._current_graph_task_id() >= 0:
            hooks.when_finished(self._forget)

    def _forget(self) -> None:
        self.mean = None  # its memory is free between backwards, as the gradients' is

    def _local(self, grads: Tensor) -> Tensor:
        """This rank's squares, in the layout of its gradients: to each rank its rows of one parameter after another."""
        batch = exchange.Open.mini_batch
        if batch is None or batch.single:  # in float32, whatever the gradients travel in
            return grads.float().square_() if grads.dtype != torch.float32 else grads.square()
        ranks = self.group.mesh_info.shard_mesh_size
        squares = [
            self._square(fp).float() for fp in self.group.fsdp_params if exchange.has_square(fp._unsharded_param)
        ]
        if grads.numel() != sum(-(-len(s) // ranks) * ranks * (s.numel() // len(s)) for s in squares if s.numel()):
            raise self._incomplete()
        rows = torch.empty(ranks, grads.numel() // ranks, device=grads.device)
        torch._chunk_cat(squares, 0, ranks, out=rows)  # as FSDP2 laid the gradients
        signed = any(exchange.is_table(fp._unsharded_param) for fp in self.group.fsdp_params)
        return batch.groups.bounded(rows.view(-1), grads) if signed else rows.view(-1)

    def _incomplete(self) -> UnsupportedUse:
        names = ", ".join(fp._module_info.param_name for fp in self.group.fsdp_params)
        return UnsupportedUse(
            f"one_pass: among {names} there are gradients without squares, or squares without gradients; loop over "
            "micro-batches, or check the plain model to see which"
        )

    def _square(self, fp: Any) -> Tensor:
        if fp.fsdp_placement.dim != 0:
            raise UnsupportedUse(
                f"{fp._module_info.param_name} is sharded along dimension {fp.fsdp_placement.dim}; one_pass needs "
                "Shard(0)"
            )
        square: Tensor = exchange.take_square(fp._unsharded_param)
        if square.is_cuda:  # made on the stream of the backward; we are on FSDP2's, and free it before that one is done
            square.record_stream(torch.cuda.current_stream())
        return square

    def all_reduce(self, _: Tensor) -> None:
        """Average over the replicas of HSDP, as it has just averaged the gradients."""
        assert self.mean is not None
        group, mean = self.group.mesh_info.replicate_process_group, self.mean
        if mean.is_cuda:
            mean.record_stream(torch.cuda.current_stream())  # made on another stream
        summed = self.group.force_sum_reduction_for_comms
        dist.all_reduce(mean, op=dist.ReduceOp.SUM if summed else dist.ReduceOp.AVG, group=group)

    def take(self, grad: Tensor, fp: Any) -> Tensor | None:
        """This rank's piece of the mean square that belongs to its piece of a gradient; None for the gradient's own."""
        base = grad._base  # what FSDP2 reduced at once
        if base is None or base.ndim != 1 or (self.mean is not None and base.numel() != self.mean.numel()):
            raise RuntimeError(
                f"a gradient of {fp._module_info.param_name} came past FSDP2's reduction: a penalty on the sharded "
                "weights, perhaps, or one assigned by hand. It would be squared apart from the others; compute the "
                "penalty inside the forward of a module that fully_shard was called on, or use weight_decay"
            )
        if self.group.mesh_info.shard_mesh_size == 1:  # FSDP2 does not call us
            batch = exchange.Open.mini_batch
            if batch is None or batch.single:
                return None
            if exchange.has_square(fp._unsharded_param):
                square = self._square(fp)
                return batch.groups.bounded(square, grad) if exchange.is_table(fp._unsharded_param) else square
            if pair.is_armed(fp._unsharded_param):
                raise self._incomplete()
            return None
        if self.mean is None:
            raise RuntimeError(
                "FSDP2 reduced gradients without the reduce-scatter that prepare() gave it; call "
                "set_custom_reduce_scatter for nothing else, and prepare() last"
            )
        return self.mean.as_strided(grad.shape, grad.stride(), grad.storage_offset())


class FullySharded(GroupReducer):
    """Ranks that hold a piece of every weight and of its moments.

    Args:
        model: a module that `fully_shard` has been called on, and on whichever of its own modules.
        queue: of the optimizer of its parameters.
        squares_dtype: what squares travel in between shards; None for float32.
    """

    even = True  # FSDP2's own collectives ask for it, and average over all ranks
    kernels_fold = False

    def __init__(self, model: nn.Module, queue: FoldQueue, squares_dtype: torch.dtype | None = None) -> None:
        found = [group for module in sharded_modules(model) for group in _groups(module)]
        names = ("shard_process_group", "replicate_process_group")
        groups = [getattr(found[0].mesh_info, name, None) for name in names]
        super().__init__([group for group in groups if group is not None])
        self._check(found, queue)
        self.squares: dict[Tensor, tuple[Squares, Any]] = {}
        self.squares_dtype = squares_dtype

    def attach(self, model: nn.Module, queue: FoldQueue) -> None:
        """Put the squares beside FSDP2's own, in place of those of an optimizer before."""
        for module in sharded_modules(model):
            for group in _groups(module):
                squares = group._reduce_scatter_comm  # another optimizer may need them too
                if not isinstance(squares, Squares) or squares.dtype != self.squares_dtype:
                    squares = Squares(group, self.squares_dtype)
                module.set_custom_reduce_scatter(squares)
                if hasattr(group.mesh_info, "replicate_process_group"):
                    module.set_all_reduce_hook(squares.all_reduce)
                self.squares |= {fp.sharded_param: (squares, fp) for fp in group.fsdp_params}
            _insist(module)
        # The hook does not hold us, who hold the parameter: Python does not see cycles through hooks, and frees none.
        reference = weakref.ref(queue)

        def beside(p: Tensor) -> None:
            queue = reference()
            if queue is not None and isinstance(queue.reducer, FullySharded):
                queue.reducer.leave_pair(queue, p)

        for p in queue.moments.params():
            if p in _pairs:
                _pairs.pop(p).remove()
            if p.requires_grad:
                if not queue.in_backward:
                    _pairs[p] = p.register_post_accumulate_grad_hook(beside)
                hooks.own(p, queue)

    def _check(self, groups: list[Any], queue: FoldQueue) -> None:
        sharded = {fp.sharded_param: fp for group in groups for fp in group.fsdp_params}
        if queue.max_micro_norm is not None:
            raise ValueError(
                f"max_micro_norm={queue.max_micro_norm:g} clips each micro-batch gradient, and under FSDP2 no rank "
                "ever has one whole; leave it out, or train with replicated weights"
            )
        for p in queue.moments.params():
            if p not in sharded:
                raise ValueError(
                    f"parameter {queue.moments.name(p)} is outside every module that fully_shard was called on; call "
                    "it on the whole model too, last"
                )
            if sharded[p].offload_to_cpu:
                raise ValueError(
                    "CPUOffloadPolicy is not supported: gradients would come to the CPU and their squares would not; "
                    "leave offload_policy out"
                )
        for group in groups:
            policy = group.mp_policy
            kind = policy.reduce_dtype or policy.param_dtype or group.fsdp_params[0].sharded_param.dtype
            if kind not in (torch.float32, torch.bfloat16):
                raise ValueError(
                    f"gradients are reduced in {kind}, for which FSDP2 divides them by factors of its own before and "
                    "after; give fully_shard MixedPrecisionPolicy(reduce_dtype=torch.float32)"
                )
            info = group.mesh_info
            if not hasattr(info, "shard_mesh_size"):
                raise ValueError("replicate() shards nothing; use DistributedDataParallel, or fully_shard")
            ranks = [sorted(i.mesh.mesh.flatten().tolist()) for i in (groups[0].mesh_info, info)]
            if ranks[0] != ranks[1]:
                raise ValueError(
                    f"fully_shard was called with meshes of different ranks, {ranks[0]} and {ranks[1]}: their "
                    "parameters would average over different micro-batches; use one mesh"
                )
            if info.shard_mesh_size == 1 and getattr(info, "replicate_mesh_size", 1) > 1:
                raise ValueError(
                    "an HSDP mesh whose shard dimension is 1 shards nothing; use DistributedDataParallel, or a mesh "
                    "with more ranks in its last dimension"
                )
            theirs = getattr(group, "_all_reduce_hook", None)
            if theirs is not None and not isinstance(getattr(theirs, "__self__", None), Squares):
                raise ValueError(
                    "the model has an all-reduce hook of its own (set_all_reduce_hook), which would change gradients "
                    "and not their squares; give fully_shard a mesh of two dimensions (HSDP) instead"
                )
            if not group.reduce_grads or not group.all_reduce_grads:
                raise ValueError(_NO_SYNC)

    def leave_pair(self, queue: FoldQueue, p: Tensor) -> None:
        """Put the mean square beside the mean gradient that FSDP2 has left on `p`."""
        if pair.is_there(p):
            raise RuntimeError(
                "a second backward came before the gradients of the first were folded; call opt.fold() after each"
            )
        grad, square, kappa, scale = self._piece(p, queue.weight)[:4]
        if square is None:
            square = grad.float().square_() if grad.dtype != torch.float32 else grad.square()
        pair.leave(p, self.squares[p][1].to_sharded_dtensor(square), kappa, scale)

    def take_reduced(self, queue: FoldQueue, p: Tensor) -> Pair:  # noqa: D102 - as Reducer has it
        reduced = self._piece(p, queue.weight)
        p.grad = None
        return reduced

    def _piece(self, p: Tensor, weight: float) -> Pair:
        """This rank's piece of what all ranks have made of their gradients of `p`, each of `weight` micro-batches."""
        grad = p.grad._local_tensor  # type: ignore[union-attr]
        squares, sharded = self.squares[p]
        square, batch, scale = squares.take(grad, sharded), exchange.Open.mini_batch, ONES
        if batch is not None and pair.is_armed(sharded._unsharded_param):
            weight, scale = batch.kappa, batch.scale
        return Pair(grad, square, self.size * weight, scale)

    def send(self, queue: FoldQueue, params: list[Tensor], tallies: list[Tally], pairs: list[Pair]) -> bool:  # noqa: D102
        for p, x in zip(params, pairs, strict=True):
            if x.grad_sq is None and self.size > 1:
                raise RuntimeError(
                    f"the gradient of parameter {queue.moments.name(p)} came without its square: it was frozen when "
                    "prepare() was called, or another optimizer was prepared since. Call prepare(model, opt) again, "
                    "on every rank"
                )
        return False


_NO_SYNC = (
    "set_requires_gradient_sync(False) adds micro-batch gradients up before they can be squared, and "
    "set_requires_all_reduce(False) their sums; set_is_last_backward(False) puts off what each backward must finish. "
    "Leave them on: gradients are reduced in each backward, and no accumulator is kept"
)


def sharded_modules(model: nn.Module) -> list[Any]:
    """The modules of a model that `fully_shard` was called on."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def unsharded_parameters(model: nn.Module) -> list[tuple[str, Tensor]] | None:
    """The parameters that forward and backward use, by name: plain ones, which FSDP2 fills before it uses them.

    None for a model that it does not shard.
    """
    modules = sharded_modules(model)
    if not modules:
        return None
    found: dict[Tensor, Tensor] = {}
    for module in modules:
        sharded = [fp for group in _groups(module) for fp in group.fsdp_params]
        if any(not hasattr(fp, "_unsharded_param") for fp in sharded):
            module.unshard()
            module.reshard()
        found |= {fp.sharded_param: fp._unsharded_param for fp in sharded}
    return [(name, found[p]) for name, p in model.named_parameters(remove_duplicate=False)]


exchange.sources.append(unsharded_parameters)


def _insist(module: Any) -> None:
    """Make a module of FSDP2 refuse to accumulate gradients without reducing them."""

    def requires(name: str) -> Any:
        inner = getattr(module, name)

        def setter(value: bool, *args: Any, **kwargs: Any) -> None:
            if not value:
                raise RuntimeError(_NO_SYNC)
            inner(value, *args, **kwargs)

        return setter

    # After a backward that is not the last, FSDP2 would not wait for the streams on which gradients are folded.
    for name in ("set_requires_gradient_sync", "set_requires_all_reduce", "set_is_last_backward"):
        setattr(module, name, requires(name))


def _groups(module: Any) -> list[Any]:
    """FSDP2's parameter groups of one module; torch before 2.13 has one at most."""
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []

"""FSDP2 and HSDP (`fully_shard`): `FullySharded` reduce-scatters the squares beside the gradients.

FSDP2 reduces each backward's gradients to mean_r g_r, in pieces, one per rank. Its reduce-scatter is replaced by one
that sends Σ g² along:

    rank r   (g_r, g_r²)   →   its piece of   (mean_r g_r, mean_r g_r²),   a pair of κ = number of ranks

which the optimizer folds into its piece of the moments as it folds the pair of a one-pass mini-batch.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from .. import hooks
from ..ranks import Team
from .wire import reduce_scatter, scatter_sum_narrow

if TYPE_CHECKING:
    from ..optimizer import InvariantAdam


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
        # Squared in float32, whatever the gradients travel in.
        squares = input_tensor.float().square_() if input_tensor.dtype != torch.float32 else input_tensor.square()
        reduce_scatter(output_tensor, input_tensor, op=op, group=group)
        if self.dtype is None:
            self.mean = torch.empty_like(output_tensor, dtype=torch.float32)
            reduce_scatter(self.mean, squares, op=op, group=group)
        else:
            rows = squares.to(self.dtype).view(group.size(), -1)
            self.mean = scatter_sum_narrow(rows, torch.float32, group)()
            if op == dist.ReduceOp.AVG:
                self.mean.div_(group.size())
        if op == dist.ReduceOp.SUM:
            self.mean.div_(self._ranks)

    def all_reduce(self, _: Tensor) -> None:
        """Average over the replicas of HSDP, as it has just averaged the gradients."""
        assert self.mean is not None
        group, mean = self.group.mesh_info.replicate_process_group, self.mean
        if mean.is_cuda:
            mean.record_stream(torch.cuda.current_stream())  # made on another stream
        summed = self.group.force_sum_reduction_for_comms
        dist.all_reduce(mean, op=dist.ReduceOp.SUM if summed else dist.ReduceOp.AVG, group=group)

    @property
    def _ranks(self) -> int:
        info = self.group.mesh_info
        return int(info.shard_mesh_size * getattr(info, "replicate_mesh_size", 1))

    def take(self, grad: Tensor) -> Tensor:
        """This rank's piece of the mean square that belongs to its piece of a gradient."""
        if self.mean is None:  # one rank: FSDP2 does not call us
            return grad.float().square_() if grad.dtype != torch.float32 else grad.square()
        return self.mean.as_strided(grad.shape, grad.stride(), grad.storage_offset())


class FullySharded(Team):
    """Ranks that hold a piece of every weight and of its moments.

    Args:
        model: a module that `fully_shard` has been called on, and on whichever of its own modules.
        optimizer: the one of its parameters.
        squares_dtype: what squares travel in between shards; None for float32.
    """

    even = True  # FSDP2's own collectives ask for it
    takes_kernels = False

    def __init__(self, model: nn.Module, optimizer: InvariantAdam, squares_dtype: torch.dtype | None = None) -> None:
        found = list(_groups(model))
        info = found[0].mesh_info
        super().__init__(
            [
                group
                for name in ("shard_process_group", "replicate_process_group")
                if (group := getattr(info, name, None)) is not None
            ]
        )
        self._check(found, optimizer)
        self.optimizer = weakref.ref(optimizer)
        self.squares: dict[Tensor, tuple[Squares, Any]] = {}
        for module in model.modules():
            if isinstance(module, FSDPModule):
                for group in _groups_of(module):
                    squares = Squares(group, squares_dtype)
                    module.set_custom_reduce_scatter(squares)  # type: ignore[arg-type] # only typed as a class
                    if hasattr(group.mesh_info, "replicate_process_group"):
                        module.set_all_reduce_hook(squares.all_reduce)
                    self.squares |= {fp.sharded_param: (squares, fp) for fp in group.fsdp_params}
                _insist(module)
        for p in optimizer._params():
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(self._pair)
                # Again, so that the optimizer's hook comes after ours.
                hooks.own(p, optimizer, hook=optimizer._fold_in == "backward")
                optimizer._hooked.add(p)

    def _check(self, groups: list[Any], optimizer: InvariantAdam) -> None:
        sharded = {fp.sharded_param: fp for group in groups for fp in group.fsdp_params}
        if optimizer.max_micro_norm is not None:
            raise ValueError(
                f"max_micro_norm={optimizer.max_micro_norm:g} clips each micro-batch gradient, and under FSDP2 no rank "
                "ever has one whole; leave it out, or train with replicated weights"
            )
        for p in optimizer._params():
            if p not in sharded:
                raise ValueError(
                    f"parameter {optimizer._name(p)} is outside every module that fully_shard was called on; call it "
                    "on the whole model too, last"
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
            if info.shard_mesh_size == 1 and getattr(info, "replicate_mesh_size", 1) > 1:
                raise ValueError(
                    "an HSDP mesh whose shard dimension is 1 shards nothing; use DistributedDataParallel, or a mesh "
                    "with more ranks in its last dimension"
                )
            if not group.reduce_grads or not group.all_reduce_grads:
                raise ValueError(_NO_SYNC)

    def _pair(self, p: Tensor) -> None:
        """Put the mean square beside the mean gradient that FSDP2 has left on `p`."""
        assert p.grad is not None
        if getattr(p, "grad_sq", None) is not None:
            raise RuntimeError(
                "a second backward came before the gradients of the first were folded; call opt.fold() after each"
            )
        squares, sharded = self.squares[p]
        p.grad_sq = sharded.to_sharded_dtensor(squares.take(p.grad._local_tensor))  # type: ignore[attr-defined]
        optimizer = self.optimizer()
        p.grad_kappa = self.size * (optimizer._weight if optimizer is not None else 1.0)  # type: ignore[attr-defined]

    def count(self, optimizer: InvariantAdam, p: Tensor) -> float:  # noqa: D102 - as Team has it
        return super().count(optimizer, p) / self.size  # every rank has counted them all


_NO_SYNC = (
    "set_requires_gradient_sync(False) adds micro-batch gradients up before they can be squared, and "
    "set_requires_all_reduce(False) their sums; leave them on. Gradients are reduced in each backward, and no "
    "accumulator is kept"
)


def _insist(module: Any) -> None:
    """Make a module of FSDP2 refuse to accumulate gradients without reducing them."""

    def requires(name: str) -> Any:
        inner = getattr(module, name)

        def setter(value: bool, *args: Any, **kwargs: Any) -> None:
            if not value:
                raise RuntimeError(_NO_SYNC)
            inner(value, *args, **kwargs)

        return setter

    for name in ("set_requires_gradient_sync", "set_requires_all_reduce"):
        setattr(module, name, requires(name))


def _groups_of(module: Any) -> list[Any]:
    """FSDP2's parameter groups of one module; torch before 2.13 has one at most."""
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def _groups(model: nn.Module) -> Any:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            yield from _groups_of(module)

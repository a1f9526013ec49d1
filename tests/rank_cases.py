"""What a rank does in a test of distributed training: each case runs in a process of `rank_pool`."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import invariant_adam as ia

OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.1, "micro_batch_size": 4, "tuned_batch_size": 8}


class Net(nn.Module):
    """Uneven sizes, a scalar, a layer that some micro-batches skip, and one that all do."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(5, 7)
        self.norm = nn.LayerNorm(7)
        self.scale = nn.Parameter(torch.ones(() if dtype == torch.float64 else 1))  # FSDP2 takes no scalars
        self.sometimes = nn.Linear(7, 7)
        self.never = nn.Linear(2, 2)
        self.last = nn.Linear(7, 3)
        self.to(dtype)

    def forward(self, x: Tensor, skip: bool = False) -> Tensor:
        h = self.norm(torch.tanh(self.first(x))) * self.scale
        if not skip:
            h = h + torch.tanh(self.sometimes(h))
        return self.last(h)


def micro_batch(index: int, dtype: torch.dtype, samples: int = 4) -> Tensor:
    generator = torch.Generator().manual_seed(1000 + index)
    return torch.randn(samples, 5, generator=generator, dtype=torch.float64).to(dtype)


def loss(model: nn.Module, x: Tensor, skip: bool = False) -> Tensor:
    return (model(x, skip) - x[:, :3].sin()).square().mean()


def train(
    model: nn.Module,
    opt: Any,
    updates: list[list[list[int]]],
    rank: int,
    expect: bool = False,
    last: bool = False,
    skips: bool = True,
    one_pass: bool = False,
) -> None:
    """Train on updates of micro-batches by rank: updates[t][rank] are indices; those divisible by 3 skip a layer."""
    dtype = next(model.parameters()).dtype
    for update in updates:
        if expect:
            opt.expect(sum(map(len, update)))
        if one_pass and update[rank]:
            x = torch.cat([micro_batch(index, dtype) for index in update[rank]])
            with ia.one_pass(model, micro_batch_size=4, check=not isinstance(model, FSDPModule)):
                loss(model, x).backward()
            if opt._fold_in == "call":
                opt.fold()
        for i, index in enumerate([] if one_pass else update[rank]):
            final = last and i == len(update[rank]) - 1
            with ia.distributed.last_backward(opt) if final else contextlib.nullcontext():
                loss(model, micro_batch(index, dtype), skips and index % 3 == 0).backward()
            if opt._fold_in == "call":
                opt.fold()
        opt.step()


def alone(
    updates: list[list[list[int]]], dtype: torch.dtype, expect: bool = False, skips: bool = True, **options: Any
) -> Any:
    """The same updates in one process, which must know nothing of the group."""
    model = Net(dtype)
    opt = ia.InvariantAdam(model.parameters(), **(OPTIONS | options))
    opt._ranks.agree = lambda optimizer, check: check()
    train(model, opt, [[[i for part in update for i in part]] for update in updates], 0, expect, skips=skips)
    return model, opt


def full(t: Tensor) -> Tensor:
    return (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().double()


def differences(model: nn.Module, opt: Any, twin: nn.Module, judge: Any) -> dict[str, float]:
    """Largest differences of weights and moments, and of every counter."""
    found = {"w": 0.0, "m": 0.0, "v": 0.0, "counters": 0.0}
    opt.state_dict(), judge.state_dict()  # normalises
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        mine, theirs = opt.state[p], judge.state[q]
        found["w"] = max(found["w"], float((full(p) - full(q)).abs().max()))
        for key, name in (("exp_avg", "m"), ("exp_avg_sq", "v")):
            found[name] = max(found[name], float((full(mine[key]) - full(theirs[key])).abs().max()))
        for key in ("debias1", "debias2", "kappa", "noise", "step"):
            found["counters"] = max(found["counters"], abs(float(mine[key]) - float(theirs[key])))
    found["samples"] = abs(opt.samples_seen - judge.samples_seen)
    return found


def same_on_all_ranks(tensors: Any) -> bool:
    flat = torch.cat([t.detach().reshape(-1).double() for t in tensors])
    first = flat.clone()
    dist.broadcast(first, 0)
    return torch.equal(first, flat)


def replicated(
    updates: Any,
    ddp: bool = False,
    expect: bool = False,
    last: bool = False,
    bucket: int = 200,
    prepare: Any = None,
    one_pass: bool = False,
    **options: Any,
) -> dict[str, Any]:
    model = Net(torch.float64)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(dist.get_rank())  # prepare must give every rank the weights of the first
    wrapped = DistributedDataParallel(model, find_unused_parameters=True) if ddp else model
    opt = ia.InvariantAdam(model.parameters(), **(OPTIONS | options))
    ia.distributed.prepare(wrapped, opt, **(prepare or {}))
    opt._ranks.bucket_bytes, opt._ranks.kinds = bucket, {}
    train(wrapped, opt, updates, dist.get_rank(), expect, last, not one_pass, one_pass)
    twin, judge = alone(updates, torch.float64, expect, not one_pass, **options)
    found = differences(model, opt, twin, judge)
    same = same_on_all_ranks([*model.parameters(), *(full(s["exp_avg_sq"]) for s in opt.state.values())])
    return found | {"same": same, "gradients": sum(p.grad is not None for p in model.parameters())}


def sharded_model(mesh: Any, **policy: Any) -> nn.Module:
    model = Net(torch.float32)
    if "param_dtype" in policy or "reduce_dtype" in policy:
        policy = {"mp_policy": MixedPrecisionPolicy(**policy)}
    for layer in (model.first, model.sometimes):
        fully_shard(layer, mesh=mesh, **policy)
    fully_shard(model, mesh=mesh, **policy)
    return model


def fully_sharded(
    updates: Any, mesh: Any = None, policy: Any = None, one_pass: bool = False, prepare: Any = None, **options: Any
) -> Any:
    mesh = mesh or (dist.get_world_size(),)
    mesh = init_device_mesh("cpu", mesh, mesh_dim_names=("replicas", "shards")[-len(mesh) :])
    model = sharded_model(mesh, **(policy or {}))
    opt = ia.InvariantAdam(model.parameters(), **(OPTIONS | options))
    ia.distributed.prepare(model, opt, **(prepare or {}))
    train(model, opt, updates, dist.get_rank(), skips=False, one_pass=one_pass)
    twin, judge = alone(updates, torch.float32, skips=False, **options)
    sizes = {"local": sum(opt.state[p]["exp_avg"].to_local().numel() for p in model.parameters())}
    return (
        differences(model, opt, twin, judge)
        | {"gradients": sum(p.grad is not None for p in model.parameters())}
        | sizes
    )

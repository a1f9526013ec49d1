"""What a rank does in a test of distributed training: each case runs in a process of `rank_pool`."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import weakref
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import invariant_adam as ia
from invariant_adam.fold import queue as fold_queue

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
            if not opt.queue.in_backward:
                opt.fold()
        for i, index in enumerate([] if one_pass else update[rank]):
            final = last and i == len(update[rank]) - 1
            with ia.distributed.last_backward(opt) if final else contextlib.nullcontext():
                loss(model, micro_batch(index, dtype), skips and index % 3 == 0).backward()
            if not opt.queue.in_backward:
                opt.fold()
        opt.step()


def alone(
    updates: list[list[list[int]]],
    dtype: torch.dtype,
    expect: bool = False,
    skips: bool = True,
    mixed: bool = False,
    **options: Any,
) -> Any:
    """The same updates in one process, which must know nothing of the group."""
    model = Net(dtype)
    opt = ia.InvariantAdam(groups(model, mixed), **(OPTIONS | options))
    opt.queue.reducer.reduce_update = lambda queue, check: check()
    train(model, opt, [[[i for part in update for i in part]] for update in updates], 0, expect, skips=skips)
    return model, opt


def groups(model: nn.Module, mixed: bool) -> Any:
    """All parameters; or every other one with another sign, in a group of its own."""
    params = list(model.parameters())
    return [{"params": params[::2], "maximize": True}, {"params": params[1::2]}] if mixed else params


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
    found["noise"] = noise_apart(opt, judge)
    return found


def noise_apart(opt: Any, judge: Any) -> float:
    """How far the noise scale of ranks, which may hold pieces of the moments, is from that of one process, relative."""
    mine, theirs = opt.noise_scale(), judge.noise_scale()
    assert len(mine.layers) == len(theirs.layers)  # their names tell the group, which may be another
    pairs = [(mine, theirs), *zip(mine.layers.values(), theirs.layers.values(), strict=True)]
    return max(abs(a.noise - b.noise) / max(abs(b.noise), 1e-9) for a, b in pairs)


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
    queue: bool = False,
    mixed: bool = False,
    **options: Any,
) -> dict[str, Any]:
    fold_queue.SHARING = frozenset({"cpu"} if queue else {"cuda"})  # gradients wait for others, as on an accelerator
    model = Net(torch.float64)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(dist.get_rank())  # prepare must give every rank the weights of the first
    wrapped = DistributedDataParallel(model, find_unused_parameters=True) if ddp else model
    opt = ia.InvariantAdam(groups(model, mixed), **(OPTIONS | options))
    ia.distributed.prepare(wrapped, opt, **(prepare or {}))
    opt.queue.reducer.bucket_bytes, opt.queue.reducer.kinds = bucket, {}
    train(wrapped, opt, updates, dist.get_rank(), expect, last, not one_pass, one_pass)
    fold_queue.SHARING = frozenset({"cuda"})
    twin, judge = alone(updates, torch.float64, expect, not one_pass, mixed, **options)
    found = differences(model, opt, twin, judge)
    same = same_on_all_ranks([*model.parameters(), *(full(s["exp_avg_sq"]) for s in opt.state.values())])
    return found | {"same": same, "gradients": sum(p.grad is not None for p in model.parameters())}


def growing(ddp: bool, one_pass: bool, samples: int = 24, updates: int = 4) -> dict[str, Any]:
    """Grow in over mini-batches of which each rank has `samples`, beside one process that is fed the same cuts."""
    rank, world, dtype = dist.get_rank(), dist.get_world_size(), torch.float64
    model = Net(dtype)
    twin = copy.deepcopy(model)
    wrapped = DistributedDataParallel(model, find_unused_parameters=True) if ddp else model
    opt, judge = (ia.InvariantAdam(one.parameters(), **OPTIONS) for one in (model, twin))
    judge.queue.reducer.reduce_update = lambda queue, check: check()
    ia.distributed.prepare(wrapped, opt)
    growth, sizes = ia.BatchGrowth(opt, ratio=0.25), []
    for update in range(updates):
        batches = [micro_batch(update * world + r, dtype, samples) for r in range(world)]
        first = 0
        for x in growth.split(batches[rank]):
            with ia.one_pass(wrapped, 4, into=opt) if one_pass else contextlib.nullcontext():
                for part in [x] if one_pass else x.split(4):
                    with contextlib.nullcontext() if one_pass else opt.ragged(len(part)):
                        loss(wrapped, part).backward()
            opt.step()
            judge.expect(len(x) / 4 * world)
            for part in (part for whole in batches for part in whole[first : first + len(x)].split(4)):
                with judge.ragged(len(part)):
                    loss(twin, part).backward()
            judge.step()
            first += len(x)
            sizes.append(len(x))
    return {"sizes": sizes, "same": same_on_all_ranks(model.parameters()), **differences(model, opt, twin, judge)}


def unfrozen(ddp: bool) -> dict[str, float]:
    """A layer is unfrozen between updates, and nothing is called for it; beside one process that does the same."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    for p in model.parameters():
        dist.broadcast(p.data, 0)
    model[0].requires_grad_(False)
    twin = copy.deepcopy(model)
    opt, judge = (ia.InvariantAdam(one.parameters(), **OPTIONS) for one in (model, twin))
    judge.queue.reducer.reduce_update = lambda queue, check: check()
    wrapped = DistributedDataParallel(model) if ddp else model
    ia.distributed.prepare(wrapped, opt)
    for update in range(4):
        for one in (model, twin):
            one[0].requires_grad_(update >= 2)
        parts = [torch.randn(4, 4, dtype=torch.float64, generator=_seeded(update * world + r)) for r in range(world)]
        wrapped(parts[rank]).square().mean().backward()
        opt.step()
        judge.expect(world)
        for part in parts:
            twin(part).square().mean().backward()
        judge.step()
    return differences(model, opt, twin, judge)


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


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


class Tied(nn.Module):
    """A table that is both embedding and head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(11, 6, padding_idx=3)
        self.middle = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.middle(2 * self.table(ids))))


def tied_table() -> dict[str, float]:
    """One pass of a tied table under FSDP2, checked before it is sharded, against the loop in one process."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model, twin = Tied(), Tied()
    ids = torch.randint(0, 11, (2, ranks * 8, 5), generator=torch.Generator().manual_seed(5))
    with ia.one_pass(model, 4):
        model(ids[0, :12]).sin().mean().backward()
    for p in model.parameters():
        p.grad = p.grad_sq = None
    fully_shard(model.middle)
    fully_shard(model)
    opt = ia.InvariantAdam(model.parameters(), **OPTIONS)
    ia.distributed.prepare(model, opt)
    judge = ia.InvariantAdam(twin.parameters(), **OPTIONS)
    judge.queue.reducer.reduce_update = lambda queue, check: check()
    for update in ids:
        with ia.one_pass(model, 4):
            model(update[rank * 8 : (rank + 1) * 8]).sin().mean().backward()
        opt.step()
        for part in update.split(4):
            twin(part).sin().mean().backward()
        judge.step()
    return differences(model, opt, twin, judge)


def split(cases: list[Any], shard_state: bool = False) -> list[dict[str, float]]:
    """Many splits of micro-batches over ranks, one after another: each gives the single process's result."""
    found = []
    for updates, how in cases:
        found.append(replicated(updates, prepare={"shard_state": shard_state}, **how))
    return found


def tensor_parallel() -> dict[str, float]:
    """Linear layers cut over all ranks, which see the same data."""
    world = dist.get_world_size()
    updates = [[[3 * t + i for i in range(3)]] * world for t in range(4)]
    mesh = init_device_mesh("cpu", (world,))
    model = Net(torch.float64)
    parallelize_module(model.sometimes, mesh, ColwiseParallel(output_layouts=Replicate()))
    parallelize_module(model.last, mesh, RowwiseParallel(input_layouts=Replicate()))
    opt = ia.InvariantAdam(model.parameters(), **OPTIONS)
    ia.distributed.prepare(model, opt)
    train(model, opt, updates, 0, skips=False)
    twin, judge = alone([[update[0]] for update in updates], torch.float64, skips=False)
    return differences(model, opt, twin, judge)


def tensor_and_data_parallel() -> dict[str, float]:
    """Two replicas of a model that is cut in two."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    updates = [[[1, 2], [4]], [[5], [7, 8]], [[10], [11]]]
    model = Net(torch.float64)
    parallelize_module(model.sometimes, mesh["tp"], ColwiseParallel(output_layouts=Replicate()))
    opt = ia.InvariantAdam(model.parameters(), **OPTIONS)
    with contextlib.suppress(ValueError):
        ia.distributed.prepare(model, opt)
        raise AssertionError("which ranks see different data was not asked")
    ia.distributed.prepare(model, opt, device_mesh=mesh["dp"])
    opt.queue.reducer.bucket_bytes = 300
    train(model, opt, updates, mesh["dp"].get_local_rank(), skips=False)
    twin, judge = alone(updates, torch.float64, skips=False)
    return differences(model, opt, twin, judge)


def tensor_and_fully_sharded() -> dict[str, float]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    updates = spread_over(2, 2, 3)
    model = Net(torch.float32)
    parallelize_module(model.sometimes, mesh["tp"], ColwiseParallel(output_layouts=Replicate()))
    fully_shard(model.sometimes, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    opt = ia.InvariantAdam(model.parameters(), **OPTIONS)
    ia.distributed.prepare(model, opt)
    train(model, opt, updates, mesh["dp"].get_local_rank(), skips=False)
    twin, judge = alone(updates, torch.float32, skips=False)
    return differences(model, opt, twin, judge)


def spread_over(world: int, each: int, updates: int = 5) -> list[list[list[int]]]:
    return [[[(t * world + r) * each + i for i in range(each)] for r in range(world)] for t in range(updates)]


def raises(message: str, function: Any, *args: Any, **kwargs: Any) -> None:
    try:
        function(*args, **kwargs)
    except (RuntimeError, ValueError) as error:
        if message in str(error):
            return
        raise
    raise AssertionError(f"nothing said {message!r}")


def refusals(shard_state: bool) -> None:
    """What is wrong on one rank is refused on all, and nothing hangs."""
    rank = dist.get_rank()
    model = Net(torch.float64)
    opt = ia.InvariantAdam(model.parameters(), **OPTIONS)
    loss(model, micro_batch(1, torch.float64)).backward()
    raises("distributed.prepare(model, opt)", opt.step)
    raises("in the middle of an update", ia.distributed.prepare, model, opt)
    opt.abandon()
    ia.distributed.prepare(model, opt, shard_state=shard_state)
    train(model, opt, [[[1], [2]]], rank)
    before = [p.detach().clone() for p in model.parameters()]

    def restart(message: str | None) -> None:
        if message is not None:
            raises(message, opt.step)
        opt.abandon()
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
        assert same_on_all_ranks([full(s["exp_avg"]) / s["norm1"] for s in opt.state.values()])

    raises("no gradient", opt.step)  # on both
    opt.abandon()
    # One rank gives up; the other finds out in its step.
    loss(model, micro_batch(3 + rank, torch.float64)).backward()
    restart(None if rank == 1 else "1 of 2 ranks refused")
    # One rank has a gradient that no fold took.
    loss(model, micro_batch(5 + rank, torch.float64)).backward()
    if rank == 0:
        model.scale.grad = torch.ones_like(model.scale)
    restart("never folded" if rank == 0 else "1 of 2 ranks refused")
    # They disagree.
    opt.param_groups[0]["lr"] = 1e-2 * (1 + rank)
    loss(model, micro_batch(7 + rank, torch.float64)).backward()
    restart("the ranks disagree")
    opt.param_groups[0]["lr"] = 1e-2
    if rank:
        opt.expect(2)
    loss(model, micro_batch(7 + rank, torch.float64)).backward()
    restart("the ranks disagree")
    # And go on.
    train(model, opt, [[[1], [2]], [[3], []]], rank)
    assert same_on_all_ranks(model.parameters())
    raises("middle of an update", lambda: (loss(model, micro_batch(1, torch.float64)).backward(), opt.state_dict()))
    opt.abandon()
    saved = copy.deepcopy(opt.state_dict())
    loss(model, micro_batch(1, torch.float64)).backward()
    raises("that 2 ranks share", opt.load_state_dict, saved)
    opt.abandon()
    opt.load_state_dict(saved)
    # A non-finite gradient on one rank stops all, where it should.
    strict = ia.InvariantAdam(model.parameters(), on_nonfinite="raise", **OPTIONS)
    ia.distributed.prepare(model, strict, shard_state=shard_state)
    x = micro_batch(9 + rank, torch.float64)
    (loss(model, x) * (float("nan") if rank else 1.0)).backward()
    raises("not finite", strict.step)
    strict.step()  # goes on without them
    assert same_on_all_ranks(model.parameters())
    parts = model.first, model.norm, model.sometimes, model.last
    assert strict.nonfinite == rank * (1 + sum(p.numel() for part in parts for p in part.parameters()))


def fsdp_refusals() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plain = Net(torch.float32)
    early = ia.InvariantAdam(plain.parameters(), **OPTIONS)
    fully_shard(plain, mesh=mesh)
    raises("after them", ia.distributed.prepare, plain, early)

    def attempt(message: str, model: nn.Module, prepare: Any = None, **options: Any) -> None:
        opt = ia.InvariantAdam(model.parameters(), **(OPTIONS | options))
        raises(message, ia.distributed.prepare, model, opt, **(prepare or {}))

    attempt("max_micro_norm", sharded_model(mesh), max_micro_norm=1.0)
    attempt("shard_state", sharded_model(mesh), {"shard_state": True})
    attempt("fully_shard's own", sharded_model(mesh), {"process_group": dist.group.WORLD})
    attempt("float16", sharded_model(mesh), {"squares_dtype": torch.float16})
    attempt("reduced in torch.float16", sharded_model(mesh, reduce_dtype=torch.float16))
    attempt("CPUOffloadPolicy", sharded_model(mesh, offload_policy=CPUOffloadPolicy(pin_memory=False)))
    part = Net(torch.float32)
    fully_shard(part.first, mesh=mesh)
    attempt("outside every module", part)
    whole = Net(torch.float64)
    attempt("squares_dtype=torch.bfloat16 needs", whole, {"squares_dtype": torch.bfloat16})

    model = sharded_model(mesh)
    opt = ia.InvariantAdam(model.parameters(), **OPTIONS)
    ia.distributed.prepare(model, opt)
    raises("before they can be squared", model.set_requires_gradient_sync, False)
    raises("set_is_last_backward", model.set_is_last_backward, False)
    model.set_requires_gradient_sync(True)
    # Unequal weights would be averaged as if they were equal.
    with opt.ragged(2) if dist.get_rank() else contextlib.nullcontext():
        loss(model, micro_batch(dist.get_rank(), torch.float32, 2 if dist.get_rank() else 4)).backward()
    raises("unequal numbers", opt.step)
    opt.abandon()
    model.set_gradient_divide_factor(3.0)
    raises("set_gradient_divide_factor", lambda: loss(model, micro_batch(0, torch.float32)).backward())


def refuses_one_pass_without_a_check() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    x = micro_batch(dist.get_rank(), torch.float32, 8)

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.inner = nn.Linear(5, 5)
            self.last = nn.Linear(5, 3)

        def forward(self, x: Tensor, skip: bool = False) -> Tensor:
            return self.last(self.inner(torch.tanh(self.inner(x))))

    def step(model: nn.Module, **how: Any) -> None:
        with ia.one_pass(model, micro_batch_size=4, **how):
            loss(model, x).backward()

    model = fully_shard(Twice(), mesh=mesh)
    ia.distributed.prepare(model, ia.InvariantAdam(model.parameters(), **OPTIONS))
    raises("before fully_shard", step, model)
    model = fully_shard(Twice(), mesh=mesh)
    ia.distributed.prepare(model, ia.InvariantAdam(model.parameters(), **OPTIONS))
    raises("used more than once", step, model, check=False)
    # Checked as a plain module, it is known to be shared, and exact.
    model = Twice()
    step(model)
    ia.InvariantAdam(model.parameters(), fold="call").zero_grad()
    model = fully_shard(model, mesh=mesh)
    opt = ia.InvariantAdam(model.parameters(), **OPTIONS)
    ia.distributed.prepare(model, opt)
    step(model)
    opt.step()
    twin = Twice()
    judge = ia.InvariantAdam(twin.parameters(), **OPTIONS)
    judge.queue.reducer.reduce_update = lambda queue, check: check()
    for rank in range(dist.get_world_size()):
        for part in micro_batch(rank, torch.float32, 8).split(4):
            loss(twin, part).backward()
    judge.step()
    found = differences(model, opt, twin, judge)
    assert max(found.values()) < 1e-6, found


class Hidden(torch.autograd.Function):
    """A product of which one_pass sees nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return g @ w.T, x.T @ g


def refuses_gradients_without_squares() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.w = nn.Linear(5, 4), nn.Parameter(torch.randn(4, 3))

        def forward(self, x: Tensor, skip: bool = False) -> Tensor:
            return Hidden.apply(self.first(x), self.w)

    model = fully_shard(Model(), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    opt = ia.InvariantAdam(model.parameters(), **OPTIONS)
    ia.distributed.prepare(model, opt)

    def backward() -> None:
        with ia.one_pass(model, micro_batch_size=4, check=False):
            loss(model, micro_batch(dist.get_rank(), torch.float32, 8)).backward()

    raises("gradients without squares", backward)


def refuses_penalties_on_shards() -> None:
    """A gradient of the sharded weight itself would be squared apart from the one that FSDP2 reduces."""
    for fold in ("backward", "call"):
        model = sharded_model(init_device_mesh("cpu", (dist.get_world_size(),)))
        opt = ia.InvariantAdam(model.parameters(), fold=fold, **OPTIONS)
        ia.distributed.prepare(model, opt)
        penalised = loss(model, micro_batch(0, torch.float32)) + model.first.weight.full_tensor().square().sum()
        raises("came past FSDP2's reduction", penalised.backward)


def checkpointed(folder: str, load: bool, mode: str, updates: Any, start: int = 0) -> dict[str, Any]:
    """Go on from the checkpoint in `folder`, train, save; return the whole state."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = sharded_model(init_device_mesh("cpu", (world,))) if mode == "fsdp2" else Net(torch.float32)
    opt = ia.InvariantAdam(model.parameters(), **OPTIONS)
    ia.distributed.prepare(model, opt, shard_state=mode == "shard_state")
    schedule = ia.SampleLambdaLR(opt, lambda n: 1 / (1 + n / 100))
    parts = {"model": model, "opt": opt, "schedule": schedule}
    if load:
        # Into pieces of another number of ranks.
        saved = {"model": get_model_state_dict(model), "opt": get_optimizer_state_dict(model, opt)}
        saved["schedule"] = schedule.state_dict()
        dcp.load(saved, checkpoint_id=folder)
        set_model_state_dict(model, saved["model"])
        set_optimizer_state_dict(model, opt, saved["opt"])
        schedule.load_state_dict(saved["schedule"])
    found = {"loaded": snapshot(**parts)}
    train(model, opt, updates, rank, skips=False)
    found["trained"] = snapshot(**parts)
    saved = {"model": get_model_state_dict(model), "opt": get_optimizer_state_dict(model, opt)}
    dcp.save(saved | {"schedule": schedule.state_dict()}, checkpoint_id=folder + "-next")
    return found


def snapshot(model: nn.Module, opt: Any, schedule: Any) -> dict[str, Any]:
    opt.state_dict()
    states = [opt.state[p] for p in model.parameters()]
    return {
        "w": [full(p) for p in model.parameters()],
        "m": [full(s["exp_avg"]) for s in states],
        "v": [full(s["exp_avg_sq"]) for s in states],
        "counters": [[float(s[k]) for k in ("debias1", "debias2", "kappa", "noise", "step")] for s in states],
        "groups": [{k: v for k, v in g.items() if k not in ("params", "differentiable")} for g in opt.param_groups],
        "schedule": {k: v for k, v in schedule.state_dict().items() if isinstance(v, (int, float))},
    }


def plain_state_dicts(mode: str) -> float:
    """A whole state dict, as torch gathers it, loads in one process and in pieces again."""
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))

    def make() -> Any:
        model = sharded_model(mesh) if mode == "fsdp2" else Net(torch.float32)
        opt = ia.InvariantAdam(model.parameters(), **OPTIONS)
        ia.distributed.prepare(model, opt, shard_state=mode == "shard_state")
        return model, opt

    model, opt = make()
    train(model, opt, spread_over(world, 1, 2), dist.get_rank(), skips=False)
    whole = {
        "state": {
            i: {k: full(v).float() if isinstance(v, Tensor) and v.ndim else v for k, v in s.items()}
            for i, s in opt.state_dict()["state"].items()
        },
        "param_groups": opt.state_dict()["param_groups"],
    }
    twin = Net(torch.float32)
    judge = ia.InvariantAdam(twin.parameters(), **OPTIONS)
    judge.load_state_dict(whole)
    other, again = make()
    file = io.BytesIO()
    torch.save(copy.deepcopy(opt.state_dict()), file)  # this rank's pieces
    file.seek(0)
    again.load_state_dict(torch.load(file, weights_only=False))
    apart = max(
        float((full(opt.state[p][key]) - full(again.state[q][key])).abs().max())
        for p, q in zip(model.parameters(), other.parameters(), strict=True)
        for key in ("exp_avg", "exp_avg_sq")
    )
    assert apart == 0
    again.load_state_dict(whole)
    with torch.no_grad():
        for p, q, r in zip(model.parameters(), other.parameters(), twin.parameters(), strict=True):
            q.copy_(p)
            r.copy_(full(p))
    found = differences(other, again, twin, judge)
    assert found.pop("noise") < 1e-5  # sums of pieces, in float32
    more = spread_over(world, 1, 3)[2:]
    train(model, opt, more, dist.get_rank(), skips=False)
    train(other, again, more, dist.get_rank(), skips=False)
    apart = max(
        float((full(p) - full(q)).abs().max()) for p, q in zip(model.parameters(), other.parameters(), strict=False)
    )
    return max(*found.values(), apart)


def loaded_in_mid_update(shard_state: bool) -> float:
    """What one rank has folded, and what is on its way, is forgotten when a state is loaded."""
    found = []
    for backward in (True, False):
        model = Net(torch.float64)
        opt = ia.InvariantAdam(model.parameters(), **OPTIONS)
        ia.distributed.prepare(model, opt, shard_state=shard_state)
        train(model, opt, [[[1]]], 0)
        saved = copy.deepcopy(opt.state_dict())
        if backward:
            loss(model, micro_batch(2, torch.float64)).backward()
        opt.load_state_dict(saved)
        train(model, opt, [[[3]], [[4]]], 0)
        found.append([p.detach() for p in model.parameters()])
    return max(float((p - q).abs().max()) for p, q in zip(*found, strict=True))


def freed() -> list[str]:
    """Ways in which a model stays in memory when nobody has it any more."""

    def trained(way: str, fold: str) -> Any:
        model = (
            sharded_model(init_device_mesh("cpu", (dist.get_world_size(),))) if way == "fsdp2" else Net(torch.float64)
        )
        opt = ia.InvariantAdam(model.parameters(), fold=fold, **OPTIONS)
        ia.distributed.prepare(model, opt, shard_state=way == "shard_state")
        train(model, opt, [[[1]], [[2]]], 0)
        return [weakref.ref(model), weakref.ref(opt), *(weakref.ref(p) for p in model.parameters())]

    kept = []
    for way in ("plain", "shard_state", "fsdp2"):
        for fold in ("backward", "call"):
            left = trained(way, fold)
            gc.collect()
            if any(found() is not None for found in left):
                kept.append(f"{way}, {fold}")
    return kept


def adamw_checkpoint(folder: str) -> dict[str, float]:
    """A run of AdamW under FSDP2, saved by torch.distributed.checkpoint, goes on with InvariantAdam."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = sharded_model(mesh)
    model.never.requires_grad_(False)  # AdamW has no state of what it never moved, and torch's loader wants all or none
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1)
    for t in range(3):
        loss(model, micro_batch(t, torch.float32)).backward()
        adamw.step()
        adamw.zero_grad()
    saved = {"model": get_model_state_dict(model), "opt": get_optimizer_state_dict(model, adamw)}
    dcp.save(saved, checkpoint_id=folder)

    fresh = sharded_model(mesh)
    fresh.never.requires_grad_(False)
    old = torch.optim.AdamW(fresh.parameters(), lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1)
    loaded = {"model": get_model_state_dict(fresh), "opt": get_optimizer_state_dict(fresh, old)}
    dcp.load(loaded, checkpoint_id=folder)
    set_model_state_dict(fresh, loaded["model"])
    set_optimizer_state_dict(fresh, old, loaded["opt"])
    opt = ia.InvariantAdam(fresh.parameters(), lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1)
    opt.load_state_dict(old.state_dict())
    ia.distributed.prepare(fresh, opt)
    found = {"m": 0.0, "v": 0.0, "w": 0.0}
    for p, q in zip(model.parameters(), fresh.parameters(), strict=True):
        if adamw.state.get(p):
            for key, name in (("exp_avg", "m"), ("exp_avg_sq", "v")):
                found[name] = max(found[name], float((full(adamw.state[p][key]) - full(opt.state[q][key])).abs().max()))
        found["w"] = max(found["w"], float((full(p) - full(q)).abs().max()))
    assert opt.state[next(fresh.parameters())]["debias1"] == 0.9**3
    loss(fresh, micro_batch(9, torch.float32)).backward()
    opt.step()
    return found


def policies() -> dict[str, float]:
    """Mixed precision, activation checkpointing and squares in bfloat16 under FSDP2: near what they round."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    updates = spread_over(dist.get_world_size(), 2, 4)

    def run(
        one_pass: bool = False, checkpoint: bool = False, compiled: bool = False, squares: Any = None, **policy: Any
    ) -> Any:
        model = sharded_model(mesh, **policy)
        if compiled:
            for layer in (model.first, model.sometimes):
                layer.compile(backend="aot_eager")
        if checkpoint:
            inner = model.sometimes.forward
            model.sometimes.forward = lambda x: torch.utils.checkpoint.checkpoint(inner, x, use_reentrant=False)
        opt = ia.InvariantAdam(model.parameters(), **OPTIONS)
        ia.distributed.prepare(model, opt, squares_dtype=squares)
        train(model, opt, updates, dist.get_rank(), skips=False, one_pass=one_pass)
        return model, opt

    exact = run()
    compiled = run(compiled=True)
    bf16 = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    return {
        "compiled": max(differences(*compiled, *exact).values()),
        "checkpoint": max(differences(*run(checkpoint=True), *exact).values()),
        "one pass, checkpoint": max(differences(*run(True, True), *exact).values()),
        "mixed": differences(*run(**bf16), *exact)["w"],
        "mixed, one pass": differences(*run(True, **bf16), *run(**bf16))["w"],
        "squares": differences(*run(squares=torch.bfloat16), *exact)["w"],
        "reduced in bfloat16": differences(*run(reduce_dtype=torch.bfloat16), *exact)["w"],
    }


def buffers_and_compile() -> dict[str, Any]:
    """DDP makes the running statistics of the first rank everyone's; a compiled module inside it folds as ever."""
    rank = dist.get_rank()

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 6, bias=False), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()

    model, plain = make(), make()
    inner = torch.compile(model, backend="aot_eager")
    ddp = DistributedDataParallel(inner)
    opt = ia.InvariantAdam(model.parameters(), **OPTIONS)
    ia.distributed.prepare(ddp, opt)
    judge = ia.InvariantAdam(plain.parameters(), **OPTIONS)
    judge.queue.reducer.reduce_update = lambda queue, check: check()
    for t in range(3):
        x = micro_batch(2 * t + rank, torch.float64)
        (ddp(x) - x[:, :3].sin()).square().mean().backward()
        opt.step()
        for r in range(2):
            x = micro_batch(2 * t + r, torch.float64)
            (plain(x) - x[:, :3].sin()).square().mean().backward()
        judge.step()
    return differences(model, opt, plain, judge) | {"same": same_on_all_ranks([*model.parameters(), *model.buffers()])}


def unlike_ranks() -> None:
    """Ranks whose models or optimizers are not the same are refused before anything is sent."""
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (dist.get_world_size(),))

    def attempt(message: str, model: nn.Module, params: Any = None, **options: Any) -> None:
        opt = ia.InvariantAdam(list(model.parameters()) if params is None else params, **(OPTIONS | options))
        raises(message, ia.distributed.prepare, model, opt)

    attempt("differ in their model: ('weight', (3, ", nn.Linear(4 + rank, 3))
    attempt("torch.float32') there" if rank else "torch.float64') there", Net((torch.float32, torch.float64)[rank]))
    alike = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    attempt("differ in their parameters", alike, [layer.weight for layer in (alike if rank else reversed(alike))])
    attempt("differ in their parameters", alike, state_dtype=(torch.float32, torch.float64)[rank])
    attempt("{'micro_batch_size': ", sharded_model(mesh), micro_batch_size=4 + rank)
    model = Net(torch.float64)
    opt = ia.InvariantAdam(model.parameters(), **OPTIONS)
    ia.distributed.prepare(model, opt)
    opt.param_groups[0]["maximize"] = bool(rank)
    loss(model, micro_batch(rank, torch.float64)).backward()
    raises("the ranks disagree", opt.step)


def wrappers() -> None:
    """DDP is found inside of others; what reduces gradients by itself is refused."""
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (dist.get_world_size(),))

    def attempt(message: str, model: nn.Module, **how: Any) -> None:
        raises(message, ia.distributed.prepare, model, ia.InvariantAdam(model.parameters(), **OPTIONS), **how)

    attempt("static_graph", DistributedDataParallel(Net(torch.float64), static_graph=True))
    hooked = DistributedDataParallel(Net(torch.float64))
    hooked.register_comm_hook(None, allreduce_hook)
    attempt("would never run", hooked)
    cpu = torch.device("cpu")
    attempt("(FSDP2)", FullyShardedDataParallel(Net(torch.float32), device_id=cpu, use_orig_params=True))
    first = dist.new_group([0])
    if rank:
        attempt("is not in the process_group", Net(torch.float64), process_group=first)
    own = sharded_model(mesh)
    own.set_all_reduce_hook(lambda reduced: None)
    attempt("set_all_reduce_hook", own)
    updates = spread_over(dist.get_world_size(), 2, 3)
    # Frozen when prepare() looked for gradients to put squares beside; those folded by hooks need none there.
    for fold in ("backward", "call"):
        model = sharded_model(mesh).requires_grad_(False)
        opt = ia.InvariantAdam(model.parameters(), fold=fold, **OPTIONS)
        ia.distributed.prepare(model, opt)
        model.requires_grad_(True)
        if fold == "backward":
            train(model, opt, updates, rank, skips=False)
            found = differences(model, opt, *alone(updates, torch.float32, skips=False))
            assert max(found.values()) < 1e-6, found
        else:
            loss(model, micro_batch(rank, torch.float32)).backward()
            raises("without its square", opt.fold)

    model = Net(torch.float64)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["last.weight"])
    with torch.no_grad():
        model.last.weight.mul_(1 + rank)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    compiled = torch.compile(ddp, backend="aot_eager")
    opt = ia.InvariantAdam(model.parameters(), **OPTIONS)
    ia.distributed.prepare(compiled, opt)
    train(compiled, opt, updates, rank, skips=False)
    found = differences(model, opt, *alone(updates, torch.float64, skips=False))
    assert max(found.values()) < 1e-12, found
    assert same_on_all_ranks(model.parameters())


def unlike_meshes() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    model = Net(torch.float32)
    fully_shard(model.first, mesh=mesh["shards"])
    fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    opt = ia.InvariantAdam(model.parameters(), **OPTIONS)
    raises("meshes of different ranks", ia.distributed.prepare, model, opt)


def prepared_again(modes: list[str], store: str) -> dict[str, float]:
    """`prepare` again: in another mode, for more parameters, on a new process group."""
    rank, world = dist.get_rank(), dist.get_world_size()
    fsdp = modes[0] == "fsdp2"
    dtype = torch.float32 if fsdp else torch.float64
    model = sharded_model(init_device_mesh("cpu", (world,))) if fsdp else Net(dtype)
    updates = spread_over(world, 2, 2)
    if fsdp:  # another optimizer had them
        ia.distributed.prepare(model, ia.InvariantAdam(model.parameters(), **OPTIONS))
    params = list(model.parameters())
    opt = ia.InvariantAdam(params[:-2], **OPTIONS)
    ia.distributed.prepare(model, opt, shard_state=modes[0] == "shard_state")
    opt.add_param_group({"params": params[-2:]})
    raises("again", opt.step)
    if not fsdp:  # whose modules stay unsharded after a backward that failed
        raises("again", lambda: loss(model, micro_batch(0, dtype)).backward())
        opt.abandon()
        with torch.no_grad():
            params[-1].add_(rank)
    for i, mode in enumerate(modes):
        if i and not fsdp:  # as an elastic launcher does
            dist.barrier()
            dist.destroy_process_group()
            dist.init_process_group("gloo", init_method=f"file://{store}{i}", rank=rank, world_size=world)
            raises("has been destroyed", lambda: loss(model, micro_batch(0, dtype)).backward())
            opt.abandon()
        ia.distributed.prepare(model, opt, shard_state=mode == "shard_state")
        train(model, opt, updates, rank, skips=False)
    assert same_on_all_ranks([full(p) for p in params])
    return differences(model, opt, *alone(updates * len(modes), dtype, skips=False))


def two_optimizers() -> dict[str, float]:
    """Each of some parameters of a sharded model."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = sharded_model(init_device_mesh("cpu", (world,)))
    params = list(model.parameters())
    opts = [ia.InvariantAdam(some, **OPTIONS) for some in (params[:3], params[3:])]
    for opt in opts:
        ia.distributed.prepare(model, opt)
    updates = spread_over(world, 2, 3)
    for update in updates:
        for index in update[rank]:
            loss(model, micro_batch(index, torch.float32)).backward()
        for opt in opts:
            opt.step()
    twin, _ = alone(updates, torch.float32, skips=False)
    apart = (full(p) - full(q) for p, q in zip(params, twin.parameters(), strict=True))
    return {"w": max(float(d.abs().max()) for d in apart)}

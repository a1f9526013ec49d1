"""Every way of training on several ranks against the single-process reference, with bytes counted on the wire.

    python benchmarks/distributed.py            # gloo processes on this machine -> results/distributed.json
    python benchmarks/distributed.py nccl       # one GPU, NCCL with one rank -> results/distributed_nccl.json

The wrapper around torch's collectives counts what a rank sends in a ring: of n bytes on W ranks, 2n(W-1)/W for an
all-reduce, n(W-1)/W for a reduce-scatter, an all-gather or an all-to-all.
"""

import argparse
import contextlib
import datetime
import functools
import gc
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

ROOT = Path(__file__).parents[1]
UPDATES, MICRO, CONTEXT, VOCAB = 5, 4, 12, 61
MODES = ("plain", "ddp", "shard_state", "fsdp2", "hsdp", "tensor")
# What a ring sends of n bytes, in units of n(W-1)/W; for gathers n is the whole.
COLLECTIVES = {
    "all_reduce": (0, 2), "reduce_scatter_tensor": (1, 1), "reduce_scatter_single": (1, 1),
    "all_gather_into_tensor": (0, 1), "all_gather_single": (0, 1), "all_to_all_single": (1, 1), "broadcast": (0, 1),
}  # fmt: skip


class Wire:
    """Counts the bytes that collectives send, by collective, while it is open."""

    def __init__(self):
        self.sent = {}
        self.open = False
        for name, (place, times) in COLLECTIVES.items():
            inner = getattr(dist, name, None)
            if inner is not None:
                setattr(dist, name, self._counting(name, inner, place, times))

    def _counting(self, name, inner, place, times):
        @functools.wraps(inner)
        def collective(*args, **kwargs):
            was, self.open = self.open, False  # one may call another
            try:
                result = inner(*args, **kwargs)
            finally:
                self.open = was
            if was:
                keys = ("output", "input") if "scatter" in name else ("output_tensor", "input_tensor")
                t = args[place] if len(args) > place else kwargs.get(keys[place], kwargs.get("output"))
                ranks = dist.get_world_size(kwargs.get("group"))
                self.sent[name] = self.sent.get(name, 0) + times * t.nbytes * (ranks - 1) / ranks
            return result

        return collective

    def total(self):
        return sum(self.sent.values())


class ResidualBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Tokens, residual blocks, a head. No attention: the gradient of its key bias is zero but for rounding, and Adam
    makes a step of full size of any rounding."""

    def __init__(self, width=70, depth=3):
        super().__init__()
        self.tokens, self.blocks = (
            nn.Embedding(VOCAB, width),
            nn.Sequential(*(ResidualBlock(width) for _ in range(depth))),
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCAB)
        nn.init.normal_(self.tokens.weight, std=0.2)  # as small as the others, so that rounding them is

    def forward(self, ids):
        return self.head(self.norm(self.blocks(self.tokens(ids))))


def build(network="net"):
    from invariant_adam_lab.models import GPT

    torch.manual_seed(0)
    return Net() if network == "net" else GPT(VOCAB, CONTEXT, width=36, depth=2, heads=4)


def micro_batch(update, index):
    generator = torch.Generator().manual_seed(1000 * update + index)
    ids = torch.randint(0, VOCAB, (MICRO, CONTEXT + 1), generator=generator)
    return ids[:, :-1], ids[:, 1:]


def loss(model, ids, targets):
    return nn.functional.cross_entropy(model(ids).flatten(0, 1), targets.flatten())


HYPER = {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.1}
# "net" is chosen so that float32 itself stays below 1e-6: an epsilon above the rounding of gradients, of which Adam
# would make steps of full size. "gpt" is not; one process in float32 is measured beside both.
EPS = {"net": 1e-6, "gpt": 1e-8}


@functools.cache
def reference_run(kappa, network="net"):
    """The paper's algorithm in float64 on one process; w, m and v in one vector each."""
    from invariant_adam import reference
    from invariant_adam.scaling import scale

    model = build(network).double()
    params = list(model.parameters())

    def gradient(w, batch):
        with torch.no_grad():
            nn.utils.vector_to_parameters(w, params)
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss(model, *batch), params)])

    state = reference.start(torch.cat([p.detach().flatten() for p in params]))
    at = scale(*HYPER.values(), from_batch=MICRO, to_batch=kappa * MICRO, rule="exponential")
    for t in range(UPDATES):
        grads = [functools.partial(gradient, batch=micro_batch(t, k)) for k in range(kappa)]
        state = reference.invariant_adam(state, grads, at, eps=EPS[network])
    return state


def wrap(mode, model, world):
    """The model as `mode` has it."""
    if mode in ("ddp", "shard_state"):
        return DistributedDataParallel(model)
    if mode in ("fsdp2", "hsdp"):
        shape = (world,) if mode == "fsdp2" else (max(1, world // 2), 2)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards")[-len(shape) :])
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    if mode == "tensor":
        mesh = init_device_mesh("cpu", (world,))
        for block in model.blocks:
            parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def local_bytes(tensors):
    return sum((t.to_local() if hasattr(t, "to_local") else t).nbytes for t in tensors)


def whole(t):
    return (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().double().flatten()


def one_process(kappa, network):
    """The floor: one process in float32, no ranks at all."""
    import invariant_adam as ia

    model = build(network)
    opt = ia.InvariantAdam(model.parameters(), **HYPER, eps=EPS[network], micro_batch_size=MICRO)
    for t in range(UPDATES):
        for k in range(kappa):
            loss(model, *micro_batch(t, k)).backward()
        opt.step()
    opt.state_dict()
    states = [opt.state[p] for p in model.parameters()]
    found = {"w": model.parameters(), "m": [s["exp_avg"] for s in states], "v": [s["exp_avg_sq"] for s in states]}
    judge = reference_run(kappa, network)
    return {"network": network, "kappa": kappa} | {
        f"diff_{name}": float((torch.cat([whole(t) for t in tensors]) - getattr(judge, name)).abs().max())
        for name, tensors in found.items()
    }


def case(wire, mode, accumulation, how, squares=None, updates=UPDATES, network="net"):
    """One row of the table: train, compare, count."""
    import invariant_adam as ia

    rank, world = dist.get_rank(), dist.get_world_size()
    model = build(network)
    if how == "one pass":  # checked while it is plain; FSDP2 then goes on from what was found
        ids, targets = (torch.cat(x) for x in zip(micro_batch(0, 0), micro_batch(0, 1), strict=True))
        with ia.one_pass(model, micro_batch_size=MICRO):
            loss(model, ids, targets).backward()
        ia.InvariantAdam(model.parameters(), fold="call").zero_grad()
    wrapped = wrap(mode, model, world)
    adamw = how == "AdamW"
    if adamw:
        opt = torch.optim.AdamW(model.parameters(), **HYPER, eps=EPS[network])
        if mode == "ddp":
            wrapped.register_comm_hook(None, allreduce_hook)  # DDP's own, where the wrapper can see it
    else:
        opt = ia.InvariantAdam(model.parameters(), **HYPER, eps=EPS[network], micro_batch_size=MICRO)
        options = {"shard_state": True} if mode == "shard_state" else {}
        ia.distributed.prepare(wrapped, opt, squares_dtype=squares, **options)
    kept = 0
    wire.sent = {}
    for t in range(updates):
        mine = list(range(rank * accumulation, (rank + 1) * accumulation))
        if mode == "tensor":  # all ranks see all
            mine = list(range(world * accumulation))
        wire.open = t > 0  # the first has more to send, once
        if how == "one pass":
            ids, targets = (torch.cat(x) for x in zip(*(micro_batch(t, k) for k in mine), strict=True))
            with ia.one_pass(wrapped, micro_batch_size=MICRO):
                loss(wrapped, ids, targets).backward()
        else:
            for i, k in enumerate(mine):
                last = i == accumulation - 1
                if adamw and mode == "fsdp2":
                    wrapped.set_requires_gradient_sync(last)
                context = wrapped.no_sync() if adamw and mode == "ddp" and not last else contextlib.nullcontext()
                with context:
                    loss(wrapped, *micro_batch(t, k)).backward()
                grads = [p.grad for p in model.parameters() if p.grad is not None]
                if adamw and mode == "fsdp2" and not last:  # kept unsharded, where only FSDP2 sees them
                    kept = max(kept, 4 * sum(p.numel() for p in model.parameters()))
                kept = max(kept, local_bytes(grads))
        opt.step()
        wire.open = False
        opt.zero_grad()
    states = [opt.state[p] for p in model.parameters()]
    row = {
        "mode": mode, "world": world, "accumulation": accumulation, "how": how,
        "sent_bytes": wire.total() / (updates - 1),
        "sent_by_collective": {name: sent / (updates - 1) for name, sent in wire.sent.items()},
        "parameters": sum(p.numel() for p in model.parameters()),
        "moment_bytes": local_bytes(s[key] for s in states for key in ("exp_avg", "exp_avg_sq")),
        "gradient_bytes": kept,
        "weight_bytes": local_bytes(model.parameters()),
    }  # fmt: skip
    if squares is not None:
        row["squares"] = str(squares).removeprefix("torch.")
    vectors = {"w": [whole(p) for p in model.parameters()]}
    if not adamw:
        opt.state_dict()  # divides by what is owed
        vectors |= {"m": [whole(s["exp_avg"]) for s in states], "v": [whole(s["exp_avg_sq"]) for s in states]}
    vectors = {name: torch.cat(parts) for name, parts in vectors.items()}
    if not adamw and updates == UPDATES:
        judge = reference_run(world * accumulation, network)
        for name in "wmv":
            row[f"diff_{name}"] = float((vectors[name] - getattr(judge, name)).abs().max())
    return row, vectors


def squares_effect(wire, mode, updates=100):
    """How far squares in bfloat16 carry the trajectory away, against how far it went."""
    (_, exact), (_, narrow) = (case(wire, mode, 1, "loop", dtype, updates) for dtype in (None, torch.bfloat16))
    start = torch.cat([p.detach().double().flatten() for p in build().parameters()])
    moved = (exact["w"] - start).norm()
    return {
        "mode": mode, "world": dist.get_world_size(), "updates": updates,
        "weights": float((narrow["w"] - exact["w"]).norm() / moved),
        "v": float((narrow["v"] - exact["v"]).norm() / exact["v"].norm()),
    }  # fmt: skip


def rank_main(rank, world, store, result):
    torch.set_num_threads(1)
    wire = Wire()  # before anything else takes the names
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=datetime.timedelta(seconds=120)
    )
    rows, effects, others = [], [], []
    try:
        for mode in MODES:
            for accumulation in (1, 3):
                for how in ("loop", "one pass"):
                    if (mode, how) != ("tensor", "one pass"):  # refused
                        rows.append(case(wire, mode, accumulation, how)[0])
        for mode in ("ddp", "fsdp2"):
            rows += [case(wire, mode, accumulation, "AdamW")[0] for accumulation in (1, 3)]
        for mode in ("shard_state", "fsdp2"):
            rows.append(case(wire, mode, 1, "loop", torch.bfloat16)[0])
            effects.append(squares_effect(wire, mode))
        for mode in MODES:
            for accumulation in (1, 3):
                row, _ = case(wire, mode, accumulation, "loop", network="gpt")
                others.append({"network": "gpt"} | row)
        if rank == 0:
            torch.save((rows, effects, others), result)
        dist.barrier()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)  # gloo may abort in its teardown


def gloo(path):
    import torch.multiprocessing as mp

    from invariant_adam_lab import record

    rows, effects, others = [], [], []
    torch.set_num_threads(1)
    floor = [one_process(kappa, network) for network in EPS for kappa in (2, 4, 6, 12)]
    with tempfile.TemporaryDirectory() as folder:
        for world in (2, 4):
            result = Path(folder) / f"result{world}"
            mp.spawn(rank_main, (world, f"{folder}/store{world}", result), nprocs=world)
            more = torch.load(result)
            rows += more[0]
            effects += more[1]
            others += more[2]
    record.write_json(
        path,
        record.provenance()
        | {
            "command": "python benchmarks/distributed.py",
            "updates": UPDATES,
            "eps": EPS,
            "rows": rows,
            "effects": effects,
            "one_process": floor,
            "gpt": others,
        },
    )
    for row in rows:
        differences = " ".join(f"{name} {row[f'diff_{name}']:.1e}" for name in "wmv" if f"diff_{name}" in row)
        times = row["sent_bytes"] / row["parameters"] / 4
        which = f"{row['mode']:12} W={row['world']} A={row['accumulation']} {row['how']:9}"
        print(f"{which} {differences} sent {times:.2f}×4P")
    for row in (*effects, *floor):
        print(row)
    for row in others:
        print("gpt", row["mode"], row["world"], row["accumulation"], {k: v for k, v in row.items() if "diff" in k})


# --------------------------------------------------------------------------- NCCL with one rank

TIMED = {"none": "no wrapper", "ddp": "DDP", "fsdp2": "FSDP2"}
# What an update of B samples is; all but AdamW's by InvariantAdam.
UPDATES_OF = ("AdamW", "one micro-batch", "expect(1)", "loop of 4", "one pass, M=1", "shard_state")


def wrap_alone(mode, model, device, policy=None):
    """The model as `mode` has it, on one rank."""
    if mode == "ddp":
        return DistributedDataParallel(model, gradient_as_bucket_view=True)
    if mode == "fsdp2":
        mesh = init_device_mesh(device.type, (1,))
        options = {} if policy is None else {"mp_policy": policy}
        for block in model.blocks:
            fully_shard(block, mesh=mesh, **options)
        return fully_shard(model, mesh=mesh, **options)
    return model


def check_one_pass(model, micro, ids, targets):
    """Let one_pass check a plain model on two micro-batches; FSDP2 then goes on from what was found."""
    import invariant_adam as ia

    with ia.one_pass(model, micro_batch_size=micro):
        loss(model, ids[: 2 * micro], targets[: 2 * micro]).backward()
    ia.InvariantAdam(model.parameters(), fold="call").zero_grad()


def timed_update(mode, method, name, device, ids, targets):
    """An update of a model of its own, in bfloat16, as a function without arguments."""
    import invariant_adam as ia
    from invariant_adam_lab.models import GPT
    from invariant_adam_lab.models import build as network

    torch.manual_seed(0)
    with device:
        model = GPT(VOCAB, CONTEXT, width=36, depth=2, heads=4) if name == "tiny" else network(name)
    reduced = torch.autocast(device.type, torch.bfloat16, enabled=mode != "fsdp2")  # FSDP2 casts by itself
    if method.startswith("one pass"):
        with torch.autocast(device.type, torch.bfloat16):
            check_one_pass(model, 1, ids, targets)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    wrapped = wrap_alone(mode, model, device, policy)
    if method == "AdamW":
        opt = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    else:
        opt = ia.InvariantAdam(model.parameters(), lr=1e-4, weight_decay=0.01)
        if mode != "none":
            ia.distributed.prepare(wrapped, opt, **({"shard_state": True} if method == "shard_state" else {}))
    size = max(1, len(ids) // 4) if method == "loop of 4" else len(ids)

    def update():
        if method == "expect(1)":
            opt.expect(1)
        once = method.startswith("one pass")
        with ia.one_pass(wrapped, micro_batch_size=1) if once else contextlib.nullcontext():
            for x, y in zip(ids.split(size), targets.split(size), strict=True):
                with reduced:
                    value = loss(wrapped, x, y)
                value.backward()
        opt.step()
        opt.zero_grad()
        return value

    return update


def exact_alone(mode, how, device):
    """Largest differences of w, m and v from the float64 reference, after 5 updates of 3 micro-batches in float32.

    Of two runs: as one rank trains, which has nobody to send to, and with the collectives of several all the same.
    """
    runs = [exact_run(mode, how, device, alone) for alone in (True, False)]
    return {"mode": mode, "how": how} | {key: max(run[key] for run in runs) for key in runs[0]}


def exact_run(mode, how, device, alone):
    import invariant_adam as ia

    model = build().to(device)
    data = [[tuple(x.to(device) for x in micro_batch(t, k)) for k in range(3)] for t in range(UPDATES)]
    if how == "one pass":
        check_one_pass(model, MICRO, *(torch.cat(x) for x in zip(*data[0], strict=True)))
    wrapped = wrap_alone("ddp" if mode == "shard_state" else mode, model, device)
    opt = ia.InvariantAdam(model.parameters(), **HYPER, eps=EPS["net"], micro_batch_size=MICRO)
    if mode != "none":
        ia.distributed.prepare(wrapped, opt, shard_state=mode == "shard_state")
        opt.queue.reducer.alone = alone
    for micro_batches in data:
        if how == "one pass":
            ids, targets = (torch.cat(x) for x in zip(*micro_batches, strict=True))
            with ia.one_pass(wrapped, micro_batch_size=MICRO):
                loss(wrapped, ids, targets).backward()
        else:
            if how == "expect":  # the moments are summed while the last backward runs
                opt.expect(3)
            for ids, targets in micro_batches:
                loss(wrapped, ids, targets).backward()
        opt.step()
        assert all(p.grad is None for p in model.parameters())
    opt.state_dict()  # divides by what is owed
    states = [opt.state[p] for p in model.parameters()]
    found = {"w": model.parameters(), "m": [s["exp_avg"] for s in states], "v": [s["exp_avg_sq"] for s in states]}
    judge = reference_run(3)
    return {
        f"diff_{key}": float((torch.cat([whole(t).cpu() for t in tensors]) - getattr(judge, key)).abs().max())
        for key, tensors in found.items()
    }


def nccl(path, name, batch, rounds, device):
    """One rank: exactness in every mode, then the time of an update over AdamW's in the same wrapper."""
    from invariant_adam_lab import record
    from invariant_adam_lab.bench import timing

    start = time.perf_counter()
    gpu = device.type == "cuda"
    os.environ.setdefault("LOCAL_RANK", "0")  # plain python, no torchrun
    backend, options = "gloo", {}
    if gpu:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        backend, options = "cpu:gloo,cuda:nccl", {"device_id": device}
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1, **options)
        exact, rows = [], []

        def write():
            """What there is so far: a run cut short keeps it."""
            found = record.provenance() | record.environment(device)
            found |= {"command": "python benchmarks/distributed.py nccl", "model": name, "batch": batch}
            found |= {"rounds": rounds, "seconds": round(time.perf_counter() - start, 1), "updates": UPDATES}
            record.write_json(path, found | {"rows": rows, "exact": exact})

        for mode in ("none", "ddp", "shard_state", "fsdp2"):
            for how in ("loop", "expect", "one pass"):
                exact.append(exact_alone(mode, how, device))
                print(f"{time.perf_counter() - start:5.1f} s", exact[-1], flush=True)
        context, vocab = (1024, 50304) if name.startswith("gpt2") else (256, 65)
        if name == "tiny":
            context, vocab = CONTEXT, VOCAB
        torch.manual_seed(0)
        data = torch.randint(0, vocab, (batch, context + 1), device=device)
        ids, targets = data[:, :-1].contiguous(), data[:, 1:].contiguous()
        for mode in TIMED:
            methods = [method for method in UPDATES_OF if method != "shard_state" or mode == "ddp"]
            work = {method: timed_update(mode, method, name, device, ids, targets) for method in methods}
            taken = timing.interleaved(work, device, rounds, warmup=3, round_ms=150.0 if gpu else 0.0)
            for method, time_of in taken.items():
                ratio = time_of.ms / taken["AdamW"].ms
                rows.append({"mode": mode, "method": method, "ms": time_of.ms, "best_ms": time_of.best_ms})
                rows[-1] |= {"ratio": ratio, "calls": time_of.calls}
                print(f"{time.perf_counter() - start:5.1f} s", rows[-1], flush=True)
            write()
            del work
            gc.collect()
            if gpu:
                torch.cuda.empty_cache()
        if gpu:
            torch.cuda.synchronize()
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "src"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("gloo", "nccl"), default="gloo")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--model", default="gpt2-124m", help="one of the lab's GPTs (nccl)")
    parser.add_argument("--batch", type=int, default=16, help="samples per update (nccl)")
    parser.add_argument("--rounds", type=int, default=6, help="how often each is timed (nccl)")
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)  # "cpu", with gloo: to test this file
    args = parser.parse_args()
    results = ROOT / "benchmarks" / "results"
    if args.what == "gloo":
        gloo(args.out or results / "distributed.json")
    else:
        out = args.out or results / "distributed_nccl.json"
        nccl(out, args.model, args.batch, args.rounds, torch.device(args.device))

"""Train a small character-level GPT on a text file, on one process or many, with a batch that grows and may change.

    python examples/train_gpt.py
    torchrun --standalone --nproc-per-node=2 examples/train_gpt.py --mode ddp
    torchrun --standalone --nproc-per-node=2 --max-restarts=3 examples/train_gpt.py --mode fsdp2

The same command goes on from its latest checkpoint, with any number of ranks: what an update consumes is a function of
the samples seen and of nothing else, so that the trajectory does not depend on who computes it. GPUs are used as found.
"""

import argparse
import os
import time
from datetime import timedelta
from functools import lru_cache
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import invariant_adam as ia
from invariant_adam.distributed import load_latest, prepare, save
from invariant_adam.growth import grown_kappa
from invariant_adam_lab.models import GPT


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--mode", choices=("single", "ddp", "fsdp2"), default="single", help="how the work is shared")
    add("--text", type=Path, help="a text file (default: Python's own help texts)")
    add("--out", type=Path, default=Path("runs/train_gpt"), help="folder of the checkpoints; a run there goes on")
    add("--samples", type=int, default=8_000, help="samples to train on, each a stretch of --context characters")
    add("--batch", type=int, default=16, help="samples per update, at the start; lr and betas are those of this batch")
    add("--ramp", type=int, default=2, help="how many times the batch doubles, at equal distances in samples")
    add("--micro-batch", type=int, default=4, help="samples whose gradient is squared together")
    add("--grow-from", type=int, help="samples of the first update, which grow to --batch (default: --micro-batch)")
    add("--loop", action="store_true", help="one backward per micro-batch, instead of one pass over all of them")
    add("--lr", type=float, default=3e-3)
    add("--every", type=int, default=2_000, help="samples from one checkpoint to the next")
    add("--context", type=int, default=64, help="characters")
    add("--width", type=int, default=64)
    add("--depth", type=int, default=2)
    add("--dtype", choices=("float32", "float64"), default="float32")
    add("--timeout", type=int, default=300, help="seconds after which a rank that does not answer counts as dead")
    args = parser.parse_args()
    args.grow_from = args.grow_from or args.micro_batch
    return args


class Samples:
    """The characters of a text as samples in an order that only their number decides: sample i, whoever asks."""

    def __init__(self, text, context, vocabulary):
        ids = torch.tensor([vocabulary[c] for c in text])
        count = (len(ids) - 1) // context
        if count < 1:
            raise SystemExit(f"--context {context} is too long for {len(ids)} characters; give a longer --text")
        self.x = ids[: count * context].view(count, context)
        self.y = ids[1 : count * context + 1].view(count, context)

    @lru_cache(maxsize=2)  # noqa: B019  # a batch touches two epochs at most
    def order(self, epoch):
        return torch.randperm(len(self.x), generator=torch.Generator().manual_seed(epoch))

    def __getitem__(self, numbers):
        rows = torch.stack([self.order(i // len(self.x))[i % len(self.x)] for i in numbers])
        return self.x[rows], self.y[rows]


def read(args):
    """Return the samples to train and to test on, and how many characters there are."""
    if args.text:
        text = args.text.read_text(encoding="utf-8")
    else:
        from pydoc_data.topics import topics

        text = "\n".join(topics[name] for name in sorted(topics))
    vocabulary = {c: i for i, c in enumerate(sorted(set(text)))}
    cut = len(text) * 9 // 10
    return *(Samples(part, args.context, vocabulary) for part in (text[:cut], text[cut:])), len(vocabulary)


def start(args):
    """Join the other ranks; return this one's number, how many there are, and its device."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if args.mode == "single":
        return 0, 1, device
    # Beside NCCL, gloo for what is counted on the host, so that no update waits for the GPU.
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timedelta(seconds=args.timeout))
    return dist.get_rank(), dist.get_world_size(), device


def build(args, characters, device):
    """Return the model, wrapped, and its optimizer."""
    torch.manual_seed(0)
    model = GPT(characters, args.context, args.width, args.depth, heads=max(1, args.width // 32))
    model = model.to(device, getattr(torch, args.dtype))
    if args.mode == "ddp":
        model = DistributedDataParallel(model)
    if args.mode == "fsdp2":
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    optimizer = ia.InvariantAdam(
        model.parameters(), args.lr, (0.9, 0.95), weight_decay=0.1,
        micro_batch_size=args.micro_batch, tuned_batch_size=args.batch,
    )  # fmt: skip
    if args.mode != "single":
        prepare(model, optimizer)
    return model, optimizer


def loss_of(model, x, y):
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def update(args, model, optimizer, data, rank, ranks, device):
    """Run this rank's share of one update; return the share's loss and the samples of the whole."""
    seen = optimizer.samples_seen
    batch = min(args.batch * 2 ** ((args.ramp + 1) * seen // args.samples), args.samples - seen)
    # Growing in: no update is larger than a tenth of what was seen before it, and none crosses the end of a batch.
    batch = args.grow_from * grown_kappa((batch - seen % args.batch) // args.grow_from, seen / args.grow_from)
    kappa = batch // args.micro_batch
    optimizer.expect(kappa)
    # Micro-batch k goes to rank k modulo the number of ranks, so that shares differ by one micro-batch at most.
    mine = [seen + k * args.micro_batch + i for k in range(rank, kappa, ranks) for i in range(args.micro_batch)]
    total = 0.0
    if mine:
        x, y = (part.to(device) for part in data[mine])
        if args.loop:
            for xs, ys in zip(x.split(args.micro_batch), y.split(args.micro_batch), strict=True):
                loss = loss_of(model, xs, ys)
                loss.backward()
                total += loss.detach() * args.micro_batch / len(mine)
        else:
            # The first pass checks itself against the loop, in all modes but FSDP2, where ranks move in step.
            with ia.one_pass(model, args.micro_batch, check=args.mode != "fsdp2"):
                loss = loss_of(model, x, y)
                loss.backward()
            total = loss.detach()
    optimizer.step()
    return float(total), batch


@torch.no_grad()
def test(model, data, device):
    """Return the loss on samples that were not trained on; every rank computes all of it."""
    losses = [loss_of(model, *(part.to(device) for part in data[range(i, i + 32)])) for i in range(0, 256, 32)]
    return float(torch.stack(losses).mean())


def multiple(option, value, of, what):
    """Refuse a number of samples that has no whole number of parts."""
    if value < 1 or value % of:
        near = max(value // of, 1) * of
        raise SystemExit(f"{option} {value} is no multiple of {of}, which is {what}; use {near} or {near + of}")


def main():
    args = arguments()
    multiple("--micro-batch", args.micro_batch, 1, "one sample")
    multiple("--grow-from", args.grow_from, args.micro_batch, "--micro-batch")
    multiple("--batch", args.batch, args.grow_from, "--grow-from")
    multiple("--samples", args.samples, args.batch, "--batch")
    rank, ranks, device = start(args)
    if args.mode == "fsdp2":  # its ranks have equal shares
        multiple("--grow-from", args.grow_from, args.micro_batch * ranks, f"--micro-batch × {ranks} ranks of FSDP2")
    train, held_out, characters = read(args)
    model, optimizer = build(args, characters, device)
    schedule = ia.SampleLambdaLR(optimizer, ia.warmup_cosine(args.samples // 10, args.samples, floor=0.1))
    say = print if rank == 0 else lambda *_, **__: None

    found = load_latest(args.out, model, optimizer, schedule=schedule)
    say(f"{args.mode}, {ranks} ranks, {device.type}: {'from ' + found.name if found else 'from the start'}", flush=True)
    began, first = time.perf_counter(), optimizer.samples_seen
    while optimizer.samples_seen < args.samples:
        before = optimizer.samples_seen
        loss, batch = update(args, model, optimizer, train, rank, ranks, device)
        seen = optimizer.samples_seen
        if seen // args.every > before // args.every or seen >= args.samples:
            save(args.out, model, optimizer, schedule=schedule)
            speed = (seen - first) / (time.perf_counter() - began)
            say(f"{seen:>8} samples  batch {batch:>4}  loss {loss:.3f}  {speed:.0f} samples/s", flush=True)
    say(f"loss on held-out text: {test(model, held_out, device):.6f}", flush=True)
    if ranks > 1:
        dist.barrier()
    if args.mode != "single":
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

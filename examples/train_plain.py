"""Train a small classifier with plain torch at two batch sizes: a few seconds on a CPU.

    python examples/train_plain.py

Each line has the losses on held-out samples after equally many samples. Those of the two batch sizes lie on each other.
"""

import torch
import torch.nn.functional as F
from torch import nn

import invariant_adam as ia

MICRO_BATCH, TUNED_BATCH, SAMPLES, EVERY = 8, 32, 16_384, 2_048
torch.manual_seed(0)
x = torch.randn(SAMPLES + 1_024, 16)  # the last 1,024 are held out
y = torch.argmax((x @ torch.randn(16, 32)).relu() @ torch.randn(32, 4) + torch.randn(len(x), 4), 1)


def train(batch):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4))
    opt = ia.InvariantAdam(model.parameters(), lr=2e-3, micro_batch_size=MICRO_BATCH, tuned_batch_size=TUNED_BATCH)
    growth = ia.BatchGrowth(opt)  # cuts the first mini-batches into smaller updates
    for batch_x, batch_y in zip(x[:SAMPLES].split(batch), y[:SAMPLES].split(batch), strict=True):
        for X, Y in growth.split(batch_x, batch_y):
            with ia.one_pass(model, MICRO_BATCH, into=opt):
                F.cross_entropy(model(X), Y).backward()
            # A model that one_pass refuses takes a loop instead, to the same weights:
            # for a, b in zip(X.split(MICRO_BATCH), Y.split(MICRO_BATCH)): F.cross_entropy(model(a), b).backward()
            opt.step()
        if opt.samples_seen % EVERY == 0:
            with torch.no_grad():
                loss = F.cross_entropy(model(x[SAMPLES:]), y[SAMPLES:])
            yield opt.samples_seen, loss


print("samples  batch 32  batch 256")
for (seen, small), (_, large) in zip(train(32), train(256), strict=True):
    print(f"{seen:>7}  {small:>8.4f}  {large:>9.4f}")

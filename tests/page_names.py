"""The names that Python blocks of pages take for granted: what a reader has in a script of their own."""

import torch
import torch.nn.functional as F
from torch import nn

import invariant_adam as ia


class Net(nn.Sequential):
    """A small classifier, which gives its loss where it is given labels, as trainers want it."""

    def __init__(self):
        super().__init__(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))

    def forward(self, x, labels=None):
        logits = super().forward(x)
        return logits if labels is None else {"loss": F.cross_entropy(logits, labels), "logits": logits}


def plain():
    """A small classifier, its loss, and samples in mini-batches of 128 and micro-batches of M = 64."""
    torch.manual_seed(0)
    model = Net()
    X, Y = torch.randn(128, 8), torch.randint(4, (128,))
    return {
        "F": F, "X": X, "Y": Y, "ia": ia, "loader": [(X, Y)] * 3, "loss_fn": F.cross_entropy,
        "micro_batches": list(zip(X.split(64), Y.split(64), strict=True)), "model": model, "n": 40, "nn": nn,
        "opt": ia.InvariantAdam(model.parameters(), lr=3e-4, micro_batch_size=64), "torch": torch, "x": X[:64],
        "y": Y[:64],
    }  # fmt: skip


def one_pass():
    """The same with M = 32, and sequences of up to 7 tokens."""
    names = plain()
    tokens, targets = torch.randn(64, 7, 8), torch.randint(4, (64, 7))
    mask = (torch.arange(7) < torch.randint(1, 8, (64, 1))).float()
    parts = zip(tokens.split(32), targets.split(32), mask.split(32), strict=True)
    opt = ia.InvariantAdam(names["model"].parameters(), micro_batch_size=32)
    return names | {
        "mask": mask, "micro_batches": list(parts), "opt": opt, "targets": targets, "tokens": tokens
    }  # fmt: skip


def ranks():
    """One rank of a process group, as torchrun would start it."""
    import os
    import tempfile

    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
    names = plain()
    parts = zip(names["X"].split(8), names["Y"].split(8), strict=True)
    opt = ia.InvariantAdam(nn.Linear(1, 1).parameters(), micro_batch_size=8)
    return names | {
        "DistributedDataParallel": DistributedDataParallel, "device": "cpu", "dist": dist, "folder": tempfile.mkdtemp(),
        "fully_shard": fully_shard, "micro_batches": list(parts), "scheduler": ia.SampleLambdaLR(opt, lambda _: 1.0),
    }  # fmt: skip


def trainers():
    """The trainers and a dataset; TRL's is not needed to derive a class."""
    import transformers
    from lightning import Trainer
    from torch.utils.data import DataLoader, TensorDataset

    names = plain()
    return names | {
        "SFTTrainer": transformers.Trainer,
        "Trainer": Trainer,
        "TrainingArguments": transformers.TrainingArguments,
        "loader": DataLoader(TensorDataset(names["X"], names["Y"]), batch_size=64),
        "data": [{"x": x, "labels": y} for x, y in zip(names["X"], names["Y"], strict=True)],
    }


def from_adamw():
    """All of them."""
    from invariant_adam.integrations.lightning import InvariantAdamCallback
    from invariant_adam.integrations.transformers import InvariantTrainer

    own = {"InvariantAdamCallback": InvariantAdamCallback, "InvariantTrainer": InvariantTrainer}
    return ranks() | trainers() | own

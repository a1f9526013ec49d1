"""Tiny language models, their data, and the loop of the guide: what every trainer must equal."""

from __future__ import annotations

import os
from contextlib import nullcontext
from itertools import islice

import torch
from torch.utils.data import Dataset, IterableDataset

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from invariant_adam import InvariantAdam
from invariant_adam.growth import grown_kappa

VOCABULARY, LENGTH, M, TUNED = 31, 12, 4, 8
HYPERPARAMETERS = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-4}
DECAY = 0.1


def llama():
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 32}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, use_cache=False, bos_token_id=1, eos_token_id=2))


def gpt2():
    torch.manual_seed(0)
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    sizes = {"vocab_size": VOCABULARY, "n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, **no_dropout, bos_token_id=0, eos_token_id=0))


def neox():
    """A model that transformers saves under other names than its parameters have."""
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    more = {"num_attention_heads": 2, "max_position_embeddings": 32, "bos_token_id": 0, "eos_token_id": 0}
    return GPTNeoXForCausalLM(GPTNeoXConfig(**sizes, **more))


class Sentences(Dataset):
    """Arithmetic sequences; where `unequal`, of different lengths. It remembers what was asked for."""

    def __init__(self, n, unequal=False):
        generator = torch.Generator().manual_seed(1)
        first, step = (torch.randint(low, high, (n, 1), generator=generator) for low, high in ((0, VOCABULARY), (1, 4)))
        self.ids = (first + step * torch.arange(LENGTH)) % VOCABULARY
        lengths = torch.randint(3, LENGTH + 1, (n, 1), generator=generator) if unequal else torch.tensor(LENGTH)
        self.mask = (torch.arange(LENGTH) < lengths).long().expand(n, LENGTH)
        self.labels = self.ids.masked_fill(self.mask == 0, -100)
        self.asked = []

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        self.asked.append(i)
        return {"input_ids": self.ids[i], "labels": self.labels[i], "attention_mask": self.mask[i]}

    def batch(self, indices):
        rows = list(indices)
        return {"input_ids": self.ids[rows], "labels": self.labels[rows], "attention_mask": self.mask[rows]}


class Stream(IterableDataset):
    """The same without a length."""

    def __init__(self, data):
        self.data = data

    def __iter__(self):
        return (self.data[i] for i in range(len(self.data)))


def windows(order, kappa, size=M):
    """Cut the samples of one epoch into micro-batches, and those into windows of `kappa`, the last ones short."""
    samples = iter(order)
    micro_batches = iter(lambda: list(islice(samples, size)), [])
    return list(iter(lambda: list(islice(micro_batches, kappa)), []))


def grown(plan, ranks=1):
    """Cut windows as growing in does; return the updates, and how many micro-batches those of each window have."""
    updates, sizes = [], []
    for window in plan:
        sizes.append([])
        while window:
            seen = sum(len(part) for update in updates for part in update) / M / ranks
            kappa = grown_kappa(len(window) // ranks, seen) * ranks
            updates.append(window[:kappa])
            sizes[-1].append(kappa)
            window = window[kappa:]
    return updates, sizes


def optimizer_of(model, **options):
    """Decay as Trainer does it: on matrices, not on biases and norms."""
    decayed = [p for n, p in model.named_parameters() if p.requires_grad and not exempt(n)]
    others = [p for n, p in model.named_parameters() if p.requires_grad and exempt(n)]
    groups = [{"params": decayed, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    return InvariantAdam(groups, micro_batch_size=M, tuned_batch_size=TUNED, **{**HYPERPARAMETERS, **options})


def exempt(name):
    return "bias" in name or "norm" in name or "ln_" in name


def train_plainly(model, opt, data, plan, loss=None, announced=()):
    """Run the loop of the guide over windows of micro-batches of indices; return the mean losses of its updates.

    Args:
        loss: model and batch -> the loss; by default the model's own.
        announced: index of a window -> κ, where it was expected to be larger than it became; None: nothing is.
    """
    model.train()
    losses = []
    for index, window in enumerate(plan):
        n = sum(map(len, window))
        if announced is not None:
            opt.expect(dict(announced).get(index, n / M))
        mean = 0.0
        for indices in window:
            batch = data.batch(indices)
            with opt.ragged(len(indices)) if len(indices) < M else nullcontext():
                one = loss(model, batch) if loss else model(**batch).loss
                one.backward()
                if not opt.queue.in_backward:
                    opt.fold()
            mean += one.item() * len(indices) / n
        opt.step()
        losses.append(mean)
    return losses


def assert_equal_runs(model, opt, other, reference, w=1e-6, v=1e-5):
    """Compare w and v, not w alone: at constant κ a factor in v cancels in m̂/√v̂."""
    assert opt.samples_seen == reference.samples_seen
    state, expected = opt.state_dict()["state"], reference.state_dict()["state"]
    assert state.keys() == expected.keys()
    for i in state:
        a, b = state[i]["exp_avg_sq"], expected[i]["exp_avg_sq"]
        assert (a - b).norm() <= v * b.norm(), (i, a.norm() / b.norm())
        assert state[i]["kappa"] == expected[i]["kappa"]
    for (name, a), b in zip(model.named_parameters(), other.parameters(), strict=True):
        assert (a - b).abs().max() <= w, (name, (a - b).abs().max())

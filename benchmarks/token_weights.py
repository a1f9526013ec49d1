"""Which normalisation of a loss over unequal numbers of tokens is invariant, and what is left.

    python benchmarks/token_weights.py --out benchmarks/results/token_weights.json

A small model of next tokens in float64, M = 1, sequences of 3 to 16 tokens. Each row is the distance of the weights
from those of κ = 1 after the same samples in the same order, relative to the way that κ = 1 has gone.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from invariant_adam import InvariantAdam
from invariant_adam_lab import record

V, T, N = 30, 16, 640
NORMALISERS = {
    "update": "the tokens of the update, as `weights=` alone and most trainers do",
    "own": "each micro-batch's own tokens",
    "usual": "a usual micro-batch's tokens, as `usual_weight=`",
}


def problem(lengths):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(V, (N, T + 1), generator=generator)
    ids[:, 1:] = (ids[:, :-1] * 3 + torch.randint(3, (N, T), generator=generator)) % V
    few, many = {"unequal": (3, T + 1), "equal": (10, 11)}[lengths]
    tokens = torch.randint(few, many, (N,), generator=torch.Generator().manual_seed(2))
    return ids, (torch.arange(T) < tokens[:, None]).double()


def cuts(kappa, grow):
    """The updates: of κ samples each; growing in, of a tenth of what was seen before, up to κ."""
    first = 0
    while first < N:
        size = min(kappa, max(1, first // 10) if grow else kappa, N - first)
        yield range(first, first + size)
        first += size


def train(kappa, normaliser, lengths, betas, grow=False):
    """Return the weights at the end, and at the beginning."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(V, 16), nn.Linear(16, 32), nn.Tanh(), nn.LayerNorm(32), nn.Linear(32, V))
    model.double()
    ids, mask = problem(lengths)
    usual = mask.sum(1).mean()
    start = nn.utils.parameters_to_vector(model.parameters()).detach()
    opt = InvariantAdam(model.parameters(), lr=3e-4, betas=betas, micro_batch_size=1)
    for update in cuts(kappa, grow):
        opt.expect(len(update))
        for i in update:
            losses = F.cross_entropy(model(ids[i, :-1]), ids[i, 1:], reduction="none") * mask[i]
            by = {"update": mask[update].sum() / len(update), "own": mask[i].sum(), "usual": usual}
            (losses.sum() / by[normaliser]).backward()
        opt.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach(), start


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/token_weights.json"), help="results, a row at a time")
    out = parser.parse_args().out
    rows = record.Rows(out, "python benchmarks/token_weights.py", "token_weights", torch.device("cpu"))
    cases = [(n, "unequal", (0.9, 0.99), False) for n in NORMALISERS]
    cases += [("usual", "equal", (0.9, 0.99), False), ("usual", "equal", (0.99, 0.999), False)]
    cases += [("usual", lengths, (0.9, 0.99), True) for lengths in ("unequal", "equal")]
    for normaliser, lengths, betas, grow in cases:
        settings = {"normaliser": normaliser, "lengths": lengths, "betas": list(betas), "grow": grow}
        if rows.has(settings):
            continue
        alone, start = train(1, normaliser, lengths, betas)
        off = {k: train(k, normaliser, lengths, betas, grow)[0] - alone for k in (4, 16)}
        far = {f"kappa {k}": round(float(d.norm() / (alone - start).norm()), 4) for k, d in off.items()}
        rows.add(settings, far)
        print(settings, far, flush=True)


if __name__ == "__main__":
    main()

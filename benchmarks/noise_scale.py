"""The noise scale that the moments give, against the truth.

    python benchmarks/noise_scale.py --out benchmarks/results/noise_scale.json --figure docs/figures/noise_scale.png

Weights stay where they are (lr = 0), so that there is one truth. A synthetic gradient has a noise scale that is set,
over three orders of magnitude; its noise has few directions, as that of networks does. For an MLP and a small GPT the
truth is brute force: the gradient of every sample alone. Each row is a mean over the readings of one run.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import invariant_adam as ia
from invariant_adam_lab import record

SCALES = tuple(10 ** (i / 2) for i in range(1, 8))  # samples: 3 to 3,000
MODES = {"loop": 1, "loop, κ = 8": 8, "one pass, κ = 8": 8}
SAMPLES = 1024


class GPT(nn.Module):
    """A model of 16 words, 12 places and one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(16, 16), nn.Parameter(0.1 * torch.randn(12, 16))
        self.attend = nn.MultiheadAttention(16, 2, batch_first=True)
        self.one, self.two = nn.LayerNorm(16), nn.LayerNorm(16)
        self.wide, self.head = nn.Linear(16, 32), nn.Linear(32, 16)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(12))

    def forward(self, x):
        h = self.embed(x) + self.places
        a = self.one(h)
        h = h + self.attend(a, a, a, attn_mask=self.mask, need_weights=False)[0]
        return self.head(F.gelu(self.wide(self.two(h))))


def mlp():
    torch.manual_seed(0)
    x = torch.randn(SAMPLES, 10)
    y = torch.sin(x @ torch.randn(10)) + 0.3 * torch.randn(SAMPLES)
    model = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 1))
    return model, lambda rows: (model(x[rows])[:, 0] - y[rows]).square().mean()


def gpt():
    torch.manual_seed(0)
    moves = torch.softmax(3 * torch.randn(16, 16), -1)
    words = [torch.randint(16, (SAMPLES,))]
    for _ in range(12):
        words.append(torch.multinomial(moves[words[-1]], 1)[:, 0])
    text, model = torch.stack(words, 1), GPT()
    opt = torch.optim.Adam(model.parameters(), 3e-3)  # a little trained: at first all gradients are alike
    for rows in torch.arange(SAMPLES).split(32):
        opt.zero_grad()
        F.cross_entropy(model(text[rows, :-1]).flatten(0, 1), text[rows, 1:].flatten()).backward()
        opt.step()
    opt.zero_grad()
    return model, lambda rows: F.cross_entropy(model(text[rows, :-1]).flatten(0, 1), text[rows, 1:].flatten())


def brute_force(model, loss):
    """Return trΣ/|G|² from the gradient of every sample alone."""
    params = list(model.parameters())
    total, squares = 0.0, 0.0
    for i in range(SAMPLES):
        g = torch.cat([t.flatten() for t in torch.autograd.grad(loss([i]), params)]).double()
        total, squares = total + g, squares + float(g.square().sum())
    signal = float((total / SAMPLES).square().sum())
    return (squares / SAMPLES - signal) / signal


def measure(params, backward, size, kappa, updates, betas, every):
    """Return the noise scale of `updates` updates at fixed weights, read at every n-th and averaged.

    Args:
        params: of the model.
        backward: (micro-batches) -> None, the backwards of an update.
        size: M, samples.
        kappa: micro-batches in an update.
        updates: in all.
        betas: at M.
        every: updates between readings.
    """
    opt = ia.InvariantAdam(params, lr=0.0, betas=betas, micro_batch_size=size)
    ia.BatchGrowth(opt, math.inf)  # nothing moves: no first update is too large
    for update in range(updates):
        backward(kappa)
        opt.step()
        if update >= every and update % every == 0:
            found = opt.noise_scale(smooth=64)
    return found


def synthetic(scale, kappa, size=8, weights=1000, directions=50):
    """A gradient G + Σ_k √λ_k z_k u_k with λ_k ∝ 1/k, whose trΣ/|G|² is `scale`."""
    generator = torch.Generator().manual_seed(0)
    w = nn.Parameter(torch.zeros(weights))
    mean = torch.randn(weights, generator=generator)
    mean /= mean.norm()
    spectrum = 1 / torch.arange(1.0, directions + 1)
    deviations = (scale * spectrum / spectrum.sum()).sqrt()  # trΣ = scale, |G|² = 1
    basis = torch.linalg.qr(torch.randn(weights, directions, generator=generator))[0] * deviations

    def backward(count):
        for _ in range(count):
            noise = torch.randn(size, directions, generator=generator).mean(0)
            (w * (mean + basis @ noise)).sum().backward()

    # The averages must hold enough samples for the signal to show: more of them at a larger noise scale.
    beta = max(0.9, 1 - 2 * size / scale)
    every = max(1, round(2 / (1 - beta) / kappa))
    return measure([w], backward, size, kappa, 60 * every, (beta, max(0.99, beta)), every)


def network(model, loss, mode, size=8):
    kappa, generator = MODES[mode], torch.Generator().manual_seed(1)

    def backward(count):
        rows = torch.randint(SAMPLES, (count * size,), generator=generator)
        if mode.startswith("one pass"):
            with ia.one_pass(model, micro_batch_size=size):
                loss(rows).backward()
        else:
            for part in rows.split(size):
                loss(part).backward()

    every = max(1, 40 // kappa)
    return measure(model.named_parameters(), backward, size, kappa, 60 * every, (0.95, 0.999), every)


def draw(rows, path):
    from matplotlib.figure import Figure

    ax = Figure(figsize=(5.2, 4.2), layout="constrained").add_subplot()
    known = [row for row in rows if row["problem"] == "synthetic"]
    ends = [min(row["truth"] for row in known) / 2, max(row["truth"] for row in known) * 2]
    ax.plot(ends, ends, color="0.7", lw=1, label="truth")
    for kappa, color in ((1, "#1f77b4"), (8, "#d62728")):
        part = [row for row in known if row["kappa"] == kappa]
        ax.errorbar(
            [row["truth"] * (1.05 if kappa > 1 else 0.95) for row in part], [row["found"] for row in part],
            yerr=[2 * row["stderr"] for row in part], fmt="o", ms=4, capsize=2, color=color,
            label=f"κ = {kappa}, ± 2 standard errors",
        )  # fmt: skip
    ax.set(xscale="log", yscale="log", xlabel="true noise scale (samples)", ylabel="opt.noise_scale().batch")
    ax.legend(frameon=False)
    ax.figure.savefig(path, dpi=150)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/noise_scale.json"), help="results, a row at a time")
    parser.add_argument("--figure", type=Path, help="where to draw the synthetic ones")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    rows = record.Rows(asked.out, "python benchmarks/noise_scale.py", "noise_scale", torch.device("cpu"))
    for scale in SCALES:
        for kappa in (1, 8):
            keep(
                rows,
                {"problem": "synthetic", "mode": "loop", "kappa": kappa, "scale": round(scale, 2)},
                scale,
                lambda scale=scale, kappa=kappa: synthetic(scale, kappa),
            )
    for name, make in (("MLP", mlp), ("GPT", gpt)):
        model, loss = make()
        truth = brute_force(model, loss)
        for mode, kappa in MODES.items():
            keep(
                rows,
                {"problem": name, "mode": mode, "kappa": kappa},
                truth,
                lambda model=model, loss=loss, mode=mode: network(model, loss, mode),
            )
    if asked.figure:
        draw(rows.rows, asked.figure)


def keep(rows, settings, truth, measured):
    if rows.has(settings):
        return
    found = measured()
    measured = {"truth": truth, "found": found.batch, "stderr": found.stderr}
    rows.add(settings, {name: round(value, 3) for name, value in measured.items()} | {"readings": found.readings})
    print(settings, measured, flush=True)


if __name__ == "__main__":
    main()

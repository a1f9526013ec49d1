"""Small runs of the lab on made-up data: for tests of what a run is, of its samples, its updates and its rows."""

import torch

from invariant_adam.lab import data
from invariant_adam.lab.runs import Run
from invariant_adam.lab.source import Source, load

CPU = torch.device("cpu")
M, MAX = 5, 20
TEXT = "".join(chr(97 + (i * i + i // 7) % 17) for i in range(4_000))


def small_source(model: str, device: torch.device = CPU, **how) -> Source:
    """What a model trains on: 90 images and 30 to test, or a text."""
    found = data.encode(TEXT) if model == "gpt" else data.synthetic(90, 30)
    return load(model, device, small=True, found=found, **how)


def run(model: str = "resnet-ln", algorithm: str = "invariant", rule: str = "linear", batch: int = MAX, **more) -> Run:
    """Settings of a run of two epochs."""
    settings = {"micro_batch_size": M, "max_batch_size": MAX, "lr0": 1e-3, "seed": 0, "epochs": 2, "small": True}
    return Run(model, algorithm, rule, batch, **{**settings, **more})

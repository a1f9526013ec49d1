"""Small runs of the lab on made-up data: for tests of what a run is, of its samples, its updates and its rows."""

import torch
from typer.testing import CliRunner

from invariant_adam_lab.cli import app
from invariant_adam_lab.grids.grid import Choice
from invariant_adam_lab.training import data, tokens
from invariant_adam_lab.training.runs import Run
from invariant_adam_lab.training.source import Source, load

TINY = Choice(epochs=1, lrs=(1e-3,), batch_sizes=(5, 20), samples=40)
CPU = torch.device("cpu")
M, MAX = 5, 20
WORDS = ["a", "batch", "of", "one", "and", "then", "another", "two", "make", "the", "moment", "all", "that", "is"]
TEXT = "".join(chr(97 + (i * i + i // 7) % 17) for i in range(4_000))


def small_source(model: str, device: torch.device = CPU, **how) -> Source:
    """What a model trains on: 90 images and 30 to test, or a text."""
    found = data.synthetic(90, 30)
    if model == "gpt":
        found = data.encode(TEXT)
    if model == "gpt2":
        found = tokens.encode([" ".join(WORDS[(i * i // 3 + i // 7) % 14] for i in range(8_000))], 300)
    return load(model, device, small=True, found=found, **how)


def run(model: str = "resnet-ln", algorithm: str = "invariant", rule: str = "linear", batch: int = MAX, **more) -> Run:
    """Settings of a run of two epochs."""
    settings = {"micro_batch_size": M, "max_batch_size": MAX, "lr0": 1e-3, "seed": 0, "epochs": 2, "small": True}
    return Run(model, algorithm, rule, batch, **{**settings, **more})


class Told(list):
    """What a grid tells while it is made."""

    def __call__(self, kind, run, what) -> None:
        self.append((kind, run, what))

    def of(self, kind: str) -> list:
        return [run for k, run, _ in self if k == kind]


def invoke(*words: str):
    """Call `invariant-adam reproduce` at a terminal of 80 columns."""
    return CliRunner().invoke(app, ["reproduce", *words], env={"COLUMNS": "80"})

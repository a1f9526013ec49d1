"""The options that several commands take, and how they are read."""

from __future__ import annotations

import enum
from typing import Annotated, TypeVar

import typer

from .console import fail

Number = TypeVar("Number", int, float)


class Device(str, enum.Enum):
    """Where a benchmark or an experiment runs."""

    cuda = "cuda"
    cpu = "cpu"


class Precision(str, enum.Enum):
    """What a model's products are computed in."""

    bfloat16 = "bfloat16"
    float32 = "float32"


Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON, and nothing else, to stdout.")]
Where = Annotated[Device | None, typer.Option("--device", help="Where to run; by default on a GPU if there is one.")]
InPrecision = Annotated[
    Precision | None, typer.Option("--precision", help="By default bfloat16 (autocast) on a GPU, float32 elsewhere.")
]


def device_of(asked: Device | None) -> str:
    """Give the device that was asked for, or the best there is; fail where there is no such device."""
    import torch

    if asked is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if asked is Device.cuda and not torch.cuda.is_available():
        fail("--device cuda: torch sees no CUDA device here; use --device cpu")
    return asked.value


def precision_of(asked: Precision | None, device: str) -> str:
    """Give the precision that was asked for, or the device's usual one."""
    return asked.value if asked else "bfloat16" if device == "cuda" else "float32"


def words(text: str) -> list[str]:
    """Read words with commas between them."""
    return text.replace(",", " ").split()


def numbers(option: str, text: str | None, kind: type[Number]) -> tuple[Number, ...] | None:
    """Read numbers with commas between them, None where nothing was given; fail where one is not a number."""
    if text is None:
        return None
    try:
        return tuple(kind(word) for word in words(text))
    except ValueError:
        kinds = "whole numbers" if kind is int else "numbers"
        fail(f"{option} must be {kinds} with commas between them, got {text!r}")

"""What kernels ask of the chip they run on: its multiprocessors, its shared memory, its tile loads, its tf32."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch


class Chip(NamedTuple):
    """What launches depend on."""

    multiprocessors: int  # blocks that run at once where each fills one
    shared_memory: int  # bytes that a block may have
    tile_loads: bool  # whether the hardware loads tiles by descriptor: NVIDIA's from Hopper on
    tf32: bool  # whether it multiplies float32 in tf32: NVIDIA's from Ampere on
    publishes: bool  # whether others see all that a block stored before a barrier and an atomic: NVIDIA's


@lru_cache
def of(device: torch.device) -> Chip:
    """The chip of a device; the interpreter counts as a small one that can do everything."""
    if device.type != "cuda":
        return Chip(4, 1 << 30, True, True, True)
    found = torch.cuda.get_device_properties(device)
    # ROCm's devices are "cuda" too, with numbers of their own in place of NVIDIA's compute capability: an MI300 is 9.4.
    capability = (0, 0) if torch.version.hip else (found.major, found.minor)
    memory = getattr(found, "shared_memory_per_block_optin", 0) or found.shared_memory_per_block
    return Chip(found.multi_processor_count, memory, capability >= (9, 0), capability >= (8, 0), capability > (0, 0))


def precision(device: torch.device, tf32: bool) -> str:
    """How float32 is multiplied: in tf32 where the user allows it and the chip can, else exactly."""
    return "tf32" if tf32 and of(device).tf32 else "ieee"


def stages(device: torch.device, stage_bytes: int, wanted: int) -> int:
    """As many pipeline stages as fit into shared memory.

    Tensor cores older than Hopper's, and AMD's, multiply from registers: there one stage has left shared memory, and
    two take no more of it than one.
    """
    here = of(device)
    return max(1 if here.tile_loads else 2, min(wanted, (here.shared_memory - 1024) // stage_bytes))

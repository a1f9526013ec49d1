"""What kernels ask of the chip they run on: its multiprocessors, its tile loads, its shared memory."""

from __future__ import annotations

from functools import lru_cache

import torch


@lru_cache
def multiprocessors(device: torch.device) -> int:
    """How many blocks run at once where each fills a multiprocessor; the interpreter counts as a small chip."""
    count: int = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
    return count


@lru_cache
def has_tile_loads(device: torch.device) -> bool:
    """Whether the hardware loads tiles by descriptor (Hopper on)."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (9, 0)


@lru_cache
def stages(device: torch.device, stage_bytes: int, wanted: int) -> int:
    """As many pipeline stages as fit into shared memory."""
    if device.type != "cuda":
        return wanted
    memory: int = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 48 << 10)
    return max(1, min(wanted, (memory - 1024) // stage_bytes))

"""Time of `embedding_square` over that of the library's gradient of an embedding table, on a GPU.

    PYTHONPATH=src python benchmarks/embedding_square.py

32 groups of 1024 tokens, bfloat16: the library's gradient as it is called, and as CUDA graphs the kernel, its plain
twin, and what it can't go below, filling two tables with zeros. Tokens are drawn evenly, as 1/rank, and nine in ten the
same.
"""

from __future__ import annotations

import torch

from invariant_adam.kernels import embedding_square as plain
from invariant_adam.kernels.embedding_square import triton as fused
from invariant_adam_lab.bench import timing

KAPPA, PLACES, ROWS, WIDTH = 32, 1024, 50304, 768


def draws():
    """Names and tokens (κ, R)."""
    shape = (KAPPA, PLACES)
    even = torch.randint(ROWS, shape, device="cuda")
    chances = 1 / torch.arange(1, ROWS + 1, device="cuda")
    ranked = torch.multinomial(chances, KAPPA * PLACES, replacement=True).view(shape)
    return {"even": even, "1/rank": ranked, "one": even.masked_fill(torch.rand(shape, device="cuda") < 0.9, 7)}


def main():
    G = torch.randn(KAPPA, PLACES, WIDTH, device="cuda", dtype=torch.bfloat16)
    for name, ids in draws().items():

        def twin(ids=ids):
            before, plain.fused = plain.fused, None
            try:
                return plain.embedding_square(ids, G, ROWS)
            finally:
                plain.fused = before

        work = {
            "library": lambda ids=ids: torch.ops.aten.embedding_dense_backward(G, ids, ROWS, -1, False),
            "kernel": lambda ids=ids: fused.embedding_square(ids, G, ROWS),
            "twin": twin,
            "zeros": lambda: [torch.zeros(ROWS, WIDTH, device="cuda") for _ in range(2)],
        }
        graphs = {key: timing.captured(function) for key, function in work.items() if key != "library"}
        graphs["library"] = work["library"]
        times = timing.interleaved(graphs, torch.device("cuda"), rounds=7, warmup=2, round_ms=5.0)
        print(name, {key: f"{1e3 * taken.ms:.0f} us" for key, taken in times.items()}, flush=True)


if __name__ == "__main__":
    main()

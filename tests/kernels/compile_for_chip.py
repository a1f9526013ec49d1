"""Compile every kernel for a chip that is not here, as the package would launch it there: `test_chips` runs this.

    python compile_for_chip.py sm_80 [few] [ahead]

The package's own code chooses tiles, stages and loads, for operands without memory and by what `chip` says of the chip;
Triton compiles what it is given for that chip, and starts nothing. A line of JSON tells of each kernel, the last line
which ones were never compiled. With `few`, configurations are those of bfloat16 that are taken untuned. With `ahead`,
launches are put down first and their kernels compiled side by side, as in a rehearsal; the last line then tells which
threads compiled how many.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource
from triton.runtime import JITFunction, driver

from invariant_adam.kernels import Serving, chip
from invariant_adam.kernels.adam import Fold
from invariant_adam.kernels.adam import triton as adam_triton
from invariant_adam.kernels.batch_norm import triton as batch_norm_triton
from invariant_adam.kernels.conv_square import Geometry, ways
from invariant_adam.kernels.embedding_square import triton as embedding_square_triton
from invariant_adam.kernels.gemm_square import triton as gemm_square_triton
from invariant_adam.kernels.launch import compile_all
from invariant_adam.kernels.sums import triton as sums_triton


class Model(NamedTuple):
    """A chip to compile for."""

    target: GPUTarget
    chip: chip.Chip


def nvidia(number: int, multiprocessors: int, kilobytes: int) -> Model:
    has = chip.Chip(multiprocessors, kilobytes << 10, tile_loads=number >= 90, tf32=True, publishes=True)
    return Model(GPUTarget("cuda", number, 32), has)


def amd(name: str, multiprocessors: int) -> Model:
    has = chip.Chip(multiprocessors, 64 << 10, tile_loads=False, tf32=False, publishes=False)
    return Model(GPUTarget("hip", name, 64), has)


MODELS = {
    "sm_80": nvidia(80, 108, 163),  # A100
    "sm_89": nvidia(89, 142, 99),  # L40S
    "sm_90": nvidia(90, 132, 227),  # H200
    "sm_100": nvidia(100, 148, 227),  # B200
    "sm_120": nvidia(120, 170, 99),  # RTX 5090
    "gfx90a": amd("gfx90a", 104),  # MI250X, one of its two
    "gfx942": amd("gfx942", 304),  # MI300X
}


class Elsewhere:
    """What Triton asks of a driver before it launches."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


# --------------------------------------------------------------------------- what is launched


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def into(*shape: int, slots: bool = False) -> Fold:
    row = empty(8) if slots else None
    return Fold(empty(*shape), empty(*shape), (0.9, 0.99), (0.1, 0.01), empty(1, dtype=torch.int64)[0], row)


def adam(dtype: torch.dtype, few: bool) -> None:
    count = empty(1, dtype=torch.int64)[0]
    w, g = ([empty(1000, dtype=dtype), empty(64, 64, dtype=dtype)] for _ in range(2))
    m, v, s = ([empty(1000), empty(64, 64)] for _ in range(3))
    folding = {"keep": (0.9, 0.99), "gain": (0.1, 0.01), "count": count}
    moving = {"size": 1e-3, "eps": 1e-8, "decay": 1.0}
    for squares, slots in ((s, empty(8)),) if few else ((s, empty(8)), (None, None)):
        adam_triton.fold(g, squares, m, v, **folding, slots=slots)
        adam_triton.fold(g[:1], squares and squares[:1], m[:1], v[:1], **folding, slots=slots)
        adam_triton.step(w, m, v, **moving, slots=slots)
        adam_triton.fold_step(w, g, squares, m, v, **folding, **moving, slots=slots)


LAYOUTS = torch.channels_last, torch.contiguous_format


def batch_norm(dtype: torch.dtype, few: bool) -> None:
    shapes = (8, 64, 32), (8, 64, 14), (4, 20, 5)
    for (kappa, channels, side), layout in product(shapes[:1] if few else shapes, LAYOUTS):
        x = empty(kappa * 8, channels, side, side, dtype=dtype).to(memory_format=layout)
        mean, rstd = empty(kappa, channels), empty(kappa, channels)
        w, b, c, tracked = empty(channels), empty(channels), empty(kappa), empty(1, dtype=torch.int64)[0]
        running = empty(channels), empty(channels), 0.5, 0.1, 0.9
        batch_norm_triton.statistics(x, kappa, 1e-5, *running)
        batch_norm_triton.forward(x, kappa, 1e-5, *running, tracked, w, b)
        batch_norm_triton.normalise(x, mean, rstd, w, b)
        batch_norm_triton.backward(x, x, mean, rstd, w, c)


def sums(dtype: torch.dtype, few: bool) -> None:
    rows = empty(8, 1024, 768, dtype=dtype)
    sums_triton.norm_sums(rows, rows, empty(8, 1024), empty(8, 1024), empty(8))
    two = sums_triton.SumLaunch(rows.shape, rows.device)  # the second of two kernels, where one does not do it all
    two.finish(empty(*two.room), rows, empty(8), empty(8, 2, 768), empty(4, 768))
    if not few:
        sums_triton.row_sums(empty(8, 100, 30, dtype=dtype))


def embedding(dtype: torch.dtype, few: bool) -> None:
    ids = torch.empty(8, 1024, dtype=torch.int64, device="meta")
    for c in (None,) if few else (None, empty(8)):
        embedding_square_triton.embedding_square(ids, empty(8, 1024, 768, dtype=dtype), 50304, c)


def gemm(dtype: torch.dtype, few: bool) -> None:
    """Shapes of a GPT, of odd sizes and of few rows; the configuration of each, and what the tuner would try."""
    shapes = (8, 1024, 3072, 768), (8, 100, 71, 33), (8, 1024, 50304, 768), (64, 16, 1024, 64), (16, 8, 1152, 48)
    for kappa, rows, m, n in shapes[:2] if few else shapes:
        G, X = empty(kappa, rows, m, dtype=dtype), empty(kappa, rows, n, dtype=dtype)
        gemm_square_triton.gemm_square(G, X, empty(kappa), into=into(m, n, slots=rows == 100))
        gemm_square_triton.even_rows(G)
        if not few:
            gemm_square_triton.gemm_square(G, X)
            found = gemm_square_triton.candidates(m, n, rows, dtype)
            for config in {(c.bm, c.bn, c.bk, c.stages): c for c in found}.values():
                gemm_square_triton.gemm_square(G, X, config=config)


LAYERS = [  # images, input channels, output channels, side, taps, stride, channel groups
    (8, 256, 256, 14, 3, 1, 1),
    (8, 3, 64, 224, 7, 2, 1),
    (8, 32, 32, 28, 3, 1, 32),
    (8, 96, 96, 56, 7, 1, 96),
    (25, 64, 128, 32, 3, 1, 1),
    (8, 128, 128, 56, 3, 2, 1),
    (8, 256, 512, 28, 1, 2, 1),
    (8, 512, 128, 7, 1, 1, 1),
    (8, 128, 128, 28, 3, 1, 32),
    (1, 20, 10, 9, 3, 1, 1),
]


def conv(dtype: torch.dtype, few: bool) -> None:
    """Layers of residual, depthwise and grouped networks: each way there is to them, first and last of its kind."""
    for images, inner, out, side, taps, stride, groups in LAYERS[:3] if few else LAYERS:
        padding = taps // 2
        high = (side + 2 * padding - taps) // stride + 1
        weight = (out, inner // groups, taps, taps)
        geo = Geometry(weight, (stride,) * 2, (padding,) * 2, (1, 1), False, (0, 0), groups)
        G, X = empty(8, images, out, high, high, dtype=dtype), empty(8, images, inner, side, side, dtype=dtype)
        found = [c for c in ways.candidates(G, X, geo) if c.way not in ("library", "product")]  # others' kernels
        first, last = {c.way: c for c in reversed(found)}, {c.way: c for c in found}
        some = found[: 2 if groups == inner else 1]  # two kernels for depthwise ones
        for i, config in enumerate(dict.fromkeys(some if few else [*first.values(), *last.values()])):
            c = empty(8) if i % 2 else None
            plan = ways.plan_of(G.flatten(0, 1), X.flatten(0, 1), geo, 8, config=config)
            target = into(*weight) if i == 0 and plan.folds(empty(*weight)) else None
            ways.conv_square(G, X, geo, c, into=target, config=config)


PARTS = (adam, batch_norm, sums, embedding, gemm, conv)
CASES = [  # dtype, whether float32 may be multiplied in tf32, whether untuned configurations are enough
    (torch.bfloat16, False, False),
    (torch.float16, False, True),
    (torch.float32, True, True),
    (torch.float32, False, True),
]


# --------------------------------------------------------------------------- what was compiled


def spilled(compiled: Any) -> int:
    """Bytes of a thread's registers that went to memory."""
    if "amdgcn" in compiled.asm:
        return int(re.search(r"\.private_segment_fixed_size:\s*(\d+)", compiled.asm["amdgcn"])[1])
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        found = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return max(int(n) for n in re.findall(r"(?:STACK|LOCAL):(\d+)", found))


def launched() -> set[str]:
    """The kernels that no other kernel calls: those that the package must launch itself."""
    modules = [module for name, module in sys.modules.items() if name.startswith("invariant_adam.kernels.")]
    kernels = {k for m in modules for k in vars(m).values() if isinstance(k, JITFunction)}
    called = {k.fn.__globals__.get(word) for k in kernels for word in re.findall(r"\b(\w+)\(", k.src.partition(":")[2])}
    return {title(k) for k in kernels if not any(k is other for other in called)}


def title(kernel: Any) -> str:
    return f"{kernel.__module__.split('.')[2]}.{kernel.__name__}"


def main(name: str, few: bool, ahead: bool) -> None:
    model = MODELS[name]
    driver.set_active(Elsewhere(model.target))
    chip.of = lambda device: model.chip
    launch = JITFunction.run
    compiled = {}

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        made = launch(kernel, *args, grid=grid, warmup=True, **options)
        if made.hash not in compiled:
            compiled[made.hash] = kernel
            how = {k: v for k, v in options.items() if isinstance(v, int | str)}
            told = {"kernel": title(kernel), "dtype": str(dtype), "options": how}
            told |= {"shared": made.metadata.shared, "spilled": spilled(made)}
            print(json.dumps(told), flush=True)
        return made

    threads = Counter()
    make_ir = ASTSource.make_ir

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        threads[threading.current_thread() is threading.main_thread()] += 1
        return make_ir(self, *args, **kwargs)

    ASTSource.make_ir = counted
    for dtype, tf32, some in CASES[:1] if few else CASES:
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = tf32
        if ahead:
            noted = Serving.noted = []
            Serving.rehearsing = threading.get_ident()
            for part in PARTS:
                part(dtype, few or some)
            Serving.noted = None
            compile_all([each._replace(device=-1) for each in noted], lambda what: None)
        JITFunction.run = run
        for part in PARTS:
            part(dtype, few or some)
        JITFunction.run = launch
    missing = launched() - {title(kernel) for kernel in compiled.values()}
    print(json.dumps({"never": sorted(missing), "main": threads[True], "others": threads[False]}))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        main(sys.argv[1], "few" in sys.argv[2:], "ahead" in sys.argv[2:])

"""Invariant Adam's passes over memory on a CPU, in C: each reads and writes every element once.

`library` compiles `native.c` where the machine has a C compiler: once, in less than a second, at the first fold or
step, never at an import. The result is kept on disk, by source, compiler and processor (`INVARIANT_ADAM_CACHE` names
another folder). Where there is no compiler, or `INVARIANT_ADAM_NATIVE=0` is set, `torch` serves instead, and nobody is
told: the result is the same.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from array import array
from collections.abc import Sequence
from functools import cache
from itertools import chain
from operator import attrgetter
from pathlib import Path

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ..tuning import folder
from .torch import Factors, Tensors, lie_alike, limit_of

SOURCE = Path(__file__).with_name("native.c")
# IEEE arithmetic, but no errno and no traps, which nobody reads and which keep √ out of vectors.
FLAGS = ("-std=gnu11", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fPIC")
_NAMES = {torch.float32: "pass_float", torch.float64: "pass_double"}
_GRAIN = 1 << 15  # elements that are worth a thread, as in torch


@cache
def library() -> ctypes.CDLL | None:
    """The compiled passes; None where they cannot be had."""
    if os.environ.get("INVARIANT_ADAM_NATIVE", "1") == "0" or platform.system() != "Linux":
        return None
    compiler = shutil.which(os.environ.get("CC") or "cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    try:
        return _built(compiler)
    except (OSError, subprocess.SubprocessError):  # a folder that cannot be written, an old compiler
        return None


def _built(compiler: str) -> ctypes.CDLL:
    """Load the library of this source, compiler and processor, built now if need be."""
    found = os.stat(compiler)
    version = f"{os.path.realpath(compiler)} {found.st_size} {found.st_mtime_ns} {' '.join(FLAGS)}".encode()
    key = hashlib.sha256(SOURCE.read_bytes() + version + _processor()).hexdigest()[:16]
    file = folder() / f"adam-{key}.so"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent) as made:
            _compile(compiler, Path(made))
            os.replace(Path(made, "adam.so"), file)  # whole at any time, whoever else builds it
    return _load(file)


def _compile(compiler: str, made: Path) -> None:
    """Compile into `made`: with threads if torch's own library of threads takes them, else without."""
    for threads in (["-fopenmp"], []):
        # Not linked to a library of threads: a second one beside torch's would have threads of its own.
        for step in (
            [*FLAGS, *threads, "-c", str(SOURCE), "-o", "adam.o"],
            ["-shared", "adam.o", "-lm", "-o", "adam.so"],
        ):
            subprocess.run([compiler, *step], cwd=made, capture_output=True, timeout=120, check=True)
        try:
            _load(made / "adam.so")
            return
        except OSError:
            if not threads:
                raise


def _load(file: Path) -> ctypes.CDLL:
    loaded = ctypes.CDLL(str(file), mode=os.RTLD_NOW)  # a missing symbol is an error here, not at the first use
    for name in _NAMES.values():
        function = getattr(loaded, name)
        function.restype = ctypes.c_int64
        function.argtypes = [ctypes.c_int64, *[ctypes.c_void_p] * 7, ctypes.c_int]
    return loaded


def _processor() -> bytes:
    """What `-march=native` depends on: machines that share a folder may differ."""
    lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    kinds = (b"flags", b"Features", b"model name", b"CPU part", b"isa")
    return b"".join(sorted({line for line in lines if line.startswith(kinds)})) + platform.machine().encode()


_dtype = attrgetter("dtype")


def serves(tensors: Tensors, *others: Tensors) -> bool:
    """Whether these passes take the lists: all of one dtype, float32 or float64, dense and laid out alike."""
    dtypes = set(map(_dtype, chain(tensors, *others)))
    return len(dtypes) == 1 and dtypes <= _NAMES.keys() and lie_alike(tensors, *others) and library() is not None


def fold(
    grads: Tensors, squares: Tensors | None, exp_avgs: Tensors, exp_avg_sqs: Tensors, *,
    keep: Factors, gain: Factors, count: Tensor, slots: Tensor | None = None,
) -> None:  # fmt: skip
    """See `torch.fold`; what is left out stays in `grads`."""
    _run(None, grads, squares, exp_avgs, exp_avg_sqs, (*keep, *gain, 0.0, 0.0, 0.0), slots, count)


def step(
    params: Tensors, exp_avgs: Tensors, exp_avg_sqs: Tensors, *,
    size: float, eps: float, decay: float, slots: Tensor | None = None,
) -> None:  # fmt: skip
    """See `torch.step`."""
    _run(params, None, None, exp_avgs, exp_avg_sqs, (1.0, 1.0, 0.0, 0.0, size, eps, decay), slots)


def fold_step(
    params: Tensors, grads: Tensors, squares: Tensors | None, exp_avgs: Tensors, exp_avg_sqs: Tensors, *,
    keep: Factors, gain: Factors, size: float, eps: float, decay: float, count: Tensor, slots: Tensor | None = None,
) -> None:  # fmt: skip
    """See `torch.fold_step`: one pass over memory here."""
    _run(params, grads, squares, exp_avgs, exp_avg_sqs, (*keep, *gain, size, eps, decay), slots, count)


def _run(
    params: Tensors | None, grads: Tensors | None, squares: Tensors | None, exp_avgs: Tensors, exp_avg_sqs: Tensors,
    scalars: Sequence[float], slots: Tensor | None, count: Tensor | None = None,
) -> None:  # fmt: skip
    if slots is not None:
        scalars = slots.tolist()[:7]
    dtype = exp_avgs[0].dtype
    sizes = array("q", map(Tensor.numel, exp_avgs))
    lists = [xs and array("Q", map(Tensor.data_ptr, xs)) for xs in (params, grads, squares, exp_avgs, exp_avg_sqs)]
    threads = max(1, min(torch.get_num_threads(), sum(sizes) // _GRAIN))
    left_out = getattr(library(), _NAMES[dtype])(
        len(sizes), *[xs and xs.buffer_info()[0] for xs in (sizes, *lists)],
        (ctypes.c_double * 8)(*scalars, limit_of(dtype)), threads,
    )  # fmt: skip
    if left_out:
        assert count is not None
        count += left_out
    # As every function of torch that writes in place says, so that a graph that still needs the old values is refused.
    increment_version([*exp_avgs, *exp_avg_sqs, *(params or ())] if grads is not None else params or ())

"""Launches that cost the host little: a layer's kernels run for microseconds, and so must their start."""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from threading import get_ident
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.runtime import JITFunction
from triton.runtime.jit import MockTensor

from . import Serving

log = logging.getLogger(__name__.partition(".")[0])

if os.environ.get("INVARIANT_ADAM_TRITON") == "0":  # all modules of kernels import this one
    raise ImportError("INVARIANT_ADAM_TRITON=0 leaves Triton's kernels out: plain torch takes their place")

# The versions of Triton whose compiled kernels `Launch` starts; others start them themselves. So does Triton on AMD's
# chips, where it compiles by the size of a tensor's memory too, which `kind` does not look at.
DIRECT = (3, 6) <= tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 10) and not torch.version.hip

# What Triton's driver asks of torch, without its ways there; a build of torch without CUDA starts nothing.
_BUILT = torch.backends.cuda.is_built()
current_device: Callable[[], int] = torch._C._cuda_getDevice if _BUILT else lambda: -2  # not the CPU either
current_stream: Callable[[int], int] = torch._C._cuda_getCurrentRawStream if _BUILT else lambda device: 0
_capturing: Callable[[], bool] = torch.cuda.is_current_stream_capturing if _BUILT else lambda: False
_runtime = triton.knobs.runtime


class Launch:
    """A kernel with its grid and all arguments but pointers and floats; a call gives those, in order, and starts it.

    At every launch Triton works out from all arguments which compiled code they need (types, numbers that are 1 or
    multiples of 16, aligned addresses, constants), which takes longer than small kernels run. Here it does so once for
    each kind of call. The kind is all that may differ between two calls: the device, and of each argument its dtype and
    whether its address is a multiple of 16, or that it is a float, or its value.

    Args:
        kernel: a function made by `triton.jit`.
        grid: blocks, in up to three dimensions.
        fixed: arguments by name, constants, and options such as `num_warps`.
    """

    def __init__(self, kernel: Any, grid: tuple[int, ...], **fixed: Any) -> None:
        self.kernel, self.grid, self.fixed = kernel, grid, fixed
        names = kernel.arg_names
        self.given = [name for name in names if name not in fixed]
        self.places = [names.index(name) for name in self.given]
        self.values = [fixed.get(name) for name in names]
        self.blocks = (*grid, 1, 1)[:3]
        self.direct = DIRECT and isinstance(kernel, JITFunction)  # not where it is interpreted
        self.compiled: dict[tuple[Any, ...], Any] = {}

    def __call__(self, *args: Any) -> None:
        """Start the kernel on the current stream of the first argument's device; that is a tensor, or its tiles."""
        if Serving.noted is not None and Serving.rehearsing == get_ident():
            Serving.noted.append(Noted(self, _home(args), [outline(a) for a in args]))
            return
        first = args[0]
        device = (first if isinstance(first, Tensor) else first.base).get_device()
        # The third is true for a part of a model on another GPU that is stepped from here.
        if not self.direct or _watched() or device != current_device():
            self._by_triton(args)
            return
        key, values = kind(args)
        known = (device, *key)
        found = self.compiled.get(known)
        if found is None:
            compiled = self._by_triton(args)
            own = (compiled.function, compiled.packed_metadata, None, None, None)  # nobody watches: no hooks
            self.compiled[known] = compiled.run, own, compiled
            return
        every = self.values.copy()
        for place, value in zip(self.places, values):  # noqa: B905 - as many, or Triton would have refused the first
            every[place] = value
        run, own, _ = found
        run(*self.blocks, current_stream(device), *own, *every)

    def _by_triton(self, args: tuple[Any, ...]) -> Any:
        if waiting:
            noted = waiting.copy()
            waiting.clear()
            try:
                compile_all(noted)
            except Exception as problem:  # it only saves time: this launch says itself what is wrong with it
                log.debug("the kernels of a graph are compiled one by one: %s", problem)
        where = _home(args)
        # Triton starts kernels on the device that is current, wherever their tensors are.
        with torch.cuda.device(where) if where >= 0 else nullcontext():
            return self.kernel[self.grid](**dict(zip(self.given, args, strict=True)), **self.fixed)


class Noted(NamedTuple):
    """A launch that a rehearsal has put down."""

    launch: Launch
    device: int
    args: list[Any]  # as Triton compiles by them, without memory


class _Odd(MockTensor):  # type: ignore[misc]
    """A tensor whose address is no multiple of 16, as Triton sees it."""

    @staticmethod
    def data_ptr() -> int:
        return 8


def outline(arg: Any) -> Any:
    """An argument as Triton compiles by it, without its memory."""
    if isinstance(arg, Tensor):
        return (_Odd if arg.data_ptr() & 15 else MockTensor)(arg.dtype)
    if hasattr(arg, "block_shape"):
        tiles = object.__new__(type(arg))
        tiles.__dict__.update(arg.__dict__, base=MockTensor(arg.base.dtype))
        return tiles
    return arg


SIDE_BY_SIDE = hasattr(triton, "AsyncCompileMode")  # whether this version of Triton compiles several at once
waiting: list[Noted] = []  # launches of graphs that are traced, and not compiled yet
THREADS = 16  # that compile at most; Triton's compiler leaves Python's lock for nearly all of its time


def compile_all(noted: list[Noted], tell: Callable[[str], None] = lambda what: None) -> None:
    """Compile the kernels of launches side by side, so that the launches find them.

    A kernel that does not compile says so when it is started.
    """
    by_device: dict[int, list[Noted]] = defaultdict(list)
    for each in noted:
        if isinstance(each.launch.kernel, JITFunction):
            by_device[each.device].append(each)
    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as pool:
        for device, some in by_device.items():
            tell(f"the kernels of its {len(some)} launches are compiled or loaded")
            where = torch.cuda.device(device) if device >= 0 else nullcontext()
            with where, triton.AsyncCompileMode(pool, ignore_errors=True):
                for launch, _, args in some:
                    given = dict(zip(launch.given, args, strict=True))
                    launch.kernel.run(grid=launch.grid, warmup=True, **given, **launch.fixed)


def kind(args: tuple[Any, ...]) -> tuple[list[Any], list[Any]]:
    """What Triton compiles by (or more), and the arguments with addresses in place of tensors."""
    key: list[Any] = []
    values: list[Any] = []
    for a in args:
        if isinstance(a, Tensor):
            value = a.data_ptr()
            key.append((a.dtype,) if value & 15 else a.dtype)
            values.append(value)
            continue
        if a is None or type(a) is float:
            key.append(type(a))
        elif hasattr(a, "block_shape"):
            key.append((a.base.dtype, *a.block_shape))
        else:
            key.append((type(a), a))
        values.append(a)
    return key, values


def _home(args: tuple[Any, ...]) -> int:
    """The device of the first argument, −1 for the CPU."""
    first = args[0]
    return (first if isinstance(first, Tensor) else first.base).get_device()


def _watched() -> bool:
    """Whether Triton calls someone at launches, perhaps a profiler."""
    return bool(_runtime.launch_enter_hook.calls or _runtime.launch_exit_hook.calls)


_COUNTERS = 4096
_counters: dict[tuple[int, int], Tensor] = {}  # by device and stream


def keep_counters(device: torch.device) -> None:
    """Have `counters` of the current stream at hand from now on.

    Not to be called where memory belongs to a graph of torch.compile: what is kept outlives it.
    """
    where = device.index if device.type == "cuda" else -1
    key = where, current_stream(where)
    if key not in _counters and not _capturing():
        _counters[key] = torch.zeros(_COUNTERS, dtype=torch.int32, device=device)


def counters(like: Tensor, number: int) -> Tensor:
    """So many zeros or more, on the device of `like`, for a kernel that leaves zeros behind.

    Kernels of one stream take turns with them. A captured kernel has its own: graphs may be replayed side by side.
    """
    device = like.get_device()
    found = _counters.get((device, current_stream(device)))
    if found is None or number > _COUNTERS or _capturing():
        return torch.zeros(number, dtype=torch.int32, device=like.device)
    return found


class Tiles:
    """How the hardware's tile loads see tensors of one shape and strides.

    Args:
        tensor: one of them, its address a multiple of 16.
        block: the shape of a tile.
    """

    def __init__(self, tensor: Tensor, block: list[int]) -> None:
        from triton.tools.tensor_descriptor import TensorDescriptor

        self.kind, self.fields = TensorDescriptor, vars(TensorDescriptor.from_tensor(tensor, block)) | {"base": None}

    def of(self, tensor: Tensor) -> Any:
        """The descriptor of one of them; only its address is asked for."""
        descriptor = object.__new__(self.kind)  # what its __init__ checks has been checked
        descriptor.__dict__.update(self.fields, base=tensor)
        return descriptor


def cdiv(a: int, b: int) -> int:
    """⌈a/b⌉ on the host, where Triton's own takes 5 µs a call.

    >>> cdiv(7, 3), cdiv(6, 3)
    (3, 2)
    """
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n.

    >>> next_power_of_2(1), next_power_of_2(5), next_power_of_2(8)
    (1, 8, 8)
    """
    return 1 << (n - 1).bit_length()

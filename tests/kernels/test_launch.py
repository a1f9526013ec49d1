"""Direct launches: what finds compiled code again must tell apart whatever Triton compiles apart."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from invariant_adam import kernels

launch = pytest.importorskip("invariant_adam.kernels.launch")
triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

MEMORY = torch.zeros(64, dtype=torch.float64)  # its address is a multiple of 64
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int64, torch.uint8)


@triton.jit
def add(x, y, out, n, scale, shift, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    total = tl.load(x + at, mask=at < n, other=0.0) * scale
    if y is not None:
        total += tl.load(y + at, mask=at < n, other=0.0) + shift
    tl.store(out + at, total, mask=at < n)


def specialised(args):
    """What Triton itself compiles by, on a GPU of this kind."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import JITFunction, create_function_from_signature

    def kernel(a):
        pass

    function = JITFunction(kernel)
    binder = create_function_from_signature(
        function.signature, function.params, make_backend(GPUTarget("cuda", 90, 32))
    )
    return binder(*args)[1]


def tensors():
    return st.builds(
        lambda dtype, skip: MEMORY.view(dtype)[skip : skip + 8], st.sampled_from(DTYPES), st.integers(0, 9)
    )


def descriptors():
    def build(dtype, block, rows):
        return launch.Tiles(MEMORY.view(dtype)[: rows * 16].view(rows, 16), block).of(MEMORY.view(dtype))

    blocks = st.sampled_from([[1, 16], [2, 16], [2, 8]])
    return st.builds(build, st.sampled_from([torch.float32, torch.bfloat16]), blocks, st.integers(2, 3))


ARGUMENTS = st.one_of(
    tensors(),
    descriptors(),
    st.none(),
    st.booleans(),
    st.sampled_from([0.0, 1.0, 0.5, 1e30, -3.0]),
    st.sampled_from([0, 1, 2, 16, 17, 32, 2**31, 2**31 + 1, -1]),
)


@pytest.mark.skipif(not launch.DIRECT, reason="this Triton starts its kernels itself")
@given(st.lists(ARGUMENTS, min_size=40, max_size=40))  # so many that some are of one kind
def test_the_kind_of_a_launch_tells_apart_what_triton_compiles_apart(args):
    found = {}
    for a in args:
        (key,), (value,) = launch.kind((a,))
        compiled = specialised((a,))
        assert found.setdefault(key, compiled) == compiled
        assert value == a.data_ptr() if isinstance(a, torch.Tensor) else value is a


@given(ARGUMENTS)
def test_the_outline_of_an_argument_is_compiled_as_the_argument(arg):
    """Without its memory."""
    outline = launch.outline(arg)
    assert specialised((outline,)) == specialised((arg,))
    held = outline.base if hasattr(outline, "base") else outline
    assert not isinstance(held, torch.Tensor)


def test_tiles_are_those_that_triton_describes():
    x = MEMORY.view(torch.float32)[:64].view(4, 16)
    described = triton.tools.tensor_descriptor.TensorDescriptor.from_tensor(x, [2, 16])
    assert vars(launch.Tiles(x, [2, 16]).of(x)) == vars(described)
    with pytest.raises(AssertionError, match="16-byte"):
        launch.Tiles(MEMORY.view(torch.float32)[1:65].view(4, 16), [2, 16])


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("device", [pytest.param(DEVICE, marks=[pytest.mark.gpu] if DEVICE == "cuda" else [])])
def test_a_launch_computes_what_its_arguments_say_each_time(device):
    n = 100
    start = launch.Launch(add, (2,), n=n, SIZE=64, num_warps=1)
    memory = torch.randn(3, n + 8, device=device)
    for skip in (0, 0, 1, 4, 1, 0):  # aligned and not, found again and not
        for dtype in (torch.float32, torch.float64):
            for scale, shift in ((1.0, 0.0), (2.5, 1.0)):
                for has_y in (True, False):
                    x, y = (memory[i, skip : skip + n].to(dtype, copy=skip == 0) for i in (0, 1))
                    out = torch.zeros(n + 8, device=device, dtype=dtype)[skip : skip + n]
                    start(x, y if has_y else None, out, scale, shift)
                    torch.testing.assert_close(out, x * scale + (y + shift if has_y else 0))


@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")
@pytest.mark.gpu
def test_launches_are_shown_to_who_watches_them():
    x, out = torch.randn(8, device="cuda"), torch.empty(8, device="cuda")
    start = launch.Launch(add, (1,), n=8, SIZE=16)
    start(x, None, out, 1.0, 0.0)
    seen = []
    triton.knobs.runtime.launch_enter_hook.add(seen.append)
    try:
        start(x, None, out, 2.0, 0.0)
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(seen.append)
    assert len(seen) == 1
    assert torch.equal(out, 2 * x)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.gpu
def test_a_launch_runs_where_its_tensors_are():
    start = launch.Launch(add, (1,), n=8, SIZE=16)
    for device in ("cuda:0", "cuda:1", "cuda:1", "cuda:0"):
        x, out = torch.randn(8, device=device), torch.empty(8, device=device)
        start(x, None, out, 2.0, 0.0)
        assert torch.equal(out, 2 * x)
        assert torch.cuda.current_device() == 0


def test_a_rehearsal_puts_down_launches_of_its_own_thread_alone(monkeypatch):
    """Another thread that trains meanwhile loses no launch; and one rehearsal may be inside of another."""
    monkeypatch.setattr(kernels, "_launch", lambda: launch)  # which serves no CPU otherwise
    x, out = torch.ones(8), [torch.zeros(8) for _ in range(4)]
    start = launch.Launch(add, (1,), n=8, SIZE=8)

    def run(to):
        start(x, None, to, 2.0, 0.0)

    with kernels.rehearsal():
        run(out[0])
        thread = threading.Thread(target=run, args=(out[1],))
        thread.start()
        thread.join()
        with kernels.rehearsal():
            run(out[2])
        run(out[3])
    assert [bool(t.any()) for t in out] == [False, True, False, False]
    run(out[0])
    assert torch.equal(out[0], 2 * x)

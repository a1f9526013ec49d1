"""The passes over memory: values, dtypes, and what never reaches a moment."""

from __future__ import annotations

import importlib
import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from invariant_adam import kernels
from invariant_adam.kernels import adam
from invariant_adam.kernels.adam import native as adam_native
from invariant_adam.kernels.adam import torch as adam_torch
from invariant_adam.kernels.ops import operator

try:
    from invariant_adam.kernels.adam import triton as adam_triton
except ImportError:
    adam_triton = None

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(), (1,), (3, 5), (2, 3, 4, 4), (0,)]


compiled = pytest.mark.skipif(adam_native.library() is None, reason="no C compiler")


def tensors(dtype, device, seed, positive=False):
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(s, generator=generator).to(device, dtype) for s in SHAPES]
    made[3] = made[3].contiguous(memory_format=torch.channels_last)
    return [x.abs() for x in made] if positive else made


# The plain-torch code, the code in C, and the Triton code: on the GPU, or interpreted on the CPU where there is none.
TWINS = [
    pytest.param(adam_torch, "cpu", id="torch-cpu"),
    pytest.param(adam_native, "cpu", id="native", marks=compiled),
    pytest.param(adam_torch, "cuda", id="torch-cuda", marks=pytest.mark.gpu),
]
if adam_triton is not None and torch.cuda.is_available():
    TWINS.append(pytest.param(adam_triton, "cuda", id="triton-cuda", marks=pytest.mark.gpu))
elif adam_triton is not None:
    TWINS.append(pytest.param(adam_triton, "cpu", id="triton-interpreted"))


def left_to_torch(kernels, *lists):
    """Whether these kernels have no such dtypes: Triton's moments are float32, C has all tensors in one dtype."""
    moments = lists[-1][0].dtype
    refused = {adam_torch: False, adam_triton: moments == torch.float64, adam_native: lists[0][0].dtype != moments}
    if kernels is not adam_torch:
        assert kernels.serves(*lists) != refused[kernels]
    return refused[kernels]


@pytest.mark.parametrize(("kernels", "device"), TWINS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("squares", [False, True])
@pytest.mark.parametrize("one", [False, True])
def test_fold(kernels, device, dtype, squares, one):
    wide = torch.promote_types(dtype, torch.float32)
    lists = [tensors(dtype, device, 0), tensors(wide, device, 1), tensors(wide, device, 2, positive=True)]
    lists.append(tensors(wide, device, 3, positive=True))
    g, m, v, sq = ([x[3]] for x in lists) if one else lists
    if not squares:
        sq = None
    if left_to_torch(kernels, g, m, v):
        return
    keep, gain = (0.9, 0.99), (-0.1, 0.02)
    expected = [
        (
            keep[0] * b + gain[0] * a.to(wide),
            keep[1] * c + gain[1] * (a.to(wide).square() if d is None else d),
        )
        for a, b, c, d in zip(g, m, v, sq or [None] * len(g), strict=True)
    ]
    for i, a in enumerate(g):  # one element of each 4-d tensor is infinite: left out of both moments, and counted
        if a.dim() == 4:
            at = (1, 2, 3, 0)
            a[at] = math.inf
            expected[i][0][at], expected[i][1][at] = keep[0] * m[i][at], keep[1] * v[i][at]
    count = torch.zeros((), dtype=torch.int64, device=device)
    kernels.fold(g, sq, m, v, keep=keep, gain=gain, count=count)
    assert count.item() == 1
    for (em, ev), fm, fv in zip(expected, m, v, strict=True):
        torch.testing.assert_close(fm, em)
        torch.testing.assert_close(fv, ev)


@pytest.mark.parametrize(("kernels", "device"), TWINS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_step(kernels, device, dtype):
    wide = torch.promote_types(dtype, torch.float32)
    w, m, v = tensors(dtype, device, 0), tensors(wide, device, 1), tensors(wide, device, 2, positive=True)
    if left_to_torch(kernels, w, m, v):
        return
    expected = [(0.5 * a.to(wide) - 0.25 * b / (c.sqrt() + 0.1)).to(dtype) for a, b, c in zip(w, m, v, strict=True)]
    before = [x.clone() for x in (*m, *v)]
    kernels.step(w, m, v, size=0.25, eps=0.1, decay=0.5)
    torch.testing.assert_close(w, expected)
    assert all(torch.equal(a, b) for a, b in zip(before, (*m, *v), strict=True))


SCALARS = {"keep": (0.9, 0.99), "gain": (-0.1, 0.02), "size": 0.25, "eps": 0.1, "decay": 0.5}


def slots_of(dtype, device, gain=SCALARS["gain"]):
    scalars = (*SCALARS["keep"], *gain, SCALARS["size"], SCALARS["eps"], SCALARS["decay"], math.nan)
    return torch.tensor(scalars, dtype=dtype, device=device)


@pytest.mark.parametrize(("kernels", "device"), TWINS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("squares", [False, True])
@pytest.mark.parametrize("slotted", [False, True])
@pytest.mark.parametrize("gain", [(-0.1, 0.02), (0.1, 0.01)], ids=["any gain", "an average, as Adam's"])
def test_fold_step_is_fold_then_step(kernels, device, dtype, squares, slotted, gain):
    wide = torch.promote_types(dtype, torch.float32)
    w, g, m = tensors(dtype, device, 0), tensors(dtype, device, 1), tensors(wide, device, 2)
    if left_to_torch(kernels, w, m):
        return
    v, sq = tensors(wide, device, 3, positive=True), tensors(wide, device, 4, positive=True) if squares else None
    g[2][1, 1], g[3][0, 1, 2, 3] = math.nan, math.inf
    lists = [[x.clone() for x in xs] if xs is not None else None for xs in (w, g, sq, m, v)]
    folding = {"keep": SCALARS["keep"], "gain": gain}
    stepping = {key: SCALARS[key] for key in ("size", "eps", "decay")}
    counts = [torch.zeros((), dtype=torch.int64, device=device) for _ in range(2)]
    adam_torch.fold(g, sq, m, v, **folding, count=counts[0])
    adam_torch.step(w, m, v, **stepping)
    scalars, slots = {**SCALARS, "gain": gain}, None
    if slotted:  # the floats are those of another update
        slots = slots_of(wide, device, gain)
        scalars |= {"keep": (0.0, 0.0), "size": 7.0, "decay": 3.0}
    kernels.fold_step(*lists, **scalars, count=counts[1], slots=slots)
    assert counts[0].item() == counts[1].item() == 2
    for ours, theirs in zip((w, m, v), (lists[0], lists[3], lists[4]), strict=True):
        torch.testing.assert_close(theirs, ours)


@pytest.mark.parametrize(("kernels", "device"), TWINS)
@pytest.mark.parametrize("one", [False, True])
def test_scalars_in_slots_are_those_of_the_floats(kernels, device, one):
    sets = [[tensors(torch.float32, device, i, positive=i == 3) for i in range(4)] for _ in range(2)]
    if one:
        sets = [[[x[3]] for x in lists] for lists in sets]
    count, slots = torch.zeros((), dtype=torch.int64, device=device), slots_of(torch.float32, device)
    for (w, g, m, v), row in zip(sets, (None, slots), strict=True):
        factor = 1.0 if row is None else 5.0  # not to be looked at
        keep, gain = (tuple(factor * x for x in SCALARS[key]) for key in ("keep", "gain"))
        kernels.fold(g, None, m, v, keep=keep, gain=gain, count=count, slots=row)
        rest = {key: factor * SCALARS[key] for key in ("size", "eps", "decay")}
        kernels.step(w, m, v, **rest, slots=row)
    torch.testing.assert_close(*sets)


@operator(
    "fold_step(Tensor(a!)[] params, Tensor(b!)[] grads, Tensor(c!)[] squares, Tensor(d!)[] exp_avgs, "
    "Tensor(e!)[] exp_avg_sqs, float[] scalars, Tensor(f!) count) -> ()",
    lambda *_: None,
)
def fold_step_op(params, grads, squares, exp_avgs, exp_avg_sqs, scalars, count):
    keep1, keep2, gain1, gain2, size, eps, decay = scalars
    lists = (list(params), list(grads), list(squares) or None, list(exp_avgs), list(exp_avg_sqs))
    adam.fold_step(*lists, keep=(keep1, keep2), gain=(gain1, gain2), size=size, eps=eps, decay=decay, count=count)


def test_fold_step_is_an_operator(device):
    w, g, m, v = ([torch.rand(5, device=device)] for _ in range(4))
    expected = [[x.clone() for x in xs] for xs in (w, g, m, v)]
    count = torch.zeros((), dtype=torch.int64, device=device)
    scalars = slots_of(torch.float64, "cpu").tolist()[:7]
    adam_torch.fold_step(expected[0], expected[1], None, *expected[2:], **SCALARS, count=count)
    torch.ops.invariant_adam.fold_step(w, g, [], m, v, scalars, count)
    torch.testing.assert_close([w, m, v], [expected[0], *expected[2:]])


@pytest.mark.skipif(adam_triton is None, reason="Triton is not installed")
def test_triton_leaves_odd_layouts_to_torch():
    m = torch.zeros(4, 6)
    assert adam_triton.serves([m], [m], [m])
    assert not adam_triton.serves([m.t().contiguous().t()], [m], [m])  # other strides than the moments
    assert not adam_triton.serves([m[:, ::2]], [m[:, ::2]], [m[:, ::2]])  # holes
    one_tap = torch.zeros(6, 4, 1, 1)
    last = torch.zeros_like(one_tap).to(memory_format=torch.channels_last).as_strided((6, 4, 1, 1), (4, 1, 4, 4))
    assert one_tap.stride() != last.stride()  # and yet the same order in memory
    assert adam_triton.serves([one_tap], [last], [last])
    square = torch.zeros(4, 4, 2, 2)
    assert not adam_triton.serves([square], [square.to(memory_format=torch.channels_last)], [square])
    assert not adam_triton.serves([torch.zeros(25)[1:]], [torch.zeros(24)], [torch.zeros(24)])  # misaligned
    assert not adam_triton.serves([m.double()], [m.double()], [m.double()])


@given(st.lists(st.sampled_from([0.0, 1.0, -2.0, math.nan, math.inf, -math.inf, 1e30, -1e25, 1e10]), max_size=12))
def test_guard_leaves_out_just_what_would_poison_a_moment(values):
    g, count = torch.tensor(values), torch.tensor(0)
    adam_torch.guard([g], None, count)
    good = [math.isfinite(x) and abs(x) < 1.8e16 for x in values]
    assert g.tolist() == [x if ok else 0.0 for x, ok in zip(values, good, strict=True)]
    assert count.item() == len(values) - sum(good)


def test_guard_of_a_pair_leaves_out_both(device):
    g = torch.tensor([1.0, math.nan, 3.0], device=device)
    sq = torch.tensor([math.inf, 1.0, 9.0], device=device)
    count = torch.tensor(0, device=device)
    adam_torch.guard([g], [sq], count)
    assert (g.tolist(), sq.tolist(), count.item()) == ([0.0, 0.0, 3.0], [0.0, 0.0, 9.0], 2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_guard_on_any_device_and_dtype(dtype, device):
    g = torch.tensor([1.0, math.inf, math.nan, -1.0], device=device, dtype=dtype)
    count = torch.zeros((), dtype=torch.int64, device=device)
    adam_torch.guard([g], None, count)
    assert (g.tolist(), count.item()) == ([1.0, 0.0, 0.0, -1.0], 2)


def test_clip_matches_torch(device):
    ours = [torch.randn(4, 3, device=device), torch.randn(7, device=device)]
    params = [torch.nn.Parameter(torch.zeros_like(g)) for g in ours]
    for p, g in zip(params, ours, strict=True):
        p.grad = g.clone()
    torch.nn.utils.clip_grad_norm_(params, 0.3)
    torch.testing.assert_close(adam_torch.clip(ours, 0.3), [p.grad for p in params])
    small = [g * 0.01 for g in ours]
    torch.testing.assert_close(adam_torch.clip([g.clone() for g in small], 100.0), small, rtol=0, atol=0)
    # Of gradients divided by 8 the norm before the division counts.
    big = [torch.full((3,), 1.0, device=device)]
    assert torch.linalg.vector_norm(adam_torch.clip(big, 1.0, 8.0)[0]).item() == pytest.approx(1 / 8, rel=1e-4)


def test_clip_keeps_small_factors_of_half_precision(device):
    g = torch.full((4096,), 100.0, device=device, dtype=torch.float16)
    (clipped,) = adam_torch.clip([g], 1e-3)
    assert torch.linalg.vector_norm(clipped).item() == pytest.approx(1e-3, rel=1e-3)


def test_parts_cover_a_list_once():
    for sizes in ([0, 0], [5], [1 << 24, 3, 1 << 25, 0], []):
        fakes = [torch.empty(n, device="meta") for n in sizes]
        parts = list(adam_torch._parts(fakes)) if fakes else []
        assert [i for part in parts for i in range(part.start, part.stop)] == list(range(len(sizes)))


@pytest.mark.skipif(adam_triton is None or not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.gpu
def test_tables_that_another_stream_finds_are_there():
    """A model of the same sizes, on a stream that waits for nobody: runs of the lab are such."""
    sizes, streams = (4097, 12345, 777), [torch.cuda.Stream() for _ in range(2)]
    count = torch.zeros((), dtype=torch.int64, device="cuda")
    g, m, v = ([[torch.full((n,), x, device="cuda") for n in sizes] for _ in streams] for x in (2.0, 0.0, 0.0))
    torch.cuda.synchronize()
    for i, stream in enumerate(streams):
        with torch.cuda.stream(stream):
            if i == 0:
                torch.cuda._sleep(500_000_000)  # clock ticks: what follows on this stream waits
            adam_triton.fold(g[i], None, m[i], v[i], keep=(0.0, 0.0), gain=(1.0, 1.0), count=count)
    torch.cuda.synchronize()
    assert all((x == 2).all() for xs in m for x in xs)
    assert all((x == 4).all() for xs in v for x in xs)


@pytest.mark.parametrize(
    ("name", "operands"),
    [
        ("batch_norm", ("x", 2)),
        ("conv_square", ("x", "x", None, 2)),
        ("embedding_square", ("x", "x", 9)),
        ("gemm_square", ("x",)),
        ("sums", ("x",)),
    ],
)
def test_plain_torch_serves_where_it_is_asked_for(monkeypatch, name, operands):
    package = importlib.import_module(f"invariant_adam.kernels.{name}")
    monkeypatch.setattr(package, "fused", SimpleNamespace(serves=lambda *_: True))
    x = SimpleNamespace(is_cuda=True, shape=(2, 64, 8))
    operands = [x if operand == "x" else operand for operand in operands]
    assert package.takes_fused(*operands)
    with kernels.plain_torch():
        assert not package.takes_fused(*operands)
        with kernels.plain_torch():
            pass
        assert not package.takes_fused(*operands)
    assert package.takes_fused(*operands)

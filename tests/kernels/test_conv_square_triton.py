"""The fused weight gradient of convolutions and its square against float64, on the GPU or interpreted on the CPU."""

from __future__ import annotations

import copy
import json
import time
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import invariant_adam as ia
from invariant_adam.kernels import chip, tuning
from invariant_adam.kernels import conv_square as kernels
from invariant_adam.kernels.adam import Fold
from invariant_adam.kernels.conv_square import Geometry, conv_backward

twin = pytest.importorskip("invariant_adam.kernels.conv_square.triton")
ways = pytest.importorskip("invariant_adam.kernels.conv_square.ways")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
TOLERANCE = {torch.float16: 1e-2, torch.float32: 1e-5}
if DEVICE == "cuda":  # the interpreter multiplies bfloat16 as the integers it keeps them in
    TOLERANCE[torch.bfloat16] = 1e-2


@pytest.fixture(autouse=True)
def _exact_float32():
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


def operands(geo, kappa, images, size, dtype=torch.float32, channels_last=True):
    """Random G and X of a convolution, as κ groups of images."""
    out = [
        (s + 2 * p - d * (k - 1) - 1) // t + 1
        for s, p, d, k, t in zip(size, geo.padding, geo.dilation, geo.weight[2:], geo.stride, strict=True)
    ]
    shapes = ((geo.weight[0], *out), (geo.weight[1] * geo.groups, *size))
    format = torch.channels_last if channels_last else torch.contiguous_format
    return [
        torch.randn(kappa * images, *shape).to(DEVICE, dtype).contiguous(memory_format=format).unflatten(0, (kappa, -1))
        for shape in shapes
    ]


def expected(G, X, geo, c=None):
    each = []
    weight = torch.empty(geo.weight, dtype=torch.float64, device=DEVICE)
    for g, x in zip(G.double(), X.double(), strict=True):
        each.append(conv_backward(g, x, weight, geo, [False, True, False])[1])
    each = torch.stack(each)
    scale = 1 if c is None else c.double()[:, None, None, None, None]
    return each.sum(0), (scale * each.square()).sum(0)


def close(got, want, tolerance):
    return all((g.double() - w).norm() <= tolerance * w.norm() for g, w in zip(got, want, strict=True))


def geometry(weight, stride=(1, 1), padding=(1, 1), dilation=(1, 1), groups=1, channels_last=False):
    return Geometry(weight, stride, padding, dilation, False, (0, 0), groups, channels_last)


GEOMETRIES = [
    geometry((8, 8, 3, 3)),
    geometry((72, 64, 3, 3), channels_last=True),
    geometry((17, 5, 3, 2), (2, 1), (1, 0), (1, 2)),
    geometry((24, 72, 1, 1), (2, 2), (0, 0)),
    geometry((16, 3, 5, 5), (2, 2), (2, 2)),
    geometry((24, 4, 3, 3), (1, 1), (1, 1), (2, 2), groups=3),
    geometry((9, 1, 3, 3), (2, 2), groups=9, channels_last=True),
    geometry((12, 1, 3, 5), (1, 2), (2, 1), groups=6),
    geometry((16, 1, 3, 3), groups=16, channels_last=True),
    geometry((24, 4, 3, 3), groups=4, channels_last=True),
    geometry((20, 24, 1, 1), padding=(0, 0), channels_last=True),
    geometry((8, 3, 7, 7), (2, 2), (3, 3), channels_last=True),
    geometry((10, 2, 3, 4), (1, 3), (1, 2), (2, 1)),
    geometry((6, 1, 2, 3), (1, 4), (0, 0)),
    geometry((16, 64, 3, 3), channels_last=True),
]


def first_of_each_way(G, X, geo):
    """The ways of a convolution, each with its first configuration."""
    found = {}
    for config in ways.candidates(G, X, geo):
        found.setdefault(config.way, config)
    return found


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("geo", GEOMETRIES, ids=lambda g: "-".join(map(str, g.weight)))
@pytest.mark.parametrize(("weighted", "size"), [(False, (9, 7)), (True, (6, 8))])
def test_gradient_and_square(monkeypatch, geo, weighted, size, dtype):
    """Every way there is."""
    kappa = 3
    G, X = operands(geo, kappa, 2, size, dtype, channels_last=not weighted)
    c = torch.rand(kappa, dtype=torch.float64).to(DEVICE) if weighted else None
    want = expected(G, X, geo, c)
    plain = torch.empty
    for way, config in first_of_each_way(G, X, geo).items():
        monkeypatch.setattr(
            torch, "empty", lambda *a, **k: plain(*a, **k).fill_(torch.nan)
        )  # what is not written shows
        D, S = ways.conv_square(G, X, geo, c, config=config)
        monkeypatch.undo()
        assert D.dtype == S.dtype == torch.float32
        assert D.is_contiguous(memory_format=torch.channels_last if geo.channels_last else torch.contiguous_format)
        assert close((D, S), want, TOLERANCE[dtype]), way


def test_which_ways_there_are():
    def names(geo, size=(9, 7), dtype=torch.float16):
        return list(first_of_each_way(*operands(geo, 3, 2, size, dtype), geo))

    assert names(geometry((8, 16, 1, 1), padding=(0, 0))) == ["product", "unfold", "library"]
    assert names(geometry((8, 16, 1, 1), (2, 2), (0, 0))) == ["implicit", "product", "unfold", "library"]
    assert names(geometry((8, 3, 7, 7), (2, 2), (3, 3))) == ["packed", "implicit", "unfold", "library"]
    padded = ["padded"] if chip.of(torch.device(DEVICE)).tile_loads else []
    assert names(geometry((72, 64, 3, 3))) == ["implicit", *padded, "library"]
    assert names(geometry((72, 64, 3, 3)), (8, 8)) == ["implicit", "library"]
    assert names(geometry((24, 4, 3, 3), groups=3)) == ["implicit", "library"]
    assert names(geometry((24, 4, 3, 3), groups=4)) == ["implicit", "merged", "library"]
    assert names(geometry((8, 1, 3, 3), groups=8)) == ["window", "implicit", "merged", "library"]


def test_no_way_is_coarser_than_convolutions_may_be():
    """Products of matrices have a switch of their own for tf32."""
    geo = geometry((8, 16, 1, 1), padding=(0, 0))
    G, X = operands(geo, 3, 2, (9, 7))
    before = torch.backends.cuda.matmul.allow_tf32
    try:
        torch.backends.cuda.matmul.allow_tf32 = True
        assert "product" not in first_of_each_way(G, X, geo)
        torch.backends.cudnn.allow_tf32 = True
        assert "product" in first_of_each_way(G, X, geo)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.skipif(DEVICE == "cuda", reason="the library is not always the fastest there")
def test_the_fastest_way_is_found_and_kept(monkeypatch, tmp_path):
    """By the clock, over the interpreter: nothing is faster than the library."""
    monkeypatch.setenv("INVARIANT_ADAM_CACHE", str(tmp_path))
    monkeypatch.setenv("INVARIANT_ADAM_TUNE", "1")

    def seconds(function):
        start = time.perf_counter()
        function()
        return time.perf_counter() - start

    monkeypatch.setattr(ways.tuning, "best", partial(tuning.best, timer=seconds))
    ran = []
    monkeypatch.setattr(ways, "WAYS", {n: lambda t, n=n, w=w: ran.append(n) or w(t) for n, w in ways.WAYS.items()})
    geo = geometry((6, 3, 3, 3))
    G, X = operands(geo, 2, 2, (9, 7))
    for again in range(3):
        if again == 2:  # as a new process, that does not tune
            monkeypatch.delenv("INVARIANT_ADAM_TUNE")
            ways._plans.clear()
            tuning._load.cache_clear()
        assert close(ways.conv_square(G, X, geo), expected(G, X, geo), 1e-5)
        assert set(ran) == ({"library"} if again else {"packed", "implicit", "unfold", "library"})
        ran.clear()
    (file,) = tmp_path.iterdir()
    ((config,),) = (kept.values() for kept in json.loads(file.read_text()).values())
    assert "library" in config
    ways._plans.clear()
    tuning._load.cache_clear()


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("geo", GEOMETRIES, ids=lambda g: "-".join(map(str, g.weight)))
def test_every_way_is_captured(monkeypatch, tmp_path, geo):
    """A graph's replays see new operands; a shape that is new in a capture is not measured there."""
    monkeypatch.setenv("INVARIANT_ADAM_CACHE", str(tmp_path))
    tuning._load.cache_clear()
    ways._plans.clear()
    G, X = operands(geo, 3, 2, (9, 7))
    c = torch.rand(3).to(DEVICE)
    for way, config in first_of_each_way(G, X, geo).items():
        ways.conv_square(G, X, geo, c, config=config)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), monkeypatch.context() as patch:
            patch.setenv("INVARIANT_ADAM_TUNE", "1")
            made = ways.conv_square(G, X, geo, c, config=config)
            ways.best(G, X, geo, c)
        for t in (G, X):
            t.normal_()
        graph.replay()
        assert close(made, expected(G, X, geo, c), 1e-5), way
    ways._plans.clear()
    assert not list(tmp_path.iterdir())


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_tf32_by_the_switch_of_convolutions():
    torch.backends.cudnn.allow_tf32 = True
    geo = geometry((128, 128, 3, 3))
    G, X = operands(geo, 4, 8, (16, 16))
    with torch.backends.cudnn.flags(allow_tf32=False):
        want = expected(G, X, geo)
    assert close(ways.conv_square(G, X, geo), want, 1e-3)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize(
    ("out", "inner", "size", "kernel"),
    [
        (64, 64, 16, 3), (128, 64, 16, 3), (256, 128, 14, 3), (64, 64, 28, 3), (128, 128, 7, 3), (64, 64, 56, 3),
        (64, 3, 16, 3), (64, 3, 64, 7), (128, 64, 14, 1), (256, 128, 7, 1),
    ],
)  # fmt: skip
def test_every_candidate_is_right(out, inner, size, kernel, stride):
    """A configuration that a compiler gets wrong must not be offered."""
    geo = geometry((out, inner, kernel, kernel), (stride, stride), (kernel // 2,) * 2)
    G, X = operands(geo, 4, 8, (size, size), torch.bfloat16)
    want = expected(G, X, geo)
    for config in ways.candidates(G, X, geo):
        assert close(ways.conv_square(G, X, geo, config=config), want, 1e-2), config


@pytest.mark.parametrize(
    ("bk", "images", "size", "kernel", "stride", "padding", "dilation"),
    [
        (32, 3, (8, 8), 3, 1, 1, 1),  # half an image
        (64, 2, (8, 8), 3, 1, 1, 1),  # an image
        (64, 5, (4, 4), 3, 1, 1, 1),  # four images, and the one left
        (16, 2, (4, 32), 3, 1, 1, 1),  # half a row
        (16, 2, (3, 14), 3, 1, 1, 1),  # strips that stick out
        (16, 2, (5, 16), 3, 1, 0, 1),  # strips, no padding
        (32, 2, (10, 16), 3, 1, 2, 2),
        (16, 2, (16, 8), 3, 2, 1, 1),
        (32, 3, (8, 8), 1, 2, 0, 1),
        (16, 2, (12, 12), 5, 3, 2, 1),
    ],
)
def test_boxes_of_the_image(bk, images, size, kernel, stride, padding, dilation):
    geo = geometry((24, 16, kernel, kernel), (stride,) * 2, (padding,) * 2, (dilation,) * 2)
    G, X = operands(geo, 2, images, size, torch.float16)
    assert twin.boxed(geo, X)
    assert twin.box(bk, images, *G.shape[3:]) is not None
    config = twin.ConvConfig(64, 16, bk, 4, 3)
    want = expected(G, X, geo)
    for pieces in (0, 2):
        assert close(ways.conv_square(G, X, geo, config=config._replace(pieces=pieces)), want, 1e-2), pieces


@pytest.mark.parametrize(("pieces", "weighted"), [(2, False), (3, True), (5, False), (10, True), (15, False)])
@pytest.mark.slow
def test_pieces_add_up_to_the_whole_tile(pieces, weighted):
    geo = geometry((40, 20, 3, 3))
    G, X = operands(geo, 5, 3, (5, 5))
    c = torch.rand(5).to(DEVICE) if weighted else None
    config = ways.tiles(geo, (3, 5, 5), G.dtype)[0]._replace(pieces=pieces, bk=16)
    first, again = (ways.conv_square(G, X, geo, c, config=config) for _ in range(2))
    assert close(first, expected(G, X, geo, c), 1e-5)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@given(
    st.integers(1, 500), st.integers(1, 64), st.integers(1, 30000), st.sampled_from([(64, 64), (64, 128), (128, 128)])
)
def test_a_division_covers_all_groups(tiles, kappa, rows, shape):
    whole, size, parts = twin.divide(tiles, kappa, rows, twin.ConvConfig(*shape), 132)
    assert 0 <= whole <= tiles
    assert 1 <= size <= kappa
    assert (whole == tiles) == (size == kappa)
    assert (parts > 0) == (whole == 0 and size == 1 and kappa > 1)


@pytest.mark.parametrize(("way", "pieces"), [("implicit", 1), ("implicit", 2), ("implicit", 8), ("unfold", 0)])
@pytest.mark.parametrize("channels_last", [False, True])
def test_folds_into_moments(way, pieces, channels_last):
    geo = geometry((20, 8, 3, 3), channels_last=channels_last)
    G, X = operands(geo, 4, 2, (6, 6))
    X[2, 0, 3] = torch.nan  # a channel of the gradient: left out of both moments, and counted
    format = torch.channels_last if channels_last else torch.contiguous_format
    m, v = (torch.rand(geo.weight).to(DEVICE).contiguous(memory_format=format) for _ in range(2))
    keep, gain, count = (0.9, 0.99), (-0.5, 0.25), torch.zeros((), dtype=torch.int64, device=DEVICE)
    want = [
        a * old.double() + b * torch.nan_to_num(new, nan=0.0)
        for a, b, old, new in zip(keep, gain, (m, v), expected(G, X, geo), strict=True)
    ]
    config = first_of_each_way(G, X, geo)[way]._replace(pieces=pieces)
    assert ways.plan_of(G.flatten(0, 1), X.flatten(0, 1), geo, 4, config=config).folds(m)
    ways.conv_square(G, X, geo, into=Fold(m, v, keep, gain, count), config=config)
    assert close((m, v), want, 1e-5)
    assert count.item() == 20 * 9


@pytest.mark.parametrize("way", ["window", "implicit"])
@pytest.mark.parametrize("channels_last", [False, True])
def test_a_depthwise_pair_folds_into_moments(way, channels_last):
    geo = geometry((20, 1, 3, 5), (1, 2), (1, 2), groups=10, channels_last=channels_last)
    G, X = operands(geo, 4, 5, (7, 9))
    X[2, 0, 3] = torch.nan  # two channels of the gradient
    format = torch.channels_last if channels_last else torch.contiguous_format
    m, v = (torch.rand(geo.weight).to(DEVICE).contiguous(memory_format=format) for _ in range(2))
    count = torch.zeros((), dtype=torch.int64, device=DEVICE)
    want = [0.9 * m.double(), 0.99 * v.double()]
    for old, gain, new in zip(want, (-0.5, 0.25), expected(G, X, geo), strict=True):
        old += gain * torch.nan_to_num(new, nan=0.0)
    config = first_of_each_way(G, X, geo)[way]
    assert ways.plan_of(G.flatten(0, 1), X.flatten(0, 1), geo, 4, config=config).folds(m)
    ways.conv_square(G, X, geo, into=Fold(m, v, (0.9, 0.99), (-0.5, 0.25), count), config=config)
    assert close((m, v), want, 1e-5)
    assert count.item() == 2 * 15


@pytest.mark.parametrize(
    ("taps", "stride", "padding", "size"),
    [
        ((7, 7), (1, 1), (3, 3), (7, 7)),  # one step a row
        ((3, 3), (2, 2), (1, 1), (12, 18)),  # nine positions a row: two steps, and some wasted
        ((5, 5), (1, 1), (2, 2), (3, 3)),  # a window wider than the image
        ((2, 3), (1, 3), (0, 0), (6, 17)),  # no input is seen twice
        ((3, 4), (3, 1), (1, 0), (10, 26)),
    ],
)
@pytest.mark.parametrize(("channels", "images"), [(20, 9), (40, 2)])
def test_windows_slide_over_rows(taps, stride, padding, size, channels, images):
    geo = geometry((channels, 1, *taps), stride, padding, groups=channels)
    G, X = operands(geo, 3, images, size)
    config = first_of_each_way(G, X, geo)["window"]
    first, again = (ways.conv_square(G, X, geo, config=config) for _ in range(2))
    assert close(first, expected(G, X, geo), 1e-5)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    X[1, 0, 5, -1, -1] = torch.inf  # its products are not finite, and no other ones
    for got, want in zip(ways.conv_square(G, X, geo, config=config), expected(G, X, geo), strict=True):
        assert torch.equal(got.isfinite(), want.isfinite())


@pytest.mark.parametrize(("images", "size"), [(8, (1, 1)), (3, (1, 1)), (2, (2, 3))])
def test_a_product_of_few_rows(monkeypatch, images, size):
    """As in squeeze-and-excite blocks: fewer rows than the kernel takes at a time."""
    monkeypatch.setattr(ways.products, "fused", pytest.importorskip("invariant_adam.kernels.gemm_square.triton"))
    geo = geometry((24, 40, 1, 1), padding=(0, 0))
    G, X = operands(geo, 5, images, size)
    c = torch.rand(5).to(DEVICE)
    config = first_of_each_way(G, X, geo)["product"]
    plan = ways.Plan(geo, 5, images * size[0] * size[1], config)
    g, x = G.flatten(0, 1), X.flatten(0, 1)
    made = plan(g, x, c)
    assert [t.shape for t in made] == [geo.weight] * 2
    assert close(made, expected(G, X, geo, c), 1e-5)
    m, v = (torch.zeros(geo.weight, device=DEVICE) for _ in range(2))
    assert plan.folds(m)
    plan(g, x, c, Fold(m, v, (0.9, 0.99), (1.0, 1.0), torch.zeros((), dtype=torch.int64, device=DEVICE)))
    assert close((m, v), expected(G, X, geo, c), 1e-5)


@pytest.mark.filterwarnings("default")  # torch warns of itself while tracing
@pytest.mark.parametrize(
    ("compiled", "way"), [(False, None), (True, None), (False, "library"), (True, "library"), (False, "unfold")]
)
@pytest.mark.slow
def test_in_one_pass(monkeypatch, compiled, way):
    """Each way in a network, the pairs left and folded as they are made, against the loop."""
    monkeypatch.setattr(kernels, "fused", ways)
    monkeypatch.setattr(kernels, "takes_fused", lambda G, X, geo, kappa: kappa > 1 and ways.serves(G, X, geo))
    monkeypatch.setattr(ways, "_plans", {})
    if way is not None:

        def this_one(G, X, geo, c):
            first, *others = ways.candidates(G, X, geo)
            return next((config for config in others if config.way == way), first)

        monkeypatch.setattr(ways, "best", this_one)
    folded = []
    plain = ways.Plan.__call__

    def noted(plan, G, X, c=None, into=None):
        folded.append(into)
        return plain(plan, G, X, c, into)

    monkeypatch.setattr(ways.Plan, "__call__", noted)
    torch.manual_seed(0)
    first = nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, padding=1),
        nn.Tanh(),
        nn.Conv2d(8, 8, 3, groups=8),
        nn.Conv2d(8, 12, 2, groups=2),
        nn.Conv2d(12, 6, 1),
        nn.Flatten(1),
    )
    first = first.to(DEVICE).to(memory_format=torch.channels_last)
    models = [first, copy.deepcopy(first), copy.deepcopy(first)]
    opts = [ia.InvariantAdam(m.parameters(), lr=0.01, eps=1e-4, micro_batch_size=2) for m in models]
    runs = [torch.compile(m, backend="aot_eager") if compiled else m for m in models]
    for size in (6, 6) if compiled else (6, 5):
        x = torch.randn(size, 3, 9, 9).to(DEVICE).contiguous(memory_format=torch.channels_last)
        for run, into in ((runs[0], {}), (runs[1], {"into": opts[1]})):
            with ia.one_pass(run, 2, **into):
                run(x).square().mean().backward()
        for part in x.split(2):
            with opts[2].ragged(len(part)):
                models[2](part).square().mean().backward()
        for opt in opts:
            opt.step()
    assert any(into is not None for into in folded) == (way != "library")
    for other, opt in zip(models[:2], opts, strict=False):
        for p, q in zip(other.parameters(), models[2].parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
            for key in ("exp_avg", "exp_avg_sq"):
                torch.testing.assert_close(opt.state[p][key], opts[2].state[q][key], rtol=1e-4, atol=1e-7)

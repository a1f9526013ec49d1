"""The ways to a convolution's pair on a GPU, and which of them a convolution takes.

    implicit  the implicit GEMM of `triton`, or the sums of products of `depthwise`
    window    such sums for rows of taps that slide along rows of the image
    padded    the same on an output gradient with sides for tile loads, the next powers of two: see `box`
    packed    the same for few input channels: the taps of a row, neighbours in memory, become channels
    merged    the same for narrow channel groups, several as one: most products are not wanted, but fill the tiles
    unfold    the inputs of every output position side by side (im2col), then a product of matrices by the same kernel
    product   the same matrices by `gemm_square`, for one tap
    library   the library's weight gradient of each group, squared and added up

For one tap the matrices are the tensors themselves, or the pixels that a stride meets. The best way depends on the
shape and the chip: `tuning` measures the `candidates` and keeps the best; unmeasured, the first of them is taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import cast, chip, tuning
from .. import gemm_square as products
from ..adam import Fold
from ..launch import cdiv, next_power_of_2
from ..ops import FLOATS, operator, pair_of
from .depthwise import depthwise, slides
from .torch import Geometry, one_by_one
from .triton import ConvConfig, Task, box, boxed, implicit, pack

# Unfolded inputs are tried up to so many columns and bytes; wider ones cost more than the product.
UNFOLDED_COLUMNS = 256
UNFOLDED_BYTES = 512 << 20


def serves(G: Tensor, X: Tensor, geo: Geometry) -> bool:
    """Whether there are other ways than the library's: 2-d, not transposed, at most 32 bits a number and 2³¹ pixels."""
    if len(geo.stride) != 2 or geo.transposed or G.dtype not in FLOATS or not G.numel():
        return False
    return G.numel() // G.shape[-3] < 1 << 31 and X.numel() // X.shape[-3] < 1 << 31


def conv_square(
    G: Tensor, X: Tensor, geo: Geometry, c: Tensor | None = None, *,
    into: Fold | None = None, config: ConvConfig | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """dW and S in float32, of G (κ, m, O, H_out, W_out) and X (κ, m, I, H, W); c (κ,) weighs the squares.

    Both have the weight's shape, in memory as `geo.channels_last` says. With `into`, they are folded into its moments,
    which are returned; its plan must be one that `folds`.
    """
    g, x = G.flatten(0, 1), X.flatten(0, 1)
    return plan_of(g, x, geo, G.shape[0], c, config)(g, x, c, into)


class Plan:
    """How the pairs of one convolution are made; a layer needs it in every update."""

    def __init__(self, geo: Geometry, kappa: int, rows: int, config: ConvConfig) -> None:
        self.geo, self.kappa, self.config = geo, kappa, config
        self.run = WAYS[config.way]
        self.launches: dict[Any, Any] = {}
        # Whether moments may lie in memory as they like, or as the weight is said to, or are not folded into at all.
        self.folds_any = config.way in ("implicit", "padded", "window")
        self.folds_own = config.way == "unfold" or (config.way == "product" and _fused_product(rows))
        self.format = torch.channels_last if geo.channels_last else torch.contiguous_format

    def __call__(
        self, G: Tensor, X: Tensor, c: Tensor | None = None, into: Fold | None = None
    ) -> tuple[Tensor, Tensor]:
        """dW and S of G (κ·m, O, H_out, W_out) and X (κ·m, I, H, W), of any layout: see `conv_square`."""
        if not G.is_contiguous(memory_format=torch.channels_last):
            G = G.contiguous(memory_format=torch.channels_last)
        if not X.is_contiguous(memory_format=torch.channels_last):
            X = X.contiguous(memory_format=torch.channels_last)
        if c is not None:
            c = cast(c, torch.float32)
        return self.run(Task(G, X, self.geo, self.kappa, c, self.config, self.launches, into))

    def folds(self, weight: Tensor) -> bool:
        """Whether this folds into moments that lie as `weight`; a pair of the others is folded when it is made."""
        return self.folds_any or (self.folds_own and weight.is_contiguous(memory_format=self.format))


# What a plan depends on -> the plan.
_plans: dict[tuple[Any, ...], Plan] = {}


def plan_of(
    G: Tensor, X: Tensor, geo: Geometry, kappa: int, c: Tensor | None = None, config: ConvConfig | None = None
) -> Plan:
    """The plan for G (κ·m, O, H_out, W_out) and X (κ·m, I, H, W), with this configuration or with the best."""
    key = (geo, G.shape, X.shape, kappa, G.dtype, G.device, config, _switches(G.dtype))
    plan = _plans.get(key)
    if plan is None:
        rows = G.numel() // (kappa * G.shape[1])
        g, x = (t.unflatten(0, (kappa, -1)) for t in (G, X))
        plan = _plans[key] = Plan(geo, kappa, rows, config or best(g, x, geo, c))
    return plan


# --------------------------------------------------------------------------- the ways


def _implicit(task: Task) -> tuple[Tensor, Tensor]:
    D, S = task.room()
    (depthwise if is_depthwise(task.geo) else implicit)(task, D, S)
    return D, S


def _window(task: Task) -> tuple[Tensor, Tensor]:
    D, S = task.room()
    depthwise(task, D, S)
    return D, S


def _padded(task: Task) -> tuple[Tensor, Tensor]:
    _, out, height, width = task.G.shape
    G = pack(task.G, *sides(height, width), out)
    D, S = task.room()
    implicit(task._replace(G=G.permute(0, 3, 1, 2)), D, S)
    return D, S


def _packed(task: Task) -> tuple[Tensor, Tensor]:
    geo, rows, pixel, stride = task.geo, packed(task.geo), _pixel(task.geo), task.geo.stride[1]
    out, width, height, _ = rows.weight
    # X as (N, stride·channels, H, W/stride), its sides padded: output position x begins to look at its pixel x, and the
    # channels that a pixel lacks are the next pixels'.
    wide = cdiv(stride * (task.G.shape[3] - 1) + width // pixel, stride)
    room = pack(task.X, task.X.shape[2], wide * stride, pixel, geo.padding[1])
    X = room.view(*room.shape[:2], wide, -1).permute(0, 3, 1, 2)
    pair = torch.empty(2, out, height, width, device=task.G.device)
    d, s = pair.movedim(3, 2)[..., None]
    implicit(task._replace(X=X, geo=rows), d, s)
    taps = pair.unflatten(3, (-1, pixel))[..., : geo.weight[3], : geo.weight[1]]  # (2, O, KH, KW, I)
    return _copied(task, taps.movedim(4, 2))


def _merged(task: Task) -> tuple[Tensor, Tensor]:
    geo = merged(task.geo)
    many = task.geo.groups // geo.groups
    pair = torch.empty(2, *geo.weight, device=task.G.device)
    implicit(task._replace(geo=geo), pair[0], pair[1])
    blocks = pair.unflatten(2, (many, -1)).unflatten(1, (geo.groups, many, -1))  # (2, groups, many, O, many, I, ...)
    wanted = blocks.diagonal(dim1=2, dim2=4).movedim(-1, 2)
    return _copied(task, (t.reshape(task.geo.weight) for t in wanted))


def _unfold(task: Task) -> tuple[Tensor, Tensor]:
    g, x = (t[:, None].permute(0, 3, 1, 2) for t in matrices(task))  # images of one row, (κ, C, 1, R)
    D, S = task.room()
    d, s = (as_matrix(t, task.geo)[..., None, None] for t in (D, S))
    implicit(task._replace(G=g, X=x, geo=one_tap(task.geo)), d, s)
    return D, S


def _product(task: Task) -> tuple[Tensor, Tensor]:
    g, x = matrices(task)
    if not _fused_product(g.shape[1]):
        d, s = products.gemm_square(g, x, task.c)
        d = cast(d, torch.float32)
    else:
        d, s = products.fused.gemm_square(g, x, task.c, into=task.into)
        if task.into is not None:
            return d, s
    return d.view(task.geo.weight), s.view(task.geo.weight)  # of one tap: the same memory in both formats


def _fused_product(rows: int) -> bool:
    """Whether a product of so many rows per group is made by Triton's `gemm_square`."""
    return products.fused is not None and products.method(rows) == "products"


def _copied(task: Task, pair: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    D, S = task.room()
    for result, made in zip((D, S), pair, strict=True):
        result.copy_(made)
    return D, S


def _library(task: Task) -> tuple[Tensor, Tensor]:
    G, X = (t.unflatten(0, (task.kappa, -1)) for t in (task.G, task.X))
    D, S = task.room()
    one_by_one(G, X, task.geo, task.c, D.zero_(), S.zero_())
    return D, S


WAYS: dict[str, Callable[[Task], tuple[Tensor, Tensor]]] = {
    "implicit": _implicit, "padded": _padded, "packed": _packed, "merged": _merged, "window": _window,
    "unfold": _unfold, "product": _product, "library": _library,
}  # fmt: skip


# --------------------------------------------------------------------------- one convolution as another


def is_depthwise(geo: Geometry) -> bool:
    """Whether each output channel sees one input channel of several."""
    return geo.groups > 1 and geo.weight[1] == 1


def has_one_tap(geo: Geometry) -> bool:
    """Whether this is a product of matrices: one tap, no padding, all channels."""
    return geo.weight[2:] == (1, 1) and not any(geo.padding) and geo.groups == 1


def one_tap(geo: Geometry) -> Geometry:
    """The convolution of one tap that is left when inputs are unfolded."""
    weight = (geo.weight[0], math.prod(geo.weight[1:]), 1, 1)
    return Geometry(weight, (1, 1), (0, 0), (1, 1), False, (0, 0), 1)


def as_matrix(t: Tensor, geo: Geometry) -> Tensor:
    """The weight's gradient (O, I, KH, KW) as a view (O, columns), in the order of its memory."""
    return (t.permute(0, 2, 3, 1) if geo.channels_last else t).view(t.shape[0], -1)


def matrices(task: Task) -> tuple[Tensor, Tensor]:
    """G (κ, R, O) and the unfolded X (κ, R, columns): the columns of `as_matrix`, and zeros up to 16 bytes."""
    G, X, geo, kappa = task[:4]
    _, kh, kw = geo.weight[1:]
    (height, width), (sy, sx), (dy, dx) = G.shape[2:], geo.stride, geo.dilation
    rows = len(G) // kappa * height * width
    g = G.as_strided((kappa, rows, G.shape[1]), (rows * G.shape[1], G.shape[1], 1))  # one call in place of two
    if has_one_tap(geo) and geo.stride == (1, 1):
        return g, X.as_strided((kappa, rows, X.shape[1]), (rows * X.shape[1], X.shape[1], 1))
    if any(geo.padding):
        X = F.pad(X, (geo.padding[1],) * 2 + (geo.padding[0],) * 2)
    pixels = X.permute(0, 2, 3, 1)
    n, y, x, last = pixels.stride()
    places = (G.shape[0], height, width)
    if has_one_tap(geo):
        columns = pixels.as_strided((*places, X.shape[1]), (n, y * sy, x * sx, last)).contiguous()
    else:
        found = pixels.as_strided((*places, kh, kw, X.shape[1]), (n, y * sy, x * sx, y * dy, x * dx, last))
        if not geo.channels_last:
            found = found.movedim(-1, 3)
        many = math.prod(geo.weight[1:])
        columns = X.new_empty(*places, cdiv(many, 8) * 8)
        columns[..., :many].unflatten(-1, found.shape[3:]).copy_(found)
        columns[..., many:] = 0.0
    return g, columns.view(kappa, -1, columns.shape[-1])


def sides(height: int, width: int) -> tuple[int, int]:
    """The sides that an output gradient is padded to.

    >>> sides(14, 14), sides(7, 7), sides(28, 28)
    ((14, 16), (8, 8), (28, 32))
    """
    return height + height % 2, next_power_of_2(width)


def packed(geo: Geometry) -> Geometry:
    """The convolution by columns of taps, (KH, 1), that is left when the taps of each row have become channels."""
    weight = (geo.weight[0], (geo.weight[3] + geo.weight[3] % 2) * _pixel(geo), geo.weight[2], 1)
    stride, padding, dilation = (geo.stride[0], 1), (geo.padding[0], 0), (geo.dilation[0], 1)
    return Geometry(weight, stride, padding, dilation, False, (0, 0), 1)


def merged(geo: Geometry) -> Geometry:
    """The convolution whose channel groups are several of these, up to 64 input channels together.

    >>> taps = (1, 1), (1, 1), (1, 1), False, (0, 0)
    >>> [merged(Geometry((128, inner, 3, 3), *taps, 128 // inner)).groups for inner in (1, 4, 32, 64)]
    [2, 2, 2, 2]
    """
    out, inner, kh, kw = geo.weight
    many = 1
    while 2 * many * inner <= 64 and geo.groups % (2 * many) == 0:
        many *= 2
    return geo._replace(weight=(out, many * inner, kh, kw), groups=geo.groups // many)


def _pixel(geo: Geometry) -> int:
    """Channels of a packed pixel."""
    return max(4, next_power_of_2(geo.weight[1]))


# --------------------------------------------------------------------------- which one is taken


def best(G: Tensor, X: Tensor, geo: Geometry, c: Tensor | None = None) -> ConvConfig:
    """The way that is best for these operands, (κ, m, C, H, W), and its configuration: see `tuning`."""
    first, *others = candidates(G, X, geo)
    sizes = (*geo.weight, geo.groups, *geo.stride, *geo.padding, *geo.dilation, *X.shape[3:], *G.shape[1::-1])
    shape = (*sizes, int(geo.channels_last), str(G.dtype), *_switches(G.dtype))
    return tuning.best(
        "conv_square", shape, G.device, first, lambda: others, lambda how: conv_square(G, X, geo, c, config=how)
    )


def _switches(dtype: torch.dtype) -> tuple[int, ...]:
    """Whether convolutions, and products of matrices, of float32 may be made of tf32."""
    if dtype != torch.float32:
        return ()
    return int(torch.backends.cudnn.allow_tf32), int(torch.backends.cuda.matmul.allow_tf32)


def candidates(G: Tensor, X: Tensor, geo: Geometry) -> list[ConvConfig]:
    """Every way of these operands, (κ, m, C, H, W), with what may be its best; unmeasured, the first is taken."""
    if is_depthwise(geo):
        ways = {way: [ConvConfig()] for way in ("window", "implicit") if way == "implicit" or slides(geo)}
    elif has_one_tap(geo):
        ways = _of_one_tap(G, geo)
    else:
        ways = _of_taps(G, X, geo)
    if merged(geo) != geo and geo.groups > 1:
        ways["merged"] = tiles(merged(geo), (G.shape[1], *G.shape[3:]), G.dtype)
    ways["library"] = [ConvConfig()]
    return [config._replace(way=way) for way, configs in ways.items() for config in configs]


def _of_taps(G: Tensor, X: Tensor, geo: Geometry) -> dict[str, list[ConvConfig]]:
    kappa, images, _, height, width = G.shape
    places, inner, columns = (images, height, width), geo.weight[1], math.prod(geo.weight[1:])
    ways = {"implicit": tiles(geo, places, G.dtype)}
    if boxed(geo, X) and chip.of(G.device).tile_loads and inner >= 64 and box(64, *places) is None:
        even = tiles(geo, (images, *sides(height, width)), G.dtype)
        ways["padded"] = [config for config in even if config.boxes]
    if geo.groups == 1:
        size = kappa * _rows(G) * columns * G.element_size()
        if columns <= UNFOLDED_COLUMNS and size <= UNFOLDED_BYTES:
            ways["unfold"] = tiles(one_tap(geo), (1, 1, _rows(G)), G.dtype)
        if inner < 8 and inner % 4 and geo.weight[3] > 1 and geo.dilation[1] == 1:  # 4 or 8 are loaded as they are
            ways = {"packed": tiles(packed(geo), places, G.dtype)} | ways
    return ways


def _of_one_tap(G: Tensor, geo: Geometry) -> dict[str, list[ConvConfig]]:
    rows, switches = _rows(G), _switches(G.dtype)
    ways = {"unfold": tiles(one_tap(geo), (1, 1, rows), G.dtype)}
    if switches != (0, 1):  # `gemm_square` goes by the second: too coarse
        product = {"product": [ConvConfig()]}
        blocks = G.shape[0] * cdiv(geo.weight[0], 128) * cdiv(geo.weight[1], 128)
        few = rows >= 1024 and blocks < chip.of(G.device).multiprocessors  # `gemm_square` cuts no groups
        finer = switches == (1, 0) and rows >= 16  # than it need be, and slower
        ways = ways | product if few or finer else product | ways
    if geo.stride != (1, 1):
        ways = {"implicit": tiles(geo, (G.shape[1], *G.shape[3:]), G.dtype)} | ways
    return ways


def _rows(G: Tensor) -> int:
    return G.shape[1] * G.shape[3] * G.shape[4]


def tiles(geo: Geometry, places: tuple[int, ...], dtype: torch.dtype) -> list[ConvConfig]:
    """Configurations of `implicit`; `places`: the images of a group, the height and width of the output.

    No steps of 128 rows with three stages: they came out wrong on an H200.
    """
    out, inner, rows = geo.weight[0] // geo.groups, geo.weight[1], math.prod(places)
    columns = inner if inner >= 64 else inner * math.prod(geo.weight[2:])  # narrow inputs share a tile among taps
    bk = 64 if rows >= 64 else 32 if rows >= 32 else 16
    if dtype == torch.float32:
        bk = min(bk, 32)
    elif bk == 64 and box(64, *places) is None and box(32, *places) is not None:
        bk = 32
    bm = 128 if out > 64 else max(16, next_power_of_2(out))
    bn = 128 if columns > (64 if inner >= 64 else 128) else 64
    base = ConvConfig(bm, bn, bk, warps=8 if bm * bn > 64 * 128 else 4, stages=4)
    shapes = [(m, n) for m in sorted({min(bm, 64), bm}) for n in sorted({64, bn})]
    found = [base, *(base._replace(bm=m, bn=n, warps=4) for m, n in shapes if (m, n) != (bm, bn))]
    if inner < 64 and columns > 128 and dtype != torch.float32:
        found.append(base._replace(bm=min(bm, 64), bn=256, warps=8, stages=3))
    if inner >= bn and dtype != torch.float32 and rows >= 64 and places[:2] != (1, 1) and box(bk, *places) is not None:
        found += [config._replace(boxes=False, stages=3, bk=64) for config in found[:2]]
    return found


@operator(
    "conv_square(Tensor G, Tensor X, Tensor? c, int kappa, int[] weight, int[] stride, int[] padding, int[] dilation, "
    "bool transposed, int[] output_padding, int groups, bool channels_last) -> (Tensor, Tensor)",
    lambda G, X, c, kappa, *geo: pair_of(G, geo[0], channels_last=geo[-1]),
    any_layout=True,
)
def conv_square_op(G: Tensor, X: Tensor, c: Tensor | None, kappa: int, *geo: Any) -> tuple[Tensor, Tensor]:
    """`conv_square` as an operator, of all groups' images; of the fields of a `Geometry`, tuples come as lists."""
    fields: list[Any] = [tuple(x) if isinstance(x, list) else x for x in geo]
    return plan_of(G, X, Geometry(*fields), kappa, c)(G, X, c)

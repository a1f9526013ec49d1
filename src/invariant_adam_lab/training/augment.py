"""Random crops, flips and AutoAugment's CIFAR-10 policy on batches of uint8 images, on any device.

What happens to a sample depends on (seed, epoch, index of the sample) and on nothing else: every random number is a
hash of them, not the state of a generator. So runs at all batch sizes see the same samples, augmented the same way, in
the same order, and an epoch can be made at once, in pieces, or again.

The operations are those of Pillow, on integers, and agree with it byte for byte.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
CHUNK = 10_000  # images worked on at once, to bound memory


def _mix(x: Tensor) -> Tensor:
    """Scramble 32-bit numbers held in int64: a bijection whose every output bit depends on every input bit."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = x ^ (x >> shift)
        x = (x * factor) & _MASK
    return x ^ (x >> 16)


def draw(seed: int, epoch: int, index: Tensor, number: int) -> Tensor:
    """Return one random number in [0, 1) per sample: a hash of (seed, epoch, index, number), in float64.

    Args:
        seed: of the run.
        epoch: from 0.
        index: (N,) int64, of the samples in their dataset.
        number: which of a sample's draws.

    >>> some = draw(0, 3, torch.arange(1000), 1)
    >>> bool(draw(0, 3, torch.tensor([7]), 1) == some[7]), round(some.mean().item(), 1)
    (True, 0.5)
    """
    word = torch.zeros_like(index)
    for key in (seed, epoch, number):
        word = _mix((word + key + 0x9E3779B9) & _MASK)
    return _mix((word ^ _mix(index & _MASK)) & _MASK).double() / 2**32


def order(seed: int, epoch: int, count: int, device: torch.device) -> Tensor:
    """Return the order in which the `count` samples of an epoch come: (count,) int64, the same on every device."""
    return draw(seed, epoch, torch.arange(count, device=device), 0).argsort(stable=True)


def reordered(order: int, epoch: int, take: int, block: int, micro: int, device: torch.device) -> Tensor:
    """Return the places of an epoch's samples when micro-batches change places inside of blocks: (take,) int64.

    Args:
        order: a seed.
        epoch: from 0.
        take: samples of the epoch, a multiple of `block`.
        block: samples whose micro-batches change places.
        micro: samples of a micro-batch, which stay together in their order.
        device: where.

    >>> reordered(1, 0, 12, 6, 2, torch.device("cpu")).tolist()
    [0, 1, 2, 3, 4, 5, 8, 9, 10, 11, 6, 7]
    """
    each = block // micro
    first = torch.arange(0, take, block, device=device)[:, None]
    drawn = draw(order, epoch, torch.arange(take // micro, device=device), -1).view(-1, each)
    starts: Tensor = first + micro * drawn.argsort(dim=1, stable=True)
    return (starts[..., None] + torch.arange(micro, device=device)).flatten()


# ---------------------------------------------------------------- operations: (n, 3, H, W) uint8 and one number each


def affine(x: Tensor, matrix: Tensor) -> Tensor:
    """Move pixels: output (u, v) is input (a·u + b·v + c, d·u + e·v + f) at pixel centres, nearest, black outside.

    Args:
        x: (n, channels, H, W), uint8.
        matrix: (n, 6), the rows (a, b, c, d, e, f), as in Pillow's `Image.transform`.
    """
    height, width = x.shape[-2:]
    matrix = matrix.double()
    # In 1/65536 of a pixel, as Pillow counts: integers, and so the same on every device.
    a, b, d, e = ((matrix[:, i] * 65536 + 0.5).floor().long()[:, None, None] for i in (0, 1, 3, 4))
    start = (matrix[:, (2, 5)] + 0.5 * (matrix[:, (0, 3)] + matrix[:, (1, 4)])) * 65536 + 0.5
    c, f = start.floor().long().view(-1, 2, 1, 1).unbind(1)
    u, v = torch.arange(width, device=x.device), torch.arange(height, device=x.device)[:, None]
    column, row = (a * u + b * v + c) >> 16, (d * u + e * v + f) >> 16
    inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
    place = row.clamp(0, height - 1) * width + column.clamp(0, width - 1)  # (n, H, W)
    moved = x.flatten(2).gather(2, place.flatten(1)[:, None].expand(-1, x.shape[1], -1)).view_as(x)
    return torch.where(inside[:, None], moved, 0)


def _matrix(n: int, like: Tensor, **entries: Tensor | float) -> Tensor:
    matrix = torch.zeros(n, 6, dtype=torch.float64, device=like.device)
    matrix[:, 0] = matrix[:, 4] = 1
    for name, value in entries.items():
        matrix[:, "abcdef".index(name)] = value
    return matrix


def shear_x(x: Tensor, by: Tensor) -> Tensor:
    """Shift each row by `by` times its height."""
    return affine(x, _matrix(len(x), x, b=by))


def shear_y(x: Tensor, by: Tensor) -> Tensor:
    """Shift each column by `by` times its place."""
    return affine(x, _matrix(len(x), x, d=by))


def translate_x(x: Tensor, by: Tensor) -> Tensor:
    """Move to the left by `by` pixels."""
    return affine(x, _matrix(len(x), x, c=by))


def translate_y(x: Tensor, by: Tensor) -> Tensor:
    """Move up by `by` pixels."""
    return affine(x, _matrix(len(x), x, f=by))


def rotate(x: Tensor, degrees: Tensor) -> Tensor:
    """Turn counter-clockwise about the centre."""
    angle = -degrees.double() * (math.pi / 180)
    cos, sin = angle.cos(), angle.sin()
    cx, cy = x.shape[-1] / 2, x.shape[-2] / 2
    return affine(
        x, _matrix(len(x), x, a=cos, b=sin, c=cx - cos * cx - sin * cy, d=-sin, e=cos, f=cy + sin * cx - cos * cy)
    )


def _blend(base: Tensor, x: Tensor, factor: Tensor) -> Tensor:
    """base + factor·(x − base), cut off to a byte."""
    base, y = base.float(), x.float()
    return (base + factor.float()[:, None, None, None] * (y - base)).clamp(0, 255).to(torch.uint8)


def _grey(x: Tensor) -> Tensor:
    r, g, b = x.int().unbind(1)
    return ((19595 * r + 38470 * g + 7471 * b + 0x8000) >> 16)[:, None]


def brightness(x: Tensor, factor: Tensor) -> Tensor:
    """Blend with black."""
    return _blend(torch.zeros_like(x), x, factor)


def color(x: Tensor, factor: Tensor) -> Tensor:
    """Blend with the grey image."""
    return _blend(_grey(x), x, factor)


def contrast(x: Tensor, factor: Tensor) -> Tensor:
    """Blend with the mean grey."""
    grey = _grey(x)
    mean = (grey.flatten(1).sum(1).double() / grey[0].numel() + 0.5).floor()
    return _blend(mean[:, None, None, None], x, factor)


def sharpness(x: Tensor, factor: Tensor) -> Tensor:
    """Blend with a smoothed image, whose border is not smoothed."""
    y = x.int()
    rows = y[:, :, :-2] + y[:, :, 1:-1] + y[:, :, 2:]
    around = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:]
    smooth = y.clone()
    smooth[:, :, 1:-1, 1:-1] = (2 * (around + 4 * y[:, :, 1:-1, 1:-1]) + 13) // 26  # (sum + 4·centre)/13, rounded
    return _blend(smooth, x, factor)


def posterize(x: Tensor, bits: Tensor) -> Tensor:
    """Keep the highest `bits` bits."""
    mask = 256 - (1 << (8 - bits.int()))
    return (x.int() & mask[:, None, None, None]).to(torch.uint8)


def solarize(x: Tensor, threshold: Tensor) -> Tensor:
    """Invert what is not below `threshold`."""
    return torch.where(x.double() < threshold.double()[:, None, None, None], x, 255 - x)


def invert(x: Tensor, _: Tensor) -> Tensor:
    """Turn light into dark."""
    return 255 - x


def autocontrast(x: Tensor, _: Tensor) -> Tensor:
    """Stretch each channel to all of 0…255."""
    low, high = x.flatten(2).amin(2).double(), x.flatten(2).amax(2).double()
    scale = torch.full_like(low, 255) / (high - low).clamp(min=1)  # divided, not times a rounded reciprocal
    table = torch.arange(256, device=x.device).double() * scale[..., None] + (-low * scale)[..., None]
    return _look_up(x, torch.where((high > low)[..., None], table.clamp(0, 255).floor(), torch.arange(256.0).to(table)))


def equalize(x: Tensor, _: Tensor) -> Tensor:
    """Make the histogram of each channel flat."""
    flat = x.flatten(2).long()
    counts = torch.zeros(*flat.shape[:2], 256, dtype=torch.int64, device=x.device)
    counts.scatter_add_(2, flat, torch.ones_like(flat))
    last = counts.gather(2, x.flatten(2).amax(2).long()[..., None])[..., 0]
    step = (flat.shape[2] - last) // 255
    before = counts.cumsum(2) - counts
    table = ((step // 2)[..., None] + before) // step.clamp(min=1)[..., None]
    same = torch.arange(256, device=x.device).expand_as(table)
    return _look_up(x, torch.where((step > 0)[..., None], table.clamp(max=255), same))


def _look_up(x: Tensor, table: Tensor) -> Tensor:
    """Replace each byte by its entry in the table (n, channels, 256) of its channel."""
    return table.to(torch.uint8).gather(2, x.flatten(2).long()).view_as(x)


# ---------------------------------------------------------------- AutoAugment


class _Operation(NamedTuple):
    do: Callable[[Tensor, Tensor], Tensor]
    magnitude: Callable[[int, int], float]  # (level 0…9, side of the image in pixels) -> what `do` takes
    signed: bool = False  # whether half of the samples take the opposite
    around: float = 0.0  # what the magnitude is added to


_OPERATIONS = {
    "shear_x": _Operation(shear_x, lambda level, side: 0.3 * level / 9, signed=True),
    "shear_y": _Operation(shear_y, lambda level, side: 0.3 * level / 9, signed=True),
    "translate_x": _Operation(translate_x, lambda level, side: 150 / 331 * side * level / 9, signed=True),
    "translate_y": _Operation(translate_y, lambda level, side: 150 / 331 * side * level / 9, signed=True),
    "rotate": _Operation(rotate, lambda level, side: 30 * level / 9, signed=True),
    "brightness": _Operation(brightness, lambda level, side: 0.9 * level / 9, signed=True, around=1.0),
    "color": _Operation(color, lambda level, side: 0.9 * level / 9, signed=True, around=1.0),
    "contrast": _Operation(contrast, lambda level, side: 0.9 * level / 9, signed=True, around=1.0),
    "sharpness": _Operation(sharpness, lambda level, side: 0.9 * level / 9, signed=True, around=1.0),
    "posterize": _Operation(posterize, lambda level, side: 8 - round(level / (9 / 4))),
    "solarize": _Operation(solarize, lambda level, side: 255 - 255 * level / 9),
    "autocontrast": _Operation(autocontrast, lambda level, side: 0.0),
    "equalize": _Operation(equalize, lambda level, side: 0.0),
    "invert": _Operation(invert, lambda level, side: 0.0),
}

# Cubuk et al., 2019, the policy found on CIFAR-10: two operations with probability and level each.
POLICY = (
    (("invert", 0.1, 7), ("contrast", 0.2, 6)),
    (("rotate", 0.7, 2), ("translate_x", 0.3, 9)),
    (("sharpness", 0.8, 1), ("sharpness", 0.9, 3)),
    (("shear_y", 0.5, 8), ("translate_y", 0.7, 9)),
    (("autocontrast", 0.5, 8), ("equalize", 0.9, 2)),
    (("shear_y", 0.2, 7), ("posterize", 0.3, 7)),
    (("color", 0.4, 3), ("brightness", 0.6, 7)),
    (("sharpness", 0.3, 9), ("brightness", 0.7, 9)),
    (("equalize", 0.6, 5), ("equalize", 0.5, 1)),
    (("contrast", 0.6, 7), ("sharpness", 0.6, 5)),
    (("color", 0.7, 7), ("translate_x", 0.5, 8)),
    (("equalize", 0.3, 7), ("autocontrast", 0.4, 8)),
    (("translate_y", 0.4, 3), ("sharpness", 0.2, 6)),
    (("brightness", 0.9, 6), ("color", 0.2, 8)),
    (("solarize", 0.5, 2), ("invert", 0.0, 3)),
    (("equalize", 0.2, 0), ("autocontrast", 0.6, 0)),
    (("equalize", 0.2, 8), ("equalize", 0.6, 4)),
    (("color", 0.9, 9), ("equalize", 0.6, 6)),
    (("autocontrast", 0.8, 4), ("solarize", 0.2, 8)),
    (("brightness", 0.1, 3), ("color", 0.7, 0)),
    (("solarize", 0.4, 5), ("autocontrast", 0.9, 3)),
    (("translate_y", 0.9, 9), ("translate_y", 0.7, 9)),
    (("autocontrast", 0.9, 2), ("solarize", 0.8, 3)),
    (("equalize", 0.8, 8), ("invert", 0.1, 3)),
    (("translate_y", 0.7, 9), ("autocontrast", 0.9, 1)),
)


def crop_and_flip(x: Tensor, index: Tensor, seed: int, epoch: int, *, pad: int = 4, flip: bool = True) -> Tensor:
    """Move each image by up to `pad` pixels in both directions, black outside, and mirror half of them."""
    right, down = ((draw(seed, epoch, index, number) * (2 * pad + 1)).floor() - pad for number in (1, 2))
    if not flip:
        return affine(x, _matrix(len(x), x, c=right, f=down))
    mirrored = draw(seed, epoch, index, 3) < 0.5
    sign = 1 - 2 * mirrored.double()
    return affine(x, _matrix(len(x), x, a=sign, c=right + mirrored * x.shape[-1], f=down))


def autoaugment(x: Tensor, index: Tensor, seed: int, epoch: int) -> Tensor:
    """Apply one of the policy's 25 pairs of operations to each image."""
    x = x.clone()
    pair = (draw(seed, epoch, index, 4) * len(POLICY)).long()
    side = x.shape[-1]
    for slot in range(2):
        steps = [entry[slot] for entry in POLICY]
        chance = torch.tensor([probability for _, probability, _ in steps], device=x.device, dtype=torch.float64)
        level = torch.tensor(
            [_OPERATIONS[name].magnitude(level, side) for name, _, level in steps], device=x.device, dtype=torch.float64
        )
        chosen = draw(seed, epoch, index, 5 + slot) < chance[pair]
        sign = torch.where(draw(seed, epoch, index, 7 + slot) < 0.5, -1.0, 1.0).double()
        for name, operation in _OPERATIONS.items():
            mine = torch.tensor([entry == name for entry, _, _ in steps], device=x.device)
            rows = (mine[pair] & chosen).nonzero()[:, 0]
            if len(rows):
                amount = level[pair[rows]]
                amount = operation.around + (amount * sign[rows] if operation.signed else amount)
                x[rows] = operation.do(x[rows], amount)
    return x


def augment(x: Tensor, index: Tensor, seed: int, epoch: int, *, flip: bool = True, auto: bool = False) -> Tensor:
    """Return the images as this epoch shows them: cropped, flipped if asked, AutoAugmented if asked.

    Args:
        x: (N, 3, H, W), uint8.
        index: (N,) int64, of the samples in their dataset.
        seed: of the run.
        epoch: from 0.
        flip: mirror half of the images.
        auto: apply AutoAugment's CIFAR-10 policy.
    """
    out = torch.empty_like(x)
    for rows in torch.arange(len(x), device=x.device).split(CHUNK):
        part = crop_and_flip(x[rows], index[rows], seed, epoch, flip=flip)
        out[rows] = autoaugment(part, index[rows], seed, epoch) if auto else part
    return out

import math

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from PIL import Image, ImageEnhance, ImageFilter, ImageOps
from torch import Tensor

from invariant_adam.lab import augment

SIDE = 32


def pictures(n: int = 24) -> Tensor:
    """Noise, smooth gradients, few colours, and one flat picture: where the operations differ."""
    g = torch.Generator().manual_seed(0)
    noise = torch.randint(0, 256, (n, 3, SIDE, SIDE), generator=g, dtype=torch.uint8)
    ramp = torch.linspace(0, 1, SIDE)
    smooth = (60 + 150 * ramp[None, None, :, None] * ramp * torch.rand(n, 3, 1, 1, generator=g)).to(torch.uint8)
    few = (noise // 100) * 40
    x = torch.where(torch.arange(n)[:, None, None, None] % 3 == 0, noise, smooth)
    x = torch.where(torch.arange(n)[:, None, None, None] % 3 == 2, few, x)
    x[-1] = 77
    return x


def as_image(x: Tensor) -> Image.Image:
    return Image.fromarray(x.permute(1, 2, 0).contiguous().numpy())


def as_tensor(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def by_matrix(*entries: float):
    return lambda image: image.transform(image.size, Image.Transform.AFFINE, entries, Image.Resampling.NEAREST)


def posterized(bits: int):
    return lambda image: ImageOps.posterize(image, bits)


PILLOW = {
    "shear_x": (augment.shear_x, (-0.3, 0.1, 0.25), lambda by: by_matrix(1, by, 0, 0, 1, 0)),
    "shear_y": (augment.shear_y, (-0.3, 0.1, 0.25), lambda by: by_matrix(1, 0, 0, by, 1, 0)),
    "translate_x": (augment.translate_x, (-14.5, 3.2, 9.0), lambda by: by_matrix(1, 0, by, 0, 1, 0)),
    "translate_y": (augment.translate_y, (-14.5, 3.2, 9.0), lambda by: by_matrix(1, 0, 0, 0, 1, by)),
    "rotate": (augment.rotate, (-30.0, 6.7, 20.0), lambda by: lambda image: image.rotate(by)),
    "brightness": (augment.brightness, (0.1, 0.7, 1.9), lambda f: lambda i: ImageEnhance.Brightness(i).enhance(f)),
    "color": (augment.color, (0.1, 0.7, 1.9), lambda f: lambda i: ImageEnhance.Color(i).enhance(f)),
    "contrast": (augment.contrast, (0.1, 0.7, 1.9), lambda f: lambda i: ImageEnhance.Contrast(i).enhance(f)),
    "sharpness": (augment.sharpness, (0.1, 0.7, 1.9), lambda f: lambda i: ImageEnhance.Sharpness(i).enhance(f)),
    "posterize": (augment.posterize, (4, 5, 8), posterized),
    "solarize": (augment.solarize, (0.0, 113.4, 255.0), lambda t: lambda i: ImageOps.solarize(i, t)),
    "autocontrast": (augment.autocontrast, (0.0,), lambda _: ImageOps.autocontrast),
    "equalize": (augment.equalize, (0.0,), lambda _: ImageOps.equalize),
    "invert": (augment.invert, (0.0,), lambda _: ImageOps.invert),
}


@pytest.mark.parametrize("name", PILLOW)
def test_operation_is_pillows(name):
    ours, amounts, theirs = PILLOW[name]
    x = pictures()
    for amount in amounts:
        got = ours(x, torch.full((len(x),), float(amount), dtype=torch.float64))
        want = torch.stack([as_tensor(theirs(amount)(as_image(picture))) for picture in x])
        assert got.dtype == torch.uint8
        assert (got != want).sum() == 0, (amount, (got.int() - want.int()).abs().max())


def test_smoothing_is_pillows():
    x = pictures()
    want = torch.stack([as_tensor(as_image(picture).filter(ImageFilter.SMOOTH)) for picture in x])
    assert torch.equal(augment.sharpness(x, torch.zeros(len(x))), want)


def test_the_policy_is_whole():
    assert len(augment.POLICY) == 25
    assert {name for pair in augment.POLICY for name, _, _ in pair} <= set(augment._OPERATIONS)
    assert [augment._OPERATIONS["posterize"].magnitude(level, 32) for level in range(10)] == [
        8, 8, 7, 7, 6, 6, 5, 5, 4, 4,
    ]  # fmt: skip
    assert math.isclose(augment._OPERATIONS["translate_x"].magnitude(9, 331), 150)


@pytest.mark.parametrize("auto", [False, True])
def test_a_sample_does_not_depend_on_the_batch_it_is_in(auto):
    x, index = pictures(48), torch.arange(48) * 1_001
    whole = augment.augment(x, index, 3, 5, auto=auto)
    for size in (1, 7, 16):
        parts = [augment.augment(a, b, 3, 5, auto=auto) for a, b in zip(x.split(size), index.split(size), strict=True)]
        assert torch.equal(torch.cat(parts), whole)
    shuffled = torch.randperm(48, generator=torch.Generator().manual_seed(1))
    assert torch.equal(augment.augment(x[shuffled], index[shuffled], 3, 5, auto=auto), whole[shuffled])


@pytest.mark.parametrize("auto", [False, True])
def test_seed_and_epoch_change_it_and_the_input_is_kept(auto):
    x, index = pictures(48), torch.arange(48)
    before = x.clone()
    first = augment.augment(x, index, 0, 0, auto=auto)
    assert torch.equal(first, augment.augment(x, index, 0, 0, auto=auto))
    assert not torch.equal(first, augment.augment(x, index, 1, 0, auto=auto))
    assert not torch.equal(first, augment.augment(x, index, 0, 1, auto=auto))
    assert torch.equal(x, before)


def test_crops_are_all_81_and_half_are_mirrored():
    n = 4_000
    picture = torch.arange(SIDE * SIDE).view(1, 1, SIDE, SIDE) % 251 + 1
    x = picture.to(torch.uint8).expand(n, 3, -1, -1)
    got = augment.crop_and_flip(x, torch.arange(n), 0, 0)
    padded = torch.nn.functional.pad(x[0], (4, 4, 4, 4))
    windows = [padded[:, i : i + SIDE, j : j + SIDE] for i in range(9) for j in range(9)]
    kinds = torch.stack([w for window in windows for w in (window, window.flip(-1))])
    found = (got[:, None, 0, ::5, ::5] == kinds[None, :, 0, ::5, ::5]).flatten(2).all(2)
    assert found.sum(1).eq(1).all()
    counts = found.sum(0)
    assert counts.min() > 0
    assert abs(counts[1::2].sum() / n - 0.5) < 0.03
    plain = augment.crop_and_flip(x, torch.arange(n), 0, 0, flip=False)
    assert (plain[:, None, 0, ::5, ::5] == kinds[None, ::2, 0, ::5, ::5]).flatten(2).all(2).any(1).all()


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31 - 1), epoch=st.integers(0, 1000), count=st.integers(1, 300))
def test_order_is_a_permutation(seed, epoch, count):
    found = augment.order(seed, epoch, count, torch.device("cpu"))
    assert found.sort().values.tolist() == list(range(count))


def test_draws_are_uniform_and_unrelated():
    index = torch.arange(20_000)
    draws = torch.stack([augment.draw(s, e, index, k) for s in (0, 1) for e in (0, 1) for k in range(3)])
    assert draws.min() >= 0
    assert draws.max() < 1
    counts = torch.stack([torch.histc(row.float(), 20, 0, 1) for row in draws])
    assert (counts - 1000).abs().max() < 160
    related = torch.corrcoef(draws) - torch.eye(len(draws))
    assert related.abs().max() < 0.04
    neighbours = torch.corrcoef(torch.stack((draws[0, 1:], draws[0, :-1])))[0, 1]
    assert abs(neighbours) < 0.03

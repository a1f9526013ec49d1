import re

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from PIL import Image, ImageEnhance, ImageFilter, ImageOps
from torch import Tensor
from zoo import zoo_module

from invariant_adam_lab.training import augment

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


# Cubuk et al., 2019, the policy of CIFAR-10: operation, probability and level, twice.
PUBLISHED = """
invert 0.1 7        contrast 0.2 6
rotate 0.7 2        translate_x 0.3 9
sharpness 0.8 1     sharpness 0.9 3
shear_y 0.5 8       translate_y 0.7 9
autocontrast 0.5 8  equalize 0.9 2
shear_y 0.2 7       posterize 0.3 7
color 0.4 3         brightness 0.6 7
sharpness 0.3 9     brightness 0.7 9
equalize 0.6 5      equalize 0.5 1
contrast 0.6 7      sharpness 0.6 5
color 0.7 7         translate_x 0.5 8
equalize 0.3 7      autocontrast 0.4 8
translate_y 0.4 3   sharpness 0.2 6
brightness 0.9 6    color 0.2 8
solarize 0.5 2      invert 0.0 3
equalize 0.2 0      autocontrast 0.6 0
equalize 0.2 8      equalize 0.6 4
color 0.9 9         equalize 0.6 6
autocontrast 0.8 4  solarize 0.2 8
brightness 0.1 3    color 0.7 0
solarize 0.4 5      autocontrast 0.9 3
translate_y 0.9 9   translate_y 0.7 9
autocontrast 0.9 2  solarize 0.8 3
equalize 0.8 8      invert 0.1 3
translate_y 0.7 9   autocontrast 0.9 1
"""
TABLE = [
    tuple((name, float(chance), int(level)) for name, chance, level in (words[:3], words[3:]))
    for words in map(str.split, PUBLISHED.strip().splitlines())
]
SIGNED = {  # at level 9
    "shear_x": 0.3,
    "shear_y": 0.3,
    "translate_x": 150 / 331 * SIDE,
    "translate_y": 150 / 331 * SIDE,
    "rotate": 30,
    **dict.fromkeys(("brightness", "color", "contrast", "sharpness"), 0.9),
}
BITS = (8, 8, 7, 7, 6, 6, 5, 5, 4, 4)


def amount_of(name: str, level: int, sign: int) -> float:
    """What an operation takes at a level, as the paper and its authors' code have it."""
    if name in SIGNED:
        by = sign * SIGNED[name] * level / 9
        return 1 + by if name in ("brightness", "color", "contrast", "sharpness") else by
    return {"posterize": BITS[level], "solarize": 255 - 255 * level / 9}.get(name, 0)


def test_the_policy_is_the_published_one():
    assert list(augment.POLICY) == TABLE


def test_autoaugment_is_pillow_image_by_image():
    """To the byte: both take the nearest pixel, and count in 1/65536 of one."""
    n, seed, epoch = 2_500, 3, 5
    index = torch.arange(n) * 7
    x = pictures(50).repeat(n // 50, 1, 1, 1)
    pair, *draws = (augment.draw(seed, epoch, index, number).tolist() for number in (4, 5, 6, 7, 8))
    want, met = [], set()
    for i, image in enumerate(map(as_image, x)):
        entry = int(pair[i] * 25)
        for slot, (name, chance, level) in enumerate(TABLE[entry]):
            done, sign = draws[slot][i] < chance, -1 if draws[2 + slot][i] < 0.5 else 1
            met.add((entry, slot, done, sign))
            if done:
                image = PILLOW[name][2](amount_of(name, level, sign))(image)
        want.append(as_tensor(image))
    # every entry, done and left out, with either sign; the second of entry 14 has the probability 0
    assert len(met) == 25 * 2 * 2 * 2 - 2
    assert torch.equal(augment.autoaugment(x, index, seed, epoch), torch.stack(want))


@pytest.mark.slow
def test_autoaugment_is_torchvisions():
    """Policy, magnitudes and operations, but that translations are not cut to whole pixels before they are made."""
    theirs = zoo_module("torchvision.transforms.autoaugment")
    nearest = zoo_module("torchvision.transforms").InterpolationMode.NEAREST
    policy = theirs.AutoAugment(theirs.AutoAugmentPolicy.CIFAR10)

    def ours(name: str) -> str:
        return re.sub(r"(?<=[a-z])(?=[XY])", "_", name).lower()

    for (name, chance, level), (their_name, *rest) in zip(
        (step for pair in augment.POLICY for step in pair), (s for pair in policy.policies for s in pair), strict=True
    ):
        assert (name, chance) == (ours(their_name), rest[0])
        assert rest[1] in (None, level)
    x = pictures(6)
    for their_name, (magnitudes, signed) in policy._augmentation_space(10, (SIDE, SIDE)).items():
        operation = augment._OPERATIONS[ours(their_name)]
        assert operation.signed is signed
        for level in range(10 if magnitudes.ndim else 1):
            magnitude = operation.magnitude(level, SIDE)
            their_magnitude = magnitudes[level].item() if magnitudes.ndim else 0.0
            assert magnitude == pytest.approx(their_magnitude, abs=1e-4)
            amount = operation.around + magnitude
            if their_name.startswith("Translate"):  # they move the other way, so that only the magnitude is compared
                amount, their_magnitude = -round(amount), round(amount)
            got = operation.do(x, torch.full((len(x),), float(amount), dtype=torch.float64))
            want = [theirs._apply_op(as_image(image), their_name, their_magnitude, nearest, None) for image in x]
            assert torch.equal(got, torch.stack([as_tensor(image) for image in want])), (their_name, level)


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

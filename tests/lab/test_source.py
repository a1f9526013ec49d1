import pytest
import torch
from lab_runs import CPU, TEXT, small_source

from invariant_adam_lab.training import augment, data
from invariant_adam_lab.training.runs import RECIPES
from invariant_adam_lab.training.source import Source, load


def test_every_run_sees_the_same_samples_in_the_same_order():
    source = small_source("vit")
    first = source.epoch(0, 1, 0, 80)
    assert first[0].shape == (80, 3, 32, 32)
    source.epoch(0, 0, 0, 80)  # drops what was kept
    again = source.epoch(0, 1, 0, 80)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    fewer = source.epoch(0, 1, 40, 40)
    assert set(fewer[1].tolist()) <= set(range(10))
    assert not torch.equal(first[0], source.epoch(1, 1, 0, 80)[0])


def ramps(n: int) -> data.Images:
    """Images that grow brighter to the right, and are not black anywhere; the class of each is its number."""
    x = (50 + 5 * torch.arange(32)).to(torch.uint8).expand(n, 3, 32, 32).contiguous()
    return data.Images(x, torch.arange(n), x[:10], torch.arange(10))


@pytest.mark.parametrize("model", ["resnet-bn", "resnet-ln", "vit"])
def test_images_are_augmented_as_the_paper_has_it(model):
    """Crop and flip for the ResNets; crop and AutoAugment, no flip, for the ViT: `test_augment` judges the parts."""
    source = load(model, CPU, found=ramps(1_000))
    x, y = source.epoch(0, 3, 0, 800)
    assert y.tolist() == augment.order(0, 3, 1_000, CPU)[:800].tolist()
    assert torch.equal(source.epoch(0, 3, 0, 400)[0], x[:400])  # whatever else is in the epoch
    crop = augment.crop_and_flip(source.found.x[y], y, 0, 3, flip=model != "vit")
    if model == "vit":
        assert torch.equal(x, augment.autoaugment(crop, y, 0, 3))
        assert 0.5 < (x != crop).flatten(1).any(1).double().mean() < 1
    else:
        assert torch.equal(x, crop)
    for part, whole in zip(zip(*source.test(), strict=True), (source.found.test_x, source.found.test_y), strict=True):
        assert torch.equal(torch.cat(part), whole)  # what a model is tested on is as it was


@pytest.mark.parametrize(("model", "share"), [("resnet-bn", 0.5), ("resnet-ln", 0.5), ("vit", 0.0)])
def test_half_of_the_images_are_mirrored_or_none(model, share):
    x, _ = Source(ramps(2_000), RECIPES[model]._replace(auto=False), CPU).epoch(0, 0, 0, 2_000)
    mirrored = (x[:, 0, 16, 8] > x[:, 0, 16, 24]).double().mean().item()
    assert abs(mirrored - share) <= 0.05 * (share > 0)


def test_sequences_follow_each_other():
    source = small_source("gpt")
    (x,) = source.epoch(3, 0, 0, source.count)
    assert x.shape == (source.count, source.context + 1)
    whole = data.encode(TEXT)
    text = "".join(whole.vocab[i] for i in whole.ids.tolist())
    for row in x[:5].tolist():
        assert "".join(whole.vocab[i] for i in row) in text
    starts = {text.find("".join(whole.vocab[i] for i in row)) % source.context for row in x.tolist()}
    assert len(starts) < source.count  # all cut at the same places, up to repetitions in the text


def test_the_test_set_is_all_there():
    assert sum(len(y) for _, y in small_source("vit").test()) == 30


def test_a_text_without_a_sequence_is_refused():
    with pytest.raises(ValueError, match="longer text"):
        load("gpt", CPU, small=True, found=data.encode("abc" * 20))

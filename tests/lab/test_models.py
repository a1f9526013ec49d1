import pytest
import torch
import torch.nn.functional as F
from loop_oracle import assert_exact

from invariant_adam_lab.models import MODELS, LayerNorm2d, build

SMALL = {
    "gpt": ("gpt-char", {"vocab": 11, "context": 6, "width": 8, "depth": 2, "heads": 2}),
    "gpt_tied": ("gpt2-124m", {"vocab": 11, "context": 6, "width": 8, "depth": 2, "heads": 2, "tied": True}),
    "vit": ("vit-b16", {"image": 8, "patch": 4, "width": 8, "depth": 2, "heads": 2, "classes": 5}),
    "vit_qk_norm": ("vit-cifar", {"image": 8, "patch": 4, "width": 8, "depth": 2, "heads": 2, "hidden": 8}),
    "resnet_batch_norm": ("resnet18", {"depths": (1, 1), "width": 4}),
    "resnet_layer_norm": ("resnet18", {"depths": (1, 1), "width": 4, "norm": "layer"}),
    "bottleneck": ("resnet50", {"depths": (1, 1), "width": 2, "classes": 5, "norm": "layer"}),
}


def parameters(name, **options):
    with torch.device("meta"):
        return sum(p.numel() for p in build(name, **options).parameters())


@pytest.mark.parametrize(
    ("name", "options", "count"),
    [
        ("gpt2-124m", {"vocab": 50257, "tied": True}, 124_439_808),
        ("gpt2-124m", {"tied": True}, 124_475_904),
        ("gpt2-124m", {}, 163_109_376),
        ("gpt2-350m", {"vocab": 50257, "tied": True}, 354_823_168),
        ("gpt2-350m", {}, 406_382_592),
        ("gpt-char", {}, 10_795_776),
        ("vit-b16", {}, 86_567_656),
        ("vit-cifar", {}, 9_583_626),
        ("resnet18", {}, 11_173_962),
        ("resnet18", {"norm": "layer"}, 11_173_962),
        ("resnet18-224", {}, 11_689_512),
        ("resnet50", {}, 25_557_032),
    ],
)
def test_the_number_of_parameters(name, options, count):
    assert parameters(name, **options) == count


def inputs(model, batch, dtype):
    if hasattr(model, "vocab"):
        return torch.randint(model.vocab, (batch, model.context))
    return torch.randn(batch, 3, min(model.image, 16), min(model.image, 16), dtype=dtype)


@pytest.mark.parametrize("name", SMALL)
def test_the_small_ones_give_logits_and_square_exactly(name):
    torch.manual_seed(0)
    name, options = SMALL[name]
    model = build(name, **options).double()
    x = inputs(model, 6, torch.float64)
    classes = getattr(model, "vocab", None) or model.classes
    y = torch.randint(classes, (*x.shape[:2],) if hasattr(model, "vocab") else (6,))
    assert model(x).shape == (*y.shape, classes)

    def loss(model, batch):
        x, y = batch
        return F.cross_entropy(model(x).flatten(0, -2), y.flatten())

    assert_exact(model, (x, y), loss, 2)


def test_a_shorter_sequence_sees_the_first_positions_and_no_later_token():
    torch.manual_seed(0)
    name, options = SMALL["gpt"]
    model, ids = build(name, **options).double(), torch.randint(11, (2, 6))
    torch.testing.assert_close(model(ids[:, :4]), model(ids)[:, :4])


def test_a_layer_norm_does_not_mix_samples():
    model = build("resnet18", depths=(1, 1), width=4, norm="layer").double()
    x = torch.randn(3, 3, 32, 32, dtype=torch.float64)
    torch.testing.assert_close(model(x)[:1], model(x[:1]))


def test_what_cannot_be_built_is_said_with_its_remedy():
    with pytest.raises(ValueError, match=f"no model is named 'gpt3'; there are {', '.join(MODELS)}"):
        build("gpt3")
    with pytest.raises(ValueError, match=r"width=768 must be a multiple of heads=10; use heads=8"):
        build("gpt2-124m", heads=10)
    with pytest.raises(ValueError, match=r"image=32 must be a multiple of patch=7; use patch=8"):
        build("vit-cifar", patch=7)
    with pytest.raises(ValueError, match=r'norm must be "batch" or "layer", got \'group\''):
        build("resnet18", norm="group")


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_layer_norm_is_a_group_norm_of_one_group_and_keeps_the_order_of_memory(memory_format):
    torch.manual_seed(0)
    ours, theirs = LayerNorm2d(8).double(), torch.nn.GroupNorm(1, 8).double()
    with torch.no_grad():
        ours.weight.normal_()
        ours.bias.normal_()
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(6, 8, 5, 4, dtype=torch.float64).contiguous(memory_format=memory_format).requires_grad_()
    torch.testing.assert_close(ours(x), theirs(x))
    if memory_format is torch.channels_last:
        assert ours(x).is_contiguous(memory_format=memory_format)
    grads = [torch.autograd.grad(norm(x).square().sum(), [x, *norm.parameters()]) for norm in (ours, theirs)]
    torch.testing.assert_close(*grads)

"""Architectures taken unmodified from transformers and timm: each equals the loop."""

from __future__ import annotations

import importlib.util

import pytest
import torch
import zoo
from loop_oracle import assert_exact
from torch import Tensor, nn

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

B = 6
# These compute parts in float32 whatever the model's dtype.
SINGLE = {"deepseek_v3", "gemma", "mamba", "rwkv"}


def loss(model: nn.Module, batch: tuple) -> Tensor:
    out = model(*batch)
    return (out if torch.is_tensor(out) else out.logits).flatten(1).sin().sum(1).mean()


def text_loss(model: nn.Module, batch: tuple) -> Tensor:
    extra = {"decoder_input_ids": batch[0].flip(1)} if model.config.is_encoder_decoder else {}
    return model(input_ids=batch[0], **extra).logits.flatten(1).sin().sum(1).mean()


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed")


@needs("transformers")
@pytest.mark.parametrize("name", zoo.TEXT)
def test_text_models(name: str) -> None:
    torch.manual_seed(0)
    model = zoo.text(name)
    batch = (torch.randint(3, zoo.V, (B, zoo.T)),)
    assert_exact(model, batch, text_loss, 3, tol=1e-5 if name in SINGLE else 1e-9)


@needs("transformers")
@pytest.mark.parametrize("name", zoo.IMAGE)
def test_image_models(name: str) -> None:
    torch.manual_seed(0)
    assert_exact(zoo.image(name), (torch.randn(B, 3, 16, 16, dtype=torch.float64),), loss, 3, tol=1e-9)


@needs("timm")
@pytest.mark.parametrize("name", [*zoo.TIMM, *zoo.MIXERS])
def test_timm_models(name: str) -> None:
    torch.manual_seed(0)
    size = zoo.TIMM.get(name, {}).get("img_size", 32)
    assert_exact(zoo.vision(name), (torch.randn(B, 3, size, size, dtype=torch.float64),), loss, 3, tol=1e-9)

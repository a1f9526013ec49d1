"""The networks of the laboratory and the benchmarks: GPT, ViT and ResNet in plain torch, by name from `build`.

Layers are initialised as torch does, except where a class says otherwise. None has dropout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Multi-head self-attention; `qk_norm` normalises the queries and keys of each head (Dehghani et al., 2023)."""

    def __init__(self, width: int, heads: int, *, causal: bool = False, qk_norm: bool = False) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width={width} must be a multiple of heads={heads}; use heads={_divisor(width, heads)}")
        self.heads, self.causal = heads, causal
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        each = width // heads
        self.q_norm, self.k_norm = (nn.LayerNorm(each) if qk_norm else nn.Identity() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """Return what each token of x (B, T, width) gathers from the others."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # (B, heads, T, width/heads)
        y = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v, is_causal=self.causal)
        out: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    """Attention and a two-layer net, each behind a layer norm and around a skip."""

    def __init__(
        self,
        width: int,
        heads: int,
        hidden: int,
        *,
        causal: bool = False,
        qk_norm: bool = False,
        gelu: str = "none",
        eps: float = 1e-5,
    ) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width, eps), nn.LayerNorm(width, eps)
        self.attention = Attention(width, heads, causal=causal, qk_norm=qk_norm)
        self.up, self.gelu, self.down = nn.Linear(width, hidden), nn.GELU(gelu), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output for x (B, T, width)."""
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.down(self.gelu(self.up(self.norm2(x))))
        return out


class GPT(nn.Module):
    """A causal transformer over tokens with learned positions, initialised as GPT-2.

    Args:
        vocab: tokens.
        context: the longest sequence, in tokens.
        width: numbers per token.
        depth: blocks.
        heads: attention heads per block.
        tied: whether the head is the token table itself, as in GPT-2.
    """

    def __init__(self, vocab: int, context: int, width: int, depth: int, heads: int, *, tied: bool = False) -> None:
        super().__init__()
        self.vocab, self.context = vocab, context
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Parameter(torch.empty(context, width))
        blocks = (Block(width, heads, 4 * width, causal=True, gelu="tanh") for _ in range(depth))
        self.blocks, self.norm = nn.Sequential(*blocks), nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        nn.init.normal_(self.positions, std=0.02)
        for name, module in self.named_modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                # Layers that add to the skip start smaller, the more of them there are.
                added = name.endswith((".out", ".down"))
                nn.init.normal_(module.weight, std=0.02 / (2 * depth) ** 0.5 if added else 0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits (B, T, vocab) of the token after each of ids (B, T)."""
        logits: Tensor = self.head(self.norm(self.blocks(self.tokens(ids) + self.positions[: ids.shape[1]])))
        return logits


class ViT(nn.Module):
    """A vision transformer with a class token and learned positions.

    Args:
        image: side of the square images, in pixels.
        patch: side of a patch, in pixels.
        width: numbers per patch.
        depth: blocks.
        heads: attention heads per block.
        hidden: width inside a block's two-layer net; by default four times `width`.
        classes: outputs.
        qk_norm: whether queries and keys are normalised.
    """

    def __init__(
        self,
        image: int,
        patch: int,
        width: int,
        depth: int,
        heads: int,
        hidden: int | None = None,
        classes: int = 1000,
        *,
        qk_norm: bool = False,
    ) -> None:
        super().__init__()
        if image % patch:
            raise ValueError(f"image={image} must be a multiple of patch={patch}; use patch={_divisor(image, patch)}")
        self.image, self.classes = image, classes
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.empty(1, 1 + (image // patch) ** 2, width))
        blocks = (Block(width, heads, hidden or 4 * width, qk_norm=qk_norm, eps=1e-6) for _ in range(depth))
        self.blocks, self.norm = nn.Sequential(*blocks), nn.LayerNorm(width, 1e-6)
        self.head = nn.Linear(width, classes)
        nn.init.normal_(self.positions, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (B, classes) of images x (B, 3, image, image)."""
        patches = self.patches(x).flatten(2).transpose(1, 2)
        tokens = torch.cat((self.token.expand(len(x), -1, -1), patches), 1) + self.positions
        logits: Tensor = self.head(self.norm(self.blocks(tokens))[:, 0])
        return logits


class Residual(nn.Module):
    """Convolutions with norms around a skip: two of 3×3 ("basic"), or 1×1, 3×3, 1×1 ("bottleneck")."""

    def __init__(self, inner: int, width: int, stride: int, norm: Callable[[int], nn.Module], bottleneck: bool) -> None:
        super().__init__()
        outer = 4 * width if bottleneck else width
        shapes = [(inner, width, 3, stride), (width, outer, 3, 1)]  # channels in and out, kernel, stride
        if bottleneck:
            shapes = [(inner, width, 1, 1), (width, width, 3, stride), (width, outer, 1, 1)]
        layers = [m for i, o, k, s in shapes for m in (_conv(i, o, k, s), norm(o), nn.ReLU())]
        self.body = nn.Sequential(*layers[:-1])  # the last ReLU comes after the sum
        straight = stride == 1 and inner == outer
        self.skip = nn.Identity() if straight else nn.Sequential(_conv(inner, outer, 1, stride), norm(outer))

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output for x (B, channels, height, width)."""
        return F.relu(self.skip(x) + self.body(x))


class ResNet(nn.Module):
    """A residual network (He et al., 2015; the stride of a bottleneck is in its 3×3 convolution).

    Args:
        image: side of the images it is meant for: up to 64 pixels the stem is one 3×3 convolution, above 7×7 of
            stride 2 with max pooling.
        depths: residual blocks of each stage.
        width: channels of the first stage; each later one has twice as many.
        bottleneck: whether blocks are bottlenecks.
        classes: outputs.
        norm: "batch", or "layer": `LayerNorm2d`.
    """

    def __init__(
        self,
        image: int,
        depths: tuple[int, ...] = (2, 2, 2, 2),
        width: int = 64,
        *,
        bottleneck: bool = False,
        classes: int = 1000,
        norm: str = "batch",
    ) -> None:
        super().__init__()
        if norm not in ("batch", "layer"):
            raise ValueError(f'norm must be "batch" or "layer", got {norm!r}')
        self.image, self.classes = image, classes
        normed: Callable[[int], nn.Module] = nn.BatchNorm2d if norm == "batch" else LayerNorm2d
        small = image <= 64
        stem = [_conv(3, width, 3 if small else 7, 1 if small else 2), normed(width), nn.ReLU()]
        self.stem = nn.Sequential(*stem, *([] if small else [nn.MaxPool2d(3, 2, 1)]))
        blocks, inner = [], width
        for stage, depth in enumerate(depths):
            for i in range(depth):
                blocks.append(Residual(inner, width, 2 if stage and not i else 1, normed, bottleneck))
                inner = 4 * width if bottleneck else width
            width *= 2
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(inner, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (B, classes) of images x (B, 3, height, width)."""
        logits: Tensor = self.head(self.blocks(self.stem(x)).mean((2, 3)))
        return logits


def _conv(inner: int, outer: int, kernel: int, stride: int) -> nn.Conv2d:
    return nn.Conv2d(inner, outer, kernel, stride, kernel // 2, bias=False)


class LayerNorm2d(nn.Module):
    """Layer norm over all of a sample, with a weight and a bias per channel: `nn.GroupNorm(1, channels)`.

    A norm over the whole sample does not depend on the order of memory, so that channels-last activations are not
    copied; torch's group norm copies them twice.
    """

    def __init__(self, channels: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Return x (B, channels, height, width) normalised."""
        rows = x.permute(0, 2, 3, 1)
        with torch.autocast(x.device.type, enabled=False):  # which would keep intermediates in float32
            normed = F.group_norm(rows.flatten(1).unsqueeze(1), 1, None, None, self.eps).view(rows.shape)
            return torch.addcmul(self.bias, normed, self.weight).to(x.dtype).permute(0, 3, 1, 2)


def _divisor(size: int, near: int) -> int:
    """The divisor of `size` nearest to `near`."""
    return min((d for d in range(1, size + 1) if size % d == 0), key=lambda d: abs(d - near))


_GPT2 = {"vocab": 50304, "context": 1024}  # 50,257 tokens, padded to a multiple of 64
MODELS: dict[str, tuple[Callable[..., nn.Module], dict[str, Any]]] = {
    "gpt2-124m": (GPT, {**_GPT2, "width": 768, "depth": 12, "heads": 12}),
    "gpt2-350m": (GPT, {**_GPT2, "width": 1024, "depth": 24, "heads": 16}),
    "gpt-char": (GPT, {"vocab": 65, "context": 256, "width": 384, "depth": 6, "heads": 6}),
    "vit-b16": (ViT, {"image": 224, "patch": 16, "width": 768, "depth": 12, "heads": 12}),
    "vit-cifar": (
        ViT,
        {"image": 32, "patch": 8, "width": 512, "depth": 6, "heads": 8, "hidden": 512, "classes": 10, "qk_norm": True},
    ),
    "resnet18": (ResNet, {"image": 32, "classes": 10}),
    "resnet18-224": (ResNet, {"image": 224}),
    "resnet50": (ResNet, {"image": 224, "depths": (3, 4, 6, 3), "bottleneck": True}),
}


def build(name: str, **options: Any) -> nn.Module:
    """Return a new network by its name in `MODELS`; `options` replace those of the name.

    GPT-2's head is its own matrix unless `tied=True`; "resnet18" and "vit-cifar" are those for 32×32 images.

    >>> sum(p.numel() for p in build("resnet18", norm="layer").parameters())
    11173962
    """
    if name not in MODELS:
        raise ValueError(f"no model is named {name!r}; there are {', '.join(MODELS)}")
    make, defaults = MODELS[name]
    return make(**{**defaults, **options})

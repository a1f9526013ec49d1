"""What a benchmark trains: a model of the lab, of timm, of transformers or the user's own, on random data.

| name | model | data |
|---|---|---|
| `gpt2-124m` | one of `models.MODELS` | tokens or images that suit it |
| `timm:convnext_tiny` | `timm.create_model("convnext_tiny")` | images of its own size |
| `hf:gpt2` | transformers' model of this `model_type`, default config, with a loss | tokens or images |
| `module:function` | what the function gives | what the function gives |

Weights are random, and nothing is downloaded. Options of the model follow a question mark, as in
`hf:gpt2?n_layer=2&tokens=64`, or come by `--set`: arguments of `create_model`, values of the config, arguments of the
function. `tokens` is the length of a text.

A function gives one of

    model, make_batch          make_batch(samples) -> a tuple or dict of tensors, samples first;
                               model(*batch) or model(**batch) is the mean loss, or has it as `.loss`
    model, loss_fn, batch      batch = (x, y); the mean loss is loss_fn(model(x), y)
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..models import GPT, MODELS, ResNet, build

USUAL_TOKENS = 1024
_EXAMPLE = "timm:convnext_tiny, hf:gpt2 or my_module:my_function"


class Subject(NamedTuple):
    """A model with what trains it."""

    model: nn.Module
    run: nn.Module  # run(*batch) is the mean loss over the samples of a batch
    batch: tuple[Tensor, ...]  # tensors whose first dimension is the samples


def is_theirs(name: str) -> bool:
    """Whether a name is not one of the lab's models."""
    return ":" in name


def parse(name: str) -> tuple[str, dict[str, str]]:
    """Return a name without its options, and the options as text.

    >>> parse("hf:gpt2?n_layer=2&tokens=64")
    ('hf:gpt2', {'n_layer': '2', 'tokens': '64'})
    """
    bare, question, rest = name.partition("?")
    options = {}
    for part in rest.split("&") if question else ():
        key, equals, value = part.partition("=")
        if not equals or not key.isidentifier() or not value:
            raise ValueError(f"--model {name}: after ? come KEY=VALUE with & between them, got {part!r}")
        options[key] = value
    return bare, options


def check(name: str, options: dict[str, Any]) -> None:
    """Refuse a model that is not there, or options that it does not take, before anything is built."""
    kind, _, rest = name.partition(":")
    if not is_theirs(name):
        if name not in MODELS:
            raise ValueError(f"no --model is named {name!r}; there are {', '.join(MODELS)}, and {_EXAMPLE}")
        try:
            with torch.device("meta"):
                build(name, **options)
        except TypeError as error:
            raise ValueError(f"--set does not suit --model {name}: {error}") from error
        except ValueError as error:
            raise ValueError(f"--set: {error}") from error
    elif kind == "timm":
        timm = _package("timm", name)
        if not timm.is_model(rest):
            raise ValueError(f"--model {name}: timm has no model {rest!r}{_near(rest, timm.list_models())}")
    elif kind == "hf":
        _config(name, options)
    else:
        _function(name)


def make(name: str, options: dict[str, Any], samples: int, device: torch.device) -> Subject:
    """Build a model on `device`, with a batch of random data."""
    kind, _, rest = name.partition(":")
    if not is_theirs(name):
        with device:
            return _of_the_lab(name, options, samples)
    if kind == "timm":
        found = _of_timm(rest, options, samples)
    elif kind == "hf":
        found = _of_transformers(name, options, samples)
    else:
        found = _of_a_function(name, options, samples)
    model, run, batch = found
    for x in batch:
        if not isinstance(x, Tensor) or x.dim() == 0 or len(x) != samples:
            raise ValueError(
                f"--model {name}: a batch is tensors whose first dimension is {samples} samples (--batch), got "
                f"{f'shape {tuple(x.shape)}' if isinstance(x, Tensor) else type(x).__name__}"
            )
    run.to(device).train()
    return Subject(model, run, tuple(x.to(device) for x in batch))


def _of_the_lab(name: str, options: dict[str, Any], samples: int) -> Subject:
    model = build(name, **options)
    if isinstance(model, GPT):
        shape: tuple[int, ...] = (samples, model.context)
        x, y = torch.randint(model.vocab, shape), torch.randint(model.vocab, shape)
    else:
        side = int(model.image)  # type: ignore[arg-type]
        x = torch.randn(samples, 3, side, side)
        y = torch.randint(int(model.classes), (samples,))  # type: ignore[arg-type]
    if isinstance(model, ResNet):
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        x = x.contiguous(memory_format=torch.channels_last)
    return Subject(model, Classified(model), (x, y))


def _of_timm(name: str, options: dict[str, Any], samples: int) -> Subject:
    timm = _package("timm", f"timm:{name}")
    model = timm.create_model(name, pretrained=False, **options)
    size = model.pretrained_cfg["input_size"]
    if "img_size" in options:
        side = options["img_size"]
        size = (size[0], *(side if isinstance(side, tuple) else (side, side)))
    x = torch.randn(samples, *size)
    return Subject(model, Classified(model), (x, torch.randint(model.num_classes, (samples,))))


def _of_transformers(name: str, options: dict[str, Any], samples: int) -> Subject:
    transformers = _package("transformers", name)
    config, head = _config(name, options)
    if hasattr(config, "use_cache"):
        config.use_cache = False  # a cache of keys and values is for generation
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 0  # which token the decoder's text begins with does not matter here
    model = getattr(transformers, head)(config)
    if hasattr(config, "image_size"):
        side, classes = config.image_size, config.num_labels
        sides = side if isinstance(side, (tuple, list)) else (side, side)
        batch = {"pixel_values": torch.randn(samples, getattr(config, "num_channels", 3), *sides)}
        batch["labels"] = torch.randint(classes, (samples,))
    else:
        text = config.get_text_config()
        longest = getattr(text, "max_position_embeddings", None) or USUAL_TOKENS
        tokens = int(options.get("tokens", min(USUAL_TOKENS, longest)))
        ids = torch.randint(text.vocab_size, (samples, tokens))
        batch = {"input_ids": ids, "labels": ids.clone()}
    return Subject(model, Returned(model, tuple(batch)), tuple(batch.values()))


def _config(name: str, options: dict[str, Any]) -> tuple[Any, str]:
    """The config of a model type, and the name of its class with a loss."""
    transformers = _package("transformers", name)
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    kind = name.partition(":")[2]
    heads: list[dict[str, str]] = [
        getattr(auto, f"MODEL_FOR_{task}_MAPPING_NAMES")
        for task in ("MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "CAUSAL_LM", "IMAGE_CLASSIFICATION")
    ]
    found = next((head[kind] for head in heads if kind in head), None)
    if found is None:
        known = {known for head in heads for known in head}
        raise ValueError(
            f"--model {name}: transformers has no model_type {kind!r} with a loss over tokens or images"
            f"{_near(kind, known)}"
        )
    usual = transformers.AutoConfig.for_model(kind)
    changes = {key: value for key, value in options.items() if key != "tokens"}
    for key in changes:
        if not hasattr(usual, key):
            raise ValueError(f"--model {name}: its config has no {key!r}{_near(key, usual.to_dict())}")
    try:
        config = transformers.AutoConfig.for_model(kind, **changes)
    except Exception as error:  # whatever a config objects to
        raise ValueError(f"--model {name}: its config refuses {changes}: {error}") from error
    return config, found[0] if isinstance(found, (tuple, list)) else found


def _of_a_function(name: str, options: dict[str, Any], samples: int) -> Subject:
    given = _function(name)(**options)
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], nn.Module) and callable(given[1]):
        model, batch = given[0], given[1](samples)
        keys = tuple(batch) if isinstance(batch, dict) else None
        return Subject(model, Returned(model, keys), tuple(batch.values() if isinstance(batch, dict) else batch))
    if isinstance(given, tuple) and len(given) == 3 and isinstance(given[0], nn.Module) and len(given[2]) == 2:
        model, loss_fn, (x, y) = given
        if len(x) < samples:
            raise ValueError(f"--model {name} gives a batch of {len(x)} samples; --batch {samples} asks for more")
        return Subject(model, Scored(model, loss_fn), (x[:samples], y[:samples]))
    raise ValueError(
        f"--model {name}: the function must return (model, make_batch) or (model, loss_fn, (x, y)), got "
        f"{type(given).__name__}; see invariant-adam bench one-pass --help"
    )


def _function(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` has it
    try:
        found = getattr(importlib.import_module(module), function)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise ValueError(f"--model {name}: {module} imports {error.name}, which is not installed") from error
        raise ValueError(
            f"--model {name}: no module {module!r} in this folder or installed; a model is {_EXAMPLE}"
        ) from error
    except AttributeError as error:
        raise ValueError(f"--model {name}: module {module} has no {function!r}") from error
    if not callable(found):
        raise ValueError(f"--model {name}: {function} is a {type(found).__name__}, not a function")
    return found  # type: ignore[no-any-return]


def _package(package: str, name: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ValueError(f"--model {name} needs {package}: pip install {package}") from error


def _near(word: str, known: Iterable[str]) -> str:
    """Return words like `word`, as the end of a message."""
    near = difflib.get_close_matches(word, list(known), n=3)
    return f"; did you mean {' or '.join(near)}?" if near else ""


class Classified(nn.Module):
    """A model with the cross-entropy of its logits, so that a compiled graph holds both."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the mean loss over samples x with targets y."""
        return F.cross_entropy(self.model(x).flatten(0, -2).float(), y.flatten())


class Scored(nn.Module):
    """A model with a loss function of the user's."""

    def __init__(self, model: nn.Module, loss_fn: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.model, self.loss_fn = model, loss_fn

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the mean loss over samples x with targets y."""
        return self.loss_fn(self.model(x), y)


class Returned(nn.Module):
    """A model that returns its loss, or an output that has it; called by name where `keys` are given."""

    def __init__(self, model: nn.Module, keys: tuple[str, ...] | None) -> None:
        super().__init__()
        self.model, self.keys = model, keys

    def forward(self, *batch: Tensor) -> Tensor:
        """Return the mean loss over a batch."""
        named = {} if self.keys is None else dict(zip(self.keys, batch, strict=True))
        output = self.model(**named) if named else self.model(*batch)
        loss: Tensor = output if isinstance(output, Tensor) else output.loss
        return loss

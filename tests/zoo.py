# ruff: noqa: E501 - tables
"""Small models taken unmodified from transformers and timm, with random weights."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

V, D, T = 37, 16, 6  # vocabulary, width, sequence length

TEXT = {
    # name: (config class, model class, config arguments)
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {"n_embd": D, "n_layer": 2, "n_head": 2, "n_positions": 16}),
    "llama": ("LlamaConfig", "LlamaForCausalLM", {"num_key_value_heads": 1}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"num_key_value_heads": 1}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {"num_key_value_heads": 1}),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", {"num_key_value_heads": 1, "head_dim": 8}),
    "phi": ("PhiConfig", "PhiForCausalLM", {}),
    "opt": ("OPTConfig", "OPTForCausalLM", {"ffn_dim": 32, "word_embed_proj_dim": D, "max_position_embeddings": 16}),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", {}),
    "bloom": ("BloomConfig", "BloomForCausalLM", {"n_layer": 2, "n_head": 2}),
    "bert": ("BertConfig", "BertForMaskedLM", {}),
    "roberta": ("RobertaConfig", "RobertaForMaskedLM", {"max_position_embeddings": 40}),
    "albert": ("AlbertConfig", "AlbertForMaskedLM", {"embedding_size": 8}),
    "distilbert": ("DistilBertConfig", "DistilBertForMaskedLM", {"dim": D, "hidden_dim": 32, "n_layers": 2, "n_heads": 2}),
    "electra": ("ElectraConfig", "ElectraForMaskedLM", {"embedding_size": 8}),
    "deberta_v2": ("DebertaV2Config", "DebertaV2ForMaskedLM", {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
    "t5": ("T5Config", "T5ForConditionalGeneration", {"d_model": D, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}),
    "bart": ("BartConfig", "BartForConditionalGeneration", {"d_model": D, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_position_embeddings": 16}),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {"num_key_value_heads": 1, "num_local_experts": 3, "experts_implementation": "eager"}),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", {"num_key_value_heads": 1, "head_dim": 8, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"}),
    "llama4": ("Llama4TextConfig", "Llama4ForCausalLM", {"num_key_value_heads": 1, "head_dim": 8, "intermediate_size_mlp": 32, "num_local_experts": 4}),
    "jetmoe": ("JetMoeConfig", "JetMoeForCausalLM", {"num_key_value_heads": 2, "kv_channels": 8, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "deepseek_v3": ("DeepseekV3Config", "DeepseekV3ForCausalLM", {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "n_group": 1, "topk_group": 1, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1, "experts_implementation": "eager"}),
    "mamba": ("MambaConfig", "MambaForCausalLM", {"state_size": 4}),
    "rwkv": ("RwkvConfig", "RwkvForCausalLM", {"attention_hidden_size": D, "context_length": 16}),
}  # fmt: skip

IMAGE = {
    "vit": ("ViTConfig", "ViTForImageClassification", {"image_size": 16, "patch_size": 8}),
    "deit": ("DeiTConfig", "DeiTForImageClassification", {"image_size": 16, "patch_size": 8}),
    "convnext_hf": ("ConvNextConfig", "ConvNextForImageClassification", {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "image_size": 16}),
    "swin_hf": ("SwinConfig", "SwinForImageClassification", {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [2, 1], "num_heads": [2, 2], "window_size": 4, "num_channels": 3}),
    "resnet_hf": ("ResNetConfig", "ResNetForImageClassification", {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}),
}  # fmt: skip

TIMM = {
    "resnet18": {"layers": [1, 1, 1, 1], "channels": (8, 8, 16, 16)},
    "convnext_atto": {"depths": (1, 1, 1, 1), "dims": (8, 8, 16, 16)},
    "efficientnet_b0": {},
    "mobilenetv3_small_050": {},
    "swin_tiny_patch4_window7_224": {"embed_dim": 8, "depths": (2, 1), "num_heads": (2, 2), "window_size": 4, "img_size": 32},
    "swinv2_tiny_window8_256": {"embed_dim": 8, "depths": (2, 1), "num_heads": (2, 2), "window_size": 4, "img_size": 32},
    "vit_tiny_patch16_224": {"depth": 2, "embed_dim": 16, "num_heads": 2, "img_size": 32},
    "deit3_small_patch16_224": {"depth": 2, "embed_dim": 16, "num_heads": 2, "img_size": 32},
    "cait_xxs24_224": {"depth": 2, "embed_dim": 16, "num_heads": 2, "img_size": 32},
    "densenet121": {"growth_rate": 4, "block_config": (2, 2)},
    "regnety_002": {},
    "poolformer_s12": {"layers": (1, 1, 1, 1), "embed_dims": (8, 8, 16, 16)},
    "levit_128s": {"img_size": 64},
}  # fmt: skip

# Classes of timm.models.mlp_mixer, whose registered sizes are fixed.
MIXERS = {"mlp_mixer": "MixerBlock", "resmlp": "ResBlock"}


def still(model: nn.Module) -> nn.Module:
    """Train mode without dropout, so that one pass and the loop draw nothing."""
    for m in model.modules():
        for key, value in list(vars(m).items()):
            if isinstance(value, float) and ("drop" in key or (isinstance(m, nn.Dropout) and key == "p")):
                setattr(m, key, 0.0)
    return model.double().train()


def text(name: str) -> nn.Module:
    transformers = zoo_module("transformers")
    config_name, model_name, extra = TEXT[name]
    kwargs = {
        "vocab_size": V, "hidden_size": D, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32,
        "use_cache": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
    }  # fmt: skip
    drops = dict.fromkeys(
        "attention_dropout dropout hidden_dropout resid_pdrop attn_pdrop embd_pdrop hidden_dropout_prob "  # noqa: SIM905
        "attention_probs_dropout_prob dropout_rate activation_dropout attention_dropout_prob classifier_dropout".split(),
        0.0,
    )
    config = getattr(transformers, config_name)(**{**kwargs, **drops, **extra})
    return still(getattr(transformers, model_name)(config))


def image(name: str) -> nn.Module:
    transformers = zoo_module("transformers")
    config_name, model_name, extra = IMAGE[name]
    kwargs = {
        "hidden_size": D,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "num_labels": 5,
    }
    drops = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "drop_path_rate": 0.0}
    if name == "swin_hf":
        kwargs = {"num_labels": 5}  # its widths and heads are lists
    config = getattr(transformers, config_name)(**{**kwargs, **drops, **extra})
    return still(getattr(transformers, model_name)(config))


_libraries: list[torch.library.Library] = []


def _find_packages() -> None:
    """Put what `make test-slow` installs in a folder of its own on the path: this process alone, no other, sees it.

    torchvision expects operators of an extension built for CUDA, and breaks each package that looks for it. Here they
    are declared first.
    """
    folder = Path(sys.prefix, "zoo-packages")
    if not folder.is_dir():
        return
    sys.path.append(str(folder))
    source = Path(folder, "torchvision", "_meta_registrations.py").read_text(encoding="utf-8")
    library = torch.library.Library("torchvision", "DEF")
    _libraries.append(library)
    found = re.findall(r'register_meta\("(\w+)"\)|"torchvision::(\w+)"', source)
    for op in sorted({a or b for a, b in found}):
        library.define(f"{op}(Tensor x) -> Tensor")


_find_packages()


def zoo_module(name: str) -> Any:
    """Import transformers or timm without their warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)


def vision(name: str) -> nn.Module:
    timm = zoo_module("timm")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if name in MIXERS:
            module = zoo_module("timm.models.mlp_mixer")
            block = getattr(module, MIXERS[name])
            ratio = (0.5, 4.0) if name == "mlp_mixer" else 4
            return still(
                module.MlpMixer(
                    5,
                    32,
                    patch_size=8,
                    num_blocks=2,
                    embed_dim=16,
                    mlp_ratio=ratio,
                    block_layer=block,
                )
            )
        return still(timm.create_model(name, num_classes=5, **TIMM[name]))

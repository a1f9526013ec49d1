"""Is one pass exact on models of other libraries, and on speech models of transformers? Made small, on a CPU.

    pip install --no-deps --target build/others diffusers vit-pytorch x-transformers segmentation-models-pytorch \
        einops einx frozendict importlib_metadata loguru torch_einops_utils zipp
    python benchmarks/coverage_others.py --packages build/others --out benchmarks/results/coverage_others_cpu.json

Each is its library's own class, with random weights and without dropout, held against a loop of micro-batches in
float64 as `benchmarks/coverage.py` does. Beside timm and transformers (`make test-slow` installs them) the packages
above must be there, in a folder of their own; without their own wishes, which would bring another torch.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections import Counter
from pathlib import Path

import torch
from coverage import SAMPLES, find_timm, hold, quiet, still

from invariant_adam_lab import record


def pictures(side=32, channels=3):
    return torch.randn(SAMPLES, channels, side, side)


def vectors(*shape):
    return torch.randn(SAMPLES, *shape)


def numbers(most=1000, *shape):
    return torch.randint(0, most, (SAMPLES, *shape))


VIT = {"num_classes": 5, "heads": 2}
PLAIN = VIT | {"image_size": 32, "patch_size": 8, "dim": 16, "depth": 2, "mlp_dim": 32, "dim_head": 8}
STAGES = {"emb_dim": 8, "heads": 1, "depth": 1}
TWINS = {"emb_dim": 8, "local_patch_size": 2, "global_k": 2, "depth": 1}
VIT_PYTORCH = {  # module.class, what it asks for
    "vit.ViT": PLAIN,
    "simple_vit.SimpleViT": PLAIN,
    "deepvit.DeepViT": PLAIN,
    "parallel_vit.ViT": PLAIN,
    "normalized_vit.nViT": PLAIN,
    "simple_vit_with_register_tokens.SimpleViT": PLAIN | {"num_register_tokens": 2},
    "simple_vit_with_qk_norm.SimpleViT": PLAIN,
    "vit_with_patch_merger.ViT": PLAIN | {"patch_merge_layer": 1, "patch_merge_num_tokens": 2},
    "cait.CaiT": PLAIN | {"cls_depth": 1},
    "xcit.XCiT": PLAIN | {"cls_depth": 1, "local_patch_kernel_size": 3},
    "pit.PiT": PLAIN | {"depth": (1, 1)},
    "t2t.T2TViT": {k: v for k, v in PLAIN.items() if k != "patch_size"} | {"t2t_layers": ((3, 2), (3, 2))},
    "levit.LeViT": {
        "image_size": 32, "num_classes": 5, "stages": 2, "dim": (16, 24), "depth": 1, "heads": (2, 2), "mlp_mult": 2,
    },
    "cvt.CvT": {"num_classes": 5} | {f"s{i}_{k}": v for i in (1, 2, 3) for k, v in STAGES.items()},
    "twins_svt.TwinsSVT": {"num_classes": 5, "s4_patch_size": 1}
    | {f"s{i}_{k}": v for i in (1, 2, 3, 4) for k, v in (TWINS if i < 4 else TWINS | dict.fromkeys(TWINS, 1)).items()},
    "regionvit.RegionViT": {
        "num_classes": 5, "dim": (8,) * 4, "depth": (1,) * 4, "window_size": 2, "local_patch_size": 2,
    },
    "nest.NesT": VIT | {"image_size": 32, "patch_size": 4, "dim": 16, "num_hierarchies": 2, "block_repeats": (1, 1)},
    "max_vit.MaxViT": {
        "num_classes": 5, "dim_conv_stem": 8, "dim": 8, "dim_head": 8, "depth": (1, 1), "window_size": 2,
        "mbconv_expansion_rate": 2, "mbconv_shrinkage_rate": 0.25,
    },
    "scalable_vit.ScalableViT": {
        "num_classes": 5, "dim": 8, "heads": (1, 1), "depth": (1, 1), "ssa_dim_key": (4, 4), "reduction_factor": (2, 1),
        "window_size": (2, None),
    },
}  # fmt: skip
X_TRANSFORMERS = {  # what its Decoder is asked for
    name: dict.fromkeys(name.split(), True)
    for name in (
        "rotary_pos_emb", "alibi_pos_bias", "rel_pos_bias", "use_rmsnorm", "use_simple_rmsnorm", "use_scalenorm",
        "ff_glu ff_swish", "attn_qk_norm", "attn_pre_talking_heads", "attn_head_scale", "attn_one_kv_head",
        "attn_softclamp_logits", "attn_data_dependent_alibi", "sandwich_norm", "residual_attn", "gate_residual",
        "use_layerscale", "macaron", "add_value_residual",
    )
} | {
    "attn_num_mem_kv=2": {"attn_num_mem_kv": 2}, "attn_kv_heads=1": {"attn_kv_heads": 1},
    "shift_tokens=1": {"shift_tokens": 1}, "num_residual_streams=2": {"num_residual_streams": 2},
}  # fmt: skip
BLOCKS = {"block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4}
CODER = BLOCKS | {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
UNET = BLOCKS | {"sample_size": 16, "in_channels": 3, "out_channels": 3, "attention_head_dim": 8}
TWO_HEADS = {"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "num_layers": 2}
PATCHES = TWO_HEADS | {"sample_size": 8, "patch_size": 2}
JOINT = {"joint_attention_dim": 16, "pooled_projection_dim": 16}
DIFFUSERS = {  # what it asks for, its inputs, how it is called
    "AutoencoderKL": (CODER, lambda: [pictures(16)], lambda m, x: m(x)),
    "VQModel": (CODER, lambda: [pictures(16)], lambda m, x: m(x)),
    "UNet2DModel": (
        UNET | {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
                "up_block_types": ("AttnUpBlock2D", "UpBlock2D")},
        lambda: [pictures(16), numbers()], lambda m, x, t: m(x, t),
    ),
    "UNet2DConditionModel": (
        UNET | {"down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"), "cross_attention_dim": 16,
                "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D")},
        lambda: [pictures(16), numbers(), vectors(4, 16)], lambda m, x, t, c: m(x, t, c),
    ),
    "DiTTransformer2DModel": (
        PATCHES | {"out_channels": 4, "norm_num_groups": 2, "num_embeds_ada_norm": 10},
        lambda: [pictures(8, 4), numbers(), numbers(10)], lambda m, x, t, y: m(x, t, class_labels=y),
    ),
    "PixArtTransformer2DModel": (
        PATCHES | {"out_channels": 8, "norm_num_groups": 2, "cross_attention_dim": 16, "caption_channels": 16,
                   "use_additional_conditions": False},
        lambda: [pictures(8, 4), vectors(4, 16), numbers()],
        lambda m, x, c, t: m(x, c, t, added_cond_kwargs={"resolution": None, "aspect_ratio": None}),
    ),
    "SanaTransformer2DModel": (
        PATCHES | {"out_channels": 4, "num_cross_attention_heads": 2, "cross_attention_head_dim": 8,
                   "cross_attention_dim": 16, "caption_channels": 16, "mlp_ratio": 2.0},
        lambda: [pictures(8, 4), vectors(4, 16), numbers()], lambda m, x, c, t: m(x, c, t),
    ),
    "SD3Transformer2DModel": (
        PATCHES | JOINT | {"out_channels": 4, "caption_projection_dim": 16, "pos_embed_max_size": 8},
        lambda: [pictures(8, 4), vectors(4, 16), vectors(16), numbers()], lambda m, *given: m(*given),
    ),
    "FluxTransformer2DModel": (
        TWO_HEADS | JOINT | {"num_single_layers": 1, "num_layers": 1, "axes_dims_rope": (2, 2, 4),
                             "guidance_embeds": False},
        lambda: [vectors(9, 4), vectors(4, 16), vectors(16), numbers()],
        lambda m, x, c, p, t: m(x, c, p, t / 1000, img_ids=torch.zeros(9, 3).to(x), txt_ids=torch.zeros(4, 3).to(x)),
    ),
}  # fmt: skip
SPEECH = (
    "data2vec-audio",
    "hubert",
    "sew",
    "sew-d",
    "unispeech",
    "unispeech-sat",
    "wav2vec2",
    "wav2vec2-conformer",
    "wavlm",
)
SPEECH_CONFIG = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 12,
    "conv_dim": (8, 8), "conv_kernel": (4, 3), "conv_stride": (2, 2), "num_feat_extract_layers": 2, "layerdrop": 0.0,
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "mask_time_length": 2, "squeeze_factor": 1,
}  # fmt: skip


def of_vit_pytorch(name):
    module, _, kind = name.rpartition(".")
    made = getattr(importlib.import_module(f"vit_pytorch.{module}"), kind)
    return made(**VIT_PYTORCH[name]), [pictures()], lambda m, x: m(x)


def of_x_transformers(name):
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(dim=16, depth=2, heads=2, attn_dim_head=8, **X_TRANSFORMERS[name])
    model = TransformerWrapper(num_tokens=11, max_seq_len=16, num_memory_tokens=3, attn_layers=layers)
    return model, [numbers(11, 8)], lambda m, x: m(x)


def of_diffusers(name):
    import diffusers

    options, inputs, call = DIFFUSERS[name]
    return getattr(diffusers, name)(**options), inputs(), lambda m, *given: call(m, *given).sample


def of_segmentation(name):
    import segmentation_models_pytorch

    made = getattr(segmentation_models_pytorch, name)
    return made("resnet18", encoder_weights=None, classes=2), [pictures(64)], lambda m, x: m(x)


def of_speech(name):
    """With masks for a part of the time, as they are trained: their token is a parameter."""
    import transformers

    config = transformers.AutoConfig.for_model(name, **SPEECH_CONFIG)
    model = still(transformers.AutoModelForCTC.from_config(config))
    sound = vectors(400)
    times = model(sound).logits.shape[1]

    def call(m, x, mask):
        return m.lm_head(getattr(m, m.base_model_prefix)(x, mask_time_indices=mask)[0])

    return model, [sound, torch.rand(SAMPLES, times) > 0.6], call


LIBRARIES = {  # the package: how a model is made, and which
    "diffusers": (of_diffusers, DIFFUSERS),
    "vit-pytorch": (of_vit_pytorch, VIT_PYTORCH),
    "x-transformers": (of_x_transformers, X_TRANSFORMERS),
    "segmentation-models-pytorch": (
        of_segmentation,
        ("Unet", "UnetPlusPlus", "FPN", "Linknet", "PSPNet", "DeepLabV3Plus"),
    ),
    "transformers": (of_speech, SPEECH),
}


class Called(torch.nn.Module):
    """A model of several inputs as one of the places of its samples."""

    def __init__(self, model, inputs, call):
        super().__init__()
        self.model, self.inputs, self.call = model, inputs, call

    def forward(self, at):
        kind = next(self.parameters()).dtype
        given = [t[at].to(kind) if t.is_floating_point() else t[at] for t in self.inputs]
        return self.call(self.model, *given)


def look(library, name):
    """One model's row."""
    torch.manual_seed(0)
    model = still(Called(*LIBRARIES[library][0](name)))
    row = {"class": type(model.model).__name__, "parameters": sum(p.numel() for p in model.parameters())}
    return row | hold(model, torch.arange(SAMPLES), model, torch.float64)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/coverage_others.json"), help="results, a row at a time")
    parser.add_argument("--packages", type=Path, help="the folder of the packages")
    parser.add_argument("--only", default="", help="models whose names hold one of these, with commas")
    options = parser.parse_args()
    quiet()
    find_timm()
    if options.packages:
        if not options.packages.is_dir():
            parser.error(f"--packages: there is no folder {options.packages}; see --help for how to make it")
        sys.path.append(str(options.packages))
    torch.set_num_threads(1)
    rows = record.Rows(options.out, "python benchmarks/coverage_others.py", "coverage_others", torch.device("cpu"))
    cases = [(library, name) for library, (_, names) in LIBRARIES.items() for name in names]
    cases = [case for case in cases if any(part in ":".join(case) for part in options.only.split(","))]
    for i, (library, name) in enumerate(cases, 1):
        how = {"library": library, "name": name, "version": record.version(library)}
        if rows.has(how):
            continue
        try:
            row = look(library, name)
        except ImportError as error:
            parser.error(f"{library} is not there ({error}); see --help for what to install, and --packages")
        rows.add(how, row)
        print(f"[{i}/{len(cases)}] {library}:{name}: {row['outcome']}", flush=True)
    print(dict(Counter(f"{row['library']} {row['outcome']}" for row in rows.rows)))


if __name__ == "__main__":
    main()

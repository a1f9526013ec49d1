"""On which models is one pass exact? Each model type of transformers and each family of timm, made small, on a CPU.

    python benchmarks/coverage.py --out benchmarks/results/coverage_cpu.json
    python benchmarks/coverage.py --only transformers:llama,timm:resnet

A model is its library's own class with random weights, no dropout and few, narrow layers; of a family of timm it is the
one of fewest parameters. Gradients and squares of one pass, B = 6 and M = 3, are held against a loop over the
micro-batches, in float64, or in float32 where it does not run in that. Experts are run one by one there; as
transformers runs them by default, which needs float32, they are looked at once more. Each model has a process of its
own; rows that the file has are not made again.

    exact     the largest difference, over the largest value, is at most 1e-5 (float32: 1e-3)
    refused   one pass raised UnsupportedUse, whose message is kept
    wrong     neither
    left out  the model was not made small, or does not run by itself

transformers and timm must be there (`make test-slow` installs them).
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import multiprocessing
import os
import sys
import time
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
SAMPLES, MICRO, TOKENS, SIDE = 6, 3, 7, 64
LIMITS = {"float64": 1e-5, "float32": 1e-3}
TASKS = ("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_CLASSIFICATION")
MOST = 40_000_000  # parameters of a type of transformers that counts as small
LARGE = 300_000_000  # parameters of a model of timm that is too large for a usual machine
# A config's sizes; of each model those that its config has.
SIZES = {
    1: "num_key_value_heads num_kv_heads n_group topk_group first_k_dense_replace num_dense_layers",
    2: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers "
    "encoder_attention_heads decoder_attention_heads n_head n_heads num_attention_heads num_heads num_experts_per_tok "
    "moe_topk moe_top_k top_k_experts moe_k num_experts_per_token num_selected_experts linear_num_key_heads "
    "linear_num_value_heads linear_num_heads conf_num_attention_heads num_self_attends_per_block "
    "num_self_attention_heads num_cross_attention_heads",
    4: "num_experts num_local_experts n_routed_experts moe_num_experts mamba_n_heads qk_rope_head_dim qk_nope_head_dim "
    "rotary_dim state_size mamba_d_state sliding_window index_n_heads attention_window laurel_rank",
    5: "num_labels num_latents",
    8: "head_dim d_kv v_head_dim linear_key_head_dim linear_value_head_dim head_size kv_channels q_lora_rank "
    "kv_lora_rank mamba_d_head attention_window_size hidden_size_per_layer_input linear_head_dim index_head_dim "
    "attention_head_size",
    16: "hidden_size d_model n_embd embedding_size word_embed_proj_dim dim attention_hidden_size lru_width "
    "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size context_length emb_dim "
    "entity_emb_size d_latents router_hidden_size hidden_size_global audio_hidden_size",
    32: "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff n_inner hidden_dim intermediate_size_mlp "
    "ffn_hidden_size mamba_d_ssm feed_forward_size",
    37: "vocab_size vocab_size_per_layer_input n_words entity_vocab_size",
    40: "max_position_embeddings n_positions",
}
SMALL = {"use_cache": False} | {name: size for size, names in SIZES.items() for name in names.split()}
PICTURES = (  # tried one after the other: windows and strides do not fit every size
    {"image_size": 32, "patch_size": 4}, {"image_size": 64, "patch_size": 8}, {"image_size": 64}, {},
)  # fmt: skip
OWN = {  # what a model type asks for besides
    "bit": {"num_groups": 8},
    "codegen": {"n_head": 4},
    "bailing_hybrid": {"n_group": 1},
    "blt": {"encoder_hash_byte_group_vocab": 37},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}},
    },
    "dbrx": {"attn_config": {"kv_n_heads": 1, "rope_theta": 1e4, "clip_qkv": 8.0}},
    "diffllama": {"num_key_value_heads": 2},
    "dots1": {"n_shared_experts": 1},
    "efficientnet": {"width_coefficient": 0.25, "depth_coefficient": 0.25, "hidden_dim": 320},
    "esm": {"mask_token_id": 3, "pad_token_id": 0, "vocab_size": 37},
    "esmc": {"num_key_value_heads": 2},
    "gemma3n_text": {
        "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0], "intermediate_size": 32,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "hiera": {"embed_dim": 16, "depths": [1, 1, 1, 1]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 4, "n_groups": 1},
    "nemotron_h": {"layers_block_type": ["linear_attention", "mlp", "full_attention", "moe"]},
    "neomme": {"head_dim": 16},
    "qwen4_exp_text": {
        "indexer_budget": 4, "indexer_compress_ratio": 2, "indexer_head_dim": 8, "indexer_kv_heads": 1,
        "indexer_n_heads": 2, "hc_lowrank": 4,
    },
    "reformer": {
        "attn_layers": ["local", "local"], "axial_pos_shape": [2, 4], "axial_pos_embds_dim": [8, 8], "is_decoder": True,
        "local_attn_chunk_length": 4, "max_position_embeddings": 8,
    },
    "zamba": {
        "num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2, "attention_hidden_size": 32,
        "attention_head_dim": 16,
    },
    "zamba2": {
        "num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2, "attention_hidden_size": 32,
        "attention_head_dim": 16,
    },
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip
# The shape of a sample of tokens, where it is not `TOKENS`.
SHAPES = dict.fromkeys(("led", "longformer", "reformer"), (8,)) | dict.fromkeys(("musicgen", "musicgen_melody"), (4, 7))
TOKEN_IDS = {"blank_token_id": 0, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}


LAYERS = ("layer_types", "mlp_layer_types", "layers_block_type")  # a kind for each layer: the first and the last other


def smaller(config, sides):
    """Other values for a config, or a part of one; `sides` are those of pictures and their patches."""
    usual = config.to_dict()
    found = {k: v for k, v in SMALL.items() if k in usual and not isinstance(usual[k], (list, tuple, dict))}
    if "qk_rope_head_dim" in usual:
        found.pop("head_dim", None)  # follows from the others
    if "kv_lora_rank" in usual and "num_key_value_heads" in usual:
        found |= {"num_key_value_heads": found["num_attention_heads"]}  # heads of one latent
    found |= {k: 0.0 for k, v in usual.items() if ("drop" in k or "jitter" in k) and isinstance(v, float)}
    if "head_dim" in usual and usual["head_dim"] == usual.get("qk_rope_head_dim", 0):
        found["head_dim"] = found["qk_rope_head_dim"]
    for k in LAYERS[: 2 if "layer_types" in usual else 3]:  # the last names the first
        kinds = usual.get(k) or []
        others = [kind for kind in (*kinds[::-1], *kinds[:1]) if kind != kinds[0]] or kinds[-1:]
        found |= {k: [kinds[0], others[0]]} if kinds else {}
    found |= {  # its parts
        k: {"model_type": part.model_type} | smaller(part, sides)
        for k, part in vars(config).items()
        if hasattr(part, "to_dict")
    }
    found |= {k: v for k, v in sides.items() if k in usual} | OWN.get(config.model_type, {})
    return found | {k: v for k, v in TOKEN_IDS.items() if usual.get(k) is not None}


def still(model):
    """Train mode without dropout: one pass and the loop draw nothing."""
    for module in model.modules():
        for key, value in list(vars(module).items()):
            if isinstance(value, float) and ("drop" in key or (key == "p" and "Drop" in type(module).__name__)):
                setattr(module, key, 0.0)
    return model.train()


def of_transformers(kind, task):
    """A small model of this type, with one batch and its logits' function."""
    import torch
    import transformers

    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    head = getattr(auto, f"MODEL_FOR_{task}_MAPPING_NAMES")[kind]
    made = getattr(transformers, head[0] if isinstance(head, (tuple, list)) else head)
    usual = transformers.AutoConfig.for_model(kind)
    if made.config_class not in (None, type(usual)):  # a part of it, such as the text's
        usual = made.config_class()
    pictures = task == "IMAGE_CLASSIFICATION" and made.main_input_name == "pixel_values"
    for sides in PICTURES if pictures else ({},):
        changes = smaller(usual, sides)
        try:
            config = type(usual)(**changes)
            with torch.device("meta"):
                count = sum(p.numel() for p in made(config).parameters())
            if count > MOST:
                raise ValueError(f"{count:,} parameters: its config was not made small")
            model = made(config)
            if not pictures:
                break
            seen = config if hasattr(config, "image_size") else getattr(config, "vision_config", config)
            side = getattr(seen, "image_size", SIDE)
            side = side if isinstance(side, (tuple, list)) else (side, side)
            channels = getattr(seen, "num_channels", 3)
            batch = torch.randn(SAMPLES, channels, *side, dtype=torch.float64)
            if "spatial_shapes" in inspect.signature(model.forward).parameters:  # it wants patches of 2 by 3
                batch = torch.randn(SAMPLES, 6, channels * seen.patch_size**2, dtype=torch.float64)
            forward = partial(classify, model)
            model.eval()
            forward(batch[:1].float())
            return model, batch, forward
        except Exception:
            if sides == PICTURES[-1] or not pictures:
                raise
    ids = torch.randint(3, config.get_text_config().vocab_size, (SAMPLES, *SHAPES.get(kind, (TOKENS,))))
    if config.is_encoder_decoder:
        return model, ids, lambda x: model(input_ids=x, decoder_input_ids=x.flip(1)).logits
    return model, ids, lambda x: model(input_ids=x).logits


def classify(model, pictures):
    """The logits of pictures, or of their patches."""
    import torch

    options = {}
    if pictures.ndim == 3:
        shapes = torch.tensor([[2, 3]]).expand(len(pictures), 2)
        options = {"pixel_attention_mask": torch.ones(pictures.shape[:2]), "spatial_shapes": shapes}
    out = model(pictures, **options)
    return out.logits if hasattr(out, "logits") else out[0]


def of_timm(family):
    """The smallest model of a family, at `SIDE` pixels where it takes that."""
    import timm
    import torch

    def made(name, **options):
        return timm.create_model(name, num_classes=5, **options)

    sizes = {}
    for name in timm.list_models(module=family):
        try:
            with torch.device("meta"):
                sizes[name] = sum(p.numel() for p in made(name).parameters())
        except Exception:  # some cannot be made without memory
            continue
    name = min(sizes, key=sizes.get)
    if sizes[name] > LARGE:
        raise ValueError(f"its smallest model has {sizes[name]:,} parameters")
    for options in ({"img_size": SIDE}, {}):
        try:
            model = made(name, **options).eval()
        except TypeError:  # it takes any size
            continue
        wanted = model.pretrained_cfg["input_size"]
        for side in (SIDE, 96, 128, wanted[-1]):
            batch = torch.randn(SAMPLES, wanted[0], side, side)
            try:
                model(batch[:1])
            except Exception:  # too small for it
                continue
            return model, batch.double(), lambda x, model=model: model(x)
    raise ValueError("it does not run on a picture of the size that it names")


def far(got, want, least):
    """The largest difference over the largest value, or over `least` where all should vanish."""
    scale = max(float(want.abs().max()), least, 1e-300)
    return float((got.double() - want).abs().max()) / scale


def look(library, name, task):
    """One model's row."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, batch, forward = of_timm(name) if library == "timm" else of_transformers(name, task)
    row = {"class": type(model).__name__, "parameters": sum(p.numel() for p in model.parameters())}
    model = still(model)
    experts = any("Experts" in type(m).__name__ for m in model.modules())
    together = None
    if experts:
        try:
            together = hold(model, batch, forward, torch.float32)
        except Exception as error:
            together = {"outcome": "left out", "why": f"{type(error).__name__}: {error}"}
        model.set_experts_implementation("eager")
    for default, dtype in ((torch.float32, torch.float64), (torch.float64, torch.float64), (torch.float32,) * 2):
        torch.set_default_dtype(default)  # of the tensors that it makes of its own
        try:
            found = hold(model, batch, forward, dtype)
            break
        except RuntimeError:
            if dtype is torch.float32:
                raise
    if dtype is torch.float32:
        found["precision"] = "float32"  # it does not run in float64
    return row | found | ({"experts_by_default": together} if experts else {})


def hold(model, batch, forward, dtype):
    """Hold one pass against the loop, in this precision."""
    import torch

    from invariant_adam.one_pass import UnsupportedUse, one_pass

    model = model.to(dtype)
    if batch.is_floating_point():
        batch = batch.to(dtype)

    def loss(x):
        out = forward(x)
        return (out[0] if isinstance(out, (tuple, list)) else out).flatten(1).sin().sum(1).mean()

    named = {n: p for n, p in model.named_parameters() if p.requires_grad and p.numel()}

    def gradients(part):
        model.zero_grad()
        loss(part).backward()
        return [p.grad for p in named.values()]

    start = {n: b.clone() for n, b in model.named_buffers()}
    means, squares, before = {}, {}, torch.get_rng_state()
    for part in batch.split(MICRO):
        for n, g in zip(named, gradients(part), strict=True):
            if g is not None:
                g, share = g.double(), len(part) / SAMPLES
                means[n], squares[n] = means.get(n, 0) + share * g, squares.get(n, 0) + share * g.square()
    twice = [] if torch.equal(before, torch.get_rng_state()) else [gradients(batch[:MICRO]) for _ in range(2)]
    if twice and not all(a is b or torch.equal(a, b) for a, b in zip(*twice, strict=True)):
        return {"outcome": "left out", "why": "it draws random numbers, and the loop others"}
    if not all(bool(t.isfinite().all()) for t in means.values()):
        return {"outcome": "left out", "why": "its own gradients are not finite"}
    for n, b in start.items():  # a forward may have made others
        model.get_buffer(n).copy_(b)
    model.zero_grad()
    try:
        with one_pass(model, MICRO):
            loss(batch).backward()
    except UnsupportedUse as error:
        return {"outcome": "refused", "why": str(error)}
    least = 1e-4 * max(float(g.abs().max()) for g in means.values())
    error = 0.0
    for n, p in named.items():
        if n in means:
            error = max(error, far(p.grad, means[n], least), far(p.grad_sq, squares[n], least**2))
            del p.grad_sq, p.grad_kappa
    limit = LIMITS[str(dtype).removeprefix("torch.")]
    return {"outcome": "exact" if error <= limit else "wrong", "error": float(f"{error:.2g}")}


def find_timm():
    """Import a timm that was installed beside this torch."""
    sys.path.insert(0, str(HERE / "tests"))
    import zoo

    return zoo.zoo_module("timm")


def child(case, answer):
    """`look` for another process, which gets the row."""
    quiet()
    library, name, task = case
    try:
        if library == "timm":
            find_timm()
        row = look(library, name, task)
    except Exception as error:
        row = {"outcome": "left out", "why": f"{type(error).__name__}: {error}"}
    for each in (row, row.get("experts_by_default", {})):
        if "why" in each:
            each["why"] = " ".join(each["why"].split())[:400]
    answer.send(row)


def quiet():
    """Leave out what libraries say of themselves."""
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    warnings.simplefilter("ignore")


def every():
    """All that there is to look at: library, name and task."""
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    tasks = {}
    for task in TASKS:
        for kind in getattr(auto, f"MODEL_FOR_{task}_MAPPING_NAMES"):
            tasks.setdefault(kind, task)
    yield from (("transformers", kind, task) for kind, task in sorted(tasks.items()))
    yield from (("timm", family, "IMAGE_CLASSIFICATION") for family in sorted(find_timm().list_modules()))


PROCESSES = multiprocessing.get_context("forkserver")  # which has imported the libraries
PROCESSES.set_forkserver_preload(["torch", "transformers", "invariant_adam.one_pass"])


def run(case, limit, work=child):
    """One model's row, from a process of its own."""
    here, there = PROCESSES.Pipe(duplex=False)
    process = PROCESSES.Process(target=work, args=(case, there), daemon=True)
    process.start()
    there.close()
    try:
        if here.poll(limit):
            return here.recv()
        return {"outcome": "left out", "why": f"took more than {limit} s"}
    except EOFError:
        process.join()
        return {"outcome": "left out", "why": f"its process ended with status {process.exitcode}"}
    finally:
        process.kill()
        process.join()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/coverage.json"), help="results, a row at a time")
    parser.add_argument("--only", help="some models, with commas, such as transformers:llama,timm:resnet")
    parser.add_argument("--at-once", type=int, default=2, help="processes (default: %(default)s)")
    parser.add_argument("--limit", type=int, default=120, help="seconds for one model (default: %(default)s)")
    options = parser.parse_args()
    quiet()
    import torch

    from invariant_adam_lab import record

    cases = list(every())
    if options.only:
        wanted = set(options.only.split(","))
        unknown = wanted - {f"{library}:{name}" for library, name, *_ in cases}
        if unknown:
            parser.error(f"--only names {', '.join(sorted(unknown))}: write transformers:MODEL_TYPE or timm:FAMILY")
        cases = [case for case in cases if f"{case[0]}:{case[1]}" in wanted]
    rows = record.Rows(options.out, "python benchmarks/coverage.py", "coverage", torch.device("cpu"))
    settings = [
        dict(zip(("library", "name", "task"), case, strict=True)) | {"version": record.version(case[0])}
        for case in cases
    ]
    todo = [(case, how) for case, how in zip(cases, settings, strict=True) if not rows.has(how)]
    begun = time.monotonic()
    with ThreadPoolExecutor(options.at_once) as pool:
        running = {pool.submit(run, case, options.limit): (case, how) for case, how in todo}
        for i, done in enumerate(as_completed(running), 1):
            (library, name, _), how = running[done]
            row = rows.add(how, done.result())
            left = (time.monotonic() - begun) / i * (len(todo) - i) / 60
            print(f"[{i}/{len(todo)}, {left:.0f} min left] {library}:{name}: {row['outcome']}", flush=True)
    print(dict(Counter(f"{row['library']} {row['outcome']}" for row in rows.rows)))


if __name__ == "__main__":
    main()

"""The first update of unmodified models: peak memory and seconds, one pass with its check beside fused AdamW.

    python benchmarks/first_update.py --out benchmarks/results/first_update_cpu.json

Small models of transformers with random weights, bfloat16 autocast. The peak counts the weights, the optimizer's state
and everything else that torch allocates from the making of the optimizer to the end of the update (see
`invariant_adam_lab.bench.memory`). `second` is the update after it, which is not checked.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import invariant_adam as ia
from invariant_adam_lab.bench.memory import growth
from invariant_adam_lab.record import environment

SIZE = {"vocab_size": 8192, "use_cache": False}
LLAMA = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 768, **SIZE}
GPT2 = {"n_embd": 256, "n_layer": 4, "n_head": 4, "n_positions": 128, **SIZE}
CASES: dict[str, tuple[str, str, dict[str, Any], bool]] = {
    # name: (config class, model class, config arguments, gradient checkpointing)
    "Llama": ("LlamaConfig", "LlamaForCausalLM", LLAMA, False),
    "Llama, checkpointing": ("LlamaConfig", "LlamaForCausalLM", LLAMA, True),
    "Llama, tied": ("LlamaConfig", "LlamaForCausalLM", {**LLAMA, "tie_word_embeddings": True}, False),
    "GPT-2, tied": ("GPT2Config", "GPT2LMHeadModel", GPT2, False),
}
BATCH, LENGTH, MICRO = 16, 128, 1


def model_of(name: str) -> nn.Module:
    """The model with random weights, in train mode without dropout."""
    import transformers

    config_name, model_name, arguments, checkpointing = CASES[name]
    drops = {"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0} if "GPT2" in config_name else {}
    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, model_name)(getattr(transformers, config_name)(**arguments, **drops))
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    return model.train()


def measure(name: str, method: str, device: torch.device) -> dict[str, Any]:
    """The first and second update of a model by a method."""
    model = model_of(name).to(device)
    ids = torch.randint(0, SIZE["vocab_size"], (BATCH, LENGTH), device=device)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    opt: Any = None

    def update() -> None:
        nonlocal opt
        if opt is None:
            plain = method == "plain"
            opt = (torch.optim.AdamW if plain else ia.InvariantAdam)(
                model.parameters(), **{"fused": True} if plain else {}
            )
        with contextlib.nullcontext() if method == "plain" else ia.one_pass(model, MICRO):
            with torch.autocast(device.type, torch.bfloat16):
                logits: Tensor = model(input_ids=ids).logits
            nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten()).backward()
        opt.step()
        opt.zero_grad()

    found = {}
    for which in ("first", "second"):
        start = time.perf_counter()
        grown = growth(update, lambda: None, device)
        seconds = time.perf_counter() - start
        found[which] = {"peak_bytes": weights + grown.peak, "seconds": round(seconds, 3)}
        weights += grown.between
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", help="a part of a case's name")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = []
    for name in CASES:
        if options.only and options.only not in name:
            continue
        plain, one_pass = (measure(name, method, torch.device(options.device)) for method in ("plain", "one_pass"))
        ratios = {w: round(one_pass[w]["peak_bytes"] / plain[w]["peak_bytes"], 3) for w in plain}
        rows.append({"model": name, "plain": plain, "one_pass": one_pass, "peak_ratio": ratios})
        sizes = " ".join(f"{each[w]['peak_bytes'] / 2**20:.0f}" for w in plain for each in (plain, one_pass))
        times = f"{plain['first']['seconds']} s, {one_pass['first']['seconds']} s"
        print(
            f"{name}: MiB of plain and one pass, first and second update: {sizes}; first: {times}; {ratios}", flush=True
        )
    if options.out:
        case = {"batch": BATCH, "length": LENGTH, "micro_batch": MICRO, "autocast": "bfloat16"}
        options.out.write_text(
            json.dumps({**environment(torch.device(options.device)), **case, "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()

"""One pass on models as people bring them: all rows of the first table of docs/speed.md.

    PYTHONPATH=src python benchmarks/models.py --out benchmarks/results/models_h200.json

The commands of a group run twice. First side by side, timed hardly at all, which fills the caches of compilers; what
they measured, first seconds with cold caches among it, stays beside their logs. Then one after the other, each alone on
the machine: others at work beside it slow down a step that waits for the host.
Groups follow each other, so that their models fit into one GPU's memory. Rows that the file has are not measured again.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

LLAMA = {
    "hidden_size": 1536, "intermediate_size": 4096, "num_hidden_layers": 16, "num_attention_heads": 12,
    "num_key_value_heads": 12,
}  # fmt: skip
LLAMA_SET = [part for key, value in (LLAMA | {"tokens": 2048}).items() for part in ("--set", f"{key}={value}")]
VIT = ["--model", "timm:vit_small_patch16_224", "--batch", "256", "--micro-batch", "8"]
CONVNEXT = ["--model", "timm:convnext_tiny", "--batch", "128", "--micro-batch", "8"]
SWIN = ["--model", "timm:swin_tiny_patch4_window7_224", "--batch", "128", "--micro-batch", "8"]
EFFICIENT = ["--model", "timm:efficientnet_b0", "--batch", "128", "--micro-batch", "8"]
RESNET = ["--model", "resnet18"]
GPT2 = ["--model", "hf:gpt2", "--set", "tokens=1024", "--batch", "32", "--micro-batch", "1"]
OF_8 = ["--batch", "8", "--micro-batch", "1"]
GROUPS = {
    "vision": [
        [*VIT, "--eager"], [*VIT, "--compile"], [*VIT, "--compile", "--mode", "reduce-overhead"],
        [*CONVNEXT, "--eager"], [*CONVNEXT, "--eager", "--graph"], [*SWIN, "--eager"], [*EFFICIENT, "--eager"],
        [*CONVNEXT, "--compile"], [*SWIN, "--compile"],
        [*RESNET, "--eager"], [*RESNET, "--compile"], [*RESNET, "--compile", "--mode", "reduce-overhead"],
    ],
    "gpt2": [[*GPT2, "--eager"], [*GPT2, "--compile"]],
    "llama": [
        ["--model", "hf:llama", *LLAMA_SET, *OF_8, "--eager"],
        ["--model", "hf:llama", *LLAMA_SET, *OF_8, "--compile"],
        ["--model", "hf:llama", *LLAMA_SET, "--set", "tie_word_embeddings=true", *OF_8, "--eager"],
        ["--model", "benchmarks.models:checkpointed_llama", *OF_8, "--eager"],
    ],
}  # fmt: skip


def checkpointed_llama(tokens=2048, **changes):
    """The Llama of the table with gradient checkpointing, as `bench one-pass --model MODULE:FUNCTION` takes it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**(LLAMA | {"use_cache": False} | changes))).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})

    def make_batch(samples):
        ids = torch.randint(model.config.vocab_size, (samples, tokens))
        return {"input_ids": ids, "labels": ids.clone()}

    return model, make_batch


def command(case, out, rounds, methods):
    """The command of a case."""
    bench = [sys.executable, "-m", "invariant_adam", "bench", "one-pass", "--out", str(out), "--rounds", str(rounds)]
    return [*bench, "--methods", methods, *case]


class Clock:
    """Prints what has ended, and when."""

    def __init__(self):
        self.start = time.monotonic()

    def wait(self, process, line, logs):
        """Wait for a command to end."""
        failed = f", exit status {process.returncode}: see {logs}" if process.wait() else ""
        model = " ".join(line[line.index("--model") :])
        print(f"[{time.monotonic() - self.start:4.0f} s] {model}{failed}", flush=True)


def start(line, log):
    """Start a command that prints into a file."""
    with log.open("w") as file:
        return subprocess.Popen(line, stdout=file, stderr=subprocess.STDOUT)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/models.json"), help="results, a row at a time")
    parser.add_argument("--groups", default=",".join(GROUPS), help="which, with commas (default: %(default)s)")
    parser.add_argument("--methods", default="plain,one-pass,into", help="as of bench one-pass (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="how often each is timed; the median counts")
    parser.add_argument("--warm", action="store_true", help="the caches are filled: leave the first runs out")
    parser.add_argument("--logs", type=Path, default=Path("runs/models"), help="for logs and for cold runs' results")
    parser.add_argument("--list", action="store_true", help="print the commands, and run nothing")
    options = parser.parse_args()
    unknown = set(options.groups.split(",")) - GROUPS.keys()
    if unknown:
        parser.error(f"--groups has {', '.join(sorted(unknown))}, and there are {', '.join(GROUPS)}")
    clock = Clock()
    options.logs.mkdir(parents=True, exist_ok=True)
    for group in options.groups.split(","):
        first = [options.logs / f"{group}-{i}-cold.json" for i in range(len(GROUPS[group]))]
        cold = [command(case, out, 1, options.methods) for case, out in zip(GROUPS[group], first, strict=True)]
        alone = [command(case, options.out, options.rounds, options.methods) for case in GROUPS[group]]
        if options.list:
            print("\n".join(" ".join(line) for line in alone))
            continue
        if not options.warm:
            print(f"{group}: {len(cold)} commands side by side, to fill the caches", flush=True)
            running = [start(line, options.logs / f"{group}-{i}-cold.log") for i, line in enumerate(cold)]
            for process, line in zip(running, cold, strict=True):
                clock.wait(process, line, options.logs)
        print(f"{group}: one after the other", flush=True)
        for i, line in enumerate(alone):
            clock.wait(start(line, options.logs / f"{group}-{i}.log"), line, options.logs)


if __name__ == "__main__":
    main()

"""What a step of Hugging Face's Trainer takes: with fused AdamW, with InvariantAdam in a loop, and in one pass.

    PYTHONPATH=src python benchmarks/trainer_step.py --out benchmarks/results/trainer_step_h200.json

transformers' own GPT-2 124M with random weights, bfloat16 autocast, all in one process, each case twice and in turns.
The loop has four steps of 8 sequences per update, as AdamW beside it; one pass has all 32 in one step, as AdamW beside
it. Times are medians over updates, from the end of one to the end of the next.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from pathlib import Path

import torch
import transformers
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from invariant_adam.integrations.transformers import InvariantTrainer
from invariant_adam_lab import record

M, B = 8, 32
CASES = [  # trainer, sequences per step, steps per update
    ("AdamW", M, B // M),
    ("InvariantAdam, loop", M, B // M),
    ("AdamW", B, 1),
    ("InvariantAdam, one pass", B, 1),
]


class Noise(Dataset):
    def __init__(self, tokens, length):
        self.ids = torch.randint(tokens, (4096, length), generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


class Clock(TrainerCallback):
    def __init__(self):
        self.times = []

    def on_step_end(self, *_, **__):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.times.append(time.perf_counter())


def run(name, size, accumulation, compiled, length, updates, small):
    torch.manual_seed(0)
    shape = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 128} if small else {}
    config = GPT2Config(n_positions=length, use_cache=False, **shape)
    args = TrainingArguments(
        output_dir="runs/trainer_step", per_device_train_batch_size=size, gradient_accumulation_steps=accumulation,
        max_steps=updates, bf16=torch.cuda.is_available(), optim="adamw_torch_fused", learning_rate=1e-4,
        max_grad_norm=0.0, torch_compile=compiled, report_to=[], save_strategy="no", logging_strategy="no",
        disable_tqdm=True, use_cpu=not torch.cuda.is_available(),
    )  # fmt: skip
    clock = Clock()
    what = {"model": GPT2LMHeadModel(config), "args": args, "train_dataset": Noise(config.vocab_size, length)}
    if name == "AdamW":
        trainer = Trainer(**what, callbacks=[clock])
    else:
        trainer = InvariantTrainer(**what, callbacks=[clock], micro_batch_size=M, one_pass="one pass" in name)
    began = time.perf_counter()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    loss = trainer.train().training_loss
    if not all(bool(p.isfinite().all()) for p in what["model"].parameters()):  # NaN takes less power, and so less time
        raise RuntimeError(f"{name}: weights are no numbers any more; the loss of the run, without those, was {loss}")
    steps = [b - a for a, b in zip(clock.times, clock.times[1:], strict=False)]
    peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None
    return statistics.median(steps[updates // 3 :]) * 1e3, clock.times[0] - began, peak, loss


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/trainer_step.json"), help="results, a row at a time")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a sequence (default: %(default)s)")
    parser.add_argument("--updates", type=int, default=24, help="of each run; the first third warms up")
    parser.add_argument("--compiled", action="store_true", help="the compiled cases alone")
    parser.add_argument("--small", action="store_true", help="two layers of width 32, to try the script")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = record.Rows(options.out, "python benchmarks/trainer_step.py", "trainer_step", device)
    eager = [(*case, False) for case in CASES]
    traced = [(*case, True) for case in CASES]
    for turn, cases in enumerate([eager, eager, traced, traced]):
        if options.compiled and cases is eager:
            continue
        for name, size, accumulation, compiled in cases:
            settings = {
                "trainer": name, "per_device": size, "accumulation": accumulation, "compiled": compiled, "turn": turn,
                "length": options.length, "micro_batch_size": M, "transformers": transformers.__version__,
            }  # fmt: skip
            if rows.has(settings):
                continue
            how = compiled, options.length, options.updates, options.small
            ms, first, peak, loss = run(name, size, accumulation, *how)
            made = {"ms": round(ms, 3), "first_s": round(first, 1), "peak_gib": peak and round(peak, 2), "loss": loss}
            rows.add(settings, made)
            print(settings | made, flush=True)
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            torch.compiler.reset()


if __name__ == "__main__":
    main()

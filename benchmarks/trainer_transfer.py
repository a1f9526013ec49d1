"""Batch size transfer in Hugging Face's Trainer: the accumulation changes by a factor of 32, and no other argument.

    python benchmarks/trainer_transfer.py --out benchmarks/results/trainer_transfer.json \\
        --figure docs/figures/trainer_transfer.png

A Llama of 2 layers and width 64 on the characters of tiny Shakespeare, 64 a sample, one thread. Each run sees the same
samples in the same order, 4 in a training step, and is evaluated on held-out text after each eighth of them. The
learning rate warms up over the first tenth of the run: in a first look without it, InvariantTrainer at B = 128 went
astray at once. The rest of the schedule, clipping and betas are Trainer's defaults: linear to zero, a norm of 1,
(0.9, 0.999).

The learning rate is tuned for AdamW at B = 4: of RATES, that with the lowest held-out loss after a run over a quarter
of the samples. All methods have it, and then a tenth of it: invariance is a statement about small updates. A thirtieth
was added when B = 128 had not transferred at a tenth.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from pathlib import Path

import matplotlib
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from invariant_adam_lab import record
from invariant_adam_lab.results.style import FAINT, STYLE, dress, render
from invariant_adam_lab.training.data import text, tinyshakespeare

M, T, POINTS, HELD_OUT = 4, 64, 8, 256
ACCUMULATIONS = (1, 4, 8, 32)
RATES = (3e-4, 1e-3, 3e-3, 1e-2)
PARTS = (1, 1 / 10, 1 / 30)  # of the tuned learning rate
METHODS = {
    "invariant": "InvariantTrainer",
    "adamw": "Trainer, AdamW",
    "adamw-root": r"Trainer, AdamW, lr$\,\propto\sqrt{B}$",
}


def cut(ids, number):
    """Samples of T characters each, from all over the text."""
    rows = ids[: len(ids) // T * T].view(-1, T).long()
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))[:number]]
    if len(rows) < number:
        raise ValueError(f"the text has {len(rows)} samples of {T} characters, and {number} are asked for")
    return [{"input_ids": row, "labels": row} for row in rows]


def train(found, method, accumulation, samples, lr):
    """Return the held-out loss at the beginning and after each eighth of the samples."""
    # Here, as pages.py reads results without them.
    from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainingArguments, set_seed
    from transformers.utils import logging

    from invariant_adam.integrations.transformers import InvariantTrainer

    logging.set_verbosity_error()
    set_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(found.vocab), hidden_size=64, intermediate_size=256, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=T, use_cache=False,
            bos_token_id=None, eos_token_id=None,
        )
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=M,
            gradient_accumulation_steps=accumulation,
            num_train_epochs=1,
            learning_rate=lr * math.sqrt(accumulation) if method == "adamw-root" else lr,
            warmup_steps=0.1,  # a part of the run
            eval_strategy="steps",
            eval_steps=samples // POINTS // (M * accumulation),  # equal samples, not equal updates
            eval_on_start=True,
            per_device_eval_batch_size=64,
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            dataloader_pin_memory=False,
        )
        data = {"train_dataset": cut(found.ids, samples), "eval_dataset": cut(found.test_ids, HELD_OUT)}
        if method == "invariant":
            trainer = InvariantTrainer(model=model, args=args, **data, tuned_batch_size=M)
        else:
            trainer = Trainer(model=model, args=args, **data)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    logs = [log for log in trainer.state.log_history if "eval_loss" in log]
    assert [log["step"] * M * accumulation for log in logs] == [i * samples // POINTS for i in range(POINTS + 1)]
    return [round(log["eval_loss"], 5) for log in logs]


def tuned(rows, samples):
    """The learning rate that AdamW likes best at B = M."""
    short = [row for row in rows if row["samples"] == samples // 4]
    return min(short, key=lambda row: row["losses"][-1])["lr"]


def by_method(rows, part=1):
    """The runs that are compared: by method and batch size, at this part of the tuned learning rate."""
    samples = max(row["samples"] for row in rows)
    lr = tuned(rows, samples) * part
    found = {}
    for row in rows:
        if row["samples"] == samples and math.isclose(row["lr"], lr):
            found.setdefault(row["method"], {})[M * row["accumulation"]] = row["losses"]
    found["adamw-root"][M] = found["adamw"][M]  # the same run
    return lr, samples, {method: dict(sorted(found[method].items())) for method in METHODS}


def spreads(runs):
    """Largest minus smallest log loss over the batch sizes, at each point after the beginning."""
    logs = [[math.log(loss) for loss in losses[1:]] for losses in runs.values()]
    return [max(point) - min(point) for point in zip(*logs, strict=True)]


def draw(rows):
    """Loss against samples: a panel per method, a row per learning rate, a curve per batch size."""
    palette = matplotlib.colormaps["viridis"]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8, 6), layout="constrained")
        grid = figure.subplots(len(PARTS), len(METHODS), sharex=True, sharey=True)
        for axes, part in zip(grid, PARTS, strict=True):
            lr, samples, found = by_method(rows, part)
            for ax, runs in zip(axes, found.values(), strict=True):
                for i, (size, losses) in enumerate(runs.items()):
                    points = [j * samples / POINTS / 1000 for j in range(POINTS + 1)]
                    late = i / (len(runs) - 1)  # wide below, narrow above: curves that coincide are all seen
                    look = {"color": palette(0.88 * (1 - late)), "linewidth": 6 - 4.6 * late}
                    ax.plot(points, losses, **look, solid_capstyle="round", label=f"B = {size}")
                each = spreads(runs)
                said = f"spread {sum(each) / len(each):.2g}"
                ax.text(0.97, 0.96, said, transform=ax.transAxes, color=FAINT, ha="right", va="top")
                dress(ax, log=True)
            axes[0].set_ylabel(f"loss at lr = {lr:g}")
        for top, below, name in zip(grid[0], grid[-1], METHODS.values(), strict=True):
            top.set_title(name, loc="left", fontweight="bold")
            below.set_xlabel("samples, thousands")
            below.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
        figure.legend(*grid[0][0].get_legend_handles_labels(), ncols=len(runs), loc="outside lower center")
    return figure


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, default=Path("runs/trainer_transfer.json"), help="results, a row at a time")
    add("--figure", type=Path, help="a PNG, drawn when all rows are there")
    add("--data", type=Path, help="the text (default: the lab's tiny Shakespeare, found or fetched)")
    add("--samples", type=int, default=8192, help="of a run")
    add("--accumulation", type=int, nargs="+", default=ACCUMULATIONS, help="micro-batches per update")
    options = parser.parse_args()
    whole = POINTS * M * math.lcm(4, *options.accumulation)  # the 4: the learning rate is tuned on a quarter
    if options.samples % whole:
        raise SystemExit(f"--samples {options.samples} is no multiple of {whole}: a point would lie within an update")

    versions = {name: record.version(name) for name in ("transformers", "accelerate")}
    if int(str(versions["transformers"]).split(".")[0]) < 5:
        raise SystemExit(f"transformers {versions['transformers']} knows no warm-up as a part of the run; 5 does")
    torch.set_num_threads(1)
    found = text(options.data) if options.data else tinyshakespeare(tell=print)[0]
    rows = record.Rows(options.out, "python benchmarks/trainer_transfer.py", "trainer_transfer", torch.device("cpu"))

    def run(method, accumulation, samples, lr):
        settings = {"method": method, "accumulation": accumulation, "samples": samples, "lr": lr, **versions}
        if not rows.has(settings):
            begun = time.perf_counter()
            losses = train(found, method, accumulation, samples, lr)
            rows.add(settings, {"losses": losses})
            what = f"{method:10}  B = {M * accumulation:3}  lr {lr:g}  {samples} samples"
            print(f"{what}  {losses[0]} -> {losses[-1]}  {time.perf_counter() - begun:.0f} s", flush=True)

    for lr in RATES:
        run("adamw", 1, options.samples // 4, lr)
    best = tuned(rows.rows, options.samples)
    for part in PARTS:
        for method in METHODS:
            for accumulation in options.accumulation:
                if (method, accumulation) != ("adamw-root", 1):  # that is AdamW's
                    run(method, accumulation, options.samples, float(f"{best * part:g}"))
    if options.figure:
        record.write(options.figure, render(draw(rows.rows), "png"))


if __name__ == "__main__":
    main()

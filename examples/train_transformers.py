"""Train a small GPT-2 with Hugging Face's Trainer at several batch sizes: only the accumulation changes.

    python examples/train_transformers.py
    python examples/train_transformers.py --accumulation 1 4 16 --one-pass
    torchrun --standalone --nproc-per-node=2 examples/train_transformers.py

All arguments of the trainer are those of --tuned-batch samples per update. The losses agree at equal samples.
"""

import argparse
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments, set_seed

from invariant_adam.integrations.transformers import InvariantTrainer


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--accumulation", type=int, nargs="+", default=[1, 4, 16], help="micro-batches per update and process")
    add("--micro-batch", type=int, default=4, help="samples whose gradient is squared together")
    add("--tuned-batch", type=int, default=16, help="samples per update at which lr, betas and the schedule hold")
    add("--one-pass", action="store_true", help="all micro-batches of an update in one backward")
    add("--text", type=Path, default=Path(argparse.__file__), help="a text file (default: a module of Python's)")
    add("--samples", type=int, default=1024, help="to train on, each a stretch of --context bytes")
    add("--lr", type=float, default=1e-3)
    add("--context", type=int, default=64, help="bytes")
    add("--width", type=int, default=32)
    add("--out", type=Path, default=Path("runs/train_transformers"))
    return parser.parse_args()


def read(path, context, samples):
    """Return samples to train on and others to evaluate, each of `context` bytes."""
    data = torch.tensor(list(path.read_bytes()))
    rows = data[: len(data) // context * context].view(-1, context)
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]
    held_out = [{"input_ids": row, "labels": row} for row in rows[:64]]
    order = torch.arange(samples) % (len(rows) - 64)
    return [{"input_ids": row, "labels": row} for row in rows[64:][order]], held_out


def main():
    options = arguments()
    train, held_out = read(options.text, options.context, options.samples)
    for accumulation in options.accumulation:
        set_seed(0)
        model = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=256,
                n_positions=options.context,
                n_embd=options.width,
                n_layer=2,
                n_head=2,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
            )
        )
        args = TrainingArguments(
            output_dir=str(options.out),
            per_device_train_batch_size=options.micro_batch * (accumulation if options.one_pass else 1),
            gradient_accumulation_steps=1 if options.one_pass else accumulation,
            num_train_epochs=1,
            learning_rate=options.lr,
            lr_scheduler_type="cosine",
            warmup_steps=options.samples // options.tuned_batch // 10,  # of the tuned batch size
            weight_decay=0.1,
            max_grad_norm=0.0 if options.one_pass else 1.0,  # of each micro-batch
            logging_steps=1_000,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=torch.cuda.is_available(),
            use_cpu=not torch.cuda.is_available(),  # else ranks on CPUs would not know of each other
        )
        trainer = InvariantTrainer(
            model=model,
            args=args,
            train_dataset=train,
            eval_dataset=held_out,
            micro_batch_size=options.micro_batch,
            tuned_batch_size=options.tuned_batch,
            one_pass=options.one_pass,
            grow=True,  # the first windows are cut into smaller updates
        )
        trainer.train()
        loss, seen = trainer.evaluate()["eval_loss"], trainer.invariant_adam.samples_seen
        if trainer.is_world_process_zero():
            batch = options.micro_batch * accumulation * args.world_size
            print(f"{batch} samples per update: loss on held-out text {loss:.4f} after {seen} samples", flush=True)
    trainer.accelerator.wait_for_everyone()  # a process that ends before the others are done may take them along
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()

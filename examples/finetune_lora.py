"""Fine-tune a language model with LoRA, TRL's SFTTrainer and InvariantAdam: the batch size is free.

    python examples/finetune_lora.py
    python examples/finetune_lora.py --batch-size 64
    torchrun --standalone --nproc-per-node=2 examples/finetune_lora.py
    python examples/finetune_lora.py --model path/or/name --data texts.txt --lr 2e-4

--batch-size decides the accumulation and nothing else: the loss on held-out text agrees with that of other batch sizes.
Without --model a small model of random weights is trained, and without --data it reads Python's own help texts: nothing
is downloaded. Needs pip install "invariant-adam[transformers]" trl peft.
"""

import argparse
import os
from pathlib import Path
from pydoc_data.topics import topics

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    set_seed,
)
from trl import SFTConfig, SFTTrainer

from invariant_adam.integrations.transformers import InvariantAdamMixin

HELD_OUT = 32  # samples
PROCESSES = int(os.environ.get("WORLD_SIZE", 1))  # set by torchrun


class InvariantSFTTrainer(InvariantAdamMixin, SFTTrainer):
    pass


def positive(text):
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return int(text)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", help="a causal language model: its folder, or its name on the Hub (default: small, random weights)")
    add("--data", type=Path, help="a text file with an empty line after each sample (default: Python's help texts)")
    add("--batch-size", type=positive, default=16, help="samples per update, on all processes")
    add("--micro-batch", type=positive, default=4, help="samples whose gradient is squared together")
    add("--tuned-batch", type=positive, default=16, help="samples per update at which --lr, betas and warm-up hold")
    add("--lr", type=float, default=2e-3, help="default: %(default)s, which suits the small model")
    add("--rank", type=positive, default=8, help="of the adapters")
    add("--samples", type=positive, default=1024, help="at most so many to train on")
    add("--epochs", type=positive, default=1)
    add("--length", type=positive, default=128, help="tokens after which a sample is cut")
    add("--out", type=Path, default=Path("runs/finetune_lora"), help="folder of the adapters")
    options = parser.parse_args()
    together = options.micro_batch * PROCESSES
    if options.batch_size < together or options.batch_size % together:
        near = max(1, options.batch_size // together) * together
        parser.error(
            f"--batch-size {options.batch_size} is no multiple of {together}, which is --micro-batch "
            f"{options.micro_batch} × {PROCESSES} processes; use {near} or {near + together}"
        )
    if options.data and not options.data.is_file():
        parser.error(f"--data {options.data} is no file; give a text file, or leave it out for Python's help texts")
    return options


def read(options):
    """Return samples to train on and others to evaluate."""
    text = options.data.read_text(encoding="utf-8") if options.data else "\n\n".join(topics.values())
    texts = [{"text": part.strip()} for part in text.split("\n\n") if part.strip()]
    if len(texts) <= HELD_OUT:
        raise SystemExit(
            f"--data {options.data} has {len(texts)} samples, and {HELD_OUT} of them are held out; give more, with an "
            "empty line after each"
        )
    texts = [texts[i] for i in torch.randperm(len(texts), generator=torch.Generator().manual_seed(0))]
    return Dataset.from_list(texts[HELD_OUT:][: options.samples]), Dataset.from_list(texts[:HELD_OUT])


def small():
    """Return a small Llama of random weights and a tokenizer whose tokens are bytes."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = Tokenizer(models.BPE({token: i for i, token in enumerate([*letters, "<end>", "<pad>"])}, []))
    tokens.pre_tokenizer, tokens.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token="<end>", pad_token="<pad>")
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        initializer_range=0.1,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config), tokenizer


def main():
    options = arguments()
    set_seed(0)
    train, held_out = read(options)
    if options.model:
        model = AutoModelForCausalLM.from_pretrained(options.model)
        tokenizer = AutoTokenizer.from_pretrained(options.model)
    else:
        model, tokenizer = small()
    args = SFTConfig(
        output_dir=str(options.out),
        per_device_train_batch_size=options.micro_batch,
        gradient_accumulation_steps=options.batch_size // (options.micro_batch * PROCESSES),
        num_train_epochs=options.epochs,
        learning_rate=options.lr,
        lr_scheduler_type="cosine",
        warmup_steps=len(train) * options.epochs // options.tuned_batch // 10,  # of the tuned batch size
        max_grad_norm=1.0,  # of each micro-batch
        max_length=options.length,
        bf16=torch.cuda.is_available(),
        use_cpu=not torch.cuda.is_available(),  # else ranks on CPUs would not know of each other
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=torch.cuda.is_available(),
    )
    trainer = InvariantSFTTrainer(
        model=model,
        args=args,
        train_dataset=train,
        eval_dataset=held_out,
        processing_class=tokenizer,
        peft_config=LoraConfig(r=options.rank, lora_alpha=2 * options.rank, target_modules="all-linear"),
        tuned_batch_size=options.tuned_batch,
        grow=True,  # the first windows are cut into smaller updates
    )
    say = print if trainer.is_world_process_zero() else lambda *_, **__: None
    trained = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    shares = f"{args.gradient_accumulation_steps} (accumulation) × {options.micro_batch} (micro-batch)"
    say(f"{options.batch_size} samples per update: {shares} × {PROCESSES} (processes)")
    say(f"{len(train)} samples to train on, {trained:,} parameters in adapters of rank {options.rank}", flush=True)
    say(f"loss on held-out text {trainer.evaluate()['eval_loss']:.4f} after 0 samples", flush=True)
    trainer.train()
    seen = trainer.invariant_adam.samples_seen
    say(f"loss on held-out text {trainer.evaluate()['eval_loss']:.4f} after {seen} samples", flush=True)
    trainer.save_model()
    say(f"adapters in {options.out}")
    trainer.accelerator.wait_for_everyone()  # a process that ends before the others are done may take them along
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()

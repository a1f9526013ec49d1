"""What a rank does in a test of trainers on several processes: it trains, and rank 0 leaves weights and v in a file.

torchrun --nproc-per-node=2 trainer_ranks.py replicated folder
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from plain_loop import M, Sentences, Stream, gpt2, llama, optimizer_of
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, DistributedSampler
from trainer_runs import NEW, InOrder, OrderedTrainer, arguments, trained
from transformers import Trainer

from invariant_adam import unwrap
from invariant_adam.integrations.transformers import InvariantAdamMixin

SAVING = {"save_strategy": "steps", "save_steps": 3}


class ShardedTrainer(Trainer):
    """Uses FSDP2 on a CPU, which Accelerate keeps for accelerators."""

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        state = self.accelerator.state
        PartialState().distributed_type = state.distributed_type = DistributedType.FSDP
        state.fsdp_plugin = FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args)
        self.is_fsdp_enabled = True


class InvariantShardedTrainer(InvariantAdamMixin, InOrder, ShardedTrainer):
    def compute_loss(self, *args, **kwargs):
        if self.is_world_process_zero():
            self.log({"loss": 0.0, "alone": 1.0})  # as users do, on one rank: nobody must wait for the others
        return super().compute_loss(*args, **kwargs)


def whole(t):
    return t.detach().full_tensor() if isinstance(t, DTensor) else t.detach()


def leave(opt, path, logs=()):
    """Write what the plain loop is to have, and what was logged."""
    opt.state_dict()  # normalises the moments
    params = [p for group in opt.param_groups for p in group["params"]]
    found = {
        "w": [whole(p) for p in params],
        "v": [whole(opt.state[p]["exp_avg_sq"]) for p in params],
        "samples": opt.samples_seen,
        "sharded": isinstance(params[0], DTensor),
        "noise": [log["noise_scale"] for log in logs if "noise_scale" in log],
        "alone": sum("alone" in log for log in logs),
    }
    if torch.distributed.get_rank() == 0:
        torch.save(found, path)


def nowhere_else(folder, data):
    """Leave the logs of a run in which the second rank alone has gradients that are no numbers, once."""
    model, seen = gpt2(), []

    def nan_once(module, grads):
        seen.append(module)
        return (grads[0] * torch.nan,) if len(seen) == 3 and torch.distributed.get_rank() == 1 else None

    model.lm_head.register_full_backward_pre_hook(nan_once)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = trained(model, arguments(folder / "nan", 1, logging_strategy="steps", logging_steps=1), data)
    torch.save([log.get("nonfinite", 0) for log in trainer.state.log_history if "loss" in log],
               folder / f"nonfinite-{torch.distributed.get_rank()}.pt")  # fmt: skip


def replicated(folder):
    """Leave runs under DDP: as it is, clipped, in one pass, and gone on at another batch size."""
    data = Sentences(58, unequal=True)
    for name, changed, options in (
        ("ddp", {"gradient_accumulation_steps": 2, **SAVING}, {}),
        ("clipped", {"gradient_accumulation_steps": 2, "max_grad_norm": 0.2}, {}),
        ("one pass", {"per_device_train_batch_size": 2 * M}, {"micro_batch_size": M, "one_pass": True}),
        ("grown", {"gradient_accumulation_steps": 4}, {"grow": True}),
    ):
        trainer = trained(gpt2(), arguments(folder / name, **changed), data, OrderedTrainer, **options)
        leave(trainer.invariant_adam, folder / f"{name}.pt")
    nowhere_else(folder, data)
    streamed = trained(gpt2(), arguments(folder, 2, max_steps=12), Stream(data))
    leave(streamed.invariant_adam, folder / "streamed.pt")
    resume = str(folder / "ddp" / "checkpoint-3")
    if NEW:
        leave(trained(gpt2(), arguments(folder, 1), data, resume=resume).invariant_adam, folder / "gone on.pt")


def sharded(folder):
    """Leave a run under FSDP2, and one that went on from a checkpoint of it."""
    data = Sentences(58, unequal=True)
    fsdp = {"fsdp": True, "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}}
    args = arguments(folder / "run", 2, logging_strategy="steps", logging_steps=1, **fsdp, **SAVING)
    trainer = trained(llama(), args, data, InvariantShardedTrainer)
    leave(trainer.invariant_adam, folder / "fsdp.pt", trainer.state.log_history)
    resume = str(folder / "run" / "checkpoint-3")
    again = trained(llama(), arguments(folder, 1, **fsdp), data, InvariantShardedTrainer, resume=resume)
    leave(again.invariant_adam, folder / "gone on.pt")
    grown = trained(llama(), arguments(folder, 4, **fsdp), data, InvariantShardedTrainer, grow=True)
    leave(grown.invariant_adam, folder / "grown.pt")


def accelerated(folder):
    """Leave a run of Accelerate's own loop."""
    from invariant_adam.integrations.accelerate import InvariantAccelerator

    accelerator, model = InvariantAccelerator(cpu=True, gradient_accumulation_steps=2), gpt2()
    loader = DataLoader(Sentences(58, unequal=True), batch_size=M)
    model, opt, loader = accelerator.prepare(model, optimizer_of(model), loader)
    for _ in range(3):
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss, samples=len(batch["labels"]))
                opt.step()
                opt.zero_grad()
    leave(unwrap(opt), folder / "accelerated.pt")


def lightning(folder):
    """Leave a run of Lightning's trainer."""
    import lightning.pytorch as pl

    from invariant_adam.integrations.lightning import InvariantAdamCallback

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = gpt2()

        def training_step(self, batch, _):
            return self.net(**batch).loss

        def configure_optimizers(self):
            return optimizer_of(self.net)

        def train_dataloader(self):
            data = Sentences(58, unequal=True)
            return DataLoader(data, batch_size=M, sampler=DistributedSampler(data, shuffle=False))

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=3,
        accumulate_grad_batches=2,
        use_distributed_sampler=False,
        callbacks=[InvariantAdamCallback()],
        enable_model_summary=False,
        **quiet,
    )
    trainer.fit(Module())
    leave(unwrap(trainer.optimizers[0]), folder / "lightning.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    globals()[sys.argv[1]](Path(sys.argv[2]))
    torch.distributed.barrier()
    os._exit(0)  # gloo may abort in its teardown

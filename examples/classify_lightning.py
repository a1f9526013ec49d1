"""Train an image classifier with Lightning at several batch sizes: only the accumulation changes.

    python examples/classify_lightning.py
    python examples/classify_lightning.py --batch-size 16 48 --one-pass

The images are 1,797 handwritten digits that ship with the lab (pip install "invariant-adam[lab,lightning]"). Each batch
size prints a line. The losses on held-out images agree, and with --one-pass they are those of the loop.
"""

import argparse
import warnings

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import invariant_adam as ia
from invariant_adam.integrations.lightning import InvariantAdamCallback
from invariant_adam_lab.demo import load_digits


def positive(text):
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return int(text)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--batch-size", type=positive, nargs="+", default=[8, 32, 128], help="samples per update; one run for each")
    add("--micro-batch", type=positive, default=8, help="samples whose gradient is squared together")
    add("--tuned-batch", type=positive, default=32, help="samples per update at which --lr and the betas hold")
    add("--one-pass", action="store_true", help="all micro-batches of an update in one backward")
    add("--lr", type=float, default=3e-3)
    add("--epochs", type=positive, default=4)
    options = parser.parse_args()
    M = options.micro_batch
    for batch in options.batch_size:
        if batch < M or batch % M:
            near = max(1, batch // M) * M
            parser.error(f"--batch-size {batch} is no multiple of --micro-batch {M}; use {near} or {near + M}")
    return options


class Classifier(pl.LightningModule):
    def __init__(self, options, samples):
        super().__init__()
        self.options, self.samples = options, samples  # of the whole run
        self.net = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.GELU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.GELU(),
            nn.Flatten(),
            nn.Linear(32 * 4 * 4, 10),
        )

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.net(x), y)  # a mean over samples

    def test_step(self, batch, batch_idx):
        x, y = batch
        logits = self.net(x)
        self.log("loss", F.cross_entropy(logits, y))
        self.log("accuracy", (logits.argmax(1) == y).float().mean())

    def configure_optimizers(self):
        opt = ia.InvariantAdam(
            self.parameters(),
            self.options.lr,
            micro_batch_size=self.options.micro_batch,
            tuned_batch_size=self.options.tuned_batch,
        )
        # In samples, not steps: the same schedule at every batch size.
        schedule = ia.SampleLambdaLR(opt, ia.warmup_cosine(self.samples // 10, self.samples))
        return {"optimizer": opt, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def train(options, batch, digits):
    """Return loss and accuracy on held-out images, and the samples seen."""
    torch.manual_seed(0)
    in_step = batch if options.one_pass else options.micro_batch
    data = TensorDataset(digits.x, digits.y)
    loader = DataLoader(data, in_step, shuffle=True, generator=torch.Generator().manual_seed(0))
    model = Classifier(options, samples=options.epochs * len(data))
    trainer = pl.Trainer(
        accumulate_grad_batches=batch // in_step,
        callbacks=[InvariantAdamCallback(one_pass="net") if options.one_pass else InvariantAdamCallback(grow=True)],
        max_epochs=options.epochs,
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, loader)
    held_out = DataLoader(TensorDataset(digits.held_out_x, digits.held_out_y), len(digits.held_out_y))
    reached = trainer.test(model, held_out, verbose=False)[0]
    return reached["loss"], reached["accuracy"], ia.unwrap(trainer.optimizers[0]).samples_seen


def main():
    options = arguments()
    warnings.filterwarnings("ignore", ".*does not have many workers")  # the images are in memory
    digits = load_digits()
    for batch in options.batch_size:
        loss, accuracy, seen = train(options, batch, digits)
        print(f"{batch} samples per update: loss {loss:.4f}, accuracy {accuracy:.1%} after {seen} samples", flush=True)


if __name__ == "__main__":
    main()

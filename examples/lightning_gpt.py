"""The GPT of char_gpt.py under Lightning: what makes it resume is one callback.

    python examples/lightning_gpt.py
    python examples/lightning_gpt.py --parallel ddp --devices 2

Stop it where you like (Ctrl-C, SIGTERM to any rank, even SIGKILL) and start the same command again:
it goes on at the exact micro-batch, with the same losses to the last bit as if it had never
stopped. `--parallel fsdp` shards the model (FSDP2); torchrun may start the ranks instead of
Lightning.
"""

from __future__ import annotations

import os
import sys

import lightning
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import flags
import trainckpt
from char_gpt import GPT, SIZES, adamw, warm_up_then_cosine
from stdlib_text import NoisyCrops
from training_trace import Trace


class LightningGPT(lightning.LightningModule):
    """Characters in, the next character's loss out."""

    def __init__(self, args) -> None:
        super().__init__()
        self.args, self.size = args, SIZES[args.size]
        size = self.size
        self.gpt = GPT(size["layers"], size["width"], size["heads"], size["context"], args)

    def configure_model(self) -> None:
        """Shard every block, where that was asked for."""
        if self.args.parallel == "fsdp":
            for part in (*self.gpt.blocks, self.gpt):
                fully_shard(part, mesh=self.device_mesh["data_parallel"])

    def loss(self, batch):
        """Cross entropy of one micro-batch."""
        _, x, y = batch
        return cross_entropy(self.gpt(x).flatten(0, 1), y.flatten())

    def training_step(self, batch, _):
        """One micro-batch; its mean over the epoch is logged too."""
        loss = self.loss(batch)
        self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, _):
        """One batch of a validation."""
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self):
        """AdamW, and a learning rate that changes with each step."""
        optimizer = adamw(self.gpt)
        schedule = warm_up_then_cosine(optimizer, self.args.steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def crops(self, items, *, shuffle):
        """A loader of noisy crops; Lightning deals them to the ranks."""
        crops = NoisyCrops(items, self.size["context"])
        batch, workers = self.args.batch_size, self.args.workers
        return DataLoader(crops, batch, shuffle=shuffle, num_workers=workers)

    def train_dataloader(self):
        """An epoch."""
        return self.crops(self.size["items"], shuffle=True)

    def val_dataloader(self):
        """A few crops."""
        return self.crops(16, shuffle=False)


def main() -> None:
    """Fit; a run that was stopped goes on."""
    flags_ = flags.parser(__doc__, run="runs/lightning_gpt", layouts=("none", "ddp", "fsdp"))
    flags_.add_argument("--devices", type=int, default=flags.WORLD, help="ranks (%(default)s)")
    args = flags.parse(flags_)
    if args.size == "small":
        torch.set_num_threads(1)
    lightning.seed_everything(args.seed, workers=True, verbose=False)
    module = LightningGPT(args)
    resume = trainckpt.lightning.TrainckptCallback(
        args.run,
        every=f"{args.save_every} steps",
        keep_last=3,
        stop_at=os.environ.get("TRAINCKPT_STOP_AT", "micro-batch"),
    )
    trace = TraceCallback(args.trace, resume)
    strategies = {
        "none": "auto",
        "ddp": "ddp",
        "fsdp": ModelParallelStrategy(args.devices, tensor_parallel_size=1),
    }
    trainer = lightning.Trainer(
        max_steps=args.steps,
        accumulate_grad_batches=args.accumulate,
        gradient_clip_val=1.0 if args.parallel != "fsdp" else None,
        accelerator="cpu",
        devices=args.devices,
        strategy=strategies[args.parallel],
        callbacks=[resume, trace],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=sys.stdout.isatty(),
    )
    trainer.fit(module)
    trace.finish(trainer)


class TraceCallback(lightning.Callback):
    """Writes `--trace`: each micro-batch as it was trained. Nothing in it is there for resuming."""

    def __init__(self, folder, resume) -> None:
        self.folder, self.resume = folder, resume
        self.trace = Trace(None, 0)

    def on_fit_start(self, trainer, pl_module) -> None:  # noqa: ARG002
        """The ranks have found each other."""
        self.trace = Trace(self.folder, trainer.global_rank)

    def on_train_start(self, trainer, pl_module) -> None:  # noqa: ARG002
        """Where this attempt goes on is known."""
        self.trace.attempt(self.resume.checkpointer)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:  # noqa: ARG002
        """A micro-batch begins."""
        self.began = self.resume.cursor

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:  # noqa: ARG002
        """And was trained."""
        self.trace.micro_batch(self.began, batch[0], outputs["loss"].item())
        step = trainer.global_step
        if step > self.began.step:
            flags.show_progress(step, trainer.max_steps, outputs["loss"].item())

    def finish(self, trainer) -> None:
        """The state at the end."""
        schedules = [config.scheduler for config in trainer.lr_scheduler_configs]
        state = {"optimizer": trainer.optimizers[0], "scheduler": schedules[0]}
        model = trainer.lightning_module.gpt
        self.trace.finish(self.resume.checkpointer, model=model, **state)


if __name__ == "__main__":
    flags.exit_with_code(main)

"""The GPT of char_gpt.py under the Transformers Trainer: what makes it resume is one callback.

    python examples/transformers_gpt.py
    torchrun --nproc-per-node 2 -- examples/transformers_gpt.py

Stop it where you like (Ctrl-C, SIGTERM to any rank, even SIGKILL) and start the same command again:
it goes on at the exact micro-batch, with the same losses to the last bit as if it had never
stopped.
"""

from __future__ import annotations

import os
import tempfile

import torch
import transformers
from torch import nn
from torch.nn.functional import cross_entropy

import flags
import trainckpt
from char_gpt import GPT, SIZES, adamw, warm_up_then_cosine
from stdlib_text import NoisyCrops
from training_trace import Trace


class WithLoss(nn.Module):
    """The GPT as the Trainer wants it: named inputs in, the loss out."""

    def __init__(self, args, trace) -> None:
        super().__init__()
        size = SIZES[args.size]
        self.gpt = GPT(size["layers"], size["width"], size["heads"], size["context"], args)
        self.trace = trace

    def forward(self, index, x, labels, num_items_in_batch=None):
        """Cross entropy; over the whole window's characters where the Trainer counted them."""
        logits = self.gpt(x)
        total = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        loss = total / (labels.numel() if num_items_in_batch is None else num_items_in_batch)
        self.trace.forward(index, loss.item())
        return {"loss": loss, "logits": logits}


def main() -> None:
    """Train; a run that was stopped goes on."""
    args = flags.parse(flags.parser(__doc__, run="runs/transformers_gpt"))
    size = SIZES[args.size]
    if args.size == "small":
        torch.set_num_threads(1)
    resume = trainckpt.transformers.TrainckptCallback(
        args.run,
        every=f"{args.save_every} steps",
        keep_last=3,
        stop_at=os.environ.get("TRAINCKPT_STOP_AT", "micro-batch"),
    )
    trace = TraceCallback(args.trace, resume)
    arguments = transformers.TrainingArguments(
        output_dir=tempfile.gettempdir(),  # nothing is written there
        max_steps=args.steps,
        gradient_accumulation_steps=args.accumulate,
        per_device_train_batch_size=args.batch_size,
        dataloader_num_workers=args.workers,
        seed=args.seed,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        logging_steps=max(1, args.steps // 20),
        use_cpu=True,
    )
    flags.seed_everything(args.seed)
    model = WithLoss(args, trace)
    optimizer = adamw(model)
    trainer = transformers.Trainer(
        model=model,
        args=arguments,
        train_dataset=NoisyCrops(size["items"], size["context"]),
        data_collator=collate,
        optimizers=(optimizer, warm_up_then_cosine(optimizer, args.steps)),
        callbacks=[resume, trace],
    )
    flags.seed_everything(args.seed + 1 + arguments.process_index)
    trainer.train()
    trace.finish(trainer)


def collate(items) -> dict[str, torch.Tensor]:
    """A micro-batch of crops by the names of the model's inputs."""
    indices, x, y = zip(*items, strict=True)
    return {"index": torch.tensor(indices), "x": torch.stack(x), "labels": torch.stack(y)}


class TraceCallback(transformers.TrainerCallback):
    """Writes `--trace`: each micro-batch as it was trained. Nothing in it is there for resuming."""

    def __init__(self, folder, resume) -> None:
        self.folder, self.resume = folder, resume
        self.trace = Trace(None, 0)

    def forward(self, index, loss) -> None:
        """A micro-batch is under way."""
        self.now = (self.resume.checkpointer.cursor, index, loss)

    def on_train_begin(self, args, state, control, **_) -> None:  # noqa: ARG002
        """Where this attempt goes on is known."""
        self.trace = Trace(self.folder, args.process_index)
        self.trace.attempt(self.resume.checkpointer)

    def on_substep_end(self, args, state, control, **_) -> None:  # noqa: ARG002
        """It was trained."""
        self.trace.micro_batch(*self.now)

    on_step_end = on_substep_end

    def finish(self, trainer) -> None:
        """The state at the end."""
        state = {"optimizer": trainer.optimizer, "scheduler": trainer.lr_scheduler}
        self.trace.finish(self.resume.checkpointer, model=trainer.model, **state)


if __name__ == "__main__":
    flags.exit_with_code(main)

"""The GPT of char_gpt.py under Accelerate: what makes it resume is `attach`, and `ckpt.loader`.

    python examples/accelerate_gpt.py
    torchrun --nproc-per-node 2 -- examples/accelerate_gpt.py    # or accelerate launch

Stop it where you like (Ctrl-C, SIGTERM to any rank, even SIGKILL) and start the same command again:
it goes on at the exact micro-batch, with the same losses to the last bit as if it had never
stopped.
"""

from __future__ import annotations

import os

import torch
from accelerate import Accelerator
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import flags
import trainckpt
from char_gpt import GPT, SIZES, adamw, warm_up_then_cosine
from stdlib_text import NoisyCrops
from training_trace import Trace


def main() -> None:
    """Prepare, attach, train; a run that was stopped goes on."""
    args = flags.parse(flags.parser(__doc__, run="runs/accelerate_gpt"))
    size = SIZES[args.size]
    if args.size == "small":
        torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=args.accumulate)
    flags.seed_everything(args.seed)
    model = GPT(size["layers"], size["width"], size["heads"], size["context"], args)
    optimizer = adamw(model)
    # Accelerate steps the schedule once for each process.
    scheduler = warm_up_then_cosine(optimizer, args.steps * accelerator.num_processes)
    crops = NoisyCrops(size["items"], size["context"])
    loader = DataLoader(crops, args.batch_size, shuffle=True, num_workers=args.workers)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    flags.seed_everything(args.seed + 1 + accelerator.process_index)
    trace = Trace(args.trace, accelerator.process_index)

    with trainckpt.accelerate.attach(
        accelerator,
        args.run,
        every=f"{args.save_every} steps",
        keep_last=3,
        stop_at=os.environ.get("TRAINCKPT_STOP_AT", "micro-batch"),
    ) as ckpt:
        trace.attempt(ckpt)
        train(args, accelerator, ckpt, (model, optimizer, scheduler, loader), trace)
    gpt = accelerator.unwrap_model(model)
    trace.finish(ckpt, model=gpt, optimizer=optimizer, scheduler=scheduler)
    accelerator.end_training()


def train(args, accelerator, ckpt, prepared, trace) -> None:
    """Train until `--steps` optimizer steps are complete."""
    model, optimizer, scheduler, loader = prepared
    if ckpt.cursor.step >= args.steps:  # a finished run was started again
        return
    for _epoch in ckpt.epochs(args.steps * args.accumulate):  # more than enough
        for index, x, y in ckpt.loader(loader):
            began = ckpt.cursor
            with accelerator.accumulate(model):
                loss = cross_entropy(model(x).flatten(0, 1), y.flatten())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            trace.micro_batch(began, index, loss.item())
            if accelerator.sync_gradients:
                flags.show_progress(ckpt.cursor.step, args.steps, loss.item())
            if ckpt.cursor.step >= args.steps:
                return


if __name__ == "__main__":
    flags.exit_with_code(main)

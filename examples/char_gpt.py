"""Train a character-level GPT on the source text of the Python standard library.

    python examples/char_gpt.py
    torchrun --nproc-per-node 2 -- examples/char_gpt.py --steps 400 --accumulate 8

Stop it where you like (Ctrl-C, SIGTERM to any rank, even SIGKILL) and start the same command again:
it goes on at the exact micro-batch, with the same losses to the last bit as if it had never
stopped. Nothing in the training loop is there for that; the Checkpointer does it.
"""

from __future__ import annotations

import os

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

import flags
import trainckpt
from parallel import LAYOUTS, Layout, clip_gradients, micro_batch
from stdlib_text import VOCABULARY, stdlib_loader
from training_trace import Trace

SIZES = {  # parameters: 0.1 M, 11 M, 100 M; `items` is the length of an epoch
    "small": {"layers": 2, "width": 64, "heads": 2, "context": 64, "items": 93},
    "medium": {"layers": 6, "width": 384, "heads": 6, "context": 128, "items": 1021},
    "large": {"layers": 14, "width": 768, "heads": 12, "context": 128, "items": 1021},
}


def train(args, ckpt, model, optimizer, scheduler, trace) -> None:
    """Train until `--steps` optimizer steps are complete."""
    if ckpt.cursor.step >= args.steps:  # a finished run was started again
        return
    for _epoch in ckpt.epochs(args.steps * args.accumulate):  # more than enough
        for index, x, y in ckpt.batches():
            began = ckpt.cursor
            last = began.micro + 1 >= args.accumulate  # of this step's micro-batches
            with micro_batch(model, last=last):
                loss = cross_entropy(model(x).flatten(0, 1), y.flatten())
                (loss / args.accumulate).backward()
            if last:
                clip_gradients(model, 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                flags.show_progress(ckpt.cursor.step, args.steps, loss.item())
            trace.micro_batch(began, index, loss.item())
            if ckpt.cursor.step >= args.steps:
                return


def main() -> None:
    """Build everything, resume if there is something to resume, train."""
    args = flags.parse(flags.parser(__doc__, run="runs/char_gpt", layouts=LAYOUTS))
    size = SIZES[args.size]
    with flags.process_group(args) as rank:
        flags.seed_everything(args.seed)  # the same weights on every rank ...
        gpt = GPT(size["layers"], size["width"], size["heads"], size["context"], args)
        layout = Layout(args.parallel)
        model = layout.spread(gpt)
        optimizer = adamw(gpt)
        scheduler = warm_up_then_cosine(optimizer, args.steps)
        loader = stdlib_loader(size["items"], size["context"], args, layout.share)
        flags.seed_everything(args.seed + 1 + layout.share[0])  # ... but its own dropout and noise
        trace = Trace(args.trace, rank)

        with trainckpt.Checkpointer(
            args.run,
            model=model,
            optimizer=optimizer,
            scheduler=scheduler,
            loader=loader,
            every=f"{args.save_every} steps",
            keep_last=3,
            stop_at=os.environ.get("TRAINCKPT_STOP_AT", "micro-batch"),
            **layout.options,
        ) as ckpt:
            trace.attempt(ckpt)
            train(args, ckpt, model, optimizer, scheduler, trace)
        trace.finish(ckpt, model=gpt, optimizer=optimizer, scheduler=scheduler)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW that decays matrices, and leaves biases and norms alone."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))


def warm_up_then_cosine(optimizer: torch.optim.Optimizer, steps: int) -> SequentialLR:
    """Learning rate up over the first tenth of the steps, then down to a tenth."""
    warm_up = max(1, steps // 10)
    up = LinearLR(optimizer, start_factor=0.1, total_iters=warm_up)
    down = CosineAnnealingLR(optimizer, T_max=max(1, steps - warm_up), eta_min=1e-4)
    return SequentialLR(optimizer, [up, down], milestones=[warm_up])


class GPT(nn.Module):
    """Characters in (int64[batch, context]), logits of the next character out."""

    def __init__(self, layers: int, width: int, heads: int, context: int, args) -> None:
        super().__init__()
        self.characters = nn.Embedding(len(VOCABULARY), width)
        self.positions = nn.Parameter(0.02 * torch.randn(context, width))
        self.dropout = nn.Dropout(args.dropout)
        self.blocks = nn.Sequential(*[Block(width, heads, args.dropout) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, len(VOCABULARY), bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits, float32[batch, context, vocabulary]."""
        x = self.dropout(self.characters(x) + self.positions)
        return self.head(self.norm(self.blocks(x)))


class Block(nn.Module):
    """Causal attention, then a two-layer network, each added to what came in."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.head = width // heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
            nn.Dropout(dropout),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """float32[batch, context, width] to the same."""
        x = x + self.dropout(self.out(self.attention(self.qkv(self.norm(x)))))
        return x + self.mlp(x)

    def attention(self, qkv: torch.Tensor) -> torch.Tensor:
        """Each position looks at itself and those before it, with every head that is here."""
        q, k, v = qkv.unflatten(-1, (-1, 3, self.head)).permute(3, 0, 2, 1, 4)
        p = self.dropout.p if self.training else 0.0
        seen = scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        return seen.transpose(1, 2).flatten(2)


if __name__ == "__main__":
    flags.exit_with_code(main)

"""The GPT of char_gpt.py with its weights frozen, and small trained matrices beside them (LoRA).

    python examples/lora_gpt.py
    torchrun --nproc-per-node 2 -- examples/lora_gpt.py
    pip install peft; python examples/lora_gpt.py --peft --run runs/peft_gpt

Stop it where you like and start the same command again: it goes on at the exact micro-batch. The
frozen weights are saved too, so that a resume needs nothing else; `exclude="model/*.frozen.*"`
(`*.base_layer.*` with peft) would leave them out.
"""

from __future__ import annotations

import os

import torch
from torch import nn

import flags
import trainckpt
from char_gpt import GPT, SIZES, train, warm_up_then_cosine
from parallel import Layout
from stdlib_text import stdlib_loader
from training_trace import Trace


class LoRA(nn.Module):
    """A frozen linear layer, plus a trained one of low rank that begins as nothing."""

    def __init__(self, frozen: nn.Linear, rank: int) -> None:
        super().__init__()
        self.frozen = frozen
        self.down = nn.Linear(frozen.in_features, rank, bias=False)
        self.up = nn.Linear(rank, frozen.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """float32[..., in] to float32[..., out]."""
        return self.frozen(x) + self.up(self.down(x))


def adapt_by_hand(gpt: nn.Module, rank: int) -> nn.Module:
    """Freeze everything, then put a LoRA in place of each block's linear layers."""
    gpt.requires_grad_(False)
    for block in gpt.blocks:
        block.qkv, block.out = LoRA(block.qkv, rank), LoRA(block.out, rank)
    return gpt


def adapt_by_peft(gpt: nn.Module, rank: int) -> nn.Module:
    """The same by the library peft, with dropout before the matrices."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=rank, target_modules=["qkv", "out"], lora_dropout=0.1)
    return get_peft_model(gpt, config)  # trainckpt needs nothing of peft: this is a module


def main() -> None:
    """Build everything, resume if there is something to resume, train."""
    parser = flags.parser(__doc__, run="runs/lora_gpt")
    parser.add_argument("--rank", type=int, default=4, help="of the matrices (%(default)s)")
    parser.add_argument("--peft", action="store_true", help="adapt by the library peft")
    args = flags.parse(parser)
    adapt = adapt_by_peft if args.peft else adapt_by_hand
    size = SIZES[args.size]
    with flags.process_group(args) as rank:
        flags.seed_everything(args.seed)
        gpt = adapt(
            GPT(size["layers"], size["width"], size["heads"], size["context"], args), args.rank
        )
        layout = Layout(args.parallel)
        model = layout.spread(gpt)
        optimizer = torch.optim.AdamW((p for p in gpt.parameters() if p.requires_grad), lr=1e-3)
        scheduler = warm_up_then_cosine(optimizer, args.steps)
        loader = stdlib_loader(size["items"], size["context"], args, layout.share)
        flags.seed_everything(args.seed + 1 + layout.share[0])
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
        ) as ckpt:
            trace.attempt(ckpt)
            train(args, ckpt, model, optimizer, scheduler, trace)
        trace.finish(ckpt, model=gpt, optimizer=optimizer, scheduler=scheduler)


if __name__ == "__main__":
    flags.exit_with_code(main)

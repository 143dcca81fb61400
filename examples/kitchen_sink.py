"""Train a small network with everything a GPT lacks, to show that a checkpoint holds it all.

    python examples/kitchen_sink.py
    torchrun --nproc-per-node 2 -- examples/kitchen_sink.py --rank-local-buffers

BatchNorm (with buffers that differ between ranks, if asked), a frozen and a never used layer, tied
weights, bfloat16 parameters with float32 moments, `Embedding(max_norm=...)`, an average of the
weights, two optimizers and a gradient scaler. The training loop has no code for any of that to be
resumed: the objects are named to the Checkpointer, that is all.
"""

from __future__ import annotations

import os
from contextlib import nullcontext

import torch
from torch import nn
from torch.nn.functional import cross_entropy, pad
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import flags
import trainckpt
from stdlib_text import VOCABULARY, stdlib_loader
from training_trace import Trace

SIZES = {  # parameters: 0.07 M, 4 M, 59 M; `items` is the length of an epoch
    "small": {"width": 64, "context": 48, "items": 93},
    "medium": {"width": 512, "context": 64, "items": 1021},
    "large": {"width": 2048, "context": 64, "items": 1021},
}


def train(args, ckpt, model, optimizers, scaler, ema, scheduler, trace) -> None:
    """Train until `--steps` optimizer steps are complete."""
    if ckpt.cursor.step >= args.steps:  # a finished run was started again
        return
    for _epoch in ckpt.epochs(args.steps * args.accumulate):  # more than enough
        for index, x, y in ckpt.batches():
            began = ckpt.cursor
            last = began.micro + 1 >= args.accumulate  # of this step's micro-batches
            with nullcontext() if last else reduced_later(model):
                loss = cross_entropy(model(x).flatten(0, 1), y.flatten())
                scaler.scale(loss / args.accumulate).backward()
            if last:
                step_all(model, optimizers, scaler)
                ema.update_parameters(bare(model))
                scheduler.step()
                flags.show_progress(ckpt.cursor.step, args.steps, loss.item())
            trace.micro_batch(began, index, loss.item())
            if ckpt.cursor.step >= args.steps:
                return


def main() -> None:
    """Build everything, resume if there is something to resume, train."""
    parser = flags.parser(__doc__, run="runs/kitchen_sink")
    parser.add_argument(
        "--rank-local-buffers", action="store_true", help="BatchNorm statistics differ by rank"
    )
    args = flags.parse(parser)
    size = SIZES[args.size]
    with flags.process_group(args) as rank:
        flags.seed_everything(args.seed)  # the same weights on every rank ...
        model = KitchenSink(size["width"], size["context"], args.dropout)
        ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        optimizers = split_between_optimizers(model)
        scheduler = CosineAnnealingLR(optimizers[0], T_max=args.steps)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3)
        loader = stdlib_loader(size["items"], size["context"], args)
        if args.parallel == "ddp":
            model = DistributedDataParallel(
                model,
                broadcast_buffers=not args.rank_local_buffers,
                find_unused_parameters=True,
            )
        flags.seed_everything(args.seed + 1 + rank)  # ... but dropout and noise of its own
        trace = Trace(args.trace, rank)

        with trainckpt.Checkpointer(
            args.run,
            model=model,
            optimizer=optimizers,
            scaler=scaler,
            ema=ema,
            scheduler=scheduler,
            loader=loader,
            every=f"{args.save_every} steps",
            keep_last=3,
            stop_at=os.environ.get("TRAINCKPT_STOP_AT", "micro-batch"),
        ) as ckpt:
            trace.attempt(ckpt)
            train(args, ckpt, model, optimizers, scaler, ema, scheduler, trace)
        state = {"scaler": scaler, "ema": ema, "scheduler": scheduler}
        trace.finish(ckpt, model=bare(model), optimizer=optimizers, **state)


def step_all(model, optimizers, scaler) -> None:
    """One step of every optimizer; the scaler skips it if a gradient overflowed."""
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        scaler.step(optimizer)
        optimizer.zero_grad()
    scaler.update()


def bare(model):
    """The model inside DDP, or the model itself."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def reduced_later(model):
    """Keep gradients on this rank; DDP reduces them with the last micro-batch of the step."""
    return model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()


def split_between_optimizers(model: KitchenSink) -> list[torch.optim.Optimizer]:
    """Adam for what is dense, plain momentum for the embeddings; frozen parameters in neither."""
    embeddings = [model.characters.weight, model.positions.weight]
    ours = {id(p) for p in embeddings}
    dense = [p for p in model.parameters() if p.requires_grad and id(p) not in ours]
    return [Float32Adam(dense, lr=2e-3), torch.optim.SGD(embeddings, lr=0.05, momentum=0.9)]


class KitchenSink(nn.Module):
    """Characters in (int64[batch, context]), logits of the next character out."""

    def __init__(self, width: int, context: int, dropout: float) -> None:
        super().__init__()
        self.characters = nn.Embedding(len(VOCABULARY), width)
        # max_norm writes to the weights in forward; every rank looks every position up, so the
        # ranks' copies stay equal.
        self.positions = nn.Embedding(context, width, max_norm=1.0)
        self.mix = nn.Conv1d(width, width, kernel_size=5, bias=False)
        self.norm = nn.BatchNorm1d(width)
        self.dropout = nn.Dropout(dropout)
        self.bf16 = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        ).to(torch.bfloat16)
        self.frozen = nn.Linear(width, width).requires_grad_(requires_grad=False)
        self.never_used = nn.Linear(width, 2)
        self.head = nn.Linear(width, len(VOCABULARY), bias=False)
        self.head.weight = self.characters.weight  # tied

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits, float32[batch, context, vocabulary]."""
        places = torch.arange(x.shape[1], device=x.device)
        x = self.characters(x) + self.positions(places)
        past = pad(x.transpose(1, 2), (self.mix.kernel_size[0] - 1, 0))  # only what came before
        x = x + self.norm(self.mix(past)).relu().transpose(1, 2)
        x = x + self.dropout(self.bf16(x.to(torch.bfloat16)).float())
        x = x + self.frozen(x)
        return self.head(x) / x.shape[-1] ** 0.5


class Float32Adam(torch.optim.Optimizer):
    """Adam whose moments, and a master copy of the weights, are float32 whatever the weights are.

    Beware: `Optimizer.load_state_dict` casts state to its parameter's type, here bfloat16; a
    resume that goes through it alone loses half of the bits.
    """

    def __init__(self, params, lr: float, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": 1e-8})

    @torch.no_grad()
    def step(self, closure=None):
        """Update every parameter that has a gradient."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, group)
        return loss

    def _update(self, p: torch.Tensor, group: dict) -> None:
        state = self.state[p] or self._start(p)
        state["step"] += 1
        grad, (b1, b2) = p.grad.float(), group["betas"]
        state["mean"].lerp_(grad, 1 - b1)
        state["square"].lerp_(grad.square(), 1 - b2)
        spread = (state["square"] / (1 - b2 ** state["step"])).sqrt_().add_(group["eps"])
        state["master"].addcdiv_(
            state["mean"], spread, value=-group["lr"] / (1 - b1 ** state["step"])
        )
        p.copy_(state["master"])

    def _start(self, p: torch.Tensor) -> dict:
        zeros = torch.zeros_like(p, dtype=torch.float32)
        self.state[p] = {
            "step": 0,
            "mean": zeros,
            "square": zeros.clone(),
            "master": p.float().clone(),
        }
        return self.state[p]


if __name__ == "__main__":
    flags.exit_with_code(main)

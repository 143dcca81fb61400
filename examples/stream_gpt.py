"""Train the GPT of char_gpt.py on a stream of documents, packed into blocks, with TensorBoard.

    python examples/stream_gpt.py
    torchrun --nproc-per-node 2 -- examples/stream_gpt.py
    tensorboard --logdir runs/stream_gpt-logs

Stop it where you like and start the same command again: it goes on in the middle of the document,
and TensorBoard shows each step once.
"""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.tensorboard import SummaryWriter

import flags
import trainckpt
from char_gpt import GPT, SIZES, adamw, warm_up_then_cosine
from parallel import Layout, clip_gradients, micro_batch
from stdlib_text import VOCABULARY, encode
from training_trace import Trace

if TYPE_CHECKING:
    from collections.abc import Iterator

END = torch.tensor([VOCABULARY.index("\n")])  # stands between two documents


class PackedDocuments(IterableDataset):
    """Documents without end, in another order in each turn, cut into blocks of one length.

    A block begins where the last one ended, in the middle of a document too. All that leads to the
    next block is in four attributes, and `state_dict` gives them to the checkpoint.
    """

    def __init__(self, context: int, seed: int, share: tuple[int, int]) -> None:
        which, of = share  # of several ranks each reads documents of its own
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        self.files, self.context, self.seed = files[which::of], context, seed
        self.turn, self.document, self.block = 0, 0, 0
        self.tokens = END[:0]  # read, and in no block yet

    def __iter__(self) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        while True:
            while len(self.tokens) <= self.context:
                self.tokens = torch.cat([self.tokens, self.next_document(), END])
            block, self.tokens = self.tokens[: self.context + 1], self.tokens[self.context :]
            self.block += 1  # before `yield`: the state is that after this block
            yield self.block - 1, block[:-1], block[1:]

    def next_document(self) -> torch.Tensor:
        """The tokens of the next document, int64[length]."""
        shuffled = torch.Generator().manual_seed(self.seed + self.turn)
        order = torch.randperm(len(self.files), generator=shuffled)
        file = self.files[order[self.document]]
        self.document += 1
        if self.document == len(self.files):
            self.turn, self.document = self.turn + 1, 0
        return torch.from_numpy(encode(file.read_bytes())).long()

    def state_dict(self) -> dict[str, Any]:
        """The place in the stream, after the last block."""
        return {
            "turn": self.turn,
            "document": self.document,
            "block": self.block,
            "tokens": self.tokens,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on at that place."""
        vars(self).update(state)


def main() -> None:
    """Build everything, resume if there is something to resume, train."""
    parser = flags.parser(__doc__, run="runs/stream_gpt")
    parser.add_argument("--logs", default="runs/stream_gpt-logs", help="folder (%(default)s)")
    args = flags.parse(parser)
    size = SIZES[args.size]
    with flags.process_group(args) as rank:
        flags.seed_everything(args.seed)
        gpt = GPT(size["layers"], size["width"], size["heads"], size["context"], args)
        layout = Layout(args.parallel)
        model = layout.spread(gpt)
        optimizer = adamw(gpt)
        scheduler = warm_up_then_cosine(optimizer, args.steps)
        # Without workers: the state of a stream in a worker is out of the checkpoint's reach.
        documents = PackedDocuments(size["context"], args.seed, layout.share)
        loader = DataLoader(documents, args.batch_size)
        flags.seed_everything(args.seed + 1 + rank)
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
            # Tracked, the log is cut back to the checkpoint that an attempt goes on from.
            log = ckpt.track_run(SummaryWriter(args.logs)) if rank == 0 else None
            train(args, ckpt, model, optimizer, scheduler, trace, log)
            if log:
                log.close()
        trace.finish(ckpt, model=gpt, optimizer=optimizer, scheduler=scheduler)


def train(args, ckpt, model, optimizer, scheduler, trace, log) -> None:
    """Train until `--steps` optimizer steps are complete; the stream itself never ends."""
    if ckpt.cursor.step >= args.steps:  # a finished run was started again
        return
    for _ in ckpt.epochs(1):
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
                if log:
                    log.add_scalar("loss", loss.item(), began.step)
                flags.show_progress(ckpt.cursor.step, args.steps, loss.item())
            trace.micro_batch(began, index, loss.item())
            if ckpt.cursor.step >= args.steps:
                return


if __name__ == "__main__":
    flags.exit_with_code(main)

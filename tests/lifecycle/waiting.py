"""Programs of real ranks: one waits for a save, the others have copied it beside training."""

from __future__ import annotations

import os

from tests.lifecycle.ranks import parts
from trainckpt import Checkpointer
from trainckpt.lifecycle.deciding import copy_choice
from trainckpt.lifecycle.deciding.copy_choice import OVERLAP
from trainckpt.lifecycle.saving import saver
from trainckpt.lifecycle.saving.save_keys import haste
from trainckpt.state import overlap
from trainckpt.state.overlap import Overlapped

NEVER_S = 1e6
SAVES = 3


def save_at_each_step(rank, place, *, streams, waits):
    """Saves where a proof waits for a step for good. Their errors; how many copies were proved;
    of which saves the store still says that training waits for them.

    Args:
        streams: The rank that has no memory to copy to; None: all have.
        waits: The rank whose training waits for each save; None: none does.
    """
    copy_choice.choose = lambda *_: OVERLAP
    overlap.FENCE_WITHIN_S = saver.NEARLY_S = saver.PATIENCE_S = NEVER_S
    if rank == streams:
        os.environ["TRAINCKPT_MEMORY_BUDGET"] = "1 B"
    model, optimizer, loader = parts(rank, 2)
    saves, proved, run = [], [], Overlapped.run

    def noted(self, *arguments):
        proved.append(self.proves)
        return run(self, *arguments)

    Overlapped.run = noted
    with Checkpointer(
        place, model=model, optimizer=optimizer, loader=loader, every="never", keep_last=SAVES + 1
    ) as ckpt:
        for _ in ckpt.epochs(1):
            for (x,) in ckpt.batches():
                if saves and saves[-1].snapshot and rank == waits:
                    saves[-1].wait("local")  # in the middle of its step, as others see it
                    saves[0].wait("local")  # that is there, and nobody is asked for it
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                if len(saves) < SAVES:
                    saves.append(ckpt.save())
            left = haste_left(ckpt)
    Overlapped.run = run
    return [str(save.error) for save in saves if save.error], sum(proved), left


def haste_left(ckpt):
    """Saves that were waited for, as the store still tells all ranks."""
    channel = ckpt._attempt.saver._channel
    return [n for n in range(1, SAVES + 2) if channel.peek(haste(n)) is not None]

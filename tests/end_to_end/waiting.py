"""Programs of real ranks: one waits for a save, the others have copied it beside training."""

from __future__ import annotations

import os

from tests.end_to_end.ranks import parts
from trainckpt import Checkpointer
from trainckpt.save import coordinator, copying
from trainckpt.save.copying import OVERLAP
from trainckpt.state import overlapped_copy
from trainckpt.state.overlapped_copy import OverlappedCopy

NEVER_S = 1e6
SAVES = 3


def save_at_each_step(rank, place, *, streams, waits):
    """Save at each step; return the errors of the saves, and how many copies were proved.

    Args:
        streams: The rank that has no memory to copy to; None: all have.
        waits: The rank whose training waits for each save; None: none does.
    """
    copying.choose = lambda *_: OVERLAP
    overlapped_copy.FENCE_WITHIN_S = 0.2
    coordinator.NEARLY_S = coordinator.PATIENCE_S = NEVER_S
    if rank == streams:
        os.environ["TRAINCKPT_MEMORY_BUDGET"] = "1 B"
    model, optimizer, loader = parts(rank, 2)
    saves, proved, run = [], [], OverlappedCopy.run

    def noted(self, *arguments):
        proved.append(self.proves)
        return run(self, *arguments)

    OverlappedCopy.run = noted
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
    OverlappedCopy.run = run
    return [str(save.error) for save in saves if save.error], sum(proved)

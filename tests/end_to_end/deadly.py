"""A script that dies of one snapshot: tests.end_to_end.deadly PLACE STEPS SNAPSHOT WHEN HOW.

It trains STEPS steps and is gone without a word, as a lost host is. WHEN is "reading", before the
snapshot's bytes were verified, or "applying"; HOW the name of a signal, or an exit code. Of several
ranks the last one dies.
"""

from __future__ import annotations

import os
import signal
import sys

import torch
from torch import nn

from trainckpt import Checkpointer
from trainckpt.resume import candidate


def die(how):
    if int(os.environ.get("RANK", "0")) + 1 < int(os.environ.get("WORLD_SIZE", "1")):
        return
    if how.isdecimal():
        os._exit(int(how))
    os.kill(os.getpid(), getattr(signal, how))


class Deadly:
    """Tracked; the state of one snapshot is more than it can bear."""

    def __init__(self, snapshot, how):
        self.step, self.snapshot, self.how = 0, snapshot, how

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        if f"s{state['step']}" == self.snapshot:
            die(self.how)


def main(place, steps, snapshot, when, how):
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    deadly = Deadly(snapshot if when == "applying" else "", how)
    read = candidate.read_state

    def read_and_die(tier, manifest, *rest, **how_read):
        if when == "reading" and manifest.name.id == snapshot:
            die(how)
        return read(tier, manifest, *rest, **how_read)

    candidate.read_state = read_and_die
    with Checkpointer(
        place, model=model, optimizer=optimizer, deadly=deadly, every="2 steps", keep_last=9
    ) as ckpt:
        while ckpt.boundary():
            ckpt._attempt.saver.wait()  # while a save is on its way, another may be skipped
            if ckpt.cursor.step >= steps:
                break
            deadly.step = ckpt.cursor.step + 1
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        ckpt._attempt.saver.wait()
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:6])

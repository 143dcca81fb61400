"""The example, with micro-batches that last for as long as the file that HOLD names is there.

Each rank says that it has come to it by a file beside that one. The first hold is in the third step
of the process. OUTSIDE names a port of this machine: each rank is connected to it from its first
step on (loader workers that were forked later would hold the connection too), closes that before it
is dumped, and connects again when it has come back. While the file that FAILS names is there, the
next step removes it and fails. TAKEN_DOWN names a backend whose groups are taken down for a dump,
as NCCL's are.
"""

import os
import runpy
import socket
import sys
import time
from pathlib import Path

from torch.optim.optimizer import register_optimizer_step_pre_hook

import trainckpt
from trainckpt.ranks import process_groups

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "char_gpt.py"
HOLD, OUTSIDE, FAILS = (os.environ.get(name) for name in ("HOLD", "OUTSIDE", "FAILS"))
steps, connection = 0, None


def connect():
    global connection
    connection = socket.create_connection(("127.0.0.1", int(OUTSIDE)))


def hold(*_):
    global steps
    steps += 1
    if OUTSIDE and steps == 1:
        connect()
    if FAILS and Path(FAILS).exists():
        Path(FAILS).unlink()
        raise RuntimeError("as it was told to")
    if HOLD and steps >= 3 and Path(HOLD).exists():
        Path(f"{HOLD}.rank{os.environ['RANK']}").touch()
        while Path(HOLD).exists():
            time.sleep(0.05)


class Connected(trainckpt.Checkpointer):
    """With something outside that it is connected to."""

    def __init__(self, *given, **more):
        super().__init__(*given, **more)
        self.before_dump(lambda: connection.close())
        self.after_restore(connect)


if __name__ == "__main__":
    process_groups.TAKEN_DOWN |= set(filter(None, [os.environ.get("TAKEN_DOWN")]))
    register_optimizer_step_pre_hook(hold)
    if OUTSIDE:
        trainckpt.Checkpointer = Connected
    sys.argv[0] = str(EXAMPLE)
    sys.path.insert(0, str(EXAMPLE.parent))
    runpy.run_path(str(EXAMPLE), run_name="__main__")

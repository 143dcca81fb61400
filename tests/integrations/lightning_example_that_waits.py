"""The example under Lightning, which waits after its fourth micro-batch for a notice, if told to.

A whole run takes a second: without this a signal could meet one that has finished.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import flags
import lightning_gpt

HELD_AFTER, LOOK_S, LIMIT_S = 4, 0.01, 120.0


class Held(lightning_gpt.TraceCallback):
    """Waits while a file `hold` lies beside the trace's folder."""

    def on_train_batch_end(self, trainer, *batch):
        super().on_train_batch_end(trainer, *batch)
        ckpt, until = self.resume.checkpointer, time.monotonic() + LIMIT_S
        if ckpt.cursor.micro_batches + 1 == HELD_AFTER and (Path(self.folder) / "../hold").exists():
            while not ckpt._gate.has_open_round() and time.monotonic() < until:
                time.sleep(LOOK_S)


if __name__ == "__main__":
    lightning_gpt.TraceCallback = Held
    flags.exit_with_code(lightning_gpt.main)

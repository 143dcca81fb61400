"""An example whose ranks stay before the run's last micro-batches until the signal was sent.

    CAMPAIGN_GATE=24,FILE python tests/campaign/gate.py examples/char_gpt.py ARGUMENT...

On a busy machine a driver may look at a short run too late to hit it. Here a rank that has trained
24 micro-batches of the run waits in its trace until FILE is there; no other moment is changed.

The example uses trainckpt. `trainckpt run` reads that word here, as it reads it in the example: a
signal that ends a rank before its imports means 75.
"""

from __future__ import annotations

import os
import runpy
import sys
import time
from pathlib import Path

GATE = "CAMPAIGN_GATE"
LOOK_S = 0.002


def main() -> None:
    """Run the script that the arguments name, with its trace behind the gate."""
    script = Path(sys.argv[1])
    sys.argv = sys.argv[1:]
    sys.path[0] = str(script.parent)
    stand_before(*os.environ[GATE].split(",", 1))
    runpy.run_path(str(script), run_name="__main__")


def stand_before(micro_batches: str, file: str) -> None:
    """Make a rank that has trained so many micro-batches wait in its trace until `file` exists."""
    from training_trace import Trace

    write, last, opened = Trace.micro_batch, int(micro_batches), Path(file)

    def micro_batch(trace, began, samples, loss) -> None:
        write(trace, began, samples, loss)
        trained = len((trace.folder / f"rank{trace.rank}.jsonl").read_bytes().splitlines())
        while trained >= last and not opened.exists():
            time.sleep(LOOK_S)

    Trace.micro_batch = micro_batch


if __name__ == "__main__":
    main()

"""The example at a walk for as long as a test wants it: a file `slow` beside the trace's folder.

A whole run takes little more than a second. A busy machine can need that long to deliver a
signal through a launcher, and then it met a run that had finished.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from training_trace import Trace

SLOW = "slow"
PAUSE_S = 0.1  # after every micro-batch


def pace() -> None:
    """From now on, traces in this process wait after a micro-batch while the file is there."""
    record = Trace.micro_batch

    def record_and_wait(trace: Trace, *facts) -> None:
        record(trace, *facts)
        if trace.folder and (trace.folder.parent / SLOW).exists():
            time.sleep(PAUSE_S)

    Trace.micro_batch = record_and_wait

"""The example at a walk for as long as a test wants it: a file `slow` beside the trace's folder.

A whole run takes little more than a second. A busy machine can need that long to deliver a
signal through a launcher, and then it met a run that had finished.
"""

from __future__ import annotations

import itertools
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from training_trace import Trace

SLOW = "slow"
PAUSE_S = 0.1  # after every micro-batch
FIRST = 1  # of a process, that is paused after


def pace() -> None:
    """From now on, traces in this process wait after a micro-batch while the file is there."""
    record, numbers = Trace.micro_batch, itertools.count(1)

    def record_and_wait(trace: Trace, *facts) -> None:
        record(trace, *facts)
        late = next(numbers) >= FIRST
        if late and trace.folder and (trace.folder.parent / SLOW).exists():
            time.sleep(PAUSE_S)

    Trace.micro_batch = record_and_wait

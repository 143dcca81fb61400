"""A real SIGTERM that is noticed at one micro-batch, so that a stop can be repeated."""

from __future__ import annotations

import os
import signal
import time

HOLD_S = 60.0


def strike(ckpt, *, here=True):
    """Send it to this process if `here`, and hold until the notice of it has arrived.

    Called by all ranks between two boundaries: the stop falls at the second.
    """
    if here:
        os.kill(os.getpid(), signal.SIGTERM)
    until = time.monotonic() + HOLD_S
    while not ckpt._gate.has_open_round():
        assert time.monotonic() < until, "the signal was not noticed"
        time.sleep(0.001)

"""Write one line per micro-batch to $TRAINING_LOG, and stop after line $STOP_AFTER."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from pathlib import Path

import torch


def digest(value):
    """Return a digest of a tensor, a module, or a plain value, over all bits."""
    if isinstance(value, torch.nn.Module):
        value = list(value.state_dict().values())
    if isinstance(value, list):
        value = " ".join(map(digest, value))
    if isinstance(value, torch.Tensor):
        value = value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    else:
        value = repr(value).encode()
    return hashlib.sha256(value).hexdigest()[:12]


def log(*values):
    """Append the digests of a micro-batch; lines of earlier attempts count for the stop."""
    path = Path(os.environ["TRAINING_LOG"])
    with path.open("a", encoding="utf-8") as file:
        file.write(" ".join(map(digest, values)) + "\n")
    lines = len(path.read_text(encoding="utf-8").splitlines())
    if str(lines) == os.environ.get("STOP_AFTER"):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.5)  # the thread that listens for signals needs a moment; batches take less

"""Checkpoints for PyTorch training that resume at the exact micro-batch, bitwise.

with trainckpt.Checkpointer("runs/gpt", model=model, optimizer=optimizer, loader=loader) as c:
    for epoch in c.epochs(3):
        for batch in c.batches():
            ...
"""

from trainckpt.errors import (
    ConfigurationError,
    NoAgreement,
    NothingToResume,
    NoUsableSnapshot,
    SaveFailed,
    StateMismatch,
    TierUnavailable,
    TrainckptError,
    UnusableSnapshot,
)
from trainckpt.format.cursor import Cursor
from trainckpt.format.versions import VERSION
from trainckpt.lifecycle.checkpointer import Checkpointer
from trainckpt.lifecycle.stopped import Stopped

__all__ = [
    "Checkpointer",
    "ConfigurationError",
    "Cursor",
    "NoAgreement",
    "NoUsableSnapshot",
    "NothingToResume",
    "SaveFailed",
    "StateMismatch",
    "Stopped",
    "TierUnavailable",
    "TrainckptError",
    "UnusableSnapshot",
]
__version__ = VERSION

"""Checkpoints for PyTorch training that resume at the exact micro-batch, bitwise.

with trainckpt.Checkpointer("runs/gpt", model=model, optimizer=optimizer, loader=loader) as c:
    for epoch in c.epochs(3):
        for batch in c.batches():
            ...
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from trainckpt.attempt import status_files as _status_files  # noqa: F401 - so a supervisor learns of the import
from trainckpt.errors import (
    ConfigurationError,
    NoAgreement,
    NothingToResume,
    NoUsableSnapshot,
    SaveFailed,
    StateMismatch,
    Stopped,
    TierUnavailable,
    TrainckptError,
    UnusableSnapshot,
)
from trainckpt.format.cursor import Cursor
from trainckpt.format.names import VERSION
from trainckpt.gc_pause import gc_paused

if TYPE_CHECKING:
    from trainckpt import lightning as lightning
    from trainckpt import ray as ray
    from trainckpt.checkpointer import Checkpointer
    from trainckpt.inspect.load import load
    from trainckpt.state.attributes import Attributes

__all__ = [
    "Attributes",
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
    "load",
]
__version__ = VERSION

# Loaded when first asked for: they import torch, which takes seconds that `trainckpt list` has not.
_LATER = {
    "Attributes": "trainckpt.state.attributes",
    "Checkpointer": "trainckpt.checkpointer",
    "load": "trainckpt.inspect.load",
}
# Modules; each imports its framework.
_TRAINERS = frozenset({"accelerate", "lightning", "ray", "torchtitan", "transformers"})

if not TYPE_CHECKING:  # with a __getattr__ in sight, type checkers would let any name pass

    def __getattr__(name: str) -> Any:
        if name in _TRAINERS:
            return import_module(f"trainckpt.{name}")
        if name not in _LATER:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        with gc_paused():
            found = getattr(import_module(_LATER[name]), name)
        globals()[name] = found
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER, *_TRAINERS})

"""One room for each system. `load` finds them by name.

`trainckpt-overlap` and `trainckpt-plain` always copy in one of trainckpt's two ways.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.compare.systems.base import System

ROOMS = {
    "trainckpt": "trainckpt",
    "torch.save": "torch_save",
    "dcp": "dcp",
    "dcp-async": "dcp_async",
    "torchsnapshot": "torchsnapshot",
    "torch_checkpointing": "torch_checkpointing",
    "trainckpt-overlap": "trainckpt_overlap",
    "trainckpt-plain": "trainckpt_plain",
}
DEFAULT = tuple(ROOMS)[:6]


def load(name: str) -> type[System]:
    """The class of a system.

    Raises:
        ImportError: it is not installed, or does not import.
    """
    return importlib.import_module(f"benchmarks.compare.systems.{ROOMS[name]}").SYSTEM

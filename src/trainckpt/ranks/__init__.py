"""The other processes: who they are, small values between them, one decision for all.

Floor 1. Uses: torch.distributed, errors. Used by: lifecycle.
"""

from __future__ import annotations

from trainckpt.ranks.agreement import Agreement, Due
from trainckpt.ranks.channel import Alone, Channel, OverStore, connect
from trainckpt.ranks.decision import Decision, Publication, Wish, decide
from trainckpt.ranks.watcher import Watcher
from trainckpt.ranks.world import World, current_world

__all__ = [
    "Agreement",
    "Alone",
    "Channel",
    "Decision",
    "Due",
    "OverStore",
    "Publication",
    "Watcher",
    "Wish",
    "World",
    "connect",
    "current_world",
    "decide",
]

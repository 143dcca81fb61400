"""The other processes: their identity, small values between them, one decision for all."""

from __future__ import annotations

from trainckpt.ranks.boundary_gate import BoundaryGate
from trainckpt.ranks.rounds import Decision, Publication, decide
from trainckpt.ranks.store import RankStore, connect, local_store
from trainckpt.ranks.watcher import Watcher
from trainckpt.ranks.world import World, current_world

__all__ = [
    "BoundaryGate",
    "Decision",
    "Publication",
    "RankStore",
    "Watcher",
    "World",
    "connect",
    "current_world",
    "decide",
    "local_store",
]

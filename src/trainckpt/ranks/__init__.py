"""The other processes: their identity, small values between them, one decision for all."""

from __future__ import annotations

from trainckpt.ranks.boundary_gate import BoundaryGate
from trainckpt.ranks.decision import Decision, Publication, decide
from trainckpt.ranks.notice_watcher import NoticeWatcher
from trainckpt.ranks.store import RankStore, connect, local_store
from trainckpt.ranks.world import World, current_world

__all__ = [
    "BoundaryGate",
    "Decision",
    "NoticeWatcher",
    "Publication",
    "RankStore",
    "World",
    "connect",
    "current_world",
    "decide",
    "local_store",
]

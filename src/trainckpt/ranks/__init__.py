"""The other processes: their identity, small values between them, one decision for all.

How the ranks agree on a boundary to stop or save at:

    notice_watcher, pending_requests    a notice or a call opens a round on every rank
    rounds                              carries the answers and the decision through the store
    decision                            computes the boundary from the answers of all ranks
    boundary_gate                       holds each rank's training until that boundary is known
"""

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

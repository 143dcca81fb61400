"""Warn if the attempt before this one still trains: a script started twice, say.

Nothing is lost then, since each attempt's saves are a branch of their own. But the older attempt
trains for nothing, perhaps unnoticed. Rank 0 checks as the attempt begins.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import TYPE_CHECKING

from trainckpt.attempt import heartbeat
from trainckpt.attempt.heartbeat import is_alive
from trainckpt.errors import TrainckptError
from trainckpt.snapshot import attempt_history

if TYPE_CHECKING:
    from trainckpt.format.attempt_record import AttemptRecord
    from trainckpt.storage.base import Place


def still_alive(tier: Place, attempt: int) -> str:
    """Return the warning about the previous attempt, or ""."""
    before = attempt - 1
    with suppress(TrainckptError, OSError):
        age_s = heartbeat.age_s(tier, before) if before else None
        if age_s is None or age_s >= heartbeat.ALIVE_S:
            return ""
        record = attempt_history.read_attempts(tier).get(before)
        if record is None or record.outcome is not None or _has_gone(record):
            return ""
        where = ", ".join(sorted({str(host) for host in record.facts.get("hosts", [])}))
        return (
            f"attempt {before} of this run was alive {age_s:.0f} s ago ({where}). If it still "
            "trains, stop one of the two: its later snapshots are an abandoned branch"
        )
    return ""


def _has_gone(record: AttemptRecord) -> bool:
    """Return True if all its ranks were on this host and none is left."""
    hosts, pids = record.facts.get("hosts"), record.facts.get("pids")
    if not isinstance(hosts, list) or not isinstance(pids, list) or not pids:
        return False
    return {*hosts} == {socket.gethostname()} and not any(_is_there(pid) for pid in pids)


def _is_there(pid: object) -> bool:
    return isinstance(pid, int) and pid > 0 and is_alive(pid)

"""Whether the attempt before this one still trains: a script that was started twice, say.

Nothing is lost then, since each attempt's saves are a branch of their own; but the older one trains
for nothing, and whoever started both may not know. Rank 0 asks, as the attempt begins.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import TYPE_CHECKING

from trainckpt.errors import TrainckptError
from trainckpt.lifecycle.run import heartbeat
from trainckpt.lifecycle.run.living import lives
from trainckpt.snapshot import attempts

if TYPE_CHECKING:
    from trainckpt.format.attempt import AttemptRecord
    from trainckpt.tiers.places import Place


def still_alive(tier: Place, attempt: int) -> str:
    """What to tell people of the attempt before, or ""."""
    before = attempt - 1
    with suppress(TrainckptError, OSError):
        age_s = heartbeat.age_s(tier, before) if before else None
        if age_s is None or age_s >= heartbeat.ALIVE_S:
            return ""
        record = attempts.read_attempts(tier).get(before)
        if record is None or record.outcome is not None or _has_gone(record):
            return ""
        where = ", ".join(sorted({str(host) for host in record.facts.get("hosts", [])}))
        return (
            f"attempt {before} of this run gave a sign of life {age_s:.0f} s ago ({where}): if it "
            "still trains, stop one of the two; what it saves from now on is a branch that no "
            "resume takes unasked"
        )
    return ""


def _has_gone(record: AttemptRecord) -> bool:
    """All its ranks were on this host, and none is there any more."""
    hosts, pids = record.facts.get("hosts"), record.facts.get("pids")
    if not isinstance(hosts, list) or not isinstance(pids, list) or not pids:
        return False
    return {*hosts} == {socket.gethostname()} and not any(_is_there(pid) for pid in pids)


def _is_there(pid: object) -> bool:
    return isinstance(pid, int) and pid > 0 and lives(pid)

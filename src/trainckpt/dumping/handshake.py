"""Exchange messages between a supervisor and the ranks that pause at a boundary for a dump.

    <supervisor's folder>/rest.json        {"id", "pid", "refused"}       the supervisor's
    <supervisor's folder>/rest<rank>.json  {"id", "snapshot", "dropped"}  of each pausing rank

The first is written before the ranks are told to stop, so at the stop all of them find it, or none.
It comes back with the dump, so the current number (`AttemptId`) decides if it counts.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from trainckpt.attempt.heartbeat import is_alive
from trainckpt.attempt.status_files import ByteCount, Pid, read_status, read_statuses, write_status

if TYPE_CHECKING:
    from pathlib import Path

REQUEST_FILE = "rest.json"


@dataclass(frozen=True)
class DumpRequest:
    """Request that the ranks pause at the next stop and are dumped there."""

    id: str  # id of this request; each is obeyed once
    pid: Pid  # process id of the requesting supervisor
    refused: str = ""  # reason that no dump follows after all, or ""

    @property
    def is_alone(self) -> bool:
        """Return True if the requesting supervisor is gone, so no dump follows."""
        return not is_alive(self.pid)


def write_request(folder: Path, request: DumpRequest) -> None:
    """Write the request. Raise `OSError` if that is not possible."""
    write_status(folder / REQUEST_FILE, request)


def refuse_request(folder: Path, request: DumpRequest, why: str) -> None:
    """Let the ranks leave. An unwritable folder has no reader either."""
    with contextlib.suppress(OSError):
        write_request(folder, replace(request, refused=why or "no reason was given"))


def read_request(folder: Path) -> DumpRequest | None:
    """Return the current request, or None."""
    return read_status(folder / REQUEST_FILE, DumpRequest)


@dataclass(frozen=True)
class RankQuiesced:
    """One rank's pause: it changes nothing before it is restored, or may leave."""

    id: str  # id of the request it obeys
    snapshot: str = ""  # the snapshot of the dropped memory, or ""
    dropped: ByteCount = 0  # number of bytes dropped


def report_quiesced(folder: Path, rank: int, status: RankQuiesced) -> None:
    """Report that a rank pauses. Raise `OSError` if that is not possible."""
    write_status(folder / f"rest{rank}.json", status)


def quiesced_ranks(folder: Path, request: DumpRequest) -> list[RankQuiesced]:
    """Return the ranks that pause for this request."""
    statuses = read_statuses(folder, "rest[0-9]*.json", RankQuiesced)
    return [status for status, _ in statuses if status.id == request.id]

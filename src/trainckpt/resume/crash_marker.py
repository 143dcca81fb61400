"""Record a native crash during a resume where no supervisor sees it.

    RUN/attempts/<n>.rank<r>.fault    empty from the claim to the first boundary, then removed;
                                      a segmentation fault, an abort and the like write into it

Only for a run in a directory. Python's faulthandler writes it, from the signal's own handler;
faulthandler already enabled by the script or a test runner is left alone. After two such deaths on
one snapshot, `candidate_order` passes it over. No other sudden end of a process leaves a marker.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
from typing import TYPE_CHECKING

from trainckpt.attempt.status_files import SUPERVISOR_VARIABLE
from trainckpt.errors import TrainckptError
from trainckpt.format import names
from trainckpt.format.attempt_record import FAILED, STARTING
from trainckpt.storage.local import LocalTier

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import TextIO

    from trainckpt.format.attempt_record import AttemptRecord
    from trainckpt.storage.base import RunTier

_FAULT = re.compile(r"(\d+)\.rank\d+\.fault")
MAX_BYTES = 1 << 20
CRASHED = "crashed in native code"


class CrashMarker:
    """One rank's marker: armed at the claim, disarmed at the first boundary or a failed resume."""

    def __init__(self, tier: RunTier, rank: int) -> None:
        # A crash can only write into an open file.
        self._folder = tier.root / names.ATTEMPTS if isinstance(tier, LocalTier) else None
        self._rank = rank
        self._file: TextIO | None = None

    def arm(self, attempt: int) -> None:
        """Let a crash write a marker from now on. An unwritable folder stops nothing."""
        if os.environ.get(SUPERVISOR_VARIABLE) or faulthandler.is_enabled():
            return
        if self._folder is None:
            return
        path = self._folder / f"{attempt}.rank{self._rank}.fault"
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            self._file = path.open("x", encoding="utf-8")
            path.chmod(0o600)
            faulthandler.enable(self._file)

    def disarm(self) -> None:
        """Remove the marker: a later crash has another cause."""
        if self._file is None:
            return
        faulthandler.disable()
        self._file.close()
        with contextlib.suppress(OSError):
            os.unlink(self._file.name)  # noqa: PTH108 - of an open file's own name
        self._file = None


def with_crash_outcomes(
    tier: RunTier, before: Mapping[int, AttemptRecord]
) -> dict[int, AttemptRecord]:
    """Return the records; a silent attempt with a crash marker gets the outcome in the marker.

    Empty files, from attempts that ended otherwise, are removed.
    """
    records = dict(before)
    for name in tier.list(names.ATTEMPTS):
        match = _FAULT.fullmatch(name)
        record = before.get(int(match[1])) if match else None
        if record is None:
            continue
        key = f"{names.ATTEMPTS}/{name}"
        with contextlib.suppress(TrainckptError):
            if not tier.size(key):
                tier.remove(key)
            elif record.outcome is None and record.state == STARTING:
                word = tier.read(key, max_bytes=MAX_BYTES).decode(errors="replace")
                first = word.splitlines()[0][:200] if word else ""
                outcome = {"outcome": FAILED, "reason": f"{CRASHED}: {first}"}
                records[record.attempt] = record.with_(outcome=outcome)
    return records

"""The number of this attempt: as claimed, until its processes come back from a dump as another one.

    <supervisor's folder>/restored.json    {"attempt", "started", "job_ends"}
    <supervisor's folder>/restoring.pid    of the supervisor, until it has let go of all processes

It also says in which job they go on: when that began, on the monotonic clock, and when it ends, as
Slurm's variable has it, or null.

The supervisor that restores processes claims the attempt that they become, and writes the file
before they run again; so whoever asks before the dump has the old number, whoever asks later the
new one. Ranks that ask for one purpose compare what they got, and the largest counts.

They run again one after the other. If one ends while another is still held, whoever restores them
takes that for a failure and ends all; so what may end them waits until all have been let go.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainckpt.lifecycle.run import supervisor_told
from trainckpt.lifecycle.run.living import lives
from trainckpt.lifecycle.run.told import folder_of_launch

if TYPE_CHECKING:
    from pathlib import Path

FILE, RESTORING = "restored.json", "restoring.pid"
MAX_BYTES = 4096
ALL_RUN_WITHIN_S, LOOK_EVERY_S = 60.0, 0.005


class AttemptNumber:
    """Asked anew each time; without a supervisor it is what was claimed. Any thread."""

    def __init__(self, claimed: int) -> None:
        self._claimed = claimed
        folder = folder_of_launch()
        self._file = folder / FILE if folder else None

    @property
    def value(self) -> int:
        """The number now."""
        found = read(self._file) if self._file is not None and self._file.exists() else None
        return self._claimed if found is None else max(found, self._claimed)


@dataclass(frozen=True)
class OtherJob:
    """The job in which restored processes go on.

    Attributes:
        attempt: As which they do.
        started_s: When it began, on the monotonic clock.
        ends: As `SLURM_JOB_END_TIME` says, or "".
    """

    attempt: int
    started_s: float
    ends: str


def other_job() -> OtherJob | None:
    """The job that this process was restored in; None: it is still in its own."""
    folder = folder_of_launch()
    found = _read(folder / FILE) if folder else None
    if found is None or not isinstance(found.get("started"), (int, float)):
        return None
    return OtherJob(found["attempt"], float(found["started"]), str(found.get("job_ends") or ""))


def read(path: Path) -> int | None:
    """The number in the file; None if there is none."""
    found = _read(path)
    return None if found is None else found["attempt"]


def _read(path: Path) -> dict[str, Any] | None:
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
        with path.open("rb") as file:
            found: dict[str, Any] = json.loads(file.read(MAX_BYTES))
        if type(found["attempt"]) is int and 0 < found["attempt"] < 10**9:
            return found
    return None


def spell(attempt: int, started_s: float, job_ends: str | None) -> dict[str, str]:
    """The files that say as which attempt the processes go on, under whom, and that not all do yet.

    Names and texts, in the order in which they are written.
    """
    told = {"attempt": attempt, "started": started_s, "job_ends": job_ends}
    return {RESTORING: str(os.getpid()), FILE: json.dumps(told), **supervisor_told.spell()}


def all_run(folder: Path) -> None:
    """Say that whoever restored the processes has let go of all of them."""
    with contextlib.suppress(OSError):
        (folder / RESTORING).unlink()


def await_all(folder: Path) -> None:
    """Wait for that, as long as the supervisor lives, and not for ever."""
    until = time.monotonic() + ALL_RUN_WITHIN_S
    with contextlib.suppress(OSError, ValueError):
        while time.monotonic() < until:
            if not lives(int((folder / RESTORING).read_text(encoding="ascii"))):
                return
            time.sleep(LOOK_EVERY_S)

"""Wall time as a notice: the known end of the job's time.

The end is computed once, at the start, and from then on only a duration is measured: setting the
clock while the job runs moves nothing.

Threads: the watcher's only.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from trainckpt.format.duration import MOST_S
from trainckpt.notice import Notice, PolledSource

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

REASON = "wall time"
SLURM_VARIABLE = "SLURM_JOB_END_TIME"
STARTED_VARIABLE = "TRAINCKPT_STARTED"  # on the monotonic clock, common to a host


class WallTime(PolledSource):
    """Report once that the time is nearly up."""

    def __init__(
        self,
        ends_at_monotonic_s: float,
        lead_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        anew: Callable[[], tuple[float, float] | None] = lambda: None,
    ) -> None:
        """Store the arguments.

        Args:
            ends_at_monotonic_s: The job's end, on `clock`.
            lead_s: Seconds before the end at which to report: the time of a stop and its save, with
                room.
            anew: Called at each poll: end and lead of another job that the process is in by now, or
                None.
        """
        self._ends_at_s = ends_at_monotonic_s
        self._lead_s = lead_s
        self._clock, self._anew = clock, anew
        self._reported = False

    def poll(self) -> list[Notice]:
        """Return one notice, once no more than the lead is left."""
        anew = self._anew()
        if anew not in (None, (self._ends_at_s, self._lead_s)):
            (self._ends_at_s, self._lead_s), self._reported = anew, False
        left_s = self._ends_at_s - self._clock()
        if self._reported or left_s > self._lead_s:
            return []
        self._reported = True
        return [Notice(reason=REASON, seconds_left=max(0.0, left_s))]


def wall_time_end(
    option_s: float | None,
    environment: Mapping[str, str],
    now_wall: float,
    now_mono: float,
    process_start: float,
) -> float | None:
    """Return the job's end on the monotonic clock: the earliest one known, or None.

    Args:
        option_s: The option, a duration from the process's start; None: not set.
        environment: May hold Slurm's end of the job, in seconds since the epoch. One in the past is
            not this job's (its limit was raised, or the variable inherited).
        now_wall: Seconds since the epoch.
        now_mono: The same moment on the monotonic clock.
        process_start: The process's start, on the monotonic clock.
    """
    ends = [] if option_s is None else [process_start + option_s]
    try:
        left_s = float(environment.get(SLURM_VARIABLE, "")) - now_wall
    except ValueError:
        left_s = 0.0
    if 0 < left_s <= MOST_S:
        ends.append(now_mono + left_s)
    return min(ends, default=None)


def process_start_s() -> float:
    """Return the start of this process's job, on the monotonic clock; now if unknown.

    A supervisor states its own start: the ranks it restarts are part of the same job.
    """
    with contextlib.suppress(ValueError):
        if 0 <= (told_s := float(os.environ.get(STARTED_VARIABLE, ""))) <= time.monotonic():
            return told_s
    return own_start_s()


def own_start_s() -> float:
    """Return the start of this process alone, on the monotonic clock; now if unknown."""
    now_s = time.monotonic()
    try:
        stat = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace")
        fields = stat.rpartition(")")[2].split()  # behind a name that may be cut inside a character
        up_s = float(Path("/proc/uptime").read_text(encoding="utf-8").split()[0])
        age_s = up_s - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return now_s
    return now_s - max(0.0, age_s)

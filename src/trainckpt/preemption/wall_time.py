"""Wall time as a notice: the job's time will be up, and everybody knows when.

The end is computed once, at the start, and from then on only a duration is measured: a clock that
is set while the job runs moves nothing.

Threads: the watcher's only. Floor 1. Uses: preemption.notice. Used by: lifecycle.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from trainckpt.format.duration import MOST_S
from trainckpt.preemption.notice import Notice

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

REASON = "wall time"
SLURM_VARIABLE = "SLURM_JOB_END_TIME"
STARTED_VARIABLE = "TRAINCKPT_STARTED"  # on the monotonic clock, which one host has in common


class WallTime:
    """Reports once that the time is nearly up; a `NoticeSource` without descriptor."""

    def __init__(
        self,
        ends_at_monotonic_s: float,
        lead_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        anew: Callable[[], tuple[float, float] | None] = lambda: None,
    ) -> None:
        """Nothing to set up.

        Args:
            ends_at_monotonic_s: When the job ends, on `clock`.
            lead_s: How long before that to say so: what a stop and its save take, with room.
            clock: Seconds that only go forward.
            anew: Asked at each look: end and lead of another job that the process is in by now.
        """
        self._ends_at_s = ends_at_monotonic_s
        self._lead_s = lead_s
        self._clock, self._anew = clock, anew
        self._reported = False

    def start(self) -> None:
        """Nothing to set up."""

    def fileno(self) -> int | None:
        """None: the clock is looked at once a second."""
        return None

    def poll(self) -> list[Notice]:
        """One notice, once no more than the lead is left."""
        anew = self._anew()
        if anew not in (None, (self._ends_at_s, self._lead_s)):
            (self._ends_at_s, self._lead_s), self._reported = anew, False
        left_s = self._ends_at_s - self._clock()
        if self._reported or left_s > self._lead_s:
            return []
        self._reported = True
        return [Notice(reason=REASON, seconds_left=max(0.0, left_s))]

    def stop(self) -> None:
        """Nothing to put back."""


def wall_time_end(
    option_s: float | None,
    environment: Mapping[str, str],
    now_wall: float,
    now_mono: float,
    process_start: float,
) -> float | None:
    """When the job ends on the monotonic clock: the earliest that is known, or None.

    Args:
        option_s: The option, a duration from the process's start; None: not set.
        environment: May hold Slurm's end of the job, in seconds since the epoch. One that lies in
            the past is not this job's (its limit was raised, or the variable inherited).
        now_wall: Seconds since the epoch.
        now_mono: The same moment on the monotonic clock.
        process_start: When the process started, on the monotonic clock.
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
    """When this process's job started, on the monotonic clock; where that is not known, now.

    A supervisor says when it started: the ranks it starts again are part of the same job.
    """
    now_s = time.monotonic()
    with contextlib.suppress(ValueError):
        if 0 <= (told_s := float(os.environ.get(STARTED_VARIABLE, ""))) <= now_s:
            return told_s
    try:
        stat = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace")
        fields = stat.rpartition(")")[2].split()  # behind a name that may be cut inside a letter
        up_s = float(Path("/proc/uptime").read_text(encoding="utf-8").split()[0])
        age_s = up_s - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return now_s
    return now_s - max(0.0, age_s)

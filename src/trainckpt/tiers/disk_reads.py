"""Whether anybody reads from the disk that is written to, and would wait for what is written.

A disk serves what lies in its queue before the next read. With pieces of 8 MiB in place of 2
whoever writes needs about 0.7 times as much of a core, and a reader waits three times as long; so
they are for disks from which nobody reads. Linux counts what a disk has served
(Documentation/block/stat.rst); of file systems that name no disk nothing is known.

Floor 0. Uses: nothing. Used by: tiers.new_file.
"""

from __future__ import annotations

import math
import os
import time
from pathlib import Path

FEW, BURST = 5.0, 16.0  # reads a second, and at once, that nobody waits for: of a file's place, say
QUIET_S = 1.0  # so long without more, and nobody reads
LOOK_S = 0.05  # between two looks
_DISKS = Path("/sys/dev/block")
_DEPTH = 8  # volumes on volumes


class Quiet:
    """Pure: told how many reads there were so far, it says whether somebody is reading."""

    def __init__(self) -> None:
        self._before: tuple[int, float] | None = None
        self._left = BURST  # reads that would still be by the way
        self._read_s = -math.inf  # when that was seen last, or could not be

    def looked(self, num_reads: int | None, now_s: float) -> bool:
        """So many reads by now; True if nobody is known to read, since a while.

        Args:
            num_reads: That the disk has served in all. None: it does not say.
            now_s: Of a clock that only goes on.
        """
        before, self._before = self._before, None
        if num_reads is not None:
            self._before = num_reads, now_s
        if before is None or num_reads is None:
            self._read_s = now_s
        else:
            left = self._left + FEW * (now_s - before[1]) - (num_reads - before[0])
            if left < 0:
                self._read_s = now_s
            self._left = min(max(left, 0.0), BURST)
        return now_s - self._read_s >= QUIET_S


class DiskReads:
    """Of the disks under one file system at a time. Used by one thread at a time."""

    def __init__(self, disks: Path = _DISKS) -> None:
        self._disks = disks
        self._device: int | None = None
        self._counts: list[Path] = []
        self._quiet, self._looked_s, self._are_few = Quiet(), -math.inf, False

    def are_few(self, device: int) -> bool:
        """Whether nobody is known to read there.

        Args:
            device: That the file system lies on, as `os.stat` gives it.
        """
        if device != self._device:
            self._device, self._quiet, self._looked_s = device, Quiet(), -math.inf
            self._counts = [disk / "stat" for disk in under(device, self._disks)]
        now_s = time.monotonic()
        if now_s - self._looked_s >= LOOK_S:
            self._looked_s, self._are_few = now_s, self._quiet.looked(self.num_reads(), now_s)
        return self._are_few

    def num_reads(self) -> int | None:
        """That the disks of the last look have served so far; None: nobody says."""
        try:
            counts = [int(path.read_text().split(maxsplit=1)[0]) for path in self._counts]
        except (OSError, ValueError, IndexError):
            return None
        return sum(counts) if counts else None


def under(device: int, disks: Path = _DISKS) -> list[Path]:
    """Folders of the whole disks on which a device lies; none if the system does not say."""
    try:
        found = (disks / f"{os.major(device)}:{os.minor(device)}").resolve(strict=True)
        return sorted(set(_whole(found, _DEPTH)))
    except (OSError, AttributeError):
        return []


def _whole(found: Path, depth: int) -> list[Path]:
    if (found / "partition").exists():
        found = found.parent
    parts = list((found / "slaves").iterdir()) if (found / "slaves").is_dir() and depth else []
    return [disk for part in parts for disk in _whole(part.resolve(), depth - 1)] or [found]

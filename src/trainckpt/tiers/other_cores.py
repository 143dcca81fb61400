"""Keeps this process off the core on which another one trains.

Whoever writes a file is woken some hundred times a second, digests it meanwhile, and takes half a
core. Where no core is idle the system wakes it on any, so also on the one that trains, although the
other would do. So while the main thread of the other process computes, its core is not used; while
it waits, as for a last save or for a GPU, all are. Where there is no other core nothing changes.

Linux alone says on which core a thread is (proc(5): `stat`, `schedstat`). The threads that are
there are moved; new ones begin where those are that start them.

Floor 0. Uses: nothing. Used by: snapshot.write_process.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

LOOK_S = 0.02
BUSY_PART = 0.5  # of the time between two looks; an instant says little of a thread
_CORE = 36  # field 39 of `stat`, counted from the one behind the name
_TASKS = Path("/proc/self/task")


@dataclass(frozen=True)
class Seen:
    """A thread, as it was at some time.

    Attributes:
        core: Where it ran last.
        ran_s: For how long it has had a core so far.
        at_s: When that was (`time.monotonic`).
    """

    core: int
    ran_s: float
    at_s: float


class OtherCores:
    """Of the main thread of one process. Used by one thread at a time."""

    def __init__(self, process: int) -> None:
        self._process = process
        self._before = look(process)

    @contextlib.contextmanager
    def kept_off(self) -> Iterator[None]:
        """While the context lasts."""
        allowed, end = _allowed(self._process), threading.Event()
        thread = threading.Thread(
            target=self._keep_off, args=(allowed, end), name="trainckpt-cores", daemon=True
        )
        begun = self._before is not None and len(allowed) > 1 and _began(thread)
        try:
            yield
        finally:
            end.set()
            if begun:
                thread.join()

    def _keep_off(self, allowed: frozenset[int], end: threading.Event) -> None:
        used = allowed
        while not end.wait(LOOK_S):  # first: of no time at all no part can be told
            now = look(self._process)
            cores = to_use(allowed, self._before, now)
            if cores != used:
                _use(cores)
                used = cores
            self._before = now or self._before
        if used != allowed:
            _use(allowed)


def to_use(allowed: frozenset[int], before: Seen | None, now: Seen | None) -> frozenset[int]:
    """Of the cores that may be used, all but the one that computes for somebody else. Pure."""
    if before is None or now is None:
        return allowed
    is_busy = now.ran_s - before.ran_s >= BUSY_PART * (now.at_s - before.at_s)
    return (allowed - {now.core} if is_busy else allowed) or allowed


def look(process: int) -> Seen | None:
    """The main thread of a process; None where the system does not say, or it is gone."""
    folder = Path(f"/proc/{process}/task/{process}")
    try:
        stat = (folder / "stat").read_bytes().rpartition(b")")[2].split()
        ran_ns = int((folder / "schedstat").read_bytes().split()[0])
        return Seen(int(stat[_CORE]), ran_ns / 1e9, time.monotonic())
    except (OSError, IndexError, ValueError):
        return None


def _allowed(process: int) -> frozenset[int]:
    """Where this process may run. Once moved it does not follow when it may use more; the other,
    which nobody of us moves, does.
    """
    if not hasattr(os, "sched_getaffinity"):
        return frozenset()
    found = frozenset(os.sched_getaffinity(0))
    with contextlib.suppress(OSError):
        found |= os.sched_getaffinity(process)
    return found


def _began(thread: threading.Thread) -> bool:
    """Whether the system gave us one more."""
    try:
        thread.start()
    except RuntimeError:
        return False
    return True


def _use(cores: Collection[int]) -> None:
    """Move every thread of this process there; one that ends meanwhile need not be."""
    with contextlib.suppress(OSError):
        for task in _TASKS.iterdir():
            with contextlib.suppress(OSError):
                os.sched_setaffinity(int(task.name), cores)

"""Capture the positions of experiment trackers: which run of the tracker, and how far it is.

`attempt.tracked_runs` has the trackers, and what a resume does with a position.

A tracker may have to write rows out first, to a server or a disk that has died. All trackers of a
rank together hold up a save for `WAIT_S` at most, and for a tenth of the time left before a stop's
deadline. A tracker that was late is not waited for again until it has caught up.
"""

from __future__ import annotations

import threading
import time
import warnings
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainckpt.state.captured import Captured, Saved

PART = "tracked runs"  # no keyword can be spelled so
WAIT_S = 1.0
_SHARE = 0.1  # of the time left before a deadline


class TrackedRun(Protocol):
    """One tracker's run, as the script logs to it.

    Attributes:
        run: The script's writer or run.
        place: URL of the run directory; a copy of it has another one.
    """

    run: Any
    place: str

    @property
    def id(self) -> str:
        """Return the tracker's own name for the run."""

    def position(self, limit_s: float, /) -> Any:
        """Return what was logged by now, in plain values. At a boundary, training thread.

        Args:
            limit_s: For rows to be written out, in seconds.
        """


class Flush:
    """Write out a tracker's rows, on a daemon thread: a disk that hangs holds up no save."""

    def __init__(self, flush: Callable[[], object]) -> None:
        self._flush = flush
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def wait(self, limit_s: float) -> None:
        """Flush, and return when all is written.

        Raises:
            TimeoutError: Not within the limit; at once while an earlier flush has not ended.
            Exception: The flush's own.
        """
        if self._thread is None or not self._thread.is_alive():
            self._error = None
            self._thread = threading.Thread(target=self._run, name="flush", daemon=True)
            self._thread.start()
            self._thread.join(limit_s)
        if self._thread.is_alive():
            raise TimeoutError("its rows cannot be written out: does the disk hang?")
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._flush()
        except Exception as error:  # noqa: BLE001 - `wait` raises it
            self._error = error


def position_of(run: TrackedRun, limit_s: float = WAIT_S) -> dict[str, Any]:
    """Return the id of a run, the position in it, and the run directory."""
    return {"id": run.id, "position": run.position(limit_s), "place": run.place}


def capture(out: Captured, runs: dict[str, TrackedRun], left_s: float | None = None) -> None:
    """Add the position of every tracked run. A tracker's own trouble fails no save.

    Args:
        out: Gets the positions.
        runs: By name.
        left_s: Seconds before a stop's deadline; None: there is none.
    """
    found = {}
    limit_s = WAIT_S if left_s is None else min(WAIT_S, max(_SHARE * left_s, 0.0))
    ends_s = time.monotonic() + limit_s
    for name, run in runs.items():
        try:
            found[name] = position_of(run, max(ends_s - time.monotonic(), 0.0))
        except Exception as error:  # noqa: BLE001 - each tracker has errors of its own
            warnings.warn(f"a resume may repeat steps in {name}: {error!r}", stacklevel=2)
    if found:
        out.values[PART] = out.encode(found, PART)


def positions(saved: Saved) -> dict[str, dict[str, Any]]:
    """Return name -> `position_of`, for all runs in the snapshot."""
    tree = saved.values.get(PART)
    return dict(saved.decode(tree)) if tree is not None else {}

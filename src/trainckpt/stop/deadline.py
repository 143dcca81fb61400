"""Keep a stop's deadline inside the process, so that no hang passes it.

The watcher calls `tighten` after a stop is agreed, with the time left then. If the process still
exists a margin before the deadline, a separate thread calls `on_missed`, which must end the
process. (A main thread that holds the interpreter's lock stops these threads too; the supervisor
therefore keeps the time from outside.)
"""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING

from trainckpt.attempt.status_files import SUPERVISOR_VARIABLE
from trainckpt.format.duration import MOST_S
from trainckpt.preemption import kubernetes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

TORCHRUN_S = 30.0  # its default --shutdown-timeout
MARGIN_SHARE, LEAST_MARGIN_S, MOST_MARGIN_S = 0.1, 0.25, 2.0


def granted_s(environment: Mapping[str, str] | None = None) -> float | None:
    """Return the launcher's grace period after a signal, in seconds; None if it states none.

    torchrun kills its ranks that long after passing a signal on; our supervisor never does. A pod
    has its Kubernetes grace period.
    """
    environment = os.environ if environment is None else environment
    pod_s = kubernetes.granted_s(environment)
    if "TORCHELASTIC_RUN_ID" not in environment or SUPERVISOR_VARIABLE in environment:
        return pod_s
    text = environment.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "")
    granted = float(text) if text.isdecimal() else 0.0
    granted = granted if 0 < granted <= MOST_S else TORCHRUN_S
    return granted if pod_s is None else min(granted, pod_s)


def margin_s(seconds_left: float) -> float:
    """Return how long before the deadline the process has to be gone, in seconds."""
    return min(max(MARGIN_SHARE * seconds_left, LEAST_MARGIN_S), MOST_MARGIN_S)


class Deadline:
    """The earliest deadline of the stops agreed so far. Any thread."""

    def __init__(self, on_missed: Callable[[], object]) -> None:
        self._on_missed = on_missed
        self._lock = threading.Lock()
        self._ends_s: float | None = None
        self._timer: threading.Timer | None = None
        self._is_over = self._is_held = False

    def tighten(self, seconds_left: float | None) -> None:
        """Set the time left; an earlier deadline stands."""
        if seconds_left is None:
            return
        within_s = max(0.0, seconds_left - margin_s(seconds_left))
        ends_s = time.monotonic() + within_s
        with self._lock:
            if self._is_over or (self._ends_s is not None and self._ends_s <= ends_s):
                return
            self._ends_s = ends_s
            self._cancel()
            if not self._is_held:
                self._begin(within_s)

    def hold(self) -> None:
        """Suspend the deadline after the save is committed, until `go_on`."""
        with self._lock:
            self._is_held = True
            self._cancel()

    def go_on(self) -> None:
        """Resume the deadline; one that has passed is extended by a moment."""
        with self._lock:
            if self._is_held and self._ends_s is not None and not self._is_over:
                self._begin(max(self._ends_s - time.monotonic(), MOST_MARGIN_S))
            self._is_held = False

    def forget(self) -> None:
        """Remove the deadline after a stop is undone, until the next stop."""
        with self._lock:
            self._ends_s = None
            self._cancel()

    def left_s(self) -> float | None:
        """Return the seconds left; negative after the deadline; None without one."""
        ends_s = self._ends_s
        return None if ends_s is None else ends_s - time.monotonic()

    def end(self) -> None:
        """Remove the deadline for good: the process leaves in time, or the attempt is over."""
        with self._lock:
            self._is_over = True
            self._cancel()

    def _begin(self, within_s: float) -> None:
        self._timer = threading.Timer(within_s, self._on_missed)
        self._timer.daemon = True
        self._timer.start()

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

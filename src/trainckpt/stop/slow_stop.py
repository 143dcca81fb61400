"""Warn if a boundary does not follow an agreed stop, because the training thread waits for a pool.

A SIGTERM to the whole process group ends the pool's workers too, and their results never come.
"""

from __future__ import annotations

import sys
import threading

from trainckpt.attempt.log import logger

WAITS_S = 5.0  # from an agreed stop to the warning


class SlowStopWarning:
    """Log, a while after an agreed stop, a main thread that waits for processes which the signal
    may have ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._over = False

    def begin(self) -> None:
        """Start the timer; only the first call counts."""
        with self._lock:
            if self._timer is None and not self._over:
                timer = threading.Timer(WAITS_S, _warn_of_pool)
                timer.daemon = True
                timer.start()
                self._timer = timer  # once it has started: `end` joins it

    def end(self) -> None:
        """Cancel the timer and join its thread. May be repeated."""
        with self._lock:
            self._over, timer = True, self._timer
        if timer is not None:
            timer.cancel()
            timer.join()


def _warn_of_pool() -> None:
    """Log a pool that the training thread waits for: a task whose worker died never returns.

    Plain Python would have died of the signal too.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module.startswith(("multiprocessing.", "concurrent.futures")):
            logger.warning(
                "boundary not reached yet: the training thread waits in %s. A SIGTERM to the whole "
                "process group also ends pool workers, and their results never come",
                module,
            )
            return
        frame = frame.f_back

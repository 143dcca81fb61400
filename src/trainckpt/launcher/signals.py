"""Queue the signals received while supervising, for the main thread.

Main thread only, as Python wants it; `put` may be called by any thread.

The command listens before it imports the verb that was asked for, which takes a second: whoever
stops a job may do so at once. The verb takes over what came (`heard`).
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

HEARD = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGQUIT", "SIGXCPU")
MAY_BE_IGNORED = ("SIGINT", "SIGHUP")  # by a shell's background job, by nohup: then they stay so
ENDED = 0  # no signal has this number: the launched process has ended
INTERRUPTED = 130  # as shells say SIGINT


class Inbox:
    """While it is entered, signals come here instead of ending this process.

    Attributes:
        first: Name of the first that came; "" before.
        interrupts: How many were SIGINT.
        signalled: Whether any has come.
        count: How many have.
        stop_s: When the one came that the present stop is about, by `time.monotonic`; whoever acts
            on it says so. None: no signal's.
        came_s: When the one came that `next` has returned last; None: that was none.
        is_attended: Somebody will look; else a second SIGINT ends this process at once.
    """

    def __init__(self) -> None:
        self.first = ""
        self.interrupts = self.count = 0
        self.stop_s: float | None = None
        self.came_s: float | None = None
        self.signalled = False
        self._queue: queue.SimpleQueue[tuple[int, float]] = queue.SimpleQueue()
        self._before: dict[int, Any] = {}
        self.is_attended = True

    def __enter__(self) -> Inbox:
        for name in HEARD:
            number = getattr(signal, name, None)
            ignored = number is not None and signal.getsignal(number) is signal.SIG_IGN
            if number is not None and not (ignored and name in MAY_BE_IGNORED):
                self._before[number] = signal.signal(number, self._hear)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def put(self, number: int) -> None:
        """Let `next` return this number."""
        self._queue.put((number, time.monotonic()))

    def next(self, timeout_s: float) -> int | None:
        """The next number, or None if none comes in time."""
        self.came_s = None
        with contextlib.suppress(queue.Empty):
            number, came_s = self._queue.get(timeout=max(timeout_s, 0.0))
            self.came_s = came_s
            return number
        return None

    def _hear(self, number: int, _: Any) -> None:
        self.signalled = True
        self.count += 1
        self.first = self.first or signal.Signals(number).name
        self.interrupts += number == signal.SIGINT
        self._queue.put((number, time.monotonic()))  # safe in a handler: SimpleQueue is re-entrant
        if self.interrupts > 1 and not self.is_attended:
            os._exit(INTERRUPTED)


_early: list[Inbox] = []  # at most one


def listen() -> None:
    """From now on signals wait for whoever enters `heard`."""
    inbox = Inbox()
    inbox.is_attended = False
    _early[:] = [inbox.__enter__()]


@contextlib.contextmanager
def heard() -> Iterator[Inbox]:
    """An entered inbox, with what has come since `listen`, if that was called."""
    inbox = _early.pop() if _early else Inbox().__enter__()
    inbox.is_attended = True
    try:
        yield inbox
    finally:
        inbox.__exit__()

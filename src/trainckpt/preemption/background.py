"""A source whose question takes time: asked again and again in a thread of its own.

    start   main thread   starts the thread
    ask     the thread    one question; notices, an error, or nothing; then a pause
    poll    watcher       takes what has come, without waiting
    suspend main thread   before a process dump: waits for the question under way, then closes
                          what questions keep open; none is asked until `resume`
    stop    main thread   no more questions; one that is being asked is not waited for

An error, whatever it is, is said once, and the same question is asked again after a longer and
longer pause: what cannot be asked stops nothing, and no thread ends before its notice has come.

Floor 1. Uses: preemption.notice. Used by: lifecycle.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trainckpt.preemption.notice import Notice

LONGEST_PAUSE_S = 60.0
SUSPEND_WITHIN_S = 30.0


class Unanswered(Exception):
    """A question that was refused or answered with something else; the message says by whom."""


class Background:
    """Asks until there is a notice; a `NoticeSource` without descriptor."""

    def __init__(
        self,
        ask: Callable[[], Sequence[Notice]],
        pause_s: float,
        say: Callable[[str], object] = lambda _: None,
        name: str = "trainckpt-ask",
        close: Callable[[], object] = lambda: None,
    ) -> None:
        """Nothing is asked yet.

        Args:
            ask: One question; raises where there is no answer: `OSError` or `Unanswered`.
            pause_s: Between two questions.
            say: Told of each new error, in the thread.
            name: Of the thread.
            close: Closes what `ask` keeps open; the next `ask` opens it again.
        """
        self._ask, self._pause_s, self._say, self._close = ask, pause_s, say, close
        self._found: list[Notice] = []
        self._lock = threading.Lock()
        self._asking = threading.Lock()
        self._may_ask = threading.Event()
        self._stopping = threading.Event()
        self._name = name

    def start(self) -> None:
        """Begin to ask."""
        self._may_ask.set()
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()

    def suspend(self) -> None:
        """Close what is open, and ask nothing until `resume`.

        Raises:
            TimeoutError: a question was not answered for `SUSPEND_WITHIN_S`.
        """
        self._may_ask.clear()
        if not self._asking.acquire(timeout=SUSPEND_WITHIN_S):
            raise TimeoutError(f"{self._name} waits for an answer and cannot be suspended")
        try:
            self._close()
        finally:
            self._asking.release()

    def resume(self) -> None:
        """Ask again, also if a notice had ended the questions."""
        self._may_ask.set()
        if not self._thread.is_alive():
            self.start()

    def fileno(self) -> int | None:
        """None: what has come is looked at once a second."""
        return None

    def poll(self) -> list[Notice]:
        """What has come since the last call."""
        with self._lock:
            found, self._found = self._found, []
        return found

    def stop(self) -> None:
        """Ask no more."""
        self._stopping.set()
        self._may_ask.set()

    def _run(self) -> None:
        pause_s, said = self._pause_s, ""
        while not self._stopping.wait(pause_s if said else 0.0):
            self._may_ask.wait()
            try:
                with self._asking:
                    if self._stopping.is_set() or not self._may_ask.is_set():
                        continue
                    notices = self._ask()
            except Exception as error:  # noqa: BLE001 - a driver's or a server's surprise
                expected = isinstance(error, (OSError, Unanswered))
                told = str(error) if expected else f"{type(error).__name__}: {error}"
                if said != told:
                    self._say(told)
                said = told or "no answer"
                pause_s = min(2 * pause_s, max(LONGEST_PAUSE_S, self._pause_s))
                continue
            pause_s, said = self._pause_s, ""
            with self._lock:
                self._found += notices
            if notices or self._stopping.wait(self._pause_s):
                return

"""A source with slow queries: a thread of its own repeats them.

    start   main thread   starts the thread
    ask     the thread    one query; notices, an error, or nothing; then a pause
    poll    watcher       takes the notices received, without waiting
    suspend main thread   before a process dump: waits for the query under way, then closes
                          the connections; no query follows until `restart`
    stop    main thread   no more queries; one under way is not awaited

Every error is logged once, and the same query is repeated after a longer and longer pause: a
failing source stops nothing, and no thread ends before its notice has come.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from trainckpt.notice import PolledSource

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trainckpt.notice import Notice

LONGEST_PAUSE_S = 60.0
SUSPEND_WITHIN_S = 30.0


class PollFailed(Exception):
    """A query was refused or answered with something else; the message names the server."""


class PollingSource(PolledSource):
    """Poll until there is a notice."""

    def __init__(
        self,
        ask: Callable[[], Sequence[Notice]],
        pause_s: float,
        say: Callable[[str], object] = lambda _: None,
        name: str = "trainckpt-ask",
        close: Callable[[], object] = lambda: None,
    ) -> None:
        """Store the arguments; no query yet.

        Args:
            ask: Makes one query; raises `OSError` or `PollFailed` if there is no answer.
            pause_s: Seconds between two queries.
            say: Called with each new error, in the thread.
            name: Name of the thread.
            close: Closes the connections of `ask`; the next `ask` opens them again.
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
        """Close the connections, and make no query until `restart`.

        Raises:
            TimeoutError: a query was not answered for `SUSPEND_WITHIN_S`.
        """
        self._may_ask.clear()
        if not self._asking.acquire(timeout=SUSPEND_WITHIN_S):
            raise TimeoutError(f"{self._name} waits for an answer and cannot be suspended")
        try:
            self._close()
        finally:
            self._asking.release()

    def restart(self) -> None:
        """Ask again, also if a notice had ended the questions."""
        self._may_ask.set()
        if not self._thread.is_alive():
            self.start()

    def poll(self) -> list[Notice]:
        """Return the notices since the last call."""
        with self._lock:
            found, self._found = self._found, []
        return found

    def stop(self) -> None:
        """Ask no more."""
        self._stopping.set()
        self._may_ask.set()

    def _run(self) -> None:
        pause_s, logged = self._pause_s, ""
        while not self._stopping.wait(pause_s if logged else 0.0):
            self._may_ask.wait()
            try:
                with self._asking:
                    if self._stopping.is_set() or not self._may_ask.is_set():
                        continue
                    notices = self._ask()
            except Exception as error:  # noqa: BLE001 - a driver's or a server's surprise
                expected = isinstance(error, (OSError, PollFailed))
                problem = str(error) if expected else f"{type(error).__name__}: {error}"
                if logged != problem:
                    self._say(problem)
                logged = problem or "no answer"
                pause_s = min(2 * pause_s, max(LONGEST_PAUSE_S, self._pause_s))
                continue
            pause_s, logged = self._pause_s, ""
            with self._lock:
                self._found += notices
            if notices or self._stopping.wait(self._pause_s):
                return

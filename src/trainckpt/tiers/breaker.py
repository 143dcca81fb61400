"""The circuit breaker: a store that does not answer is left alone for a while.

    closed      every call goes through
    open        calls fail at once, until the pause is over
    half-open   one call goes through: its answer closes the breaker, its failure opens it again,
                for twice as long

What counts as a failure is a call that was given up, after all its tries. The pauses are short: a
last save before a stop must find a store that has come back.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

CLOSED, OPEN, HALF_OPEN = "closed", "open", "half-open"
OPEN_AFTER = 2
PAUSE_S, LONGEST_PAUSE_S = 5.0, 15.0


@dataclass(frozen=True)
class Health:
    """How it stands with a store, as far as this process knows.

    Attributes:
        state: `CLOSED`, `OPEN` or `HALF_OPEN`.
        for_s: Since when, in seconds.
        num_given_up: Calls in a row that were given up.
        last_error: What the last failed try met, "" if none has failed; without secrets.
    """

    state: str
    for_s: float
    num_given_up: int
    last_error: str


class Breaker:
    """Of one store; used by any threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._state, self._since_s = CLOSED, clock()
        self._given_up, self._pause_s = 0, PAUSE_S
        self._last_error = ""

    def enter(self) -> str:
        """The state in which a call may go on: `CLOSED`, or `HALF_OPEN` for a trial.

        `OPEN` means that it must not.
        """
        with self._lock:
            over = self._clock() - self._since_s >= self._pause_s
            if self._state == OPEN and over:
                self._become(HALF_OPEN)
                return HALF_OPEN
            return CLOSED if self._state == CLOSED else OPEN

    def answered(self) -> None:
        """The store has answered, whatever it said."""
        with self._lock:
            self._given_up, self._pause_s = 0, PAUSE_S
            if self._state != CLOSED:
                self._become(CLOSED)

    def failed(self, why: str) -> None:
        """One try failed; there may be more."""
        with self._lock:
            self._last_error = why

    def gave_up(self) -> None:
        """A call was given up."""
        with self._lock:
            self._given_up += 1
            if self._state == HALF_OPEN:
                self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
                self._become(OPEN)
            elif self._state == CLOSED and self._given_up >= OPEN_AFTER:
                self._become(OPEN)

    def health(self) -> Health:
        """A picture of this moment."""
        with self._lock:
            for_s = self._clock() - self._since_s
            return Health(self._state, for_s, self._given_up, self._last_error)

    def _become(self, state: str) -> None:
        self._state, self._since_s = state, self._clock()

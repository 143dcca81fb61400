"""Calls to a store: limited concurrency, retries with a deadline, and a circuit breaker.

A pause before a retry is random between 0 and a doubling bound ("full jitter"), so ranks failing
together do not retry together. No retry begins after the call's deadline. The deadline is short
until the store has answered once, for the user may be waiting at a keyboard. Later it is longer: a
save in the background can outlast a restart of the server.

The circuit breaker pauses calls to a store without answers.

    closed      every call goes through
    open        calls fail at once, until the pause is over
    half-open   one call goes through: its answer closes the breaker, its failure opens it again,
                for twice as long

A failure is one abandoned call, after all its tries. The pauses are short: a last save before a
stop must find a recovered store.
"""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from trainckpt.errors import TierUnavailable, TrainckptError, UnusableSnapshot
from trainckpt.storage import connections
from trainckpt.storage.store_errors import (
    ABSENT,
    DENIED,
    FULL,
    TRANSIENT,
    in_words,
    is_missing_bucket,
    meaning,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    Result = TypeVar("Result")

_HINTS = {
    DENIED: "check the credentials in the environment, and that they may read, write, list and "
    "delete there",
    FULL: "free space in the store, or raise its quota",
}


# Never the global generator: its state belongs to the training script.
draw_own = random.SystemRandom().random


@dataclass(frozen=True)
class Limits:
    """Limits of the requests to one store.

    Attributes:
        at_once: Calls in flight at the same time.
        first_pause_s, longest_pause_s: Bounds of the pause before the first retry, and before any.
        give_up_s: After this time no further try of a call begins.
        give_up_first_s: The same, while the store has never answered.
        part_bytes: Larger objects are sent in parts of at least this size.
    """

    at_once: int = 8
    first_pause_s: float = 0.2
    longest_pause_s: float = 10.0
    give_up_s: float = 120.0
    give_up_first_s: float = 20.0
    part_bytes: int = 16 << 20


class RetryPolicy:
    """Make calls to one store, from any thread.

    Attributes:
        breaker: Circuit breaker of the store.
    """

    def __init__(
        self,
        url: str,
        limits: Limits | None = None,
        *,
        login: str = "",
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
        draw: Callable[[], float] = draw_own,
    ) -> None:
        """`login`: hint for an error about credentials; "": the general hint."""
        self.breaker = CircuitBreaker(clock)
        self.limits = limits or Limits()
        self._login = login
        self._url, self._clock, self._sleep, self._draw = url, clock, sleep, draw
        self._slots = threading.BoundedSemaphore(self.limits.at_once)
        self._answered = False

    def make(self, what: str, call: Callable[[int], Result]) -> Result:
        """Return the result of `call`, called with the number of earlier tries.

        Args:
            what: The call in words, for errors: "write snapshots/s1~1.1/manifest.json".

        Raises:
            TierUnavailable: the store refused, did not answer in time, or the breaker is open.
            UnusableSnapshot: the object is missing.
        """
        begun_s, tried, state = self._clock(), 0, self._enter(what)
        while True:
            try:
                with self._slots, connections.request():
                    result = call(tried)
            except Exception as error:
                if connections.are_held():  # cut off for a process dump, not by the store
                    begun_s, tried = self._clock(), tried + 1
                    continue
                if meaning(error) != TRANSIENT:
                    self._has_answered()
                    raise self.translated(what, error) from error
                pause_s = self._pause_s(tried)
                self.breaker.failed(in_words(error))
                limits = self.limits
                limit_s = limits.give_up_s if self._answered else limits.give_up_first_s
                if state == HALF_OPEN or self._clock() + pause_s - begun_s > limit_s:
                    self.breaker.gave_up()
                    raise TierUnavailable(
                        f"{self._url}: cannot {what}, tried {tried + 1} times: {in_words(error)}",
                        hint="check that this host reaches the store, and that the store is not "
                        "overloaded",
                    ) from error
            except BaseException:
                if state == HALF_OPEN:
                    self.breaker.gave_up()  # an interrupted trial call proves nothing
                raise
            else:
                self._has_answered()
                return result
            tried += 1
            self._sleep(pause_s)
            state = self._enter(what)

    def _enter(self, what: str) -> str:
        """Return the breaker's state for a try; raise `TierUnavailable` if it forbids any."""
        state = self.breaker.enter()
        if state == OPEN:
            raise self._left_alone(what)
        return state

    def translated(self, what: str, error: Exception) -> TrainckptError:
        """Return a library's error as an error of this package."""
        if isinstance(error, TrainckptError):
            return error
        kind = meaning(error)
        if kind == ABSENT:
            return UnusableSnapshot(f"cannot {what}: it is missing")
        hint = (self._login if kind == DENIED else "") or _HINTS.get(kind, "")
        if is_missing_bucket(error):
            hint = "make the bucket (Azure: the container), or check its name"
        return TierUnavailable(f"{self._url}: cannot {what}: {in_words(error)}", hint=hint)

    def _has_answered(self) -> None:
        self._answered = True
        self.breaker.answered()

    def _pause_s(self, tried: int) -> float:
        bound = self.limits.first_pause_s * 2.0 ** min(tried, 30)
        return self._draw() * min(bound, self.limits.longest_pause_s)

    def _left_alone(self, what: str) -> TierUnavailable:
        health = self.breaker.health()
        return TierUnavailable(
            f"{self._url}: cannot {what}: no request is sent, since {health.num_given_up} calls in "
            f"a row have failed; the last error: {health.last_error}",
            hint="wait: the store is tried again in a few seconds",
        )


CLOSED, OPEN, HALF_OPEN = "closed", "open", "half-open"
OPEN_AFTER = 2
PAUSE_S, LONGEST_PAUSE_S = 5.0, 15.0


@dataclass(frozen=True)
class Health:
    """State of a store, as far as this process knows.

    Attributes:
        state: `CLOSED`, `OPEN` or `HALF_OPEN`.
        for_s: Seconds in this state.
        num_given_up: Calls abandoned in a row.
        last_error: Error of the last failed try, without secrets; "" if none has failed.
    """

    state: str
    for_s: float
    num_given_up: int
    last_error: str


class CircuitBreaker:
    """Circuit breaker of one store, used by any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._state, self._since_s = CLOSED, clock()
        self._given_up, self._pause_s = 0, PAUSE_S
        self._last_error = ""

    def enter(self) -> str:
        """Return the state for a new call: `CLOSED`, or `HALF_OPEN` for the one trial call.

        `OPEN` forbids the call.
        """
        with self._lock:
            over = self._clock() - self._since_s >= self._pause_s
            if self._state == OPEN and over:
                self._become(HALF_OPEN)
                return HALF_OPEN
            return CLOSED if self._state == CLOSED else OPEN

    def answered(self) -> None:
        """Record an answer of the store, whatever it was."""
        with self._lock:
            self._given_up, self._pause_s = 0, PAUSE_S
            if self._state != CLOSED:
                self._become(CLOSED)

    def failed(self, why: str) -> None:
        """Record one failed try; more may follow."""
        with self._lock:
            self._last_error = why

    def gave_up(self) -> None:
        """Record an abandoned call."""
        with self._lock:
            self._given_up += 1
            if self._state == HALF_OPEN:
                self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
                self._become(OPEN)
            elif self._state == CLOSED and self._given_up >= OPEN_AFTER:
                self._become(OPEN)

    def health(self) -> Health:
        """Return the breaker's state now."""
        with self._lock:
            for_s = self._clock() - self._since_s
            return Health(self._state, for_s, self._given_up, self._last_error)

    def _become(self, state: str) -> None:
        self._state, self._since_s = state, self._clock()

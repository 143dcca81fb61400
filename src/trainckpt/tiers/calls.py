"""Calls to a store: so many at once, each tried again while that may help, none for ever.

A pause before a further try is drawn between nothing and a bound that doubles ("full jitter"), so
that many ranks that failed together do not come back together. No further try begins after the time
for a call is over: little, as long as the store has never answered, for then somebody waits at a
keyboard; more later, when a save in the background can outlast a restart of the server.
"""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from trainckpt.errors import TierUnavailable, TrainckptError, UnusableSnapshot
from trainckpt.tiers import breaker as breakers
from trainckpt.tiers.breaker import Breaker
from trainckpt.tiers.refusals import (
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
    """How much is asked of a store.

    Attributes:
        at_once: Calls under way at the same time.
        first_pause_s, longest_pause_s: Bounds of the pause before the second try, and of any.
        give_up_s: After this time no further try of a call begins.
        give_up_first_s: The same, while the store has never answered.
        part_bytes: What is larger is sent in parts of so many bytes, or of more.
    """

    at_once: int = 8
    first_pause_s: float = 0.2
    longest_pause_s: float = 10.0
    give_up_s: float = 120.0
    give_up_first_s: float = 20.0
    part_bytes: int = 16 << 20


class Calls:
    """To one store, from any threads.

    Attributes:
        breaker: Left alone after several calls that were given up.
        login: What to do where the store does not let us in; "": the general advice.
    """

    def __init__(
        self,
        url: str,
        limits: Limits | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
        draw: Callable[[], float] = draw_own,
    ) -> None:
        self.breaker = Breaker(clock)
        self.limits = limits or Limits()
        self.login = ""
        self._url, self._clock, self._sleep, self._draw = url, clock, sleep, draw
        self._slots = threading.BoundedSemaphore(self.limits.at_once)
        self._answered = False

    def make(self, what: str, call: Callable[[int], Result]) -> Result:
        """The result of `call`, which gets the number of tries before it.

        Args:
            what: The call in words, for errors: "write snapshots/s1~1.1/manifest.json".

        Raises:
            TierUnavailable: the store refused, did not answer in time, or was left alone.
            UnusableSnapshot: it says that there is no such thing.
        """
        begun_s, tried = self._clock(), 0
        while True:
            state = self.breaker.enter()
            if state == breakers.OPEN:
                raise self._left_alone(what)
            try:
                with self._slots:
                    result = call(tried)
            except Exception as error:
                if meaning(error) != TRANSIENT:
                    self._has_answered()
                    raise self.translated(what, error) from error
                pause_s = self._pause_s(tried)
                self.breaker.failed(in_words(error))
                late = self._clock() + pause_s - begun_s > self._give_up_s()
                if late or state == breakers.HALF_OPEN:
                    self.breaker.gave_up()
                    raise self._unavailable(what, error, tried + 1) from error
            except BaseException:
                if state == breakers.HALF_OPEN:
                    self.breaker.gave_up()  # a trial that was broken off is no answer
                raise
            else:
                self._has_answered()
                return result
            tried += 1
            self._sleep(pause_s)

    def translated(self, what: str, error: Exception) -> TrainckptError:
        """What a library raised, as an error of ours."""
        if isinstance(error, TrainckptError):
            return error
        kind = meaning(error)
        if kind == ABSENT:
            return UnusableSnapshot(f"cannot {what}: it is missing")
        hint = (self.login if kind == DENIED else "") or _HINTS.get(kind, "")
        if is_missing_bucket(error):
            hint = "make the bucket (Azure: the container), or check its name"
        return TierUnavailable(f"{self._url}: cannot {what}: {in_words(error)}", hint=hint)

    def _has_answered(self) -> None:
        self._answered = True
        self.breaker.answered()

    def _pause_s(self, tried: int) -> float:
        bound = self.limits.first_pause_s * 2.0 ** min(tried, 30)
        return self._draw() * min(bound, self.limits.longest_pause_s)

    def _give_up_s(self) -> float:
        return self.limits.give_up_s if self._answered else self.limits.give_up_first_s

    def _unavailable(self, what: str, error: BaseException, tries: int) -> TierUnavailable:
        return TierUnavailable(
            f"{self._url}: cannot {what}, tried {tries} times: {in_words(error)}",
            hint="see whether the store can be reached from here, and whether it is overloaded",
        )

    def _left_alone(self, what: str) -> TierUnavailable:
        health = self.breaker.health()
        return TierUnavailable(
            f"{self._url}: cannot {what}: not asked, for {health.num_given_up} calls in a row "
            f"were given up; the last met {health.last_error}",
            hint="it is asked again in a few seconds",
        )

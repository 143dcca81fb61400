"""A limit for calls into a file system that may never answer.

A dead network file system does not fail: the call hangs in the kernel. So the first looks at a
place are taken on a helper thread, and whoever waits for it stops waiting. The thread stays
behind, stuck; the process is about to end by the error, or does not care.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING, TypeVar

from trainckpt.errors import TierUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Key = TypeVar("Key")
    Result = TypeVar("Result")

ANSWER_WITHIN_S = 30.0
MOMENT_S = 1.0  # for what can as well be done another time


def answer_within(url: str, call: Callable[[], Result], limit_s: float | None = None) -> Result:
    """The result of `call`, or its error; `TierUnavailable` naming `url` if it hangs."""
    limit_s = ANSWER_WITHIN_S if limit_s is None else limit_s
    ended = aside(call)
    if (result := ended(limit_s)) is None:
        raise TierUnavailable(
            f"{url} did not answer within {limit_s:g} s",
            hint="see whether its file system is mounted and its server is up, then start again",
        )
    return result()


def aside(call: Callable[[], Result]) -> Callable[[float], Callable[[], Result] | None]:
    """Begin `call` on a thread that may be left behind.

    Returns:
        Waits for so many seconds; None if it has not ended then, else what returns its result or
        raises its error.
    """
    results: list[Result] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            results.append(call())
        except BaseException as error:  # noqa: BLE001 - raised again by the caller
            errors.append(error)

    def result() -> Result:
        if errors:
            raise errors[0]
        return results[0]

    thread = threading.Thread(target=work, name="trainckpt-look", daemon=True)
    thread.start()

    def ended(within_s: float) -> Callable[[], Result] | None:
        thread.join(within_s)
        return result if results or errors else None

    return ended


def those_that_answer(calls: Mapping[Key, Callable[[], Result]]) -> dict[Key, Result]:
    """Results of calls made at once, after a moment; what fails or hangs is left out."""
    results: dict[Key, Result] = {}

    def work(key: Key, call: Callable[[], Result]) -> None:
        with contextlib.suppress(Exception):
            results[key] = call()

    until_s, threads = time.monotonic() + MOMENT_S, []
    for each in calls.items():
        thread = threading.Thread(target=work, args=each, name="trainckpt-look", daemon=True)
        with contextlib.suppress(RuntimeError):  # the system gives no more of them
            thread.start()
            threads.append(thread)
    for thread in threads:
        thread.join(max(until_s - time.monotonic(), 0))
    return results.copy()

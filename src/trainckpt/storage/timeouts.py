"""Time limits for calls into a file system without an answer.

A dead network file system does not fail: the call hangs in the kernel. So the first calls to a
location run on a helper thread, and the caller stops waiting after a limit. The stuck thread stays
behind; the process is about to end by the error, or can live with it.
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
MOMENT_S = 1.0  # for calls another time would do for


def answer_within(url: str, call: Callable[[], Result], limit_s: float | None = None) -> Result:
    """Return the result of `call` or raise its error; `TierUnavailable` with `url` if it hangs."""
    limit_s = ANSWER_WITHIN_S if limit_s is None else limit_s
    ended = aside(call)
    if (result := ended(limit_s)) is None:
        raise TierUnavailable(
            f"{url} did not answer within {limit_s:g} s",
            hint="see whether its file system is mounted and its server is up, then start again",
        )
    return result()


def aside(call: Callable[[], Result]) -> Callable[[float], Callable[[], Result] | None]:
    """Begin `call` on a daemon thread the caller may abandon.

    Returns:
        A function waiting a number of seconds. It returns None if the call has not ended by then,
        else
        a function returning the result or raising the error.
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
    """Run calls at once for `MOMENT_S` seconds; return the results of those that succeeded."""
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

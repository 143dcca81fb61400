"""A limit for calls into a file system that may never answer.

A dead network file system does not fail: the call hangs in the kernel. So the first looks at a
place are taken on a helper thread, and whoever waits for it stops waiting. The thread stays
behind, stuck; the process is about to end by the error.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, TypeVar

from trainckpt.errors import TierUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable

    Result = TypeVar("Result")

ANSWER_WITHIN_S = 30.0


def answer_within(url: str, call: Callable[[], Result], limit_s: float | None = None) -> Result:
    """The result of `call`, or its error; `TierUnavailable` naming `url` if it hangs."""
    limit_s = ANSWER_WITHIN_S if limit_s is None else limit_s
    results: list[Result] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            results.append(call())
        except BaseException as error:  # noqa: BLE001 - raised again by the caller
            errors.append(error)

    thread = threading.Thread(target=work, name="trainckpt-look", daemon=True)
    thread.start()
    thread.join(limit_s)
    if errors:
        raise errors[0]
    if not results:
        raise TierUnavailable(
            f"{url} did not answer within {limit_s:g} s",
            hint="see whether its file system is mounted and its server is up, then start again",
        )
    return results[0]

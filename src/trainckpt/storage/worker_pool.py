"""Threads for calls into a file system: a pool for several at once, and a serial worker.

They are daemons, unlike those of `concurrent.futures`. Neither a call hanging in a dead file system
nor its waiting caller may keep the interpreter from ending.
"""

from __future__ import annotations

import queue
import threading
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any, TypeVar

from trainckpt.errors import TierUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Result = TypeVar("Result")


# ---- time limits for calls without an answer
#
# A dead network file system does not fail: the call hangs in the kernel. So the first calls to a
# location run on a helper thread, and the caller stops waiting after a limit. The stuck thread
# stays behind; the process is about to end by the error, or can live with it.


ANSWER_WITHIN_S = 30.0


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
        else a function returning the result or raising the error.
    """
    future: Future[Result] = Future()

    def work() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised again by the caller
            future.set_exception(error)

    threading.Thread(target=work, name="trainckpt-look", daemon=True).start()

    def ended(within_s: float) -> Callable[[], Result] | None:
        return future.result if wait([future], within_s).done else None

    return ended


# ---- threads


class Workers:
    """Make calls in order, several at a time. After a failure the queued ones are dropped.

    Used by one thread, as a context; its exit waits for all running calls.

    Attributes:
        num_asked: Number of calls queued so far.
    """

    def __init__(self, num: int, name: str) -> None:
        self._num, self._name = num, name
        self._threads: list[threading.Thread] = []
        self._queue: queue.SimpleQueue[tuple[int, Callable[[], object]] | None] = (
            queue.SimpleQueue()
        )
        self._changed = threading.Condition()
        self.num_asked = self._done = 0
        self._left: set[int] = set()  # numbers of the unfinished calls
        self._errors: dict[int, BaseException] = {}
        self._over = False
        self._is_over = _never  # condition the caller waits for

    def submit(self, call: Callable[[], object]) -> None:
        """Queue this call for one of the threads."""
        with self._changed:
            self._left.add(self.num_asked)
        self._queue.put((self.num_asked, call))
        self.num_asked += 1
        if len(self._threads) < min(self._num, self.num_asked - self._done):
            thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no more threads allowed: the existing ones do it
                if not self._threads:
                    raise
            else:
                self._threads.append(thread)

    def settle(self, left: int = 0) -> None:
        """Wait for all calls, or raise the error of the first failed one in queue order.

        Args:
            left: Return once at most this many calls are unfinished.
        """
        self._wait(lambda: self.num_asked - self._done <= left)

    def settle_first(self, number: int) -> None:
        """Wait for the first `number` calls; errors as `settle`."""
        self._wait(lambda: not self._left or min(self._left) >= number)

    def _wait(self, is_over: Callable[[], bool]) -> None:
        with self._changed:
            self._is_over = is_over
            self._changed.wait_for(is_over)
            self._is_over = _never
        if self._errors:
            error = self._errors[min(self._errors)]
            try:
                raise error
            finally:
                del error  # its traceback has this frame: a cycle would keep the calls' memory

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self._over = True
        for _thread in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()
        self._errors.clear()

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            number, call = job
            try:
                if not self._errors and not self._over:
                    call()
            except BaseException as error:  # noqa: BLE001 - raised by `settle`
                self._errors[number] = error
            with self._changed:
                self._done += 1
                self._left.discard(number)
                if self._is_over():  # checked here: the caller wakes only once
                    self._is_over = _never  # stays true: the caller queues nothing meanwhile
                    self._changed.notify_all()


def call_all(calls: Sequence[Callable[[], object]], at_once: int, name: str) -> None:
    """Make all calls, `at_once` at a time on threads of this name; with 1, on this thread.

    Raises the error of the first failed one; later ones may not have been made.
    """
    if min(at_once, len(calls)) <= 1:
        for call in calls:
            call()
        return
    with Workers(at_once, name) as workers:
        for call in calls:
            workers.submit(call)
        workers.settle()


def _never() -> bool:
    return False


class SerialWorker:
    """Make calls on one thread, in order, whatever fails.

    Used as a context; its exit waits for all calls.
    """

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    def submit(self, call: Callable[[], Result]) -> Future[Result]:
        """Queue a call; return a future with its result or error."""
        future: Future[Result] = Future()
        self._queue.put((future, call))
        return future

    def __enter__(self) -> SerialWorker:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            future, call = job
            try:
                future.set_result(call())
            except BaseException as error:  # noqa: BLE001 - raised by the future's reader
                future.set_exception(error)
            del job, future, call  # an error's traceback has this frame and would keep their memory

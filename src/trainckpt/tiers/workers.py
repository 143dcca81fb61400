"""A few threads that make calls into a file system, so that several are on their way at once; and
one that makes calls beside such a one.

They are daemons, unlike those of `concurrent.futures`: a call that hangs in a dead file system must
not keep the interpreter from ending, nor must one that waits for it.
"""

from __future__ import annotations

import queue
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    Result = TypeVar("Result")


class Workers:
    """Makes calls in turn, several at a time. Once one has failed, those still queued are dropped.

    Used by one thread, as a context: at its end no call is being made any more.
    """

    def __init__(self, num: int, name: str) -> None:
        self._num, self._name = num, name
        self._threads: list[threading.Thread] = []
        self._queue: queue.SimpleQueue[tuple[int, Callable[[], object]] | None] = (
            queue.SimpleQueue()
        )
        self._changed = threading.Condition()
        self._asked = self._done = 0
        self._left: set[int] = set()  # numbers of the calls that are not made yet
        self._errors: dict[int, BaseException] = {}
        self._over = False
        self._is_over = _never  # what is waited for

    def submit(self, call: Callable[[], object]) -> None:
        """Make this call on one of the threads, after those asked for before."""
        with self._changed:
            self._left.add(self._asked)
        self._queue.put((self._asked, call))
        self._asked += 1
        if len(self._threads) < min(self._num, self._asked - self._done):
            thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the system gives no more: those there are do it
                if not self._threads:
                    raise
            else:
                self._threads.append(thread)

    def settle(self, left: int = 0) -> None:
        """Return when all calls are made, or raise what failed: of several, what came first.

        Args:
            left: Return as soon as no more than so many are not made yet.
        """
        self._wait(lambda: self._asked - self._done <= left)

    @property
    def num_asked(self) -> int:
        """How many calls were asked for so far."""
        return self._asked

    def settle_first(self, number: int) -> None:
        """Return when the first so many calls are made, or raise as `settle`."""
        self._wait(lambda: not self._left or min(self._left) >= number)

    def _wait(self, is_over: Callable[[], bool]) -> None:
        with self._changed:
            self._is_over = is_over
            self._changed.wait_for(is_over)
            self._is_over = _never
        self._raise()

    def _raise(self) -> None:
        if self._errors:
            error = self._errors[min(self._errors)]
            try:
                raise error
            finally:
                del error  # it has this frame, so both would keep all memory of the calls

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._over = True
        for _ in self._threads:
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
                if self._is_over():  # else whoever waits would wake for nothing each time
                    self._is_over = _never  # it stays so: nothing is asked for meanwhile
                    self._changed.notify_all()


def _never() -> bool:
    """Nobody waits."""
    return False


class InTurn:
    """Makes calls on one thread, each after those asked for before; whatever fails, all of them.

    Used as a context: at its end all are made.
    """

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    def submit(self, call: Callable[[], Result]) -> Future[Result]:
        """Its result, or its error."""
        future: Future[Result] = Future()
        self._queue.put((future, call))
        return future

    def __enter__(self) -> InTurn:
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
            except BaseException as error:  # noqa: BLE001 - it is for whoever asks for the result
                future.set_exception(error)
            del job, future, call  # an error has this frame, so it would keep their memory

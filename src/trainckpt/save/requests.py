"""Map each call of `ckpt.save()` to the save that satisfies it.

The n-th call of any rank asks for the same save. A rank may call after the save was taken, since
another rank had asked first: it gets the handle of that save.

A save that is due while the one before is still being written (minutes, where storage hangs) is
deferred. Training goes on, and the save is tried again some boundaries later, and at the run's end.
All ranks defer it at one boundary, by one verdict, and count the same boundaries, so they try again
together without another round.

A save that ends or stops the attempt satisfies all waiting calls: deferred ones, and those made
after the notice, when ranks agree on no more saves. The ranks exchange them (`waiting`), and the
save carries the tags of all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainckpt.attempt.log import logger
from trainckpt.attempt.save_handle import SaveHandle
from trainckpt.errors import SaveFailed

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from trainckpt.format.cursor import Cursor
    from trainckpt.ranks.rounds import Decision
    from trainckpt.save.coordinator import SaveCoordinator

MOST_BOUNDARIES = 16  # between two tries
Asked = tuple[int, str | None]  # number of a call, and its tag


def merged(of_ranks: Iterable[Iterable[Sequence[Any]]]) -> list[Asked]:
    """Return the calls waiting on any rank, in order; of several tags for one the lowest rank's."""
    tags: dict[int, str | None] = {}
    for asked in of_ranks:
        for number, tag in asked:
            tags[number] = tags.get(number) or tag
    return sorted(tags.items())


def tags_of(asked: Iterable[Asked]) -> tuple[str, ...]:
    """Return each tag once, in order."""
    return tuple(dict.fromkeys(tag for _, tag in asked if tag))


class SaveRequests:
    """Handles of requested saves, by the number of the call.

    Attributes:
        deferred: Deferred saves, the oldest first.
    """

    def __init__(self) -> None:
        self.deferred: list[Decision] = []
        self._calls = 0
        self._handles: dict[int, SaveHandle] = {}
        self._tags: dict[int, str] = {}  # of calls of this rank
        self._pause = self._until_next_try = 1  # boundaries between two tries, and until the next

    def add(self, tag: str | None = None) -> tuple[int, SaveHandle]:
        """Count this rank's next call; return its number, and the handle of its save."""
        self._calls += 1
        handle = self._handle(self._calls)
        if tag:
            self._tags[self._calls] = tag
        self._forget_ended()
        return self._calls, handle

    def take(
        self, saver: SaveCoordinator, cursor: Cursor, due: Decision, *, waits: bool = False
    ) -> bool:
        """Take a save that was agreed on; return False if all ranks deferred it. Training thread.

        Args:
            saver, cursor: The saver to use, and the current cursor.
            due: The agreed save. One that no call asked for is skipped where another is deferred.
            waits: Wait for the save before, however long that takes.
        """
        tags, asked = (due.notice.tag,) if due.notice.tag else (), due.notice.number is not None
        pending = SaveHandle() if due.notice.number is None else self._handle(due.notice.number)
        saver.save(cursor, due.notice.reason, tags, pending, may_skip=not waits, asked=asked)
        if pending.deferred and due not in self.deferred:
            self.deferred.append(due)
            self._pause = self._until_next_try = 1
        return not pending.deferred

    def take_deferred(self, saver: SaveCoordinator, cursor: Cursor, *, waits: bool = False) -> None:
        """Retry deferred saves when it is time. At each boundary, on all ranks alike."""
        self._until_next_try -= 1
        while self.deferred and (waits or self._until_next_try <= 0):
            if not self.take(saver, cursor, self.deferred[0], waits=waits):
                self._pause = self._until_next_try = min(2 * self._pause, MOST_BOUNDARIES)
                return
            del self.deferred[0]

    def fail_skipped(self, skipped: Iterable[Decision]) -> None:
        """Fail the saves that all ranks skipped; calls after a stop wait for the final save."""
        for decision in skipped:
            if not decision.failed:
                continue
            logger.warning("skipped a save (%s): %s", decision.notice.reason, decision.why)
            if decision.notice.number is not None:
                self._handle(decision.notice.number).fail(SaveFailed(f"skipped: {decision.why}"))

    def fail_waiting(self, how: str) -> None:
        """Fail the calls without a save, since the attempt has ended."""
        self.fail_all(self.waiting(), f"the attempt {how} before this save was taken")

    def waiting(self) -> list[Asked]:
        """Return the calls without a save yet, as far as this rank knows."""
        tags = {**{due.notice.number or 0: due.notice.tag for due in self.deferred}, **self._tags}
        handles = sorted(self._handles.items())
        return [(n, tags.get(n)) for n, h in handles if not h.ended and h.snapshot is None]

    def resolve(self, asked: Iterable[Asked], saved: SaveHandle) -> None:
        """Resolve all these calls with one committed save. All ranks alike."""
        self.deferred.clear()
        for number, _ in asked:
            saved.add_alias(self._handle(number))

    def fail_all(self, asked: Sequence[Asked], reason: str, *, says: bool = True) -> None:
        """Fail all these calls."""
        self.deferred.clear()
        for number, _ in asked:
            self._handle(number).fail(SaveFailed(reason))
        for tag in tags_of(asked) if says else ():
            logger.warning("no snapshot was saved with tag %r: %s", tag, reason)

    def _handle(self, number: int) -> SaveHandle:
        return self._handles.setdefault(number, SaveHandle())

    def _forget_ended(self) -> None:
        done = [n for n, h in self._handles.items() if n < self._calls and h.ended]
        for number in done:
            del self._handles[number]
            self._tags.pop(number, None)

"""Requests: which call of `ckpt.save()` became which save.

The n-th call of any rank asks for the same save. A rank may call after the save was taken, since
another rank had asked first: it gets the handle of that save.

One that is due while the save before it is still being written, which in a place that hangs takes
minutes, is put off: training goes on, and it is tried again some boundaries later, and at the run's
end. All ranks put it off at one boundary, by one verdict, and count the same boundaries, so they
try again together without another round.

A save that ends the attempt, or stops it, does for all that wait by then: put off, or asked for
after the notice, when no round is opened for saves any more. The ranks tell each other of them
(`waiting`), and take it with the tags of all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainckpt.errors import SaveFailed
from trainckpt.lifecycle.run.log import logger
from trainckpt.lifecycle.run.pending import PendingSave

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from trainckpt.format.cursor import Cursor
    from trainckpt.lifecycle.saving.saver import Saver
    from trainckpt.ranks.agreement import Due
    from trainckpt.ranks.decision import Decision

MOST_BOUNDARIES = 16  # between two tries
Asked = tuple[int, str | None]  # number of a call, and its tag


def merged(of_ranks: Iterable[Iterable[Sequence[Any]]]) -> list[Asked]:
    """What any rank waits for, in order; of several tags for one number the lowest rank's."""
    found: dict[int, str | None] = {}
    for asked in of_ranks:
        for number, tag in asked:
            found[number] = found.get(number) or tag
    return sorted(found.items())


def tags_of(asked: Iterable[Asked]) -> tuple[str, ...]:
    """Each once, in order."""
    return tuple(dict.fromkeys(tag for _, tag in asked if tag))


class Requests:
    """Handles of requested saves, by the number of the call.

    Attributes:
        put_off: Saves that are due, the oldest first, and could not be begun yet.
    """

    def __init__(self) -> None:
        self.put_off: list[Due] = []
        self._calls = 0
        self._handles: dict[int, PendingSave] = {}
        self._tags: dict[int, str] = {}  # of calls of this rank
        self._pause = self._left = 1  # boundaries between two tries, and until the next

    def ask(self, tag: str | None = None) -> tuple[int, PendingSave]:
        """This rank's next call: its number, and the handle of its save."""
        self._calls += 1
        handle = self._handle(self._calls)
        if tag:
            self._tags[self._calls] = tag
        self._forget_ended()
        return self._calls, handle

    def take(self, saver: Saver, cursor: Cursor, due: Due, *, waits: bool = False) -> bool:
        """Take a save that was agreed on; False if all ranks have put it off. Training thread.

        Args:
            saver, cursor: Whose, and where.
            due: One that nobody called for is skipped where another is put off.
            waits: For the save before, however long that takes.
        """
        tags, asked = (due.tag,) if due.tag else (), due.number is not None
        pending = PendingSave() if due.number is None else self._handle(due.number)
        saver.save(cursor, due.reason, tags, pending, may_skip=not waits, asked=asked)
        if pending.put_off and due not in self.put_off:
            self.put_off.append(due)
            self._pause = self._left = 1
        return not pending.put_off

    def take_put_off(self, saver: Saver, cursor: Cursor, *, waits: bool = False) -> None:
        """At each boundary, on all ranks alike: what was put off, once it is time to try again."""
        self._left -= 1
        while self.put_off and (waits or self._left <= 0):
            if not self.take(saver, cursor, self.put_off[0], waits=waits):
                self._pause = self._left = min(2 * self._pause, MOST_BOUNDARIES)
                return
            del self.put_off[0]

    def drop(self, skipped: Iterable[Decision]) -> None:
        """All ranks skipped these saves. Those that come after a stop wait for its own."""
        for decision in skipped:
            if not decision.failed:
                continue
            logger.warning("a save (%s) was skipped: %s", decision.reason, decision.why)
            if decision.number is not None:
                self._handle(decision.number).fail(SaveFailed(f"skipped: {decision.why}"))

    def fail_waiting(self, how: str) -> None:
        """The attempt has ended: what was asked for and not taken never will be."""
        self.give_up(self.waiting(), f"not taken: the attempt has {how} before")

    def waiting(self) -> list[Asked]:
        """What was asked for, as far as this rank knows, and has not become a save."""
        tags = {**{due.number or 0: due.tag for due in self.put_off}, **self._tags}
        handles = sorted(self._handles.items())
        return [(n, tags.get(n)) for n, h in handles if not h.ended and h.snapshot is None]

    def taken(self, asked: Iterable[Asked], saved: PendingSave) -> None:
        """One save, which is committed, did for all of them. All ranks alike."""
        self.put_off.clear()
        for number, _ in asked:
            saved.also(self._handle(number))

    def give_up(self, asked: Sequence[Asked], why: str, *, says: bool = True) -> None:
        """None of them will be taken."""
        self.put_off.clear()
        for number, _ in asked:
            self._handle(number).fail(SaveFailed(why))
        for tag in tags_of(asked) if says else ():
            logger.warning("the tag %r is on no snapshot: %s", tag, why)

    def _handle(self, number: int) -> PendingSave:
        return self._handles.setdefault(number, PendingSave())

    def _forget_ended(self) -> None:
        done = [n for n, h in self._handles.items() if n < self._calls and h.ended]
        for number in done:
            del self._handles[number]
            self._tags.pop(number, None)

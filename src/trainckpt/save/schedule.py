"""Schedule saves: by steps, by time, by a measured interval, and at calls of `ckpt.save()`.

The n-th call of any rank asks for the same save. A rank may call after the save was taken, since
another rank had called first: it gets the handle of that save.

A save that is due while the one before is still being written (minutes, where storage hangs) is
deferred. Training goes on, and the save is tried again some boundaries later, and at the run's end.
All ranks defer it at one boundary, by one verdict, and count the same boundaries, so they try again
together without another round.

A save that ends or stops the attempt satisfies all waiting calls: deferred ones, and those made
after the notice, when ranks agree on no more saves. The ranks exchange them (`waiting`), and the
save carries the tags of all.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from trainckpt.attempt.live_status import NextSave
from trainckpt.attempt.log import logger
from trainckpt.attempt.options import LOCAL
from trainckpt.attempt.save_handle import SaveHandle
from trainckpt.errors import SaveFailed
from trainckpt.planning.closed_forms import Level, plan
from trainckpt.planning.run_history import mean_time_between_failures_s
from trainckpt.replicate.uploads import WRITING_SHARE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from trainckpt.attempt.options import Every
    from trainckpt.format.attempt_record import AttemptRecord
    from trainckpt.format.cursor import Cursor
    from trainckpt.ranks.decision import Decision
    from trainckpt.save.coordinator import SaveCoordinator
    from trainckpt.save.estimates import Timings


# ---- the interval of `every="auto"`
#
# More frequent saves cost more time, less frequent ones lose more at a failure. The function that
# weighs them is that of `trainckpt advise`.


LEAST_S, MOST_S = 10.0, 3600.0
COST_SHARE = 0.01  # largest share of the time that saves may cost
FIRST_S = 60.0  # until a save was measured


def interval_s(cost_s: float | None, write_s: float | None, mean_s: float) -> float:
    """Return the seconds from one save to the next.

    Args:
        cost_s: Seconds of training lost by one save; None: not measured yet.
        write_s: From its beginning to its commit.
        mean_s: Mean time between failures.
    """
    if cost_s is None:
        return FIRST_S
    level = Level(
        name=LOCAL,
        stall_s=cost_s,
        failures_per_s=1.0 / mean_s,
        least_s=max(LEAST_S, cost_s / COST_SHARE, (write_s or 0.0) / WRITING_SHARE),
    )
    return plan([level], most_s=MOST_S).intervals[LOCAL]


def measured_interval(timings: Timings, earlier: Iterable[AttemptRecord]) -> Callable[[], float]:
    """Return a function for the seconds until the next save, as measured when it is called.

    `earlier`: the records of the run's attempts before this one.
    """
    mean_s = mean_time_between_failures_s(earlier)

    def seconds() -> float:
        chosen_s = interval_s(timings.stall_s, timings.save_s, mean_s)
        if timings.stall_s is not None:
            logger.debug("next save in %.0f s", chosen_s)
        return chosen_s

    return seconds


# ---- the schedule


class SaveSchedule:
    """Decides about saves by steps (the same on all ranks) and by time (requested by rank 0).

    `every="100 steps"` is a pure function of the cursor, so every rank finds it due at the same
    boundary. `every="10 min"` is not: rank 0 requests it, and all agree on the boundary.
    `every="auto"` is by time, and each interval follows from what was measured before it.
    """

    def __init__(
        self,
        every: Every,
        begun_step: int,
        now_s: float,
        interval: Callable[[], float] = lambda: 0.0,
        memory_every: Every | None = None,
    ) -> None:
        """`interval` returns the next one, in seconds, where `every` is "auto".

        `memory_every` is by steps: saves to memory, where none to the run directory is due.
        """
        self._memory = SaveSchedule(memory_every, begun_step, now_s) if memory_every else None
        self._in_memory = False
        self._steps = every.steps
        self._interval = interval if every.auto else None
        self._seconds = interval() if every.auto else every.seconds
        self.reason = f"every {every.text}"
        self._multiple = begun_step // self._steps if self._steps else 0
        self._next_s = now_s + self._seconds if self._seconds else float("inf")

    @property
    def is_in_memory(self) -> bool:
        """True if the save that `due_by_steps` has just reported due goes to memory alone."""
        return self._in_memory

    def interval_s(self, step_s: float | None) -> float | None:
        """Return the seconds from one save to the next; None: never, or not known yet.

        `step_s`: seconds of a step. Any thread.
        """
        if self._steps is not None:
            return None if step_s is None else self._steps * step_s
        return self._seconds

    def memory_interval_s(self, step_s: float | None) -> float | None:
        """Return the same of saves to memory: of all saves, where there are none to it alone."""
        own = None if self._memory is None else self._memory.interval_s(step_s)
        return self.interval_s(step_s) if own is None else own

    def next_saves(self, now_s: float) -> tuple[NextSave, ...]:
        """Return when the next save is due, and the next one to memory alone. Any thread."""
        found = []
        if self._steps is not None:
            found.append(NextSave(at_step=(self._multiple + 1) * self._steps))
        if self._seconds:
            found.append(NextSave(in_s=max(self._next_s - now_s, 0.0)))
        memory = () if self._memory is None else self._memory.next_saves(now_s)
        return (*found, *(replace(each, in_memory=True) for each in memory))

    def due_by_steps(self, step: int, micro: int) -> bool:
        """True once, at the first window's start at or beyond each multiple."""
        in_memory = self._memory is not None and self._memory.due_by_steps(step, micro)
        due = self._is_due(step, micro)
        self._in_memory = in_memory and not due
        return due or in_memory

    def _is_due(self, step: int, micro: int) -> bool:
        if self._steps is None or micro:
            return False
        multiple = step // self._steps
        if multiple <= self._multiple:
            return False
        self._multiple = multiple
        return True

    def due_by_time(self, now_s: float) -> bool:
        """True once each time the interval has passed."""
        if now_s < self._next_s or self._seconds is None:
            return False
        if self._interval is not None:
            self._seconds = self._interval()
        self._next_s = now_s + self._seconds
        return True


# ---- calls of `ckpt.save()`


MOST_BOUNDARIES = 16  # between two tries
Call = tuple[int, str | None]  # number of a call, and its tag


def merged(of_ranks: Iterable[Iterable[Sequence[Any]]]) -> list[Call]:
    """Return the calls waiting on any rank, in order; of several tags for one the lowest rank's."""
    tags: dict[int, str | None] = {}
    for calls in of_ranks:
        for number, tag in calls:
            tags[number] = tags.get(number) or tag
    return sorted(tags.items())


def tags_of(calls: Iterable[Call]) -> tuple[str, ...]:
    """Return each tag once, in order."""
    return tuple(dict.fromkeys(tag for _, tag in calls if tag))


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
        for number in [n for n, h in self._handles.items() if n < self._calls and h.ended]:
            del self._handles[number]
            self._tags.pop(number, None)
        return self._calls, handle

    def save(
        self, saver: SaveCoordinator, cursor: Cursor, due: Decision, *, waits: bool = False
    ) -> bool:
        """Take a save that was agreed on; return False if all ranks deferred it. Training thread.

        Args:
            saver, cursor: The saver to use, and the current cursor.
            due: The agreed save. One by the schedule is skipped where one of a call is deferred.
            waits: Wait for the save before, however long that takes.
        """
        number, tag = due.notice.number, due.notice.tag
        handle = SaveHandle(is_requested=False) if number is None else self._handle(number)
        tags = (tag,) if tag else ()
        saver.save(cursor, due.notice.reason, tags, handle, may_skip=not waits)
        if handle.deferred and due not in self.deferred:
            self.deferred.append(due)
            self._pause = self._until_next_try = 1
        return not handle.deferred

    def retry_deferred(
        self, saver: SaveCoordinator, cursor: Cursor, *, waits: bool = False
    ) -> None:
        """Retry deferred saves when it is time. At each boundary, on all ranks alike."""
        self._until_next_try -= 1
        while self.deferred and (waits or self._until_next_try <= 0):
            if not self.save(saver, cursor, self.deferred[0], waits=waits):
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

    def waiting(self) -> list[Call]:
        """Return the calls without a save yet, as far as this rank knows."""
        tags = {**{due.notice.number or 0: due.notice.tag for due in self.deferred}, **self._tags}
        handles = sorted(self._handles.items())
        return [(n, tags.get(n)) for n, h in handles if not h.ended and h.snapshot is None]

    def resolve(self, calls: Iterable[Call], saved: SaveHandle) -> None:
        """Resolve all these calls with one committed save. All ranks alike."""
        self.deferred.clear()
        for number, _ in calls:
            saved.add_alias(self._handle(number))

    def fail_all(self, calls: Sequence[Call], reason: str, *, logs: bool = True) -> None:
        """Fail all these calls."""
        self.deferred.clear()
        for number, _ in calls:
            self._handle(number).fail(SaveFailed(reason))
        for tag in tags_of(calls) if logs else ():
            logger.warning("no snapshot was saved with tag %r: %s", tag, reason)

    def _handle(self, number: int) -> SaveHandle:
        return self._handles.setdefault(number, SaveHandle())

"""Keep the time of one attempt while it runs; `format/attempt_times.py` is what it comes to.

    training thread   counts at each boundary and step; notes waits, evaluations and phases
    any thread        `times`: for each write of the attempt's record, and for the heartbeat

A boundary costs three stores to a page of numbers (`storage/counter_page.py`), and no clock of its
own. After a SIGKILL the page, or the last heartbeat, tells what the attempt had trained: its
supervisor records that, or else the next attempt, beside its own claim.

Only rank 0's numbers are shared: its training stands for that of all ranks.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from trainckpt.attempt import heartbeat
from trainckpt.attempt.live_status import EVALUATING, LEAVING, STARTING, TRAINING
from trainckpt.errors import TrainckptError
from trainckpt.format.attempt_times import TIMES, AttemptTimes, CommitMark, TrainedCount
from trainckpt.preemption.wall_time import own_start_s
from trainckpt.storage import counter_page
from trainckpt.storage.counter_page import CounterPage

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trainckpt.format.attempt_record import AttemptRecord
    from trainckpt.format.cursor import Cursor
    from trainckpt.storage.base import RunTier

LAUNCHED_VARIABLE = "TRAINCKPT_LAUNCHED"  # by the supervisor: the monotonic clock at the launch
VERSION = 1.0  # of the page

# numbers of the page; moments are of the monotonic clock, 0: not yet
(
    _VERSION,
    BOUNDARY_S,  # the last boundary
    STEPS,
    MICRO_BATCHES,
    _BEGAN,  # by the wall clock
    _BEGAN_S,
    _TRAINS_S,
    _LEAVES_S,
    _RESTORE_S,
    _SAVE_S,
    _SAVES,
    _EVALUATION_S,
    _EVALUATES_S,  # an evaluation runs since then
    _BEGUN_STEPS,
    _BEGUN_MICRO_BATCHES,
    _COMMITTED_STEPS,
    _COMMITTED_MICRO_BATCHES,
    _COMMITTED_S,  # training until then, and 1: 0 stands for no commit
) = range(18)


class TimeKeeper(CounterPage):
    """The time of one attempt on this rank. Of its `numbers` the training thread writes
    `BOUNDARY_S`, `STEPS` and `MICRO_BATCHES` itself."""

    def __init__(self, began_s: float | None = None) -> None:
        """`began_s`: the launch, on the monotonic clock; None: as the supervisor or the system
        tells it."""
        super().__init__()
        self._restored_bytes: Mapping[str, int] = {}
        self._staged: CommitMark | None = None  # the newest save's boundary
        self._committed: TrainedCount | None = None
        self._marks = threading.Lock()
        self._begin(launched_s() if began_s is None else began_s)

    def _begin(self, began_s: float) -> None:
        numbers, now_s = self.numbers, time.monotonic()
        numbers[_VERSION], numbers[_BEGAN_S] = VERSION, began_s
        numbers[_BEGAN] = time.time() - (now_s - began_s)

    # ---- phases and waits; the training thread

    def begin_at(self, cursor: Cursor | None) -> None:
        """Note where the attempt begins."""
        numbers, begun = self.numbers, trained_by(cursor)
        numbers[_BEGUN_STEPS] = numbers[STEPS] = begun.steps
        numbers[_BEGUN_MICRO_BATCHES] = numbers[MICRO_BATCHES] = begun.micro_batches

    def add_restore(self, seconds: float, read_bytes: Mapping[str, int] | None = None) -> None:
        """Add time spent on the snapshot that the attempt begins from.

        `read_bytes`: tier -> bytes read from it.
        """
        self.numbers[_RESTORE_S] += seconds
        if read_bytes:
            self._restored_bytes = dict(read_bytes)

    def begin_training(self) -> None:
        """Note the end of the first boundary."""
        self.numbers[_TRAINS_S] = time.monotonic()

    def add_wait(self, begun_s: float, ended_s: float, *, saves: int = 1) -> None:
        """Add a wait of training for a save. Boundaries before training count as no wait."""
        numbers = self.numbers
        trains_s = numbers[_TRAINS_S]
        if trains_s and not numbers[_LEAVES_S]:
            numbers[_SAVE_S] += max(ended_s - max(begun_s, trains_s), 0.0)
            numbers[_SAVES] += saves

    @property
    def phase(self) -> str:
        """Return the phase of the attempt. Any thread."""
        numbers = self.numbers
        if numbers[_LEAVES_S]:
            return LEAVING
        if numbers[_EVALUATES_S]:
            return EVALUATING
        return TRAINING if numbers[_TRAINS_S] else STARTING

    def begin_evaluation(self) -> None:
        """Note that an evaluation begins."""
        self.numbers[_EVALUATES_S] = time.monotonic()

    def end_evaluation(self) -> None:
        """Note that it has ended."""
        numbers = self.numbers
        begun_s, numbers[_EVALUATES_S] = numbers[_EVALUATES_S], 0.0
        if begun_s and numbers[_TRAINS_S]:
            numbers[_EVALUATION_S] += time.monotonic() - max(begun_s, numbers[_TRAINS_S])

    def begin_leaving(self) -> None:
        """Note that the attempt ends; the first call counts."""
        if not self.numbers[_LEAVES_S]:
            if self.numbers[_EVALUATES_S]:
                self.end_evaluation()
            self.numbers[_LEAVES_S] = time.monotonic()

    def begin_anew(self, began_s: float) -> None:
        """Go on as another attempt, whose processes were restored from a dump since `began_s`."""
        times = self.times()
        self.detach()
        numbers, now_s = self.numbers, time.monotonic()
        for index in range(len(numbers)):
            numbers[index] = 0.0
        self._begin(min(began_s, now_s))
        self._restored_bytes, self._staged, self._committed = {}, None, None
        numbers[_BEGUN_STEPS] = numbers[STEPS] = times.reached.steps
        numbers[_BEGUN_MICRO_BATCHES] = numbers[MICRO_BATCHES] = times.reached.micro_batches
        numbers[_RESTORE_S], numbers[_TRAINS_S] = now_s - numbers[_BEGAN_S], now_s

    # ---- commits

    def note_staged(self, cursor: Cursor, boundary_s: float) -> None:
        """Note the boundary of a save. Training thread."""
        numbers = self.numbers
        waits_s = numbers[_SAVE_S] + numbers[_EVALUATION_S]
        training_s = max(boundary_s - numbers[_TRAINS_S] - waits_s, 0.0)
        mark = CommitMark(trained_by(cursor), training_s)
        with self._marks:
            self._staged = mark
            self._mark()

    def note_commit(self, cursor: Cursor) -> None:
        """Note that the snapshot of this place was committed. Saving thread."""
        with self._marks:
            self._committed = trained_by(cursor)
            self._mark()

    def _mark(self) -> None:
        staged, numbers = self._staged, self.numbers
        if staged is not None and staged.at == self._committed:
            numbers[_COMMITTED_STEPS] = staged.at.steps
            numbers[_COMMITTED_MICRO_BATCHES] = staged.at.micro_batches
            numbers[_COMMITTED_S] = staged.training_s + 1.0

    # ---- what it comes to

    def times(self) -> AttemptTimes:
        """Return the times until now. Any thread."""
        times = times_of_page(self.numbers, time.monotonic())
        assert times is not None
        return replace(times, restored_bytes=self._restored_bytes)

    def to_json(self) -> dict[str, Any]:
        """Return the value of `times` for the record. Any thread."""
        return self.times().to_json()


def trained_by(cursor: Cursor | None) -> TrainedCount:
    """Return what was trained at a place of the run; None is its beginning."""
    return TrainedCount(cursor.micro_batches, cursor.step) if cursor else TrainedCount()


def launched_s() -> float:
    """Return the launch of this process on the monotonic clock: the supervisor's, or its own."""
    with contextlib.suppress(ValueError):
        if 0 < (stated_s := float(os.environ.get(LAUNCHED_VARIABLE, ""))) <= time.monotonic():
            return stated_s
    return own_start_s()


def times_of_page(
    numbers: memoryview[float] | list[float], now_s: float | None
) -> AttemptTimes | None:
    """Return what the numbers say, as of `now_s`; None: as of the last moment in them.

    Returns None for numbers of another release, or damaged ones.
    """
    if len(numbers) <= _COMMITTED_S or numbers[_VERSION] != VERSION:
        return None
    if not all(map(math.isfinite, numbers)):
        return None
    began_s = numbers[_BEGAN_S]
    if now_s is None:
        moments = (BOUNDARY_S, _TRAINS_S, _LEAVES_S, _EVALUATES_S, _BEGAN_S)
        now_s = max(numbers[index] for index in moments)

    def offset(index: int) -> float | None:
        return max(numbers[index] - began_s, 0.0) if numbers[index] else None

    evaluates_s = numbers[_EVALUATES_S]
    body: dict[str, Any] = {
        "began": numbers[_BEGAN],
        "seconds": max(now_s - began_s, 0.0),
        "trains_at": offset(_TRAINS_S),
        "leaves_at": offset(_LEAVES_S),
        "restore_s": numbers[_RESTORE_S],
        "save_s": numbers[_SAVE_S],
        "saves": int(numbers[_SAVES]),
        "evaluation_s": numbers[_EVALUATION_S] + (now_s - evaluates_s if evaluates_s else 0.0),
        "begun": _trained(numbers, _BEGUN_MICRO_BATCHES, _BEGUN_STEPS),
        "reached": _trained(numbers, MICRO_BATCHES, STEPS),
    }
    if numbers[_COMMITTED_S]:
        at = _trained(numbers, _COMMITTED_MICRO_BATCHES, _COMMITTED_STEPS)
        body["committed"] = {"at": at, "training_s": numbers[_COMMITTED_S] - 1.0}
    return AttemptTimes.parse(body)


def _trained(
    numbers: memoryview[float] | list[float], micro_batches: int, steps: int
) -> dict[str, int]:
    return {"micro_batches": int(numbers[micro_batches]), "steps": int(numbers[steps])}


# ---- of an attempt that was killed


def times_left(tier: RunTier, record: AttemptRecord) -> AttemptTimes | None:
    """Return the newest that is known of an attempt: from its record, its heartbeat or its page.

    The page is there only on the host of its rank 0. The bytes restored stand in the record alone.
    """
    recorded = AttemptTimes.parse(record.facts.get(TIMES))
    if recorded is not None and recorded.leaves_at is not None:
        return recorded
    found = [recorded, _of_heartbeat(tier, record.attempt)]
    numbers = counter_page.read_page(tier.url, record.attempt)
    if numbers is not None:
        found.append(times_of_page(numbers, None))
    known = [times for times in found if times is not None]
    if not known:
        return None
    newest = max(known, key=lambda times: (times.reached, times.seconds))
    seconds = max(times.seconds for times in known)
    restored = recorded.restored_bytes if recorded is not None else newest.restored_bytes
    return replace(newest, seconds=seconds, restored_bytes=restored)


def _of_heartbeat(tier: RunTier, attempt: int) -> AttemptTimes | None:
    with contextlib.suppress(TrainckptError):
        return AttemptTimes.parse(heartbeat.read(tier, attempt).get(TIMES))
    return None

"""Run a case: launch it, stop it, launch the same command again, until the run is finished.

One attempt, in order:

    before     what the folders hold while nothing runs
    aim        wait for what the stop is to hit
    shoot      note what is there, send the signal, note again
    see off    wait for the end as a launcher does; count who is left
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.campaign import cases
from tests.campaign.launch import Forked, Supervised, Torchrun
from tests.campaign.one_rank import SUPERVISED
from tests.campaign.watch import Scene, Snapshot, loader_workers, place_of

if TYPE_CHECKING:
    from pathlib import Path

    from tests.campaign.cases import Case, Settings, Stop
    from tests.campaign.launch import Server

LIMIT_S = {cases.FORK: 60.0, cases.TORCHRUN: 120.0, SUPERVISED: 150.0}  # longer is a hang
RANK_S = 30.0  # more for each rank above two: they share the processors
START_UP_S = {cases.FORK: 0.5, cases.TORCHRUN: 6.0}  # what launching takes, about
LOOK_S = 0.001
GRACE_S = 0.5  # between a rank's death and that of the others
LINGER_S = 6.0  # processes may outlive their ranks by that
ORDERLY = (0, 75)


@dataclass
class Sight:
    """What was seen at one instant of an attempt."""

    lines: list[int]
    attempt_lines: int
    workers: int
    unfinished: list[Snapshot]


@dataclass
class Ended:
    """One attempt, from nothing running to nothing running.

    Attributes:
        stop: What was to happen to it.
        log: Prefix of its log files.
        before: Trace lines, attempts and committed snapshots when it was launched.
        shot: Sights just before and just after the signal; None if it was never sent.
        codes: Of each rank, or of torchrun alone.
        committed: Snapshots with a manifest, after it.
        unfinished: Snapshot folders without one.
    """

    stop: Stop | None
    before: tuple[list[int], int, list[Snapshot]]
    records_before: int = 0
    shot: tuple[Sight, Sight] | None = None
    codes: list[int | None] = field(default_factory=list)
    hung: bool = False
    left_over: list[int] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    attempt_line: dict | None = None
    record: dict | None = None
    committed: list[Snapshot] = field(default_factory=list)
    unfinished: list[Snapshot] = field(default_factory=list)
    finals: list[str | None] = field(default_factory=list)
    logs: str = ""
    seconds: float = 0.0

    @property
    def outcome(self) -> str | None:
        """ "finished", "stopped" or "failed" in the library's record; None for no word."""
        return ((self.record or {}).get("outcome") or {}).get("outcome")

    @property
    def finished(self) -> bool:
        return None not in self.finals and self.outcome == "finished"


def run_case(case: Case, server: Server, folder: Path) -> list[Ended]:
    """All attempts of a case. The last one has finished, or something is wrong."""
    scene = Scene(folder, case.settings.ranks)
    attempts: list[Ended] = []
    for stop in (*case.stops, None):
        log = folder / f"attempt{len(attempts) + 1}.log"
        ended = attempt_of(case, stop, server, scene, log)
        attempts.append(ended)
        if ended.finished or ended.hung:
            break
    return attempts


def run_reference(settings: Settings, server: Server, folder: Path) -> None:
    """The same run, never stopped; its trace is what every other must equal."""
    case = cases.Case(-1, settings, cases.FORK, ())
    (ended,) = run_case(case, server, folder)
    if not ended.finished or set(ended.codes) != {0}:
        raise RuntimeError(f"the reference did not finish: {settings.words}\n{ended.logs}")


def attempt_of(case: Case, stop: Stop | None, server: Server, scene: Scene, log: Path) -> Ended:
    """Launch, stop and see off one attempt."""
    began = time.monotonic()
    records = scene.records()
    before = (scene.line_counts(), len(scene.attempt_lines()), scene.snapshots(committed=True))
    ended = Ended(stop, before, len(records))
    argv = case.settings.argv(str(scene.run), str(scene.trace))
    attempt = _launched(case, server, argv, log)
    deadline = began + LIMIT_S[case.launcher] + RANK_S * max(0, case.settings.ranks - 3)
    try:
        if stop is not None:
            _Aim(case, stop, attempt, scene, ended, deadline).stop()
        if isinstance(attempt, Supervised):
            attempt.open_gate()
        _see_off(attempt, ended, deadline)
    finally:
        attempt.kill()
    _look_around(scene, ended, records)
    ended.logs = attempt.logs()
    ended.seconds = time.monotonic() - began
    return ended


def _launched(case: Case, server: Server, argv: list[str], log: Path) -> Forked | Torchrun:
    if case.launcher == cases.FORK:
        return Forked(server, case.settings, argv, log)
    kind = Supervised if case.launcher == SUPERVISED else Torchrun
    return kind(case.settings, argv, log)


class _Aim:
    """Waits for what one stop is to hit, and hits it."""

    def __init__(self, case, stop, attempt, scene, ended, deadline) -> None:
        self.settings, self.stop_, self.attempt = case.settings, stop, attempt
        self.scene, self.ended, self.deadline = scene, ended, deadline
        self.launched = time.monotonic()
        self.rank = int(stop.fraction * case.settings.ranks)
        self.by_rank = case.launcher == SUPERVISED
        self.start_up_s = stop.fraction * START_UP_S.get(case.launcher, 0.0)

    def stop(self) -> None:
        due = {
            cases.MICRO_BATCH: self._place_reached,
            cases.SAVE: self._save_begun,
            cases.START_UP: self._rank_started if self.by_rank else self._time_passed,
            cases.WORKERS: self._workers_begun,
        }[self.stop_.when]
        while not due():
            if self._over() or time.monotonic() > self.deadline:
                return
            time.sleep(LOOK_S)
        time.sleep(self.stop_.delay_s)
        if not self._over():
            self._shoot()

    def _shoot(self) -> None:
        if self.by_rank and self.rank not in self.attempt.rank_pids():
            return  # it has ended already
        before = self._sight()
        if self.stop_.signal == cases.SIGKILL:
            self.attempt.kill()
        else:
            try:
                self.attempt.terminate(self.stop_.target, self.rank)
            except ProcessLookupError:
                return  # it has ended meanwhile
        self.ended.shot = before, self._sight()
        if self.stop_.signal == cases.BOTH:
            time.sleep(self.stop_.mercy_s)
            self.attempt.kill()

    def _sight(self) -> Sight:
        known = set(self.ended.before[2])
        unfinished = [s for s in self._new_unfinished() if s not in known]
        lines, attempts = self.scene.line_counts(), len(self.scene.attempt_lines())
        return Sight(lines, attempts, len(self._workers()), unfinished)

    def _over(self) -> bool:
        return None not in self.attempt.codes()

    def _workers(self) -> list[int]:
        return loader_workers(self.attempt, list(self.attempt.rank_pids().values()))

    def _new_unfinished(self) -> list[Snapshot]:
        newest = max((s.attempt for s in self._old), default=0)
        return [s for s in self.scene.snapshots(committed=False) if s.attempt > newest]

    @property
    def _old(self) -> list[Snapshot]:
        return self.ended.before[2]

    def _place_reached(self) -> bool:
        count = self.scene.line_counts()[self.rank]
        if count <= self.ended.before[0][self.rank]:
            return False
        step, micro = place_of(self.scene.lines(self.rank)[count - 1])
        return step * self.settings.accumulate + micro + 1 >= self.stop_.place

    def _save_begun(self) -> bool:
        place = self.stop_.place, 0
        return any(
            (s.step * self.settings.accumulate + s.micro, 0) >= place
            for s in self._new_unfinished()
        )

    def _time_passed(self) -> bool:
        return time.monotonic() >= self.launched + self.start_up_s

    def _rank_started(self) -> bool:
        time.sleep(LOOK_S * 10)  # a look at every process of the machine
        return self.rank in self.attempt.rank_pids()

    def _workers_begun(self) -> bool:
        wanted = 1 + int(self.stop_.fraction * self.settings.ranks * self.settings.workers)
        return len(self._workers()) >= wanted


def _see_off(attempt: Forked | Torchrun, ended: Ended, deadline: float) -> None:
    """Wait for the end; end the others where a rank has died; see who is left."""
    dead_since = None
    while None in (codes := attempt.codes()):
        now = time.monotonic()
        if dead_since is None and any(c not in (None, *ORDERLY) for c in codes):
            dead_since = now
        ended.hung = now > deadline
        if ended.hung or (dead_since is not None and now > dead_since + GRACE_S):
            attempt.kill()
        time.sleep(0.005)
    ended.codes = codes
    until = time.monotonic() + LINGER_S
    while (left := attempt.members()) and time.monotonic() < until:
        time.sleep(0.01)
    ended.left_over = left


def _look_around(scene: Scene, ended: Ended, records: dict[int, dict]) -> None:
    ended.lines = scene.line_counts()
    ended.committed = scene.snapshots(committed=True)
    ended.unfinished = scene.snapshots(committed=False)
    ended.finals = scene.finals()
    attempt_lines = scene.attempt_lines()
    if len(attempt_lines) > ended.before[1]:
        ended.attempt_line = attempt_lines[-1]
    new = [number for number in scene.records() if number not in records]
    with suppress(ValueError):
        ended.record = scene.records()[max(new)]

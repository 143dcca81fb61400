"""Play a case: launch, let the faults happen at their moments, launch again until the run is over.

A case is a pure function of its seed: a room, and one to four shots. A shot waits for its moment in
the attempt that is running. If that ends first, it waits in the next one, so a shot that comes a
moment after a launch often hits the recovery from the one before it.

The driver stands for whoever launches bare ranks: where one has died it ends the others, later
where they save what is left. It launches again until the run has finished, or is refused for good.
"""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from random import Random
from typing import TYPE_CHECKING, Any

from tests.campaign.watch import Scene
from tests.chaos import rooms
from tests.chaos.attempt import PACE_S, Attempt, Places
from tests.chaos.faults import CATALOGUE, HANGS, MOST_S, WEIGHTS
from tests.chaos.rooms import DUMPS, RANKS
from trainckpt.encryption import keys

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.campaign.watch import Snapshot
    from tests.chaos.faults import Fault
    from tests.chaos.rooms import Room
    from tests.chaos.stage import Stage

TRAINS, SAVES, BEGINS, DUMPED = "training", "save", "start", "dump"  # moments
MOST_ATTEMPTS = 12
LIMIT_S, RANK_S = 75.0, 15.0  # longer is a hang; more for each rank
SUPERVISED_S = 60.0  # more for each launch by `trainckpt run`
GRACE_S, SURVIVORS_S = 2.0, 25.0  # from a rank's death to that of the others
LINGER_S = 60.0  # so long may processes take to follow the one that was launched
STILL_S = 1.5  # without a line: the ranks stand at the gate
LOOK_S = 0.003
DUMPS_PACE_S = 0.1  # a micro-batch, where `trainckpt pause` has to come in time
ORDERLY = (0, 75)
STUCK = ("Exception ignored in thread started by", "_resource_sharer.register(")
REFUSALS = (65, 66, 69, 78)


@dataclass(frozen=True)
class Shot:
    """One fault to come.

    Attributes:
        fault: Its name in the catalogue.
        moment: What it waits for: so many micro-batches of the attempt, a save that has begun, a
            while after the launch, or after a dump has begun.
        after: Micro-batches, or hundredths of a second.
        lasts_s: How long, of one that lasts; None: until the attempt ends.
        share: Uniform in [0, 1), for whatever the fault has to choose.
    """

    fault: str
    moment: str
    after: int
    lasts_s: float | None
    share: float


@dataclass(frozen=True)
class Case:
    """What one seed stands for."""

    seed: int
    room: Room
    shots: tuple[Shot, ...]
    restarts: int

    @property
    def words(self) -> str:
        shots = ", ".join(f"{shot.fault} at {shot.moment}" for shot in self.shots)
        return f"{self.room.words}; {shots}"


def draw(seed: int, among: Sequence[str] = (), only: Sequence[str] = ()) -> Case:
    """The case of this seed, in one of these rooms, with these faults alone."""
    random = Random(f"chaos {seed}")
    while True:
        room = rooms.draw(random, list(among))
        possible = [n for n, f in CATALOGUE.items() if f.needs(room) and (not only or n in only)]
        if possible:
            break
    if room.launcher == DUMPS:
        return Case(seed, room, _around_dumps(random, possible), random.choice([0, 2]))
    number = random.choices([1, 2, 3, 4], [3, 4, 2, 1])[0]
    shots = tuple(_shot(random, possible, first=not i) for i in range(number))
    return Case(seed, room, shots, random.choice([0, 2]))


def _shot(random: Random, possible: Sequence[str], *, first: bool) -> Shot:
    moment = random.choices([TRAINS, SAVES, BEGINS], [5, 2, 1 if first else 4])[0]
    after = random.randrange(1, 9) if moment != BEGINS else random.randrange(300)
    lasts_s = random.choice([None, random.uniform(0.1, 3.0)])
    weights = [WEIGHTS.get(CATALOGUE[name].needs, 1) for name in possible]
    fault = random.choices(possible, weights)[0]
    return Shot(fault, moment, after, lasts_s, random.random())


def _around_dumps(random: Random, possible: Sequence[str]) -> tuple[Shot, ...]:
    """One or two dumps. Others meet the dump, the restore, or the training before or after it."""
    shots = list[Shot]()
    for _ in range(random.choice([1, 2])):
        if random.random() < 0.2:
            shots.append(_shot(random, possible, first=not shots))
        shots.append(Shot("dump", TRAINS, random.randrange(1, 9), None, random.random()))
        for moment in (DUMPED, BEGINS):
            if random.random() < 0.5:
                shot = _shot(random, possible, first=False)
                longest = 60 if shot.fault.startswith("CRIU") else 300  # it works for a second
                after = random.randrange(longest if moment == DUMPED else 2 * longest)
                shots.append(replace(shot, moment=moment, after=after))
    return tuple(shots)


@dataclass
class Ended:
    """One attempt, from nothing running to nothing running.

    Attributes:
        before: Trace lines of each rank, and committed snapshots, when it was launched.
        inexact: Those among the snapshots that survivors of dead ranks have saved.
        hits: What happened to it: name, where, and micro-batches trained by then.
        standing: Faults that lasted when it was launched.
    """

    before: tuple[list[int], list[Snapshot]]
    standing: list[str]
    inexact: list[Snapshot] = field(default_factory=list)
    hits: list[tuple[str, str, int]] = field(default_factory=list)
    codes: list[int | None] = field(default_factory=list)
    hung: bool = False
    ended_by_driver: bool = False
    left_over: list[int] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    attempt_lines: list[dict[str, Any]] = field(default_factory=list)
    finals: list[str | None] = field(default_factory=list)
    log: str = ""
    seconds: float = 0.0

    @property
    def faults(self) -> list[str]:
        """All that explains how it ended."""
        return [*self.standing, *(name for name, _, _ in self.hits)]

    @property
    def may_hang(self) -> bool:
        permitted = any(HANGS in CATALOGUE[name].permits for name in self.faults)
        return permitted and any(text in self.log for text in STUCK)

    @property
    def finished(self) -> bool:
        return None not in self.finals and set(self.codes) == {0}


class Play:
    """A case as it runs; what the faults of the catalogue act on."""

    def __init__(self, stage: Stage, case: Case) -> None:
        self.stage, self.case, self.room = stage, case, case.room
        self.places = Places(stage, case.room, case.seed)
        self.scene = Scene(self.places.folder, case.room.ranks)
        self.scene.run = self.places.run
        self.attempt: Attempt | None = None
        self.attempts: list[Ended] = []
        self.shots = list(case.shots)
        self.held: list[int] = []
        self.limited: list[tuple[int, int, tuple[int, int]]] = []
        self.foreign: list[Path] = []
        self.group = ExitStack()
        self.asking: list[subprocess.Popen[bytes]] = []
        self._asked = 0
        self._standing: list[tuple[str, float | None]] = []  # with the time of its end
        self._known = 0
        self._random = Random()
        if case.room.encrypted:
            identity = keys.generate()
            keys.write_identity(self.places.folder / "identity", identity)
            (self.places.folder / "recipient").write_text(identity.recipient)
        self.places.clock.write_text("0")

    # ---- for the catalogue

    def pick(self, among: Sequence[Any]) -> Any:
        return self._random.choice(list(among))

    def pick_share(self) -> float:
        return self._random.random()

    def flip(self) -> bool:
        return self._random.random() < 0.5

    @property
    def has_begun(self) -> bool:
        """Whether the attempt has read the run."""
        return len(self.scene.attempt_lines()) > self._known

    def ask(self, *words: str) -> None:
        """Start a command of the attempt's user, which nobody waits for."""
        command = [sys.executable, "-m", "trainckpt", *words]
        self._asked += 1
        with (self.places.folder / f"asked{self._asked}.log").open("wb") as log:
            options = {"stdout": log, "stderr": log, "stdin": subprocess.DEVNULL}
            process = subprocess.Popen(command, env=self.attempt.environment, **options)
        self.asking.append(process)

    def dumps(self) -> list[Path]:
        """The run's dumps, begun or committed."""
        return sorted(self.places.run.glob("dumps/*"))

    def is_asking(self) -> bool:
        return any(process.poll() is None for process in self.asking)

    def asked(self) -> str:
        """What the newest command has said."""
        return (self.places.folder / f"asked{self._asked}.log").read_text(errors="replace")

    def lose_host(self, number: int) -> None:
        """With its processes and its memory; a new one takes its place at once."""
        ranks = self.attempt.rank_pids()
        lost = [ranks[r] for r in ranks if self.attempt.host_of(r) == number]
        children = [
            c for r in ranks if self.attempt.host_of(r) == number for c in self.attempt.children(r)
        ]
        self.attempt.signal([*lost, *children], 9)
        self.attempt.codes()
        self.stage.farm.lose(number)
        self.stage.farm.boot(number)

    # ---- the run

    def run(self) -> list[Ended]:
        """All attempts; the last one has finished, or nothing can be done any more."""
        try:
            while len(self.attempts) < MOST_ATTEMPTS:
                ended = self._one()
                self.attempts.append(ended)
                if ended.hung and not ended.may_hang:
                    break
                if ended.finished or self._refused_for_good():
                    break
        finally:
            self._settle()
        return self.attempts

    def _refused_for_good(self) -> bool:
        """Whether the same was refused twice, with nothing going on that would explain it."""
        last = self.attempts[-2:]
        return len(last) == 2 and all(
            not e.faults and not e.attempt_lines and set(e.codes) & set(REFUSALS) for e in last
        )

    def _one(self) -> Ended:
        number = len(self.attempts) + 1
        before = self.scene.line_counts(), self.scene.snapshots(committed=True)
        known = self._known = len(self.scene.attempt_lines())
        inexact = [s for s in before[1] if self.scene.is_inexact(s)] if self.room.survivors else []
        ended = Ended(before, [name for name, _ in self._standing], inexact)
        began_s = time.monotonic()
        self.attempt = Attempt(
            self.stage,
            self.room,
            self.places,
            number,
            restarts=self.case.restarts,
            pace_s=DUMPS_PACE_S if self.room.launcher == DUMPS else PACE_S,
        )
        try:
            self._see_through(ended)
        finally:
            self._settle()
            self.attempt.close()
        ended.lines = self.scene.line_counts()
        ended.attempt_lines = self.scene.attempt_lines()[known:]
        ended.finals = self.scene.finals()
        ended.log = self.attempt.log.read_text(errors="replace")
        ended.seconds = time.monotonic() - began_s
        return ended

    def _see_through(self, ended: Ended) -> None:
        """Until nobody runs: shoot, end what lasts, stand for the launcher."""
        limit_s = LIMIT_S + RANK_S * self.room.ranks
        limit_s += SUPERVISED_S * (self.case.restarts + 1) if self.room.launcher != RANKS else 0
        deadline, dead_since = time.monotonic() + limit_s, None
        watch = _Watch(self, ended)
        grace_s = SURVIVORS_S if self.room.survivors else GRACE_S
        while None in (codes := self.attempt.codes()):
            now = time.monotonic()
            self._end_due(now)
            if (
                self.shots
                and dead_since is None
                and watch.is_due(self.shots[0])
                # Without anything to hit yet, it waits until the training stands still.
                and (self._shoot(self.shots[0], ended) or watch.stands_still())
            ):
                self.shots.pop(0)
            is_free = not self.shots and not self.is_asking()
            if is_free and (not self._standing or watch.stands_still()):
                self.attempt.gate.touch()  # what lasts may last until the end of the run
            if any(code not in (None, *ORDERLY) for code in codes):
                dead_since = dead_since or now
            ended.hung = now > deadline
            if ended.hung or (dead_since is not None and now > dead_since + grace_s):
                if ended.hung:
                    ended.codes = codes
                ended.ended_by_driver = True
                self.attempt.kill()
            time.sleep(LOOK_S)
        ended.codes = ended.codes or codes
        self._settle()
        self.attempt.gate.touch()  # ranks may outlive their launcher
        until = time.monotonic() + LINGER_S
        while (left := self.attempt.members()) and time.monotonic() < until:
            time.sleep(0.02)
        ended.left_over = left

    def _shoot(self, shot: Shot, ended: Ended) -> bool:
        """Let its fault begin; return False if there is nothing to hit."""
        fault = CATALOGUE[shot.fault]
        if shot.fault in [name for name, _ in self._standing]:
            return True
        self._random.seed(shot.share)
        trained = max(self.scene.line_counts())
        where = fault.begin(self)
        if not where:
            return False
        ended.hits.append((shot.fault, f"{where}, {shot.moment}", trained))
        if fault.end is not None:
            lasts_s = MOST_S if shot.lasts_s is None and fault.halts else shot.lasts_s
            until = None if lasts_s is None else time.monotonic() + lasts_s
            self._standing.append((shot.fault, until))
        return True

    def _end_due(self, now: float) -> None:
        for name, until in list(self._standing):
            if until is not None and now > until:
                self._over(name, CATALOGUE[name])

    def _settle(self) -> None:
        """Whatever lasts is over, and nobody asks any more."""
        for process in self.asking:
            process.kill()
            process.wait()
        self.asking = []
        for name, _ in list(self._standing):
            self._over(name, CATALOGUE[name])

    def _over(self, name: str, fault: Fault) -> None:
        self._standing = [each for each in self._standing if each[0] != name]
        fault.end(self)


class _Watch:
    """Tells when a shot is due in one attempt."""

    def __init__(self, play: Play, ended: Ended) -> None:
        self._play, self._ended, self._before = play, ended, ended.before
        self._count, self._since = 0, time.monotonic()
        self._old_dumps, self._dump_s = {*play.scene.run.glob("dumps/*")}, None
        self._old = {*ended.before[1], *play.scene.snapshots(committed=False)}

    def is_due(self, shot: Shot) -> bool:
        now_s = time.monotonic()
        if self.stands_still() and not self._play.is_asking():
            return True
        if shot.moment == BEGINS:
            if any(CATALOGUE[name].end is None for name, _, _ in self._ended.hits):
                return False  # that one ends the attempt: this is for the next
            return now_s > self._play.attempt.launched_s + shot.after / 100
        if shot.moment == DUMPED:
            found = [f for f in self._play.scene.run.glob("dumps/*") if f not in self._old_dumps]
            self._dump_s = self._dump_s or (time.monotonic() if found else None)
            return self._dump_s is not None and now_s > self._dump_s + shot.after / 100
        trained = self._trained()
        if shot.moment == TRAINS:
            return trained >= shot.after
        fresh = self._play.scene.snapshots(committed=False)
        return any(snapshot not in self._old for snapshot in fresh)

    def _trained(self) -> int:
        lines = self._play.scene.line_counts()
        trained = min(now - before for now, before in zip(lines, self._before[0], strict=True))
        if trained != self._count:
            self._count, self._since = trained, time.monotonic()
        return trained

    def stands_still(self) -> bool:
        """Whether the ranks have trained, and have stood at one place for a while."""
        return self._trained() > 0 and time.monotonic() > self._since + STILL_S

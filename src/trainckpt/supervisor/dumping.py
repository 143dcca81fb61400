"""Process dumps, from the side of the supervisor of a launch: asked, it chooses, and does it.

Main thread of the supervisor, between two looks at its ranks. While CRIU works nobody else is
looked after; the tree stands still then.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainckpt.errors import TrainckptError
from trainckpt.format.dump import DUMPS, DumpName
from trainckpt.format.names import SNAPSHOTS, SnapshotName
from trainckpt.lifecycle.dump_choice import DUMP, NOTHING, DumpFacts, choose
from trainckpt.lifecycle.told import SUPERVISOR_VARIABLE
from trainckpt.process_dump import criu, dump, tree
from trainckpt.snapshot import attempts
from trainckpt.supervisor import requests
from trainckpt.supervisor.adopted import orphans_come_here
from trainckpt.supervisor.requests import Answer
from trainckpt.tiers.local import LocalTier

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from trainckpt.process_dump.criu import Ability
    from trainckpt.supervisor.adopted import Process
    from trainckpt.supervisor.record import NamedRun
    from trainckpt.supervisor.requests import Request


@dataclass(frozen=True)
class Launch:
    """What can be dumped.

    Attributes:
        process: The tree's root.
        folder: The supervisor's.
        logs: What the tree appends its output to.
        named: Its run.
    """

    process: Process
    folder: Path
    logs: tuple[Path, ...]
    named: NamedRun


class Dumping:
    """Of one launch.

    Attributes:
        taken: The dump that ended it, or None.
    """

    def __init__(self, launch: Launch, ability: Ability, say: Callable[[str], object]) -> None:
        self.taken: DumpName | None = None
        self._launch, self._ability, self._say = launch, ability, say
        self._seen: set[str] = set()

    def look(self) -> bool:
        """Answer a request, if there is one; True if the tree was dumped, and is no more."""
        record = self._launch.named.record
        if record is None:
            return False
        tier = self._launch.named.tier
        request = requests.find(tier, record.attempt, self._seen)
        return request is not None and self._answer(request)

    def _answer(self, request: Request) -> bool:
        begun = time.monotonic()
        tier = self._launch.named.tier
        found = choose(self._facts(request))
        if found.what != DUMP:
            requests.answer(tier, request, Answer(found.what, found.why))
            return False
        self._say(f"dumping the processes: {found.why}")
        requests.answer(tier, request, Answer(found.what, found.why))
        try:
            self._dump(request.reason)
        except TrainckptError as error:
            self._say(f"not dumped: {error.message}")
            requests.answer(tier, request, Answer(NOTHING, found.why, error.message))
            return False
        self._say(f"dumped as {self.taken} within {time.monotonic() - begun:.1f} s")
        return True

    def _facts(self, request: Request) -> DumpFacts:
        pids = tree.processes(self._launch.process.pid)
        return DumpFacts(
            instrumented=False,
            asked=request.dump,
            seconds_left=request.seconds_left,
            dump_s=dump.estimate_s(tree.memory_bytes(pids)),
            why_no_dump=self._why_not(),
        )

    def _why_not(self) -> str:
        if self._ability.why_not:
            return self._ability.why_not
        if not isinstance(self._launch.named.tier, LocalTier):
            return "the run's place is no directory, where dumps lie"
        return ""

    def _dump(self, reason: str) -> None:
        launch, record = self._launch, self._launch.named.record
        tier = launch.named.tier
        assert isinstance(tier, LocalTier)
        assert record is not None
        assert self._ability.program is not None
        order = dump.Order(
            program=self._ability.program,
            version=self._ability.version,
            root=launch.process.pid,
            name=next_name(tier, record.attempt),
            run=attempts.run_id(tier) or "",
            world=int(record.facts.get("world") or 1),
            folder=launch.folder,
            logs=launch.logs,
            reason=reason,
        )
        with orphans_come_here():
            taken = dump.take(tier, order, SUPERVISOR_VARIABLE)
            self.taken, launch.named.dump = taken.name, str(taken.name)
            launch.process.wait()
            left = dump.await_gone(taken)
        if left:
            self._say(f"processes of the dump are still there: {_some(left)}")


def next_name(tier: LocalTier, attempt: int) -> DumpName:
    """The name after all snapshots and dumps of this attempt."""
    names = [SnapshotName.parse(name) for name in tier.list(SNAPSHOTS)]
    dumps = [DumpName.parse(name) for name in tier.list(DUMPS)]
    used = [n.sequence for n in [*names, *dumps] if n is not None and n.attempt == attempt]
    return DumpName(attempt, max(used, default=0) + 1)


def ability_for(wanted: str) -> Ability | None:
    """What this supervisor can do, for "auto", "on" or "off"; None: launch as if it could not."""
    if wanted == "off":
        return None
    found = criu.examine()
    return None if found.why_not and wanted == "auto" else found


def _some(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:5]))

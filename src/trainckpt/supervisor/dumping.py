"""Process dumps, from the side of the supervisor of a launch: asked, it chooses, and does it.

    dump        the processes as they are, at once
    both        the ranks are told to rest at the stop that whoever asked brings about; when all do,
                and time is left, they are dumped there. Else they are told why not, and leave

Main thread of the supervisor, between two looks at its ranks. While CRIU works nobody else is
looked after; the tree stands still then.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import signal
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from trainckpt.errors import SaveFailed, TrainckptError
from trainckpt.lifecycle.deciding.dump_choice import (
    BOTH,
    DUMP,
    NOTHING,
    DumpFacts,
    choose,
    is_too_late,
)
from trainckpt.lifecycle.dumping import rest_told
from trainckpt.lifecycle.dumping.rest_told import RestOrder
from trainckpt.lifecycle.places import place
from trainckpt.lifecycle.run.heartbeat import Heartbeat
from trainckpt.lifecycle.run.told import SUPERVISOR_VARIABLE
from trainckpt.lifecycle.stopping.pace_told import read_paces
from trainckpt.process_dump import criu, dump, gpu_tree, tree
from trainckpt.process_dump.cuda_driver import CudaDriver
from trainckpt.process_dump.gpu_tree import LOCK_WITHIN_S
from trainckpt.process_dump.gpus import GpusLost
from trainckpt.snapshot import attempts
from trainckpt.supervisor import requests, secrecy
from trainckpt.supervisor.adopted import orphans_come_here
from trainckpt.supervisor.processes import send
from trainckpt.supervisor.requests import Answer
from trainckpt.tiers.local import LocalTier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from trainckpt.format.attempt import AttemptRecord
    from trainckpt.format.dump import DumpName
    from trainckpt.lifecycle.dumping.rest_told import Resting
    from trainckpt.lifecycle.run.told import Told
    from trainckpt.process_dump.criu import Ability
    from trainckpt.process_dump.gpu_tree import GpuTree
    from trainckpt.supervisor.adopted import Process
    from trainckpt.supervisor.record import NamedRun
    from trainckpt.tiers.places import Place

REST_WITHIN_S = 600.0  # from the order on, and from the first rank to the last: else they go on
TOGETHER_WITHIN_S = 120.0
LOCK_SHARE = 0.25  # of the time that is left: GPUs that are still busy then are let go on


@dataclass(frozen=True)
class Launch:
    """What can be dumped.

    Attributes:
        process: The tree's root.
        folder: The supervisor's.
        logs: What the tree appends its output to.
        named: Its run, where the command has no Checkpointer, or did not begin it here.
    """

    process: Process
    folder: Path
    logs: tuple[Path, ...]
    named: NamedRun | None


@dataclass(frozen=True)
class Wish:
    """Somebody wants the command to stop.

    Attributes:
        reason: Who.
        seconds_left: Until it will be ended; None: nobody said.
        asked: For a dump.
        host_returns: The host will be there again, for all that is known.
    """

    reason: str
    seconds_left: float | None = None
    asked: bool = False
    host_returns: bool = True


@dataclass(frozen=True)
class _Waiting:
    """For the ranks to rest, since a moment in monotonic seconds."""

    order: RestOrder
    wish: Wish
    record: AttemptRecord
    since_s: float

    def left_s(self) -> float:
        left_s = self.wish.seconds_left
        return math.inf if left_s is None else left_s - (time.monotonic() - self.since_s)


class Dumping:
    """Of one launch.

    Attributes:
        taken: The dump that ended it, or None.
    """

    def __init__(self, launch: Launch, ability: Ability, say: Callable[[str], object]) -> None:
        self.taken: DumpName | None = None
        self._launch, self._ability, self._say = launch, ability, say
        self._seen: set[str] = set()
        self._tier: Place | None = None
        self._attempt = 0
        self._gpus: GpuTree | None = None
        self._recipients: tuple[str, ...] = ()
        self._waiting: _Waiting | None = None
        self._first_rests_s: float | None = None

    def look(self, ranks: Sequence[Told], left_s: float = math.inf) -> bool:
        """Answer a request, if there is one; True if the tree was dumped, and is no more.

        Args:
            ranks: What they told.
            left_s: Until the deadline of a signal.
        """
        self._find(ranks)
        if (tier := self._tier) is None:
            return False
        if self._waiting is not None:
            return self._dump_at_rest(self._waiting, left_s) and self._tell_others(tier)
        request = requests.find(tier, self._attempt, self._seen)
        if request is None:
            return False
        requests.answer(tier, request, Answer(requests.LOOKING, ""))
        wish = Wish(request.reason, request.seconds_left, asked=request.dump)
        answer = partial(requests.answer, tier, request)
        return self._answer(wish, ranks, answer) and self._tell_others(tier)

    def _tell_others(self, tier: Place) -> bool:
        """Whoever asked meanwhile waits for the same dump."""
        while request := requests.find(tier, self._attempt, self._seen):
            requests.answer(tier, request, Answer(DUMP, f"it was dumped as {self.taken}"))
        return True

    def notice(self, wish: Wish, ranks: Sequence[Told]) -> bool:
        """Choose because of a notice that has come to us; True if the tree was dumped.

        What can be told without measuring the tree costs the ranks nothing of their time.
        """
        if ranks and wish.seconds_left is None:
            return False  # there is time for a boundary
        try:
            self._find(ranks)
            if self._tier is None or (ranks and not isinstance(self._tier, LocalTier)):
                return False  # a store would have to answer first, and holds no dumps
            record = attempts.read_attempts(self._tier).get(self._attempt)
            if record is None:
                return False
            found = choose(self._facts(wish, record, ranks))
        except TrainckptError as error:
            self._say(f"{wish.reason}: no dump: {error.message}")
            return False
        if found.what != DUMP:
            self._say(f"{wish.reason}: {found.what}: {found.why}")
            return False
        return self._answer(wish, ranks, lambda _: None)

    def _find(self, ranks: Sequence[Told]) -> None:
        """The attempt, once it is known."""
        named, claimed = self._launch.named, [told for told in ranks if told.attempt is not None]
        if named is not None and named.record is not None:
            self._tier, self._attempt = named.tier, named.record.attempt
        elif claimed and self._tier is None:
            told = min(claimed, key=lambda each: each.rank)
            self._tier, self._attempt = place.open_other_place(told.run), told.attempt or 0

    def _answer(
        self, wish: Wish, ranks: Sequence[Told], answer: Callable[[Answer], object]
    ) -> bool:
        """As `look`; whatever fails, the ranks are looked after, and the stop is theirs."""
        try:
            return self._choose(wish, ranks, answer)
        except (TrainckptError, OSError, ValueError) as error:
            if self.taken is not None:  # committed, whatever came after
                return True
            why = getattr(error, "message", None) or str(error)
            self._say(f"{wish.reason}: no dump: {why}")
            with contextlib.suppress(TrainckptError, OSError):
                answer(Answer(NOTHING, "it could not be looked at", why))
            return False

    def _choose(
        self, wish: Wish, ranks: Sequence[Told], answer: Callable[[Answer], object]
    ) -> bool:
        begun = time.monotonic()
        assert self._tier is not None
        record = attempts.read_attempts(self._tier)[self._attempt]
        with CudaDriver() as driver:  # asked only where there is a GPU
            found = choose(self._measured(self._facts(wish, record, ranks), driver))
            if found.what == BOTH:
                order = RestOrder(secrets.token_hex(8), os.getpid())
                rest_told.give(self._launch.folder, order)
                self._waiting = _Waiting(order, wish, record, begun)
            answer(Answer(found.what, found.why))
            self._say(f"{wish.reason}: {found.what}: {found.why}")
            if found.what != DUMP:
                return False
            why = self._try(wish.reason, record)
            if why:
                answer(Answer(NOTHING, found.why, why))
                return False
        self._say(f"dumped as {self.taken} within {time.monotonic() - begun:.1f} s")
        return True

    def _try(self, reason: str, record: AttemptRecord, resting: Sequence[Resting] = ()) -> str:
        """Why the tree is not dumped, or ""."""
        try:
            self._dump(reason, record, resting)
        except TrainckptError as error:
            self._say(f"not dumped: {error.message}")
            if isinstance(error, GpusLost):
                send(error.pids, signal.SIGKILL)
            return error.message
        return ""

    def _dump_at_rest(self, waiting: _Waiting, left_s: float) -> bool:
        """The snapshot of this boundary is committed. True: so is a dump, and the tree is gone."""
        resting = rest_told.resting(self._launch.folder, waiting.order)
        left_s, begun = min(left_s, waiting.left_s()), time.monotonic()
        if len(resting) != waiting.record.facts.get("world"):
            if why := self._why_no_longer(waiting, resting, left_s):
                self._waiting = self._first_rests_s = None
                self._say(f"not dumped: {why}")
                rest_told.refuse(self._launch.folder, waiting.order, why)
            return False
        self._waiting = self._first_rests_s = None
        if why := self._why_not_at_rest(waiting, resting, left_s):
            rest_told.refuse(self._launch.folder, waiting.order, why)
            return False
        dropped = sum(told.dropped for told in resting)
        lean = f", but for {dropped / 1e6:.1f} MB in {resting[0].snapshot}" if dropped else ""
        self._say(f"dumped as {self.taken} within {time.monotonic() - begun:.1f} s{lean}")
        return True

    def _why_not_at_rest(self, waiting: _Waiting, resting: Sequence[Resting], left_s: float) -> str:
        """Why the tree, all of whose ranks rest, is not dumped, or "". They wait for the answer."""
        try:
            pids = tree.processes(self._launch.process.pid)
            with CudaDriver() as driver:
                why = self._why_not_gpus(pids, None if left_s == math.inf else left_s, driver)
                why = why or is_too_late(self._dump_s(pids), left_s)
                return why or self._try(waiting.wish.reason, waiting.record, resting)
        except (TrainckptError, OSError, ValueError) as error:
            if self.taken is not None:  # committed, whatever came after
                return ""
            return getattr(error, "message", None) or f"it could not be looked at: {error}"

    def _why_no_longer(self, waiting: _Waiting, resting: Sequence[Resting], left_s: float) -> str:
        """Why ranks that rest do not wait for the others any longer, or ""."""
        now_s = time.monotonic()
        if resting and self._first_rests_s is None:
            self._first_rests_s = now_s
        if left_s <= 0:
            return "the time is over"
        if self._first_rests_s is not None and now_s - self._first_rests_s > TOGETHER_WITHIN_S:
            return f"not all ranks rested within {TOGETHER_WITHIN_S:.0f} s of the first"
        if now_s - waiting.since_s > REST_WITHIN_S:
            return f"the ranks did not rest within {REST_WITHIN_S:.0f} s"
        return ""

    def _dump_s(self, pids: list[int]) -> float:
        on_gpus = 0 if self._gpus is None else self._gpus.state.num_bytes
        num_bytes = tree.memory_bytes(pids) + on_gpus
        return dump.estimate_s(num_bytes, encrypts=bool(self._recipients))

    def _facts(self, wish: Wish, record: AttemptRecord, ranks: Sequence[Told]) -> DumpFacts:
        """What is known at once; how large the processes are is not."""
        paces = read_paces(self._launch.folder)
        foreseen = [pace.boundary_s() for pace in paces]
        known = [seconds for seconds in foreseen if seconds is not None]
        hosts = record.facts.get("hosts")
        return DumpFacts(
            instrumented=any(told.attempt is not None for told in ranks),
            asked=wish.asked,
            seconds_left=wish.seconds_left,
            boundary_s=max(known, default=None),
            hosts=len(set(map(str, hosts))) if isinstance(hosts, list) else 1,
            host_returns=wish.host_returns,
            why_no_dump=self._why_not(record),
        )

    def _measured(self, facts: DumpFacts, driver: CudaDriver) -> DumpFacts:
        """The same, with what has to be looked for: GPUs, and how long a dump takes."""
        begun, left_s = time.monotonic(), facts.seconds_left
        pids = tree.processes(self._launch.process.pid)
        why = facts.why_no_dump or self._why_not_gpus(pids, left_s, driver, will_rest=True)
        now = "" if self._gpus is None else self._gpus.why_not_now
        dump_s = self._dump_s(pids)
        if left_s is not None:
            left_s = max(left_s - (time.monotonic() - begun), 0.0)  # GPUs may have taken their time
        return replace(
            facts, dump_s=dump_s, why_no_dump=why, why_not_now=now, seconds_left=left_s
        )  # fmt: skip

    def _why_not(self, record: AttemptRecord) -> str:
        if self._ability.why_not:
            return self._ability.why_not
        if not isinstance(self._tier, LocalTier):
            return "the run's place is no directory, where dumps lie"
        try:
            self._recipients = secrecy.recipients(self._launch.folder, self._tier, record)
        except TrainckptError as error:
            return error.message
        return secrecy.why_exposed(self._tier)

    def _why_not_gpus(
        self, pids: list[int], seconds_left: float | None, driver: CudaDriver, *,
        will_rest: bool = False,
    ) -> str:  # fmt: skip
        limit_s = LOCK_WITHIN_S if seconds_left is None else seconds_left * LOCK_SHARE
        if seconds_left is not None:
            driver.look_within_s = min(limit_s, driver.look_within_s)
        try:
            self._gpus = gpu_tree.of_tree(
                pids, driver, lock_within_s=min(limit_s, LOCK_WITHIN_S), will_rest=will_rest
            )
        except SaveFailed as error:
            return error.message
        return ""

    def _dump(self, reason: str, record: AttemptRecord, resting: Sequence[Resting]) -> None:
        launch, tier = self._launch, self._tier
        assert isinstance(tier, LocalTier)
        assert self._ability.program is not None
        world = record.facts.get("world")
        order = dump.Order(
            program=self._ability.program,
            version=self._ability.version,
            root=launch.process.pid,
            name=dump.next_name(tier, record.attempt),
            run=attempts.run_id(tier) or "",
            world=world if isinstance(world, int) else 1,
            folder=launch.folder,
            logs=launch.logs,
            reason=reason,
            gpus=self._gpus,
            snapshot=next((told.snapshot for told in resting if told.dropped), ""),
            dropped=sum(told.dropped for told in resting),
            recipients=self._recipients,
        )
        with orphans_come_here(), _beating(tier, record.attempt):
            taken = dump.take(tier, order, SUPERVISOR_VARIABLE)
            self.taken = taken.name
            launch.process.wait()
            left = dump.await_gone(taken)
        if left:
            self._say(f"processes of the dump are still there: {_some(left)}")


@contextlib.contextmanager
def _beating(tier: LocalTier, attempt: int) -> Iterator[None]:
    """The attempt is alive, though its own processes stand still."""
    heartbeat = Heartbeat(tier, attempt)
    heartbeat.start()
    try:
        yield
    finally:
        heartbeat.stop(keep=True)


def ability_for(wanted: str) -> Ability | None:
    """What this supervisor can do, for "auto", "on" or "off"; None: launch as if it could not."""
    if wanted == "off":
        return None
    found = criu.examine()
    return None if found.why_not and wanted == "auto" else found


def _some(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:5]))

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

from trainckpt.attempt.heartbeat import Heartbeat
from trainckpt.attempt.rank_status import SUPERVISOR_VARIABLE
from trainckpt.dumping import handshake
from trainckpt.dumping.dump_choice import BOTH, DUMP, NOTHING, DumpFacts, choose, is_too_late
from trainckpt.dumping.handshake import DumpRequest
from trainckpt.errors import SaveFailed, TrainckptError
from trainckpt.launcher import dump_encryption, dump_requests
from trainckpt.launcher.dump_requests import DumpAnswer
from trainckpt.launcher.processes import orphans_come_here, send
from trainckpt.process_dump import criu, dump, gpu_state, process_tree
from trainckpt.process_dump.cuda_driver import CudaDriver
from trainckpt.process_dump.gpu_state import LOCK_WITHIN_S, GpusLost
from trainckpt.run_directory import run_url
from trainckpt.snapshot import attempt_history
from trainckpt.stop.progress_report import read_paces
from trainckpt.storage.local import LocalTier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from trainckpt.attempt.rank_status import RankStatus
    from trainckpt.dumping.handshake import RankQuiesced
    from trainckpt.format.attempt_record import AttemptRecord
    from trainckpt.format.dump import DumpName
    from trainckpt.launcher.processes import Process
    from trainckpt.launcher.record import NamedRun
    from trainckpt.process_dump.criu import Ability
    from trainckpt.process_dump.gpu_state import GpuTree
    from trainckpt.storage.base import Place

REST_WITHIN_S = 600.0  # from the order on, and from the first rank to the last: else they go on
TOGETHER_WITHIN_S = 120.0
LOCK_SHARE = 0.25  # of the time that is left: GPUs that are still busy then are let go on


@dataclass(frozen=True)
class DumpTarget:
    """Processes that can be dumped.

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
class DumpReason:
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

    order: DumpRequest
    wish: DumpReason
    record: AttemptRecord
    since_s: float

    def left_s(self) -> float:
        left_s = self.wish.seconds_left
        return math.inf if left_s is None else left_s - (time.monotonic() - self.since_s)


class Dumping:
    """Dumps of one launch.

    Attributes:
        taken: The dump that ended it, or None.
    """

    def __init__(self, launch: DumpTarget, ability: Ability, say: Callable[[str], object]) -> None:
        self.taken: DumpName | None = None
        self._launch, self._ability, self._say = launch, ability, say
        self._seen: set[str] = set()
        self._tier: Place | None = None
        self._attempt = 0
        self._gpus: GpuTree | None = None
        self._recipients: tuple[str, ...] = ()
        self._waiting: _Waiting | None = None
        self._first_rests_s: float | None = None

    def look(self, ranks: Sequence[RankStatus], left_s: float = math.inf) -> bool:
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
        request = dump_requests.find(tier, self._attempt, self._seen)
        if request is None:
            return False
        dump_requests.answer(tier, request, DumpAnswer(dump_requests.LOOKING, ""))
        dump_reason = DumpReason(request.reason, request.seconds_left, asked=request.dump)
        answer = partial(dump_requests.answer, tier, request)
        return self._answer(dump_reason, ranks, answer) and self._tell_others(tier)

    def _tell_others(self, tier: Place) -> bool:
        """Answer other pending requests with the same dump."""
        while request := dump_requests.find(tier, self._attempt, self._seen):
            dump_requests.answer(tier, request, DumpAnswer(DUMP, f"it was dumped as {self.taken}"))
        return True

    def notice(self, wish: DumpReason, ranks: Sequence[RankStatus]) -> bool:
        """Choose because of a notice that has come to us; True if the tree was dumped.

        What can be told without measuring the tree costs the ranks nothing of their time.
        """
        if ranks and wish.seconds_left is None:
            return False  # there is time for a boundary
        try:
            self._find(ranks)
            if self._tier is None or (ranks and not isinstance(self._tier, LocalTier)):
                return False  # a store would have to answer first, and holds no dumps
            record = attempt_history.read_attempts(self._tier).get(self._attempt)
            if record is None:
                return False
            choice = choose(self._facts(wish, record, ranks))
        except TrainckptError as error:
            self._say(f"{wish.reason}: no dump: {error.message}")
            return False
        if choice.what != DUMP:
            self._say(f"{wish.reason}: {choice.what}: {choice.why}")
            return False
        return self._answer(wish, ranks, lambda _: None)

    def _find(self, ranks: Sequence[RankStatus]) -> None:
        """The attempt, once it is known."""
        named, claimed = self._launch.named, [told for told in ranks if told.attempt is not None]
        if named is not None and named.record is not None:
            self._tier, self._attempt = named.tier, named.record.attempt
        elif claimed and self._tier is None:
            told = min(claimed, key=lambda each: each.rank)
            self._tier, self._attempt = run_url.open_other_place(told.run), told.attempt or 0

    def _answer(
        self, wish: DumpReason, ranks: Sequence[RankStatus], answer: Callable[[DumpAnswer], object]
    ) -> bool:
        """As `look`; whatever fails, the ranks are looked after, and the stop is theirs."""
        try:
            return self._choose(wish, ranks, answer)
        except (TrainckptError, OSError, ValueError) as error:
            if self.taken is not None:  # committed, whatever came after
                return True
            error_text = getattr(error, "message", None) or str(error)
            self._say(f"{wish.reason}: no dump: {error_text}")
            with contextlib.suppress(TrainckptError, OSError):
                answer(DumpAnswer(NOTHING, "it could not be looked at", error_text))
            return False

    def _choose(
        self, wish: DumpReason, ranks: Sequence[RankStatus], answer: Callable[[DumpAnswer], object]
    ) -> bool:
        start = time.monotonic()
        assert self._tier is not None
        record = attempt_history.read_attempts(self._tier)[self._attempt]
        with CudaDriver() as driver:  # asked only where there is a GPU
            choice = choose(self._measured(self._facts(wish, record, ranks), driver))
            if choice.what == BOTH:
                order = DumpRequest(secrets.token_hex(8), os.getpid())
                handshake.give(self._launch.folder, order)
                self._waiting = _Waiting(order, wish, record, start)
            answer(DumpAnswer(choice.what, choice.why))
            self._say(f"{wish.reason}: {choice.what}: {choice.why}")
            if choice.what != DUMP:
                return False
            failure = self._try(wish.reason, record)
            if failure:
                answer(DumpAnswer(NOTHING, choice.why, failure))
                return False
        self._say(f"dumped as {self.taken} within {time.monotonic() - start:.1f} s")
        return True

    def _try(self, reason: str, record: AttemptRecord, resting: Sequence[RankQuiesced] = ()) -> str:
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
        resting = handshake.resting(self._launch.folder, waiting.order)
        left_s, start = min(left_s, waiting.left_s()), time.monotonic()
        if len(resting) != waiting.record.facts.get("world"):
            if reason := self._why_no_longer(waiting, resting, left_s):
                self._waiting = self._first_rests_s = None
                self._say(f"not dumped: {reason}")
                handshake.refuse(self._launch.folder, waiting.order, reason)
            return False
        self._waiting = self._first_rests_s = None
        if reason := self._why_not_at_rest(waiting, resting, left_s):
            handshake.refuse(self._launch.folder, waiting.order, reason)
            return False
        dropped = sum(rank.dropped for rank in resting)
        dropped_text = (
            f", but for {dropped / 1e6:.1f} MB in {resting[0].snapshot}" if dropped else ""
        )
        self._say(f"dumped as {self.taken} within {time.monotonic() - start:.1f} s{dropped_text}")
        return True

    def _why_not_at_rest(
        self, waiting: _Waiting, resting: Sequence[RankQuiesced], left_s: float
    ) -> str:
        """Why the tree, all of whose ranks rest, is not dumped, or "". They wait for the answer."""
        try:
            pids = process_tree.processes(self._launch.process.pid)
            with CudaDriver() as driver:
                reason = self._why_not_gpus(pids, None if left_s == math.inf else left_s, driver)
                reason = reason or is_too_late(self._dump_s(pids), left_s)
                return reason or self._try(waiting.wish.reason, waiting.record, resting)
        except (TrainckptError, OSError, ValueError) as error:
            if self.taken is not None:  # committed, whatever came after
                return ""
            return getattr(error, "message", None) or f"it could not be looked at: {error}"

    def _why_no_longer(
        self, waiting: _Waiting, resting: Sequence[RankQuiesced], left_s: float
    ) -> str:
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
        num_bytes = process_tree.memory_bytes(pids) + on_gpus
        return dump.estimate_s(num_bytes, encrypts=bool(self._recipients))

    def _facts(
        self, wish: DumpReason, record: AttemptRecord, ranks: Sequence[RankStatus]
    ) -> DumpFacts:
        """Return the facts known at once, without the size of the processes."""
        paces = read_paces(self._launch.folder)
        boundaries_s = [pace.boundary_s() for pace in paces]
        known_seconds = [seconds for seconds in boundaries_s if seconds is not None]
        hosts = record.facts.get("hosts")
        return DumpFacts(
            instrumented=any(status.attempt is not None for status in ranks),
            asked=wish.asked,
            seconds_left=wish.seconds_left,
            boundary_s=max(known_seconds, default=None),
            hosts=len(set(map(str, hosts))) if isinstance(hosts, list) else 1,
            host_returns=wish.host_returns,
            why_no_dump=self._why_not(record),
        )

    def _measured(self, facts: DumpFacts, driver: CudaDriver) -> DumpFacts:
        """The same, with what has to be looked for: GPUs, and how long a dump takes."""
        start, left_s = time.monotonic(), facts.seconds_left
        pids = process_tree.processes(self._launch.process.pid)
        why_no_dump = facts.why_no_dump or self._why_not_gpus(pids, left_s, driver, will_rest=True)
        why_not_now = "" if self._gpus is None else self._gpus.why_not_now
        dump_s = self._dump_s(pids)
        if left_s is not None:
            left_s = max(left_s - (time.monotonic() - start), 0.0)  # GPUs may have taken their time
        return replace(
            facts,
            dump_s=dump_s,
            why_no_dump=why_no_dump,
            why_not_now=why_not_now,
            seconds_left=left_s,
        )

    def _why_not(self, record: AttemptRecord) -> str:
        if self._ability.why_not:
            return self._ability.why_not
        if not isinstance(self._tier, LocalTier):
            return "the run's place is no directory, where dumps lie"
        try:
            self._recipients = dump_encryption.recipients(self._launch.folder, self._tier, record)
        except TrainckptError as error:
            return error.message
        return dump_encryption.why_exposed(self._tier)

    def _why_not_gpus(
        self,
        pids: list[int],
        seconds_left: float | None,
        driver: CudaDriver,
        *,
        will_rest: bool = False,
    ) -> str:
        limit_s = LOCK_WITHIN_S if seconds_left is None else seconds_left * LOCK_SHARE
        if seconds_left is not None:
            driver.look_within_s = min(limit_s, driver.look_within_s)
        try:
            self._gpus = gpu_state.of_tree(
                pids, driver, lock_within_s=min(limit_s, LOCK_WITHIN_S), will_rest=will_rest
            )
        except SaveFailed as error:
            return error.message
        return ""

    def _dump(self, reason: str, record: AttemptRecord, resting: Sequence[RankQuiesced]) -> None:
        launch, tier = self._launch, self._tier
        assert isinstance(tier, LocalTier)
        assert self._ability.program is not None
        world = record.facts.get("world")
        order = dump.DumpOrder(
            program=self._ability.program,
            version=self._ability.version,
            root=launch.process.pid,
            name=dump.next_name(tier, record.attempt),
            run=attempt_history.run_id(tier) or "",
            world=world if isinstance(world, int) else 1,
            folder=launch.folder,
            logs=launch.logs,
            reason=reason,
            gpus=self._gpus,
            snapshot=next((quiesced.snapshot for quiesced in resting if quiesced.dropped), ""),
            dropped=sum(quiesced.dropped for quiesced in resting),
            recipients=self._recipients,
        )
        with orphans_come_here(), _beating(tier, record.attempt):
            dump_record = dump.take(tier, order, SUPERVISOR_VARIABLE)
            self.taken = dump_record.name
            launch.process.wait()
            remaining_pids = dump.await_gone(dump_record)
        if remaining_pids:
            self._say(f"processes of the dump are still there: {_some(remaining_pids)}")


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
    """Return the abilities of this supervisor for "auto", "on" or "off"; None: launch without
    dumps.
    """
    if wanted == "off":
        return None
    ability = criu.examine()
    return None if ability.why_not and wanted == "auto" else ability


def _some(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:5]))

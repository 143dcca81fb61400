"""Dump the processes of a launch: on request, or instead of a signal, the supervisor decides.

    dump        the processes as they are, at once
    both        the ranks pause at the stop that the caller requests; when all do, and time is left,
                they are dumped there. Else they get the reason against it, and leave

Main thread of the supervisor, between two reads of its ranks' statuses. While CRIU works the
supervisor does nothing else; the tree stands still then.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import shutil
import signal
import sys
import threading
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainckpt.attempt.heartbeat import Heartbeat, path_of
from trainckpt.attempt.launch import recorded_cwd, recorded_options
from trainckpt.attempt.status_files import SUPERVISOR_VARIABLE, read_paces, read_rank_statuses
from trainckpt.dumping import handshake
from trainckpt.dumping.dump_choice import BOTH, DUMP, NOTHING, DumpFacts, choose, is_too_late
from trainckpt.dumping.handshake import DumpRequest
from trainckpt.encryption.keys import RECIPIENT, must_be_there, parse_recipients, public_bytes
from trainckpt.errors import SaveFailed, TrainckptError
from trainckpt.format import names
from trainckpt.format.dump import DUMPS, DumpName
from trainckpt.launcher.output_relay import OutputRelay
from trainckpt.launcher.processes import orphans_come_here
from trainckpt.preemption.notice_file import MAX_BYTES, parse
from trainckpt.process_dump import criu, dump, gpu_state, no_io_uring, process_tree
from trainckpt.process_dump.cuda_driver import CudaDriver
from trainckpt.process_dump.gpu_state import LOCK_WITHIN_S, GpusLost
from trainckpt.process_dump.process_tree import send
from trainckpt.process_dump.restore import load
from trainckpt.run_directory import run_url
from trainckpt.snapshot import attempt_history
from trainckpt.storage.fs_probe import file_system, is_remote
from trainckpt.storage.local import LocalTier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from trainckpt.attempt.status_files import RankStatus
    from trainckpt.dumping.handshake import RankQuiesced
    from trainckpt.format.attempt_record import AttemptRecord
    from trainckpt.launcher.processes import Process
    from trainckpt.launcher.supervisor_record import NamedRun
    from trainckpt.process_dump.criu import Ability
    from trainckpt.process_dump.gpu_state import GpuTree
    from trainckpt.storage.base import RunTier, Tier


# ---- launch: a command whose processes can be dumped


FILTER = str(Path(no_io_uring.__file__))


@dataclass(frozen=True)
class Dumpable:
    """Facts for a supervisor that may dump its processes."""

    ability: Ability
    say: Callable[[str], object]  # called with lines for people
    keep_io_uring: bool = False  # launch without the filter, and most likely without a dump

    def command(self, command: Sequence[str], cwd: str | None, path: str | None) -> list[str]:
        """Return the command under the filter; unchanged if it cannot start, for its own error.

        `cwd` and `path` are the working directory and PATH of the command.
        """
        program = command[0] if "/" not in command[0] else str(Path(cwd or ".") / command[0])
        if self.keep_io_uring or shutil.which(program, path=path) is None:
            return list(command)
        return [sys.executable, "-I", "-S", FILTER, *command]

    def dumper(
        self, process: Process, folder: Path, logs: OutputRelay | None, named: NamedRun | None
    ) -> Dumper | None:
        """Return the dumper of this launch; None if its output does not go through files."""
        if logs is None:
            return None
        return Dumper(DumpTarget(process, folder, logs.paths, named), self.ability, self.say)


@contextlib.contextmanager
def outputs(
    dumpable: Dumpable | None, folder: Path, output: Any, *, apart: bool = False
) -> Iterator[OutputRelay | None]:
    """Yield the files for the command's output during the block; None: its usual outputs."""
    if dumpable is None or output not in (None, sys.stderr):
        yield None
        return
    logs = OutputRelay(folder, out_to=1 if output is None else 2, apart=apart)
    try:
        with logs.followed():
            yield logs
    finally:
        logs.close()


# ---- encryption: images hold every secret of their processes


def recipients(folder: Path, tier: LocalTier, record: AttemptRecord) -> tuple[str, ...]:
    """Return the recipients of a launch's ranks; of silent ranks, those of the options.

    The recipients of the dump that the attempt was restored from are among them: other options of
    the resume must not bring its secrets into the clear.

    Raises:
        ConfigurationError: an option is unreadable, or the package is missing.
        UnusableSnapshot, TierUnavailable: that dump's record cannot be read.
    """
    cwd = recorded_cwd(record.facts)
    statuses = read_rank_statuses(folder).values()
    claimed = [status for status in statuses if status.attempt is not None]
    texts = tuple(sorted({text for status in claimed for text in status.encrypt_to}))
    if not claimed:
        texts = recorded_options(record.facts).encrypt_to
    parents = list[str]()
    if (parent := DumpName.parse(record.parent or "")) is not None:
        parents = [key.to for key in load(tier, attempt_history.run_id(tier) or "", parent).keys]
        for recipient in parents:
            public_bytes(recipient)
    if texts or parents:
        must_be_there()
    # A file of recipients lies where the command was launched, as the command has it.
    resolved = (text if text.startswith(RECIPIENT) else str(cwd / text) for text in texts)
    return tuple(dict.fromkeys([*parse_recipients(resolved), *parents]))


def why_exposed(tier: LocalTier) -> str:
    """Return the reason against images in the run's place, or "".

    CRIU writes them in the clear, and what was on a network once cannot be called back.
    """
    kind = file_system(tier.root / DUMPS)  # which may be a link, or a mount of its own
    if not is_remote(kind):
        return ""
    return (
        f"the run's place is on {kind}, and images, in the clear at first, would leave this host; "
        "put it on a disk of this host, and name that directory as one of its tiers"
    )


# ---- messages: requests to the supervisor, and its answers
#
#     RUN/notices/<attempt>-<id>.ask      {"reason", "seconds_left", "mode", "dump"}
#     RUN/notices/<attempt>-<id>.answer   {"choice", "why", "error"}
#
# A notice (`.json`) makes the ranks stop at a boundary. A request makes the supervisor choose
# between that and a dump of the processes, and answer; the caller then writes the notice, if that
# is the answer. Unread answers are removed with the attempt's other garbage. The supervisor itself
# writes notices only to ranks without signal handlers.


ASK, ANSWER = ".ask", ".answer"
LOOKING = "looking"  # a first answer: GPUs may take their time until there is a choice


@dataclass(frozen=True)
class DumpCall:
    """One request, read from its key; reason and seconds left as in a notice."""

    key: str
    reason: str
    seconds_left: float | None = None
    dump: bool = False  # a dump was asked for


@dataclass(frozen=True)
class DumpAnswer:
    """The supervisor's choice and its reason; `error` says why a dump failed."""

    choice: str
    why: str
    error: str = ""


def find(tier: Tier, attempt: int, seen: set[str]) -> DumpCall | None:
    """Return the first request to this attempt's supervisor outside `seen`; add it there."""
    with contextlib.suppress(TrainckptError):
        for name in tier.list(names.NOTICES):
            if name.startswith(f"{attempt}-") and name.endswith(ASK) and name not in seen:
                seen.add(name)
                key = f"{names.NOTICES}/{name}"
                # An unreadable file is no request: no process waits for an answer to it.
                with contextlib.suppress(TrainckptError, ValueError, RecursionError):
                    body = json.loads(tier.read(key, max_bytes=MAX_BYTES))
                    notice = parse(body)
                    asks_dump = body.get("dump") is True
                    return DumpCall(key, notice.reason, notice.seconds_left, asks_dump)
    return None


def answer(tier: Tier, request: DumpCall, found: DumpAnswer) -> None:
    """Write the answer to a request, if the run directory permits."""
    body = {"choice": found.choice, "why": found.why, "error": found.error}
    with contextlib.suppress(TrainckptError):
        tier.replace(answer_key(request.key), json.dumps(body).encode())


def write_notice(run: str, attempt: int, reason: str, seconds_left: float | None) -> None:
    """Write a stop notice for an attempt, on a thread: its run directory may be slow, or refuse."""

    def write() -> None:
        left_s = None if seconds_left is None else max(seconds_left, 0.0)
        body = json.dumps({"reason": reason, "seconds_left": left_s})
        key = f"{names.NOTICES}/{attempt}-{secrets.token_hex(8)}.json"
        with contextlib.suppress(TrainckptError):
            run_url.open_tier_at(run).replace(key, body.encode())

    threading.Thread(target=write, name="trainckpt-notice", daemon=True).start()


def answer_key(key: str) -> str:
    """Return the key of the answer to the request at `key`."""
    return key.removesuffix(ASK) + ANSWER


def read_answer(tier: Tier, key: str) -> DumpAnswer | None:
    """Return the answer to the request at `key`, or None."""
    with contextlib.suppress(TrainckptError, ValueError, RecursionError, TypeError):
        body = json.loads(tier.read(answer_key(key), max_bytes=MAX_BYTES))
        return DumpAnswer(*(str(body[part]) for part in ("choice", "why", "error")))
    return None


# ---- the dumper


REST_WITHIN_S = 600.0  # from the request to the last rank's pause: else they go on
TOGETHER_WITHIN_S = 120.0  # from the first rank's pause to the last
LOCK_SHARE = 0.25  # of the time that is left: GPUs that are still busy then go on


@dataclass(frozen=True)
class DumpTarget:
    """Processes that can be dumped."""

    process: Process  # the tree's root
    folder: Path  # the supervisor's
    logs: tuple[Path, ...]  # the tree appends its output to them
    named: NamedRun | None  # its run, if the command has no Checkpointer, or was restored


@dataclass(frozen=True)
class DumpReason:
    """A reason to stop the command."""

    reason: str
    seconds_left: float | None = None  # until the command is ended; None: unknown
    asked: bool = False  # for a dump
    host_returns: bool = True  # the host is expected to be there again


@dataclass(frozen=True)
class _Waiting:
    """The wait for the ranks to pause."""

    request: DumpRequest
    dump_reason: DumpReason
    record: AttemptRecord
    since_s: float  # on the monotonic clock

    def left_s(self) -> float:
        left_s = self.dump_reason.seconds_left
        return math.inf if left_s is None else left_s - (time.monotonic() - self.since_s)


class Dumper:
    """Dumps of one launch.

    Attributes:
        taken: The dump that ended it, or None.
    """

    def __init__(self, launch: DumpTarget, ability: Ability, say: Callable[[str], object]) -> None:
        self.taken: DumpName | None = None
        self._launch, self._ability, self._say = launch, ability, say
        self._seen: set[str] = set()
        self._tier: RunTier | None = None
        self._attempt = 0
        self._gpus: GpuTree | None = None
        self._recipients: tuple[str, ...] = ()
        self._waiting: _Waiting | None = None
        self._first_rests_s: float | None = None

    def look(self, ranks: Sequence[RankStatus], left_s: float = math.inf) -> bool:
        """Answer a request, if there is one; return True if the tree was dumped, and is gone.

        `left_s`: seconds until the deadline of a signal.
        """
        self._find(ranks)
        if (tier := self._tier) is None:
            return False
        if self._waiting is not None:
            return self._dump_at_rest(self._waiting, left_s) and self._tell_others(tier)
        request = find(tier, self._attempt, self._seen)
        if request is None:
            return False
        answer(tier, request, DumpAnswer(LOOKING, ""))
        dump_reason = DumpReason(request.reason, request.seconds_left, asked=request.dump)
        reply = partial(answer, tier, request)
        return self._answer(dump_reason, ranks, reply) and self._tell_others(tier)

    def _tell_others(self, tier: RunTier) -> bool:
        """Answer other pending requests with the same dump."""
        while request := find(tier, self._attempt, self._seen):
            answer(tier, request, DumpAnswer(DUMP, f"it was dumped as {self.taken}"))
        return True

    def notice(self, dump_reason: DumpReason, ranks: Sequence[RankStatus]) -> bool:
        """Choose because of a signal to the supervisor; return True if the tree was dumped.

        The tree is measured only after the facts known without that allow a dump: the ranks' time
        is short.
        """
        if ranks and dump_reason.seconds_left is None:
            return False  # there is time for a boundary
        try:
            self._find(ranks)
            if self._tier is None or (ranks and not isinstance(self._tier, LocalTier)):
                return False  # a store would have to answer first, and holds no dumps
            record = attempt_history.read_attempt(self._tier, self._attempt)
            if record is None:
                return False
            choice = choose(self._facts(dump_reason, record, ranks))
        except TrainckptError as error:
            self._say(f"{dump_reason.reason}: no dump: {error.message}")
            return False
        if choice.what != DUMP:
            self._say(f"{dump_reason.reason}: {choice.what}: {choice.why}")
            return False
        return self._answer(dump_reason, ranks, lambda _: None)

    def _find(self, ranks: Sequence[RankStatus]) -> None:
        """Find the attempt, once it is known."""
        named, claimed = (
            self._launch.named,
            [status for status in ranks if status.attempt is not None],
        )
        if named is not None and named.record is not None:
            self._tier, self._attempt = named.tier, named.record.attempt
        elif claimed and self._tier is None:
            lowest = min(claimed, key=lambda status: status.rank)
            self._tier, self._attempt = run_url.open_tier_at(lowest.run), lowest.attempt or 0

    def _answer(
        self,
        dump_reason: DumpReason,
        ranks: Sequence[RankStatus],
        answer: Callable[[DumpAnswer], object],
    ) -> bool:
        """Answer a request; after any failure the ranks stop by themselves."""
        try:
            return self._choose(dump_reason, ranks, answer)
        except (TrainckptError, OSError, ValueError) as error:
            if self.taken is not None:  # committed, whatever came after
                return True
            error_text = getattr(error, "message", None) or str(error)
            self._say(f"{dump_reason.reason}: no dump: {error_text}")
            with contextlib.suppress(TrainckptError, OSError):
                answer(DumpAnswer(NOTHING, "it could not be looked at", error_text))
            return False

    def _choose(
        self,
        dump_reason: DumpReason,
        ranks: Sequence[RankStatus],
        answer: Callable[[DumpAnswer], object],
    ) -> bool:
        start = time.monotonic()
        assert self._tier is not None
        record = attempt_history.read_attempts(self._tier)[self._attempt]
        with CudaDriver() as driver:  # asked only where there is a GPU
            choice = choose(self._measured(self._facts(dump_reason, record, ranks), driver))
            if choice.what == BOTH:
                request = DumpRequest(secrets.token_hex(8), os.getpid())
                handshake.write_request(self._launch.folder, request)
                self._waiting = _Waiting(request, dump_reason, record, start)
            answer(DumpAnswer(choice.what, choice.why))
            self._say(f"{dump_reason.reason}: {choice.what}: {choice.why}")
            if choice.what != DUMP:
                return False
            failure = self._try(dump_reason.reason, record)
            if failure:
                answer(DumpAnswer(NOTHING, choice.why, failure))
                return False
        self._say(f"dumped as {self.taken} within {time.monotonic() - start:.1f} s")
        return True

    def _try(self, reason: str, record: AttemptRecord, resting: Sequence[RankQuiesced] = ()) -> str:
        """Try a dump; return the reason against it, or ""."""
        try:
            self._dump(reason, record, resting)
        except TrainckptError as error:
            self._say(f"not dumped: {error.message}")
            if isinstance(error, GpusLost):
                send(error.pids, signal.SIGKILL)
            return error.message
        return ""

    def _dump_at_rest(self, waiting: _Waiting, left_s: float) -> bool:
        """Dump the tree at a committed boundary; return True if the tree is dumped and gone."""
        resting = handshake.quiesced_ranks(self._launch.folder, waiting.request)
        left_s, start = min(left_s, waiting.left_s()), time.monotonic()
        if len(resting) != waiting.record.facts.get("world"):
            if reason := self._why_no_longer(waiting, resting, left_s):
                self._waiting = self._first_rests_s = None
                self._say(f"not dumped: {reason}")
                handshake.refuse_request(self._launch.folder, waiting.request, reason)
            return False
        self._waiting = self._first_rests_s = None
        if reason := self._why_not_at_rest(waiting, resting, left_s):
            handshake.refuse_request(self._launch.folder, waiting.request, reason)
            return False
        dropped = sum(rank.dropped for rank in resting)
        but_for = f", but for {dropped / 1e6:.1f} MB in {resting[0].snapshot}" if dropped else ""
        self._say(f"dumped as {self.taken} within {time.monotonic() - start:.1f} s{but_for}")
        return True

    def _why_not_at_rest(
        self, waiting: _Waiting, resting: Sequence[RankQuiesced], left_s: float
    ) -> str:
        """Return the reason against dumping a resting tree, or "". Its ranks wait for it."""
        try:
            pids = process_tree.processes(self._launch.process.pid)
            with CudaDriver() as driver:
                reason = self._why_not_gpus(pids, None if left_s == math.inf else left_s, driver)
                reason = reason or is_too_late(self._dump_s(pids), left_s)
                return reason or self._try(waiting.dump_reason.reason, waiting.record, resting)
        except (TrainckptError, OSError, ValueError) as error:
            if self.taken is not None:  # committed, whatever came after
                return ""
            return getattr(error, "message", None) or f"it could not be looked at: {error}"

    def _why_no_longer(
        self, waiting: _Waiting, resting: Sequence[RankQuiesced], left_s: float
    ) -> str:
        """Return the reason for resting ranks to stop waiting for the others, or ""."""
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
        self, dump_reason: DumpReason, record: AttemptRecord, ranks: Sequence[RankStatus]
    ) -> DumpFacts:
        """Return the facts known at once, without the size of the processes."""
        paces = read_paces(self._launch.folder)
        boundaries_s = [pace.boundary_s() for pace in paces]
        known_seconds = [seconds for seconds in boundaries_s if seconds is not None]
        hosts = record.facts.get("hosts")
        return DumpFacts(
            instrumented=any(status.attempt is not None for status in ranks),
            asked=dump_reason.asked,
            seconds_left=dump_reason.seconds_left,
            boundary_s=max(known_seconds, default=None),
            hosts=len(set(map(str, hosts))) if isinstance(hosts, list) else 1,
            host_returns=dump_reason.host_returns,
            why_no_dump=self._why_not(record),
        )

    def _measured(self, facts: DumpFacts, driver: CudaDriver) -> DumpFacts:
        """Return the facts with the measured ones: GPUs, and the duration of a dump."""
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
            self._recipients = recipients(self._launch.folder, self._tier, record)
        except TrainckptError as error:
            return error.message
        return why_exposed(self._tier)

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
            removed=(path_of(tier, record.attempt),),
        )
        heartbeat = Heartbeat(tier, record.attempt)  # the attempt's own processes stand still
        heartbeat.start()
        try:
            with orphans_come_here():
                dump_record = dump.take(tier, order, SUPERVISOR_VARIABLE)
                self.taken = dump_record.name
                launch.process.wait()
                remaining = dump.await_gone(dump_record)
        finally:
            heartbeat.stop(keep=True)
        if remaining:
            named = ", ".join(map(str, remaining[:5]))
            self._say(f"processes of the dump are still there: {named}")


def ability_for(wanted: str) -> Ability | None:
    """Return the ability to dump for "auto", "on" or "off"; None: launch without dumps."""
    if wanted == "off":
        return None
    ability = criu.examine()
    return None if ability.why_not and wanted == "auto" else ability

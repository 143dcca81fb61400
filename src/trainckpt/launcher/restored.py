"""A dump brought back under a new supervisor: the same processes, as another attempt.

alone      the dump's folder is locked, and no attempt has begun since
examine    all that can be known against it: nothing is touched, so it stays what it is
restore    the tree is a child of this process, and stands; if that fails the dump stays what it is
claim      the attempt that they become, its parent the dump: nobody restores it twice
run        its output goes on to where ours goes
images     are deleted: the processes have gone on from them
watch      as if they had been launched here; what is started again after a failure is the command
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainckpt.attempt import record_log
from trainckpt.attempt.launch import recorded_environment
from trainckpt.attempt.rank_status import REFUSED
from trainckpt.errors import TrainckptError, UnusableSnapshot
from trainckpt.format.attempt_record import FAILED, UNDECIDED
from trainckpt.format.dump import IMAGES
from trainckpt.launcher.dumps import outputs
from trainckpt.launcher.finish_uploads import flush_left
from trainckpt.launcher.monitor import LaunchMonitor
from trainckpt.launcher.outcome import Outcome
from trainckpt.launcher.processes import ReparentedProcess, orphans_come_here
from trainckpt.launcher.record import launch_folder, start_again_code
from trainckpt.launcher.signals import starts_again
from trainckpt.launcher.supervise import RunResult, settle
from trainckpt.preemption.wall_time import SLURM_VARIABLE, process_start_s
from trainckpt.process_dump import restore
from trainckpt.snapshot import attempt_history
from trainckpt.storage.private_files import must_be_private

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from trainckpt.attempt.rank_status import RankStatus
    from trainckpt.format.dump import DumpRecord
    from trainckpt.launcher.dumps import Dumpable
    from trainckpt.launcher.outcome import LaunchHistory
    from trainckpt.launcher.output_relay import OutputRelay
    from trainckpt.launcher.record import NamedRun
    from trainckpt.launcher.signals import Inbox
    from trainckpt.process_dump.restore import RestorableDump
    from trainckpt.storage.local import LocalTier

LISTENS = "listens"  # in the record: the attempt under whose number the ranks look for notices


class AlreadyResumed(UnusableSnapshot):
    """Another process goes on from the dump, or from what came after it."""


@dataclass(frozen=True)
class RestoredDump:
    """A dump to restore and the launch it becomes."""

    tier: LocalTier  # the run's place
    record: DumpRecord  # the dump
    named: NamedRun  # the run, of which nothing is claimed yet
    facts: Mapping[str, Any]  # of the attempt that was dumped
    dumpable: Dumpable  # so that it can be dumped again
    output: Any = None  # as `supervise` has it
    has_agent: bool = True  # the tree's root is torchrun under our agent
    max_restarts: int = 0  # how often the command is started again where it fails
    key: bytes = b""  # of its images, if they are encrypted


def supervise_restored(dumped: RestoredDump, inbox: Inbox) -> RunResult:
    """Bring it back, and look after it to its end. Main thread.

    Args:
        dumped: What is brought back.
        inbox: An entered one.

    Raises:
        AlreadyResumed: another process has resumed from it, or is about to.
        UnusableSnapshot: it could not be restored, or its ranks could not be made whole; the
            attempt says why, and nothing of it runs.
    """
    record, named, folder = dumped.record, dumped.named, Path(dumped.record.folder)
    with contextlib.ExitStack() as closing:
        examined = restore.examined(dumped.tier, record, key=dumped.key)
        with _alone(dumped) as lock, examined as restorable, orphans_come_here():
            logs = closing.enter_context(_outputs(dumped, folder))
            closing.callback(named.close)
            attempt = _bring_back(dumped, restorable, lock)
        with contextlib.suppress(OSError):
            shutil.rmtree(dumped.tier.root / record.name.folder / IMAGES)
        process = ReparentedProcess(record.root)
        launched = LaunchMonitor(
            process,
            folder,
            inbox,
            has_agent=dumped.has_agent,
            ours=LISTENS in dumped.facts,
            named=named,
            dumping=dumped.dumpable.dumping(process, folder, logs, named),
        )
        course = launched.run()
        ranks = launched.told()
    # They know their attempt by the number under which they began.
    ranks = [replace(r, attempt=attempt) if r.attempt is not None else r for r in ranks]
    return _ended(dumped, course, ranks, inbox)


@contextlib.contextmanager
def _alone(dumped: RestoredDump) -> Iterator[int]:
    """While nobody else restores it: the lock, a descriptor. No attempt has begun since the dump.

    CRIU holds it too: it may work on for a while when this process was killed.
    """
    name, folder = dumped.record.name, dumped.tier.root / dumped.record.name.folder
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise restore.RestoreBlocked(f"{name} cannot be restored: {error}") from error
    try:
        with contextlib.suppress(OSError):  # no locks: then whoever claims second is refused
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise AlreadyResumed(f"another process is restoring {name}") from None
        _must_be_newest(dumped)
        yield descriptor
    finally:
        os.close(descriptor)


def _must_be_newest(dumped: RestoredDump) -> int:
    """Return the next attempt's number; refuse if one has begun since the dump."""
    newest, name = max(attempt_history.read_attempts(dumped.tier), default=0), dumped.record.name
    if newest > name.attempt:
        raise AlreadyResumed(f"{name} is not restored: attempt {newest} began meanwhile")
    return max(newest, name.attempt) + 1


@contextlib.contextmanager
def _outputs(dumped: RestoredDump, folder: Path) -> Iterator[OutputRelay | None]:
    """Make the supervisor's folder again, with the files of the processes' output."""
    with contextlib.ExitStack() as stack:
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            must_be_private(folder)
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            # Both: how many they had was told by the outputs of whoever launched them.
            logs = stack.enter_context(outputs(dumped.dumpable, folder, dumped.output, apart=True))
        except OSError as error:
            message = f"{dumped.record.name} cannot be restored: {error}"
            raise restore.RestoreBlocked(message) from error
        yield logs


def _claim(dumped: RestoredDump) -> int:
    """Claim the attempt it becomes; refuse if another one has begun since the dump."""
    record, named_run = dumped.record, dumped.named
    claimed = named_run.claim_from(str(record.name), dumped.facts)
    if claimed is None:
        raise restore.RestoreBlocked(
            f"{record.name}: no attempt can be claimed: {named_run.problem}"
        )
    skipped_attempts = range(record.name.attempt + 1, claimed.attempt)
    if later_attempts := [
        attempt
        for attempt in attempt_history.read_attempts(dumped.tier)
        if attempt in skipped_attempts
    ]:
        named_run.record = claimed.with_(
            parent=UNDECIDED
        )  # the other's snapshots stay on the ancestry
        message = f"{record.name} is not restored: attempt {later_attempts[0]} began meanwhile"
        named_run.end((), Outcome(AlreadyResumed.exit_code, FAILED, message))
        raise AlreadyResumed(message)
    return claimed.attempt


def _bring_back(dumped: RestoredDump, whole: RestorableDump, lock: int) -> int:
    """Restore the processes, and return their attempt; their images are not needed any more."""
    name, named_run = dumped.record.name, dumped.named
    claimed = list[int]()

    def claim() -> Mapping[str, str]:
        try:
            claimed.append(_claim(dumped))
        except OSError as error:
            message = f"{name} could not be restored: no attempt could be claimed: {error}"
            raise UnusableSnapshot(message) from error
        ends = os.environ.get(SLURM_VARIABLE)
        return record_log.files(claimed[0], process_start_s(), ends)

    try:
        whole.bring_back(_must_be_newest(dumped), claim, [lock], dumped.dumpable.say)
    except AlreadyResumed:
        raise
    except TrainckptError as error:
        if named_run.record is None:
            _must_be_newest(dumped)
        else:  # the attempt says so too
            named_run.end((), Outcome(error.exit_code, FAILED, error.message))
        raise
    record_log.announce_all_run(Path(dumped.record.folder))
    dumped.dumpable.say(f"restored {name} as attempt {claimed[0]}")
    return claimed[0]


def _ended(
    dumped: RestoredDump, course: LaunchHistory, ranks: Sequence[RankStatus], inbox: Inbox
) -> RunResult:
    """Judge how it ended."""
    variables = {**recorded_environment(dumped.facts), **os.environ}
    code = start_again_code(variables, launch_folder(dumped.facts))
    course = replace(course, start_again=code)
    verdict, record, _, was_signalled = settle(course, ranks, inbox, dumped.named)
    if any(status.how == REFUSED for status in ranks):
        raise UnusableSnapshot(f"{dumped.record.name} was restored, but {verdict.why}")
    is_restarting = starts_again(verdict, done=0, most=dumped.max_restarts, signalled=was_signalled)
    if record is not None and not is_restarting:
        say, url = dumped.dumpable.say, dumped.tier.url
        record = flush_left(record, ranks, inbox=inbox, variables=os.environ, say=say, run=url)
    return RunResult(verdict.exit_code, record, 0, verdict.why, is_restarting, start_again=code)

"""Restore a dump under a new supervisor: the same processes, as another attempt.

lock       the dump's folder, if no attempt has begun since
examine    all obstacles that can be known, while nothing is changed
restore    the tree is a child of this process, and stands; after a failure the dump stays usable
claim      the new attempt, its parent the dump: it cannot be restored twice
run        its output goes to this process's output
images     are deleted: the processes have gone on from them
watch      as if it had been launched here; after a failure the command is started again
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainckpt.attempt import status_files
from trainckpt.attempt.launch import recorded_cwd, recorded_environment
from trainckpt.attempt.status_files import REFUSED
from trainckpt.errors import TrainckptError, UnusableSnapshot
from trainckpt.format.attempt_record import FAILED, UNDECIDED
from trainckpt.format.dump import IMAGES
from trainckpt.launcher.dumper import outputs
from trainckpt.launcher.finish_uploads import flush_left
from trainckpt.launcher.monitor import LaunchMonitor
from trainckpt.launcher.outcome import Outcome, start_again_code
from trainckpt.launcher.processes import ReparentedProcess, orphans_come_here
from trainckpt.launcher.supervise import RunResult, classify_and_record
from trainckpt.launcher.supervisor_signals import starts_again
from trainckpt.preemption.wall_time import SLURM_VARIABLE, process_start_s
from trainckpt.process_dump import restore
from trainckpt.snapshot import attempt_history
from trainckpt.storage.private_files import must_be_private

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from trainckpt.attempt.status_files import RankStatus
    from trainckpt.format.dump import DumpRecord
    from trainckpt.launcher.dumper import Dumpable
    from trainckpt.launcher.outcome import LaunchHistory
    from trainckpt.launcher.output_relay import OutputRelay
    from trainckpt.launcher.supervisor_record import NamedRun
    from trainckpt.launcher.supervisor_signals import Inbox
    from trainckpt.process_dump.restore import RestorableDump
    from trainckpt.storage.local import LocalTier

LISTENS = "listens"  # in the record: the attempt under whose number the ranks look for notices


class AlreadyResumed(UnusableSnapshot):
    """Another process goes on from the dump, or from what came after it."""


class StoppedBefore(TrainckptError):
    """A signal came before the processes ran; the dump stays as it is."""


@dataclass(frozen=True)
class RestoredDump:
    """A dump to restore and the launch it becomes."""

    tier: LocalTier  # the run directory
    record: DumpRecord
    named: NamedRun  # the run, without an attempt yet
    facts: Mapping[str, Any]  # of the attempt that was dumped
    dumpable: Dumpable  # so that it can be dumped again
    output: Any = None  # as for `supervise`
    has_agent: bool = True  # the tree's root is torchrun under our agent
    max_restarts: int = 0
    key: bytes = b""  # of encrypted images


def supervise_restored(dumped: RestoredDump, inbox: Inbox) -> RunResult:
    """Restore a dump, and supervise it to its end. Main thread; `inbox` is entered.

    Raises:
        AlreadyResumed: another process has resumed from it, or is about to.
        StoppedBefore: a signal came before any of it ran.
        UnusableSnapshot: it could not be restored, or its ranks could not be made whole; the
            attempt has the reason, and nothing of it runs.
    """
    record, named, folder = dumped.record, dumped.named, Path(dumped.record.folder)
    with contextlib.ExitStack() as closing:
        examined = restore.examined(dumped.tier, record, key=dumped.key)
        with _alone(dumped) as lock, examined as restorable, orphans_come_here():
            logs = closing.enter_context(_outputs(dumped, folder))
            closing.callback(named.close)
            attempt = _bring_back(dumped, restorable, lock, inbox)
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
            dumper=dumped.dumpable.dumper(process, folder, logs, named),
        )
        history = launched.run()
        ranks = launched.statuses()
    # The ranks report the attempt that they began as.
    ranks = [replace(r, attempt=attempt) if r.attempt is not None else r for r in ranks]
    return _ended(dumped, history, ranks, inbox)


@contextlib.contextmanager
def _alone(dumped: RestoredDump) -> Iterator[int]:
    """Yield a lock on the dump, a descriptor; refuse if an attempt has begun since the dump.

    CRIU inherits the lock: it may work on for a while after this process is killed.
    """
    name, folder = dumped.record.name, dumped.tier.root / dumped.record.name.folder
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise restore.RestoreBlocked(f"{name} cannot be restored: {error}") from error
    try:
        with contextlib.suppress(OSError):  # no locks: then the second claim is refused
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
    newest, name = attempt_history.newest(dumped.tier), dumped.record.name
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
            # Both files: how many the processes had, followed from the launcher's outputs.
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
    attempts = attempt_history.numbers(dumped.tier)
    if later := [n for n in sorted(attempts) if record.name.attempt < n < claimed.attempt]:
        named_run.record = claimed.with_(parent=UNDECIDED)  # keeps the other's snapshots reachable
        message = f"{record.name} is not restored: attempt {later[0]} began meanwhile"
        named_run.end((), Outcome(AlreadyResumed.exit_code, FAILED, message))
        raise AlreadyResumed(message)
    return claimed.attempt


def _must_go_on(dumped: RestoredDump, inbox: Inbox) -> None:
    """Refuse once a signal has come: it may end the processes, and a claim uses up the dump."""
    if inbox.signalled:
        name = dumped.record.name
        raise StoppedBefore(f"{inbox.first}: {name} is not restored, and stays as it is")


def _bring_back(dumped: RestoredDump, whole: RestorableDump, lock: int, inbox: Inbox) -> int:
    """Restore the processes, and return their attempt."""
    name, named_run = dumped.record.name, dumped.named
    claimed = list[int]()

    def claim() -> Mapping[str, str]:
        _must_go_on(dumped, inbox)
        try:
            claimed.append(_claim(dumped))
        except OSError as error:
            message = f"{name} could not be restored: no attempt could be claimed: {error}"
            raise UnusableSnapshot(message) from error
        ends = os.environ.get(SLURM_VARIABLE)
        return status_files.restore_files(claimed[0], process_start_s(), ends)

    _must_go_on(dumped, inbox)
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
    status_files.announce_all_run(Path(dumped.record.folder))
    dumped.dumpable.say(f"restored {name} as attempt {claimed[0]}")
    return claimed[0]


def _ended(
    dumped: RestoredDump, history: LaunchHistory, ranks: Sequence[RankStatus], inbox: Inbox
) -> RunResult:
    variables = {**recorded_environment(dumped.facts), **os.environ}
    code = start_again_code(variables, recorded_cwd(dumped.facts))
    history = replace(history, start_again=code)
    outcome, record, _, was_signalled = classify_and_record(history, ranks, inbox, dumped.named)
    if any(status.how == REFUSED for status in ranks):
        raise UnusableSnapshot(f"{dumped.record.name} was restored, but {outcome.why}")
    is_restarting = starts_again(outcome, done=0, most=dumped.max_restarts, signalled=was_signalled)
    if record is not None and not is_restarting:
        say, url = dumped.dumpable.say, dumped.tier.url
        record = flush_left(record, ranks, inbox=inbox, variables=os.environ, say=say, run=url)
    return RunResult(outcome.exit_code, record, 0, outcome.why, is_restarting, start_again=code)

"""A dump brought back under a new supervisor: the same processes, as another attempt.

alone      the dump's folder is locked, and no attempt has begun since
examine    all that can be known against it: nothing is touched, so it stays what it is
restore    the tree is a child of this process, and stands; if that fails the dump stays what it is
claim      the attempt that they become, its parent the dump, told to all tiers that hold a copy:
           nobody restores it twice
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

from trainckpt.errors import TrainckptError, UnusableSnapshot
from trainckpt.format.attempt import FAILED, UNDECIDED
from trainckpt.format.dump import IMAGES
from trainckpt.lifecycle.places.slower import TIERS
from trainckpt.lifecycle.run import attempt_number
from trainckpt.lifecycle.run.launch import recorded_environment
from trainckpt.lifecycle.run.told import REFUSED
from trainckpt.preemption.wall_time import SLURM_VARIABLE, process_start_s
from trainckpt.process_dump import restore
from trainckpt.snapshot import attempts
from trainckpt.supervisor import recorded_options
from trainckpt.supervisor.adopted import Adopted, orphans_come_here
from trainckpt.supervisor.dumpable import outputs
from trainckpt.supervisor.flush_left import flush_left
from trainckpt.supervisor.launched import Launched
from trainckpt.supervisor.left_dump import tell_who_goes_on
from trainckpt.supervisor.orders import starts_again
from trainckpt.supervisor.supervise import Ended, settle
from trainckpt.supervisor.verdict import Verdict
from trainckpt.tiers.private import must_be_private

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from trainckpt.format.dump import DumpRecord
    from trainckpt.lifecycle.run.told import Told
    from trainckpt.process_dump.restore import Whole
    from trainckpt.supervisor.dumpable import Dumpable
    from trainckpt.supervisor.held import HeldMemory
    from trainckpt.supervisor.logs import Logs
    from trainckpt.supervisor.record import NamedRun
    from trainckpt.supervisor.signals import Inbox
    from trainckpt.supervisor.verdict import Course
    from trainckpt.tiers.local import LocalTier

LISTENS = "listens"  # in the record: the attempt under whose number the ranks look for notices


class GoesOn(UnusableSnapshot):
    """Another process goes on from the dump, or from what came after it."""


@dataclass(frozen=True)
class Dumped:
    """What is brought back, and as what.

    Attributes:
        tier: The run's place.
        record: The dump.
        named: The run, of which nothing is claimed yet.
        facts: Of the attempt that was dumped.
        dumpable: So that it can be dumped again.
        output: As `supervise` has it.
        has_agent: The tree's root is torchrun under our agent.
        max_restarts: How often the command is started again where it fails.
        key: Of its images, if they are encrypted.
    """

    tier: LocalTier
    record: DumpRecord
    named: NamedRun
    facts: Mapping[str, Any]
    dumpable: Dumpable
    output: Any = None
    has_agent: bool = True
    max_restarts: int = 0
    key: bytes = b""


def supervise_restored(dumped: Dumped, inbox: Inbox, memory: HeldMemory) -> Ended:
    """Bring it back, and look after it to its end. Main thread.

    Args:
        dumped: What is brought back.
        inbox: An entered one.
        memory: Where its ranks' is held: also for what is started again after it.

    Raises:
        NotNow: it cannot be restored, and may be once what is against it is no more.
        GoesOn: another process has gone on from it, or is about to.
        UnusableSnapshot: it could not be restored, or its ranks could not be made whole; the
            attempt says why, and nothing of it runs.
    """
    record, named, folder = dumped.record, dumped.named, Path(dumped.record.folder)
    with contextlib.ExitStack() as closing:
        examined = restore.examined(dumped.tier, record, key=dumped.key)
        with _alone(dumped) as lock, examined as whole, orphans_come_here():
            logs = closing.enter_context(_outputs(dumped, folder))
            closing.enter_context(memory.serving(folder))
            closing.callback(named.close)
            attempt = _bring_back(dumped, whole, lock)
        with contextlib.suppress(OSError):
            shutil.rmtree(dumped.tier.root / record.name.folder / IMAGES)
        process = Adopted(record.root)
        launched = Launched(
            process, folder, inbox,
            has_agent=dumped.has_agent, ours=LISTENS in dumped.facts, named=named,
            dumping=dumped.dumpable.dumping(process, folder, logs, named),
        )  # fmt: skip
        course = launched.run()
        ranks = launched.told()
    # They know their attempt by the number under which they began.
    ranks = [replace(r, attempt=attempt) if r.attempt is not None else r for r in ranks]
    return _ended(dumped, course, ranks, inbox)


@contextlib.contextmanager
def _alone(dumped: Dumped) -> Iterator[int]:
    """While nobody else restores it: the lock, a descriptor. No attempt has begun since the dump.

    CRIU holds it too: it may work on for a while when this process was killed.
    """
    name, folder = dumped.record.name, dumped.tier.root / dumped.record.name.folder
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise restore.NotNow(f"{name} cannot be restored: {error}") from error
    try:
        with contextlib.suppress(OSError):  # no locks: then whoever claims second is refused
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise GoesOn(f"another process is restoring {name}") from None
        _must_be_newest(dumped)
        yield descriptor
    finally:
        os.close(descriptor)


def _must_be_newest(dumped: Dumped) -> int:
    """The number of the attempt that comes next; refused where one has begun since the dump."""
    newest, name = max(attempts.read_attempts(dumped.tier), default=0), dumped.record.name
    if newest > name.attempt:
        raise GoesOn(f"{name} is not restored: attempt {newest} began meanwhile")
    return max(newest, name.attempt) + 1


@contextlib.contextmanager
def _outputs(dumped: Dumped, folder: Path) -> Iterator[Logs | None]:
    """The supervisor's folder again, and in it the files that the processes print to."""
    with contextlib.ExitStack() as stack:
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            must_be_private(folder)
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            # Both: how many they had was told by the outputs of whoever launched them.
            logs = stack.enter_context(outputs(dumped.dumpable, folder, dumped.output, apart=True))
        except OSError as error:
            why = f"{dumped.record.name} cannot be restored: {error}"
            raise restore.NotNow(why) from error
        yield logs


def _claim(dumped: Dumped) -> int:
    """The attempt that it becomes; refused where another one has begun since the dump."""
    record, named = dumped.record, dumped.named
    claimed = named.claim_from(str(record.name), dumped.facts)
    if claimed is None:
        raise restore.NotNow(f"{record.name}: no attempt can be claimed: {named.problem}")
    between = range(record.name.attempt + 1, claimed.attempt)
    if others := [each for each in attempts.read_attempts(dumped.tier) if each in between]:
        named.record = claimed.with_(parent=UNDECIDED)  # the other's snapshots stay on the ancestry
        why = f"{record.name} is not restored: attempt {others[0]} began meanwhile"
        named.end((), Verdict(GoesOn.exit_code, FAILED, why))
        raise GoesOn(why)
    if TIERS in dumped.facts:
        tell_who_goes_on(dumped.tier, record.name, dumped.dumpable.say)
    return claimed.attempt


def _bring_back(dumped: Dumped, whole: Whole, lock: int) -> int:
    """The processes run again, as which attempt, and need their images no more."""
    name, named = dumped.record.name, dumped.named
    claimed = list[int]()

    def claim() -> Mapping[str, str]:
        try:
            claimed.append(_claim(dumped))
        except OSError as error:
            why = f"{name} could not be restored: no attempt could be claimed: {error}"
            raise UnusableSnapshot(why) from error
        ends = os.environ.get(SLURM_VARIABLE)
        return attempt_number.spell(claimed[0], process_start_s(), ends)

    try:
        whole.bring_back(_must_be_newest(dumped), claim, [lock], dumped.dumpable.say)
    except GoesOn:
        raise
    except TrainckptError as error:
        if named.record is None:
            _must_be_newest(dumped)
        else:  # the attempt says so too
            named.end((), Verdict(error.exit_code, FAILED, error.message))
        raise
    attempt_number.all_run(Path(dumped.record.folder))
    dumped.dumpable.say(f"restored {name} as attempt {claimed[0]}")
    return claimed[0]


def _ended(dumped: Dumped, course: Course, ranks: Sequence[Told], inbox: Inbox) -> Ended:
    """Judge how it ended."""
    variables = {**recorded_environment(dumped.facts), **os.environ}
    code = recorded_options.start_again(variables, recorded_options.folder(dumped.facts))
    course = replace(course, start_again=code)
    verdict, found, _, asked = settle(course, ranks, inbox, dumped.named)
    if any(told.how == REFUSED for told in ranks):
        raise UnusableSnapshot(f"{dumped.record.name} was brought back, but {verdict.why}")
    again = starts_again(verdict, done=0, most=dumped.max_restarts, signalled=asked)
    if found is not None and not again:
        say, url = dumped.dumpable.say, dumped.tier.url
        found = flush_left(found, ranks, inbox, os.environ, say, url)
    return Ended(verdict.exit_code, found, 0, verdict.why, again, start_again=code)

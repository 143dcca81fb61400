"""Flush what is left: `python -m trainckpt.supervisor.flush_left RUN ATTEMPT`, after the ranks.

An attempt that was killed, or had no time, leaves its newest snapshot in the run's place alone, or
in this host's memory; one that was dumped leaves the dump there. Whoever started it copies that on,
in a process of its own, before it returns:

    when      the attempt is over, and no other is started here: that one would do it itself
    what else a snapshot in memory that the supervisor holds, which ends with it (`held`)
    who       the supervisor on the host of rank 0
    how long  until the grace is over that the stop's signal began; else until it is done. A further
              signal ends it
    said      why, what, for how long, and what became of it, a line at a time

What is not done then, the next attempt does. Nothing half-copied is ever taken for a copy.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trainckpt.errors import TrainckptError
from trainckpt.format.dump import DumpName
from trainckpt.format.names import SnapshotName
from trainckpt.lifecycle.deciding.stop_tier import MEMORY
from trainckpt.lifecycle.places import place
from trainckpt.lifecycle.places.place import PROVE_VARIABLE
from trainckpt.lifecycle.places.slower import COMMITS, TIERS
from trainckpt.lifecycle.run.options import LOCAL
from trainckpt.snapshot import attempts
from trainckpt.supervisor import recorded_options
from trainckpt.tiers import kept
from trainckpt.tiers.memory import MemoryPlace

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from trainckpt.format.attempt import AttemptRecord
    from trainckpt.lifecycle.run.told import Told
    from trainckpt.supervisor.signals import Inbox

LOOK_S = 0.2
LEAVE_S = 2.0  # before the grace is over
SAID = "flush: "  # what the process says for people begins so; all else is a library's
LONGEST_SAID = 500
NOT_ALL = 3  # its exit code where something could not be copied; 1 is the interpreter's own


@dataclass(frozen=True)
class Left:
    """What an attempt has left to do.

    Attributes:
        snapshot: Its newest, full name.
        tiers: Names of those that lack it, `LOCAL` among them if it is in memory alone.
        why: How the attempt ended.
        dump: The dump that it ended with, which those tiers lack too, or "".
    """

    snapshot: str
    tiers: tuple[str, ...]
    why: str
    dump: str = ""

    @property
    def names(self) -> str:
        """What is to be copied, for people."""
        return " and ".join(name for name in (self.snapshot, self.dump) if name)


def held_of(run: str, record: AttemptRecord) -> SnapshotName | None:
    """The attempt's newest snapshot in memory that no file system holds, if nothing is newer."""
    memory = MemoryPlace.found(run)
    if memory is None or not memory.taken.memfd:
        return None
    folders = [each for each in memory.folders() if kept.MANIFEST in kept.files(memory, each)]
    names = [SnapshotName.parse(folder.rpartition("/")[2]) for folder in folders]
    committed = SnapshotName.parse(record.newest_commit or "")
    return max((name for name in names if name is not None and name.attempt == record.attempt
                and (committed is None or name > committed)), default=None)  # fmt: skip


def left_by(record: AttemptRecord | None, in_memory: SnapshotName | None = None) -> Left | None:
    """What the attempt has left, as its record says; None: nothing. Pure.

    `in_memory`: its newest snapshot, if it ends with this process.
    """
    if record is None:
        return None
    outcome = record.outcome or {}
    named = [each for each in (outcome.get("snapshot"), record.newest_commit) if each]
    newest = next((each for each in named if SnapshotName.parse(each)), "")  # a dump is none
    name = SnapshotName.parse(newest)
    if name is not None and name.attempt != record.attempt:
        name = None
    if in_memory is not None:
        name, newest = in_memory, str(in_memory)
    dump = DumpName.parse(str(outcome.get("snapshot")))
    if dump is not None and dump.attempt != record.attempt:  # it began from that one
        dump = None
    told, commits = record.facts.get(TIERS), record.facts.get(COMMITS)
    there = commits if isinstance(commits, dict) else {}
    held = outcome.get("tiers") or ()
    names = [t.get("name") for t in told if isinstance(t, dict)] if isinstance(told, list) else []
    lacking = [
        n for n in names
        if isinstance(n, str)
        and ((name is not None and there.get(n) != newest) or (dump is not None and n not in held))
    ]  # fmt: skip
    if in_memory is not None or (MEMORY in held and name is not None):
        lacking.insert(0, LOCAL)
    why = f"{outcome.get('outcome') or 'over'} by {outcome.get('reason') or 'nobody knows what'}"
    if not lacking:
        return None
    words = tuple(str(each) if each is not None else "" for each in (name, dump))
    return Left(words[0], tuple(lacking), why[:LONGEST_SAID], words[1])


def flush_left(
    record: AttemptRecord | None,
    ranks: Sequence[Told],
    inbox: Inbox,
    variables: Mapping[str, str],
    say: Callable[[str], object] | None = None,
    run: str | None = None,
) -> AttemptRecord | None:
    """Copy it, if there is anything to copy, and return the record as it is then. Main thread.

    Args:
        record: Of the attempt that is over.
        ranks: What its ranks on this host told.
        inbox: An entered one.
        variables: The environment of the command.
        say: Told what is done.
        run: Its place, where no rank has told.
    """
    run = next((told.run for told in ranks if told.rank == 0 and told.run), run)
    if run is None or record is None or PROVE_VARIABLE in variables:
        return record
    left = left_by(record, held_of(run, record))
    if left is None:
        return record
    say = say or _nothing
    limit_s = _limit_s(ranks, inbox)
    tiers = ", ".join(left.tiers)
    if limit_s is not None and limit_s <= 0:
        say(f"attempt {record.attempt} {left.why}: no time is left to copy {left.names}, which "
            f"{tiers} lack{'s' if len(left.tiers) == 1 else ''}")  # fmt: skip
        say(_not_all(record, held_of(run, record)))
        return record
    within = "" if limit_s is None else f"within {limit_s:.0f} s, "
    say(
        f"attempt {record.attempt} {left.why}: copying {left.names}, which {tiers} "
        f"lack{'s' if len(left.tiers) == 1 else ''}; {within}a further signal ends that"
    )
    code = -1
    with suppress(OSError):
        code = _attend(_started(run, record, variables), inbox, limit_s, say)
    with suppress(TrainckptError):  # some of it may have come to its place
        record = attempts.read_attempts(place.open_other_place(run)).get(record.attempt, record)
    if code != 0:
        say(_not_all(record, held_of(run, record)))
    return record


def _started(
    run: str, record: AttemptRecord, variables: Mapping[str, str]
) -> subprocess.Popen[str]:
    """Where the command was launched: its tiers may be named from there."""
    folder = recorded_options.folder(record.facts)
    command = [sys.executable, "-m", __name__, place.seen_from(Path.cwd(), run),
               str(record.attempt)]  # fmt: skip
    return subprocess.Popen(
        command, env=dict(variables), start_new_session=True, text=True, errors="replace",
        cwd=folder if folder.is_dir() else None, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def _limit_s(ranks: Sequence[Told], inbox: Inbox) -> float | None:
    """What is left of the grace that the stop's signal began; None: nothing limits it.

    An earlier one, that was answered and did not end the run, is over.
    """
    graces = [told.grace_s for told in ranks if told.grace_s is not None]
    if inbox.stop_s is None or not graces:
        return None
    return inbox.stop_s + min(graces) - LEAVE_S - time.monotonic()


def _attend(
    process: subprocess.Popen[str],
    inbox: Inbox,
    limit_s: float | None,
    say: Callable[[str], object],
) -> int:
    """Until it has ended: say what it says, end it when it has to."""
    until_s = None if limit_s is None else time.monotonic() + limit_s
    heard, last = inbox.count, [""]

    def listen() -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                if line.startswith(SAID):
                    say(line.removeprefix(SAID).rstrip())
                else:
                    last[0] = line.strip() or last[0]

    listener = threading.Thread(target=listen, name="trainckpt-flush-left", daemon=True)
    listener.start()
    ended = ""
    while process.poll() is None:
        over = until_s is not None and time.monotonic() > until_s
        if not ended and (over or inbox.count > heard):
            ended = "the time is over" if over else f"{inbox.first} came"
            process.kill()
        inbox.next(LOOK_S)
    listener.join()  # nobody but the process has the other end
    if ended:
        say(ended)
    elif process.returncode not in (0, NOT_ALL):  # a bug of ours; it is done later
        say(f"copying ended with {process.returncode}: {last[0][:LONGEST_SAID]}")
    return process.returncode


def _not_all(record: AttemptRecord, lost: SnapshotName | None) -> str:
    """What becomes of what was not copied; `lost`: what is still in the supervisor's memory."""
    rest = "not all of it was copied: the next attempt does that, or `trainckpt flush`"
    if lost is None:
        return rest
    on = f"goes on from {record.newest_commit}" if record.newest_commit else "begins anew"
    return f"{lost} was in memory that the supervisor held, and is lost: the next attempt {on}"


def _nothing(_: str) -> None:
    """Nobody listens."""


if __name__ == "__main__":
    from trainckpt.supervisor.left_work import main

    sys.exit(main(sys.argv[1:]))

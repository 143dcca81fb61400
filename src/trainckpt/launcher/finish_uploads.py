"""Flush what is left: `python -m trainckpt.launcher.finish_uploads RUN ATTEMPT`, after the ranks.

An attempt that was killed, or had no time, leaves its newest snapshot in the run's place alone, or
in this host's memory. Whoever started it copies that on, in a process of its own, before it
returns:

    when      the attempt is over, and no other is started here: that one would do it itself
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

from trainckpt.attempt.options import LOCAL
from trainckpt.errors import TrainckptError
from trainckpt.format.names import SnapshotName
from trainckpt.launcher import recorded_options
from trainckpt.run_directory import run_url
from trainckpt.run_directory.run_url import PROVE_VARIABLE
from trainckpt.run_directory.tier_config import COMMITS, TIERS
from trainckpt.snapshot import attempt_history
from trainckpt.stop.final_save_tier import MEMORY

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from trainckpt.attempt.rank_status import RankStatus
    from trainckpt.format.attempt_record import AttemptRecord
    from trainckpt.launcher.signals import Inbox

LOOK_S = 0.2
LEAVE_S = 2.0  # before the grace is over
SAID = "flush: "  # what the process says for people begins so; all else is a library's
LONGEST_SAID = 500
NOT_ALL_COPIED = "not all files were copied; the next attempt or `trainckpt flush` copies the rest"
NOT_ALL = 3  # its exit code where something could not be copied; 1 is the interpreter's own


@dataclass(frozen=True)
class PendingUploads:
    """Uploads left undone by an attempt.

    Attributes:
        snapshot: Its newest, full name.
        tiers: Names of those that lack it, `LOCAL` among them if it is in memory alone.
        why: How the attempt ended.
    """

    snapshot: str
    tiers: tuple[str, ...]
    why: str


def left_by(record: AttemptRecord | None) -> PendingUploads | None:
    """Return the uploads left undone by the attempt, by its record; None: nothing. Pure."""
    if record is None:
        return None
    outcome = record.outcome or {}
    recorded_names = [each for each in (outcome.get("snapshot"), record.newest_commit) if each]
    newest = next(
        (each for each in recorded_names if SnapshotName.parse(each)), ""
    )  # a dump is none
    name = SnapshotName.parse(newest)
    if name is None or name.attempt != record.attempt:
        return None
    tier_facts, commits = record.facts.get(TIERS), record.facts.get(COMMITS)
    tier_commits = commits if isinstance(commits, dict) else {}
    held_tiers = outcome.get("tiers") or ()
    names = (
        [t.get("name") for t in tier_facts if isinstance(t, dict)]
        if isinstance(tier_facts, list)
        else []
    )
    lacking = [n for n in names if isinstance(n, str) and tier_commits.get(n) != newest]
    if MEMORY in held_tiers:
        lacking.insert(0, LOCAL)
    reason = f"{outcome.get('outcome') or 'ended'} by {outcome.get('reason') or 'unknown cause'}"
    if not lacking:
        return None
    return PendingUploads(str(name), tuple(lacking), reason[:LONGEST_SAID])


def flush_left(
    record: AttemptRecord | None,
    ranks: Sequence[RankStatus],
    *,
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
    run = next((status.run for status in ranks if status.rank == 0 and status.run), run)
    if run is None or record is None or PROVE_VARIABLE in variables:
        return record
    pending = left_by(record)
    if pending is None:
        return record
    say = say or _nothing
    limit_s = _limit_s(ranks, inbox)
    tiers = ", ".join(pending.tiers)
    if limit_s is not None and limit_s <= 0:
        say(
            f"attempt {record.attempt} {pending.why}: no time to copy {pending.snapshot} to {tiers}"
        )
        say(NOT_ALL_COPIED)
        return record
    within = "" if limit_s is None else f"within {limit_s:.0f} s, "
    say(
        f"attempt {record.attempt} {pending.why}: copying {pending.snapshot} to {tiers}; "
        f"{within}another signal ends the copying"
    )
    code = -1
    with suppress(OSError):
        code = _attend(_started(run, record, variables), inbox, limit_s, say)
    with suppress(TrainckptError):  # some of it may have come to its place
        record = attempt_history.read_attempts(run_url.open_other_place(run)).get(
            record.attempt, record
        )
    if code != 0:
        say(NOT_ALL_COPIED)
    return record


def _started(
    run: str, record: AttemptRecord, variables: Mapping[str, str]
) -> subprocess.Popen[str]:
    """Start the upload process in the command's own folder, since relative URLs of tiers count from
    there.
    """
    folder = recorded_options.folder(record.facts)
    command = [
        sys.executable,
        "-m",
        __name__,
        run_url.seen_from(Path.cwd(), run),
        str(record.attempt),
    ]
    return subprocess.Popen(
        command,
        env=dict(variables),
        start_new_session=True,
        text=True,
        errors="replace",
        cwd=folder if folder.is_dir() else None,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def _limit_s(ranks: Sequence[RankStatus], inbox: Inbox) -> float | None:
    """Return the seconds left of the grace that the stop's signal began; None: no limit.

    An earlier one, that was answered and did not end the run, is over.
    """
    graces = [status.grace_s for status in ranks if status.grace_s is not None]
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
    deadline_s = None if limit_s is None else time.monotonic() + limit_s
    signals_before, last_line = inbox.count, [""]

    def listen() -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                if line.startswith(SAID):
                    say(line.removeprefix(SAID).rstrip())
                else:
                    last_line[0] = line.strip() or last_line[0]

    listener = threading.Thread(target=listen, name="trainckpt-flush-left", daemon=True)
    listener.start()
    end_reason = ""
    while process.poll() is None:
        is_late = deadline_s is not None and time.monotonic() > deadline_s
        if not end_reason and (is_late or inbox.count > signals_before):
            end_reason = (
                "copying ended: the deadline has passed"
                if is_late
                else f"copying ended by {inbox.first}"
            )
            process.kill()
        inbox.next(LOOK_S)
    listener.join()  # nobody but the process has the other end
    if end_reason:
        say(end_reason)
    elif process.returncode not in (0, NOT_ALL):  # a bug of ours; it is done later
        say(f"copying failed with {process.returncode}: {last_line[0][:LONGEST_SAID]}")
    return process.returncode


def _nothing(_: str) -> None:
    """Ignore a message."""


if __name__ == "__main__":
    from trainckpt.launcher.pending_uploads import main

    sys.exit(main(sys.argv[1:]))

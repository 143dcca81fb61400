"""Finish uploads: `python -m trainckpt.launcher.finish_uploads RUN ATTEMPT`, after the ranks.

An attempt that was killed, or had no time, leaves its newest snapshot in the run directory alone,
or in this host's memory. The supervisor copies it to the slower tiers, in a process of its own,
before it returns:

    when      the attempt is over, and no other is started here: that one would do it itself
    who       the supervisor on the host of rank 0
    how long  until the end of the grace that the stop's signal began; else until it is done. A
              further signal ends it

The next attempt copies what is missing then. A copy is taken for one only once it is complete
(`snapshot.tier_copy`).
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

from trainckpt.attempt.launch import recorded_cwd
from trainckpt.attempt.options import LOCAL, MEMORY
from trainckpt.errors import SaveFailed, TrainckptError
from trainckpt.format.names import SnapshotName
from trainckpt.run_directory import run_url
from trainckpt.run_directory.run_tiers import move, open_everywhere
from trainckpt.run_directory.run_url import PROVE_VARIABLE
from trainckpt.run_directory.tier_config import COMMITS, TIERS
from trainckpt.snapshot import attempt_history, tier_copy

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from trainckpt.attempt.status_files import RankStatus
    from trainckpt.format.attempt_record import AttemptRecord
    from trainckpt.format.manifest import Manifest
    from trainckpt.launcher.supervisor_signals import Inbox
    from trainckpt.run_directory.run_tiers import RunTiers
    from trainckpt.storage.base import RunTier, Tier


# ---- the program: copies an attempt's newest snapshot to the tiers that lack it
#
#     from memory             to the run directory, if all its ranks were on this host
#     from the run directory  to each slower tier, nearest first
#
# It reports on stdout. It stops once another attempt begins: that one copies by itself.


SAY_EVERY_S = 5.0
APART = "the snapshot is in the memory of several hosts; only the next attempt can collect it"


def main(arguments: list[str]) -> int:
    """Copy the newest snapshot of that attempt; return 0 if it is in every tier then."""
    try:
        return 0 if _flush(arguments[0], int(arguments[1])) else NOT_ALL
    except (TrainckptError, OSError) as error:
        _say(getattr(error, "message", None) or str(error))
    return NOT_ALL


def _flush(run: str, number: int) -> bool:
    tier = run_url.open_tier_at(run, LOCAL)
    record = attempt_history.read_attempts(tier)[number]
    pending = left_by(record)
    if pending is None or attempt_history.newest(tier) != number:
        return pending is None
    completed = []
    if LOCAL in pending.tiers and _bring(tier, number) == pending.snapshot:
        completed.append(LOCAL)
    everywhere = open_everywhere(tier.url)
    manifests = [
        c.manifest for c in everywhere.candidates() if c.usable and c.name.attempt == number
    ]
    slower = [t for t in (*everywhere.tiers, *everywhere.empty) if t is not everywhere.run_tier]
    if manifests and manifests[0] is not None:
        completed += [t.name for t in slower if _copy(everywhere, manifests[0], t, number)]
        _note(everywhere.run_tier, number, str(manifests[0].name), completed)
    for slower_tier in slower:
        if slower_tier.name in completed:
            with suppress(TrainckptError):
                tier_copy.mirror_records(everywhere.run_tier, slower_tier, {})
    for name, reason in everywhere.silent.items():
        _say(f"the tier {name} does not answer: {reason}")
    return set(pending.tiers) <= set(completed) and not everywhere.silent


def _bring(tier: RunTier, number: int) -> str | None:
    """Copy from this host's memory to the run directory; return the snapshot's name."""
    from trainckpt.ranks.store import local_store
    from trainckpt.ranks.world import World
    from trainckpt.resume.scavenge import scavenge
    from trainckpt.run_directory.validate import RankLocation, own_view

    record, run = attempt_history.read_attempts(tier)[number], attempt_history.run_id(tier)
    hosts = record.facts.get("hosts")
    if run is None or not isinstance(hosts, list) or len(set(hosts)) != 1:
        _say(APART)
        return None
    host = str(hosts[0])
    begun_s = time.monotonic()
    name = scavenge(tier, local_store(World(0, 1, 0, host)), run, [RankLocation(host, own_view())])
    if name is None:
        _say(f"memory has no complete snapshot newer than those in {tier.url}")
        return None
    _say(f"copied {name} from memory to {LOCAL} in {time.monotonic() - begun_s:.1f} s")
    with suppress(TrainckptError):
        attempt_history.replace(tier, record.with_(newest_commit=str(name)))
    return str(name)


def _copy(everywhere: RunTiers, manifest: Manifest, tier: Tier, number: int) -> bool:
    """Copy a snapshot to a tier; return True if the tier holds it afterwards."""
    name = manifest.name
    bytes_sent, begun_s, said_s = 0, time.monotonic(), time.monotonic()

    def progress(num_bytes: int) -> None:  # after each file
        nonlocal bytes_sent, said_s
        if attempt_history.newest(everywhere.run_tier) != number:
            raise SaveFailed("another attempt has begun and copies it")
        bytes_sent += num_bytes
        if time.monotonic() - said_s > SAY_EVERY_S:
            said_s = time.monotonic()
            _say(f"{name} to {tier.name}: {bytes_sent / 1e6:.1f} MB so far")

    try:
        progress(0)
        if tier_copy.holds(tier, name):
            return True
        moved = move(everywhere, manifest, tier, everywhere.tiers, progress)
    except TrainckptError as error:
        _say(f"could not copy {name} to {tier.name}: {error.message}")
        return False
    took_s = time.monotonic() - begun_s
    _say(f"copied {name} to {tier.name}: {moved.num_bytes / 1e6:.1f} MB in {took_s:.1f} s")
    return True


def _note(tier: Tier, number: int, snapshot: str, done: Sequence[str]) -> None:
    """Record the tiers of the attempt's newest snapshot."""
    record = attempt_history.read_attempts(tier)[number]
    commits = record.facts.get(COMMITS)
    known_commits = dict(commits) if isinstance(commits, dict) else {}
    new_commits = dict.fromkeys([name for name in done if name != LOCAL], snapshot)
    facts = {**record.facts, COMMITS: {**known_commits, **new_commits}}
    outcome = record.outcome
    if outcome is not None and outcome.get("snapshot") == snapshot:
        recorded_tiers = [str(name) for name in outcome.get("tiers") or ()]
        recorded_tiers = [name for name in recorded_tiers if name != MEMORY or LOCAL not in done]
        outcome = {
            **outcome,
            "tiers": [*recorded_tiers, *(n for n in done if n not in recorded_tiers)],
        }
    attempt_history.replace(tier, record.with_(facts=facts, outcome=outcome))


def _say(line: str) -> None:
    with suppress(OSError):  # the supervisor may be gone: what was begun is ended
        sys.stdout.write(f"{SAID}{' '.join(line.split())}\n")
        sys.stdout.flush()


# ---- the supervisor's part: start the program, and wait


LOOK_S = 0.2
LEAVE_S = 2.0  # before the grace is over
SAID = "flush: "  # what the process says for people begins so; all else is a library's
LONGEST_SAID = 500
NOT_ALL_COPIED = "not all files were copied; the next attempt or `trainckpt flush` copies the rest"
NOT_ALL = 3  # its exit code where something could not be copied; 1 is the interpreter's own


@dataclass(frozen=True)
class PendingUploads:
    """Uploads left undone by an attempt."""

    snapshot: str  # full name of its newest
    tiers: tuple[str, ...]  # those that lack it, `LOCAL` among them if it is in memory alone
    why: str  # how the attempt ended


def left_by(record: AttemptRecord | None) -> PendingUploads | None:
    """Return the uploads left undone by the attempt, by its record; None: nothing. Pure."""
    if record is None:
        return None
    outcome = record.outcome or {}
    recorded = (outcome.get("snapshot"), record.newest_commit)
    # a dump in the record is no snapshot
    name = next(filter(None, (SnapshotName.parse(text) for text in recorded if text)), None)
    if name is None or name.attempt != record.attempt:
        return None
    tier_facts, commits = record.facts.get(TIERS), record.facts.get(COMMITS)
    tier_commits = commits if isinstance(commits, dict) else {}
    facts = tier_facts if isinstance(tier_facts, list) else []
    names = [fact.get("name") for fact in facts if isinstance(fact, dict)]
    lacking = [n for n in names if isinstance(n, str) and tier_commits.get(n) != str(name)]
    if MEMORY in (outcome.get("tiers") or ()):
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
    """Copy what a finished attempt left, and return its record as it is then. Main thread.

    Args:
        record: The attempt.
        ranks: Statuses of its ranks on this host.
        inbox: An entered one.
        variables: The environment of the command.
        say: Called with lines for people.
        run: Its run directory, if no rank has reported it.
    """
    run = next((status.run for status in ranks if status.rank == 0 and status.run), run)
    if run is None or record is None or PROVE_VARIABLE in variables:
        return record
    pending = left_by(record)
    if pending is None:
        return record
    say = say or (lambda _: None)
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
    with suppress(TrainckptError):  # the program may have updated it
        record = attempt_history.read_attempts(run_url.open_tier_at(run)).get(
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
    folder = recorded_cwd(record.facts)
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
    """Return the seconds left of the grace that the stop's signal began; None: no limit."""
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
    """Relay the lines of the program until it ends; kill it at the limit, or at a signal."""
    deadline_s = None if limit_s is None else time.monotonic() + limit_s
    signals_before, last_line = inbox.count, [""]

    def relay() -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                if line.startswith(SAID):
                    say(line.removeprefix(SAID).rstrip())
                else:
                    last_line[0] = line.strip() or last_line[0]

    relaying = threading.Thread(target=relay, name="trainckpt-flush-left", daemon=True)
    relaying.start()
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
    relaying.join()  # only the process has the other end
    if end_reason:
        say(end_reason)
    elif process.returncode not in (0, NOT_ALL):  # a bug of ours; it is done later
        say(f"copying failed with {process.returncode}: {last_line[0][:LONGEST_SAID]}")
    return process.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

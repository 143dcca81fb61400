"""Flush what is left: `python -m trainckpt.supervisor.flush_left RUN ATTEMPT`, after the ranks.

An attempt that was killed, or had no time, leaves its newest snapshot in the run's place alone.
Whoever started it copies that to the slower tiers, in a process of its own, before it returns:

    when      the attempt is over, and no other is started here: that one would do it itself
    who       the supervisor on the host of rank 0
    how long  until the grace is over that the first signal began; else until it is done. A further
              signal ends it

What is not done then, the next attempt does. Nothing half-copied is ever taken for a copy.
"""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from trainckpt.errors import TrainckptError
from trainckpt.format.names import SnapshotName
from trainckpt.lifecycle import place
from trainckpt.lifecycle.place import PROVE_VARIABLE
from trainckpt.lifecycle.slower import COMMITS, TIERS
from trainckpt.snapshot import attempts, flush

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from trainckpt.format.attempt import AttemptRecord
    from trainckpt.lifecycle.told import Told
    from trainckpt.supervisor.signals import Inbox
    from trainckpt.tiers.base import Tier

LOOK_S = 0.2
LEAVE_S = 2.0  # before the grace is over


def lacking(record: AttemptRecord | None) -> list[str]:
    """Names of the tiers that lack what the attempt committed last, as its record says. Pure."""
    if record is None:
        return []
    newest = (record.outcome or {}).get("snapshot") or record.newest_commit
    name = SnapshotName.parse(newest) if newest else None
    if name is None or name.attempt != record.attempt:
        return []
    told, commits = record.facts.get(TIERS), record.facts.get(COMMITS)
    there = commits if isinstance(commits, dict) else {}
    names = [t.get("name") for t in told if isinstance(t, dict)] if isinstance(told, list) else []
    return [n for n in names if isinstance(n, str) and there.get(n) != newest]


def flush_left(
    record: AttemptRecord | None,
    ranks: Sequence[Told],
    inbox: Inbox,
    variables: Mapping[str, str],
    say: Callable[[str], None] | None = None,
) -> AttemptRecord | None:
    """Copy it, if there is anything to copy, and return the record as it is then. Main thread.

    Args:
        record: Of the attempt that is over.
        ranks: What its ranks on this host told.
        inbox: An entered one.
        variables: The environment of the command.
        say: Told what is done.
    """
    tiers = lacking(record)
    first = next((told for told in ranks if told.rank == 0 and told.run), None)
    if not tiers or first is None or record is None or PROVE_VARIABLE in variables:
        return record
    graces = [told.grace_s for told in ranks if told.grace_s is not None]
    until_s = None
    if inbox.first_s is not None and graces:
        until_s = inbox.first_s + min(graces) - LEAVE_S
    if say is not None:
        say(f"copying the newest snapshot to {', '.join(tiers)}; a further signal ends that")
    heard = inbox.count
    command = [sys.executable, "-m", __name__, first.run, str(record.attempt)]
    with suppress(OSError):
        process = subprocess.Popen(
            command, env=dict(variables), start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        while process.poll() is None:
            over = until_s is not None and time.monotonic() > until_s
            if over or inbox.count > heard:
                process.kill()
            inbox.next(LOOK_S)
        if say is not None and process.returncode != 0:
            say("not all of it was copied: the next attempt does that, or `trainckpt flush`")
    with suppress(TrainckptError):
        return attempts.read_attempts(place.open_other_place(first.run)).get(record.attempt, record)
    return record


def main(arguments: list[str]) -> int:
    """Copy the newest snapshot of that attempt; 0 if it is in every tier then."""
    from trainckpt.lifecycle.everywhere import move, open_everywhere

    try:
        everywhere = open_everywhere(arguments[0])
        number, done = int(arguments[1]), []
        own = [c for c in everywhere.candidates() if c.usable and c.name.attempt == number]
        if not own or own[0].manifest is None:
            return 1
        newest = own[0].manifest
        slower = [t for t in (*everywhere.tiers, *everywhere.empty) if t is not everywhere.place]
        for tier in slower:
            if attempts.newest(everywhere.place) != number:
                return 1  # a newer attempt copies what it begins from
            with suppress(TrainckptError):
                if not flush.holds(tier, newest.name):
                    move(everywhere, newest, tier, everywhere.tiers)
                done.append(tier.name)
        _note(everywhere.place, number, str(newest.name), done)
        for tier in slower:
            if tier.name in done:
                flush.mirror_records(everywhere.place, tier, {})
    except (TrainckptError, OSError):
        return 1
    return 0 if len(done) == len(slower) and not everywhere.silent else 1


def _note(tier: Tier, number: int, snapshot: str, done: Sequence[str]) -> None:
    """The record says where the attempt's newest snapshot is now."""
    record = attempts.read_attempts(tier)[number]
    commits = record.facts.get(COMMITS)
    known = dict(commits) if isinstance(commits, dict) else {}
    facts = {**record.facts, COMMITS: {**known, **dict.fromkeys(done, snapshot)}}
    outcome = record.outcome
    if outcome is not None and outcome.get("snapshot") == snapshot:
        before = [str(name) for name in outcome.get("tiers") or ()]
        outcome = {**outcome, "tiers": [*before, *(n for n in done if n not in before)]}
    attempts.replace(tier, record.with_(facts=facts, outcome=outcome))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""What `flush_left` starts: bring an attempt's newest snapshot to where its record says it lacks.

    from memory     to the run's place, and commit it there, if all its ranks were on this host
    from the place  to each slower tier, nearest first; then the dump that the attempt ended with

It says on stdout what it does. No other attempt may have begun: that one does it all itself.
"""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from trainckpt.errors import SaveFailed, TrainckptError
from trainckpt.format.dump import DumpName
from trainckpt.lifecycle.deciding.stop_tier import MEMORY
from trainckpt.lifecycle.places import place
from trainckpt.lifecycle.places.everywhere import move, open_everywhere
from trainckpt.lifecycle.places.slower import COMMITS
from trainckpt.lifecycle.run.options import LOCAL
from trainckpt.snapshot import attempts, flush
from trainckpt.supervisor.flush_left import NOT_ALL, SAID, held_of, left_by
from trainckpt.supervisor.left_dump import send_dump

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trainckpt.format.names import SnapshotName
    from trainckpt.lifecycle.places.everywhere import Everywhere
    from trainckpt.tiers.base import Tier
    from trainckpt.tiers.places import Place

SAY_EVERY_S = 5.0
APART = "it lies in the memory of several hosts, which only the next attempt brings together"
ENDS_APART = "it lies in memory that the supervisors of several hosts hold, and ends with them"


def main(arguments: list[str]) -> int:
    """Copy the newest snapshot of that attempt; 0 if it is in every tier then."""
    try:
        return 0 if _flush(place.open_other_place(arguments[0]), int(arguments[1])) else NOT_ALL
    except (TrainckptError, OSError) as error:
        _say(getattr(error, "message", None) or str(error))
    return NOT_ALL


def _flush(tier: Place, number: int) -> bool:
    tier.name = LOCAL
    record = attempts.read_attempts(tier)[number]
    left = left_by(record, held_of(tier.url, record))
    if left is None or attempts.newest(tier) != number:
        return left is None
    done = [LOCAL] if LOCAL in left.tiers and _bring(tier, number) == left.snapshot else []
    everywhere = open_everywhere(tier.url)
    own = [c for c in everywhere.candidates() if c.usable and c.name.attempt == number]
    slower = [t for t in (*everywhere.tiers, *everywhere.empty) if t is not everywhere.place]
    if own and own[0].manifest is not None:
        done += [t.name for t in slower if _copy(everywhere, own[0].name, t, number)]
        _note(everywhere.place, number, str(own[0].name), done)
    elif not left.snapshot:
        done += [t.name for t in slower]
    if (dump := DumpName.parse(left.dump)) is not None:
        sent = send_dump(everywhere, dump, slower, number, _say)
        done = [name for name in done if name == LOCAL or name in sent]
    for each in slower:
        if each.name in done:
            with suppress(TrainckptError):
                flush.mirror_records(everywhere.place, each, {})
    for name, why in everywhere.silent.items():
        _say(f"the tier {name} does not answer: {why}")
    return set(left.tiers) <= set(done) and not everywhere.silent


def _bring(tier: Place, number: int) -> str | None:
    """From this host's memory to the run's place; the snapshot's name."""
    from trainckpt.lifecycle.places.attach import Seat, own_view
    from trainckpt.lifecycle.resuming.scavenge import scavenge
    from trainckpt.ranks.channel import Alone
    from trainckpt.ranks.world import World

    record, run = attempts.read_attempts(tier)[number], attempts.run_id(tier)
    hosts = record.facts.get("hosts")
    if run is None or not isinstance(hosts, list) or len(set(hosts)) != 1:
        ends = held_of(tier.url, record) is not None
        _say(ENDS_APART if ends else APART)
        return None
    host = str(hosts[0])
    begun_s = time.monotonic()
    name = scavenge(tier, Alone(World(0, 1, 0, host)), run, [Seat(host, own_view())])
    if name is None:
        _say(f"memory holds nothing that is whole and newer than what {tier.url} has")
        return None
    _say(f"{name} was in memory, and is in {LOCAL} after {time.monotonic() - begun_s:.1f} s")
    with suppress(TrainckptError):
        attempts.replace(tier, record.with_(newest_commit=str(name)))
    return str(name)


def _copy(everywhere: Everywhere, name: SnapshotName, tier: Tier, number: int) -> bool:
    """Whether the tier holds the snapshot now."""
    if attempts.newest(everywhere.place) != number:
        _say("another attempt has begun, and goes on with it")
        return False
    try:
        if flush.holds(tier, name):
            return True
        manifest = next(c.manifest for c in everywhere.candidates() if c.name == name)
        assert manifest is not None
        begun_s = time.monotonic()
        progress = _progress(everywhere, name, tier, number)
        moved = move(everywhere, manifest, tier, everywhere.tiers, progress)
    except TrainckptError as error:
        _say(f"{name} is not in {tier.name}: {error.message}")
        return False
    took_s = time.monotonic() - begun_s
    _say(f"{name} is in {tier.name}: {moved.num_bytes / 1e6:.1f} MB in {took_s:.1f} s")
    return True


def _progress(
    everywhere: Everywhere, name: SnapshotName, tier: Tier, number: int
) -> Callable[[int], None]:
    """Says now and then how far it has come; after each file, whether it is still ours to do."""
    done, said_s = [0], [time.monotonic()]

    def tell(num_bytes: int) -> None:
        if attempts.newest(everywhere.place) != number:
            raise SaveFailed("another attempt has begun, and goes on with it")
        done[0] += num_bytes
        if time.monotonic() - said_s[0] > SAY_EVERY_S:
            said_s[0] = time.monotonic()
            _say(f"{name} to {tier.name}: {done[0] / 1e6:.1f} MB so far")

    return tell


def _note(tier: Tier, number: int, snapshot: str, done: Sequence[str]) -> None:
    """The record says where the attempt's newest snapshot is now."""
    record = attempts.read_attempts(tier)[number]
    commits = record.facts.get(COMMITS)
    known = dict(commits) if isinstance(commits, dict) else {}
    there = dict.fromkeys([name for name in done if name != LOCAL], snapshot)
    facts = {**record.facts, COMMITS: {**known, **there}}
    outcome = record.outcome
    if outcome is not None and outcome.get("snapshot") == snapshot:
        before = [str(name) for name in outcome.get("tiers") or ()]
        before = [name for name in before if name != MEMORY or LOCAL not in done]
        outcome = {**outcome, "tiers": [*before, *(n for n in done if n not in before)]}
    attempts.replace(tier, record.with_(facts=facts, outcome=outcome))


def _say(line: str) -> None:
    with suppress(OSError):  # the supervisor may be gone: what was begun is ended
        sys.stdout.write(f"{SAID}{' '.join(line.split())}\n")
        sys.stdout.flush()

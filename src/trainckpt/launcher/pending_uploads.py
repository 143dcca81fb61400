"""Copy an attempt's newest snapshot to the tiers that lack it. `finish_uploads` starts this
program.

    from memory     to the run's place, and commit it there, if all its ranks were on this host
    from the place  to each slower tier, nearest first

It says on stdout what it does. No other attempt may have begun: that one does it all itself.
"""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from trainckpt.attempt.options import LOCAL
from trainckpt.errors import SaveFailed, TrainckptError
from trainckpt.launcher.finish_uploads import NOT_ALL, SAID, left_by
from trainckpt.run_directory import run_url
from trainckpt.run_directory.run_tiers import move, open_everywhere
from trainckpt.run_directory.tier_config import COMMITS
from trainckpt.snapshot import attempt_history, upload
from trainckpt.stop.final_save_tier import MEMORY

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trainckpt.format.names import SnapshotName
    from trainckpt.run_directory.run_tiers import RunTiers
    from trainckpt.storage.base import Place, Tier

SAY_EVERY_S = 5.0
APART = "the snapshot is in the memory of several hosts; only the next attempt can collect it"


def main(arguments: list[str]) -> int:
    """Copy the newest snapshot of that attempt; 0 if it is in every tier then."""
    try:
        return 0 if _flush(run_url.open_other_place(arguments[0]), int(arguments[1])) else NOT_ALL
    except (TrainckptError, OSError) as error:
        _say(getattr(error, "message", None) or str(error))
    return NOT_ALL


def _flush(tier: Place, number: int) -> bool:
    tier.name = LOCAL
    record = attempt_history.read_attempts(tier)[number]
    pending = left_by(record)
    if pending is None or attempt_history.newest(tier) != number:
        return pending is None
    completed = (
        [LOCAL] if LOCAL in pending.tiers and _bring(tier, number) == pending.snapshot else []
    )
    everywhere = open_everywhere(tier.url)
    own_candidates = [c for c in everywhere.candidates() if c.usable and c.name.attempt == number]
    slower = [t for t in (*everywhere.tiers, *everywhere.empty) if t is not everywhere.place]
    if own_candidates and own_candidates[0].manifest is not None:
        completed += [
            t.name for t in slower if _copy(everywhere, own_candidates[0].name, t, number)
        ]
        _note(everywhere.place, number, str(own_candidates[0].name), completed)
    for slower_tier in slower:
        if slower_tier.name in completed:
            with suppress(TrainckptError):
                upload.mirror_records(everywhere.place, slower_tier, {})
    for name, reason in everywhere.silent.items():
        _say(f"the tier {name} does not answer: {reason}")
    return set(pending.tiers) <= set(completed) and not everywhere.silent


def _bring(tier: Place, number: int) -> str | None:
    """From this host's memory to the run's place; the snapshot's name."""
    from trainckpt.ranks.store import LocalStore
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
    name = scavenge(tier, LocalStore(World(0, 1, 0, host)), run, [RankLocation(host, own_view())])
    if name is None:
        _say(f"memory has no complete snapshot newer than those in {tier.url}")
        return None
    _say(f"copied {name} from memory to {LOCAL} in {time.monotonic() - begun_s:.1f} s")
    with suppress(TrainckptError):
        attempt_history.replace(tier, record.with_(newest_commit=str(name)))
    return str(name)


def _copy(everywhere: RunTiers, name: SnapshotName, tier: Tier, number: int) -> bool:
    """Copy a snapshot to a tier; return True if the tier holds it afterwards."""
    if attempt_history.newest(everywhere.place) != number:
        _say("another attempt has begun and copies it")
        return False
    try:
        if upload.holds(tier, name):
            return True
        manifest = next(c.manifest for c in everywhere.candidates() if c.name == name)
        assert manifest is not None
        begun_s = time.monotonic()
        progress = _progress(everywhere, name, tier, number)
        moved = move(everywhere, manifest, tier, everywhere.tiers, progress)
    except TrainckptError as error:
        _say(f"could not copy {name} to {tier.name}: {error.message}")
        return False
    took_s = time.monotonic() - begun_s
    _say(f"copied {name} to {tier.name}: {moved.num_bytes / 1e6:.1f} MB in {took_s:.1f} s")
    return True


def _progress(
    everywhere: RunTiers, name: SnapshotName, tier: Tier, number: int
) -> Callable[[int], None]:
    """Says now and then how far it has come; after each file, whether it is still ours to do."""
    bytes_sent, last_said_s = [0], [time.monotonic()]

    def tell(num_bytes: int) -> None:
        if attempt_history.newest(everywhere.place) != number:
            raise SaveFailed("another attempt has begun and copies it")
        bytes_sent[0] += num_bytes
        if time.monotonic() - last_said_s[0] > SAY_EVERY_S:
            last_said_s[0] = time.monotonic()
            _say(f"{name} to {tier.name}: {bytes_sent[0] / 1e6:.1f} MB so far")

    return tell


def _note(tier: Tier, number: int, snapshot: str, done: Sequence[str]) -> None:
    """The record says where the attempt's newest snapshot is now."""
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

"""Resume: claim an attempt, choose the snapshot, read it on every rank, or refuse with reasons.

    rank 0       looks at the place, claims the attempt's number, lists the candidates
    every rank   reads and verifies its part of the candidate; all bring their result
    all          usable on every rank: chosen. Damaged on any: refused by all, the next is tried.
                 The script's objects differ: no other snapshot would fit either, so it is raised
    rank 0       records the parent, before anything can be committed

Nothing live is touched until every rank has verified every byte. Rank 0's errors are told to the
others, so that all end by the same one.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainckpt.errors import (
    ConfigurationError,
    NothingToResume,
    NoUsableSnapshot,
    StateMismatch,
    TierUnavailable,
    TrainckptError,
    UnusableSnapshot,
)
from trainckpt.format.attempt import FAILED, STARTING, AttemptRecord
from trainckpt.format.names import SnapshotName
from trainckpt.lifecycle import launch
from trainckpt.lifecycle.log import logger
from trainckpt.snapshot import attempts as attempt_records
from trainckpt.snapshot import catalog, restore
from trainckpt.state import apply
from trainckpt.state.stage import Destination

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from trainckpt.format.manifest import Manifest
    from trainckpt.lifecycle.attempt_log import AttemptLog
    from trainckpt.ranks.channel import Channel
    from trainckpt.state.captured import Saved
    from trainckpt.state.registry import Registry
    from trainckpt.tiers.base import Tier

RANKS_TIMEOUT_S = 600.0
AT_VARIABLE = "TRAINCKPT_RESUME_AT"
MOST_DEATHS = 2
_CLASSES = {cls.__name__: cls for cls in (ConfigurationError, NothingToResume, TierUnavailable,
                                          UnusableSnapshot, TrainckptError)}  # fmt: skip


@dataclass(frozen=True)
class Beginning:
    """From where this attempt begins.

    Attributes:
        run: Id of the run.
        record: The attempt's record, parent not yet decided.
        manifest: Of the snapshot to begin from; None for step 0.
        saved: This rank's verified state of it.
        refused: Snapshot -> why it was passed over.
        why_fresh: Why the run starts at step 0, where it does.
    """

    run: str
    record: AttemptRecord
    manifest: Manifest | None = None
    saved: Saved | None = None
    refused: Mapping[str, str] | None = None
    why_fresh: str = ""


def begin(
    tier: Tier,
    channel: Channel,
    registry: Registry,
    mode: str,
    on_claimed: Callable[[int], None] = lambda _: None,
) -> Beginning:
    """Choose and read the snapshot this attempt begins from. Every rank calls it.

    Args:
        tier: The run's place.
        channel: Fresh keys of this Checkpointer.
        registry: The objects that will be restored; they are compared, not changed.
        mode: "auto", "required" or "never".
        on_claimed: Called with the attempt's number before anything is read: from then on
            notices are heard, and all ranks are known to be there.

    Raises:
        NothingToResume, NoUsableSnapshot, TierUnavailable, StateMismatch: on every rank alike.
    """
    rank = channel.world.rank
    everyone = channel.gather("who", [channel.world.host, os.getpid()], RANKS_TIMEOUT_S)
    _compare_lengths(channel, registry)
    if rank == 0:
        try:
            beginning, candidates, refused = _look(tier, everyone, mode)
        except TrainckptError as error:
            channel.put("begin", {"error": _error_to_json(error)})
            raise
        channel.put("begin", {
            "run": beginning.run,
            "attempt": beginning.record.attempt,
            "candidates": [str(c) for c in candidates],
            "refused": refused,
            "why_fresh": beginning.why_fresh,
        })  # fmt: skip
    told = channel.get("begin", RANKS_TIMEOUT_S)
    if "error" in told:
        raise _error_from_json(told["error"])
    if rank != 0:
        record = AttemptRecord(told["attempt"])
        beginning = Beginning(told["run"], record, why_fresh=told["why_fresh"])
    on_claimed(beginning.record.attempt)
    return _try_in_order(tier, channel, registry, beginning, told)


def record_parent(channel: Channel, log: AttemptLog, parent: str | None) -> None:
    """Rank 0 records from where the attempt began; all ranks go on only if that stands.

    An attempt whose parent is not recorded would let a later one take an abandoned branch for
    its ancestry.
    """
    told: dict[str, Any] = {"ok": True}
    try:
        log.change(must=True, parent=parent)
    except TrainckptError as error:
        told = {"error": _error_to_json(error)}
    told = channel.gather("parent recorded", told, RANKS_TIMEOUT_S)[0]
    if "error" in told:
        raise _error_from_json(told["error"])


def _compare_lengths(channel: Channel, registry: Registry) -> None:
    """Refuse loaders of different lengths: some rank would wait for batches that never come."""
    mine = {kind.name: _length(kind.loader) for kind in registry.loaders}
    everyone = channel.gather("loader lengths", mine, RANKS_TIMEOUT_S)
    for name in mine:
        lengths = [other.get(name) for other in everyone]
        if len(set(lengths)) > 1:
            raise ConfigurationError(
                f"{name} has another number of batches on each rank: {lengths}",
                hint="give every rank as many, with DistributedSampler for example",
            )


def _length(loader: Any) -> int:
    try:
        return len(loader)
    except TypeError:
        return -1  # a stream


def died_on(attempts: Mapping[int, AttemptRecord], snapshot: str) -> int:
    """How many attempts ended by their own error between reading `snapshot` and a boundary."""
    return sum(
        record.parent == snapshot
        and record.state == STARTING
        and (record.outcome or {}).get("outcome") == FAILED
        for record in attempts.values()
    )


def _look(
    tier: Tier, everyone: list[tuple[str, int]], mode: str
) -> tuple[Beginning, list[SnapshotName], dict[str, str]]:
    """Rank 0: claim the attempt, and say which snapshots to try in which order."""
    run = attempt_records.run_id(tier)
    evidence = launch.evidence_of_restart()
    asked = os.environ.get(AT_VARIABLE) or evidence
    if run is None and (mode == "required" or (mode == "auto" and asked)):
        why = f", and {evidence} says this is a restart" if evidence else ""
        raise NothingToResume(
            f"there is no run at {tier.url}{why}",
            hint="check the path; resume='never' starts a new run whatever there was",
        )
    before = attempt_records.read_attempts(tier)
    run = run or attempt_records.found_run(tier)
    facts = launch.describe(everyone)
    record = attempt_records.claim(tier, lambda n: AttemptRecord(n, facts=facts))
    beginning = Beginning(run, record)
    if mode == "never":
        return _fresh(beginning, "resume='never'"), [], {}
    found = catalog.read_catalog(tier, run, before)
    wanted = os.environ.get(AT_VARIABLE)
    if wanted:
        chosen = catalog.find(found, wanted)
        if chosen.manifest is None:
            raise UnusableSnapshot(f"{chosen.name}: {chosen.reason}")
        return beginning, [chosen.name], {}
    refused = {str(c.name): c.reason for c in found if not c.usable}
    usable = [c.name for c in found if c.usable]
    refused.update(_gone(before, found))
    for number, other in before.items():
        if "damaged" in other.facts:
            logger.warning("attempt %d: its record is damaged: %s", number, other.facts["damaged"])
    if not usable and not _was_committed(before, found):
        branch = any(c.reason == catalog.ABANDONED for c in found)
        why = "nothing was committed on this branch" if branch else "nothing was ever committed"
        why = why if before else ""
        return _fresh(beginning, why), [], refused
    for name in usable:
        if (deaths := died_on(before, str(name))) >= MOST_DEATHS:
            refused[str(name)] = f"{deaths} attempts died on it; it is the last resort"
    usable.sort(key=lambda n: str(n) in refused)
    return beginning, usable, refused


def _fresh(beginning: Beginning, why: str) -> Beginning:
    return Beginning(beginning.run, beginning.record, why_fresh=why)


def _gone(
    before: Mapping[int, AttemptRecord], found: tuple[catalog.Candidate, ...]
) -> dict[str, str]:
    """Commits that attempts recorded and that are no more, newer than all there are.

    An older one was pruned, in order.
    """
    names = {candidate.name for candidate in found}
    newest = max((c.name for c in found if c.usable), default=None)
    recorded = {
        SnapshotName.parse(record.newest_commit or ""): number for number, record in before.items()
    }
    return {
        str(name): f"attempt {number} committed it, and it is gone"
        for name, number in recorded.items()
        if name and name not in names and (newest is None or name > newest)
    }


def _was_committed(
    before: Mapping[int, AttemptRecord], found: tuple[catalog.Candidate, ...]
) -> bool:
    """True if the newest attempt's ancestry ever held a commit, whatever is left of it."""
    reach = catalog.ancestry(before, [c.name for c in found])
    excused = (catalog.NOT_COMMITTED, catalog.ABANDONED)
    return any(before[n].newest_commit for n in reach if n in before) or any(
        c.reason not in excused for c in found
    )


def _try_in_order(
    tier: Tier, channel: Channel, registry: Registry, beginning: Beginning, told: dict[str, Any]
) -> Beginning:
    refused = dict(told["refused"])
    names = [SnapshotName.parse(text) for text in told["candidates"]]
    for number, name in enumerate(names):
        assert name is not None
        result, manifest, saved = _read(tier, channel, registry, beginning.run, name)
        results = channel.gather(f"read/{number}", result, RANKS_TIMEOUT_S)
        mismatch = [r for r in results if r["kind"] == "mismatch"]
        if mismatch:
            raise _error_from_json(mismatch[0])
        reasons = [
            f"rank {rank}: {r['message']}" for rank, r in enumerate(results) if r["kind"] != "ok"
        ]
        if not reasons:
            return Beginning(beginning.run, beginning.record, manifest, saved, refused)
        if any(r["kind"] == "tier" for r in results):
            raise TierUnavailable("; ".join(reasons), hint="make the run's place readable again")
        refused[str(name)] = "; ".join(reasons)
    if names or (refused and not told["why_fresh"] and _is_serious(refused)):
        raise NoUsableSnapshot(tier.url, refused)
    return Beginning(
        beginning.run, beginning.record, refused=refused, why_fresh=beginning.why_fresh
    )


def _is_serious(refused: Mapping[str, str]) -> bool:
    excused = (catalog.NOT_COMMITTED, catalog.ABANDONED)
    return any(reason not in excused for reason in refused.values())


def _read(
    tier: Tier, channel: Channel, registry: Registry, run: str, name: SnapshotName
) -> tuple[dict[str, Any], Manifest | None, Saved | None]:
    """This rank's part of one candidate, and the result to bring to the others."""
    world = channel.world
    try:
        manifest = catalog.load_manifest(tier, run, name)
        if manifest.world != world.size:
            raise StateMismatch(
                f"snapshot {name} cannot be resumed here",
                [f"it was taken by {manifest.world} ranks, this attempt has {world.size}"],
                hint=f"launch {manifest.world} processes; other world sizes come with issue 3",
            )
        destination = Destination()
        restore.read_rank(tier, manifest, rank=world.rank, memory_for=destination.memory_for)
        saved = destination.finish()
        apply.check(registry, saved, str(name))
    except ConfigurationError as error:
        return {"kind": "mismatch", **_error_to_json(error)}, None, None
    except TierUnavailable as error:
        return {"kind": "tier", **_error_to_json(error)}, None, None
    except TrainckptError as error:
        return {"kind": "unusable", **_error_to_json(error)}, None, None
    return {"kind": "ok"}, manifest, saved


def _error_to_json(error: TrainckptError) -> dict[str, Any]:
    name = next((c.__name__ for c in type(error).__mro__ if c.__name__ in _CLASSES), "")
    found: dict[str, Any] = {"class": name, "message": error.message, "hint": error.hint}
    if isinstance(error, StateMismatch):
        found["differences"] = list(error.differences)
        found["what"] = error.what
    return found


def _error_from_json(data: dict[str, Any]) -> TrainckptError:
    if "differences" in data:
        return StateMismatch(data["what"], data["differences"], hint=data["hint"])
    cls = _CLASSES.get(data["class"], TrainckptError)
    return cls(data["message"], hint=data["hint"])

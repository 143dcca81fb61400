"""Resume: claim an attempt, choose the snapshot, read it on every rank, or refuse with reasons.

    every rank   attaches to the place (`attach`)
    all          bring what is newer in the hosts' memory to the place (`scavenge`)
    rank 0       brings what slower tiers know of other attempts to the place (`behind`), claims the
                 attempt's number above all of them, lists the candidates (`choice`)
    rank 0       records which candidate is read next, in case the process dies of it
    every rank   reads and verifies its part of the candidate; all bring their result
    all          if some ranks want columns of the same rows, they read them between them, and all
                 bring the result of that too (`read_together`)
    all          usable on every rank: chosen. Damaged on any: refused by all, the next is tried.
                 The script's objects differ: no other snapshot would fit either, so it is raised
    rank 0       records the parent, before anything can be committed

Nothing live is touched until every rank has verified every byte. Rank 0's errors are told to the
others, so that all end by the same one.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from trainckpt.errors import (
    ConfigurationError,
    NoUsableSnapshot,
    TrainckptError,
    UnusableSnapshot,
)
from trainckpt.format.attempt import FAILED, AttemptRecord
from trainckpt.format.names import SnapshotName
from trainckpt.lifecycle.places.attach import RANKS_TIMEOUT_S, Seat, attach, own_view
from trainckpt.lifecycle.places.behind import catch_up
from trainckpt.lifecycle.places.reach import Reach
from trainckpt.lifecycle.places.same_places import must_be_the_same, own_places
from trainckpt.lifecycle.resuming import choice as choices
from trainckpt.lifecycle.resuming import last_words
from trainckpt.lifecycle.resuming.candidate import read_candidate
from trainckpt.lifecycle.resuming.scavenge import scavenge
from trainckpt.lifecycle.run import error_json, launch
from trainckpt.lifecycle.run.error_json import together
from trainckpt.lifecycle.run.launch import AT_VARIABLE
from trainckpt.lifecycle.run.log import logger
from trainckpt.snapshot import attempts as attempt_records
from trainckpt.snapshot import catalog
from trainckpt.tiers.memory import MemoryPlace

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from trainckpt.format.cursor import Cursor
    from trainckpt.format.manifest import Manifest
    from trainckpt.lifecycle.run.attempt_log import AttemptLog
    from trainckpt.ranks.channel import Channel
    from trainckpt.snapshot.opened import Opener
    from trainckpt.snapshot.restore import Reader
    from trainckpt.state.captured import Saved
    from trainckpt.state.registry import Registry
    from trainckpt.tiers.base import Tier
    from trainckpt.tiers.places import Place


@dataclass(frozen=True)
class Beginning:
    """From where this attempt begins.

    Attributes:
        run: Id of the run.
        record: The attempt's record, parent not yet decided.
        manifest: Of the snapshot to begin from; None for step 0.
        saved: This rank's verified state of it.
        reader: Reads more of it.
        refused: Snapshot -> why it was passed over.
        why_fresh: Why the run starts at step 0, where it does.
        lost: Micro-batches that the attempts before trained after that snapshot; None if unknown.
    """

    run: str
    record: AttemptRecord
    manifest: Manifest | None = None
    saved: Saved | None = None
    reader: Reader | None = None
    refused: Mapping[str, str] | None = None
    why_fresh: str = ""
    lost: int | None = None

    @property
    def cursor(self) -> Cursor | None:
        """Where the attempt goes on: the snapshot's, or its window's start; None for step 0."""
        if self.manifest is None or self.saved is None or self.saved.exact:
            return self.manifest.cursor if self.manifest else None
        return self.manifest.window or self.manifest.cursor

    @property
    def rewound(self) -> int:
        """Micro-batches of the open window that are trained again in another layout."""
        at = self.cursor
        return self.manifest.cursor.micro_batches - at.micro_batches if self.manifest and at else 0


def begin(
    tier: Place,
    channel: Channel,
    registry: Registry,
    mode: str,
    on_claimed: Callable[[int], None] = lambda _: None,
    reach: Reach | None = None,
) -> Beginning:
    """Choose and read the snapshot this attempt begins from. Every rank calls it.

    Args:
        tier: The run's place.
        channel: Fresh keys of this Checkpointer.
        registry: The objects that will be restored; they are compared, not changed.
        mode: "auto", "required" or "never".
        on_claimed: Called with the attempt's number before anything is read: from then on
            notices are heard, and all ranks are known to be there.
        reach: The slower tiers, where it may be found too.

    Raises:
        NothingToResume, NoUsableSnapshot, TierUnavailable, StateMismatch: on every rank alike.
    """
    begun_s = time.monotonic()
    me = [channel.world.host, os.getpid(), own_view()]
    everyone = channel.gather("hosts and processes", me, RANKS_TIMEOUT_S)
    _compare_lengths(channel, registry)
    seats = [Seat(host, view) for host, _, view in everyone]
    reach = reach or Reach(tier)
    places = channel.gather(
        "the run's places", own_places(tier, reach.slower.tiers), RANKS_TIMEOUT_S
    )
    must_be_the_same([f"{seat.host} {seat.view}" for seat in seats], places)
    by_name = bool(os.environ.get(AT_VARIABLE))
    run, can = attach(tier, channel, seats, mode, by_name=by_name, reach=reach)
    if run is not None and mode != "never":
        scavenge(tier, channel, run, seats)
    facts = {**launch.describe([(host, pid) for host, pid, _ in everyone]), "place": can}
    told = together(
        channel, "begin", lambda: _look(reach, channel, run, facts, mode), RANKS_TIMEOUT_S
    )[0]
    record = AttemptRecord(told["attempt"], facts=facts)
    on_claimed(record.attempt)
    beginning = Beginning(told["run"], record, why_fresh=told["why_fresh"])
    try:
        tiers = reach.open(told["tiers"])
        return _try_in_order(tiers, channel, registry, beginning, told, reach.opener)
    except BaseException as error:
        if channel.world.rank == 0:
            record_refusal(tier, record, error, time.monotonic() - begun_s)
        raise


def record_parent(
    channel: Channel, log: AttemptLog, parent: str | None, facts: Mapping[str, Any]
) -> None:
    """Rank 0 records from where and how the attempt began; all ranks go on only if that stands.

    An attempt whose parent is not recorded would let a later one take an abandoned branch for
    its ancestry.
    """
    told: dict[str, Any] = {"ok": True}
    try:
        log.change(must=True, parent=parent, facts={**log.record.facts, **facts})
    except TrainckptError as error:
        told = {"error": error_json.to_json(error)}
    told = channel.gather("parent recorded", told, RANKS_TIMEOUT_S)[0]
    if "error" in told:
        raise error_json.from_json(told["error"])


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


def _look(
    reach: Reach, channel: Channel, run: str | None, facts: dict[str, Any], mode: str
) -> dict[str, Any]:
    """Rank 0: claim the attempt, and say which snapshots to try in which order."""
    if channel.world.rank != 0:
        return {}
    tier = reach.place
    run = run or attempt_records.found_run(tier)

    def read() -> dict[int, AttemptRecord]:
        return last_words.heard(tier, attempt_records.read_attempts(tier))

    known = catch_up(reach, run, read, sure=mode == "required")
    before = known.records
    record = attempt_records.claim(tier, lambda n: AttemptRecord(n, facts=facts), known.newest)
    try:
        choice = _choose(reach, run, before, mode)
        _must_come_before(choice.candidates, record.attempt)
    except TrainckptError as error:
        record_refusal(tier, record, error, 0.0)
        raise
    lost = {str(n): choices.lost_since(before, str(n)) for n in choice.candidates}
    return {
        "run": run,
        "attempt": record.attempt,
        "tiers": known.tiers,
        "candidates": [str(name) for name in choice.candidates],
        "refused": choice.refused,
        "why_fresh": choice.why_fresh,
        "lost": lost,
    }


def _must_come_before(candidates: Sequence[SnapshotName], attempt: int) -> None:
    """Nothing descends from what comes after it: readers would pass over all that it saves."""
    for name in candidates:
        if name.attempt >= attempt:
            raise UnusableSnapshot(
                f"{name} is of attempt {name.attempt}, and this is attempt {attempt}: another "
                "start of the run went on meanwhile",
                hint="let one of the two go on, and start again if that is to be this one",
            )


def _choose(
    reach: Reach, run: str, before: Mapping[int, AttemptRecord], mode: str
) -> choices.Choice:
    if mode == "never":
        return choices.Choice(why_fresh="resume='never'")
    wanted = os.environ.get(AT_VARIABLE)
    found = reach.candidates(run, before)
    if not wanted:
        reach.must_not_miss(found, before)
        choice = choices.choose(reach.place, run, before, found)
        if reach.encrypts:
            choices.must_be_sealed(choice, found)
        return choice
    chosen = catalog.find(found, wanted, reach.place.url)
    if chosen.manifest is None:
        raise UnusableSnapshot(
            f"{chosen.name}: {chosen.reason}",
            hint=f"trainckpt list {reach.place.url}, and name another",
        )
    return choices.Choice([chosen.name])


def record_refusal(tier: Tier, record: AttemptRecord, error: BaseException, seconds: float) -> None:
    """Rank 0: the attempt ends before it began. Exit codes get lost, so its record says why."""
    code = error.code if isinstance(error, SystemExit) else 1
    code = error.exit_code if isinstance(error, TrainckptError) else code
    outcome: dict[str, Any] = {
        "outcome": FAILED,
        "snapshot": None,
        "kind": "snapshot",
        "exactness": None,
        "lost_micro_batches": None,
        "tiers": [],
        "seconds": round(seconds, 3),
        "exit_code": code if isinstance(code, int) else 1,
        "reason": repr(error)[:500],
    }
    with contextlib.suppress(TrainckptError):
        written = attempt_records.read_attempts(tier).get(record.attempt, record)
        attempt_records.replace(tier, written.with_(outcome=outcome))


def _now_reading(
    tier: Tier, channel: Channel, record: AttemptRecord, number: int, name: SnapshotName
) -> AttemptRecord:
    """Record what is read next, before any rank reads it: the process may die of it."""
    record = record.with_(facts={**record.facts, choices.READING: str(name)})
    if channel.world.rank == 0:
        try:
            attempt_records.replace(tier, record)
        except TrainckptError as error:
            logger.warning("the attempt's record could not be written: %s", error.message)
        channel.put(f"reading/{number}", True)
    else:
        channel.get(f"reading/{number}", RANKS_TIMEOUT_S)
    return record


def _try_in_order(
    tiers: Sequence[Tier],
    channel: Channel,
    registry: Registry,
    beginning: Beginning,
    told: dict[str, Any],
    opener: Opener,
) -> Beginning:
    refused = dict(told["refused"])
    names = [SnapshotName.parse(text) for text in told["candidates"]]
    tier = tiers[0]
    memory = MemoryPlace.of(tier.url)
    hosts = beginning.record.facts["hosts"]
    for number, name in enumerate(names):
        assert name is not None
        record = _now_reading(tier, channel, beginning.record, number, name)
        beginning = replace(beginning, record=record)
        part = channel.scoped(f"read/{number}")
        read = read_candidate(tiers, memory, part, registry, beginning.run, name, hosts, opener)
        if not read.reasons:
            lost = told["lost"].get(str(name))
            found = replace(
                beginning, manifest=read.manifest, saved=read.saved, reader=read.reader,
                refused=refused,
            )  # fmt: skip
            return replace(found, lost=None if lost is None else lost + found.rewound)
        refused[str(name)] = "; ".join(read.reasons)
    if names or (refused and not told["why_fresh"] and _is_serious(refused)):
        raise NoUsableSnapshot(tier.url, refused)
    return replace(beginning, refused=refused)


def _is_serious(refused: Mapping[str, str]) -> bool:
    excused = (catalog.NOT_COMMITTED, catalog.ABANDONED)
    return any(reason not in excused for reason in refused.values())

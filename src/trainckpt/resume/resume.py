"""Resume: claim an attempt, choose the snapshot, read it on every rank, or refuse with reasons.

    every rank   attaches to the run directory
    all          copy newer snapshots from the hosts' memory to the run directory (`scavenge`)
    rank 0       copies the slower tiers' records of other attempts to the run directory, claims
                 an attempt number above all of them, lists the candidates (`candidate_order`)
    rank 0       records the candidate to be read next, in case the process dies of it
    every rank   reads and verifies its part of the candidate; all exchange their results
    all          usable on every rank: chosen. Damaged on any: refused by all, the next is tried.
                 The script's objects differ: no other snapshot would fit either, so it is raised
    rank 0       records the parent, before anything can be committed

Nothing live is touched until every rank has verified every byte. Rank 0 sends its errors to the
others, so all ranks raise the same one.
"""

from __future__ import annotations

import os
import socket
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from trainckpt.attempt import heartbeat, launch
from trainckpt.attempt.goodput import before_fact
from trainckpt.attempt.heartbeat import is_alive
from trainckpt.attempt.launch import AT_VARIABLE
from trainckpt.attempt.log import logger
from trainckpt.attempt.rank_agent import agent_identity
from trainckpt.errors import (
    ConfigurationError,
    NoUsableSnapshot,
    TrainckptError,
    UnusableSnapshot,
)
from trainckpt.format.attempt_record import FAILED, AttemptRecord
from trainckpt.format.attempt_times import TIMES
from trainckpt.format.names import ATTEMPTS, SnapshotName
from trainckpt.ranks import store
from trainckpt.ranks.store import RANKS_TIMEOUT_S, gather_or_raise
from trainckpt.resume import candidate_order, crash_marker, script_changes
from trainckpt.resume.candidate import read_candidate
from trainckpt.resume.scavenge import scavenge
from trainckpt.resume.script_changes import ScriptChanges
from trainckpt.resume.silent_deaths import agents_fact, with_outcomes_by_agents
from trainckpt.run_directory.tier_set import TierSet, catch_up
from trainckpt.run_directory.validate import (
    RankLocation,
    attach,
    must_be_the_same,
    own_places,
    own_view,
)
from trainckpt.snapshot import attempt_history, catalog
from trainckpt.snapshot import attempt_history as attempt_records
from trainckpt.storage.local import LocalTier
from trainckpt.storage.shared_memory import SharedMemoryDir

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from trainckpt.attempt.git_commit import GitCommit
    from trainckpt.attempt.record_writer import RecordWriter
    from trainckpt.attempt.time_keeper import TimeKeeper
    from trainckpt.format.cursor import Cursor
    from trainckpt.format.manifest import Manifest
    from trainckpt.ranks.store import RankStore
    from trainckpt.snapshot.decrypting_tier import KeyRing
    from trainckpt.snapshot.restore import Reader
    from trainckpt.state.captured import Saved
    from trainckpt.state.registry import Registry
    from trainckpt.storage.base import RunTier, Tier


# ---- a warning if the attempt before this one still trains
#
# Nothing is lost then, since each attempt's saves are a branch of their own. But the older attempt
# trains for nothing, perhaps unnoticed. Rank 0 checks as the attempt begins.


def still_alive(tier: RunTier, attempt: int) -> str:
    """Return the warning about the previous attempt, or ""."""
    before = attempt - 1
    with suppress(TrainckptError, OSError):
        age_s = heartbeat.age_s(tier, before) if before else None
        if age_s is None or age_s >= heartbeat.ALIVE_S:
            return ""
        record = attempt_history.read_attempt(tier, before)
        if record is None or record.outcome is not None or _has_gone(record):
            return ""
        where = ", ".join(sorted({str(host) for host in record.facts.get("hosts", [])}))
        return (
            f"attempt {before} of this run was alive {age_s:.0f} s ago ({where}). If it still "
            "trains, stop one of the two: its later snapshots are an abandoned branch"
        )
    return ""


def _has_gone(record: AttemptRecord) -> bool:
    """Return True if all its ranks were on this host and none is left."""
    hosts, pids = record.facts.get("hosts"), record.facts.get("pids")
    if not isinstance(hosts, list) or not isinstance(pids, list) or not pids:
        return False
    alive = (isinstance(pid, int) and pid > 0 and is_alive(pid) for pid in pids)
    return {*hosts} == {socket.gethostname()} and not any(alive)


# ---- the resume


@dataclass(frozen=True)
class ResumePoint:
    """The starting point of this attempt.

    Attributes:
        run: Id of the run.
        record: The attempt's record, parent not yet decided.
        manifest: Manifest of the snapshot to begin from; None for step 0.
        saved: This rank's verified state of it.
        reader: Reads more of it.
        refused: Snapshot -> reason for passing it over.
        why_fresh: Reason for a start at step 0, if any.
        lost: Micro-batches that earlier attempts trained after that snapshot; None if unknown.
        script: What the script gives, and how it differs from what the snapshot had.
        read_s: Seconds spent on reading and refusing snapshots.
        sources: Tier -> bytes of the files read from it.
        damaged: Tier -> copies there that did not pass verification.
        before: Rank 0: the records of all attempts before, as it read them.
    """

    run: str
    record: AttemptRecord
    manifest: Manifest | None = None
    saved: Saved | None = None
    reader: Reader | None = None
    refused: Mapping[str, str] | None = None
    why_fresh: str = ""
    lost: int | None = None
    script: ScriptChanges | None = None
    read_s: float = 0.0
    sources: Mapping[str, int] = field(default_factory=dict)
    damaged: Mapping[str, int] = field(default_factory=dict)
    before: Mapping[int, AttemptRecord] = field(default_factory=dict)

    @property
    def cursor(self) -> Cursor | None:
        """Return the cursor to continue at: the snapshot's, or its window's start; None for step
        0."""
        if self.manifest is None or self.saved is None or self.saved.exact:
            return self.manifest.cursor if self.manifest else None
        return self.manifest.window or self.manifest.cursor

    @property
    def rewound(self) -> int:
        """Return the number of the open window's micro-batches to train again in another layout."""
        at = self.cursor
        return self.manifest.cursor.micro_batches - at.micro_batches if self.manifest and at else 0


def begin(
    *,
    tier: RunTier,
    channel: RankStore,
    registry: Registry,
    mode: str,
    on_claimed: Callable[[AttemptRecord], None] = lambda _: None,
    reach: TierSet | None = None,
    given: Mapping[str, Any] | None = None,
    commit: GitCommit | None = None,
    times: TimeKeeper | None = None,
) -> ResumePoint:
    """Choose and read the snapshot this attempt begins from. Every rank calls it.

    Args:
        tier: The run directory.
        channel: Fresh keys of this Checkpointer.
        registry: The objects to restore; compared here, not changed.
        mode: "auto", "required" or "never".
        on_claimed: Called with the attempt's record before anything is read: notices are received
            from then on, and all ranks are known to be there.
        reach: The slower tiers to search too.
        given: What the script gives, from `script_changes`; None: it is not compared.
        commit: Of the script, on rank 0; waited for where another commit is refused.
        times: Of the attempt; recorded from the claim on.

    Raises:
        NothingToResume, NoUsableSnapshot, TierUnavailable, StateMismatch: on every rank alike.
    """
    begun_s = time.monotonic()
    me = [channel.world.host, os.getpid(), own_view(), agent_identity()]
    everyone = channel.gather("hosts and processes", me, RANKS_TIMEOUT_S)
    _compare_lengths(channel, registry)
    seats = [RankLocation(host, view) for host, _, view, _ in everyone]
    reach = reach or TierSet(tier)
    places = channel.gather(
        "the run's places", own_places(tier, reach.slower.tiers), RANKS_TIMEOUT_S
    )
    must_be_the_same([f"{seat.host} {seat.view}" for seat in seats], places)
    by_name = bool(os.environ.get(AT_VARIABLE))
    run, can = attach(tier, channel, seats, mode, by_name=by_name, reach=reach)
    if run is not None and mode != "never":
        scavenge(tier, channel, run, seats)
    facts = {**launch.describe([(host, pid) for host, pid, *_ in everyone]), "place": can}
    facts |= agents_fact([agent for *_, agent in everyone])
    if times is not None:
        facts[TIMES] = times.to_json()
    before: dict[int, AttemptRecord] = {}
    look = partial(
        _look, reach=reach, channel=channel, run=run, facts=facts, mode=mode, seen=before
    )
    agreed = gather_or_raise(channel, "begin", look, RANKS_TIMEOUT_S)[0]
    record = AttemptRecord(agreed["attempt"], facts=facts)
    on_claimed(record)
    script = None if given is None else ScriptChanges(given)
    beginning = ResumePoint(
        agreed["run"], record, why_fresh=agreed["why_fresh"], script=script, before=before
    )
    try:
        tiers = reach.open(agreed["tiers"])
        return _try_in_order(
            tiers=tiers,
            channel=channel,
            registry=registry,
            beginning=beginning,
            agreed=agreed,
            opener=reach.opener,
            commit=commit,
        )
    except BaseException as error:
        if channel.world.rank == 0:
            record_refusal(tier, record, error, time.monotonic() - begun_s)
        raise


def record_parent(
    channel: RankStore, record_writer: RecordWriter, parent: str | None, facts: Mapping[str, Any]
) -> None:
    """Record the attempt's parent and facts on rank 0; all ranks go on only if the write succeeds.

    With no recorded parent, a later attempt would take an abandoned branch for its ancestry.
    """
    result: dict[str, Any] = {"ok": True}
    try:
        record_writer.change(
            must=True, parent=parent, facts={**record_writer.record.facts, **facts}
        )
    except TrainckptError as error:
        result = {"error": store.to_json(error)}
    result = channel.gather("parent recorded", result, RANKS_TIMEOUT_S)[0]
    if "error" in result:
        raise store.from_json(result["error"])


def _compare_lengths(channel: RankStore, registry: Registry) -> None:
    """Refuse loaders of different lengths: some rank would wait forever for a missing batch."""
    mine = {kind.name: _length(kind.loader) for kind in registry.loaders}
    everyone = channel.gather("loader lengths", mine, RANKS_TIMEOUT_S)
    for name in mine:
        lengths = [other.get(name) for other in everyone]
        if len(set(lengths)) > 1:
            raise ConfigurationError(
                f"{name} has different numbers of batches on the ranks: {lengths}",
                hint="give every rank the same number, with DistributedSampler for example",
            )


def _length(loader: Any) -> int:
    try:
        return len(loader)
    except TypeError:
        return -1  # a stream


def _look(
    *,
    reach: TierSet,
    channel: RankStore,
    run: str | None,
    facts: dict[str, Any],
    mode: str,
    seen: dict[int, AttemptRecord],
) -> dict[str, Any]:
    """Claim the attempt on rank 0 and list the snapshots to try, in order.

    `facts` and `seen` are completed: by what is left of the attempt before, and by all records.
    """
    if channel.world.rank != 0:
        return {}
    tier = reach.run_tier
    run = run or attempt_records.found_run(tier)

    def read() -> dict[int, AttemptRecord]:
        records = crash_marker.with_crash_outcomes(tier, attempt_records.read_attempts(tier))
        return with_outcomes_by_agents(tier, records, facts)

    before, newest, tiers = catch_up(reach, run, read, sure=mode == "required")
    seen.update(before)
    facts |= before_fact(tier, before)
    record = attempt_records.claim(tier, lambda n: AttemptRecord(n, facts=facts), newest)
    if isinstance(tier, LocalTier):
        for folder in ("", ATTEMPTS):
            with suppress(TrainckptError):
                tier.remove_stale(folder, attempt_records.record_key(record.attempt))
    try:
        choice = _choose(reach, run, before, mode)
        for name in choice.candidates:  # readers would ignore every save that descends from it
            if name.attempt >= record.attempt:
                raise UnusableSnapshot(
                    f"{name} was saved by attempt {name.attempt}, but this is attempt "
                    f"{record.attempt}: another start of the run has continued meanwhile",
                    hint="stop one of the two; to continue with this one, start it again",
                )
    except TrainckptError as error:
        record_refusal(tier, record, error, 0.0)
        raise
    lost = {str(n): candidate_order.lost_since(before, str(n)) for n in choice.candidates}
    return {
        "run": run,
        "attempt": record.attempt,
        "tiers": tiers,
        "candidates": [str(name) for name in choice.candidates],
        "refused": choice.refused,
        "why_fresh": choice.why_fresh,
        "lost": lost,
    }


def _choose(
    reach: TierSet, run: str, before: Mapping[int, AttemptRecord], mode: str
) -> candidate_order.CandidateOrder:
    if mode == "never":
        return candidate_order.CandidateOrder(why_fresh="resume='never'")
    wanted = os.environ.get(AT_VARIABLE)
    known = reach.candidates(run, before)
    if not wanted:
        reach.must_not_miss(known, before)
        choice = candidate_order.order(reach.run_tier, run, before, known)
        if reach.encrypts:
            candidate_order.must_be_sealed(choice, known)
        return choice
    chosen = catalog.find(known, wanted, reach.run_tier.url)
    if chosen.manifest is None:
        raise UnusableSnapshot(
            f"{chosen.name}: {chosen.reason}",
            hint=f"choose another from: trainckpt list {reach.run_tier.url}",
        )
    return candidate_order.CandidateOrder([chosen.name])


def record_refusal(tier: Tier, record: AttemptRecord, error: BaseException, seconds: float) -> None:
    """Record on rank 0 why the attempt ended before it began: exit codes get lost."""
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
    with suppress(TrainckptError):
        written = attempt_records.read_attempt(tier, record.attempt) or record
        attempt_records.replace(tier, written.with_(outcome=outcome))


def _now_reading(
    tier: Tier, channel: RankStore, record: AttemptRecord, number: int, name: SnapshotName
) -> AttemptRecord:
    """Record the snapshot to be read next, before any rank reads it: the process may die of it."""
    record = record.with_(facts={**record.facts, candidate_order.READING: str(name)})
    if channel.world.rank == 0:
        try:
            attempt_records.replace(tier, record)
        except TrainckptError as error:
            logger.warning("could not write the attempt's record: %s", error.message)
        channel.put(f"reading/{number}", True)
    else:
        channel.get(f"reading/{number}", RANKS_TIMEOUT_S)
    return record


def _try_in_order(
    *,
    tiers: Sequence[Tier],
    channel: RankStore,
    registry: Registry,
    beginning: ResumePoint,
    agreed: dict[str, Any],
    opener: KeyRing,
    commit: GitCommit | None,
) -> ResumePoint:
    refused, begun_s = dict(agreed["refused"]), time.monotonic()
    damaged = Counter[str]()
    names = [SnapshotName.parse(text) for text in agreed["candidates"]]
    tier = tiers[0]
    memory = SharedMemoryDir.of(tier.url)
    hosts = beginning.record.facts["hosts"]
    for number, name in enumerate(names):
        assert name is not None
        record = _now_reading(tier, channel, beginning.record, number, name)
        beginning = replace(beginning, record=record)
        part = channel.scoped(f"read/{number}")
        read = read_candidate(
            tiers=tiers,
            memory=memory,
            channel=part,
            registry=registry,
            run=beginning.run,
            name=name,
            hosts=hosts,
            opener=opener,
        )
        damaged.update(read.damaged)
        if not read.reasons:
            lost = agreed["lost"].get(str(name))
            if beginning.script is not None and read.saved is not None:
                script = script_changes.settle(
                    tier=tier,
                    channel=part,
                    registry=registry,
                    saved=read.saved,
                    name=name,
                    given=beginning.script.script,
                    commit=commit,
                )
                beginning = replace(beginning, script=script)
            begun = replace(
                beginning,
                manifest=read.manifest,
                saved=read.saved,
                reader=read.reader,
                refused=refused,
                read_s=time.monotonic() - begun_s,
                sources=read.sources,
                damaged=damaged,
            )
            return replace(begun, lost=None if lost is None else lost + begun.rewound)
        refused[str(name)] = "; ".join(read.reasons)
    excused = (catalog.NOT_COMMITTED, catalog.ABANDONED)
    is_serious = any(reason not in excused for reason in refused.values())
    if names or (is_serious and not agreed["why_fresh"]):
        raise NoUsableSnapshot(tier.url, refused)
    return replace(beginning, refused=refused, damaged=damaged)

"""Tell how a run is now, from any shell that sees its place: `read_status`.

    is it alive, what does it do    its newest record and heartbeat; on its own host the counters in
                                    shared memory too, which are newer
    newest snapshot of each tier    manifests in every tier that answers
    where its time went             `attempt/goodput.py`

Nothing is claimed, and nothing is written but a file that tells the time of the file system.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from trainckpt.attempt import heartbeat
from trainckpt.attempt.goodput import RunAccount, account
from trainckpt.attempt.live_status import LiveStatus, parse_live_status
from trainckpt.attempt.options import LOCAL, MEMORY, PARTNER
from trainckpt.attempt.time_keeper import times_left
from trainckpt.errors import TrainckptError
from trainckpt.format import names
from trainckpt.format.attempt_times import NOTHING, TrainedCount, count_of, seconds_of
from trainckpt.format.names import SnapshotName
from trainckpt.run_directory.run_tiers import open_everywhere
from trainckpt.run_directory.run_url import open_run_tier
from trainckpt.storage.redact import one_line, redact_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainckpt.attempt.live_status import SavingNow
    from trainckpt.format.attempt_record import AttemptRecord
    from trainckpt.run_directory.run_tiers import RunTiers
    from trainckpt.snapshot.catalog import Candidate
    from trainckpt.storage.base import RunTier

NO_TIME = RunAccount()
ALIVE, DEAD, NONE = "alive", "dead", "none"  # besides the outcomes of a record


@dataclass(frozen=True, kw_only=True)
class TierNow:
    """The newest snapshot of one tier.

    Attributes:
        tier: Its name.
        url: Without secrets; None: it is memory, or unknown.
        why_not: Why the tier does not answer, or "".
        snapshot: Full name; None: there is none.
        created: Seconds since the Unix epoch; None: unknown.
        age_s: Seconds since then.
        lag_steps: Steps trained since; None: the run's step is unknown.
    """

    tier: str
    url: str | None = None
    why_not: str = ""
    snapshot: str | None = None
    created: float | None = None
    age_s: float | None = None
    lag_steps: int | None = None


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """One run, as of `when`.

    Attributes:
        run: URL of its place.
        when: Seconds since the Unix epoch.
        state: `ALIVE`, `DEAD` (no outcome and no heartbeat), `NONE` (no attempt) or the newest
            attempt's outcome.
        attempt: Number of the newest attempt; 0: none.
        since: When the attempt began, or when it ended; None: unknown.
        beat_age_s: Seconds since its last heartbeat; None: there is none.
        reason, exit_code: Of its outcome.
        hosts, world: Its hosts, each once, and its number of ranks.
        begun, reached: What was trained at its beginning, and by now.
        steps_per_s: None: not known yet.
        live: What it does now; None: it is not alive, or of an older release.
        written_bytes: Of the save under way, in the run directory; None: unknown.
        tiers: Nearest first.
        account: Where the run's time went.
    """

    run: str
    when: float
    state: str = NONE
    attempt: int = 0
    since: float | None = None
    beat_age_s: float | None = None
    reason: str = ""
    exit_code: int | None = None
    hosts: tuple[str, ...] = ()
    world: int | None = None
    begun: TrainedCount = NOTHING
    reached: TrainedCount = NOTHING
    steps_per_s: float | None = None
    live: LiveStatus | None = None
    written_bytes: int | None = None
    tiers: tuple[TierNow, ...] = ()
    account: RunAccount = NO_TIME

    @property
    def is_alive(self) -> bool:
        """True if its newest attempt lives."""
        return self.state == ALIVE

    def to_json(self) -> dict[str, Any]:
        """Return the document of `trainckpt status --json`."""
        body = asdict(replace(self, account=NO_TIME))
        return {**body, "account": self.account.to_json()}


def read_status(run: str) -> RunStatus:
    """Return how a run is now.

    Raises:
        NothingToResume: there is no run.
        TierUnavailable: its place refused.
    """
    everywhere = open_everywhere(run)
    return status_of(everywhere, open_run_tier(run), everywhere.candidates())


def status_of(everywhere: RunTiers, tier: RunTier, candidates: Sequence[Candidate]) -> RunStatus:
    """Return how a run is now, from what was read of it.

    Args:
        everywhere: The run and its tiers.
        tier: Its place.
        candidates: Its snapshots, newest first.
    """
    records = everywhere.records
    status = RunStatus(run=tier.url, when=time.time())
    if not records:
        return replace(status, tiers=_tiers(everywhere, candidates, status))
    record = records[max(records)]
    times = times_left(tier, record)
    status = replace(
        _of_attempt(status, tier, record),
        account=account(records, {record.attempt: times} if times is not None else {}),
    )
    if times is not None:
        status = replace(status, begun=times.begun, reached=times.reached)
        if status.since is None or status.is_alive:
            status = replace(status, since=times.began)
        elif record.outcome is None:
            status = replace(status, since=times.began + times.seconds)
    return replace(status, tiers=_tiers(everywhere, candidates, status))


def _of_attempt(status: RunStatus, tier: RunTier, record: AttemptRecord) -> RunStatus:
    """Return the status with what the newest attempt's record and heartbeat say."""
    outcome, facts = record.outcome or {}, record.facts
    age_s = None if record.outcome else heartbeat.age_s(tier, record.attempt)
    is_alive = age_s is not None and age_s < heartbeat.ALIVE_S
    live = parse_live_status(heartbeat.read(tier, record.attempt)) if is_alive else None
    since, seconds = seconds_of(facts.get("started")), outcome.get("seconds")
    if since is not None and seconds is not None:
        since += seconds
    step_s = live.step_s if live is not None else None
    return replace(
        status,
        state=ALIVE if is_alive else one_line(outcome.get("outcome") or DEAD),
        attempt=record.attempt,
        since=since,
        beat_age_s=age_s,
        reason=one_line(facts.get("damaged") or outcome.get("reason") or ""),
        exit_code=outcome.get("exit_code"),
        hosts=hosts_of(record),
        world=world_of(record),
        steps_per_s=1 / step_s if step_s else None,
        live=live,
        written_bytes=_written(tier, live.saving) if live is not None else None,
    )


def hosts_of(record: AttemptRecord) -> tuple[str, ...]:
    """Return the attempt's hosts, each once."""
    hosts = record.facts.get("hosts")
    return tuple(sorted({one_line(host) for host in hosts})) if isinstance(hosts, list) else ()


def world_of(record: AttemptRecord) -> int | None:
    """Return the attempt's number of ranks; None: unknown."""
    return count_of(record.facts.get("world")) or None


def _written(tier: RunTier, saving: SavingNow | None) -> int | None:
    """Return the bytes of a save that are in the run directory, as rank 0's file tells."""
    name = SnapshotName.parse(saving.snapshot) if saving is not None else None
    if saving is None or name is None or saving.in_memory or not saving.file_bytes:
        return None
    try:
        found = tier.size(f"{name.folder}/{names.shard_file_name(0)}")
    except TrainckptError:
        return None
    if found is None:
        return None
    return int(saving.num_bytes * min(found / saving.file_bytes, 1.0))


def _tiers(
    everywhere: RunTiers, candidates: Sequence[Candidate], status: RunStatus
) -> tuple[TierNow, ...]:
    """Return the newest snapshot of each tier, memory first."""
    rows = _in_memory(candidates, status)
    for tier in (*everywhere.tiers, *everywhere.empty):
        newest = next((c for c in candidates if c.usable and tier.name in c.tiers), None)
        row = TierNow(tier=one_line(tier.name), url=redact_text(tier.url))
        rows.append(_with_snapshot(row, newest, status))
    if all(row.tier != LOCAL for row in rows):
        rows.append(TierNow(tier=LOCAL, url=everywhere.run_tier.url))
    for name, reason in everywhere.silent.items():
        rows.append(TierNow(tier=one_line(name), why_not=one_line(reason)))
    return tuple(rows)


def _in_memory(candidates: Sequence[Candidate], status: RunStatus) -> list[TierNow]:
    live, rows = status.live, []
    if live is None:
        return []
    by_name = {str(candidate.name): candidate for candidate in candidates}
    if live.in_memory:
        rows.append((MEMORY, live.in_memory))
    if live.replicates:
        rows.append((PARTNER, live.replicated))
    found = []
    for tier, spelled in rows:
        name, row = SnapshotName.parse(spelled), TierNow(tier=tier)
        if name is not None and spelled not in by_name:
            row = replace(row, snapshot=spelled, lag_steps=_lag(name, status))
        found.append(_with_snapshot(row, by_name.get(spelled), status))
    return found


def _with_snapshot(row: TierNow, newest: Candidate | None, status: RunStatus) -> TierNow:
    if newest is None:
        return row
    created = newest.manifest.created if newest.manifest is not None else None
    return replace(
        row,
        snapshot=str(newest.name),
        created=created,
        age_s=None if created is None else max(status.when - created, 0.0),
        lag_steps=_lag(newest.name, status),
    )


def _lag(name: SnapshotName, status: RunStatus) -> int | None:
    reached = status.reached.steps
    return max(reached - name.step, 0) if reached else None

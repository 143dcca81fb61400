"""Report on a run from its beginning: attempts, saves, checkpoints, troubles and advice.

`build_report` is a pure function of what was read: the status, the records of all attempts, their
last heartbeats, and the catalog of all tiers. `read_report` reads. Nothing is claimed, and no data
of a snapshot is read, so an encrypted run needs no key.

A record is written at each commit. Saves that came to nothing since then stand in the heartbeat,
which a killed attempt leaves behind.

Texts come from the run, and secrets in them are replaced. They are not escaped: whoever shows them
does that.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from trainckpt.attempt import heartbeat
from trainckpt.attempt.live_status import parse_live_status
from trainckpt.errors import TrainckptError
from trainckpt.format import names
from trainckpt.format.attempt_record import FAILED, KILLED, UNDECIDED
from trainckpt.format.attempt_times import seconds_of
from trainckpt.format.save_history import NOT_COPIED, SAVES, TOTALS, SaveHistory, parse_history
from trainckpt.inspect.run_status import ALIVE, DEAD, hosts_of, status_of, world_of
from trainckpt.planning.advice import for_run
from trainckpt.planning.run_history import measure
from trainckpt.run_directory.run_tiers import open_everywhere
from trainckpt.run_directory.run_url import open_run_tier
from trainckpt.snapshot.catalog import NOT_COMMITTED
from trainckpt.storage.base import num_looks
from trainckpt.storage.redact import one_line
from trainckpt.storage.worker_pool import call_all

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from trainckpt.attempt.goodput import AttemptAccount
    from trainckpt.attempt.live_status import LiveStatus
    from trainckpt.format.attempt_record import AttemptRecord
    from trainckpt.format.names import SnapshotName
    from trainckpt.inspect.run_status import RunStatus
    from trainckpt.planning.advice import Recommendation
    from trainckpt.snapshot.catalog import Candidate
    from trainckpt.storage.base import RunTier

MOST_TROUBLES = 200
NO_SAVES = SaveHistory()
BEING_SAVED = "it is being saved"  # `CheckpointReport.why_not`
DAMAGED = "damaged"  # `AttemptReport.how`, besides outcomes, `ALIVE` and `DEAD`


@dataclass(frozen=True, kw_only=True)
class LastBeat:
    """The last heartbeat of one attempt.

    Attributes:
        is_alive: It is so young that the attempt lives.
        live: What the attempt did then; None: it is of an older release.
    """

    is_alive: bool
    live: LiveStatus | None = None


@dataclass(frozen=True, kw_only=True)
class AttemptReport:
    """One attempt.

    Attributes:
        attempt: Its number.
        how: Its outcome; `ALIVE` (also beside a newer attempt), `DEAD` (it ended without a record)
            or `DAMAGED`.
        reason: Of its end, or of the damage.
        exit_code: None: unknown.
        parent: Full name of the snapshot it began from; "": step 0; None: it chose none.
        snapshot: Full name of the snapshot that its end left for the next one, or None.
        exactness: Of its own resume; None: unknown.
        lost_micro_batches: Trained beyond `snapshot`; None: unknown.
        world: Its number of ranks; None: unknown.
        hosts: Each once.
        account: Where its time went; None: unknown.
        saves: What became of its saves.
    """

    attempt: int
    how: str
    reason: str = ""
    exit_code: int | None = None
    parent: str | None = None
    snapshot: str | None = None
    exactness: str | None = None
    lost_micro_batches: int | None = None
    world: int | None = None
    hosts: tuple[str, ...] = ()
    account: AttemptAccount | None = None
    saves: SaveHistory = NO_SAVES


@dataclass(frozen=True, kw_only=True)
class CheckpointReport:
    """One snapshot that some tier holds.

    Attributes:
        name: Full name.
        attempt, step, micro: Of its name.
        created: Seconds since the Unix epoch; None: its manifest is missing or damaged.
        num_bytes, reached_bytes: Of its own files, and of older ones that it refers to.
        world: Ranks.
        tags, because: Of its save.
        tiers: With a complete copy.
        encrypted: It is.
        usable, why_not: Whether a resume may try it.
    """

    name: str
    attempt: int
    step: int
    micro: int
    created: float | None = None
    num_bytes: int | None = None
    reached_bytes: int | None = None
    world: int | None = None
    tags: tuple[str, ...] = ()
    because: str = ""
    tiers: tuple[str, ...] = ()
    encrypted: bool = False
    usable: bool = True
    why_not: str = ""


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """Something that was refused, or failed.

    Attributes:
        what: "attempt", "save", "copy", "checkpoint" or "tier".
        name: Its number or name.
        how: What became of it.
        reason: The reason.
        when: Seconds since the Unix epoch; None: unknown.
    """

    what: str
    name: str
    how: str
    reason: str = ""
    when: float | None = None


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """One run, from its first launch to `status.when`.

    Attributes:
        status: How it is now.
        attempts: Oldest first.
        checkpoints: Newest first.
        troubles: Oldest first, at most `MOST_TROUBLES`.
        num_troubles: How many are recorded; a record keeps the last ones of its saves.
        advice: None: nothing can be said yet.
        every_s: Interval of saves in use; None: unknown.
        why_no_advice: "" with an advice.
    """

    status: RunStatus
    attempts: tuple[AttemptReport, ...] = ()
    checkpoints: tuple[CheckpointReport, ...] = ()
    troubles: tuple[Trouble, ...] = ()
    num_troubles: int = 0
    advice: Recommendation | None = None
    every_s: float | None = None
    why_no_advice: str = ""

    @property
    def run(self) -> str:
        """Return the URL of its place, without secrets."""
        return one_line(self.status.run)

    @property
    def saves(self) -> SaveHistory:
        """Return the counts of all attempts; no rows."""
        return SaveHistory(
            **{name: sum(getattr(each.saves, name) for each in self.attempts) for name in TOTALS}
        )

    def to_json(self) -> dict[str, Any]:
        """Return the document of `trainckpt report --json`, without the advice."""
        return {
            "run": self.run,
            "when": self.status.when,
            "state": self.status.state,
            "account": self.status.account.to_json(),
            "attempts": [asdict(each) for each in self.attempts],
            "saves": {name: getattr(self.saves, name) for name in TOTALS},
            "checkpoints": [asdict(each) for each in self.checkpoints],
            "tiers": [asdict(each) for each in self.status.tiers],
            "troubles": [asdict(each) for each in self.troubles],
            "num_troubles": self.num_troubles,
            "every_s": self.every_s,
            "why_no_advice": self.why_no_advice,
        }


def read_report(run: str) -> RunReport:
    """Return the report on a run.

    Raises:
        NothingToResume: there is no run.
        TierUnavailable: its place refused.
    """
    everywhere, tier = open_everywhere(run), open_run_tier(run)
    candidates = everywhere.candidates()
    status = status_of(everywhere, tier, candidates)
    return build_report(status, everywhere.records, candidates, _last_beats(tier))


def _last_beats(tier: RunTier) -> dict[int, LastBeat]:
    """Return the last heartbeat of each attempt that lives or was killed: others remove theirs."""
    found: dict[int, LastBeat] = {}

    def look(attempt: int) -> None:
        if (age_s := heartbeat.age_s(tier, attempt)) is not None:
            live = parse_live_status(heartbeat.read(tier, attempt))
            found[attempt] = LastBeat(is_alive=age_s < heartbeat.ALIVE_S, live=live)

    attempts = map(heartbeat.attempt_of, tier.list(names.ATTEMPTS))
    calls = [partial(look, attempt) for attempt in attempts if attempt is not None]
    call_all(calls, num_looks([tier]), "trainckpt-look")
    return found


def build_report(
    status: RunStatus,
    records: Mapping[int, AttemptRecord],
    candidates: Sequence[Candidate],
    beats: Mapping[int, LastBeat],
) -> RunReport:
    """Return the report on a run. Pure.

    Args:
        status: How it is now, with the account of its time.
        records: Number -> record of each attempt.
        candidates: Its snapshots in all tiers, newest first.
        beats: Number -> last heartbeat of an attempt, if it is left.
    """
    accounts = {each.attempt: each for each in status.account.attempts}
    alive = _alive(status, records, beats)
    attempts = tuple(
        _attempt(
            records[number],
            accounts.get(number),
            beats[number].live if number in beats else None,
            is_alive=number in alive,
        )
        for number in sorted(records)
    )
    saving = _being_saved(candidates, attempts)
    checkpoints = tuple(_checkpoint(each, is_saving=each.name in saving) for each in candidates)
    troubles = sorted(
        [*_of_attempts(attempts), *_of_checkpoints(checkpoints), *_of_tiers(status)],
        key=lambda each: (each.when is None, each.when or 0.0),
    )
    report = RunReport(
        status=status,
        attempts=attempts,
        checkpoints=checkpoints,
        troubles=tuple(troubles[-MOST_TROUBLES:]),
        num_troubles=len(troubles),
    )
    newest = next((each.manifest for each in candidates if each.manifest is not None), None)
    try:
        if not records:
            return replace(report, why_no_advice="no attempt has begun")
        measured = measure(records, newest)
        return replace(report, advice=for_run(measured), every_s=measured.every_s)
    except TrainckptError as error:
        return replace(report, why_no_advice=one_line(error.message))


def _alive(
    status: RunStatus, records: Mapping[int, AttemptRecord], beats: Mapping[int, LastBeat]
) -> set[int]:
    """Return the attempts that live: the newest, and older ones that have beaten since it began.

    One that was killed just before a newer one began has a young heartbeat as well.
    """
    alive = {status.attempt} if status.is_alive else set()
    newest = records.get(status.attempt)
    began = None if newest is None else seconds_of(newest.facts.get("started"))
    for number, beat in beats.items():
        if number != status.attempt and beat.is_alive and beat.live is not None:
            alive |= {number} if began is not None and beat.live.written > began else set()
    return alive


def _attempt(
    record: AttemptRecord,
    account: AttemptAccount | None,
    live: LiveStatus | None,
    *,
    is_alive: bool,
) -> AttemptReport:
    outcome, facts = record.outcome or {}, record.facts
    how, reason = outcome.get("outcome"), outcome.get("reason")
    if facts.get("damaged"):
        how, reason = DAMAGED, facts["damaged"]
    elif how is None:
        how = ALIVE if is_alive else DEAD
    saves = parse_history(facts.get(SAVES)) or NO_SAVES
    if live is not None:
        saves = _with_losses(saves, live)
    return AttemptReport(
        attempt=record.attempt,
        how=one_line(how),
        reason=one_line(reason or ""),
        exit_code=outcome.get("exit_code"),
        parent=None if record.parent == UNDECIDED else one_line(record.parent or ""),
        snapshot=_line(outcome.get("snapshot") or record.newest_commit),
        exactness=_line(outcome.get("exactness")),
        lost_micro_batches=outcome.get("lost_micro_batches"),
        world=world_of(record),
        hosts=hosts_of(record),
        account=account,
        saves=_without_secrets(saves),
    )


def _line(text: str | None) -> str | None:
    return None if text is None else one_line(text)


def _with_losses(saves: SaveHistory, live: LiveStatus) -> SaveHistory:
    """Return the history with the saves that came to nothing since the record was written."""
    known = {(lost.snapshot, lost.how) for lost in saves.not_kept}
    newer = [lost for lost in live.not_saved if (lost.snapshot, lost.how) not in known]
    return replace(
        saves,
        skipped=max(saves.skipped, live.skipped),
        failed=max(saves.failed, live.failed),
        not_kept=tuple(sorted([*saves.not_kept, *newer], key=lambda lost: lost.when)),
    )


def _without_secrets(saves: SaveHistory) -> SaveHistory:
    """Return the history with texts to show: a record may be written by hand."""
    tiers = {tier: one_line(tier) for tier in {tier for row in saves.rows for tier in row.copies}}
    rows = [
        replace(row, copies={tiers[tier]: took_s for tier, took_s in row.copies.items()})
        for row in saves.rows
    ]
    not_kept = [
        replace(
            lost,
            snapshot=one_line(lost.snapshot),
            how=one_line(lost.how),
            tier=one_line(lost.tier),
            reason=one_line(lost.reason),
        )
        for lost in saves.not_kept
    ]
    return replace(saves, rows=tuple(rows), not_kept=tuple(not_kept))


def _being_saved(
    candidates: Sequence[Candidate], attempts: Sequence[AttemptReport]
) -> set[SnapshotName]:
    """Return the snapshots that live attempts are saving: of each its newest, as long as it has
    neither come to a commit nor to nothing.
    """
    found = set()
    for attempt in attempts:
        if attempt.how == ALIVE:
            lost = {each.snapshot for each in attempt.saves.not_kept}
            own = (each for each in candidates if each.name.attempt == attempt.attempt)
            newest = next(own, None)
            if newest is not None and newest.reason == NOT_COMMITTED:
                found |= {newest.name} if str(newest.name) not in lost else set()
    return found


def _checkpoint(candidate: Candidate, *, is_saving: bool) -> CheckpointReport:
    name, manifest = candidate.name, candidate.manifest
    report = CheckpointReport(
        name=str(name),
        attempt=name.attempt,
        step=name.step,
        micro=name.micro,
        tiers=tuple(map(one_line, candidate.tiers)),
        usable=candidate.usable,
        why_not=BEING_SAVED if is_saving else one_line(candidate.reason),
    )
    if manifest is None:
        return report
    return replace(
        report,
        created=manifest.created,
        num_bytes=manifest.num_bytes,
        reached_bytes=manifest.reached_bytes,
        world=manifest.world,
        tags=tuple(map(one_line, manifest.tags)),
        because=one_line(manifest.reason),
        encrypted=manifest.encryption is not None,
    )


# ---- what was refused, and what failed


def _of_attempts(attempts: Sequence[AttemptReport]) -> Iterator[Trouble]:
    for each in attempts:
        how, reason = "", each.reason
        if each.how == DAMAGED:
            how = "record damaged"
        elif each.how == DEAD:
            how, reason = DEAD, reason or "it ended without a record"
        elif each.how in (FAILED, KILLED):
            how = each.how
        elif each.how == ALIVE and each is not attempts[-1]:
            how, reason = "goes on", "a newer attempt has begun, and gives up what this one saves"
        if how:
            ended = None if each.account is None else each.account.ended
            name = str(each.attempt)
            yield Trouble(what="attempt", name=name, how=how, reason=reason, when=ended)
        for lost in each.saves.not_kept:
            copied = lost.how == NOT_COPIED
            yield Trouble(
                what="copy" if copied else "save",
                name=lost.snapshot,
                how=f"failed to {lost.tier}" if copied else lost.how,
                reason=lost.reason,
                when=lost.when,
            )


def _of_checkpoints(checkpoints: Sequence[CheckpointReport]) -> Iterator[Trouble]:
    for each in checkpoints:
        if not each.usable and each.why_not != BEING_SAVED:
            yield Trouble(
                what="checkpoint",
                name=each.name,
                how="refused",
                reason=each.why_not,
                when=each.created,
            )


def _of_tiers(status: RunStatus) -> Iterator[Trouble]:
    for each in status.tiers:
        if each.why_not:
            reason = one_line(each.why_not)
            yield Trouble(
                what="tier",
                name=one_line(each.tier),
                how="does not answer",
                reason=reason,
                when=status.when,
            )

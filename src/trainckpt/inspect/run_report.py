"""Report on a run from its beginning: attempts, saves, checkpoints, troubles and advice.

`build_report` is a pure function of what was read: the status, the records of all attempts, and the
catalog of all tiers. `read_report` reads. Nothing is claimed, and no data of a snapshot is read, so
an encrypted run needs no key.

Texts come from the run, and secrets in them are replaced. They are not escaped: whoever shows them
does that.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from trainckpt.errors import TrainckptError
from trainckpt.format.attempt_record import FAILED, KILLED, UNDECIDED
from trainckpt.format.save_history import NOT_COPIED, SAVES, SaveHistory, parse_history
from trainckpt.inspect.run_status import ALIVE, DEAD, NO_TIME, RunStatus, status_of
from trainckpt.planning.advice import for_run
from trainckpt.planning.run_history import measure
from trainckpt.run_directory.run_tiers import open_everywhere
from trainckpt.run_directory.run_url import open_run_tier
from trainckpt.storage.redact import one_line

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from trainckpt.attempt.goodput import AttemptAccount
    from trainckpt.format.attempt_record import AttemptRecord
    from trainckpt.planning.advice import Recommendation
    from trainckpt.snapshot.catalog import Candidate

MOST_TROUBLES = 200
NO_SAVES = SaveHistory()
DAMAGED = "damaged"  # `AttemptReport.how`, besides outcomes, `ALIVE` and `DEAD`


@dataclass(frozen=True, kw_only=True)
class AttemptReport:
    """One attempt.

    Attributes:
        attempt: Its number.
        how: Its outcome; `ALIVE`, `DEAD` (it ended without a record) or `DAMAGED`.
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
        num_troubles: How many there are.
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
        histories = [each.saves for each in self.attempts]
        return SaveHistory(
            committed=sum(each.committed for each in histories),
            in_memory=sum(each.in_memory for each in histories),
            skipped=sum(each.skipped for each in histories),
            failed=sum(each.failed for each in histories),
            not_copied=sum(each.not_copied for each in histories),
            num_bytes=sum(each.num_bytes for each in histories),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the document of `trainckpt report --json`, without the advice."""
        status = asdict(replace(self.status, account=NO_TIME))
        saves = asdict(self.saves)
        del saves["rows"], saves["not_kept"]
        return {
            "run": self.run,
            "when": self.status.when,
            "state": self.status.state,
            "account": self.status.account.to_json(),
            "attempts": [asdict(each) for each in self.attempts],
            "saves": saves,
            "checkpoints": [asdict(each) for each in self.checkpoints],
            "tiers": status["tiers"],
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
    everywhere = open_everywhere(run)
    candidates = everywhere.candidates()
    status = status_of(everywhere, open_run_tier(run), candidates)
    return build_report(status, everywhere.records, candidates)


def build_report(
    status: RunStatus, records: Mapping[int, AttemptRecord], candidates: Sequence[Candidate]
) -> RunReport:
    """Return the report on a run. Pure.

    Args:
        status: How it is now, with the account of its time.
        records: Number -> record of each attempt.
        candidates: Its snapshots in all tiers, newest first.
    """
    accounts = {each.attempt: each for each in status.account.attempts}
    attempts = tuple(
        _attempt(records[number], accounts.get(number), status) for number in sorted(records)
    )
    troubles = sorted(
        [*_of_attempts(attempts), *_of_checkpoints(candidates), *_of_tiers(status)],
        key=lambda each: (each.when is None, each.when or 0.0),
    )
    report = RunReport(
        status=status,
        attempts=attempts,
        checkpoints=tuple(map(_checkpoint, candidates)),
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


def _attempt(
    record: AttemptRecord, account: AttemptAccount | None, status: RunStatus
) -> AttemptReport:
    outcome, facts = record.outcome or {}, record.facts
    how, reason = outcome.get("outcome"), outcome.get("reason")
    if facts.get("damaged"):
        how, reason = DAMAGED, facts["damaged"]
    elif how is None:
        is_now = record.attempt == status.attempt and status.is_alive
        how = ALIVE if is_now else DEAD
    hosts, world = facts.get("hosts"), facts.get("world")
    names = sorted({one_line(host) for host in hosts}) if isinstance(hosts, list) else []
    return AttemptReport(
        attempt=record.attempt,
        how=one_line(how),
        reason=one_line(reason or ""),
        exit_code=outcome.get("exit_code"),
        parent=None if record.parent == UNDECIDED else record.parent or "",
        snapshot=outcome.get("snapshot") or record.newest_commit,
        exactness=outcome.get("exactness"),
        lost_micro_batches=outcome.get("lost_micro_batches"),
        world=world if type(world) is int else None,
        hosts=tuple(names),
        account=account,
        saves=parse_history(facts.get(SAVES)) or NO_SAVES,
    )


def _checkpoint(candidate: Candidate) -> CheckpointReport:
    name, manifest = candidate.name, candidate.manifest
    report = CheckpointReport(
        name=str(name),
        attempt=name.attempt,
        step=name.step,
        micro=name.micro,
        tiers=tuple(map(one_line, candidate.tiers)),
        usable=candidate.usable,
        why_not=one_line(candidate.reason),
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
        ended = None if each.account is None else each.account.ended
        if each.how in (FAILED, KILLED, DEAD, DAMAGED):
            reason = each.reason or {DEAD: "it ended without a record"}.get(each.how, "")
            how = "record damaged" if each.how == DAMAGED else each.how
            name = str(each.attempt)
            yield Trouble(what="attempt", name=name, how=how, reason=reason, when=ended)
        for lost in each.saves.not_kept:
            copied = lost.how == NOT_COPIED
            yield Trouble(
                what="copy" if copied else "save",
                name=lost.snapshot,
                how=f"failed to {one_line(lost.tier)}" if copied else lost.how,
                reason=one_line(lost.reason),
                when=lost.when,
            )


def _of_checkpoints(candidates: Sequence[Candidate]) -> Iterator[Trouble]:
    for each in candidates:
        if not each.usable:
            when = None if each.manifest is None else each.manifest.created
            reason = one_line(each.reason)
            name = str(each.name)
            yield Trouble(what="checkpoint", name=name, how="refused", reason=reason, when=when)


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

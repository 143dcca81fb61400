"""Order the snapshots an attempt may begin from, and give the reasons against the others.

Newest first, but a survivors' snapshot without the state of lost ranks comes after every bitwise
one. A snapshot on which attempts died is tried last. An attempt *died on* a snapshot if it ended by
its own error between starting to read it and its first boundary:

    an exception, or sys.exit      its own error, unless the exit code blames something else: a
                                   script that does not fit, a store that does not answer
    killed, says its supervisor    its own error if no end was requested: a crash in native code,
                                   or the kernel short of memory, not distinguishable from any
                                   other SIGKILL of the ranks that spares the supervisor
    silent, and torchrun lives on  the same (`silent_deaths`)
    crash marker, no supervisor    its own error: a crash in native code (`crash_marker`)
    no record of its end           unknown, and not counted: a machine taken away kills the
                                   supervisor too
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from trainckpt.attempt.log import logger
from trainckpt.attempt.options import MEMORY, PARTNER
from trainckpt.errors import REFUSALS, START_AGAIN, NoAgreement, UnusableSnapshot
from trainckpt.format.attempt_record import FAILED, KILLED, STARTING, UNDECIDED
from trainckpt.format.names import SnapshotName
from trainckpt.snapshot import catalog
from trainckpt.storage.shared_memory import folders_of_others

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trainckpt.format.attempt_record import AttemptRecord
    from trainckpt.storage.base import Tier

MOST_DEATHS = 2
READING = "reading"  # in an attempt's record: the snapshot being read, before the parent is decided
KEEP_LAST = "keep_last"  # in it too: for a prune from outside
# In the supervisor's outcome: the state in which the attempt died by itself.
DIED_WHILE = "died_while"
_SIGNALS = ("SIGHUP", "SIGINT", "SIGUSR1", "SIGTERM")
# Exit codes that do not blame the snapshot: refusals, stops, and signals to the process.
_FAULT_ELSEWHERE = frozenset(
    {0, *REFUSALS, NoAgreement.exit_code, START_AGAIN}
    | {128 + getattr(signal, name) for name in _SIGNALS if hasattr(signal, name)}
)


@dataclass(frozen=True)
class CandidateOrder:
    """Rank 0's decision.

    Attributes:
        candidates: Snapshots to try, in this order.
        refused: Snapshot -> reason for its exclusion or its last position.
        why_fresh: Reason for a start at step 0, if any.
    """

    candidates: list[SnapshotName] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    why_fresh: str = ""


def order(
    tier: Tier,
    run: str,
    before: Mapping[int, AttemptRecord],
    known: tuple[catalog.Candidate, ...] | None = None,
) -> CandidateOrder:
    """Order the run's snapshots.

    Args:
        tier, run: The run directory, and the run's id.
        before: The records of all earlier attempts.
        known: Candidates of all tiers; None: read them from the run directory.
    """
    known = catalog.read_catalog(tier, run, before) if known is None else known
    refused = {str(c.name): c.reason for c in known if not c.usable}
    usable = [c.name for c in known if c.usable]
    refused.update(_gone(before, known))
    for number, other in before.items():
        if "damaged" in other.facts:
            logger.warning(
                "the record of attempt %d is damaged: %s", number, other.facts["damaged"]
            )
    if not usable and not _was_committed(before, known):
        branch = any(c.reason == catalog.ABANDONED for c in known)
        why = "nothing was committed on this branch" if branch else "nothing was ever committed"
        return CandidateOrder([], refused, why if before else "")
    for name in usable:
        if (deaths := died_on(before, str(name))) >= MOST_DEATHS:
            refused[str(name)] = f"{deaths} attempts died on it, so it is tried last"
    inexact = {c.name for c in known if c.manifest is not None and c.manifest.not_bitwise}
    usable.sort(key=lambda n: (str(n) in refused, n in inexact))
    return CandidateOrder(usable, refused)


def must_be_sealed(choice: CandidateOrder, known: Sequence[catalog.Candidate]) -> None:
    """Refuse unencrypted snapshots newer than an encrypted one, for a run that encrypts.

    Anyone with write access to the run directory could have put one there without a key.

    Raises:
        UnusableSnapshot: there is such a snapshot; it can be used only by name.
    """
    chosen = {c.name: c.manifest for c in known if c.name in choice.candidates and c.manifest}
    sealed = [name for name, manifest in chosen.items() if manifest.encryption is not None]
    for name in sorted(chosen, reverse=True):
        if name not in sealed and sealed and name > min(sealed):
            raise UnusableSnapshot(
                f"{name} is not encrypted, but the older {max(s for s in sealed if s < name)} is: "
                "a stranger without the key may have written it",
                hint=f"if it is yours: trainckpt resume RUN --at {name}; otherwise delete it",
            )


def died_on(attempts: Mapping[int, AttemptRecord], snapshot: str) -> int:
    """Count the attempts that ended by their own error between reading `snapshot` and a
    boundary."""
    return sum(
        _began_with(record) == snapshot and _died_by_own_error(record)
        for record in attempts.values()
    )


def lost_since(before: Mapping[int, AttemptRecord], snapshot: str) -> int | None:
    """Return the micro-batches that the last training attempt trained after `snapshot`.

    None if its record does not say.
    """
    known: int | None = None
    for _, record in sorted(before.items(), reverse=True):
        outcome = record.outcome or {}
        if STARTING in (record.state, outcome.get(DIED_WHILE)):
            continue  # it trained nothing: earlier losses remain
        lost = outcome.get("lost_micro_batches")
        if lost == 0 and record.parent == snapshot == outcome.get("snapshot"):
            known = 0
            continue  # it stopped where it began: earlier losses remain
        return lost if outcome.get("snapshot") == snapshot and type(lost) is int else known
    return known


def _began_with(record: AttemptRecord) -> object:
    return record.facts.get(READING) if record.parent == UNDECIDED else record.parent


def _died_by_own_error(record: AttemptRecord) -> bool:
    outcome = record.outcome or {}
    if outcome.get("exit_code") in _FAULT_ELSEWHERE:
        return False
    if outcome.get("outcome") == KILLED:
        return outcome.get(DIED_WHILE) == STARTING
    interrupted = str(outcome.get("reason", "")).startswith("KeyboardInterrupt")
    return outcome.get("outcome") == FAILED and record.state == STARTING and not interrupted


def _gone(
    before: Mapping[int, AttemptRecord], known: tuple[catalog.Candidate, ...]
) -> dict[str, str]:
    """Return recorded snapshots newer than all existing ones, now missing.

    An older missing one was pruned, in order.
    """
    names = {candidate.name for candidate in known}
    newest = max((c.name for c in known if c.usable), default=None)
    recorded = {
        SnapshotName.parse(record.newest_commit or ""): number for number, record in before.items()
    }
    reasons = {
        name: f"attempt {number} committed it, but it is missing"
        for name, number in recorded.items()
        if name
    }
    for number, record in before.items():
        outcome = record.outcome or {}
        name = SnapshotName.parse(outcome.get("snapshot") or "")
        if name and outcome.get("tiers") in _IN_MEMORY_ALONE:
            reasons[name] = _not_in_memory(number, record)
    return {
        str(name): reason
        for name, reason in reasons.items()
        if name not in names and (newest is None or name > newest)
    }


_IN_MEMORY_ALONE = ([MEMORY], [PARTNER])


def _not_in_memory(number: int, record: AttemptRecord) -> str:
    hosts = record.facts.get("hosts")
    where = ", ".join(dict.fromkeys(map(str, hosts))) if isinstance(hosts, list) else "its hosts"
    closed = [f"{each} belongs to another user" for each in folders_of_others()]
    return "; ".join(
        [f"attempt {number} kept it in the memory of {where} alone, which has it no more", *closed]
    )


def _was_committed(
    before: Mapping[int, AttemptRecord], known: tuple[catalog.Candidate, ...]
) -> bool:
    """Return True if the newest attempt's ancestry ever held a commit, pruned or not."""
    reach = catalog.ancestry(before, [c.name for c in known])
    return any(before[n].newest_commit for n in reach if n in before) or any(
        c.reason not in (catalog.NOT_COMMITTED, catalog.ABANDONED)
        and c.name.sequence <= reach.get(c.name.attempt, -1)
        for c in known
    )

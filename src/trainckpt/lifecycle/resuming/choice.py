"""The choice: which snapshots an attempt may begin from, in which order, and why not others.

Newest first, but what survivors could save only without the state of lost ranks comes after
whatever is bitwise. One on which attempts died is tried last. An attempt *died on* a snapshot if it
ended by its own error between starting to read it and its first boundary:

    an exception, or sys.exit      its own, unless the code says that the fault lies elsewhere:
                                   a script that does not fit, a place that does not answer
    killed, says its supervisor    its own if nobody had asked for an end: a crash in native code,
                                   or the kernel short of memory, which cannot be told from any
                                   other SIGKILL that hits the ranks and spares the supervisor
    last words, no supervisor      its own: a crash in native code (`last_words`)
    no word of its end             unknown, and not counted: whoever takes the machine away kills
                                   the supervisor too
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from trainckpt.errors import UnusableSnapshot
from trainckpt.format.attempt import FAILED, KILLED, STARTING, UNDECIDED
from trainckpt.format.names import SnapshotName
from trainckpt.lifecycle.run.log import logger
from trainckpt.snapshot import catalog

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trainckpt.format.attempt import AttemptRecord
    from trainckpt.tiers.base import Tier

MOST_DEATHS = 2
READING = "reading"  # in an attempt's record: what it was reading, before its parent is decided
KEEP_LAST = "keep_last"  # in it too: for whoever prunes the run from outside
# In the outcome that a supervisor writes: the state in which the attempt died by itself.
DIED_WHILE = "died_while"
# Ends that say nothing against the snapshot: refusals, stops, and signals meant for the process.
_FAULT_ELSEWHERE = frozenset({0, 65, 66, 69, 71, 75, 78, 129, 130, 138, 143})


@dataclass(frozen=True)
class Choice:
    """What rank 0 decided.

    Attributes:
        candidates: Snapshots to try, in this order.
        refused: Snapshot -> why it is not among them, or is last.
        why_fresh: Why the run starts at step 0, where it does.
    """

    candidates: list[SnapshotName] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    why_fresh: str = ""


def choose(
    tier: Tier,
    run: str,
    before: Mapping[int, AttemptRecord],
    found: tuple[catalog.Candidate, ...] | None = None,
) -> Choice:
    """Order the run's snapshots.

    Args:
        tier, run: The run's place, and its id.
        before: The records of all earlier attempts.
        found: What there is in all tiers; None: in the run's place.
    """
    found = catalog.read_catalog(tier, run, before) if found is None else found
    refused = {str(c.name): c.reason for c in found if not c.usable}
    usable = [c.name for c in found if c.usable]
    refused.update(_gone(before, found))
    for number, other in before.items():
        if "damaged" in other.facts:
            logger.warning("attempt %d: its record is damaged: %s", number, other.facts["damaged"])
    if not usable and not _was_committed(before, found):
        branch = any(c.reason == catalog.ABANDONED for c in found)
        why = "nothing was committed on this branch" if branch else "nothing was ever committed"
        return Choice([], refused, why if before else "")
    for name in usable:
        if (deaths := died_on(before, str(name))) >= MOST_DEATHS:
            refused[str(name)] = f"{deaths} attempts died on it; it is the last resort"
    inexact = {c.name for c in found if c.manifest is not None and c.manifest.not_bitwise}
    usable.sort(key=lambda n: (str(n) in refused, n in inexact))
    return Choice(usable, refused)


def must_be_sealed(choice: Choice, found: Sequence[catalog.Candidate]) -> None:
    """Refuse snapshots in the clear that are newer than an encrypted one, for who encrypts.

    Whoever can write to the run's place could have put one there, without any key.

    Raises:
        UnusableSnapshot: there is one; it is used only by name.
    """
    chosen = {c.name: c.manifest for c in found if c.name in choice.candidates and c.manifest}
    sealed = [name for name, manifest in chosen.items() if manifest.encryption is not None]
    for name in sorted(chosen, reverse=True):
        if name not in sealed and sealed and name > min(sealed):
            raise UnusableSnapshot(
                f"{name} is not encrypted, and {max(s for s in sealed if s < name)}, which is "
                "older, is: somebody without its key may have put it there",
                hint=f"if that was you: trainckpt resume RUN --at {name}; else delete it",
            )


def died_on(attempts: Mapping[int, AttemptRecord], snapshot: str) -> int:
    """How many attempts ended by their own error between reading `snapshot` and a boundary."""
    return sum(
        _began_with(record) == snapshot and _died_by_own_error(record)
        for record in attempts.values()
    )


def lost_since(before: Mapping[int, AttemptRecord], snapshot: str) -> int | None:
    """Micro-batches trained after `snapshot` and not in it, by the last attempt that trained.

    None if its record does not say.
    """
    known: int | None = None
    for _, record in sorted(before.items(), reverse=True):
        outcome = record.outcome or {}
        if STARTING in (record.state, outcome.get(DIED_WHILE)):
            continue  # it trained nothing, so what was lost before it is lost still
        lost = outcome.get("lost_micro_batches")
        if lost == 0 and record.parent == snapshot == outcome.get("snapshot"):
            known = 0
            continue  # it stopped where it began: what was lost before it is lost still
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
    return any(before[n].newest_commit for n in reach if n in before) or any(
        c.reason not in (catalog.NOT_COMMITTED, catalog.ABANDONED)
        and c.name.sequence <= reach.get(c.name.attempt, -1)
        for c in found
    )

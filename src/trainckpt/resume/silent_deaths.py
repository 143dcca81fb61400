"""Record how attempts ended whose ranks died without a word, if torchrun started them again.

No process sees such an end where the ranks have no supervisor, or agents of torchrun come and go. A
machine that was taken away kills the agent too, so its snapshots are not to blame. But where all
agents of an attempt are those of a later one, no machine was lost: a rank died by itself, such as
for want of memory, and torchrun ended the others. They may have reported that they waited for it in
vain. A rank killed from outside looks the same, as it does to a supervisor.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from trainckpt.errors import NoAgreement, TrainckptError
from trainckpt.format.attempt_record import ENDED, KILLED, RUNNING, STARTING, UNDECIDED
from trainckpt.resume.candidate_order import DIED_WHILE
from trainckpt.snapshot import attempt_history

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trainckpt.format.attempt_record import AttemptRecord
    from trainckpt.storage.base import RunTier

AGENTS = "agents"  # in an attempt's record
REASON = "its ranks died without a report, and torchrun started them again"


def agents_fact(identities: Sequence[str | None]) -> dict[str, Any]:
    """Return the fact that names the agents of all ranks; none, if one is not known. Pure."""
    known = {each for each in identities if each is not None}
    return {AGENTS: sorted(known)} if None not in identities else {}


def with_outcomes_by_agents(
    tier: RunTier, before: Mapping[int, AttemptRecord], own: Mapping[str, Any]
) -> dict[int, AttemptRecord]:
    """Return the records; silent attempts of the agents that are still here get an outcome.

    It is written too: agents of a later launch no longer know. Rank 0.

    Args:
        tier: The run directory.
        before: The records of all earlier attempts.
        own: Facts of this attempt.
    """
    records = dict(before)
    for number, record in before.items():
        agents = record.facts.get(AGENTS)
        if not agents or agents != own.get(AGENTS) or not _is_silent(record):
            continue
        if record.facts.get("pids") == own.get("pids"):
            continue  # another Checkpointer of the same processes
        records[number] = _ended(record)
        with contextlib.suppress(TrainckptError):
            attempt_history.replace(tier, records[number])
    return records


def _is_silent(record: AttemptRecord) -> bool:
    """Return True if it has no outcome, or if the others waited for the dead rank in vain."""
    outcome = record.outcome
    if outcome is None:
        return True
    return outcome.get("exit_code") == NoAgreement.exit_code and DIED_WHILE not in outcome


def _ended(record: AttemptRecord) -> AttemptRecord:
    parent = record.parent if record.parent != UNDECIDED else None
    snapshot = record.newest_commit or parent
    outcome = {
        "snapshot": snapshot,
        "kind": "snapshot",
        "exactness": None,
        "lost_micro_batches": None,
        "tiers": ["local"] if snapshot else [],
        "seconds": None,
        **(record.outcome or {}),
        "outcome": KILLED,
        "exit_code": None,
        "reason": REASON,
    }
    has_trained = outcome["snapshot"] != parent or outcome["lost_micro_batches"] != 0
    ended_while = RUNNING if has_trained else STARTING
    outcome[DIED_WHILE] = ended_while if record.state == ENDED else record.state
    return record.with_(state=ENDED, outcome=outcome)

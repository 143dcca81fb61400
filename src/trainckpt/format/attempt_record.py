"""Parse and dump the record of one attempt: its processes, starting snapshot and outcome.

Written by `attempt.record_writer` in the ranks, when the attempt begins and as it goes on, and by
`launcher.supervisor_record` if the ranks cannot. Read by people, `resume` and schedulers, through
`snapshot.attempt_history`. Unknown keys are kept, so a newer release may add some.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from trainckpt.errors import UnusableSnapshot
from trainckpt.format import json_io

MAX_BYTES = 4_000_000  # hosts of 50,000 ranks
UNDECIDED = "undecided"  # the attempt has not chosen its snapshot yet

# state
STARTING, RUNNING, ENDED = "starting", "running", "ended"
# outcome
FINISHED, STOPPED, FAILED, KILLED = "finished", "stopped", "failed", "killed"


@dataclass(frozen=True)
class AttemptRecord:
    """One start of a run's processes.

    Attributes:
        attempt: Its number, from 1 on.
        parent: The snapshot it began from, None for step 0, or `UNDECIDED`.
        state: `STARTING`, `RUNNING` (first boundary passed) or `ENDED`.
        outcome: None while it lives, or if it died unreported; else
            `{outcome, snapshot, kind, exactness, lost_micro_batches, tiers, seconds, exit_code}`.
        newest_commit: Newest snapshot committed by this attempt, or None.
        facts: argv, cwd, env (redacted), world, hosts, pids, launch, started, and the like.
    """

    attempt: int
    parent: str | None = UNDECIDED
    state: str = STARTING
    outcome: dict[str, Any] | None = None
    newest_commit: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    def with_(self, **changes: Any) -> AttemptRecord:
        """Return a copy with some fields changed."""
        return replace(self, **changes)

    def dump(self) -> bytes:
        """Return the record as JSON, with a digest of itself."""
        own = {
            "attempt": self.attempt,
            "parent": self.parent,
            "state": self.state,
            "outcome": self.outcome,
            "newest_commit": self.newest_commit,
        }
        return json_io.with_digest({**self.facts, **own})

    @classmethod
    def load(cls, data: bytes, what: str) -> AttemptRecord:
        """Parse a record; raise `UnusableSnapshot` if it is not one."""
        body = json_io.parse(data, what, max_bytes=MAX_BYTES)
        attempt = json_io.count(body, "attempt", what)
        if "digest" in body:  # a record written by hand needs none
            body = json_io.verify_digest(body, what)
        own = ("attempt", "parent", "state", "outcome", "newest_commit")
        parent, outcome = body.get("parent"), body.get("outcome")
        newest = body.get("newest_commit")
        if not all(value is None or isinstance(value, str) for value in (parent, newest)):
            raise UnusableSnapshot(f"{what}: parent {parent!r} and commit {newest!r} are no names")
        return cls(
            attempt=attempt,
            parent=parent,
            state=json_io.field(body, "state", str, what),
            outcome=_checked(outcome, what) if isinstance(outcome, dict) else None,
            newest_commit=newest,
            facts={key: value for key, value in body.items() if key not in own},
        )


def _checked(outcome: dict[str, Any], what: str) -> dict[str, Any]:
    """Return the outcome, its parts checked for the types readers rely on."""
    for keys, kinds in _OUTCOME:
        for key in keys:
            if (value := outcome.get(key)) is not None and type(value) not in kinds:
                raise UnusableSnapshot(f"{what}: {key} is {str(value)[:60]!r}")
    code = outcome.get("exit_code")
    if code is not None and not -(2**31) <= code < 2**31:
        raise UnusableSnapshot(f"{what}: {str(code)[:60]} is no exit code")
    seconds = outcome.get("seconds")
    if seconds is not None and not abs(seconds) < 2**63:
        raise UnusableSnapshot(f"{what}: {str(seconds)[:60]} is no duration")
    return outcome


_OUTCOME: tuple[tuple[tuple[str, ...], tuple[type, ...]], ...] = (
    (("outcome", "snapshot", "reason", "died_while", "exactness", "kind"), (str,)),
    (("exit_code", "lost_micro_batches"), (int,)),
    (("seconds",), (int, float)),
)

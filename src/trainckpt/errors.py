"""The error tree. Each error carries its exit code and what to type next.

    TrainckptError          70  our bug, where nothing more exact is known
    +-- ConfigurationError  78  an option, a tracked object or a launch that cannot work
    |   +-- StateMismatch   78  the snapshot is whole, the script's objects differ from it
    +-- NothingToResume     66  no record of the run
    +-- UnusableSnapshot    65  bytes that are missing, damaged or not ours
    |   +-- NoUsableSnapshot 65 commits were recorded and every candidate was refused
    +-- TierUnavailable     69  a place for bytes did not answer, or denied us
    +-- NoAgreement         71  the ranks did not reach one decision in time
    +-- SaveFailed          74  a save did not commit; the older snapshot stands

A test compares this table with the classes. Foreign exceptions are translated where they enter.
`Stopped` is no error: it ends a script whose state is saved.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class TrainckptError(Exception):
    """Base class of all errors of trainckpt.

    Attributes:
        message: The error without its hint.
        hint: The next thing to type or change; may be empty.
        exit_code: Exit code of a command that ends with this error.
    """

    exit_code = 70

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\nnext: {self.hint}" if self.hint else self.message


class ConfigurationError(TrainckptError):
    """An option, a tracked object or a launch cannot work."""

    exit_code = 78


class StateMismatch(ConfigurationError):
    """The snapshot is whole, but the script's objects differ from it.

    Attributes:
        what: Description of the comparison.
        differences: Every difference, one sentence each.
    """

    def __init__(self, what: str, differences: Sequence[str], *, hint: str = "") -> None:
        self.what = what
        self.differences = tuple(differences)
        listing = "".join(f"\n  {line}" for line in self.differences)
        super().__init__(f"{what} ({len(self.differences)} differences){listing}", hint=hint)


class NothingToResume(TrainckptError):
    """The run directory has no record of a run."""

    exit_code = 66


class UnusableSnapshot(TrainckptError):
    """Bytes of a snapshot are missing, damaged, or not what its manifest says."""

    exit_code = 65


class NoUsableSnapshot(UnusableSnapshot):
    """Commits were recorded for this run, and every candidate was refused.

    Attributes:
        run: URL of the run.
        refused: Snapshot name -> reason of the refusal, newest first.
    """

    def __init__(self, run: str, refused: Mapping[str, str]) -> None:
        self.run = run
        self.refused = dict(refused)
        listing = "".join(f"\n  {name}: {reason}" for name, reason in self.refused.items())
        super().__init__(
            f"no usable snapshot in {run} ({len(self.refused)} examined){listing}",
            hint=f"`trainckpt verify {run}` names every bad file; resume='never' with a new run "
            "place starts from step 0",
        )


class TierUnavailable(TrainckptError):
    """A run directory or tier did not answer or denied access; it may not be empty."""

    exit_code = 69


class NoAgreement(TrainckptError):
    """The ranks did not reach one decision before the deadline."""

    exit_code = 71


class SaveFailed(TrainckptError):
    """A save did not commit. Older snapshots stand; training goes on.

    Attributes:
        kind: Kind of the reason, one of `KINDS`.
    """

    KINDS = ("full", "storage", "ranks", "state", "deadline", "other")

    exit_code = 74

    def __init__(self, message: str, *, hint: str = "", kind: str = "other") -> None:
        super().__init__(message, hint=hint)
        self.kind = kind if kind in self.KINDS else "other"


# Exit codes without an error: a stop by default, and 128 + SIGINT, as shells say it.
START_AGAIN, INTERRUPTED = 75, 130
# Of errors that the next start of the same command would meet again.
REFUSALS = frozenset(
    error.exit_code
    for error in (UnusableSnapshot, NothingToResume, TierUnavailable, ConfigurationError)
)


class Stopped(SystemExit):
    """The run was stopped and its state is saved; raised at the request for the next batch.

    It is a `SystemExit`: a script that does not catch it exits with `code`, by default 75.

    Attributes:
        snapshot: Full name of the snapshot to resume from, or None if none could be saved.
        reason: Reason of the stop, such as a signal or the end of the wall time.
    """

    def __init__(self, code: int, snapshot: str | None, reason: str) -> None:
        super().__init__(code)
        self.snapshot = snapshot
        self.reason = reason

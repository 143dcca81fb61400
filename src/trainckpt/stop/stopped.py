"""Define the exception of a stop; its exit code means "start me again"."""

from __future__ import annotations


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

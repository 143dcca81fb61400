"""How a stop reaches the script: an exception that ends it with the code for "start me again"."""

from __future__ import annotations


class Stopped(SystemExit):
    """The run was stopped and its state is saved; raised where the next batch was asked for.

    A `SystemExit`: a script that does nothing about it ends with `code`.

    Attributes:
        snapshot: Full name of the snapshot to go on from, or None if none could be saved.
        reason: Who asked for the stop.
    """

    def __init__(self, code: int, snapshot: str | None, reason: str) -> None:
        super().__init__(code)
        self.snapshot = snapshot
        self.reason = reason

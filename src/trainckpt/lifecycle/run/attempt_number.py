"""The number of this attempt: as claimed, until its processes come back from a dump as another one.

    <supervisor's folder>/restored.json    {"attempt"}

The supervisor that restores processes claims the attempt that they become, and writes the file
before they run again; so whoever asks before the dump has the old number, whoever asks later the
new one. Ranks that ask for one purpose compare what they got, and the largest counts.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

from trainckpt.lifecycle.run.told import SUPERVISOR_VARIABLE

FILE = "restored.json"
MAX_BYTES = 4096


class AttemptNumber:
    """Asked anew each time; without a supervisor it is what was claimed. Any thread."""

    def __init__(self, claimed: int) -> None:
        self._claimed = claimed
        folder = os.environ.get(SUPERVISOR_VARIABLE)
        self._file = Path(folder) / FILE if folder else None

    @property
    def value(self) -> int:
        """The number now."""
        found = read(self._file) if self._file is not None and self._file.exists() else None
        return self._claimed if found is None else max(found, self._claimed)


def read(path: Path) -> int | None:
    """The number in the file; None if there is none."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
        with path.open("rb") as file:
            number = json.loads(file.read(MAX_BYTES))["attempt"]
        if type(number) is int and 0 < number < 10**9:
            return number
    return None


def spell(attempt: int) -> dict[str, str]:
    """The file that says as which attempt the processes go on: its name and its text."""
    return {FILE: json.dumps({"attempt": attempt})}

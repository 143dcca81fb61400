"""A supervisor within another one's launch, as of a job script that calls `trainckpt run`.

    <outer supervisor's folder>/nested-<pid>.json    one word, replaced as it goes on

Its ranks tell it alone, so nothing of them is seen from outside. The outer one hands on what it
gets, and waits; how the inner one ended counts: what is between them, such as `make`, may say less.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainckpt.format.attempt import STOPPED
from trainckpt.lifecycle.run import supervisor_told
from trainckpt.lifecycle.run.told import folder_of_launch, namespace_of, read_told

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_BYTES = 16 * 1024
MOST_NUMBER = 2**31
LONGEST_WHY = 500


@dataclass(frozen=True)
class Nested:
    """What an inner supervisor has said of itself.

    Attributes:
        pid, namespace: Its process, as of `lifecycle.run.told.Told`.
        folder: Where the ranks of its present launch tell it; "": there was none yet.
        exit_code: What it returns; None while it is at work.
        how, why, on_purpose: As of its last launch's `verdict.Verdict`.
        at: When it said that (`time.time`).
    """

    pid: int
    namespace: str
    folder: str = ""
    exit_code: int | None = None
    how: str = ""
    why: str = ""
    on_purpose: bool = False
    at: float = 0.0


class Word:
    """What this supervisor tells the one above it; without one every call does nothing."""

    def __init__(self) -> None:
        above = folder_of_launch()
        self._above = above if above is not None and supervisor_told.is_there() else None
        self._said = Nested(os.getpid(), namespace_of("self"))
        self.tell()

    def tell(self, **changes: Any) -> None:
        """Say that some fields have changed."""
        self._said = replace(self._said, **changes)
        if self._above is None:
            return
        path = self._above / f"nested-{self._said.pid}.json"
        with contextlib.suppress(OSError):
            temporary = path.with_name(path.name + ".tmp")
            temporary.write_text(json.dumps(asdict(self._said)), encoding="utf-8")
            temporary.replace(path)


def read(folder: Path) -> list[Nested]:
    """Those in this launch, whose last word is the oldest first; an unreadable one said nothing."""
    found = []
    for path in folder.glob("nested-*.json"):
        with contextlib.suppress(OSError, ValueError, TypeError, RecursionError):
            with path.open("rb") as file:
                at = os.fstat(file.fileno()).st_mtime
                word = replace(Nested(**json.loads(file.read(MAX_BYTES))), at=at)
            if _is_readable(word):
                found.append(word)
    return sorted(found, key=lambda word: word.at)


def _is_readable(word: Nested) -> bool:
    """It came from a file."""
    texts = (word.namespace, word.folder, word.how, word.why)
    code = word.exit_code
    return (
        type(word.pid) is int
        and 0 < word.pid < MOST_NUMBER
        and (code is None or (type(code) is int and 0 <= code < MOST_NUMBER))
        and all(type(text) is str and "\0" not in text for text in texts)
        and type(word.on_purpose) is bool
    )


def graces_s(words: Sequence[Nested]) -> list[float]:
    """What the ranks of those that are at work have said of `grace`."""
    folders = [Path(word.folder) for word in words if word.folder and word.exit_code is None]
    told = [each for folder in folders for each in read_told(folder).values()]
    return [each.grace_s for each in told if each.grace_s is not None]


def all_stopped(folder: Path) -> bool:
    """Whether there were any, and each has ended by a stop."""
    words = read(folder)
    return bool(words) and all(word.how == STOPPED and word.on_purpose for word in words)

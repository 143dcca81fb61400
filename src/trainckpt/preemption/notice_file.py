"""Read notice files, written by `trainckpt pause` and other programs.

    RUN/notices/<attempt>-<id>.json   {"reason", "seconds_left", "mode", "dump"}

The attempt's number is in the name, so that a file left over from a stopped attempt never stops the
next one. Each file is reported once. An unreadable file is not a notice: a half-written one must
not stop a run. It stays in `bad`, with the reason, and is read again after a change; one as bad a
second later is logged, once.

Threads: the watcher's only.
"""

from __future__ import annotations

import json
from stat import S_ISREG
from typing import TYPE_CHECKING, Any

from trainckpt.format.duration import MOST_S
from trainckpt.notice import Notice, PolledSource

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MAX_BYTES = 64 * 1024


class NoticeFiles(PolledSource):
    """Watch one folder for the notices of one attempt.

    Attributes:
        bad: File name -> why it is not a notice.
    """

    def __init__(
        self, folder: Path, attempt: int, say: Callable[[str], object] = lambda _: None
    ) -> None:
        """Store the arguments; no file is read yet.

        Args:
            folder: Folder of the notices; may appear later.
            attempt: Attempt whose notices count.
            say: Called with each file that is not a notice.
        """
        self.bad: dict[str, str] = {}
        self._say = say
        self._said: set[tuple[str, str]] = set()
        self._folder = folder
        self._attempt = attempt
        self._reported: set[str] = set()
        self._looked_at: dict[str, tuple[int, ...]] = {}

    def poll(self) -> list[Notice]:
        """Return the unreported notices for this attempt, oldest name first."""
        found = [self._read(path) for path in self._new_files()]
        return [notice for notice in found if notice is not None]

    def _new_files(self) -> list[Path]:
        try:
            paths = sorted(self._folder.glob(f"{self._attempt}-*.json"))
        except OSError as error:
            self.bad[str(self._folder)] = str(error)
            self._say_once(str(self._folder), "cannot be looked at")
            return []
        return [path for path in paths if path.name not in self._reported]

    def _read(self, path: Path) -> Notice | None:
        try:
            stat = path.stat()
            seen = (stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size)
            if self._looked_at.get(path.name) == seen:
                self._say_once(path.name, "is not a notice and stops no rank")
                return None
            self._looked_at[path.name] = seen
            data = b""  # opening a pipe would wait for its other end
            if S_ISREG(stat.st_mode):
                with path.open("rb") as file:
                    data = file.read(MAX_BYTES)
            notice = parse(json.loads(data))
        except (OSError, ValueError, RecursionError) as error:
            self.bad[path.name] = f"{type(error).__name__}: {str(error)[:200]}"
            return None
        self._reported.add(path.name)
        self.bad.pop(path.name, None)
        return notice

    def _say_once(self, name: str, what: str) -> None:
        why = self.bad[name]
        if (name, why) not in self._said:
            self._said.add((name, why))
            self._say(f"the notice file {self._folder / name} {what}: {why}")


def parse(value: Any) -> Notice:
    """Return the notice in a file's JSON; raise `ValueError` if it is none."""
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")  # noqa: TRY004 - one kind of refusal for the caller
    reason = value.get("reason", "notice file")
    if not isinstance(reason, str):
        raise ValueError(f"reason is no text: {reason!r}")  # noqa: TRY004 - as above
    mode = value.get("mode")
    if mode not in (None, "micro-batch", "window"):
        raise ValueError(f"mode is none of micro-batch, window: {mode!r}")
    return Notice(reason=reason, mode=mode, seconds_left=_seconds(value.get("seconds_left")))


def _seconds(value: Any) -> float | None:
    if value is None:
        return None
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 <= value <= MOST_S:
        raise ValueError(f"seconds_left is no duration: {value!r}")
    return float(value)

"""Capture the length of files the script appends to: metrics, predictions, a log of its own.

A snapshot has the length of each at its boundary. A resume truncates the file to that length, so
that repeated training does not write twice; later bytes are copied aside before.

The length counts bytes written to the file. For a tracked open Python file its buffer is flushed
first; a tracked path has no buffer. Each file belongs to the rank tracking it: only that rank may
append to it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainckpt.errors import ConfigurationError

if TYPE_CHECKING:
    from trainckpt.state.captured import Captured, Saved

PART = "files"


class TrackedFile:
    """One tracked file.

    Attributes:
        name: The script's name for it, and its key in a snapshot.
        path: The absolute path.
    """

    def __init__(self, file: Any) -> None:
        self._stream = file if callable(getattr(file, "flush", None)) else None
        name = file if self._stream is None else getattr(file, "name", None)
        if not isinstance(name, (str, os.PathLike)):
            raise ConfigurationError(
                f"{file!r} cannot be tracked as a file: it has no path",
                hint="pass the path of the file, or the file as open(path, 'a') returns it",
            )
        self.name = os.fspath(name)
        self.path = Path(self.name).absolute()

    def length(self) -> int:
        """Return the bytes in the file now; 0 if it is missing."""
        if self._stream is not None and not self._stream.closed:
            self._stream.flush()
        with contextlib.suppress(FileNotFoundError):
            return self.path.stat().st_size
        return 0

    def sync(self) -> None:
        """Flush the present bytes to stable storage."""
        with contextlib.suppress(FileNotFoundError):
            _sync(self.path)

    def differences(self, saved: Saved) -> list[str]:
        """Return the reasons against going on with the present file."""
        then = lengths(saved).get(self.name)
        now = self.length()
        if then is None or now >= then:
            return []
        what = f"has {now} bytes" if self.path.exists() else "is missing"
        cure = f"put it back, or go on without what it lost: truncate -s {then} {self.path}"
        return [f"{self.name} {what}, and had {then} when the snapshot was taken; {cure}"]

    def cut_back(self, saved: Saved, attempt: int) -> str:
        """Truncate the file to its saved length, and return a report; "" for nothing to do.

        `attempt`: number in the name of the copy of later bytes; 0, for a proof: no copy.
        """
        then = lengths(saved).get(self.name)
        now = self.length()
        if then is None or now <= then:
            return ""
        where = f"are in {self._copy_aside(then, attempt)}" if attempt else "are not kept"
        os.truncate(self.path, then)
        _sync(self.path)
        return (
            f"{self.name} is cut back to the {then} bytes it had at the snapshot; the {now - then} "
            f"bytes after them {where}"
        )

    def _copy_aside(self, first_byte: int, attempt: int) -> Path:
        """Copy to stable storage; an older copy is never replaced."""
        name, number = f"{self.path}.after-{attempt}", 1
        target = Path(name)
        while target.exists():  # from another run with the same file
            number += 1
            target = Path(f"{name}.{number}")
        with self.path.open("rb") as source, target.open("xb") as copy:
            source.seek(first_byte)
            shutil.copyfileobj(source, copy)
            copy.flush()
            os.fsync(copy.fileno())
        shutil.copymode(self.path, target)
        return target


def capture(out: Captured, files: list[TrackedFile]) -> None:
    """Add the length of every tracked file."""
    if files:
        found = {file.name: file.length() for file in files}
        out.values[PART] = out.encode(found, PART)


def lengths(saved: Saved) -> dict[str, int]:
    """Return file -> its length, for all files in the snapshot."""
    tree = saved.values.get(PART)
    return dict(saved.decode(tree)) if tree is not None else {}


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Files that the script appends to: metrics, predictions, a log of its own.

A snapshot holds the length each had at its boundary. A resume cuts the file back to that length,
so that what is trained again is not written twice; what came after is copied aside before.

The length counts bytes that have reached the file. What still lies in the buffer of an open
Python file is flushed if that file itself is tracked; a path knows nothing of buffers.
Each file belongs to the rank that tracks it: one rank alone may append to it.
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
    """One of them.

    Attributes:
        name: As the script named it; what it is found again by in a snapshot.
        path: Where it lies.
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
        """Bytes in the file now; 0 if it is not there."""
        if self._stream is not None and not self._stream.closed:
            self._stream.flush()
        with contextlib.suppress(FileNotFoundError):
            return self.path.stat().st_size
        return 0

    def sync(self) -> None:
        """Return when the bytes that were there when it was called survive a power cut."""
        with contextlib.suppress(FileNotFoundError):
            _sync(self.path)

    def differences(self, saved: Saved) -> list[str]:
        """What makes it impossible to go on with this file as it is."""
        then = lengths(saved).get(self.name)
        now = self.length()
        if then is None or now >= then:
            return []
        what = f"has {now} bytes" if self.path.exists() else "is missing"
        cure = f"put it back, or go on without what it lost: truncate -s {then} {self.path}"
        return [f"{self.name} {what}, and had {then} when the snapshot was taken; {cure}"]

    def cut_back(self, saved: Saved, attempt: int) -> str:
        """Make it as long as it was, the rest copied aside; says what was done, "" for nothing.

        Args:
            saved: The snapshot.
            attempt: Whose copy it is; 0 copies nothing aside: a proof wrote it.
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
        """The copy is on stable storage when this returns; an older copy is never replaced."""
        name, number = f"{self.path}.after-{attempt}", 1
        target = Path(name)
        while target.exists():  # of another run that wrote to the same file
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
    """File -> its length, of all that the snapshot knows."""
    tree = saved.values.get(PART)
    return dict(saved.decode(tree)) if tree is not None else {}


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

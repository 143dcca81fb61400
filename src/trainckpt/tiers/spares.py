"""Spares: files of pruned snapshots, kept so that the next save of the same name overwrites them.

To delete a large file costs some file systems as long as to write it, and a file that has its
blocks is written faster than a new one. So one file of each name waits in `spares/`; nothing
refers to it, and what stands in it is of no worth.

A file is given another content here. So nobody may have it open, and it may have no second name
that somebody gave it to keep it. That is asked when it is about to be written over, for until then
anybody may come; where it cannot be known, the file is deleted.
"""

from __future__ import annotations

import contextlib
import os
import signal
from typing import TYPE_CHECKING

from trainckpt.tiers.direct import FROM_BYTES

try:
    import fcntl
except ImportError:  # not a POSIX system: no spares
    fcntl = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from pathlib import Path

    from trainckpt.tiers.disk import Disk

FOLDER = "spares"


class Spares:
    """Of one local tier."""

    def __init__(self, root: Path, disk: Disk) -> None:
        self._folder, self._disk = root / FOLDER, disk

    def keep(self, path: Path) -> bool:
        """Whether this file, which nobody needs any more, was put aside."""
        spare = self._folder / path.name
        if spare.exists() or path.stat().st_size < FROM_BYTES:
            return False
        if not self._folder.is_dir():
            with contextlib.suppress(FileExistsError):
                self._disk.make_folder(self._folder)
        self._disk.rename(path, spare)
        return True

    def take(self, path: Path) -> bool:
        """Whether `path` is now a file that was put aside, and that nobody else has."""
        spare = self._folder / path.name
        if path.exists() or not spare.exists():
            return False
        try:
            self._disk.rename(spare, path)  # from here on nobody opens it by its old names
        except FileNotFoundError:  # somebody was faster
            return False
        if _is_free(path):
            return True
        self._disk.remove(path)
        return False

    def clear(self) -> None:
        """Delete them all."""
        with contextlib.suppress(FileNotFoundError):
            for path in self._folder.iterdir():
                self._disk.remove(path)
            self._disk.remove_folder(self._folder)


def _is_free(path: Path) -> bool:
    """Whether nobody has the file open, and it has no other name; False where nobody knows."""
    if fcntl is None or not hasattr(fcntl, "F_SETLEASE"):
        return False
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        # Whoever opened it meanwhile would break the lease: told by a signal that is ignored.
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
        # Granted only if this descriptor is the only one of the file, mappings included.
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        return os.fstat(descriptor).st_nlink == 1
    except OSError:
        return False
    finally:
        os.close(descriptor)

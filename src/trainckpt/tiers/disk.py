"""The few system calls a local tier is made of, one method each.

A tier writes only through this object, so a test can record every call in order and replay any
prefix of it: that is how the power-cut test knows what a crash may leave behind.
Files are created 0600, folders 0700: a snapshot holds everything the model knows.
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)


class Disk:
    """System calls, unbuffered; every method raises `OSError` as the system reports it."""

    def make_folder(self, path: Path) -> None:
        """Create one folder, private to this user; its parent exists."""
        path.mkdir(mode=0o700)

    def create(self, path: Path) -> int:
        """Create an empty private file, refusing an existing one; returns its descriptor."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_FOLLOW, 0o600)

    def write(self, path: Path, descriptor: int, block: memoryview) -> None:
        """Write the whole block at the end of the file just created at `path`."""
        del path  # named for recorders
        done = 0
        while done < len(block):
            done += os.write(descriptor, block[done : done + (1 << 30)])

    def sync(self, path: Path, descriptor: int) -> None:
        """Return when the file's bytes and length are on stable storage."""
        del path
        os.fsync(descriptor)

    def sync_folder(self, path: Path) -> None:
        """Return when the folder's names are on stable storage (where the system can).

        A file system that cannot was named when the run attached (`capabilities`).
        """
        if os.name == "nt":
            return
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP):
                raise
        finally:
            os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Atomically give `source` the name `target`, replacing what stood there."""
        source.replace(target)

    def link(self, source: Path, target: Path) -> None:
        """Atomically give `source` a second name; `FileExistsError` if it is taken."""
        os.link(source, target)

    def remove(self, path: Path) -> None:
        """Remove one file."""
        path.unlink()

    def remove_folder(self, path: Path) -> None:
        """Remove one empty folder."""
        path.rmdir()

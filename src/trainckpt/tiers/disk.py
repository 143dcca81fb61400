"""The few system calls a local tier is made of, one method each.

A tier writes only through this object, so a test can record every call in order and replay any
prefix of it: that is how the power-cut test knows what a crash may leave behind.
Files are created 0600, folders 0700: a snapshot holds everything the model knows.
"""

from __future__ import annotations

import ctypes
import errno
import os
from typing import TYPE_CHECKING

try:
    import fcntl
except ImportError:  # not a POSIX system, and no O_DIRECT either
    fcntl = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from pathlib import Path

DIRECT_FROM_BYTES = 8 << 20
_PAGE = 4096
_PIECE = 16 << 20
_DIRECT = getattr(os, "O_DIRECT", 0)
# Not on this file system, or not with memory that lies so.
_NOT_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS)
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
        """Write the whole block at the end of the file just created at `path`.

        A large one that lies at page boundaries, in memory and in the file, bypasses the page
        cache (O_DIRECT) where the file system can: twice as fast, and nothing else is evicted.
        """
        del path  # named for recorders
        done = _write_direct(descriptor, block)
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


def _write_direct(descriptor: int, block: memoryview) -> int:
    """Write whole pages of `block` with O_DIRECT; how many bytes, 0 where that cannot be done."""
    pages = len(block) - len(block) % _PAGE
    at = os.lseek(descriptor, 0, os.SEEK_CUR) if pages >= DIRECT_FROM_BYTES and _DIRECT else 1
    if at % _PAGE or _address(block) % _PAGE:
        return 0
    done, flags = 0, fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | _DIRECT)
        while done < pages and done % _PAGE == 0:
            done += os.write(descriptor, block[done : min(done + _PIECE, pages)])
    except OSError as error:
        if error.errno not in _NOT_DIRECT:
            raise
    finally:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
    return done


def _address(block: memoryview) -> int:
    """Where the block lies in memory; odd where that cannot be known."""
    return 1 if block.readonly else ctypes.addressof(ctypes.c_char.from_buffer(block))

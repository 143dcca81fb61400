"""System calls of a local tier, one method each.

A tier writes only through this object, so a test can record all calls in order and replay any
prefix. The power-cut test finds a crash's remains this way. Reads go through it too, so a test can
make any read fail or end early. Files are created 0600, folders 0700: a snapshot holds everything
the model knows.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from typing import TYPE_CHECKING, Any

from trainckpt.storage.libc import libc

if TYPE_CHECKING:
    from pathlib import Path

_DIRECT = getattr(os, "O_DIRECT", 0)
# No symbolic links, not inherited by children, no translation of line ends.
_PLAIN = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_READ = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_MOST = 1 << 30  # bytes per call; Linux takes at most 2 GiB
_NOT_RESERVED = (errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)
# Errors of an operation the file system does not support; any other error is a fault.
CANNOT = frozenset(
    {
        errno.EINVAL,
        errno.ENOSYS,
        errno.ENOTSUP,
        errno.EOPNOTSUPP,
        errno.EPERM,
        errno.EMLINK,
        errno.ENOLCK,
        errno.EXDEV,
        errno.EBADF,
    }
)
_seeking = threading.Lock()  # for systems without positioned reads and writes


class Disk:
    """Unbuffered system calls; every method raises `OSError` as the system reports it."""

    def make_folder(self, path: Path) -> None:
        """Create one folder, private to this user; its parent exists."""
        path.mkdir(mode=0o700)

    def create(self, path: Path) -> int:
        """Create an empty private file, refusing an existing one; return its descriptor."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _PLAIN, 0o600)

    def open_direct(self, path: Path) -> int:
        """Open a file just created again; writes to this descriptor bypass the page cache."""
        return os.open(path, os.O_WRONLY | _direct_flag() | _PLAIN)

    def reserve(self, path: Path, descriptor: int, num_bytes: int) -> None:
        """Set the length of a file just created and reserve its space, if the system can.

        `posix_fallocate` would write to every block on file systems without the feature.
        """
        del path  # for tests recording the calls
        if _fallocate is None or num_bytes == 0:
            return
        while _fallocate(descriptor, 0, 0, num_bytes):
            number = ctypes.get_errno()
            if number in _NOT_RESERVED:
                return
            if number != errno.EINTR:
                raise OSError(number, os.strerror(number))

    def write(self, path: Path, descriptor: int, block: memoryview, first_byte: int) -> None:
        """Write the whole block at its position in the file just created at `path`; any thread.

        With the descriptor of `open_direct`, memory, position and length must be whole pages. A
        file system may refuse at any time (`EINVAL`); the block can then be written again.
        """
        del path
        done = 0
        while done < len(block):
            done += _write_at(descriptor, block[done : done + _MOST], first_byte + done)

    def sync(self, path: Path, descriptor: int) -> None:
        """Put the file's bytes and length on stable storage."""
        del path
        os.fsync(descriptor)

    def sync_folder(self, path: Path) -> None:
        """Put the folder's names on stable storage, if the file system can.

        `fs_probe` has reported a file system without this when the run started.
        """
        if os.name == "nt":
            return
        try:
            self.fsync_folder(path)
        except OSError as error:
            if error.errno not in CANNOT:
                raise

    def fsync_folder(self, path: Path) -> None:
        """Sync as `sync_folder`; raise if the system cannot."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Atomically rename `source` to `target`, replacing an old file."""
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

    def open_to_read(self, path: Path, *, direct: bool = False) -> int:
        """Open a file for reading; with `direct`, reads of whole pages bypass the page cache."""
        descriptor = os.open(path, os.O_RDONLY | _READ | (_direct_flag() if direct else 0))
        if not direct and hasattr(os, "posix_fadvise"):  # read-ahead would fetch bytes twice
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        return descriptor

    def read(self, path: Path, descriptor: int, into: memoryview, first_byte: int) -> int:
        """Read at a position into `into`, any thread; return the number of bytes, 0 at the end."""
        del path
        if hasattr(os, "preadv"):
            return os.preadv(descriptor, [into[:_MOST]], first_byte)
        with _seeking:
            os.lseek(descriptor, first_byte, os.SEEK_SET)
            got = os.read(descriptor, min(len(into), _MOST))
        into[: len(got)] = got
        return len(got)


def _direct_flag() -> int:
    if not _DIRECT:
        raise OSError(errno.EINVAL, "no O_DIRECT on this system")
    return _DIRECT


def _write_at(descriptor: int, block: memoryview, first_byte: int) -> int:
    if hasattr(os, "pwrite"):
        return os.pwrite(descriptor, block, first_byte)
    with _seeking:
        os.lseek(descriptor, first_byte, os.SEEK_SET)
        return os.write(descriptor, block)


def _find_fallocate() -> Any:
    """Return the system call for reserving space; None without one."""
    if os.name == "nt":
        return None
    return getattr(libc(), "fallocate64", None) or getattr(libc(), "fallocate", None)


_fallocate = _find_fallocate()

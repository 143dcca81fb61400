"""The few system calls a local tier is made of, one method each.

A tier writes only through this object, so a test can record every call in order and replay any
prefix of it: that is how the power-cut test knows what a crash may leave behind. It reads files
through it too, so that a test can let any read fail, or come short.
Files are created 0600, folders 0700: a snapshot holds everything the model knows.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

_DIRECT = getattr(os, "O_DIRECT", 0)
# Never through a symbolic link, never into a child, never with other line ends.
_PLAIN = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_READ = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_MOST = 1 << 30  # bytes of one call; Linux takes no more than 2 GiB
_NOT_RESERVED = (errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)
# What a file system answers that cannot do a thing; anything else means that the place is ill.
CANNOT = frozenset({
    errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EPERM, errno.EMLINK,
    errno.ENOLCK, errno.EXDEV, errno.EBADF,
})  # fmt: skip
_seeking = threading.Lock()  # where a file has one position, and no call names another


class Disk:
    """System calls, unbuffered; every method raises `OSError` as the system reports it."""

    def make_folder(self, path: Path) -> None:
        """Create one folder, private to this user; its parent exists."""
        path.mkdir(mode=0o700)

    def create(self, path: Path) -> int:
        """Create an empty private file, refusing an existing one; returns its descriptor."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _PLAIN, 0o600)

    def open_again(self, path: Path) -> int:
        """A descriptor of a file that is to be written over."""
        return os.open(path, os.O_WRONLY | _PLAIN)

    def cut(self, path: Path, descriptor: int, num_bytes: int) -> None:
        """Give a file this length, if it is longer."""
        del path
        if os.fstat(descriptor).st_size > num_bytes:
            os.ftruncate(descriptor, num_bytes)

    def open_direct(self, path: Path) -> int:
        """A second descriptor of a file just created: its writes bypass the page cache."""
        return os.open(path, os.O_WRONLY | _direct_flag() | _PLAIN)

    def reserve(self, path: Path, descriptor: int, num_bytes: int) -> None:
        """Give a file just created its length, and the space for it, where the system can.

        Not by `posix_fallocate`: where the file system cannot, that writes to every block of it.
        """
        del path  # named for recorders
        if _fallocate is None or num_bytes == 0:
            return
        while _fallocate(descriptor, 0, 0, num_bytes):
            number = ctypes.get_errno()
            if number in _NOT_RESERVED:
                return
            if number != errno.EINTR:
                raise OSError(number, os.strerror(number))

    def write(self, path: Path, descriptor: int, block: memoryview, first_byte: int) -> None:
        """Write the whole block to its place in the file just created at `path`; any thread.

        Through the descriptor of `open_direct` the memory, the place and the length must be whole
        pages; a file system may refuse it at any time (`EINVAL`). It can be written again then.
        """
        del path
        done = 0
        while done < len(block):
            done += _write_at(descriptor, block[done : done + _MOST], first_byte + done)

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
        try:
            self.fsync_folder(path)
        except OSError as error:
            if error.errno not in CANNOT:
                raise

    def fsync_folder(self, path: Path) -> None:
        """As `sync_folder`, but raises where the system cannot."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
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

    def open_to_read(self, path: Path, *, direct: bool = False) -> int:
        """A descriptor of a file; `direct`: its reads bypass the page cache, in whole pages."""
        descriptor = os.open(path, os.O_RDONLY | _READ | (_direct_flag() if direct else 0))
        if not direct and hasattr(os, "posix_fadvise"):  # what is read ahead is read twice
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        return descriptor

    def read(self, path: Path, descriptor: int, into: memoryview, first_byte: int) -> int:
        """Read from a place in the file on, any thread; how many bytes came: 0 at its end."""
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
    """The system call that reserves space, or None where there is none."""
    if os.name == "nt":
        return None
    library = ctypes.CDLL(None, use_errno=True)
    for name in ("fallocate64", "fallocate"):
        if (found := getattr(library, name, None)) is not None:
            found.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
            return found
    return None


_fallocate = _find_fallocate()

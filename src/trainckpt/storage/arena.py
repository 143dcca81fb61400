"""Memory of one rank for one shard file, written again and again; `MappedShard` reads it.

An arena is a file on tmpfs, so publishing it copies nothing: it gets a second name. Bytes are
reserved before they are touched: a page missing on a full tmpfs would end the process (SIGBUS).

Where tmpfs is too small the arena is a memfd without a name (`Own`), gone with the process.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from pathlib import Path
from typing import TYPE_CHECKING

from trainckpt.storage import memfd
from trainckpt.storage.direct_io import populate
from trainckpt.storage.mapped_shard import not_for_children
from trainckpt.storage.private_files import must_be_private

try:
    import fcntl
except ImportError:  # not a POSIX system: no such tier
    fcntl = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainckpt.storage.shared_memory import SharedMemoryDir

SNAPSHOTS = "snapshots"
RESERVED_BYTES = 64 << 20  # per call
GROWS_BY_BYTES = 1 << 20  # unit of the file's length with `spare`
MOST_SPARE = 2  # file length / needed bytes; a longer file is cut
ADDRESSES = 2  # mapped addresses / file length: the file grows under the mapping


class Arena:
    """Memory of one rank, written again and again.

    Attributes:
        path: Its file.
        memory: The bytes to write, once reserved.
        reserved: The whole file; may be longer than `memory`.
        outlives: Published bytes stay readable after the end of this process.
        keeps: Called before pages are removed, with `reserved` and the number of bytes staying. A
            caller with locked pages unlocks them here, before they stop being the file's.
    """

    outlives = True

    def __init__(self, place: SharedMemoryDir, path: Path, descriptor: int) -> None:
        self.path = path
        self.memory = self.reserved = memoryview(b"")
        self.keeps: Callable[[memoryview, int], object] = lambda *_: None
        self._place = place
        self._descriptor = descriptor
        self._mapping: mmap.mmap | None = None

    def reserve(self, num_bytes: int, *, spare: bool = False) -> None:
        """Make `memory` that long, with every page reserved.

        The old content is lost. Its names are removed first, so no reader finds half of it.

        Args:
            num_bytes: Length of `memory`.
            spare: Allow a longer file, so a slightly longer or shorter next content reuses its
                pages.
                Readers must know the end of the content.

        Raises:
            OSError: not enough memory (ENOSPC, ENOMEM); the file is then empty. Or another process
                has
                locked it.
        """
        self._take()
        try:
            length = self._with_spare(num_bytes) if spare else num_bytes
            self._reserve(length, self._resize(length))
        except OSError:
            self.empty()
            raise
        self.memory = self.reserved[:num_bytes]

    def _with_spare(self, num_bytes: int) -> int:
        length = os.fstat(self._descriptor).st_size
        needed = -(-num_bytes // GROWS_BY_BYTES) * GROWS_BY_BYTES
        return length if needed <= length <= MOST_SPARE * needed else needed

    def begin(self, num_bytes: int) -> None:
        """Empty the file for `num_bytes` to come by `write`; no page is made before.

        The file ends with the last byte written, so a writer killed on the way leaves no tail of
        holes to be taken for memory.

        Raises:
            OSError: as `reserve`.
        """
        self._take()
        self.empty()
        self._must_have(num_bytes)

    def write(self, first_byte: int, data: memoryview) -> None:
        """Write without a mapping: half the work, and a full tmpfs is an error instead of SIGBUS.

        Raises:
            OSError: not enough memory. The caller must end all writes before `empty`.
        """
        while len(data):
            done = os.pwrite(self._descriptor, data, first_byte)
            first_byte, data = first_byte + done, data[done:]

    def _take(self) -> None:
        """Lock the file for new content and remove its published names."""
        self._lock()
        self.retract()

    def _lock(self) -> None:
        """Lock the file again.

        Closing any descriptor of the file drops the process's lock: a reader's in this process, or
        the mapping's own.
        """
        fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _resize(self, length: int) -> os.stat_result:
        """Set the file's length; return its status from before."""
        status = os.fstat(self._descriptor)
        self._must_have(length - status.st_blocks * 512)
        if status.st_size > length:
            self._keep(length)
        if status.st_size != length:
            os.ftruncate(self._descriptor, length)
        return status

    def _must_have(self, num_bytes: int) -> None:
        # Check first: reserving part by part would fail only after using up all memory.
        space = os.fstatvfs(self._descriptor)
        if num_bytes > space.f_bavail * space.f_frsize > 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _reserve(self, length: int, before: os.stat_result) -> None:
        is_mapped = self._mapping is not None and len(self._mapping) >= length
        if not is_mapped:
            self._map(length)
        assert self._mapping is not None
        mapped_bytes = len(self.reserved) if is_mapped else 0
        is_whole = before.st_blocks * 512 >= before.st_size
        there_bytes = min(before.st_size, length) if is_whole else 0
        self.reserved = memoryview(self._mapping)[:length]
        for first in range(0, length, RESERVED_BYTES):
            end = min(first + RESERVED_BYTES, length)
            if end > there_bytes:  # skipped if reserved: the call visits every page
                os.posix_fallocate(self._descriptor, first, end - first)
            if end > mapped_bytes:
                populate(self.reserved[max(first, mapped_bytes) : end])

    def _map(self, length: int) -> None:
        """Map more addresses than the file has bytes.

        A moved mapping would force a caller with locked pages to lock all of them again.
        """
        self._unmap()
        for num_bytes in (ADDRESSES * length, length):
            self._lock()
            try:
                os.ftruncate(self._descriptor, num_bytes)  # Python refuses to map past the end
                self._mapping = mmap.mmap(self._descriptor, num_bytes)
                break
            except OSError:
                if num_bytes == length:
                    raise
            finally:
                os.ftruncate(self._descriptor, length)
        assert self._mapping is not None
        not_for_children(self._mapping)  # a loader worker needs no page of it

    def empty(self) -> None:
        """Free the reserved memory; a partial content is useless.

        Raises:
            OSError: another process has locked the file; it stays as it is.
        """
        self._unmap()
        self._lock()
        os.ftruncate(self._descriptor, 0)

    def _unmap(self) -> None:
        self._keep(0)
        self.memory = self.reserved = memoryview(b"")
        self._mapping = None

    def _keep(self, num_bytes: int) -> None:
        if len(self.reserved):
            self.keeps(self.reserved, num_bytes)

    def publish(self, folder: str, name: str) -> None:
        """Give the bytes their name as a file of a snapshot. They must not change any more."""
        target = self._place.root / folder
        must_be_private(target.parent)
        must_be_private(target)
        path = target / name
        path.unlink(missing_ok=True)
        os.link(self.path, path, follow_symlinks=False)

    def retract(self) -> None:
        """Remove every name but its own."""
        for path in self._names():
            path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                path.parent.rmdir()  # if it was the last of its snapshot

    def holds(self) -> list[str]:
        """Return the snapshot folders with a published name of this arena."""
        return [f"{SNAPSHOTS}/{path.parent.name}" for path in self._names()]

    def _names(self) -> list[Path]:
        """Return its published names."""
        status = os.fstat(self._descriptor)
        return self._place.names_of(status.st_ino) if status.st_nlink > 1 else []

    @property
    def descriptor(self) -> int:
        """Return the file's descriptor, while it is open."""
        return self._descriptor

    @property
    def capacity_bytes(self) -> int:
        """Return the reserved bytes, mapped or not."""
        return os.fstat(self._descriptor).st_blocks * 512

    def close(self) -> None:
        """Unmap and unlock the file; the bytes stay."""
        self._unmap()
        os.close(self._descriptor)

    def remove(self) -> None:
        """Remove the file and its published names, and close it."""
        self.retract()
        self.path.unlink(missing_ok=True)
        self.close()


class Own(Arena):
    """A memfd of this process alone: hidden from other processes, and gone with this one."""

    outlives = False

    def __init__(self, place: SharedMemoryDir) -> None:
        """Make the memfd; `OSError` as the system reports it."""
        super().__init__(place, Path("memfd"), memfd.make())
        self._folder: str | None = None

    def publish(self, folder: str, name: str) -> None:  # noqa: ARG002 - signature of the base
        """Remember the snapshot in it."""
        self._folder = folder

    def retract(self) -> None:
        """Forget the snapshot in it."""
        self._folder = None

    def holds(self) -> list[str]:
        """Return the folder of the snapshot in it, if any."""
        return [self._folder] if self._folder is not None else []

    def remove(self) -> None:
        """Free the memory."""
        self.close()

"""Arena: memory of one rank in which a shard file is made, and made again. The mirror of `Held`.

It is a file on tmpfs, so publishing it copies nothing: it gets a second name. Bytes are reserved
before they are touched, for a page that a full tmpfs cannot give ends the process (SIGBUS).

Where tmpfs is small it is a memfd (`tiers/memfd.py`). If somebody holds that who outlives this
process, what has the names is a link to it; if this process alone does, it has none (`Own`).
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from pathlib import Path
from typing import TYPE_CHECKING

from trainckpt.tiers import memfd
from trainckpt.tiers.direct import populate
from trainckpt.tiers.mapped import not_for_children
from trainckpt.tiers.private import must_be_private

try:
    import fcntl
except ImportError:  # not a POSIX system: no such tier
    fcntl = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainckpt.tiers.memory import MemoryPlace

SNAPSHOTS = "snapshots"
RESERVED_BYTES = 64 << 20  # made sure of at a time
GROWS_BY_BYTES = 1 << 20  # where it is to have spare memory
MOST_SPARE = 2  # times what is needed; more is given back
ADDRESSES = 2  # mapped, times the file's length: it grows under the mapping


class Arena:
    """Memory of one rank, written again and again.

    Attributes:
        path: Its file, or the link to its memory.
        memory: What may be written, once it was reserved.
        reserved: All of the file, which may be longer than that.
        is_memfd: It lies in no file system.
        outlives: What is published is found when this process has ended.
        keeps: Is told before pages go: all that is reserved, and how many bytes of it stay. Who
            has locked it would have pages that are no longer the file's.
    """

    outlives = True

    def __init__(self, place: MemoryPlace, path: Path, descriptor: int) -> None:
        self.path = path
        self.memory = self.reserved = memoryview(b"")
        self.is_memfd = memfd.read_link(path) is not None
        self.keeps: Callable[[memoryview, int], object] = lambda *_: None
        self._place = place
        self._descriptor = descriptor
        self._mapping: mmap.mmap | None = None

    def reserve(self, num_bytes: int, *, spare: bool = False) -> None:
        """Make `memory` that long, and sure to be there.

        What it held is lost: its names are taken away first, so that nobody finds half of it.

        Args:
            num_bytes: Length of `memory`.
            spare: Let the file be longer, so that the next one needs no other pages if it is only a
                little longer, or was as long before. Readers must know where the content ends.

        Raises:
            OSError: there is not so much (ENOSPC, ENOMEM); the file is empty then. Or it is taken.
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
        """Empty it for so many bytes that only `write` brings: no page of it is made before.

        It is as long as what was written last, wherever that was: whoever is killed in between
        leaves no holes that could be taken for memory.

        Raises:
            OSError: as `reserve`.
        """
        self._take()
        self.empty()
        self._must_have(num_bytes)

    def write(self, first_byte: int, data: memoryview) -> None:
        """Write without mapping anything: half the work, and a full tmpfs is an error here.

        Raises:
            OSError: there is not so much memory. Whoever writes still has to end before `empty`.
        """
        while len(data):
            done = os.pwrite(self._descriptor, data, first_byte)
            first_byte, data = first_byte + done, data[done:]

    def _take(self) -> None:
        """For new content: what it held is found no more."""
        self._lock()
        self.retract()

    def _lock(self) -> None:
        """Again: closing any descriptor of it gives up the process's lock, such as that of whoever
        in this process has read it, or the mapping's own.
        """
        fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _resize(self, length: int) -> os.stat_result:
        """Make it that long; what it was like before."""
        status = os.fstat(self._descriptor)
        self._must_have(length - status.st_blocks * 512)
        if status.st_size > length:
            self._keep(length)
        if status.st_size != length:
            os.ftruncate(self._descriptor, length)
        return status

    def _must_have(self, num_bytes: int) -> None:
        # Asked for in parts, too much would be found out only when there is none left for others.
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
            if end > there_bytes:  # looks at every page, also of what it has reserved before
                os.posix_fallocate(self._descriptor, first, end - first)
            if end > mapped_bytes:
                populate(self.reserved[max(first, mapped_bytes) : end])

    def _map(self, length: int) -> None:
        """Map more addresses than the file has bytes: where it moved, who has locked its pages
        would have to lock all of them again.
        """
        self._unmap()
        for num_bytes in (ADDRESSES * length, length):
            self._lock()
            try:
                os.ftruncate(self._descriptor, num_bytes)  # else Python would refuse to
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
        """Give back what was reserved: half of it is of no use to anybody.

        Raises:
            OSError: another process has it by now; it is left alone.
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
        """Let the bytes be found as this file of a snapshot. They must not change any more."""
        target = self._place.root / folder
        must_be_private(target.parent)
        must_be_private(target)
        path = target / name
        path.unlink(missing_ok=True)
        os.link(self.path, path, follow_symlinks=False)

    def retract(self) -> None:
        """Take back every name but its own."""
        if self.is_memfd and not self.is_there:
            return  # its names are another's by now
        for path in self._names():
            path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                path.parent.rmdir()  # if it was the last of its snapshot

    def holds(self) -> list[str]:
        """Folders of the snapshots as part of which the bytes can be found."""
        return [f"{SNAPSHOTS}/{path.parent.name}" for path in self._names()]

    def _names(self) -> list[Path]:
        """Those of snapshots."""
        try:
            status = self.path.lstat() if self.is_memfd else os.fstat(self._descriptor)
        except FileNotFoundError:  # its link was taken away
            return []
        return self._place.names_of(status.st_ino) if status.st_nlink > 1 else []

    @property
    def is_there(self) -> bool:
        """Whether others find it, if it is a memfd: its holder may have gone, or be one of before
        a dump of this process.
        """
        try:
            found = memfd.status_of(self.path) if self.is_memfd else os.fstat(self._descriptor)
        except OSError:
            return False
        return found is not None and os.path.samestat(found, os.fstat(self._descriptor))

    @property
    def descriptor(self) -> int:
        """Of its file, while it is open."""
        return self._descriptor

    @property
    def capacity_bytes(self) -> int:
        """Reserved, whether mapped or not."""
        return os.fstat(self._descriptor).st_blocks * 512

    def close(self) -> None:
        """Let others have it. The bytes stay."""
        self._unmap()
        os.close(self._descriptor)

    def remove(self) -> None:
        """Give the memory back."""
        if self.is_there:  # else its names are another's by now
            self.retract()
            self.path.unlink(missing_ok=True)
        self.close()


class Own(Arena):
    """A memfd that this process alone holds: nobody else finds it, and it is gone with it."""

    outlives = False

    def __init__(self, place: MemoryPlace) -> None:
        """Raises `OSError` as the system reports it."""
        descriptor, token = memfd.make()
        super().__init__(place, Path(f"memfd:{token}"), descriptor)
        self.is_memfd = True
        self._folder: str | None = None

    def publish(self, folder: str, name: str) -> None:  # noqa: ARG002 - as others are
        """Remember what it holds."""
        self._folder = folder

    def retract(self) -> None:
        """Forget it."""
        self._folder = None

    def holds(self) -> list[str]:
        """The snapshot of which it holds a file."""
        return [self._folder] if self._folder is not None else []

    @property
    def is_there(self) -> bool:
        """Nobody else can take it away."""
        return True

    def remove(self) -> None:
        """Give the memory back."""
        self.close()

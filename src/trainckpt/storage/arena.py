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
import stat
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

from trainckpt.storage.direct_io import populate
from trainckpt.storage.private_files import must_be_private

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainckpt.storage.shared_memory import SharedMemoryDir


# ---- memfd: memory outside any file system; no mount limits it
#
# It has no name, and lives as long as a process has it open.


_NAME = "trainckpt"  # as /proc shows it
_NO_EXEC = 0x8  # MFD_NOEXEC_SEAL, since Linux 6.3: the memory holds data only


def has_memfd() -> bool:
    """Return True if the system has memfds."""
    return hasattr(os, "memfd_create")


def make_memfd() -> int:
    """Make an empty memfd in this process; return its descriptor.

    Raises:
        OSError: as the system reports it.
    """
    try:
        descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC | _NO_EXEC)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC)
    os.fchmod(descriptor, 0o600)
    return descriptor


# ---- mappings, for readers; `Arena` writes the files
#
# A forked child, such as a loader worker, gets neither mapping nor descriptor. It would keep a
# nameless file alive until its own end, and could not be dumped.


class LockedMapping(mmap.mmap):
    """A mapping that keeps its file open and locked as long as any view of it exists."""

    descriptor = -1

    def __new__(cls, descriptor: int, num_bytes: int) -> LockedMapping:
        """Map a locked file; the mapping closes the descriptor. After an error the caller keeps it.

        Torch warns about read-only memory, so a write would go to a private copy of the page.
        """
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        mapping = super().__new__(cls, descriptor, num_bytes, mmap.MAP_PRIVATE, protection)
        not_for_children(mapping)
        _mapped.add(mapping)
        mapping.descriptor = descriptor
        return mapping

    def forked(self) -> None:
        """Release the file in a forked child.

        Its descriptors, including the mapping's own, become descriptors of /dev/null. Closing them
        later closes no other file.
        """
        file = os.fstat(self.descriptor)
        if stat.S_ISCHR(file.st_mode):
            return  # replaced already, for another mapping of the same file
        nothing = os.open(os.devnull, os.O_RDONLY)
        for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - the bare numbers
            with contextlib.suppress(OSError):
                if os.path.samestat(os.fstat(int(name)), file):
                    os.dup2(nothing, int(name))
        os.close(nothing)

    def __del__(self) -> None:
        with contextlib.suppress(BufferError):
            self.close()  # releases the GIL; a plain deallocation would not
        if self.descriptor >= 0:
            os.close(self.descriptor)


def not_for_children(mapping: mmap.mmap) -> None:
    """Exclude a mapping from processes forked from now on, if the system can."""
    if hasattr(mmap, "MADV_DONTFORK"):
        with contextlib.suppress(OSError):
            mapping.madvise(mmap.MADV_DONTFORK)
            _not_there.add(mapping)


_mapped: weakref.WeakSet[LockedMapping] = weakref.WeakSet()
_not_there: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()  # unmapped in a child
_kept: list[mmap.mmap] = []  # in a child: never deallocated


def _forked() -> None:
    _kept.extend(_not_there)  # unmapping here would unmap newer memory at the same address
    _not_there.clear()  # nothing left to exclude from this child's own children
    for mapping in list(_mapped):
        _mapped.discard(mapping)
        with contextlib.suppress(OSError):
            mapping.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


STEP_BYTES = 1 << 20  # small enough to stay in CPU caches until verified


class MappedShard:
    """Bytes of one shard file, mapped and locked against writers.

    Attributes:
        data: The whole file. Read-only by contract; a write goes to a private copy of the page.
    """

    def __init__(self, mapping: LockedMapping) -> None:
        self.data = memoryview(mapping)
        self._file: LockedMapping | None = mapping

    def fill(self, first_byte: int, into: memoryview) -> None:
        """Copy from `first_byte` on until `into` is full.

        Bytes for pages in use come by a system call, without mapping the file's pages.

        Raises:
            OSError: the file is too short, was closed, or as the system reports it.
        """
        file = self._file
        if file is None:
            raise OSError("the file in memory was closed")
        if first_byte + len(into) > len(self.data):
            raise OSError(f"the file in memory ends before byte {first_byte + len(into)}")
        for start in range(0, len(into), STEP_BYTES):
            part = into[start : start + STEP_BYTES]
            populate(part)  # by itself that takes as long as the copy, and inside of it longer
            done = 0
            while done < len(part):
                read = os.preadv(file.descriptor, [part[done:]], first_byte + start + done)
                if not read:
                    raise OSError(f"the file in memory ends before byte {first_byte + len(into)}")
                done += read

    def close(self) -> None:
        """Unlock the file once no view of it is left."""
        self.data, self._file = memoryview(b""), None


# ---- the arena


try:
    import fcntl
except ImportError:  # not a POSIX system: no such tier
    fcntl = None  # type: ignore[assignment]


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

    def __init__(self, memory_dir: SharedMemoryDir, path: Path, descriptor: int) -> None:
        self.path = path
        self.memory = self.reserved = memoryview(b"")
        self.keeps: Callable[[memoryview, int], object] = lambda *_: None
        self._memory_dir = memory_dir
        self._descriptor = descriptor
        self._mapping: mmap.mmap | None = None

    def reserve(self, num_bytes: int, *, spare: bool = False) -> None:
        """Make `memory` that long, with every page reserved.

        The old content is lost. Its names are removed first, so no reader finds half of it.

        Args:
            num_bytes: Length of `memory`.
            spare: Allow a longer file, so a next content of about that length reuses its pages.
                Readers must know the end of the content.

        Raises:
            OSError: not enough memory (ENOSPC, ENOMEM); the file is then empty. Or another process
                has locked it.
        """
        self._take()
        before, length = os.fstat(self._descriptor), num_bytes
        if spare:
            needed = -(-num_bytes // GROWS_BY_BYTES) * GROWS_BY_BYTES
            fits = needed <= before.st_size <= MOST_SPARE * needed
            length = before.st_size if fits else needed
        try:
            self._must_have(length - before.st_blocks * 512)
            if before.st_size > length:
                self._keep(length)
            if before.st_size != length:
                os.ftruncate(self._descriptor, length)
            self._reserve(length, before)
        except OSError:
            self.empty()
            raise
        self.memory = self.reserved[:num_bytes]

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
        # Again: closing any descriptor of the file drops the process's lock, be it a reader's in
        # this process or the mapping's own.
        fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

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
        # More addresses than bytes: a moved mapping would force a caller with locked pages to lock
        # all of them again.
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
        """Free the reserved memory; `OSError` if another process has locked the file."""
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
        target = self._memory_dir.root / folder
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
        status = os.fstat(self._descriptor)
        return self._memory_dir.names_of(status.st_ino) if status.st_nlink > 1 else []

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

    def __init__(self, memory_dir: SharedMemoryDir) -> None:
        """Make the memfd; `OSError` as the system reports it."""
        super().__init__(memory_dir, Path("memfd"), make_memfd())
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

    remove = Arena.close

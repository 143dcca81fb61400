"""The local tier: a directory on a file system shared by all hosts of the run.

Every name becomes visible only after its bytes are on stable storage: write to a temporary name,
fsync it, rename or link, fsync the folder. A new folder is fsynced into its parent first. So is,
once, each folder found there: a process killed at the wrong moment may have left it unsynced. A
power cut leaves temporary files, never half a record.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import secrets
import threading
from collections import deque
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import TYPE_CHECKING, Any

from trainckpt.errors import TierUnavailable, UnusableSnapshot
from trainckpt.storage.denied_access import DENIED, explain
from trainckpt.storage.direct_io import NUM_READERS, Direct, FileReader, new_file, read_parts
from trainckpt.storage.libc import libc, sync_file_system

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence


# ---- system calls, one method each
#
# A tier writes only through this object, so a test can record all calls in order and replay any
# prefix. The power-cut test finds a crash's remains this way. Reads go through it too, so a test
# can make any read fail or end early. Files are created 0600, folders 0700: a snapshot holds
# everything the model knows.


_DIRECT = getattr(os, "O_DIRECT", 0)
# No symbolic links, not inherited by children, no translation of line ends.
_PLAIN = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_READ = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_MOST = 1 << 30  # bytes per call; Linux takes at most 2 GiB
_UNSUPPORTED = (errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)
# Errors of a reservation that a write would meet too; any other means that there is none here.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
# Errors of an operation the file system does not support; any other error is a fault.
CANNOT = frozenset(
    (*_UNSUPPORTED, errno.EPERM, errno.EMLINK, errno.ENOLCK, errno.EXDEV, errno.EBADF)
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
            if number in _NO_ROOM:
                raise OSError(number, os.strerror(number))
            if number != errno.EINTR:
                return

    def write(self, path: Path, descriptor: int, block: memoryview, first_byte: int) -> None:
        """Write the whole block at its position in the file just created at `path`; any thread.

        With the descriptor of `open_direct`, memory, position and length must be whole pages. A
        file system may refuse at any time (`EINVAL`); the block can then be written again.
        """
        del path
        done = 0
        while done < len(block):
            piece = block[done : done + _MOST]
            if hasattr(os, "pwrite"):
                done += os.pwrite(descriptor, piece, first_byte + done)
            else:
                with _seeking:
                    os.lseek(descriptor, first_byte + done, os.SEEK_SET)
                    done += os.write(descriptor, piece)

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


# The system call for reserving space; None without one.
_fallocate: Any = None
if os.name != "nt":
    _fallocate = getattr(libc(), "fallocate64", None) or getattr(libc(), "fallocate", None)


# ---- the tier


TEMPORARY = ".tmp-"
STALE_S = 600.0  # a temporary file of such an age was left by a killed writer
UNFINISHED = f"{TEMPORARY}copy-"  # prefix of new bytes of an existing file
CREATING = ("write", "create")  # verbs of `translated` with a missing folder, not a missing file
_CANNOT_CREATE = frozenset({errno.EINVAL, errno.ENOSYS, errno.ENOTSUP})
_ABSENT = (FileNotFoundError, NotADirectoryError)
MOST_FOLDERS = 50  # remembered as synced; a forgotten one is synced once more


def key_parts(key: str) -> list[str]:
    """Return the names in a key; refuse one that leaves the run directory."""
    parts = key.split("/") if key else []
    if any(part in ("", ".", "..") or "\0" in part for part in parts):
        raise UnusableSnapshot(f"the key {key[:100]!r} leaves the run directory")
    return parts


class LocalTier:
    """Named bytes in one directory. See `base.Tier` for the contract.

    Attributes:
        num_readers: Threads reading parts at once; fewer if other processes read at the same time.
    """

    def __init__(
        self, root: str | os.PathLike[str], disk: Disk | None = None, name: str = "local"
    ) -> None:
        self.name = name
        self.root = Path(root).absolute()
        self.url = str(self.root)
        self.disk = disk or Disk()
        self._direct = Direct(self.url)
        self.num_readers = NUM_READERS
        self._durable: set[Path] = set()  # folders with names known to be synced

    def write(
        self,
        key: str,
        blocks: Iterable[memoryview],
        num_bytes: int | None = None,
        held: int = 1,
        *,
        replacing: bool = False,
    ) -> None:
        """Create `key` with the bytes of `blocks`; durable on return."""
        with self._writing(key) as path:
            if replacing:
                with self._temporary(path, UNFINISHED) as temporary:
                    self._write_file(temporary, blocks, num_bytes, held)
                    self.disk.rename(temporary, path)
            else:
                self._write_file(path, blocks, num_bytes, held)

    def write_parts(
        self, key: str, num_bytes: int, parts: Iterable[tuple[int, memoryview]]
    ) -> None:
        """Create `key` with parts at their positions, several at once; durable on return."""
        with self._writing(key) as path, new_file(self.disk, path, self._direct) as file:
            file.reserve(num_bytes)
            for first_byte, part in parts:
                file.put(first_byte, part)
            file.must_hold(num_bytes)

    def replace(self, key: str, data: bytes) -> None:
        """Atomically make `data` the bytes of `key`."""
        with self._writing(key) as path, self._temporary(path) as temporary:
            self._write_file(temporary, [memoryview(data)])
            self.disk.rename(temporary, path)

    def create(self, key: str, data: bytes) -> bool:
        """Create `key` with `data`; return False, and change nothing, if it exists."""
        path = self._path(key)
        with self._translated("create", path):
            self._make_folders(path.parent)
            try:
                self._create(path, data)
            except FileExistsError:
                return False
            self.disk.sync_folder(path.parent)
        return True

    def size(self, key: str) -> int | None:
        """Return the bytes of `key`; None if it is missing."""
        path = self._path(key)
        with self._translated("look at", path):
            try:
                found = path.stat()
            except _ABSENT:
                return None
            except OSError as error:
                if error.errno != errno.ELOOP:
                    raise
                raise UnusableSnapshot(f"{key} is a link that leads back to itself") from error
        if not S_ISREG(found.st_mode):  # opening a pipe would wait for its other end
            raise UnusableSnapshot(f"{key} is not a file")
        return found.st_size

    def read(self, key: str, *, max_bytes: int) -> bytes:
        """Return all bytes of `key`, at most `max_bytes`."""
        if self.size(key) is None:
            raise UnusableSnapshot(f"{key} is missing")
        path = self._path(key)
        with self._translated("read", path), FileReader(self.disk, path, key, self._direct) as file:
            size = file.num_bytes  # of the open file, even if another replaces it meanwhile
            if size > max_bytes:
                raise UnusableSnapshot(f"{key} has {size} bytes, more than {max_bytes}")
            data = bytearray(size)
            read_parts(file, [(0, memoryview(data))], lambda number: None)
        return bytes(data)

    def read_into(self, key: str, first_byte: int, into: memoryview) -> None:
        """Fill `into` from `first_byte` on; a file too short is an error."""
        self.read_parts(key, [(first_byte, into)])

    def read_parts(
        self,
        key: str,
        parts: Sequence[tuple[int, memoryview]],
        done: Callable[[int], None] = lambda number: None,
    ) -> None:
        """Fill every part, several at once; `done` gets each part's number, on any thread."""
        with self.opened(key) as file:
            read_parts(file, parts, done, self.num_readers)

    @contextlib.contextmanager
    def opened(self, key: str) -> Iterator[FileReader]:
        """Open the file of `key` for many reads, on any thread. Errors as `read_parts`."""
        path = self._path(key)
        with self._translated("read", path), FileReader(self.disk, path, key, self._direct) as file:
            yield file

    def list(self, folder: str) -> list[str]:
        """Return the names in `folder`, sorted, without temporary ones; empty if there is none.

        Something else than a folder holds none, inside one of the run's folders.
        """
        path = self._path(folder)
        with self._translated("list", path):
            try:
                found = sorted(entry.name for entry in path.iterdir())
            except FileNotFoundError:
                return []
            except OSError as error:
                is_else = error.errno in (errno.ENOTDIR, errno.ELOOP)
                if "/" in folder and is_else and path.parent.is_dir():
                    return []
                raise
        return [name for name in found if not name.startswith(TEMPORARY)]

    def remove(self, key: str) -> None:
        """Remove `key`; durable on return."""
        path = self._path(key)
        with self._translated("remove", path), contextlib.suppress(*_ABSENT):
            if is_folder(path):  # not ours
                return
            self.disk.remove(path)
            self.disk.sync_folder(path.parent)

    def remove_stale(self, folder: str, fresh: str) -> None:
        """Remove the temporary files of killed writers from `folder`.

        Those ten minutes older than `fresh`, a key that was just written: the clock of the file
        system counts, also where it was once set ahead.
        """
        path = self._path(folder)
        with self._translated("remove", path), contextlib.suppress(FileNotFoundError):
            now_s = self._path(fresh).lstat().st_mtime
            for entry in path.iterdir():
                is_old = now_s - entry.lstat().st_mtime > STALE_S
                if is_old and entry.name.startswith(TEMPORARY) and not is_folder(entry):
                    self.disk.remove(entry)

    def make_folder(self, folder: str) -> tuple[Path, ...]:
        """Make `folder` durably ("" is the tier's root); return the folders made, top first."""
        path = self._path(folder)
        with self._translated("create", path):
            return self._make_folders(path)

    def must_take_files(self, folder: str) -> None:
        """Try to create a file in `folder`, if there is one; raise `TierUnavailable` if denied."""
        path = self._path(f"{folder}/{TEMPORARY}{secrets.token_hex(8)}")
        with self._translated("write", path):
            try:
                os.close(self.disk.create(path))
            except FileNotFoundError:
                if path.parent.is_symlink():  # to a file system that is not mounted
                    raise
            else:
                self.disk.remove(path)

    def remove_folder(self, folder: str, keep: Collection[str] = ()) -> None:
        """Remove the files in `folder` except those in `keep`; without any, the folder too.

        Folders in it are not ours, and stay; so does the folder then. Of a link to a folder only
        the link is removed, unless files are kept there.
        """
        path = self._path(folder)
        with self._translated("remove", path), contextlib.suppress(*_ABSENT):
            with os.scandir(path) as found:
                files = {e.name: not e.is_dir(follow_symlinks=False) for e in found}
            if path.is_symlink():
                if files.keys().isdisjoint(keep):
                    self.disk.remove(path)
                return
            for name in sorted(name for name, is_file in files.items() if is_file):
                if name not in keep:
                    with unless_in_use():
                        self.disk.remove(path / name)
            if all(files.values()) and files.keys().isdisjoint(keep):
                with unless_in_use():
                    self.disk.remove_folder(path)

    def clear_unfinished(self, folder: str) -> None:
        """Delete remains in `folder` of new bytes for existing files."""
        path = self._path(folder)
        with self._translated("remove", path), contextlib.suppress(FileNotFoundError):
            for entry in sorted(path.iterdir()):
                if entry.name.startswith(UNFINISHED) and not is_folder(entry):
                    self.disk.remove(entry)

    def _translated(self, verb: str, path: Path) -> contextlib.AbstractContextManager[None]:
        return translated(verb, path, self.root)

    def _path(self, key: str) -> Path:
        return self.root.joinpath(*key_parts(key))

    def _make_folders(self, path: Path) -> tuple[Path, ...]:
        missing: list[Path] = []
        existing = path
        while not existing.is_dir():
            missing.append(existing)
            existing = existing.parent
        for folder in reversed(missing):
            with contextlib.suppress(FileExistsError):
                self.disk.make_folder(folder)
            # Even if another rank made it: the file must not become durable before its folder.
            try:
                self.disk.sync_folder(folder.parent)
            except PermissionError:  # it may be written and not read, such as one of mode 1733
                sync_file_system(folder)
            self._is_durable(folder)
        for folder in [path, *path.parents]:
            if not folder.is_relative_to(self.root):
                break
            if folder not in self._durable:
                # This user may not open the run directory's parent; then another user made it.
                with contextlib.suppress(PermissionError):
                    self.disk.sync_folder(folder.parent)
                self._is_durable(folder)
        return tuple(reversed(missing))

    def _is_durable(self, folder: Path) -> None:
        # Bounded, for every snapshot has its own folder.
        if len(self._durable) >= MOST_FOLDERS:
            self._durable.clear()
        self._durable.add(folder)

    @contextlib.contextmanager
    def _writing(self, key: str) -> Iterator[Path]:
        """Make the folder of a key before the block, and its new name durable after it."""
        path = self._path(key)
        with self._translated("write", path):
            self._make_folders(path.parent)
            yield path
            self.disk.sync_folder(path.parent)

    def _write_file(
        self, path: Path, blocks: Iterable[memoryview], num_bytes: int | None = None, held: int = 1
    ) -> None:
        marks = deque[int]()
        at = 0
        with new_file(self.disk, path, self._direct) as file:
            if num_bytes is not None:
                file.reserve(num_bytes)
            for block in blocks:
                file.put(at, block)
                at += len(block)
                marks.append(file.workers.num_asked)
                if len(marks) == held:  # the caller may reuse the oldest block's memory next
                    file.workers.settle_first(marks.popleft())
            if num_bytes is not None:
                file.must_hold(num_bytes)

    def _create(self, path: Path, data: bytes) -> None:
        with self._temporary(path) as temporary:
            self._write_file(temporary, [memoryview(data)])
            try:
                self.disk.link(temporary, path)
                return
            except OSError as error:
                # EACCES too: a file was just created in this folder.
                if error.errno not in CANNOT and error.errno != errno.EACCES:
                    raise
        # Without hard links: exclusive, but a crash may leave an empty file. Readers of records
        # take it for an unfinished claim.
        self._write_file(path, [memoryview(data)])

    @contextlib.contextmanager
    def _temporary(self, path: Path, prefix: str = TEMPORARY) -> Iterator[Path]:
        """Yield a name beside `path` for a file of this writer alone; remove it at the end."""
        temporary = path.with_name(f"{prefix}{secrets.token_hex(8)}")
        try:
            yield temporary
        finally:
            with contextlib.suppress(FileNotFoundError):
                self.disk.remove(temporary)


def is_folder(path: Path) -> bool:
    """Return True for a folder itself, not for a link to one."""
    return S_ISDIR(path.lstat().st_mode)


@contextlib.contextmanager
def unless_in_use() -> Iterator[None]:
    """Leave what others still use: a client of NFS keeps open files, under names of its own."""
    try:
        yield
    except FileNotFoundError:
        pass
    except OSError as error:
        if error.errno not in (errno.EBUSY, errno.ENOTEMPTY, errno.EEXIST):
            raise


@contextlib.contextmanager
def translated(verb: str, path: Path, root: Path | None = None) -> Iterator[None]:
    """Turn errors of system calls in the block into this package's errors, with a hint.

    `root`: directory of the run that the path belongs to.
    """
    try:
        yield
    except FileNotFoundError as error:
        if verb in CREATING:
            raise _no_folder(verb, path, root) from error
        raise UnusableSnapshot(f"cannot {verb} {path}: it is missing") from error
    except OSError as error:
        why = error.strerror or str(error)
        if error.errno in DENIED:
            whose, hint = explain(verb, path, root)
            raise TierUnavailable(f"cannot {verb} {path}: {why}{whose}", hint=hint) from error
        hint = {
            errno.ENOSPC: f"free space on the file system of {path}",
            errno.EDQUOT: f"free space within the quota that holds {path}",
            errno.ENOTDIR: "name a directory: a file lies at this path, or above it",
            errno.EROFS: "name a run on a writable file system",
        }.get(error.errno or 0, "")
        if verb in CREATING and error.errno in _CANNOT_CREATE:
            hint = (
                "this file system may lack what a run needs, such as exclusive creation (O_EXCL): "
                "name a directory on another one"
            )
        raise TierUnavailable(f"cannot {verb} {path}: {why}", hint=hint) from error


def _no_folder(verb: str, path: Path, root: Path | None) -> TierUnavailable:
    """Return the error for a folder that was removed, or cannot be made on an unmounted volume."""
    for at in (*reversed(path.parents), path):
        # Path's methods raise if this user may not search a folder.
        if os.path.islink(at) and not os.path.exists(at):  # noqa: PTH110, PTH114
            end = os.path.realpath(at)
            return TierUnavailable(
                f"cannot {verb} {path}: {at} is a link to {end}, which does not exist",
                hint=f"mount the file system of {end}, or name another directory",
            )
    if root is not None and root in path.parent.parents and os.path.isdir(root):  # noqa: PTH112
        return TierUnavailable(
            f"cannot {verb} {path}: another process removed its folder meanwhile",
            hint="see whether the run was started twice: the later start removes unfinished saves",
        )
    return TierUnavailable(
        f"cannot {verb} {path}: its folder is missing, and cannot be made",
        hint=f"see whether the file system of {path.parent} is mounted, or name another directory",
    )

"""The memory tier: files on tmpfs, private to this user, outliving the process.

    <root>/<user>/<digest of the run directory>/
        place                       owner: location of the run directory
        arenas/rank00000.0          written again and again; `Arena`
        snapshots/<folder>/<file>   second name of an arena: the shard file in it; `MappedShard`

An arena is a shard file in the making, so publishing it copies nothing: it gets a second name.
Readers verify every digest and trust no name. Arenas reserve bytes before touching them: a page
missing on a full tmpfs would end the process (SIGBUS).

Locks belong to the process (`lockf`), so a forked loader worker has none. A writer locks its arena
alone, readers share their lock, and a process finding the lock taken uses other memory.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from trainckpt.storage.arena import SNAPSHOTS, Arena, LockedMapping, MappedShard
from trainckpt.storage.private_files import is_private, make_private, must_be_private, write_private
from trainckpt.storage.worker_pool import aside

try:
    import fcntl
except ImportError:  # not a POSIX system: no such tier
    fcntl = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

ROOT_VARIABLE = "TRAINCKPT_MEMORY"  # another tmpfs than /dev/shm, or "none"
NONE = "none"
_DEFAULT_ROOT = "/dev/shm"  # noqa: S108 - folders in it are private, and their owner is checked
_OWNER, ARENAS, _FETCHING = "place", "arenas", "fetching"
_LOOK_AGAIN_S = 0.02
_MOMENT_S = 1.0  # for all run directories to answer
# A pipe in place of a file must not block.
_NO_FOLLOW = (
    getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)
)
_STORE_KEPT_S = 3 * 24 * 3600.0  # until unused memory of a run in an object store is removed
_ROOM_BYTES = 64 << 20  # left free for loader workers: they pass batches through the same tmpfs


class ArenaInUse(OSError):
    """Another process reads or writes these bytes."""


class SharedMemoryDir:
    """Memory folder of one run on this host.

    Attributes:
        root: The folder, on tmpfs.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    @classmethod
    def of(cls, run: str) -> SharedMemoryDir | None:
        """Return the memory folder of a run directory, made if missing; None if impossible."""
        root, real = _user_folder(), _real(run)
        if root is None:
            return None
        memory_dir = cls(root / _name_of(real))
        owner = memory_dir.root / _OWNER
        with contextlib.suppress(OSError):
            if make_private(memory_dir.root):
                if not (owner.exists() and owner.stat().st_size):
                    write_private(owner, os.fsencode(real))
                return memory_dir
        return None

    @classmethod
    def found(cls, run: str) -> SharedMemoryDir | None:
        """Return the memory of this run if it exists already; make nothing."""
        root = _user_folder(make=False)
        memory_dir = cls(root / _name_of(_real(run))) if root is not None else None
        return memory_dir if memory_dir is not None and is_private(memory_dir.root) else None

    def arena(self, rank: int, number: int) -> Arena:
        """Return arena `number` of a rank, locked for writing.

        Raises:
            ArenaInUse: another process has locked it.
            OSError: as the system reports it.
        """
        return self.open_arena(self.path_of(rank, number))

    def open_arena(self, path: Path) -> Arena:
        """Return the arena in the file `path`, locked for writing; errors as `arena`."""
        must_be_private(path.parent)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | _NO_FOLLOW, 0o600)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            raise ArenaInUse(error.errno, f"{path} is in use") from error
        return Arena(self, path, descriptor)

    def path_of(self, rank: int, number: int) -> Path:
        """Return the path of an arena's file."""
        return self.root / ARENAS / f"rank{rank:05d}.{number}"

    def left_by(self, rank: int) -> int:
        """Return the bytes in arenas of this rank, including those of earlier attempts."""
        return _taken_by(path for path, owner in self._arenas() if owner == rank)

    def held(self, folder: str, name: str, num_bytes: int | None = None) -> MappedShard | None:
        """Return the bytes of a shard file, locked for reading; None if they are not in memory.

        Args:
            folder, name: Snapshot folder (`snapshots/...`), and file name in it.
            num_bytes: Expected length, if known. A shorter file is refused; arenas may be longer.
        """
        path = self.root / folder / name
        try:
            descriptor = os.open(path, os.O_RDONLY | _NO_FOLLOW)
        except OSError:
            return None
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            status = os.fstat(descriptor)
            size = status.st_size if num_bytes is None else num_bytes
            if status.st_size < size or not size or status.st_uid != os.getuid():
                raise ArenaInUse
            return MappedShard(LockedMapping(descriptor, size))
        except (OSError, ValueError):
            os.close(descriptor)
            return None

    @contextlib.contextmanager
    def fetching(self) -> Iterator[None]:
        """Lock the folder while this process copies files into it; other processes wait.

        The lock ends with the process.

        Raises:
            ArenaInUse: another process is copying files.
            OSError: as the system reports it: the file system has no locks.
        """
        descriptor = os.open(self.root / _FETCHING, os.O_RDWR | os.O_CREAT | _NO_FOLLOW, 0o600)
        try:
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in (errno.EACCES, errno.EAGAIN):
                    raise
                why = "another process is prefetching to this folder"
                raise ArenaInUse(error.errno, why) from error
            os.ftruncate(descriptor, 0)
            yield
        finally:
            os.close(descriptor)

    def wait_fetched(self, limit_s: float) -> bool:
        """Return True once no process copies files here any more; False after `limit_s` seconds."""
        until_s = time.monotonic() + limit_s
        path = self.root / _FETCHING
        while path.exists() and not _try_lock(path):
            if time.monotonic() > until_s:
                return False
            with contextlib.suppress(OSError):
                os.truncate(path, 1)
            time.sleep(_LOOK_AGAIN_S)
        return True

    def is_awaited(self) -> bool:
        """Return True if another process has waited for the files this process copies."""
        with contextlib.suppress(OSError):
            return (self.root / _FETCHING).stat().st_size > 0
        return False

    def folders(self) -> list[str]:
        """Return the snapshot folders with any file in memory: `snapshots/...`, sorted."""
        with contextlib.suppress(OSError):
            return sorted(f"{SNAPSHOTS}/{p.name}" for p in (self.root / SNAPSHOTS).iterdir())
        return []

    def forget(self, folders: Iterable[str]) -> None:
        """Remove the names of these snapshots; their arenas stay."""
        for folder in folders:
            if (self.root / folder).is_dir():  # a pipe would be opened, and waited for
                shutil.rmtree(self.root / folder, ignore_errors=True)

    def keep_arenas(self, world: Collection[int], rank: int, own: Collection[Path]) -> None:
        """Remove needless arenas without a lock and without a published file.

        Args:
            world: Ranks on this host; arenas of all other ranks are needless.
            rank, own: This rank, and the arenas it still needs.
        """
        for path, owner in self._arenas():
            if owner not in world or (owner == rank and path not in own):
                _try_lock(path, remove=True)

    def give_back(self, rank: int) -> None:
        """Remove this rank's unlocked arenas, published or not."""
        for path, owner in self._arenas():
            if owner == rank:
                with contextlib.suppress(OSError):
                    self.open_arena(path).remove()

    def remove(self) -> None:
        """Remove everything. Processes with a mapping keep their memory until they end."""
        shutil.rmtree(self.root, ignore_errors=True)

    def names_of(self, inode: int) -> list[Path]:
        """Return the published names, in any snapshot, of the file with this inode."""
        found = []
        for path in self._named():
            with contextlib.suppress(OSError):
                found += [path] if path.lstat().st_ino == inode else []
        return found

    def _named(self) -> list[Path]:
        found: list[Path] = []
        for folder in self.folders():
            with contextlib.suppress(OSError):
                found += (self.root / folder).iterdir()
        return found

    @property
    def is_in_use(self) -> bool:
        """Return True if another process has locked an arena."""
        return any(not _try_lock(path) for path, _ in self._arenas())

    @property
    def free_bytes(self) -> int:
        """Return the bytes still available, less the room for loader workers."""
        found = os.statvfs(self.root)
        return max(found.f_bavail * found.f_frsize - _ROOM_BYTES, 0)

    @property
    def num_bytes(self) -> int:
        """Return the bytes in use now."""
        return _taken_by([*(path for path, _ in self._arenas()), *self._named()])

    def _arenas(self) -> Iterator[tuple[Path, int]]:
        with contextlib.suppress(OSError):
            for path in sorted((self.root / ARENAS).iterdir()):
                rank = path.name.removeprefix("rank").partition(".")[0]
                if rank.isdecimal():
                    yield path, int(rank)


def reclaim() -> None:
    """Remove the memory of runs whose run directory is gone.

    A run directory without an answer within a moment does not count as gone.
    """
    root = _user_folder(make=False)
    if root is None:
        return
    with contextlib.suppress(OSError, RuntimeError):  # the system may give no more threads
        answers = {folder: aside(partial(_is_gone, folder)) for folder in root.iterdir()}
        until_s = time.monotonic() + _MOMENT_S
        for folder, answer in answers.items():
            is_gone = answer(max(until_s - time.monotonic(), 0))
            # On this thread: opening and closing files drops the process's locks.
            with contextlib.suppress(OSError, ValueError):
                memory_dir = SharedMemoryDir(folder)
                if is_gone is not None and is_gone() and not memory_dir.is_in_use:
                    memory_dir.remove()


def _is_gone(folder: Path) -> bool:
    """Return True if the run of this memory folder has ended for good; `OSError`: unknown."""
    owner = (folder / _OWNER).read_bytes()
    if b"://" not in owner:
        try:
            os.lstat(owner)
        except (FileNotFoundError, NotADirectoryError):
            return bool(owner)
        return False
    used = max(path.stat().st_mtime for path in (folder, folder / SNAPSHOTS) if path.exists())
    return time.time() - used > _STORE_KEPT_S  # no request to the store for this


def _real(run: str) -> str:
    return run if "://" in run else os.path.realpath(run)


def _name_of(real: str) -> str:
    return hashlib.sha256(os.fsencode(real)).hexdigest()[:24]


def _user_folder(*, make: bool = True) -> Path | None:
    root = os.environ.get(ROOT_VARIABLE) or _DEFAULT_ROOT
    if root == NONE or fcntl is None or not hasattr(os, "posix_fallocate"):
        return None
    folder = Path(root) / f"trainckpt-{os.getuid()}"
    try:
        return folder if (make_private(folder) if make else is_private(folder)) else None
    except OSError:
        return None


def why_unavailable() -> str:
    """Return why this user has no folder in shared memory."""
    root = os.environ.get(ROOT_VARIABLE) or _DEFAULT_ROOT
    if root == NONE:
        return f"{ROOT_VARIABLE}={NONE} forbids shared memory"
    if fcntl is None or not hasattr(os, "posix_fallocate"):
        return "this system has no shared memory for them"
    folder = Path(root) / f"trainckpt-{os.getuid()}"
    if os.path.lexists(folder) and not is_private(folder):
        return f"{folder} belongs to, or is open to, another user"
    return f"{root} takes no folder of this user"


def folders_of_others() -> list[Path]:
    """Return the folders of other users in shared memory: nothing in them is read."""
    root, found = os.environ.get(ROOT_VARIABLE) or _DEFAULT_ROOT, list[Path]()
    with contextlib.suppress(OSError):
        for folder in sorted(Path(root).glob("trainckpt-*")) if root != NONE else ():
            found += [folder] if folder.lstat().st_uid != os.getuid() else []
    return found


def _try_lock(path: Path, *, remove: bool = False) -> bool:
    """Return True if no other process has locked the arena; `remove` a file without other names.

    Never for an arena of this process: closing any descriptor of the file drops its lock.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | _NO_FOLLOW)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if remove and path.lstat().st_nlink == 1:
                path.unlink()
        finally:
            os.close(descriptor)
    except OSError:
        return False
    return True


def _taken_by(paths: Iterable[Path]) -> int:
    seen: dict[int, int] = {}
    for path in paths:
        with contextlib.suppress(OSError):
            status = path.lstat()
            seen[status.st_ino] = status.st_blocks * 512
    return sum(seen.values())

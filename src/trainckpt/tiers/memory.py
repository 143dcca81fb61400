"""The memory tier: files on tmpfs, private to this user, that outlive the process.

    <root>/<user>/<digest of the run's place>/
        place                       whose memory this is: the run's place
        arenas/rank00000.0          written again and again; `Arena`
        snapshots/<folder>/<file>   the same file by the name of what it holds; `Held`

An arena is a shard file in the making, so publishing it copies nothing: it gets a second name.
Where the tmpfs is too small for it, what has these names is a link to memory that another process
holds (`tiers/memfd.py`). A link whose holder is gone is as good as none, and is swept.
Nothing in here is believed for its name: whoever reads verifies every digest. Bytes are reserved
before they are touched, for a page that a full tmpfs cannot give ends the process (SIGBUS).

Locks are of the process (`lockf`), so a forked loader worker holds none: a writer has its arena
alone, a reader shares what it reads with other readers, and whoever finds it taken goes elsewhere.
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

from trainckpt.tiers import memfd
from trainckpt.tiers.arena import SNAPSHOTS, Arena
from trainckpt.tiers.held import Held, Locked
from trainckpt.tiers.patience import those_that_answer
from trainckpt.tiers.private import is_private, make_private, must_be_private, write_private

try:
    import fcntl
except ImportError:  # not a POSIX system: no such tier
    fcntl = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

    # Has a process that outlives this one hold a memfd, by its descriptor and token; the link at
    # that path is made inside. Raises OSError where none does.
    Hold = Callable[[int, str, Path], contextlib.AbstractContextManager[memfd.Target]]

ROOT_VARIABLE = "TRAINCKPT_MEMORY"  # another tmpfs than /dev/shm, or "none"
NONE = "none"
_DEFAULT_ROOT = "/dev/shm"  # noqa: S108 - what is made in it is private, and checked to be ours
_OWNER, ARENAS, _FETCHING = "place", "arenas", "fetching"
_LOOK_AGAIN_S = 0.02
_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
_STORE_KEPT_S = 3 * 24 * 3600.0  # how long the memory of a run in an object store is kept, unused
_ROOM_BYTES = 64 << 20  # left free for loader workers, which pass batches through the same tmpfs


class MemoryTaken(OSError):
    """Another process reads or writes these bytes."""


class MemoryPlace:
    """The memory of one run on this host.

    Attributes:
        root: Its folder, on tmpfs.
    """

    def __init__(self, root: Path, run: str | None = None) -> None:
        """`run`: whose memory it is; None: of one that has made it already."""
        self.root = root
        self._run = run

    @classmethod
    def of(cls, run: str) -> MemoryPlace | None:
        """The memory of the run at this place; None where this host has none for us."""
        root = _user_folder()
        if root is None:
            return None
        real = _real(run)
        place = cls(root / _name_of(real), real)
        try:
            return place if place._make() else None
        except OSError:
            return None

    def _make(self) -> bool:
        """Whether it is there, and ours."""
        if not make_private(self.root):
            return False
        owner = self.root / _OWNER
        if self._run is not None and not (owner.exists() and owner.stat().st_size):
            write_private(owner, os.fsencode(self._run))
        return True

    @classmethod
    def found(cls, run: str) -> MemoryPlace | None:
        """As `of`, but only if it is there already; makes nothing."""
        root = _user_folder(make=False)
        if root is None:
            return None
        place = cls(root / _name_of(_real(run)))
        return place if is_private(place.root) else None

    def arena(self, rank: int, number: int) -> Arena:
        """Arena `number` of a rank, locked for writing.

        Raises:
            MemoryTaken: another process has it.
            OSError: as the system reports it.
        """
        return self.open_arena(self.path_of(rank, number))

    def open_arena(self, path: Path) -> Arena:
        """The arena of this file, among the others; errors as `arena`."""
        must_be_private(path.parent)
        flags = os.O_RDWR | os.O_CREAT
        try:
            descriptor = memfd.open_file(path, flags)
        except memfd.Gone:
            self._drop(path)
            descriptor = memfd.open_file(path, flags | os.O_EXCL)
        return self._locked(path, descriptor)

    def held_arena(self, rank: int, number: int, hold: Hold) -> Arena:
        """A new one, in memory that another process holds. Its name must be free.

        Raises:
            OSError: nobody holds it, or as the system reports it.
        """
        path = self.path_of(rank, number)
        self._make()  # whoever held the last of it may have taken it away, while this was dumped
        must_be_private(path.parent)
        descriptor, token = memfd.make()
        try:
            with hold(descriptor, token, path) as target:
                self._link(path, target, descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        return self._locked(path, descriptor)

    def _link(self, path: Path, target: memfd.Target, descriptor: int) -> None:
        """As which all find the memfd that is this descriptor of ours."""
        if memfd.is_dead(path):
            self._drop(path)
        path.symlink_to(str(target))
        found = memfd.status_of(path)
        if found is None or not os.path.samestat(found, os.fstat(descriptor)):
            path.unlink()
            raise memfd.Gone(errno.ENOENT, "its holder is not to be seen", str(path))

    def _locked(self, path: Path, descriptor: int) -> Arena:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            raise MemoryTaken(error.errno, f"{path} is in use") from error
        return Arena(self, path, descriptor)

    def path_of(self, rank: int, number: int) -> Path:
        """The file of an arena."""
        return self.root / ARENAS / f"rank{rank:05d}.{number}"

    def left_by(self, rank: int) -> memfd.Taken:
        """By arenas of this rank, its own or those of earlier attempts."""
        return memfd.taken_by(path for path, owner in self._arenas() if owner == rank)

    def held(self, folder: str, name: str, num_bytes: int | None = None) -> Held | None:
        """The bytes of a shard file, locked for reading; None if they are not here.

        Args:
            folder, name: Of the snapshot (`snapshots/...`), and of the file in it.
            num_bytes: Its length, if it is known. What is shorter is not it; arenas may be longer.
        """
        path = self.root / folder / name
        try:
            descriptor = memfd.open_file(path, os.O_RDONLY)
        except OSError:
            return None
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            status = os.fstat(descriptor)
            size = status.st_size if num_bytes is None else num_bytes
            if status.st_size < size or not size or status.st_uid != os.getuid():
                raise MemoryTaken
            return Held(Locked(descriptor, size))
        except (OSError, ValueError):
            os.close(descriptor)
            return None

    @contextlib.contextmanager
    def fetching(self) -> Iterator[None]:
        """Around bringing files here: others wait for them, as long as this process lives.

        Raises:
            MemoryTaken: another process brings some.
            OSError: as the system reports it: no lock can be had here.
        """
        descriptor = os.open(self.root / _FETCHING, os.O_RDWR | os.O_CREAT | _NO_FOLLOW, 0o600)
        try:
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in (errno.EACCES, errno.EAGAIN):
                    raise
                raise MemoryTaken(error.errno, "another process brings files here") from error
            os.ftruncate(descriptor, 0)
            yield
        finally:
            os.close(descriptor)

    def wait_fetched(self, limit_s: float) -> bool:
        """Return when nobody brings files here any more; False if that took too long."""
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
        """Whether anybody has been waiting for what this process brings."""
        with contextlib.suppress(OSError):
            return (self.root / _FETCHING).stat().st_size > 0
        return False

    def folders(self) -> list[str]:
        """Snapshots of which anything is held: `snapshots/...`, sorted."""
        with contextlib.suppress(OSError):
            return sorted(f"{SNAPSHOTS}/{p.name}" for p in (self.root / SNAPSHOTS).iterdir())
        return []

    def forget(self, folders: Iterable[str]) -> None:
        """Take away the names of these snapshots; the arenas they lie in stay."""
        for folder in folders:
            shutil.rmtree(self.root / folder, ignore_errors=True)

    def keep_arenas(self, world: Collection[int], rank: int, own: Collection[Path]) -> None:
        """Give back what nobody uses, if it holds nothing and nobody has it locked.

        Args:
            world: Ranks on this host; what others have left is not needed.
            rank, own: Of this rank only these are.
        """
        for path, owner in self._arenas():
            if owner not in world or (owner == rank and path not in own):
                _try_lock(path, remove=True)

    def give_back(self, rank: int) -> None:
        """Remove this rank's arenas that nobody has locked, whatever they hold."""
        for path, owner in self._arenas():
            if owner == rank:
                with contextlib.suppress(OSError):
                    self.open_arena(path).remove()

    def remove(self) -> None:
        """Give everything back. Processes that have it mapped keep it until they end."""
        shutil.rmtree(self.root, ignore_errors=True)

    def names_of(self, inode: int) -> list[Path]:
        """Under which snapshots' names a file stands, or a link."""
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

    def sweep(self) -> None:
        """Take away links whose memory nobody holds any more, and all of it if nothing is left."""
        dead = [path for path, _ in self._arenas() if memfd.is_dead(path)]
        for path in [*dead, *filter(memfd.is_dead, self._named())]:
            self._drop(path)
        if dead:  # of a snapshot that nothing else is held of, the manifest is of no use
            held = {path.parent for path in self._named() if path.suffix != ".json"}
            self.forget(folder for folder in self.folders() if self.root / folder not in held)
        if dead and not self.folders() and not any(self._arenas()):
            self.remove()

    def _drop(self, link: Path) -> None:
        """Take away a link that leads nowhere, and the other names that it has."""
        with contextlib.suppress(OSError):
            for path in (*self.names_of(link.lstat().st_ino), link):
                if not memfd.is_dead(path):  # another's by now
                    continue
                path.unlink(missing_ok=True)
                if path.parent.name != ARENAS:
                    with contextlib.suppress(OSError):
                        path.parent.rmdir()  # if it was the last of its snapshot

    @property
    def is_in_use(self) -> bool:
        """Whether another process has an arena."""
        return any(not _try_lock(path) for path, _ in self._arenas())

    @property
    def free_bytes(self) -> int:
        """What may still be reserved; some is left for others."""
        found = os.statvfs(self.root)
        return max(found.f_bavail * found.f_frsize - _ROOM_BYTES, 0)

    @property
    def taken(self) -> memfd.Taken:
        """What is taken now, and where."""
        return memfd.taken_by([*(path for path, _ in self._arenas()), *self._named()])

    @property
    def num_bytes(self) -> int:
        """What is taken now."""
        return sum(self.taken)

    def _arenas(self) -> Iterator[tuple[Path, int]]:
        with contextlib.suppress(OSError):
            for path in sorted((self.root / ARENAS).iterdir()):
                rank = path.name.removeprefix("rank").partition(".")[0]
                if rank.isdecimal():
                    yield path, int(rank)


def reclaim() -> None:
    """Give back the memory of runs whose place is gone, and sweep links that lead nowhere.

    The places of other runs are waited for only a moment: what does not answer is not gone.
    """
    root = _user_folder(make=False)
    if root is None:
        return
    with contextlib.suppress(OSError):
        looks = {folder: partial(_is_gone, folder) for folder in root.iterdir()}
        gone = those_that_answer(looks)
        for folder in looks:  # here: on another thread it would meet locks of this process
            with contextlib.suppress(OSError):
                place = MemoryPlace(folder)
                if gone.get(folder) and not place.is_in_use:
                    place.remove()
                else:
                    place.sweep()


def _is_gone(folder: Path) -> bool:
    """Whether the run whose memory this is has ended for good; OSError: nobody knows."""
    owner = (folder / _OWNER).read_bytes()
    if b"://" not in owner:
        try:
            os.lstat(owner)
        except (FileNotFoundError, NotADirectoryError):
            return bool(owner)
        return False
    used = max(path.stat().st_mtime for path in (folder, folder / SNAPSHOTS) if path.exists())
    return time.time() - used > _STORE_KEPT_S  # nobody asks a store for this


def _real(run: str) -> str:
    return run if "://" in run else os.path.realpath(run)


def _name_of(real: str) -> str:
    return hashlib.sha256(os.fsencode(real)).hexdigest()[:24]


def _user_folder(*, make: bool = True) -> Path | None:
    """Where this user's runs have their memory; None where there is no safe place."""
    root = os.environ.get(ROOT_VARIABLE) or _DEFAULT_ROOT
    if root == NONE or fcntl is None or not hasattr(os, "posix_fallocate"):
        return None
    folder = Path(root) / f"trainckpt-{os.getuid()}"
    try:
        return folder if (make_private(folder) if make else is_private(folder)) else None
    except OSError:
        return None


def _try_lock(path: Path, *, remove: bool = False) -> bool:
    """Whether nobody else has the arena; removes it then, if that is wanted and it holds nothing.

    Not for an arena of this very process: to close any descriptor of it gives up its lock.
    """
    try:
        descriptor = memfd.open_file(path, os.O_RDWR)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if remove and path.lstat().st_nlink == 1:
                path.unlink()
        finally:
            os.close(descriptor)
    except memfd.Gone:
        return True
    except OSError:
        return False
    return True

"""What the file system of a run's place can do, found out by doing it.

Measured once an attempt, on files that are removed again. `docs/failure-model.md` says what a
commit relies on: a place where `rename` does not replace, or where two processes can both create
one name, is refused. Whatever else is missing is a fact for the record and for `doctor`.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainckpt.tiers.disk import CANNOT, Disk
from trainckpt.tiers.local import TEMPORARY, translated

if TYPE_CHECKING:
    from collections.abc import Callable

LINK, EXCLUSIVE, NOT_AT_ALL = "link", "exclusive", ""
PAGE = 4096
REMOTE = ("nfs", "ceph", "lustre", "gpfs", "beegfs", "fuse", "9p", "virtiofs", "cifs", "smb",
          "glusterfs", "afs", "ocfs2", "gfs2", "wekafs")  # fmt: skip
TAIL = 904  # bytes behind the last whole page


@dataclass(frozen=True)
class Capabilities:
    """What one directory's file system can do.

    Attributes:
        file_system: Its type, as mounted: "ext4", "nfs4"; "" if unknown.
        rename: A rename replaces the target, in one act.
        create_only: How one of several creators is chosen: by `LINK`, by `EXCLUSIVE` creation
            (a crash may leave an empty file), or `NOT_AT_ALL`.
        folder_sync: A directory's names can be put on stable storage.
        lock: `flock` works.
        direct: Whole pages can be written past the page cache (O_DIRECT).
        direct_tail: A file so written can be cut to a length that is no multiple of a page.
        free_bytes: That this user may still write.
    """

    file_system: str
    rename: bool
    create_only: str
    folder_sync: bool
    lock: bool
    direct: bool
    direct_tail: bool
    free_bytes: int

    def to_json(self) -> dict[str, Any]:
        """As it stands in an attempt's record under "place"."""
        return asdict(self)

    def breaks_commits(self) -> list[str]:
        """Why nothing can be committed here; empty if it can."""
        found = [] if self.rename else ["a rename does not replace a file in one act"]
        if self.create_only == NOT_AT_ALL:
            found.append("two processes can create one file")
        return found

    def warnings(self) -> list[str]:
        """What is missing, and what follows from it."""
        if self.folder_sync:
            return []
        return ["directories cannot be synced there: a power cut may lose the newest snapshots"]


def measure(folder: Path, disk: Disk | None = None) -> Capabilities:
    """Try everything in a folder of our own inside `folder`, which exists.

    Raises:
        TierUnavailable: the place refused even an ordinary file.
    """
    scratch, disk = folder / f"{TEMPORARY}{secrets.token_hex(8)}", disk or Disk()
    with translated("write", scratch):
        disk.make_folder(scratch)
        try:
            _write(disk, scratch / "file", b"new")
            rename = _rename(disk, scratch)
            create_only = _create_only(disk, scratch)
            lock = _can(lambda: _flock(scratch / "file"))
            direct, direct_tail = _direct(scratch / "direct")
            folder_sync = os.name == "nt" or _can(lambda: disk.fsync_folder(scratch))
            return Capabilities(
                file_system(folder), rename, create_only, folder_sync, lock, direct, direct_tail,
                free_bytes(folder),
            )  # fmt: skip
        finally:
            _remove(scratch)


def file_system(path: Path) -> str:
    """Type of the file system that holds `path`, as mounted; "" where the system does not say."""
    path = Path(os.path.realpath(path))
    found = (-1, "")
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text(errors="replace").splitlines():
            mount, _, source = line.partition(" - ")
            at = mount.split()[4].replace("\\040", " ")
            if path.is_relative_to(at) and len(at) >= found[0]:  # a later mount covers an earlier
                found = (len(at), source.split()[0])
    return found[1]


def is_remote(kind: str) -> bool:
    """Whether what is written to a file system of this type leaves the host."""
    return kind.startswith(REMOTE)


def _can(act: Callable[[], object]) -> bool:
    try:
        act()
    except (OSError, ImportError, AttributeError) as error:
        if isinstance(error, OSError) and error.errno not in CANNOT:
            raise
        return False
    return True


def _write(disk: Disk, path: Path, data: bytes) -> None:
    descriptor = disk.create(path)
    try:
        disk.write(path, descriptor, memoryview(data), 0)
        disk.sync(path, descriptor)
    finally:
        os.close(descriptor)


def _rename(disk: Disk, scratch: Path) -> bool:
    source, target = scratch / "source", scratch / "target"
    for path, data in ((source, b"new"), (target, b"old")):
        path.write_bytes(data)
    if not _can(lambda: disk.rename(source, target)):
        return False
    return not source.exists() and target.read_bytes() == b"new"


def _create_only(disk: Disk, scratch: Path) -> str:
    def second_fails(first: Callable[[], object]) -> bool:
        def both() -> None:
            first()
            with contextlib.suppress(FileExistsError):
                first()
                raise OSError(errno.ENOTSUP, "created twice")

        return _can(both)

    if second_fails(lambda: disk.link(scratch / "file", scratch / "linked")):
        return LINK
    if second_fails(lambda: os.close(disk.create(scratch / "created"))):
        return EXCLUSIVE
    return NOT_AT_ALL


def _flock(path: Path) -> None:
    import fcntl

    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _direct(path: Path) -> tuple[bool, bool]:
    """Whether two pages can be written past the cache, and the file cut inside the second."""

    def write() -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT
        descriptor = os.open(path, flags, 0o600)
        try:
            with mmap.mmap(-1, 2 * PAGE) as pages:
                os.write(descriptor, pages)
        finally:
            os.close(descriptor)

    def cut() -> None:
        os.truncate(path, PAGE + TAIL)

    if not _can(write):
        return False, False
    return True, _can(cut) and path.stat().st_size == PAGE + TAIL


def free_bytes(folder: Path) -> int:
    """Return how many bytes this user may still write there; -1 if the system does not say."""
    if not hasattr(os, "statvfs"):
        return -1
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def _remove(scratch: Path) -> None:
    """As much as can be: it is ours alone, and what is left of it does no harm."""
    with contextlib.suppress(OSError):
        for path in scratch.iterdir():
            path.unlink()
        scratch.rmdir()

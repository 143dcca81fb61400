"""Measure the file system of a run directory by trying each operation.

Runs once per attempt, on temporary files. `docs/failure-model.md` names the needs of a commit: a
location is refused if `rename` does not replace, or if two processes can create one name. Anything
else missing goes into the attempt record and into `doctor`'s report.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import secrets
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainckpt.storage.local import CANNOT, TEMPORARY, Disk, translated

if TYPE_CHECKING:
    from collections.abc import Callable

LINK, EXCLUSIVE, NOT_AT_ALL = "link", "exclusive", ""
PAGE = 4096
REMOTE = (
    "nfs",
    "ceph",
    "lustre",
    "gpfs",
    "beegfs",
    "fuse",
    "9p",
    "virtiofs",
    "cifs",
    "smb",
    "glusterfs",
    "afs",
    "ocfs2",
    "gfs2",
    "wekafs",
)
TAIL = 904  # bytes behind the last whole page


@dataclass(frozen=True)
class Capabilities:
    """Measured properties of one directory's file system.

    Attributes:
        file_system: Type as mounted: "ext4", "nfs4"; "" if unknown.
        rename: A rename replaces the target atomically.
        create_only: How one of several creators wins: by `LINK`, by `EXCLUSIVE` creation (a crash
            may leave an empty file), or `NOT_AT_ALL`.
        folder_sync: A directory's names can be put on stable storage.
        lock: `flock` works.
        direct: Whole pages can be written past the page cache (O_DIRECT).
        direct_tail: Such a file can be cut to a length inside a page.
        free_bytes: Bytes this user may still write; -1 if unknown.
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
        """Return the JSON object stored in an attempt record under "place"."""
        return asdict(self)

    def breaks_commits(self) -> list[str]:
        """Return the reasons against any commit here; empty if commits are safe."""
        found = [] if self.rename else ["a rename does not replace a file atomically"]
        if self.create_only == NOT_AT_ALL:
            found.append("two processes can create one file")
        return found

    def warnings(self) -> list[str]:
        """Return one message per missing property, with its consequence."""
        if self.folder_sync:
            return []
        return ["directories cannot be synced there: a power cut may lose the newest snapshots"]


def measure(folder: Path, disk: Disk | None = None) -> Capabilities:
    """Try everything in a temporary folder inside `folder`, an existing directory.

    Raises:
        TierUnavailable: the location refused even an ordinary file.
    """
    scratch, disk = folder / f"{TEMPORARY}{secrets.token_hex(8)}", disk or Disk()
    with translated("write", scratch, folder):
        disk.make_folder(scratch)
        try:
            _write(disk, scratch / "file", b"new")
            rename = _rename(disk, scratch)
            create_only = _create_only(disk, scratch)
            direct, direct_tail = _direct(scratch / "direct")
            return Capabilities(
                file_system=file_system(folder),
                rename=rename,
                create_only=create_only,
                folder_sync=os.name == "nt" or _can(lambda: disk.fsync_folder(scratch)),
                lock=_can(lambda: _flock(scratch / "file")),
                direct=direct,
                direct_tail=direct_tail,
                free_bytes=free_bytes(folder),
            )
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def file_system(path: Path) -> str:
    """Return the type of the file system at `path`, as mounted; "" if the system does not say."""
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
    """Return True if file systems of this type send their files off the host."""
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
            try:
                first()
            except PermissionError as error:  # a file was just created in this folder
                raise OSError(errno.ENOTSUP, "not permitted") from error
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
    """Try to write two pages past the cache, and to cut the file inside the second."""

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
    """Return the bytes this user may still write there; -1 if the system does not say."""
    if not hasattr(os, "statvfs"):
        return -1
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize

"""Pack a folder into one archive named by its SHA-256, and unpack one safely.

An archive is a compressed tar with regular files only, in an open file of the caller's. A reader
compares the digest before it reads anything else, and refuses links, devices, paths that leave the
folder, and more than `MAX_BYTES`. Unpacked files are private. The folder appears whole or not at
all: by a rename.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import os
import shutil
import tarfile
import tempfile
import zlib
from pathlib import Path
from stat import S_ISREG
from typing import TYPE_CHECKING, BinaryIO, NamedTuple, cast

from trainckpt.errors import UnusableSnapshot
from trainckpt.storage.local import TEMPORARY, key_parts

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_BYTES = 4 << 30
MAX_FILES = 200_000
_BLOCK = 1 << 20
_QUICK = 1  # zlib's level: others take much longer, and save little on machine code
_LOCKS = ("locks", ".lock")


class Packed(NamedTuple):
    """Content address of an archive."""

    sha256: str
    num_bytes: int


Listing = dict[str, tuple[int, int]]


def list_files(folder: Path) -> Listing:
    """Return path in the folder -> (bytes, time of change in ns) of its regular files.

    Lock files and what programs call temporary are left out.
    """
    files: Listing = {}
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not _is_passing(name)]
        for name in names:
            path = Path(parent, name)
            with contextlib.suppress(FileNotFoundError):
                status = path.lstat()
                if S_ISREG(status.st_mode) and not _is_passing(name):
                    key = str(path.relative_to(folder))
                    files[key] = (status.st_size, status.st_mtime_ns)
    return files


def pack(folder: Path, listing: Listing, archive: BinaryIO) -> Packed:
    """Write the listed files to an empty file, and return its digest.

    Raises:
        OSError: as the system reports it; a file is missing, too.
        UnusableSnapshot: the folder is too large, or a file changed meanwhile.
    """
    total = sum(num_bytes for num_bytes, _ in listing.values())
    if total > MAX_BYTES or len(listing) > MAX_FILES:
        raise UnusableSnapshot(
            f"{folder} has {len(listing)} files of {total / 1e9:.1f} GB, more than "
            f"{MAX_FILES} of {MAX_BYTES / 1e9:.1f} GB"
        )
    hashed = _HashedFile(archive)
    with (
        gzip.GzipFile("", "wb", _QUICK, cast("BinaryIO", hashed), mtime=0) as compressed,
        tarfile.open(fileobj=compressed, mode="w|", format=tarfile.PAX_FORMAT) as tar,
    ):
        for name in sorted(listing):
            _add(tar, folder / name, name, listing[name])
    return Packed(hashed.sha256.hexdigest(), hashed.num_bytes)


def digest_of(archive: BinaryIO) -> Packed:
    """Return the content address of a file, read from its first byte."""
    sha256, num_bytes = hashlib.sha256(), 0
    archive.seek(0)
    while block := archive.read(_BLOCK):
        sha256.update(block)
        num_bytes += len(block)
    return Packed(sha256.hexdigest(), num_bytes)


def unpack(
    archive: BinaryIO,
    expected: Packed,
    folder: Path,
    placing: contextlib.AbstractContextManager[object] | None = None,
) -> None:
    """Unpack an archive as `folder`, which is missing or has no files.

    Args:
        archive: An open file.
        expected: Its digest.
        folder: The folder to be.
        placing: Entered for the rename; if it raises, nothing is put in place.

    Raises:
        UnusableSnapshot: it is not the archive of this digest, or holds what it must not.
        OSError: as the system reports it; the folder has files already, too.
    """
    if digest_of(archive) != expected:
        raise UnusableSnapshot("its bytes are not those that were stored")
    temporary = Path(tempfile.mkdtemp(prefix=TEMPORARY, dir=folder.parent))  # 0700
    try:
        _extract(archive, temporary)
        with placing or contextlib.nullcontext():
            for parent, _, _ in os.walk(folder, topdown=False):
                Path(parent).rmdir()
            temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _is_passing(name: str) -> bool:
    return name.endswith(_LOCKS) or name.startswith((".", "tmp."))


def _add(tar: tarfile.TarFile, path: Path, name: str, expected: tuple[int, int]) -> None:
    """Add one file: its bytes and its time, and nothing of its owner."""
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        if (status.st_size, status.st_mtime_ns) != expected:
            raise UnusableSnapshot(f"{path} changed while it was packed")
        member = tarfile.TarInfo(name)
        member.size, member.mode, member.mtime = status.st_size, 0o600, int(status.st_mtime)
        tar.addfile(member, file)


def _extract(archive: BinaryIO, folder: Path) -> None:
    if not hasattr(tarfile, "data_filter"):
        raise UnusableSnapshot("it cannot be unpacked safely: update Python to 3.11.4")
    archive.seek(0)
    try:
        with gzip.open(archive) as plain, tarfile.open(fileobj=plain, mode="r|") as tar:
            for member in _checked(tar):
                path = folder.joinpath(*key_parts(member.name))
                path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                tar.extract(member, folder, filter="data")
                path.chmod(0o600)
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UnusableSnapshot(f"it cannot be unpacked: {error}") from error


def _checked(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Yield the members; refuse whatever `pack` does not write."""
    total = 0
    for number, member in enumerate(tar):
        total += member.size
        if not member.isreg():
            raise UnusableSnapshot(f"{member.name[:100]!r} in it is no regular file")
        if total > MAX_BYTES or number >= MAX_FILES:
            raise UnusableSnapshot(f"it holds more than {MAX_FILES} files or {MAX_BYTES} bytes")
        yield member


class _HashedFile:
    """A file for writing, with the digest of all that was written."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.sha256, self.num_bytes = hashlib.sha256(), 0

    def write(self, data: bytes) -> int:
        """Write all of `data`."""
        self.sha256.update(data)
        self.num_bytes += len(data)
        self._file.write(data)
        return len(data)

    def flush(self) -> None:
        """Write what is buffered."""
        self._file.flush()

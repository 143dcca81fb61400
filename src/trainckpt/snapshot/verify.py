"""Verify every byte of every copy of a snapshot, and name the bad files."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from trainckpt.errors import UnusableSnapshot
from trainckpt.format import digest, parity_file
from trainckpt.format.digest_check import check_of, is_file
from trainckpt.format.names import MANIFEST, SNAPSHOTS, sealed_file_name
from trainckpt.format.parity_file import HEAD_BYTES
from trainckpt.snapshot.decrypting_tier import DecryptingTier, KeyRing, check_all
from trainckpt.snapshot.restore import Reader, read_header
from trainckpt.storage import replica_slots
from trainckpt.storage.shared_memory import SharedMemoryDir

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from trainckpt.format.manifest import FileEntry, Manifest
    from trainckpt.format.parity_file import ParityHead
    from trainckpt.storage.base import Readable, Tier

    Checked = tuple[str, int, str, str]  # key, bytes, digest, header's digest


# ---- copies in this host's memory
#
# Copies and parities stored here for other hosts are included. Files a live attempt is writing, and
# files only on other hosts, are not.


MEMORY = "memory"
BAD = "does not match its digest"
MISSING = "is missing"  # of a copy: another tier may have it


def verify_memory(place: str, manifest: Manifest) -> Iterator[VerifiedCopy]:
    """Check each file of the snapshot in this host's memory of the run at `place`."""
    memory = SharedMemoryDir.found(place)
    if memory is None:
        return
    name, folder = str(manifest.name), manifest.name.folder
    for rank, file in enumerate(manifest.files):
        # The plain file may lie beside an encrypted one; the manifest's digest is of the latter.
        called = sealed_file_name(rank) if file.sealed else file.name
        held = memory.held(folder, called)
        if held is not None:
            ok = is_file(held.data[: file.num_bytes], file)  # an arena may be longer
            held.close()
            yield VerifiedCopy(name, MEMORY, called, ok, "" if ok else BAD)
    for called in filter(parity_file.is_file_name, replica_slots.files(memory, folder)):
        held = memory.held(folder, called)
        if held is not None:
            reason = ""
            try:
                read_parity(held.data, called)
            except UnusableSnapshot as error:
                reason = error.message
            held.close()
            yield VerifiedCopy(name, MEMORY, called, not reason, reason)


def read_parity(data: memoryview, what: str) -> tuple[ParityHead, memoryview]:
    """Return the head and the parities of a parity file, verified.

    Raises:
        UnusableSnapshot: length or digest is wrong.
    """
    head, parities = parity_file.load(data[:HEAD_BYTES], what), data[HEAD_BYTES:]
    if len(parities) != head.num_parity * head.chunk_bytes:
        raise UnusableSnapshot(f"{what} has another length than its header says")
    if digest.digest(parities) != head.parities:
        raise UnusableSnapshot(f"{what} {BAD}")
    return head, parities


# ---- all copies of a snapshot


CHUNK_BYTES = 8 << 20
# The header alone is read; framework "pt" would import torch, which takes seconds.
_FRAMEWORK = "numpy" if find_spec("numpy") else "pt"


@dataclass(frozen=True)
class VerifiedCopy:
    """The result for one file of one snapshot in one tier."""

    snapshot: str
    tier: str
    file: str
    ok: bool
    reason: str = ""


def verify(
    tier: Tier,
    manifest: Manifest,
    progress: Callable[[int], None] = lambda num_bytes: None,
    known: dict[Checked, str] | None = None,
    opener: KeyRing | None = None,
) -> tuple[VerifiedCopy, ...]:
    """Read every file of a snapshot, and the older ones it refers to.

    Args:
        tier, manifest: The tier, and the snapshot's manifest.
        progress: Called with the bytes of each chunk read.
        known: Results by file; updated. Several snapshots may refer to one file, read once.
        opener: With identities, encrypted files are decrypted too; else only their stored
            digests are compared.
    """
    opened = DecryptingTier(tier, opener or KeyRing())
    if opener is not None and opener.identities:
        try:
            manifest = opened.admit(manifest)
        except UnusableSnapshot as error:
            return (_copy(tier, manifest, MANIFEST, error.message),)
    found, known = list[VerifiedCopy](), {} if known is None else known
    for key, file in files_of(manifest):
        checked = key, file.num_bytes, file.digest, file.header_digest
        if checked not in known:
            reason = check_file(tier, key, file, progress)
            known[checked] = reason or _decrypted(opened, key, file)
        found.append(_copy(tier, manifest, file.name, known[checked]))
    if manifest.reached and not manifest.is_locked and all(copy.ok for copy in found):
        reason = _referred(opened, manifest)
        found += [_copy(tier, manifest, MANIFEST, reason)] if reason else []
    return tuple(found)


def _copy(tier: Tier, manifest: Manifest, file: str, reason: str) -> VerifiedCopy:
    return VerifiedCopy(str(manifest.name), tier.name, file, not reason, reason)


def files_of(manifest: Manifest) -> Iterator[tuple[str, FileEntry]]:
    """Yield every file a snapshot needs, with its key: its own, then older ones."""
    for file in manifest.files:
        yield f"{manifest.name.folder}/{file.name}", file
    for file in manifest.reached:
        yield f"{SNAPSHOTS}/{file.name}", file


def _decrypted(tier: DecryptingTier, key: str, file: FileEntry) -> str:
    """Return why a file cannot be decrypted; "" if it can, or if it has no plain facts."""
    if file.plain is None:
        return ""
    try:
        check_all(tier, key, file.plain.num_bytes)
        read_header(tier, key.rpartition("/")[0], replace(file, name=key.rpartition("/")[2]))
    except UnusableSnapshot as error:
        return error.message
    return ""


def _referred(tier: Readable, manifest: Manifest) -> str:
    """Return why a reference of an intact file cannot be followed; else ""."""
    reader = Reader(tier, manifest)
    try:
        for rank in range(manifest.world):
            reader.places(rank)
    except UnusableSnapshot as error:
        return error.message
    return ""


def check_file(
    tier: Tier,
    key: str,
    file: FileEntry,
    progress: Callable[[int], None] = lambda num_bytes: None,
) -> str:
    """Return why one copy of a shard file differs from the manifest; "" if it does not."""
    try:
        size = tier.size(key)
        if size is None:
            return MISSING
        if size != file.num_bytes:
            return f"has {size} bytes, not {file.num_bytes}"
        check = check_of(file)
        for chunk in _chunks(tier, key, size, progress):
            check.update(chunk)
        if not check.is_right:
            return "does not match its digest"
        if file.sealed:
            return ""
        read_header(tier, key.removesuffix(f"/{file.name}"), file)
        return _plain_reader(tier, key)
    except UnusableSnapshot as error:
        return error.message


def _chunks(
    tier: Tier, key: str, size: int, progress: Callable[[int], None]
) -> Iterator[memoryview]:
    chunk = memoryview(bytearray(min(size, CHUNK_BYTES)))
    for first_byte in range(0, size, CHUNK_BYTES):
        part = chunk[: min(CHUNK_BYTES, size - first_byte)]
        tier.read_into(key, first_byte, part)
        progress(len(part))
        yield part


def _plain_reader(tier: Tier, key: str) -> str:
    """Return why the plain safetensors library cannot read the file; the format promises it can."""
    from safetensors import SafetensorError, safe_open

    path = Path(tier.url) / key
    if not path.is_file():
        return ""
    try:
        with safe_open(path, framework=_FRAMEWORK) as opened:
            opened.keys()
    except SafetensorError as error:
        return f"is not readable as safetensors: {error}"
    return ""

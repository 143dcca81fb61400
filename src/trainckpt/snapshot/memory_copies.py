"""Verify a snapshot's files in this host's memory, like any other copy.

Copies and parities stored here for other hosts are included. Files a live attempt is writing, and
files only on other hosts, are not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainckpt.errors import UnusableSnapshot
from trainckpt.format import digest, parity_file
from trainckpt.format.digest_check import is_file
from trainckpt.format.names import sealed_file_name
from trainckpt.format.parity_file import HEAD_BYTES
from trainckpt.snapshot.verify import VerifiedCopy
from trainckpt.storage import replica_slots
from trainckpt.storage.shared_memory import SharedMemoryDir

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainckpt.format.manifest import Manifest
    from trainckpt.format.parity_file import ParityHead

MEMORY = "memory"
BAD = "does not match its digest"


def verify(place: str, manifest: Manifest) -> Iterator[VerifiedCopy]:
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
        raise UnusableSnapshot(f"{what} has not the length that it says")
    if digest.digest(parities) != head.parities:
        raise UnusableSnapshot(f"{what} {BAD}")
    return head, parities

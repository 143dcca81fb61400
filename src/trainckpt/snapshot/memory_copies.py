"""What stands of a snapshot in this host's memory, read and checked as every other copy is.

What this host keeps for others is looked at too, copies and parities. What a live attempt is
writing is not; nor is what is only on other hosts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainckpt.errors import UnusableSnapshot
from trainckpt.format import digest, parity_file
from trainckpt.format.checking import is_file
from trainckpt.format.names import sealed_file_name
from trainckpt.format.parity_file import HEAD_BYTES
from trainckpt.snapshot.verify import Copy
from trainckpt.tiers import kept
from trainckpt.tiers.memory import MemoryPlace

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainckpt.format.manifest import Manifest
    from trainckpt.format.parity_file import ParityHead

MEMORY = "memory"
BAD = "does not match its digest"


def verify(place: str, manifest: Manifest) -> Iterator[Copy]:
    """Check each file of the snapshot that this host's memory holds of the run at `place`."""
    memory = MemoryPlace.found(place)
    if memory is None:
        return
    name, folder = str(manifest.name), manifest.name.folder
    for rank, file in enumerate(manifest.files):
        # Beside an encrypted file may lie what it was before, which its digest does not tell of.
        called = sealed_file_name(rank) if file.sealed else file.name
        held = memory.held(folder, called)
        if held is not None:
            ok = is_file(held.data[: file.num_bytes], file)  # an arena may be longer
            held.close()
            yield Copy(name, MEMORY, called, ok, "" if ok else BAD)
    for called in filter(parity_file.is_file_name, kept.files(memory, folder)):
        held = memory.held(folder, called)
        if held is not None:
            reason = ""
            try:
                read_parity(held.data, called)
            except UnusableSnapshot as error:
                reason = error.message
            held.close()
            yield Copy(name, MEMORY, called, not reason, reason)


def read_parity(data: memoryview, what: str) -> tuple[ParityHead, memoryview]:
    """What a parity file says of itself, and its parities, which are as it says.

    Raises:
        UnusableSnapshot: they are not.
    """
    head, parities = parity_file.load(data[:HEAD_BYTES], what), data[HEAD_BYTES:]
    if len(parities) != head.num_parity * head.chunk_bytes:
        raise UnusableSnapshot(f"{what} has not the length that it says")
    if digest.digest(parities) != head.parities:
        raise UnusableSnapshot(f"{what} {BAD}")
    return head, parities

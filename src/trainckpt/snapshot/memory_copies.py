"""What stands of a snapshot in this host's memory, read and checked as every other copy is.

What a live attempt is writing is not looked at; nor is what is only on other hosts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainckpt.format import digest
from trainckpt.snapshot.verify import Copy
from trainckpt.tiers.memory import MemoryPlace

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainckpt.format.manifest import Manifest

MEMORY = "memory"


def verify(place: str, manifest: Manifest) -> Iterator[Copy]:
    """Check each file of the snapshot that this host's memory holds of the run at `place`."""
    memory = MemoryPlace.found(place)
    if memory is None:
        return
    for file in manifest.files:
        if file.sealed:
            continue  # what memory holds is not what is stored, but what it was before
        held = memory.held(manifest.name.folder, file.name)
        if held is None:
            continue
        ok = len(held.data) == file.num_bytes and digest.digest(held.data) == file.digest
        held.close()
        reason = "" if ok else "does not match its digest"
        yield Copy(str(manifest.name), MEMORY, file.name, ok, reason)

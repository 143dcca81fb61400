"""Restore: read and verify one rank's part of a snapshot. The mirror of `save`.

Nothing is handed on that was not verified: the header by the digest in the manifest, every
region by the digest in its header, as it is read. The live objects are not touched here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainckpt.errors import UnusableSnapshot
from trainckpt.format import digest, shard_file
from trainckpt.snapshot.restore_plan import plan_restore

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainckpt.format.manifest import FileEntry, Manifest
    from trainckpt.format.shard_file import Region, ShardHeader
    from trainckpt.tiers.base import Tier


def read_header(tier: Tier, folder: str, file: FileEntry) -> ShardHeader:
    """The verified header of one shard file."""
    key = f"{folder}/{file.name}"
    prefix = bytearray(8)
    tier.read_into(key, 0, memoryview(prefix))
    length = shard_file.header_length(prefix, key)
    if length > file.num_bytes:
        raise UnusableSnapshot(f"{key} is shorter than its header")
    head = bytearray(length)
    tier.read_into(key, 0, memoryview(head))
    if digest.digest(head) != file.header_digest:
        raise UnusableSnapshot(f"the header of {key} does not match its digest")
    return shard_file.parse(bytes(head), key, file_bytes=file.num_bytes)


def read_rank(
    tier: Tier, manifest: Manifest, *, rank: int, memory_for: Callable[[Region], memoryview]
) -> None:
    """Read everything `rank` needs into the memory that `memory_for` gives, and verify it.

    Raises:
        UnusableSnapshot: anything is missing or does not match its digest; names the file.
        TierUnavailable: the tier refused to give it.
    """
    folder = manifest.name.folder
    headers = [read_header(tier, folder, file) for file in manifest.files]
    for read in plan_restore(manifest, headers, rank=rank):
        key = f"{folder}/{manifest.files[read.file].name}"
        memory = memory_for(read.region)
        if len(memory) != read.region.num_bytes:
            raise UnusableSnapshot(f"{key}: {read.region.key[:100]} does not fit its tensor")
        tier.read_into(key, read.first_byte, memory)
        if digest.digest(memory) != read.region.digest:
            raise UnusableSnapshot(f"{key}: {read.region.key[:100]} does not match its digest")

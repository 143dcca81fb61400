"""Restore: read and verify parts of a snapshot. The mirror of `save`.

Nothing is handed on that was not verified: the header by the digest in the manifest, every block
by its digest in the header, as it is read. The live objects are not touched here.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Protocol

from trainckpt.errors import UnusableSnapshot
from trainckpt.format import digest, shard_file
from trainckpt.snapshot.restore_plan import Planner, find, plan_restore

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trainckpt.format.layout import Box
    from trainckpt.format.manifest import FileEntry, Manifest
    from trainckpt.format.shard_file import Region, ShardHeader
    from trainckpt.snapshot.restore_plan import Read
    from trainckpt.tiers.base import Tier


class Destination(Protocol):
    """Where a restore puts what it reads: memory for the box that is wanted of each tensor."""

    def memory_for(self, region: Region, part: Box) -> memoryview | None:
        """The bytes that `part` fills, to be written at once; None: it is not one run of bytes."""

    def put(self, region: Region, part: Box, data: memoryview) -> None:
        """Copy `part`: `data` begins with its first element and goes on as `region` does."""


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


class Reader:
    """Reads parts of one snapshot; each header once."""

    def __init__(self, tier: Tier, manifest: Manifest) -> None:
        self._tier = tier
        self._manifest = manifest
        self._planner = Planner(manifest)
        self._headers: dict[int, tuple[int, dict[str, Region]]] = {}

    def read(
        self, wanted: Mapping[str, Box | None], destination: Destination, *, donor: int
    ) -> None:
        """Read the box that is wanted of each tensor, and verify it.

        Args:
            wanted: Tensor -> box; None: the whole of it.
            destination: Is asked for memory only once every part was found in a header.
            donor: The rank whose own tensors are read.

        Raises:
            UnusableSnapshot: anything is missing or does not match its digest; names the file.
            TierUnavailable: the tier refused to give it.
        """
        reads = plan_restore(self._manifest, wanted, donor=donor, planner=self._planner)
        found = [
            (file, first, read, region)
            for file, of_file in groupby(reads, key=lambda read: read.file)
            for first, read, region in self._look_up(file, list(of_file))
        ]
        for file, first, read, region in found:
            key = f"{self._manifest.name.folder}/{self._manifest.files[file].name}"
            _read(self._tier, key, first, region, read.part or region.box, destination)

    def _look_up(self, file: int, reads: Sequence[Read]) -> list[tuple[int, Read, Region]]:
        """Where the regions of one file begin, in the order of the file."""
        first_byte, regions = self._header(file)
        what = self._manifest.files[file].name
        found = []
        for read in reads:
            region = find(read, self._manifest.tensors[read.tensor], regions, what)
            found.append((first_byte + region.first_byte, read, region))
        return sorted(found, key=lambda each: each[0])

    def _header(self, file: int) -> tuple[int, dict[str, Region]]:
        if file not in self._headers:
            if file >= len(self._manifest.files):
                raise UnusableSnapshot(f"the snapshot has no file of rank {file}")
            entry = self._manifest.files[file]
            header = read_header(self._tier, self._manifest.name.folder, entry)
            regions = {region.key: region for region in header.regions}
            self._headers[file] = header.header_bytes, regions
        return self._headers[file]


def _read(
    tier: Tier, key: str, first_byte: int, region: Region, part: Box, destination: Destination
) -> None:
    begin, end = span(region, part)
    block = region.num_bytes
    if len(region.digest) > digest.NUM_HEX:
        block = shard_file.block_bytes(region.num_bytes)
    first = begin // block * block if block else 0
    last = min(-(-end // block) * block, region.num_bytes) if block else 0
    is_run = end - begin == shard_file.num_bytes(part.shape, region.dtype)
    memory = destination.memory_for(region, part) if is_run else None
    if part.is_empty and region.num_bytes:
        return  # only the type was wanted
    if memory is not None and len(memory) != end - begin:
        raise UnusableSnapshot(f"{key}: {region.key[:100]} does not fit its tensor")
    exact = memory is not None and (first, last) == (begin, end)
    data = memory if memory is not None and exact else memoryview(bytearray(last - first))
    tier.read_into(key, first_byte + first, data)
    at = first // block * digest.NUM_HEX if block else 0
    told = region.digest[at : at + max(1, -(-len(data) // (block or 1))) * digest.NUM_HEX]
    if digest.digests_by_block(data, block or 1) != told:
        raise UnusableSnapshot(f"{key}: {region.key[:100]} does not match its digest")
    if memory is None:
        destination.put(region, part, data[begin - first : end - first])
    elif not exact:
        memory[:] = data[begin - first : end - first]


def span(region: Region, part: Box) -> tuple[int, int]:
    """First byte of `part` in a region, and the one behind its last; the hull of its runs."""
    if part.is_empty:
        return 0, 0
    first = last = 0
    for o, n, at, extent in zip(part.offset, part.shape, region.offset, region.shape, strict=True):
        first = first * extent + (o - at)
        last = last * extent + (o - at + n - 1)
    item = shard_file.ITEM_BYTES[region.dtype]
    return first * item, (last + 1) * item

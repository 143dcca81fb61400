"""Read and verify parts of a snapshot. The mirror of `shard_writer`.

Order: `read_header` checks a header against its digest in the manifest, `Reader.find` locates
regions, `Reader.read` plans, reads and checks every block against its digest in the header.
Blocks are verified as they are read.
References to older shard files are followed and verified the same way.

Live objects are not touched here: a `ReadDestination` supplies the memory. One thread uses a
`Reader`.
"""

from __future__ import annotations

import copy
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple, Protocol

from trainckpt.errors import UnusableSnapshot
from trainckpt.format import digest, names, shard_file
from trainckpt.snapshot.blocks import (
    NEAR_BYTES,
    READ_BYTES,
    SCRATCH_BYTES,
    Batch,
    BlockRead,
    RegionLocation,
    hull,
    loads,
)
from trainckpt.snapshot.restore_plan import Planner, find, plan_restore, span
from trainckpt.storage.direct_io import memory
from trainckpt.storage.worker_pool import Workers

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from trainckpt.format.digest import Verified
    from trainckpt.format.files import FileEntry
    from trainckpt.format.layout import Box
    from trainckpt.format.manifest import Manifest
    from trainckpt.format.shard_file import Region, ShardHeader
    from trainckpt.snapshot.restore_plan import RegionRead
    from trainckpt.storage.base import Readable

    Lend = Callable[[str, int, int], memoryview | None]


class ReadDestination(Protocol):
    """Memory supplied by the caller for the wanted box of each tensor."""

    def memory_for(self, region: Region, part: Box, first_byte: int) -> memoryview | None:
        """Return the memory for `part`, writable at once; None if `part` is not contiguous.

        `first_byte`: the offset of `part` in its file. Memory with the same offset inside a page is
        fastest to read into.
        """

    def borrow(self, region: Region, part: Box, data: memoryview) -> bool:
        """Adopt `data`, the bytes of `part`, as the tensor's memory; False: copy it instead."""

    def put(self, region: Region, part: Box, data: memoryview) -> None:
        """Copy `part` from `data`: it begins at the first element and has the region's strides."""


def read_header(tier: Readable, folder: str, file: FileEntry) -> ShardHeader:
    """Return the verified header of one shard file.

    Raises:
        UnusableSnapshot: the header is too long, malformed, or differs from its digest.
        TierUnavailable: the tier refused.
    """
    key = f"{folder}/{file.name}"
    return header_of(partial(tier.read_into, key), key, file)


def header_of(read: Callable[[int, memoryview], None], key: str, file: FileEntry) -> ShardHeader:
    """Return the verified header of an open file; `read` fills memory from a byte on."""
    prefix = bytearray(8)
    read(0, memoryview(prefix))
    length = shard_file.header_length(prefix, key)
    if length > file.content.num_bytes:
        raise UnusableSnapshot(f"{key} is shorter than its header")
    head = bytearray(length)
    read(0, memoryview(head))
    if digest.digest(head) != file.content.header_digest:
        raise UnusableSnapshot(f"the header of {key} does not match its digest")
    return shard_file.parse(bytes(head), key, file_bytes=file.content.num_bytes)


BORROWED_FROM_BYTES = 64 << 10  # smaller regions are copied


class Reader:
    """Reader of one snapshot and the older files it refers to. Reads each header once.

    Attributes:
        manifest: The snapshot's.
        verified: Large memory blocks verified at their present address.
    """

    def __init__(self, tier: Readable, manifest: Manifest, *, num_threads: int = 1) -> None:
        """`num_threads`: threads for verifying data already in this host's memory."""
        self._tier, self._num_threads = tier, num_threads
        self.manifest = manifest
        self._planner = Planner(manifest)
        self._files: dict[int, tuple[dict[str, Region], dict[str, RegionLocation]]] = {}
        self._reached = {file.name: file for file in manifest.reached}
        self._held: dict[str, dict[str, RegionLocation]] = {}  # of older files
        self.verified: list[Verified] = []

    def read(
        self, wanted: Mapping[str, Box | None], destination: ReadDestination, *, donor: int
    ) -> None:
        """Read and verify the wanted box of each tensor.

        Args:
            wanted: Tensor -> box; None: the whole tensor.
            destination: Supplies memory, and only after every part was found in a header.
            donor: The rank whose own tensors are read.

        Raises:
            UnusableSnapshot: data is missing or does not match its digest; names the file.
            TierUnavailable: the tier refused.
        """
        reads = plan_restore(self.manifest, wanted, donor=donor, planner=self._planner)
        found = [
            (place, read)
            for _, of_file in groupby(reads, key=lambda read: read.file)
            for place, read in self._look_up(list(of_file))
        ]
        lent: list[BlockRead] = []
        batch, mine, puts = Batch(self._tier), list[BlockRead](), list[RegionTarget]()
        for place, read in found:
            part = read.part or place.region.box
            if borrowed := self._borrow(place, part, destination):
                lent += borrowed
                continue
            most = NEAR_BYTES if self._is_near(place) else READ_BYTES
            needed, put = _loads(place, part, destination, most)
            mine += needed
            puts += [put] if put is not None else []
            if sum(len(put.data) for put in puts) > SCRATCH_BYTES:
                _read(batch, mine, puts, destination)
        _read(batch, mine, puts, destination)
        self._verify(lent)
        self.verified += batch.verified

    def _is_near(self, place: RegionLocation) -> bool:
        is_near: Callable[[str], bool] | None = getattr(self._tier, "is_near", None)
        return is_near is not None and is_near(place.key)

    def _borrow(
        self, place: RegionLocation, part: Box, destination: ReadDestination
    ) -> list[BlockRead]:
        """Lend a whole region from this host's memory; return the blocks still to be verified."""
        region = place.region
        lend: Lend | None = getattr(self._tier, "lend", None)
        if lend is None or part != region.box or region.num_bytes < BORROWED_FROM_BYTES:
            return []
        lent = lend(place.key, place.first_byte, region.num_bytes)
        if lent is None or not destination.borrow(region, part, lent):
            return []
        return list(loads(place, 0, region.num_bytes, lent))

    def _verify(self, lent: Sequence[BlockRead]) -> None:
        with Workers(self._num_threads, "trainckpt-verify") as workers:
            for load in lent:
                assert load.into is not None
                workers.submit(partial(load.take, load.into))
            workers.settle()
        self.verified += [load.verified for load in lent if load.verified is not None]

    def from_tier(self, tier: Readable) -> Reader:
        """Return a copy that reads from another tier and shares the headers read so far."""
        other = copy.copy(self)
        other._tier = tier
        return other

    def find(self, read: RegionRead) -> RegionLocation:
        """Return the location of the region of one read; errors as `read`."""
        regions, places = self._places_of(read.file)
        what = self.manifest.files[read.file].name
        return places[find(read, self.manifest.tensors[read.tensor], regions, what).key]

    def places(self, file: int) -> Collection[RegionLocation]:
        """Return the locations of all regions stored by one rank; errors as `read`."""
        return self._places_of(file)[1].values()

    def _look_up(self, reads: Sequence[RegionRead]) -> list[tuple[RegionLocation, RegionRead]]:
        """Return the regions of one file in file order."""
        found = [(self.find(read), read) for read in reads]
        return sorted(found, key=lambda each: each[0][:2])

    def _places_of(self, file: int) -> tuple[dict[str, Region], dict[str, RegionLocation]]:
        """Return the regions of one rank by key, those in older files included."""
        if file not in self._files:
            if file >= len(self.manifest.files):
                raise UnusableSnapshot(f"the snapshot has no file of rank {file}")
            entry = self.manifest.files[file]
            header = read_header(self._tier, self.manifest.name.folder, entry)
            key = f"{self.manifest.name.folder}/{entry.name}"
            places = {
                r.key: RegionLocation(key, header.header_bytes + r.first_byte, r)
                for r in header.regions
            }
            for referred, held in self._referred(header, key).items():
                places.setdefault(referred, held)
            self._files[file] = {key: place.region for key, place in places.items()}, places
        return self._files[file]

    def _referred(self, header: ShardHeader, what: str) -> dict[str, RegionLocation]:
        """Return the regions stored in older files and referred to by this header."""
        found: dict[str, RegionLocation] = {}
        for region_key, name in header.references.items():
            if name not in self._reached:
                raise UnusableSnapshot(f"{what} refers to {name}, which the manifest does not name")
            if name not in self._held:
                older = read_header(self._tier, names.SNAPSHOTS, self._reached[name])
                key = f"{names.SNAPSHOTS}/{name}"
                self._held[name] = {
                    r.key: RegionLocation(key, older.header_bytes + r.first_byte, r)
                    for r in older.regions
                }
            if region_key not in self._held[name]:
                raise UnusableSnapshot(f"{what} refers to {region_key[:100]}, not held by {name}")
            found[region_key] = self._held[name][region_key]
        return found


class RegionTarget(NamedTuple):
    """A non-contiguous part, copied to its destination once `data` is read."""

    region: Region
    part: Box
    data: memoryview


def _loads(
    place: RegionLocation, part: Box, destination: ReadDestination, most: int
) -> tuple[Iterator[BlockRead], RegionTarget | None]:
    """Return the blocks to read for a part: into its own memory, or into scratch for `put`.

    `most`: bytes of one `BlockRead`.
    """
    region = place.region
    begin, end = span(region.box, part, region.dtype)
    is_run = end - begin == shard_file.num_bytes(part.shape, region.dtype)
    into = destination.memory_for(region, part, place.first_byte + begin) if is_run else None
    if part.is_empty and region.num_bytes:
        return iter(()), None  # only the type was wanted
    if into is not None and len(into) != end - begin:
        raise UnusableSnapshot(f"{place.key}: {region.key[:100]} does not fit its tensor")
    put = None
    if into is None:
        first, last = hull(place, begin, end)
        into = memory(last - first, place.first_byte + first)
        put = RegionTarget(region, part, into[begin - first : end - first])
        begin, end = first, last
    return loads(place, begin, end, into, most), put


def _read(
    batch: Batch, mine: list[BlockRead], puts: list[RegionTarget], destination: ReadDestination
) -> None:
    """Read `mine`, put `puts`, and clear both."""
    for load in mine:
        batch.add(load)
    batch.read()
    for put in puts:
        destination.put(*put)
    mine.clear()
    puts.clear()

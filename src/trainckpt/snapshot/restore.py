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
from itertools import groupby, islice
from typing import TYPE_CHECKING, NamedTuple, Protocol

from trainckpt.errors import UnusableSnapshot
from trainckpt.format import digest, names, shard_file
from trainckpt.format.digest import Verified
from trainckpt.snapshot.restore_plan import Planner, find, plan_restore, span
from trainckpt.storage.direct_io import FROM_BYTES, PAGE_BYTES, address, copy_bytes, private_memory
from trainckpt.storage.worker_pool import Workers

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from trainckpt.format.layout import Box
    from trainckpt.format.manifest import FileEntry, Manifest
    from trainckpt.format.shard_file import Region, ShardHeader
    from trainckpt.snapshot.restore_plan import RegionRead
    from trainckpt.storage.base import Readable

    Lend = Callable[[str, int, int], memoryview | None]


# ---- blocks: read runs of them, verify each as it arrives
#
#     loads       yields runs of whole blocks, at most a few MiB each: read to their final memory,
#                 or through scratch where only a part of a block is wanted
#     Batch       reads the runs of one file with several threads and joins small neighbours;
#                 the thread that reads a run verifies it while others read the next
#
# Every wanted byte is read once. Used by `Reader` and the fetch into this host's memory.


READ_BYTES = 8 << 20  # of one read, more only where a single block is longer
NEAR_BYTES = 1 << 20  # the same in memory: small enough to be verified in a core's cache
SCRATCH_BYTES = 32 << 20
PROVED_FROM_BYTES = 64 << 10
CLOSE_BYTES = PAGE_BYTES  # small reads no further apart are joined


class RegionLocation(NamedTuple):
    """A region and the offset of its first byte in the file that stores it.

    The file belongs to this snapshot, or to an older one it refers to.
    """

    key: str
    first_byte: int
    region: Region


class BlockRead(NamedTuple):
    """A run of blocks of one region.

    Attributes:
        place: The region.
        first, last: Offsets in the region of the run's first byte, and one past its last.
        into: Memory for the whole run; None: only a part is wanted, or it is used where it is read.
        wanted: The region offset of the wanted part, and memory for it.
    """

    place: RegionLocation
    first: int
    last: int
    into: memoryview | None
    wanted: tuple[int, memoryview] | None = None

    @property
    def first_byte(self) -> int:
        """Return the offset of the run in the file."""
        return self.place.first_byte + self.first

    @property
    def end_byte(self) -> int:
        """Return the offset behind the run in the file."""
        return self.place.first_byte + self.last

    @property
    def digests(self) -> str:
        """Return the digests of the run's blocks, concatenated."""
        block = self.place.region.bytes_per_digest or 1
        at = self.first // block * digest.NUM_HEX
        end = at + max(1, -(-(self.last - self.first) // block)) * digest.NUM_HEX
        return self.place.region.digest[at:end]

    @property
    def verified(self) -> Verified | None:
        """Return the memory verified by `take` if it is the whole run and large; else None."""
        if self.into is None or len(self.into) < PROVED_FROM_BYTES:
            return None
        where, block = address(self.into), self.place.region.bytes_per_digest
        return Verified(where, len(self.into), block, self.digests) if where is not None else None

    def take(self, data: memoryview) -> None:
        """Verify the data read, and copy it to its memory unless it was read there.

        Raises:
            UnusableSnapshot: a block does not match its digest.
        """
        if not self.is_good(data):
            raise UnusableSnapshot(
                f"{self.place.key}: {self.place.region.key[:100]} does not match its digest"
            )
        if self.into is not None and data is not self.into:
            copy_bytes(self.into, data)
        elif self.wanted is not None:
            begin, into = self.wanted
            copy_bytes(into, data[begin - self.first : begin - self.first + len(into)])

    def is_good(self, data: memoryview) -> bool:
        """Return True if the data matches the digests of its blocks."""
        block = self.place.region.bytes_per_digest or 1
        return digest.digests_by_block(data, block) == self.digests


def hull(place: RegionLocation, begin: int, end: int) -> tuple[int, int]:
    """Return the span of the blocks that hold `begin` to `end`: first byte, one past the last."""
    block = place.region.bytes_per_digest
    if not block:
        return 0, 0
    return begin // block * block, min(-(-end // block) * block, place.region.num_bytes)


def loads(
    place: RegionLocation, begin: int, end: int, into: memoryview, most: int = READ_BYTES
) -> Iterator[BlockRead]:
    """Yield the reads that bring bytes `begin` to `end` of a region to `into`, verified.

    `most`: bytes of one read.
    """
    block = place.region.bytes_per_digest
    at, last = hull(place, begin, end)
    if not block:
        yield BlockRead(place, 0, 0, into)
    whole = end if end == last else end // block * block  # up to here every block is wanted whole
    while at < last:
        if at >= begin and at < whole:
            to = min(at + max(most // block, 1) * block, whole)
            yield BlockRead(place, at, to, into[at - begin : to - begin])
        else:
            to = min(at + block, last)
            low, high = max(at, begin), min(to, end)
            yield BlockRead(place, at, to, None, (low, into[low - begin : high - begin]))
        at = to


def neighbours(reads: Iterable[BlockRead], most_apart: int) -> Iterator[list[BlockRead]]:
    """Yield lists of successive reads to be made as one: each within a file and `READ_BYTES`.

    `most_apart`: bytes between the end of one and the begin of the next.
    """
    run: list[BlockRead] = []
    for read in reads:
        is_next = (
            run
            and read.place.key == run[0].place.key
            and 0 <= read.first_byte - run[-1].end_byte <= most_apart
            and read.end_byte - run[0].first_byte <= READ_BYTES
        )
        if run and not is_next:
            yield run
            run = []
        run.append(read)
    if run:
        yield run


class Batch:
    """Reads performed together; used by one thread.

    Attributes:
        verified: Large runs read straight to their final memory.
    """

    def __init__(self, tier: Readable) -> None:
        self.verified: list[Verified] = []
        self._tier = tier
        self._key = ""
        self._parts: list[tuple[int, memoryview]] = []
        self._loads: list[Sequence[BlockRead]] = []  # of each part
        self._small: list[BlockRead] = []  # not yet a part
        self._scratch: memoryview | None = None
        self._used = 0

    def add(self, load: BlockRead) -> None:
        """Queue a read, in file order. May first perform the reads queued before."""
        self._turn_to(load.place.key)
        size = load.last - load.first
        if not size:
            load.take(memoryview(b""))
        elif size < FROM_BYTES or load.into is None:
            self._small.append(load)
        else:
            self._join()
            self._add_part(load.first_byte, load.into, [load])

    def add_run(self, run: Sequence[BlockRead], into: memoryview) -> None:
        """Queue neighbours that are read to this memory, and used there."""
        self._turn_to(run[0].place.key)
        self._add_part(run[0].first_byte, into, run)

    def read(self) -> None:
        """Read and verify everything queued.

        Raises:
            UnusableSnapshot: a file ends too early, or a block does not match its digest.
            TierUnavailable: the tier refused.
        """
        self._join()
        parts, self._parts, of_parts, self._loads = self._parts, [], self._loads, []
        self._used = 0

        def take(number: int) -> None:
            # on any thread
            first_byte, data = parts[number]
            for load in of_parts[number]:
                at, size = load.first_byte - first_byte, load.last - load.first
                load.take(data if size == len(data) else data[at : at + size])
                if (verified := load.verified) is not None:
                    self.verified.append(verified)

        if parts:
            self._tier.read_parts(self._key, parts, take)

    def _turn_to(self, key: str) -> None:
        if key != self._key:
            self.read()
            self._key = key

    def _add_part(self, first_byte: int, into: memoryview, loads: Sequence[BlockRead]) -> None:
        self._parts.append((first_byte, into))
        self._loads.append(loads)

    def _join(self) -> None:
        small, self._small = self._small, []
        for run in neighbours(small, CLOSE_BYTES):
            first, into = run[0].first_byte, run[0].into
            if into is None or len(run) > 1:
                into = self._scratch_for(first, run[-1].end_byte - first)
            self._add_part(first, into, run)

    def _scratch_for(self, first_byte: int, num_bytes: int) -> memoryview:
        """Return scratch memory, aligned as in the file, valid until the next `read`."""
        begin = self._used + (first_byte - self._used) % PAGE_BYTES
        if begin + num_bytes > SCRATCH_BYTES:
            self.read()
            begin = first_byte % PAGE_BYTES
        if begin + num_bytes > SCRATCH_BYTES:
            return private_memory(num_bytes, first_byte)
        if self._scratch is None:
            self._scratch = private_memory(SCRATCH_BYTES)
        self._used = begin + num_bytes
        return self._scratch[begin : begin + num_bytes]


# ---- the reader


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
        for place, read in self._borrow_small(found, destination, batch):
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

    def _borrow_small(
        self,
        found: Sequence[tuple[RegionLocation, RegionRead]],
        destination: ReadDestination,
        batch: Batch,
    ) -> list[tuple[RegionLocation, RegionRead]]:
        """Read small whole regions, neighbours together; return the other reads.

        A model has thousands of small tensors. Each becomes a part of the memory that it is read
        to with its neighbours, so none is copied.
        """
        small: list[tuple[RegionLocation, RegionRead]] = []
        others: list[tuple[RegionLocation, RegionRead]] = []
        for place, read in found:
            region, part = place.region, read.part
            is_small = 0 < region.num_bytes < BORROWED_FROM_BYTES
            is_whole = region.is_whole and (part is None or part == region.box)
            (small if is_small and is_whole else others).append((place, read))
        regions = iter(small)
        for run in neighbours((BlockRead(p, 0, p.region.num_bytes, None) for p, _ in small), 0):
            of_run, first = list(islice(regions, len(run))), run[0].first_byte
            num_bytes = run[-1].end_byte - first
            if num_bytes <= CLOSE_BYTES:  # joined with the reads beside it
                others += of_run
                continue
            into, borrowed = private_memory(num_bytes, first), list[BlockRead]()
            for load, (place, read) in zip(run, of_run, strict=True):
                data = into[load.first_byte - first : load.end_byte - first]
                if destination.borrow(place.region, place.region.box, data):
                    borrowed.append(load)
                else:
                    others.append((place, read))
            if borrowed:
                begin, end = borrowed[0].first_byte, borrowed[-1].end_byte
                batch.add_run(borrowed, into[begin - first : end - first])
        batch.read()
        others.sort(key=lambda each: each[0][:2])
        return others

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
                raise UnusableSnapshot(f"{what} refers to {name}, which is not in the manifest")
            if name not in self._held:
                older = read_header(self._tier, names.SNAPSHOTS, self._reached[name])
                key = f"{names.SNAPSHOTS}/{name}"
                self._held[name] = {
                    r.key: RegionLocation(key, older.header_bytes + r.first_byte, r)
                    for r in older.regions
                }
            if region_key not in self._held[name]:
                raise UnusableSnapshot(
                    f"{what} refers to {region_key[:100]}, which is not in {name}"
                )
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
        into = private_memory(last - first, place.first_byte + first)
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

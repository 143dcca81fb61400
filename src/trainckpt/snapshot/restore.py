"""Restore: read and verify parts of a snapshot. The mirror of `save`.

Nothing is handed on that was not verified: the header by the digest in the manifest, every block
by its digest in the header, as it is read, or on its way to this host's memory (`vouched`).
What a file refers to in an older one is read there, in the same way. The live objects are not
touched here.
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
    Found,
    Load,
    hull,
    is_verified,
    loads,
)
from trainckpt.snapshot.restore_plan import Planner, find, plan_restore, span
from trainckpt.tiers.direct import memory, populate
from trainckpt.tiers.fresh_memory import is_fresh
from trainckpt.tiers.large_pages import large_pages
from trainckpt.tiers.workers import Workers

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from trainckpt.format.digest import Verified
    from trainckpt.format.files import FileEntry
    from trainckpt.format.layout import Box
    from trainckpt.format.manifest import Manifest
    from trainckpt.format.shard_file import Region, ShardHeader
    from trainckpt.snapshot.restore_plan import Read
    from trainckpt.snapshot.shares import Share
    from trainckpt.tiers.base import Readable
    from trainckpt.tiers.other_memory import Place

    Lend = Callable[[str, int, int], memoryview | None]


class Destination(Protocol):
    """Where a restore puts what it reads: memory for the box that is wanted of each tensor."""

    def memory_for(self, region: Region, part: Box, first_byte: int) -> memoryview | None:
        """The bytes that `part` fills, to be written at once; None: it is not one run of bytes.

        At best they lie in memory, to the byte inside a page, as they do in their file, where they
        begin at `first_byte`.
        """

    def borrow(self, region: Region, part: Box, data: memoryview) -> bool:
        """Take `data`, which holds `part`, for the memory itself; False: it has to be copied."""

    def can_lie(self, region: Region) -> bool:
        """As `shares.Lays`."""

    def lie(self, region: Region, memory: memoryview) -> None:
        """As `shares.Lays`."""

    def fresh(self) -> Iterable[memoryview]:
        """Memory that it has made since it was asked last, and that is worth large pages."""

    def put(self, region: Region, part: Box, data: memoryview) -> None:
        """Copy `part`: `data` begins with its first element and goes on as `region` does."""

    def take(self, region: Region, part: Box, data: memoryview, into: memoryview) -> None:
        """The elements of `part` alone, row-major, for another rank; `data` as for `put`."""


def read_header(tier: Readable, folder: str, file: FileEntry) -> ShardHeader:
    """The verified header of one shard file."""
    key = f"{folder}/{file.name}"
    return header_of(partial(tier.read_into, key), key, file)


def header_of(read: Callable[[int, memoryview], None], key: str, file: FileEntry) -> ShardHeader:
    """The same of a file that is open: `read` fills memory from a byte of it on."""
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


BORROWED_FROM_BYTES = 64 << 10  # what is smaller is copied


class Reader:
    """Reads parts of one snapshot, and of the older files it refers to; each header once.

    Attributes:
        manifest: Of the snapshot.
        planner: Of this manifest.
        verified: What it has verified where it lies now, of what is large.
        share: What it reads of what other ranks of this host need too, and leaves to them; None:
            it reads all of it.
    """

    def __init__(self, tier: Readable, manifest: Manifest, *, num_threads: int = 1) -> None:
        """`num_threads`: that may verify at once what already lies in this host's memory."""
        self._tier, self._num_threads = tier, num_threads
        self.manifest = manifest
        self.planner = Planner(manifest)
        self._files: dict[int, tuple[dict[str, Region], dict[str, Found]]] = {}
        self._reached = {file.name: file for file in manifest.reached}
        self._held: dict[str, dict[str, Found]] = {}  # of older files
        self.verified: list[Verified] = []
        self.share: Share | None = None

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
        reads = plan_restore(self.manifest, wanted, donor=donor, planner=self.planner)
        found = [
            (place, read)
            for _, of_file in groupby(reads, key=lambda read: read.file)
            for place, read in self._look_up(list(of_file))
        ]
        if self.share is not None:
            far = (each for each in found if not self._is_near(each[0]))
            self.share.lay_out(far, destination)
        lent: list[Load] = []
        on_taken = self.share.there if self.share is not None else None
        batch, mine, puts = Batch(self._tier, on_taken), list[Load](), list[Put]()
        with Workers(1, "trainckpt-make") as making:
            for place, read in found:
                part = read.part or place.region.box
                if borrowed := self._borrow(place, part, destination):
                    lent += borrowed
                    continue
                near = self._is_near(place)
                most = NEAR_BYTES if near else READ_BYTES
                needed, put = _loads(place, part, destination, most)
                for fresh in destination.fresh():
                    making.submit(partial(large_pages().prepare, fresh))
                stays = put is not None or self.share is None or near
                for load in needed:
                    into = load.into
                    if stays or into is None or not self._puts_off(read, load):
                        mine.append(load)
                    elif not self._is_laid(read) and not is_fresh(into):
                        making.submit(partial(populate, into))
                puts += [put] if put is not None else []
                if sum(len(put.data) for put in puts) > SCRATCH_BYTES:
                    _read(batch, mine, puts, destination)
            if self.share is not None:
                self.share.begin_taking()
            _read(batch, mine, puts, destination)
            if self.share is not None:
                self.share.all_there()
        self._verify(lent)
        self.verified += batch.verified

    def take(self, told: Iterable[Place], *, agreed: bool = False) -> int:
        """Take what was left to the other ranks of this host, who tell where it is; see `Share`.

        Returns:
            Bytes that were not there, and were read after all; errors as `read`.
        """
        if self.share is None:
            return 0
        taken = self.share.take(told, self._tier, self._num_threads, agreed=agreed)
        self.verified += taken.verified
        return taken.missed

    def _puts_off(self, read: Read, load: Load) -> bool:
        return self.share is not None and self.share.puts_off(read, load)

    def _is_laid(self, read: Read) -> bool:
        return self.share is not None and self.share.is_laid(read.tensor)

    def _is_near(self, place: Found) -> bool:
        """Whether it lies in this host's memory already."""
        is_near: Callable[[str], bool] | None = getattr(self._tier, "is_near", None)
        return is_near is not None and is_near(place.key)

    def _borrow(self, place: Found, part: Box, destination: Destination) -> list[Load]:
        """Take a whole region where it lies in this host's memory; what is to be verified there."""
        region = place.region
        lend: Lend | None = getattr(self._tier, "lend", None)
        if lend is None or part != region.box or region.num_bytes < BORROWED_FROM_BYTES:
            return []
        lent = lend(place.key, place.first_byte, region.num_bytes)
        if lent is None or not destination.borrow(region, part, lent):
            return []
        return list(loads(place, 0, region.num_bytes, lent))

    def _verify(self, lent: Sequence[Load]) -> None:
        """Errors as `read`."""
        with Workers(self._num_threads, "trainckpt-verify") as workers:
            for load in lent:
                assert load.into is not None
                if is_verified(self._tier, load.place.key):
                    continue
                workers.submit(partial(load.take, load.into))
            workers.settle()
        self.verified += [load.verified for load in lent if load.verified is not None]

    def from_tier(self, tier: Readable) -> Reader:
        """One that reads from another tier, and has the headers that this one has read."""
        other = copy.copy(self)
        other._tier = tier
        return other

    def find(self, read: Read) -> Found:
        """Where the region of one read lies; errors as `read`."""
        regions, places = self._places_of(read.file)
        what = self.manifest.files[read.file].name
        return places[find(read, self.manifest.tensors[read.tensor], regions, what).key]

    def places(self, file: int) -> Collection[Found]:
        """Every region that one rank stored, and where it lies; errors as `read`."""
        return self._places_of(file)[1].values()

    def read_blocks(
        self, place: Found, begin: int, end: int, into: memoryview | None = None
    ) -> tuple[int, memoryview]:
        """Read and verify the blocks that hold bytes `begin` to `end` of a region.

        Args:
            place: The region.
            begin, end: The first byte, and the one behind the last.
            into: Where to read to, if it has the length of those blocks; else into fresh memory.

        Returns:
            The first byte read, and the bytes from there on; errors as `read`.
        """
        first, last = hull(place, begin, end)
        if into is None or len(into) != last - first:
            into = memory(last - first, place.first_byte + first)
        batch = Batch(self._tier)
        for load in loads(place, first, last, into):
            batch.add(load)
        batch.read()
        return first, into

    def _look_up(self, reads: Sequence[Read]) -> list[tuple[Found, Read]]:
        """Where the regions of one file begin, in the order of the file."""
        found = [(self.find(read), read) for read in reads]
        return sorted(found, key=lambda each: each[0][:2])

    def _places_of(self, file: int) -> tuple[dict[str, Region], dict[str, Found]]:
        """What one rank stored, wherever it lies, by key; each header is read once."""
        if file not in self._files:
            if file >= len(self.manifest.files):
                raise UnusableSnapshot(f"the snapshot has no file of rank {file}")
            entry = self.manifest.files[file]
            header = read_header(self._tier, self.manifest.name.folder, entry)
            key = f"{self.manifest.name.folder}/{entry.name}"
            places = {r.key: Found(key, header.header_bytes + r.first_byte, r)
                      for r in header.regions}  # fmt: skip
            for referred, held in self._referred(header, key).items():
                places.setdefault(referred, held)
            self._files[file] = {key: place.region for key, place in places.items()}, places
        return self._files[file]

    def _referred(self, header: ShardHeader, what: str) -> dict[str, Found]:
        """The regions that older files hold for this one."""
        found: dict[str, Found] = {}
        for region_key, name in header.references.items():
            if name not in self._reached:
                raise UnusableSnapshot(f"{what} refers to {name}, which the manifest does not name")
            if name not in self._held:
                older = read_header(self._tier, names.SNAPSHOTS, self._reached[name])
                key = f"{names.SNAPSHOTS}/{name}"
                self._held[name] = {
                    r.key: Found(key, older.header_bytes + r.first_byte, r) for r in older.regions
                }
            if region_key not in self._held[name]:
                raise UnusableSnapshot(f"{what} refers to {region_key[:100]}, not held by {name}")
            found[region_key] = self._held[name][region_key]
        return found


class Put(NamedTuple):
    """A part that is no run of bytes, to be copied once `data` was read."""

    region: Region
    part: Box
    data: memoryview


def _loads(
    place: Found, part: Box, destination: Destination, most: int
) -> tuple[Iterator[Load], Put | None]:
    """What reads a part to where it belongs; or to memory from which it is then to be put.

    `most`: bytes of one load.
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
        put = Put(region, part, into[begin - first : end - first])
        begin, end = first, last
    return loads(place, begin, end, into, most), put


def _read(batch: Batch, mine: list[Load], puts: list[Put], destination: Destination) -> None:
    """Read what is to be read, and put what is to be put: nothing is left of either."""
    for load in mine:
        batch.add(load)
    batch.read()
    for put in puts:
        destination.put(*put)
    mine.clear()
    puts.clear()

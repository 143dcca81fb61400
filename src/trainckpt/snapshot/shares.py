"""Shares: what all ranks of a host need of a snapshot, each reads a part of and takes the rest.

    every rank   reads its share to where it belongs, verifies it, and tells where that is;
                 meanwhile it fills that in for others (`handing`), and what others say that they
                 have read it verifies, or copies and verifies (`copying`)
                 BARRIER  all have
    every rank   copies the rest from the others' memory, and verifies it. What it does not find
                 there, or is not good, it reads from the tier
                 BARRIER  all have: memory may change again

So each byte is read once, and lies once in the memory of every rank: there is none between. What
only waits to be applied lies once for all of them, in memory that they have in common: nobody
writes there once all have read, and each verifies what others wrote before anything is applied.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple, Protocol

from trainckpt.errors import UnusableSnapshot
from trainckpt.format import digest, strict
from trainckpt.snapshot.blocks import Batch
from trainckpt.snapshot.copying import Copying
from trainckpt.snapshot.taker import Taker
from trainckpt.tiers import other_memory
from trainckpt.tiers.direct import PAGE_BYTES, address
from trainckpt.tiers.workers import Workers

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from trainckpt.format.digest import Verified
    from trainckpt.format.manifest import Manifest
    from trainckpt.format.shard_file import Region
    from trainckpt.snapshot.blocks import Found, Load
    from trainckpt.snapshot.board import Board
    from trainckpt.snapshot.restore_plan import Read
    from trainckpt.tiers.base import Readable
    from trainckpt.tiers.common_memory import CommonMemory

    Key = tuple[str, int, int]  # of a load: its file, first byte in that, number of bytes

FROM_BYTES = 64 << 10  # what is smaller is read sooner than it is found
MAX_TABLE_BYTES = 256 << 20


class Taken(NamedTuple):
    """What now lies verified where, and how many bytes of it had to be read after all."""

    verified: list[Verified]
    missed: int


class Lays(Protocol):
    """Where a restore puts what it reads, as far as that may be memory of somebody else."""

    def can_lie(self, region: Region) -> bool:
        """Whether all of a region's tensor is wanted, and nothing will write to it there."""

    def lie(self, region: Region, memory: memoryview) -> None:
        """Let the whole tensor lie in this memory."""


class Share:
    """What one rank of a host reads of what all of them need; used by one thread.

    Attributes:
        apart: Tensors of which each rank needs something else now.

    Args:
        number, of: The rank's number among so many of its host.
        manifest: Of the snapshot.
        common: Memory of all of them, if there is any; it is mapped once.
        board: Where it says what it has read; None: only at the end.
        boards: Those of the others.
    """

    def __init__(
        self,
        number: int,
        of: int,
        manifest: Manifest,
        common: CommonMemory | None = None,
        board: Board | None = None,
        boards: Sequence[other_memory.Place] = (),
    ) -> None:
        self._number, self._of = number, of
        self._board, self._boards = board, boards
        self._copying: Copying | None = None
        self._to_be_said: set[tuple[str, int]] = set()  # what others have in common memory
        self._to_be_handed: set[tuple[str, int]] = set()
        self._manifest, self._common = manifest, common
        self._laid: dict[str, int] = {}  # tensors in common memory, and where
        self._in_common: list[Load] = []  # that others read
        self._own_in_common: list[Load] = []
        self.apart: Collection[str] = ()
        self._by_file = len(manifest.files) % of == 0
        self._dealt = [0] * of  # bytes to each rank so far, where files would not be fair
        self._dealt_in_common = [0] * of  # of what is the same for every rank
        self._common_at = 0  # address
        self._who_writes: list[tuple[int, int, int]] = []  # rank, and which bytes of common memory
        self._own: list[Load] = []
        self._left: list[Load] = []
        self._is_over = False
        self._table = bytearray()

    @property
    def left(self) -> Sequence[Load]:
        """What was put off so far, or lies where others write."""
        return [*self._own_in_common, *self._in_common, *self._left]

    @property
    def has_common(self) -> bool:
        """Whether anything lies in memory where others write."""
        return bool(self._laid) or (self._copying is not None and self._copying.offers)

    def is_laid(self, tensor: str) -> bool:
        """Whether a tensor lies in memory that the ranks have in common."""
        return tensor in self._laid

    def lay_out(self, found: Iterable[tuple[Found, Read]], destination: Lays) -> None:
        """Have what may be in common lie there: by the snapshot, so for every rank alike. Once.

        Args:
            found: All that is to be read from the tier, and where it is.
            destination: Of this rank.
        """
        if self._common is None or self._is_over:
            return
        regions: dict[str, Region] = {}
        total = 0
        of_tensor = sorted(found, key=lambda each: each[1].tensor)
        for tensor, reads in groupby(of_tensor, key=lambda each: each[1].tensor):
            parts = list(reads)
            region = parts[0][0].region
            if self._may_lie(parts) and destination.can_lie(region):
                regions[tensor], self._laid[tensor] = region, total
                total += -(-region.whole_bytes // PAGE_BYTES) * PAGE_BYTES
        common, self._common = self._common, None
        try:
            memory = common.mapped(total) if total else memoryview(b"")
        except OSError:
            self._laid.clear()
            return
        self._common_at = address(memory) or 0
        for tensor, region in regions.items():
            first_byte = self._laid[tensor]
            destination.lie(region, memory[first_byte : first_byte + region.whole_bytes])

    def _may_lie(self, parts: Sequence[tuple[Found, Read]]) -> bool:
        """Whether these reads make up a whole tensor that all hold, each of them rows of it."""
        region = parts[0][0].region
        layout = self._manifest.tensors[region.tensor].layout
        is_of_all = layout is not None and layout.num_replicas == self._manifest.world
        return (
            region.whole_bytes >= FROM_BYTES
            and region.tensor not in self.apart
            and is_of_all
            and sum(place.region.num_bytes for place, _ in parts) == region.whole_bytes
            and all(
                place.region.shape[1:] == region.of[1:] and read.part in (None, place.region.box)
                for place, read in parts
            )
        )

    def puts_off(self, read: Read, load: Load) -> bool:
        """Whether another rank reads this; else this rank does, and tells where.

        What only some of a stored part is wanted of is not what the others want.
        """
        region, into = load.place.region, load.into
        if read.tensor in self._laid and not self._is_over:
            size = load.last - load.first
            reader = self._reader_of(read.file, size, self._dealt_in_common)
            where = address(into) if into is not None else None
            self._who_writes.append((reader, (where or 0) - self._common_at, size))
            is_own = reader == self._number
            (self._own_in_common if is_own else self._in_common).append(load)
            if is_own:
                self._to_be_said.add((load.place.key, load.first_byte))
            return not is_own
        if self._is_over or not self._is_alike(read.tensor) or read.part not in (None, region.box):
            return False
        if into is None or len(into) < FROM_BYTES or address(into) is None:
            return False
        is_own = self._reader_of(read.file, len(into), self._dealt) == self._number
        (self._own if is_own else self._left).append(load)
        if is_own:
            self._to_be_handed.add((load.place.key, load.first_byte))
        return not is_own

    def begin_taking(self) -> None:
        """All that is to be read was asked for: have what others say that they have read."""
        if self._copying is None and (self.left or self._own) and self._boards:
            self._copying = Copying(self._left, self._boards, self._in_common, self._board)

    def there(self, load: Load) -> None:
        """A load was read and verified, by any thread."""
        if self._board is None or self._is_over or load.into is None:
            return
        key = load.place.key, load.first_byte
        if key in self._to_be_handed and self._copying is not None:
            self._copying.read(load)
        elif key in self._to_be_said or key in self._to_be_handed:
            self._board.say(load)

    def all_there(self) -> None:
        """All that this rank reads was read."""
        if self._copying is not None:
            self._copying.all_read()

    def end(self) -> None:
        """Nothing is taken any more."""
        if self._copying is not None:
            with suppress(UnusableSnapshot):  # nobody touches that memory any more
                self._copying.end()

    def _is_alike(self, tensor: str) -> bool:
        """Whether several ranks want it, as far as a snapshot knows: those that held it did."""
        layout = self._manifest.tensors[tensor].layout
        if tensor in self.apart:
            return False
        return layout is not None and (layout.num_replicas > 1 or len(self._manifest.files) == 1)

    def _reader_of(self, file: int, num_bytes: int, dealt: list[int]) -> int:
        """Every rank comes to the same that is asked for the same, in the same order."""
        if self._by_file:
            return file % self._of
        reader = dealt.index(min(dealt))
        dealt[reader] += num_bytes
        return reader

    @property
    def dealt(self) -> str:
        """Of who writes what in common memory: equal on all ranks that mean the same."""
        return digest.digest(strict.canonical(self._who_writes))

    def told(self) -> other_memory.Place:
        """Where others find in this process what says where they find what it has read."""
        found: dict[str, list[int]] = {}
        for load in self._own:
            assert load.into is not None
            where = other_memory.place_of(load.into).address
            found.setdefault(load.place.key, []).extend((load.first_byte, len(load.into), where))
        self._table = bytearray(strict.canonical(found))
        return other_memory.place_of(memoryview(self._table))

    def take(
        self,
        told: Iterable[other_memory.Place],
        tier: Readable,
        num_threads: int,
        *,
        agreed: bool = False,
    ) -> Taken:
        """Copy all that was put off from the others, or read it; once. Nothing is put off then.

        Args:
            told: By each of the others. All of them have read what they read.
            tier: What is not there is read from.
            num_threads: That may copy at once.
            agreed: All mean the same by who writes what in common memory (`dealt`), so nobody has
                written where this rank has, and what it verified there is as it was.

        Raises:
            UnusableSnapshot, TierUnavailable: as `Reader.read`, of what was read. Or what lies in
                common memory is not good: nobody may write it anew while others have it.
        """
        self._is_over = True
        taken = list(self._copying.end()) if self._copying is not None else []
        done, there = {id(load) for load in taken}, _all_listed(told)
        missed: list[Load] = []
        taker = self._copying.taker if self._copying is not None else Taker()

        def one(load: Load) -> None:
            assert load.into is not None
            place = there.get((load.place.key, load.first_byte, len(load.into)))
            with suppress(OSError, UnusableSnapshot):
                if place is not None:
                    taker.take(load, place)
                    taken.append(load)
                    return
            missed.append(load)

        def verify(load: Load) -> None:
            assert load.into is not None
            load.take(load.into)
            taken.append(load)

        with Workers(num_threads, "trainckpt-take") as workers:
            for load in (load for load in self._left if id(load) not in done):
                workers.submit(partial(one, load))
            for load in self._in_doubt(done, agreed=agreed):
                workers.submit(partial(verify, load))
            workers.settle()
        batch = Batch(tier)
        for load in sorted(missed, key=lambda load: (load.place.key, load.first_byte)):
            batch.add(load)
        batch.read()
        self._left, self._in_common, self._own_in_common = [], [], []
        verified = [load.verified for load in taken if load.verified is not None]
        return Taken(verified + batch.verified, sum(load.last - load.first for load in missed))

    def _in_doubt(self, done: Collection[int], *, agreed: bool) -> list[Load]:
        """What of common memory is to be verified; unless all agree, somebody may have written
        since where it was verified already.
        """
        if not agreed:
            return [*self._in_common, *self._own_in_common]
        return [load for load in self._in_common if id(load) not in done]


def _all_listed(told: Iterable[other_memory.Place]) -> dict[Key, other_memory.Place]:
    """What those ranks say that they have whose lists can be read."""
    there: dict[Key, other_memory.Place] = {}
    for place in told:
        with suppress(OSError, UnusableSnapshot, TypeError, ValueError):
            there.update(_listed(place))
    return there


def _listed(place: other_memory.Place) -> dict[Key, other_memory.Place]:
    """What another rank says that it has. Whatever stands there is verified when it was copied."""
    if place.num_bytes > MAX_TABLE_BYTES:
        raise OSError("that cannot be it")
    text = bytearray(place.num_bytes)
    other_memory.read(place, memoryview(text))
    table = strict.parse(bytes(text), "what another rank has read", max_bytes=MAX_TABLE_BYTES)
    if not isinstance(table, dict):
        raise UnusableSnapshot("what another rank has read is no table")
    found: dict[Key, other_memory.Place] = {}
    for key, loads in table.items():
        if not all(type(number) is int for number in loads):
            raise UnusableSnapshot("what another rank has read is no table")
        for first_byte, num_bytes, where in zip(*[iter(loads)] * 3, strict=True):
            found[key, first_byte, num_bytes] = place._replace(address=where, num_bytes=num_bytes)
    return found

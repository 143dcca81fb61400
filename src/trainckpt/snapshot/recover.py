"""Recover: shard files that are lost, computed again from what the rest of their set still has.

One process rebuilds; those that hold files or parities of the set send it their parts, block by
block. Nothing is verified here: who wants the file compares it with its digest in the manifest. The
mirror of `protect`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from trainckpt.errors import UnusableSnapshot
from trainckpt.snapshot import protect
from trainckpt.snapshot.parity import rebuild
from trainckpt.snapshot.protect import chunk_part, data_places

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from trainckpt.ranks.exchange import Exchange
    from trainckpt.snapshot.redundancy import CodedSet


@dataclass(frozen=True)
class Left:
    """What is left of a set.

    Attributes:
        coded: The set.
        sizes: Bytes of each member's file; 0 of those that brought none.
        files: Place of a member -> who has its file, among those who take part.
        parities: Place of a member -> who has its parities.
    """

    coded: CodedSet
    sizes: Sequence[int]
    files: Mapping[int, int]
    parities: Mapping[int, int]

    @property
    def lost(self) -> list[int]:
        """Places of the members whose files nobody has."""
        return [p for p, size in enumerate(self.sizes) if size and p not in self.files]

    @property
    def is_enough(self) -> bool:
        """Whether every lost file can be computed."""
        stripes = range(len(self.coded.members))
        return all(len(self.rows(stripe)) >= len(self._lost_of(stripe)) for stripe in stripes)

    def rows(self, stripe: int) -> list[int]:
        """The parities of a stripe that are left, no more than are needed."""
        number = len(self.coded.members)
        rows = range(self.coded.num_parity)
        left = [row for row in rows if (stripe + row) % number in self.parities]
        return left[: len(self._lost_of(stripe))]

    def elements(self, stripe: int) -> dict[int, tuple[int, int]]:
        """What is needed of a stripe: number in the code -> place of the member, who has it."""
        number, num_chunks = len(self.coded.members), self.coded.num_chunks
        found = {
            chunk: (place, self.files[place])
            for chunk, place in enumerate(data_places(self.coded, stripe))
            if place in self.files
        }
        for row in self.rows(stripe):
            place = (stripe + row) % number
            found[num_chunks + row] = (place, self.parities[place])
        return found

    def _lost_of(self, stripe: int) -> list[int]:
        lost = self.lost
        return [place for place in data_places(self.coded, stripe) if place in lost]


@dataclass
class Stock:
    """What one of those who take part brings.

    Attributes:
        me: Its place among them.
        files, parities: Place of a member -> its bytes, as far as they lie here.
        into: Place of a lost member -> memory for its file, on the one who rebuilds.
    """

    me: int
    files: Mapping[int, memoryview]
    parities: Mapping[int, memoryview]
    into: Mapping[int, memoryview] = field(default_factory=dict)


def recover(left: Left, stock: Stock, rebuilder: int, group: Exchange | None) -> None:
    """Rebuild all lost files of a set. All who take part call it alike.

    Args:
        left: What there is; enough.
        stock: What is here.
        rebuilder: Who gets the files, among those who take part.
        group: Of them; None: there is only one.

    Raises:
        NoAgreement: one of them is gone.
        UnusableSnapshot: it is not enough.
    """
    if not left.is_enough:
        raise UnusableSnapshot(f"of the set {list(left.coded.members)} too much is lost")
    lost, chunk_bytes = left.lost, left.coded.chunk_bytes(max(left.sizes))
    for stripe in range(len(left.coded.members)):
        if any(place in lost for place in data_places(left.coded, stripe)):
            for at in range(0, chunk_bytes, protect.SET_BLOCK_BYTES):
                end = min(at + protect.SET_BLOCK_BYTES, chunk_bytes)
                _round(left, stock, rebuilder, group, stripe, at, end, lost)


def _round(
    left: Left,
    stock: Stock,
    rebuilder: int,
    group: Exchange | None,
    stripe: int,
    at: int,
    end: int,
    lost: Collection[int],
) -> None:
    """One block of one stripe."""
    num_chunks, chunk_bytes = left.coded.num_chunks, left.coded.chunk_bytes(max(left.sizes))
    present: dict[int, memoryview] = {}
    receives, sends = [], []
    for number, (place, who) in left.elements(stripe).items():
        is_parity = number >= num_chunks
        if is_parity:
            first = (number - num_chunks) * chunk_bytes
            begin, last = first + at, first + end
        else:
            begin, last = chunk_part(left.sizes[place], number, chunk_bytes, at, end)
        if who == stock.me:
            part = (stock.parities if is_parity else stock.files)[place][begin:last]
            if rebuilder != stock.me:
                sends.append((rebuilder, number, part))
        else:
            part = memoryview(bytearray(last - begin if rebuilder == stock.me else 0))
            receives.append((who, number, part))
        present[number] = part
    if group is not None:
        group.settle(group.begin(receives, sends))
    if rebuilder == stock.me:
        _compute(left, stock, stripe, at, end, present, lost)


def _compute(
    left: Left,
    stock: Stock,
    stripe: int,
    at: int,
    end: int,
    present: dict[int, memoryview],
    lost: Collection[int],
) -> None:
    coded, chunk_bytes = left.coded, left.coded.chunk_bytes(max(left.sizes))
    places = dict(enumerate(data_places(coded, stripe)))
    into = {number: bytearray(end - at) for number, place in places.items() if place in lost}
    for number, place in places.items():  # who brought no file has zeros
        if number not in into and number not in present:
            present[number] = memoryview(b"")
        assert number in into or number in present, place
    rebuild(
        present, {n: memoryview(b) for n, b in into.items()}, coded.num_chunks, coded.num_parity
    )
    for number, block in into.items():
        place = places[number]
        first, last = chunk_part(left.sizes[place], number, chunk_bytes, at, end)
        stock.into[place][first:last] = block[: last - first]

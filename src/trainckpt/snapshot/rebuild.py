"""Rebuild lost shard files from the remaining members of their set. The mirror of `replicate`.

One process rebuilds; the others send it their files and parities, block by block. Nothing is
verified here: the caller compares each file with its digest in the manifest.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from trainckpt.errors import UnusableSnapshot
from trainckpt.snapshot import replicate
from trainckpt.snapshot.parity import rebuild
from trainckpt.snapshot.replicate import chunk_part, data_places

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from trainckpt.ranks.exchange import Exchange
    from trainckpt.snapshot.redundancy import CodedSet


@dataclass(frozen=True)
class SetState:
    """The files and parities left of a set.

    Attributes:
        coded: The set.
        sizes: Bytes of each member's file; 0 for members without one.
        files: Place of a member -> participant that has its file.
        parities: Place of a member -> participant that has its parities.
    """

    coded: CodedSet
    sizes: Sequence[int]
    files: Mapping[int, int]
    parities: Mapping[int, int]

    @property
    def lost(self) -> list[int]:
        """Return the places of members whose files are lost."""
        return [p for p, size in enumerate(self.sizes) if size and p not in self.files]

    @property
    def is_enough(self) -> bool:
        """Return True if every lost file can be computed."""
        stripes = range(len(self.coded.members))
        return all(len(self.rows(stripe)) >= len(self._lost_of(stripe)) for stripe in stripes)

    def rows(self, stripe: int) -> list[int]:
        """Return the parities left of a stripe, no more than needed."""
        number = len(self.coded.members)
        rows = range(self.coded.num_parity)
        left = [row for row in rows if (stripe + row) % number in self.parities]
        return left[: len(self._lost_of(stripe))]

    def elements(self, stripe: int) -> dict[int, tuple[int, int]]:
        """Return the needed elements of a stripe: number in the code -> (place, participant)."""
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
class LocalParts:
    """The bytes one participant contributes.

    Attributes:
        me: Its number among the participants.
        files, parities: Place of a member -> its bytes, if present here.
        into: Place of a lost member -> memory for its file, on the rebuilder.
    """

    me: int
    files: Mapping[int, memoryview]
    parities: Mapping[int, memoryview]
    into: Mapping[int, memoryview] = field(default_factory=dict)


def recover(left: SetState, stock: LocalParts, rebuilder: int, group: Exchange | None) -> None:
    """Rebuild all lost files of a set. Every participant calls it with the same `left`.

    Args:
        left: The elements left; they must be enough.
        stock: This participant's bytes.
        rebuilder: The participant that receives the files.
        group: The participants' exchange; None: there is only one.

    Raises:
        NoAgreement: a participant is gone.
        UnusableSnapshot: too much is lost.
    """
    if not left.is_enough:
        raise UnusableSnapshot(f"too many files of ranks {list(left.coded.members)} are lost")
    lost, chunk_bytes = left.lost, left.coded.chunk_bytes(max(left.sizes))
    for stripe in range(len(left.coded.members)):
        if any(place in lost for place in data_places(left.coded, stripe)):
            for at in range(0, chunk_bytes, replicate.SET_BLOCK_BYTES):
                end = min(at + replicate.SET_BLOCK_BYTES, chunk_bytes)
                _round(
                    left,
                    stock,
                    rebuilder=rebuilder,
                    group=group,
                    stripe=stripe,
                    at=at,
                    end=end,
                    lost=lost,
                )


def _round(
    left: SetState,
    stock: LocalParts,
    *,
    rebuilder: int,
    group: Exchange | None,
    stripe: int,
    at: int,
    end: int,
    lost: Collection[int],
) -> None:
    """Exchange one block of one stripe."""
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
        _compute(left, stock, stripe=stripe, at=at, end=end, present=present, lost=lost)


def _compute(
    left: SetState,
    stock: LocalParts,
    *,
    stripe: int,
    at: int,
    end: int,
    present: dict[int, memoryview],
    lost: Collection[int],
) -> None:
    coded, chunk_bytes = left.coded, left.coded.chunk_bytes(max(left.sizes))
    places = dict(enumerate(data_places(coded, stripe)))
    into = {number: bytearray(end - at) for number, place in places.items() if place in lost}
    for number, place in places.items():  # a member without a file counts as zeros
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

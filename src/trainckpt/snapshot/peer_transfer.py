"""Send shard files, or parities of them, to the ranks that store them, and rebuild lost ones.

Data passes in blocks, so only a few megabytes are in flight, and all members of a group do the
same rounds. `may_go_on` may end the transfer before any round, to free the network. Received data
goes to memory reserved by the caller.

Threads: one, and not the training thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from trainckpt.errors import UnusableSnapshot
from trainckpt.snapshot.parity import encode, rebuild

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from trainckpt.ranks.exchange import Exchange
    from trainckpt.snapshot.redundancy import CodedSet

COPY_BLOCK_BYTES = 4 << 20
SET_BLOCK_BYTES = 1 << 20  # of each chunk in a set: a member has one block per chunk in flight


def copy_files(
    mine: memoryview,
    to: Exchange | None,
    copies: Sequence[tuple[Exchange, memoryview]],
    may_go_on: Callable[[], None],
) -> None:
    """Send this rank's file to its partner, and receive those it stores.

    Args:
        mine: The file.
        to: The group of this rank and its partner, in this order; None: it has no partner.
        copies: For each file stored here: the group of its owner and this rank, and memory for it.
        may_go_on: Called before each round; its exceptions end the transfer.

    Raises:
        NoAgreement: a rank is gone.
    """
    longest = max([len(mine) if to else 0, *(len(into) for _, into in copies)])
    for at in range(0, longest, COPY_BLOCK_BYTES):
        may_go_on()
        block = slice(at, at + COPY_BLOCK_BYTES)
        begun = [(group, group.begin([(0, 0, into[block])], [])) for group, into in copies]
        if to is not None:
            begun.append((to, to.begin([], [(1, 0, mine[block])])))
        for group, works in begun:
            group.settle(works)


def make_parities(
    coded: CodedSet,
    place: int,
    *,
    sizes: Sequence[int],
    mine: memoryview,
    into: memoryview,
    group: Exchange,
    may_go_on: Callable[[], None],
) -> None:
    """Exchange one set's files, so every member gets its parities.

    Args:
        coded: The set.
        place: This rank's, among the members.
        sizes: Bytes of each member's file; 0 for members without one.
        mine: This rank's file; empty if it has none.
        into: Memory for this rank's parities, end to end.
        group: The members' exchange.
        may_go_on: As for `copy_files`.

    Raises:
        NoAgreement: a rank is gone.
    """
    chunk_bytes = coded.chunk_bytes(max(sizes))
    number, num_parity = len(coded.members), coded.num_parity
    held = {
        stripe: row
        for stripe in range(number)
        if (row := coded.element(place, stripe)) < num_parity
    }
    scratch = {
        stripe: [bytearray(min(SET_BLOCK_BYTES, chunk_bytes)) for _ in range(coded.num_chunks)]
        for stripe in held
    }
    for at in range(0, chunk_bytes, SET_BLOCK_BYTES):
        may_go_on()
        end = min(at + SET_BLOCK_BYTES, chunk_bytes)
        came: dict[int, dict[int, memoryview]] = {}
        for stripe in held:
            came[stripe] = {}
            for chunk, source in enumerate(data_places(coded, stripe)):
                first, last = chunk_part(sizes[source], chunk, chunk_bytes, at, end)
                came[stripe][source] = memoryview(scratch[stripe][chunk])[: last - first]
        receives = [(s, stripe, part) for stripe in held for s, part in came[stripe].items()]
        sends = []  # to each member with a parity of the stripe
        for stripe in range(number):
            chunk = coded.element(place, stripe) - num_parity
            if chunk >= 0:
                first, last = chunk_part(len(mine), chunk, chunk_bytes, at, end)
                rows = range(num_parity)
                sends += [((stripe + row) % number, stripe, mine[first:last]) for row in rows]
        group.settle(group.begin(receives, sends))
        for stripe, row in held.items():
            data = [came[stripe][source] for source in data_places(coded, stripe)]
            first = row * chunk_bytes
            encode(data, {row: into[first + at : first + end]})


def data_places(coded: CodedSet, stripe: int) -> list[int]:
    """Return the places of the members with chunks in a stripe, in code order."""
    number = len(coded.members)
    return [(stripe + e) % number for e in range(coded.num_parity, number)]


def chunk_part(num_bytes: int, chunk: int, chunk_bytes: int, at: int, end: int) -> tuple[int, int]:
    """Return bytes `at` to `end` of a chunk as a range of a file of `num_bytes` bytes."""
    first = chunk * chunk_bytes
    return min(first + at, num_bytes), min(first + end, num_bytes)


# ---- rebuilding lost files
#
# One process rebuilds; the others send it their files and parities, block by block. Nothing is
# verified here: the caller compares each file with its digest in the manifest.


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

    @cached_property
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
        return [place for place in data_places(self.coded, stripe) if place in self.lost]


@dataclass(frozen=True)
class LocalParts:
    """The bytes one participant contributes.

    Attributes:
        me: Its number among the participants.
        files, parities: Place of a member -> its bytes, if present here.
    """

    me: int
    files: Mapping[int, memoryview]
    parities: Mapping[int, memoryview]


def recover(
    left: SetState,
    stock: LocalParts,
    *,
    rebuilder: int,
    group: Exchange | None,
    into: Mapping[int, memoryview],
) -> None:
    """Rebuild all lost files of a set. Every participant calls it with the same `left`.

    Args:
        left: The elements left; they must be enough.
        stock: This participant's bytes.
        rebuilder: The participant that receives the files.
        group: The participants' exchange; None: there is only one.
        into: On the rebuilder: place of a lost member -> memory for its file.

    Raises:
        NoAgreement: a participant is gone.
        UnusableSnapshot: too much is lost.
    """
    coded = left.coded
    if not left.is_enough:
        raise UnusableSnapshot(f"too many files of ranks {list(coded.members)} are lost")
    chunk_bytes = coded.chunk_bytes(max(left.sizes))
    for stripe in range(len(coded.members)):
        places = dict(enumerate(data_places(coded, stripe)))
        lost = {chunk: place for chunk, place in places.items() if place in left.lost}
        for at in range(0, chunk_bytes if lost else 0, SET_BLOCK_BYTES):
            end = min(at + SET_BLOCK_BYTES, chunk_bytes)
            present = _collect(
                left, stock, rebuilder=rebuilder, group=group, stripe=stripe, at=at, end=end
            )
            if rebuilder != stock.me:
                continue
            for chunk in places.keys() - lost.keys():  # a member without a file counts as zeros
                present.setdefault(chunk, memoryview(b""))
            made = {chunk: memoryview(bytearray(end - at)) for chunk in lost}
            rebuild(present, made, coded.num_chunks, coded.num_parity)
            for chunk, block in made.items():
                first, last = chunk_part(left.sizes[lost[chunk]], chunk, chunk_bytes, at, end)
                into[lost[chunk]][first:last] = block[: last - first]


def _collect(
    left: SetState,
    stock: LocalParts,
    *,
    rebuilder: int,
    group: Exchange | None,
    stripe: int,
    at: int,
    end: int,
) -> dict[int, memoryview]:
    """Exchange one block of a stripe; return its elements on the rebuilder."""
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
    return present

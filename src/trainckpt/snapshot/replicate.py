"""Send shard files, or parities of them, to the ranks that store them. The mirror of `rebuild`.

Data passes in blocks, so only a few megabytes are in flight, and all members of a group do the
same rounds. `may_go_on` may end the transfer before any round, to free the network. Received data
goes to memory reserved by the caller.

Threads: one, and not the training thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainckpt.snapshot.parity import encode

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
        came = {
            stripe: _parts(
                coded,
                stripe,
                sizes=sizes,
                chunk_bytes=chunk_bytes,
                at=at,
                end=end,
                scratch=scratch[stripe],
            )
            for stripe in held
        }
        receives = [
            (source, stripe, part)
            for stripe, parts in came.items()
            for source, part in parts.items()
        ]
        group.settle(
            group.begin(
                receives, _sends(coded, place, mine=mine, chunk_bytes=chunk_bytes, at=at, end=end)
            )
        )
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


def _parts(
    coded: CodedSet,
    stripe: int,
    *,
    sizes: Sequence[int],
    chunk_bytes: int,
    at: int,
    end: int,
    scratch: Sequence[bytearray],
) -> Mapping[int, memoryview]:
    """Return memory for each member's part of a stripe."""
    found = {}
    for number, source in enumerate(data_places(coded, stripe)):
        first, last = chunk_part(sizes[source], number, chunk_bytes, at, end)
        found[source] = memoryview(scratch[number])[: last - first]
    return found


def _sends(
    coded: CodedSet, place: int, *, mine: memoryview, chunk_bytes: int, at: int, end: int
) -> list[tuple[int, int, memoryview]]:
    """Return this member's parts: (member with a parity of the stripe, stripe, bytes)."""
    found = []
    for stripe in range(len(coded.members)):
        chunk = coded.element(place, stripe) - coded.num_parity
        if chunk >= 0:
            first, last = chunk_part(len(mine), chunk, chunk_bytes, at, end)
            found += [
                ((stripe + row) % len(coded.members), stripe, mine[first:last])
                for row in range(coded.num_parity)
            ]
    return found

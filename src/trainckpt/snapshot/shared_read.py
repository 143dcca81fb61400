"""The shared read: a group reads whole rows between its members, and each gets its columns.

    find       each member looks up in the headers what it is to read, and offers the group's digest
    agree      whoever calls this: only groups whose members all offer the same are read together
    each round every member reads its next pieces and verifies them
               puts what of them is its own
               sends every other member what that one holds of them, and gets its own from each

Nothing is handed on that was not verified by whoever read it. A member that fails goes on taking
part, and sends its refusal in place of the bytes: nobody waits for what does not come, and who was
refused refuses in turn. So a failure ends on all members that it concerns, with its reason.

In each step of a round everybody sends to the member so many places behind it, and receives from
the one as many before it: pairs meet in one order, so nobody can wait in a circle.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from trainckpt.errors import TierUnavailable, TrainckptError, UnusableSnapshot
from trainckpt.format.digest import NUM_HEX
from trainckpt.format.shard_file import ITEM_BYTES, Region
from trainckpt.snapshot.restore_plan import Read, span

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainckpt.format.layout import Box
    from trainckpt.snapshot.blocks import Found
    from trainckpt.snapshot.restore import Destination, Reader
    from trainckpt.snapshot.shared_plan import Group, Piece, Run

HEAD_BYTES = 1024  # before each message's data: empty, or why there is none
ALIGNED_BYTES = 8  # what one message holds begins at a multiple of that, for the types' sake
_KINDS = {1: UnusableSnapshot, 2: TierUnavailable}


class Exchange(Protocol):
    """Bytes between the members of one group. Every member makes the same calls in turn."""

    def swap(self, to: int, data: memoryview, source: int, num_bytes: int) -> memoryview:
        """Send `data` to one member and receive `num_bytes` from another; no bytes: nothing.

        Raises:
            NoAgreement: either of them is gone, or did not do its part in time.
        """


class Refusal(NamedTuple):
    """Why a member could not read what is wanted of it.

    Attributes:
        rank: The one that failed first, as far as is known.
        error: What it failed with.
    """

    rank: int
    error: TrainckptError


class Slot(NamedTuple):
    """What one member holds of a piece: a box of the tensor, and its bytes in a message."""

    piece: Piece
    part: Box
    num_bytes: int


class SharedRead:
    """One member's part in the shared read of one group.

    Attributes:
        group: As planned.
        offer: The group's digest; "" if what this member would read cannot be divided.
    """

    def __init__(self, group: Group, reader: Reader) -> None:
        """Look up every region that this member is to read.

        Raises:
            UnusableSnapshot: one is missing, or is not what the manifest says.
            TierUnavailable: the tier refused to give a header.
        """
        self.group = group
        self._reader = reader
        self._places: dict[tuple[str, Box], Found] = {}
        self.offer = group.digest
        for tensor in group.tensors:
            for piece in tensor.share(group.me):
                region = self._place(tensor.name, piece.run).region
                if region.num_blocks > 1 and len(region.digest) == NUM_HEX:
                    self.offer = ""  # of format 1: one digest for the whole region

    def read(self, exchange: Exchange, destination: Destination) -> Refusal | None:
        """Read with the others, all of it; None if this member got all that it wants.

        Raises:
            NoAgreement: a member is gone.
        """
        refusal: Refusal | None = None
        for loads in self.group.rounds():
            refusal = self._round(loads, exchange, destination, refusal)
        return refusal

    def _round(
        self,
        loads: list[list[Piece]],
        exchange: Exchange,
        destination: Destination,
        refusal: Refusal | None,
    ) -> Refusal | None:
        me, members = self.group.me, len(self.group.members)
        mine: list[tuple[Piece, int, memoryview]] = []
        if refusal is None:
            try:
                for piece in loads[me]:
                    place = self._place(piece.tensor.name, piece.run)
                    mine.append((piece, *self._reader.read_blocks(place, piece.first, piece.last)))
                for piece, first, data in mine:
                    for part in piece.parts(piece.tensor.boxes[me]):
                        region = _region(piece, piece.run.region)
                        begin, end = span(region.box, part, region.dtype)
                        destination.put(region, part, data[begin - first : end - first])
            except (UnusableSnapshot, TierUnavailable) as error:
                refusal = Refusal(self.group.members[me], error)
        for step in range(1, members):
            to, source = (me + step) % members, (me - step) % members
            message = _message(list(_slots(loads[me], to)), mine, destination, refusal)
            slots = list(_slots(loads[source], me))
            got = exchange.swap(to, message, source, _num_bytes(slots))
            if refusal is None and slots:
                refusal = _refusal(got) if got[0] else self._put(got, slots, destination)
        return refusal

    def _put(
        self, message: memoryview, slots: list[Slot], destination: Destination
    ) -> Refusal | None:
        """Put what another member has sent."""
        at = HEAD_BYTES
        try:
            for piece, part, size in slots:
                region = _region(piece, part)
                destination.put(region, part, message[at : at + region.num_bytes])
                at += size
        except UnusableSnapshot as error:
            return Refusal(self.group.members[self.group.me], error)
        return None

    def _place(self, tensor: str, run: Run) -> Found:
        key = tensor, run.region
        if key not in self._places:
            self._places[key] = self._reader.find(Read(run.file, tensor, run.region))
        return self._places[key]


def _slots(pieces: list[Piece], member: int) -> Iterator[Slot]:
    """What one member holds of these pieces, in the order of a message."""
    for piece in pieces:
        for part in piece.parts(piece.tensor.boxes[member]):
            size = _region(piece, part).num_bytes
            yield Slot(piece, part, -(-size // ALIGNED_BYTES) * ALIGNED_BYTES)


def _num_bytes(slots: list[Slot]) -> int:
    return HEAD_BYTES + sum(slot.num_bytes for slot in slots) if slots else 0


def _region(piece: Piece, box: Box) -> Region:
    entry = piece.tensor.entry
    return Region(piece.tensor.name, entry.dtype, box.offset, box.shape, entry.shape)


def _message(
    slots: list[Slot],
    read: list[tuple[Piece, int, memoryview]],
    destination: Destination,
    refusal: Refusal | None,
) -> memoryview:
    """What one member holds of what this one has read; or the refusal, which is as long."""
    message = memoryview(bytearray(_num_bytes(slots)))
    if refusal is not None:
        message[:HEAD_BYTES] = _head(refusal)[: len(message)]  # no bytes: no message
        return message
    chunks = {id(piece): (first, data) for piece, first, data in read}
    at = HEAD_BYTES
    for piece, part, size in slots:
        first, data = chunks[id(piece)]
        region, num_bytes = _region(piece, piece.run.region), _region(piece, part).num_bytes
        begin, end = span(region.box, part, region.dtype)
        into = message[at : at + num_bytes]
        destination.take(region, part, data[begin - first : end - first], into)
        at += size
    return message


def _head(refusal: Refusal) -> bytes:
    kind = 2 if isinstance(refusal.error, TierUnavailable) else 1
    texts = (refusal.error.message, refusal.error.hint)
    text = "\0".join(each.replace("\0", " ") for each in texts).encode(errors="replace")
    head = bytes([kind]) + refusal.rank.to_bytes(4, "little") + text[: HEAD_BYTES - 5]
    return head.ljust(HEAD_BYTES, b"\0")


def _refusal(head: memoryview) -> Refusal:
    text, _, hint = bytes(head[5:]).decode(errors="ignore").partition("\0")
    kind = _KINDS.get(head[0], UnusableSnapshot)
    return Refusal(int.from_bytes(head[1:5], "little"), kind(text, hint=hint.strip("\0")))


assert max(ITEM_BYTES.values()) <= ALIGNED_BYTES

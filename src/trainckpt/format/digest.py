"""Content digests: xxh3_128, as 32 lower-case hex digits.

They find damage (flipped bits, truncation, swapped files), not malice. xxh3 was chosen because
it runs faster than memory can be copied, so every read can afford to be verified.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import xxhash

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

ALGORITHM = "xxh3_128"
NUM_HEX = 32
PLACEHOLDER = "0" * NUM_HEX
_HEX = b"0123456789abcdef"


class Verified(NamedTuple):
    """Bytes that were verified where they lie, with the digests that they matched.

    Attributes:
        block: Bytes of each digest; the last may be of fewer.
    """

    address: int
    num_bytes: int
    block: int
    digests: str


def digest(data: bytes | bytearray | memoryview) -> str:
    """Digest of one block of bytes."""
    return xxhash.xxh3_128_hexdigest(data)


def digest_blocks(blocks: Iterable[bytes | bytearray | memoryview]) -> str:
    """Digest of the concatenation of `blocks`, without joining them."""
    state = xxhash.xxh3_128()
    for block in blocks:
        state.update(block)
    return state.hexdigest()


class Running:
    """A digest that is taken while blocks pass by: they may be gone afterwards.

    Attributes:
        num_bytes: That have passed.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self._state = xxhash.xxh3_128()

    def over(self, blocks: Iterable[memoryview]) -> Iterator[memoryview]:
        """The same blocks, each taken into account."""
        for block in blocks:
            self.update(block)
            yield block

    def update(self, block: memoryview) -> None:
        """Take the next bytes into account."""
        self._state.update(block)
        self.num_bytes += len(block)

    def hexdigest(self) -> str:
        """Of what has passed so far."""
        return self._state.hexdigest()


def digests_by_block(data: memoryview, block: int) -> str:
    """The digests of each `block` bytes of `data`, one after the other; one for no bytes."""
    one, parts = xxhash.xxh3_128_hexdigest, range(0, len(data) or 1, block)
    return "".join([one(data[at : at + block]) for at in parts])


def compact(digests: str) -> str:
    """One digest for those of all blocks of some bytes; of a single one it is that."""
    return digests if len(digests) == NUM_HEX else digest(digests.encode())


class RunningByBlock:
    """`digests_by_block` of bytes that pass by in pieces of any length."""

    def __init__(self, block: int) -> None:
        self._block, self._filled = block, 0
        self._state = xxhash.xxh3_128()
        self._done: list[str] = []

    def update(self, piece: memoryview) -> None:
        """Take the next bytes into account."""
        while len(piece):
            step = piece[: self._block - self._filled]
            piece = piece[len(step) :]
            if len(step) == self._block:
                self._done.append(digest(step))
                continue
            self._state.update(step)
            self._filled += len(step)
            if self._filled == self._block:
                self._done.append(self._state.hexdigest())
                self._state, self._filled = xxhash.xxh3_128(), 0

    def hexdigest(self) -> str:
        """The digests of what has passed so far."""
        is_open = self._filled or not self._done
        return "".join([*self._done, self._state.hexdigest()] if is_open else self._done)


def is_digest(value: object) -> bool:
    """True if `value` has the form of a digest."""
    return are_digests(value, {1})


def are_digests(value: object, counts: Collection[int]) -> bool:
    """True if `value` has the form of so many digests, one after the other."""
    if not isinstance(value, str) or len(value) not in {n * NUM_HEX for n in counts}:
        return False
    return value.isascii() and not value.encode().translate(None, _HEX)

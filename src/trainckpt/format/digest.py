"""Content digests: xxh3_128, as 32 lower-case hex digits.

They find damage (flipped bits, truncation, swapped files), not malice. xxh3 was chosen because
it runs faster than memory can be copied, so every read can afford to be verified.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import xxhash

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

ALGORITHM = "xxh3_128"
NUM_HEX = 32
PLACEHOLDER = "0" * NUM_HEX
_HEX = b"0123456789abcdef"


class Verified(NamedTuple):
    """Bytes verified at their address, with their digests.

    Attributes:
        block: Bytes of each digest; the last block may be shorter.
    """

    address: int
    num_bytes: int
    block: int
    digests: str


def digest(data: bytes | bytearray | memoryview) -> str:
    """Return the digest of one block of bytes."""
    return xxhash.xxh3_128_hexdigest(data)


def digest_blocks(blocks: Iterable[bytes | bytearray | memoryview]) -> str:
    """Return the digest of the concatenated `blocks`, without joining them."""
    running = Running()
    for block in blocks:
        running.update(block)
    return running.hexdigest()


class Running:
    """Incremental digest, and the number of bytes digested."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._state = xxhash.xxh3_128()

    def update(self, block: bytes | bytearray | memoryview) -> None:
        """Digest the next bytes."""
        self._state.update(block)
        self.num_bytes += len(block)

    def hexdigest(self) -> str:
        """Return the digest so far."""
        return self._state.hexdigest()


def digests_by_block(data: memoryview, block: int) -> str:
    """Return the digests of each `block` bytes of `data`, concatenated; one for no bytes."""
    one, parts = xxhash.xxh3_128_hexdigest, range(0, len(data) or 1, block)
    return "".join([one(data[at : at + block]) for at in parts])


def compact(digests: str) -> str:
    """Return one digest for those of all blocks; a single one is returned as it is."""
    return digests if len(digests) == NUM_HEX else digest(digests.encode())


class RunningByBlock:
    """Incremental `digests_by_block` of pieces of any length."""

    def __init__(self, block: int) -> None:
        self._block, self._filled = block, 0
        self._state = xxhash.xxh3_128()
        self._done: list[str] = []

    def update(self, piece: memoryview) -> None:
        """Digest the next bytes."""
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
        """Return the digests so far."""
        is_open = self._filled or not self._done
        return "".join([*self._done, self._state.hexdigest()] if is_open else self._done)


def is_digest(value: object) -> bool:
    """Return True if `value` has the form of a digest."""
    return are_digests(value, {1})


def are_digests(value: object, counts: Collection[int]) -> bool:
    """Return True if `value` has the form of a number of digests in `counts`, concatenated."""
    if not isinstance(value, str) or len(value) not in {n * NUM_HEX for n in counts}:
        return False
    return value.isascii() and not value.encode().translate(None, _HEX)

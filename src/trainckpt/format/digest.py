"""Content digests: xxh3_128, as 32 lower-case hex digits.

They find damage (flipped bits, truncation, swapped files), not malice. xxh3 was chosen because
it runs faster than memory can be copied, so every read can afford to be verified.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

ALGORITHM = "xxh3_128"
NUM_HEX = 32
PLACEHOLDER = "0" * NUM_HEX


def digest(data: bytes | bytearray | memoryview) -> str:
    """Digest of one block of bytes."""
    return xxhash.xxh3_128(data).hexdigest()


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
            self._state.update(block)
            self.num_bytes += len(block)
            yield block

    def hexdigest(self) -> str:
        """Of what has passed so far."""
        return self._state.hexdigest()


def is_digest(value: object) -> bool:
    """True if `value` has the form of a digest."""
    return (
        isinstance(value, str)
        and len(value) == NUM_HEX
        and all(c in "0123456789abcdef" for c in value)
    )

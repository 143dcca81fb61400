"""A parity file: what one member of a set keeps of the others' shard files, and says of itself.

It lies in memory only, beside shard files, and never in the run's place. The head is sealed JSON,
padded with spaces; behind it follow as many parities as may be lost, each of `chunk_bytes`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from trainckpt.errors import UnusableSnapshot
from trainckpt.format import digest, strict

HEAD_BYTES = 16 << 10
SUFFIX = ".parity"
_NAME = re.compile(r"set[0-9]{5,9}\.[0-9]{3}\.parity")


@dataclass(frozen=True)
class ParityHead:
    """Which parities of which files these are.

    Attributes:
        snapshot: Full name.
        number: Of the set, among those of the snapshot.
        members: Ranks of the set.
        num_own: The first so many of them brought their file.
        num_parity: How many may be lost.
        place: Of who holds this, among the members.
        chunk_bytes: Length of each parity.
        parities: Digest of all that follows the head.
    """

    snapshot: str
    number: int
    members: tuple[int, ...]
    num_own: int
    num_parity: int
    place: int
    chunk_bytes: int
    parities: str


def file_name(number: int, place: int) -> str:
    """What such a file is called."""
    return f"set{number:05d}.{place:03d}{SUFFIX}"


def is_file_name(name: str) -> bool:
    """Whether a file is called so."""
    return _NAME.fullmatch(name) is not None


def dump(head: ParityHead) -> bytes:
    """The first `HEAD_BYTES` bytes."""
    text = strict.sealed({"format": 1, **vars(head), "members": list(head.members)})
    assert len(text) <= HEAD_BYTES, "255 members take a sixth of it"
    return text.ljust(HEAD_BYTES)


def load(data: bytes | bytearray | memoryview, what: str) -> ParityHead:
    """Read a head back; raises `UnusableSnapshot` for what `dump` would not write."""
    body = strict.parse(data, what, max_bytes=HEAD_BYTES)
    if not isinstance(body, dict) or body.get("format") != 1:
        raise UnusableSnapshot(f"{what} is no parity file that this version reads")
    body = strict.unsealed(body, what)
    members = strict.field(body, "members", list, what)
    if any(type(rank) is not int or not 0 <= rank < 2**31 for rank in members):
        raise UnusableSnapshot(f"{what}: a member is no rank")
    head = ParityHead(
        strict.field(body, "snapshot", str, what),
        strict.count(body, "number", what),
        tuple(members),
        strict.count(body, "num_own", what),
        strict.count(body, "num_parity", what),
        strict.count(body, "place", what),
        strict.count(body, "chunk_bytes", what),
        strict.field(body, "parities", str, what),
    )
    fits = head.place < len(members) <= 255 and head.num_own <= len(set(members)) == len(members)
    if not fits or not 0 < head.num_parity < len(members) or not digest.is_digest(head.parities):
        raise UnusableSnapshot(f"{what} describes no set")
    return head

"""Read and write the head of a parity file: a set member's parities of the others' shard files.

It lies only in memory, beside shard files, never in the run directory. The head is JSON with its
own digest, padded with spaces. Behind it follow `num_parity` parities of `chunk_bytes` each.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from trainckpt.errors import UnusableSnapshot
from trainckpt.format import digest, json_io

HEAD_BYTES = 16 << 10
MAX_PARITIES = 3  # in a set
SUFFIX = ".parity"
_NAME = re.compile(r"set[0-9]{5,9}\.[0-9]{3}\.parity")


@dataclass(frozen=True)
class ParityHead:
    """The head: identifies the set, and the parities in the file.

    Attributes:
        snapshot: Full name.
        number: Of the set, among those of the snapshot.
        members: Ranks of the set.
        num_own: The first so many of them brought their file.
        num_parity: Members that may be lost.
        place: The storing rank's, among the members.
        chunk_bytes: Length of each parity.
        parities: Digest of everything behind the head.
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
    """Return the name of a parity file."""
    return f"set{number:05d}.{place:03d}{SUFFIX}"


def is_file_name(name: str) -> bool:
    """Return True if a file has such a name."""
    return _NAME.fullmatch(name) is not None


def dump(head: ParityHead) -> bytes:
    """Return the first `HEAD_BYTES` bytes."""
    text = json_io.with_digest({"format": 1, **vars(head), "members": list(head.members)})
    assert len(text) <= HEAD_BYTES, "255 members take a sixth of it"
    return text.ljust(HEAD_BYTES)


def load(data: bytes | bytearray | memoryview, what: str) -> ParityHead:
    """Parse a head; raise `UnusableSnapshot` for anything `dump` would not write."""
    body = json_io.parse(data, what, max_bytes=HEAD_BYTES)
    if not isinstance(body, dict) or body.get("format") != 1:
        raise UnusableSnapshot(f"{what} is no parity file that this version reads")
    body = json_io.verify_digest(body, what)
    head: ParityHead = json_io.build(ParityHead, body, what)
    members = head.members
    fits = head.place < len(members) <= 255 and head.num_own <= len(set(members)) == len(members)
    fits = fits and 0 < head.num_parity < len(members) and head.num_parity <= MAX_PARITIES
    if not fits or not digest.is_digest(head.parities):
        raise UnusableSnapshot(f"{what} describes no set")
    return head

"""Read and write a manifest's facts on encryption: wrapped keys, and an encrypted part.

    keys     of its own snapshot, and of each older one it refers to: the snapshot's key, wrapped
             for each recipient. A change of recipients changes only this
    sealed   readable only with the key: the files' lengths and header digests before encryption.
             It also authenticates the rest of the manifest against changes without the key

Pure: contains no cipher. Used by: manifest (to write and read), snapshot.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainckpt.errors import UnusableSnapshot
from trainckpt.format import digest, json_io
from trainckpt.format.files import Plain
from trainckpt.format.names import SnapshotName

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trainckpt.format.files import FileEntry

CIPHER = "AES-256-GCM"
MAX_RECIPIENTS = 256


@dataclass(frozen=True)
class Wrapped:
    """A snapshot's key, wrapped for one recipient.

    Attributes:
        to: The recipient's public key, as text.
        key: The ephemeral public key and the encrypted key, together.
    """

    to: str
    key: bytes


@dataclass(frozen=True)
class Encryption:
    """The encryption facts of one manifest.

    Attributes:
        keys: Full name of a snapshot -> its wrapped keys.
        sealed: The encrypted part; see the module's header.
    """

    keys: Mapping[str, tuple[Wrapped, ...]]
    sealed: bytes

    def to_json(self) -> dict[str, Any]:
        """Return it as in a manifest."""
        keys = {name: wrapped_to_json(each) for name, each in self.keys.items()}
        return {"cipher": CIPHER, "keys": keys, "sealed": to_text(self.sealed)}


def parse(data: Any, what: str) -> Encryption:
    """Parse `Encryption.to_json`'s result; raise `UnusableSnapshot` for anything else."""
    if json_io.field(data, "cipher", str, what) != CIPHER:
        raise UnusableSnapshot(f"{what} is encrypted in a way that this release does not know")
    keys = json_io.field(data, "keys", dict, what)
    for name in keys:
        if SnapshotName.parse(name) is None:
            raise UnusableSnapshot(f"{what} has a key of {name[:100]!r}, which is no snapshot")
    return Encryption(
        {name: wrapped_from_json(each, what) for name, each in keys.items()},
        from_text(json_io.field(data, "sealed", str, what), what),
    )


def wrapped_to_json(wrapped: Sequence[Wrapped]) -> list[list[str]]:
    """Return one key, wrapped for each recipient, as JSON."""
    return [[each.to, to_text(each.key)] for each in wrapped]


def wrapped_from_json(listed: Any, what: str) -> tuple[Wrapped, ...]:
    """Parse `wrapped_to_json`'s result; raise `UnusableSnapshot` for anything else, or no key."""
    found = [
        Wrapped(pair[0], from_text(pair[1], what))
        for pair in (listed if type(listed) is list and len(listed) <= MAX_RECIPIENTS else ())
        if type(pair) is list and len(pair) == 2 and type(pair[0]) is str
    ]
    if not found or len(found) != len(listed):
        raise UnusableSnapshot(f"{what}: its wrapped keys are not readable")
    return tuple(found)


def plain_to_json(files: Sequence[FileEntry], reached: Sequence[FileEntry]) -> dict[str, Any]:
    """Return the contents of the encrypted part: the files' lengths and header digests."""
    return {"files": _columns(files), "reached": _columns(reached)}


def _columns(files: Sequence[FileEntry]) -> dict[str, Any]:
    plain = [file.content for file in files]
    return {
        "bytes": [each.num_bytes for each in plain],
        "headers": "".join(each.header_digest for each in plain),
    }


def plain_from_json(data: Any, key: str, number: int, what: str) -> list[Plain]:
    """Parse one column set of `plain_to_json`, for `number` files.

    Raises:
        UnusableSnapshot: it is malformed, or of another number of files.
    """
    columns = json_io.field(data, key, dict, what)
    sizes = json_io.field(columns, "bytes", list, what)
    headers = json_io.field(columns, "headers", str, what)
    counts = all(type(size) is int and 0 <= size < 2**63 for size in sizes)
    if not counts or len(sizes) != number or not digest.are_digests(headers, {number}):
        raise UnusableSnapshot(f"{what}: what is sealed in it is not of {number} files")
    each = digest.NUM_HEX
    return [Plain(n, headers[i * each : (i + 1) * each]) for i, n in enumerate(sizes)]


def to_text(data: bytes) -> str:
    """Return bytes as text for JSON (base64)."""
    return base64.b64encode(data).decode("ascii")


def from_text(text: Any, what: str) -> bytes:
    """Return the bytes from `to_text`."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError, TypeError):
        raise UnusableSnapshot(f"{what}: a key in it is not readable") from None

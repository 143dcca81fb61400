"""What a manifest says of encryption, as values: wrapped keys, and a sealed part.

    keys     of its own snapshot, and of each older one whose files it refers to: that snapshot's
             key, wrapped for each recipient. Whoever changes the recipients changes only this
    sealed   what nobody reads without the key: lengths and header digests of the files as they
             were before they were encrypted. It also binds the rest of the manifest: whoever
             changed that without the key is found out

Pure: no cipher in here. Used by: manifest (to write and read), snapshot.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainckpt.errors import UnusableSnapshot
from trainckpt.format import digest, strict
from trainckpt.format.files import Plain
from trainckpt.format.names import SnapshotName

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trainckpt.format.files import FileEntry

CIPHER = "AES-256-GCM"
MAX_RECIPIENTS = 256


@dataclass(frozen=True)
class Wrapped:
    """A snapshot's key, as one recipient can have it.

    Attributes:
        to: The recipient's public key, as text.
        key: Of the ephemeral public key and the encrypted key, together.
    """

    to: str
    key: bytes


@dataclass(frozen=True)
class Encryption:
    """Of one manifest.

    Attributes:
        keys: Full name of a snapshot -> its key, wrapped.
        sealed: See the module's header.
    """

    keys: Mapping[str, tuple[Wrapped, ...]]
    sealed: bytes

    def to_json(self) -> dict[str, Any]:
        """As a manifest spells it."""
        keys = {name: wrapped_to_json(each) for name, each in self.keys.items()}
        return {"cipher": CIPHER, "keys": keys, "sealed": to_text(self.sealed)}


def parse(data: Any, what: str) -> Encryption:
    """The inverse of `Encryption.to_json`; `UnusableSnapshot` for anything else."""
    if strict.field(data, "cipher", str, what) != CIPHER:
        raise UnusableSnapshot(f"{what} is encrypted in a way that this release does not know")
    keys = strict.field(data, "keys", dict, what)
    for name in keys:
        if SnapshotName.parse(name) is None:
            raise UnusableSnapshot(f"{what} has a key of {name[:100]!r}, which is no snapshot")
    return Encryption(
        {name: wrapped_from_json(each, what) for name, each in keys.items()},
        from_text(strict.field(data, "sealed", str, what), what),
    )


def wrapped_to_json(wrapped: Sequence[Wrapped]) -> list[list[str]]:
    """One key, for each recipient."""
    return [[each.to, to_text(each.key)] for each in wrapped]


def wrapped_from_json(listed: Any, what: str) -> tuple[Wrapped, ...]:
    """The inverse of `wrapped_to_json`; `UnusableSnapshot` for anything else, and for none."""
    found = [
        Wrapped(pair[0], from_text(pair[1], what))
        for pair in (listed if type(listed) is list and len(listed) <= MAX_RECIPIENTS else ())
        if type(pair) is list and len(pair) == 2 and type(pair[0]) is str
    ]
    if not found or len(found) != len(listed):
        raise UnusableSnapshot(f"{what}: its wrapped keys are not readable")
    return tuple(found)


def plain_to_json(files: Sequence[FileEntry], reached: Sequence[FileEntry]) -> dict[str, Any]:
    """What is sealed: the files' own columns, as they were before."""
    return {"files": _columns(files), "reached": _columns(reached)}


def _columns(files: Sequence[FileEntry]) -> dict[str, Any]:
    plain = [file.content for file in files]
    return {
        "bytes": [each.num_bytes for each in plain],
        "headers": "".join(each.header_digest for each in plain),
    }


def plain_from_json(data: Any, key: str, number: int, what: str) -> list[Plain]:
    """One of the columns that `plain_to_json` made, of so many files."""
    columns = strict.field(data, key, dict, what)
    sizes = strict.field(columns, "bytes", list, what)
    headers = strict.field(columns, "headers", str, what)
    counts = all(type(size) is int and 0 <= size < 2**63 for size in sizes)
    if not counts or len(sizes) != number or not digest.are_digests(headers, {number}):
        raise UnusableSnapshot(f"{what}: what is sealed in it is not of {number} files")
    each = digest.NUM_HEX
    return [Plain(n, headers[i * each : (i + 1) * each]) for i, n in enumerate(sizes)]


def to_text(data: bytes) -> str:
    """Bytes as they stand in JSON."""
    return base64.b64encode(data).decode("ascii")


def from_text(text: Any, what: str) -> bytes:
    """The inverse of `to_text`."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError, TypeError):
        raise UnusableSnapshot(f"{what}: a key in it is not readable") from None

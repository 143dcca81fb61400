"""Encrypt and decrypt a shard file in chunks, each bound to its position.

    body     the data after the header: encrypted chunk by chunk, same lengths
    head     the header, encrypted the same way. It comes last since it has the digests of the data:
             so the file is written once, from its first byte to its last
    tags     16 bytes of each chunk, in their order
    footer   64 bytes: magic, version, length of chunk, head and body, salt

AES-256-GCM. The file's key derives from the snapshot's key and the random salt: no key ever
encrypts two files, nor one file twice, so the chunk's number is its nonce. Authenticated with each
chunk are run, snapshot and file, the chunk's number, whether it is the last, and both lengths. So
data cut, swapped, or brought from another file is refused.
"""

from __future__ import annotations

import json
import os
import struct
import time
from dataclasses import replace
from hashlib import sha256
from typing import TYPE_CHECKING, NamedTuple

from trainckpt.encryption.keys import SALT_BYTES, cipher, derive, must_be_there, new_key
from trainckpt.errors import UnusableSnapshot
from trainckpt.format import json_io
from trainckpt.format import manifest as manifests
from trainckpt.format.manifest import (
    Encryption,
    FileEntry,
    columns,
    with_plain,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from trainckpt.format.manifest import Manifest, Wrapped


CHUNK_BYTES = 1 << 20
TAG_BYTES = 16
MAGIC = b"trainckpt sealed"
VERSION = 1
_FOOTER = struct.Struct(f"<{len(MAGIC)}sIIQQ{SALT_BYTES}s")
FOOTER_BYTES = _FOOTER.size
PROBE_CHUNKS = 32
_FILE_KEY = b"trainckpt/file"
_BOUND = struct.Struct("<32sQBQQ")


class ChunkPosition(NamedTuple):
    """The identity of a file: `rank00000.safetensors` of a snapshot of a run."""

    run: str
    snapshot: str
    file: str

    @property
    def digest(self) -> bytes:
        """Return a digest of 32 bytes."""
        parts = (part.encode() for part in self)
        return sha256(b"".join(struct.pack("<Q", len(p)) + p for p in parts)).digest()


class Chunk(NamedTuple):
    """Bytes of the file encrypted together.

    Attributes:
        number: From 0, in the stored order.
        first_byte: In the plain file.
        stored_at: In the encrypted file.
        num_bytes: In both.
    """

    number: int
    first_byte: int
    stored_at: int
    num_bytes: int


class EncryptedLayout(NamedTuple):
    """The offsets in an encrypted file, from the lengths of header and data."""

    head_bytes: int
    body_bytes: int
    chunk_bytes: int = CHUNK_BYTES

    @property
    def plain_bytes(self) -> int:
        """Return the length of the plain file."""
        return self.head_bytes + self.body_bytes

    @property
    def num_body_chunks(self) -> int:
        """Return the number of body chunks; the head's chunks are numbered after them."""
        return -(-self.body_bytes // self.chunk_bytes)

    @property
    def num_chunks(self) -> int:
        """Return the number of all chunks."""
        return self.num_body_chunks - (-self.head_bytes // self.chunk_bytes)

    @property
    def tail_bytes(self) -> int:
        """Return the length of tags and footer."""
        return self.num_chunks * TAG_BYTES + FOOTER_BYTES

    @property
    def stored_bytes(self) -> int:
        """Return the length of the encrypted file."""
        return self.plain_bytes + self.tail_bytes

    def chunk(self, number: int) -> Chunk:
        """Return the chunk of this number."""
        at = number * self.chunk_bytes
        if number < self.num_body_chunks:
            size = min(self.chunk_bytes, self.body_bytes - at)
            return Chunk(number, self.head_bytes + at, at, size)
        at = (number - self.num_body_chunks) * self.chunk_bytes
        size = min(self.chunk_bytes, self.head_bytes - at)
        return Chunk(number, at, self.body_bytes + at, size)

    def chunks(self, first_byte: int, num_bytes: int) -> Iterator[Chunk]:
        """Yield the chunks of these bytes of the plain file, in its order."""
        at, end = first_byte, first_byte + num_bytes
        while at < end:
            if at < self.head_bytes:
                number = self.num_body_chunks + at // self.chunk_bytes
            else:
                number = (at - self.head_bytes) // self.chunk_bytes
            found = self.chunk(number)
            yield found
            at = found.first_byte + found.num_bytes


class Encryptor:
    """Encrypts one file, once. Any threads; each chunk by one."""

    def __init__(self, key: bytes, position: ChunkPosition, layout: EncryptedLayout) -> None:
        """Create the cipher of a file. `key`: the snapshot's."""
        self.layout = layout
        self._salt = os.urandom(SALT_BYTES)
        self._position = position.digest
        self._cipher = cipher(key, _FILE_KEY + self._position, self._salt)
        self._tags: list[bytes | None] = [None] * layout.num_chunks

    def encrypt(self, number: int, plain: memoryview, into: memoryview) -> None:
        """Encrypt one chunk into memory `TAG_BYTES` longer than it; only `tail` stores the tag.

        Raises:
            ValueError: It was encrypted before, or has another size: a nonce is used only once.
        """
        if self._tags[number] is not None or len(plain) != self.layout.chunk(number).num_bytes:
            raise ValueError(f"chunk {number} is encrypted once, and whole")
        self._tags[number] = b""
        bound = _bound(self._position, self.layout, number)
        self._cipher.encrypt_into(_nonce(number), plain, bound, into)
        self._tags[number] = bytes(into[-TAG_BYTES:])

    def tail(self) -> bytes:
        """Return tags and footer, after all chunks are encrypted."""
        if not all(self._tags):
            raise ValueError("not every chunk was encrypted")
        layout = self.layout
        return b"".join(tag or b"" for tag in self._tags) + _FOOTER.pack(
            MAGIC, VERSION, layout.chunk_bytes, layout.head_bytes, layout.body_bytes, self._salt
        )


class Decryptor:
    """Decrypts chunks of one file, in any order, on any thread."""

    def __init__(
        self, key: bytes, position: ChunkPosition, footer: bytes, stored_bytes: int
    ) -> None:
        """Read the footer. `key`: the snapshot's; `footer`: the file's last bytes.

        Raises:
            UnusableSnapshot: It is no footer of a file of this length.
        """
        must_be_there()
        self.layout, salt = read_footer(footer, stored_bytes, position.file)
        self._what = f"{position.snapshot}/{position.file}"
        self._position = position.digest
        self._key = derive(key, _FILE_KEY + self._position, salt)
        self._tags = b""

    def learn(self, tags: bytes) -> None:
        """Set the file's tags; call it before `open`."""
        self._tags = tags

    def open(self, number: int, data: memoryview) -> None:
        """Decrypt one chunk in place.

        Raises:
            UnusableSnapshot: It was not encrypted for this position with this key. The memory then
                has no valid contents.
        """
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

        tag = self._tags[number * TAG_BYTES : (number + 1) * TAG_BYTES]
        mode = modes.GCM(_nonce(number), tag)
        opening = Cipher(algorithms.AES(self._key), mode).decryptor()
        opening.authenticate_additional_data(_bound(self._position, self.layout, number))
        try:
            opening.update_into(data, data)
            opening.finalize()
        except InvalidTag:
            chunk = self.layout.chunk(number)
            raise UnusableSnapshot(
                f"{self._what}: bytes {chunk.stored_at} to {chunk.stored_at + chunk.num_bytes} are "
                "not what was encrypted for this place: damaged, changed, or of another file"
            ) from None


def bytes_per_s() -> int:
    """Measure the encryption rate of this thread, as in a save."""
    sealer = Encryptor(
        new_key(), ChunkPosition("", "", ""), EncryptedLayout(0, PROBE_CHUNKS * CHUNK_BYTES)
    )
    plain = memoryview(bytearray(CHUNK_BYTES))
    into = memoryview(bytearray(CHUNK_BYTES + TAG_BYTES))
    begun_s = time.perf_counter()
    for number in range(PROBE_CHUNKS):
        sealer.encrypt(number, plain, into)
    return int(PROBE_CHUNKS * CHUNK_BYTES / (time.perf_counter() - begun_s))


def read_footer(footer: bytes, stored_bytes: int, what: str) -> tuple[EncryptedLayout, bytes]:
    """Return layout and salt; raise `UnusableSnapshot` unless they fit a file of this length."""
    if len(footer) != FOOTER_BYTES:
        raise UnusableSnapshot(f"{what} is too short for an encrypted file")
    magic, version, chunk, head, body, salt = _FOOTER.unpack(footer)
    layout = EncryptedLayout(head, body, chunk)
    if magic != MAGIC or version != VERSION:
        raise UnusableSnapshot(f"{what} does not end as an encrypted file does")
    if not chunk or layout.stored_bytes != stored_bytes:
        raise UnusableSnapshot(f"{what} was cut, or is not the file that its end says")
    return layout, salt


def _nonce(number: int) -> bytes:
    return number.to_bytes(12, "big")


def _bound(position: bytes, layout: EncryptedLayout, number: int) -> bytes:
    is_last = number == layout.num_chunks - 1
    return _BOUND.pack(position, number, is_last, layout.head_bytes, layout.body_bytes)


# ---- the manifest of an encrypted snapshot
#
# Encrypted are the plain files' lengths and header digests. Every other field of the manifest is
# authenticated with them, except the wrapped keys: only those can be changed (`rewrap`).


NONCE_BYTES = 12


def encrypt_manifest(
    manifest: Manifest, key: bytes, keys: Mapping[str, tuple[Wrapped, ...]]
) -> Manifest:
    """Return the manifest to commit.

    Args:
        manifest: All its files are encrypted, and have their plain lengths and digests.
        key: The snapshot's.
        keys: Wrapped keys: its own, and those of the snapshots it refers to.
    """
    plain = {
        "files": columns([file.content for file in manifest.files]),
        "reached": columns([file.content for file in _in_order(manifest)]),
    }
    # As a reader does: layouts are numbered in the order of the tensors.
    manifest = replace(manifest, tensors=dict(sorted(manifest.tensors.items())))
    unsealed = replace(manifest, encryption=Encryption(keys, b""))
    nonce = os.urandom(NONCE_BYTES)
    manifest_cipher = cipher(key, b"trainckpt/manifest")
    sealed = manifest_cipher.encrypt(nonce, json_io.canonical(plain), manifests.bound(unsealed))
    return replace(manifest, encryption=Encryption(keys, nonce + sealed))


def decrypt_manifest(manifest: Manifest, key: bytes) -> Manifest:
    """Return the manifest with its files' plain lengths and digests, all fields authenticated.

    Raises:
        UnusableSnapshot: It differs from the manifest encrypted with this key.
    """
    must_be_there()
    from cryptography.exceptions import InvalidTag

    assert manifest.encryption is not None
    what = f"the manifest of {manifest.name}"
    data = manifest.encryption.sealed
    try:
        opening = cipher(key, b"trainckpt/manifest")
        text = opening.decrypt(data[:NONCE_BYTES], data[NONCE_BYTES:], manifests.bound(manifest))
    except (InvalidTag, ValueError):
        raise UnusableSnapshot(
            f"{what} was changed without its key, or belongs to another snapshot"
        ) from None
    entries = json.loads(text)
    return replace(
        manifest,
        files=with_plain(manifest.files, entries["files"], what),
        reached=with_plain(_in_order(manifest), entries["reached"], what),
    )


def _in_order(manifest: Manifest) -> list[FileEntry]:
    return sorted(manifest.reached, key=lambda file: file.name)

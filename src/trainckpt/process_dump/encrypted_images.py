"""Encrypted images: a dump of an encrypted run, with a key of its own.

    encrypt encrypts each image in place, chunk by chunk, before the dump is committed: the plain
            bytes are overwritten. The key is wrapped for the recipients and then dropped
    opened  decrypts the images into separate files for an identity's owner, while CRIU reads them

CRIU writes and reads plain files only, so during these seconds they are on the disk.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from typing import TYPE_CHECKING

from trainckpt.encryption import keys
from trainckpt.encryption.encrypted_file import (
    CHUNK_BYTES,
    FOOTER_BYTES,
    TAG_BYTES,
    ChunkPosition,
    Decryptor,
    EncryptedLayout,
    Encryptor,
)
from trainckpt.errors import UnusableSnapshot

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from trainckpt.encryption.keys import Identity
    from trainckpt.format.dump import DumpName, DumpRecord
    from trainckpt.format.manifest import Wrapped

OPENED = "opened"  # folder beside the images, removed afterwards


def encrypt(
    images: Path, run: str, name: DumpName, recipients: Sequence[str]
) -> tuple[Wrapped, ...]:
    """Encrypt every image in place, without syncing; return the key wrapped for each recipient.

    After an error the images are partly encrypted: the caller deletes them.
    """
    key = keys.new_key()
    wrapped = keys.wrap_for_all(key, recipients, run, str(name))
    for path in sorted(images.iterdir()):
        _seal(path, key, ChunkPosition(run, str(name), path.name))
    return wrapped


def key_of(record: DumpRecord, identities: Sequence[Identity]) -> bytes:
    """Return the key of a dump's images.

    Raises:
        ConfigurationError: no identity, or not one of the recipients.
        UnusableSnapshot: the wrapped key was changed.
    """
    return keys.unwrap_any(record.keys, identities, record.run, str(record.name))


@contextlib.contextmanager
def opened(images: Path, record: DumpRecord, key: bytes) -> Iterator[Path]:
    """Yield a folder with the decrypted images, removed at the end of the block.

    Raises:
        UnusableSnapshot: an image was changed, or belongs elsewhere.
        OSError: there is no space.
    """
    folder = images.parent / OPENED
    shutil.rmtree(folder, ignore_errors=True)  # left by a killed resume
    folder.mkdir(mode=0o700)
    try:
        for image in record.images:
            place = ChunkPosition(record.run, str(record.name), image.name)
            _open(images / image.name, folder / image.name, key, place)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _seal(path: Path, key: bytes, place: ChunkPosition) -> None:
    layout = EncryptedLayout(0, path.stat().st_size)
    sealer = Encryptor(key, place, layout)
    plain = memoryview(bytearray(CHUNK_BYTES))
    into = memoryview(bytearray(CHUNK_BYTES + TAG_BYTES))
    with path.open("r+b", buffering=0) as file:
        for number in range(layout.num_chunks):
            chunk = layout.chunk(number)
            _fill(file.fileno(), plain[: chunk.num_bytes], chunk.stored_at, path.name)
            sealed = into[: chunk.num_bytes + TAG_BYTES]
            sealer.encrypt(number, plain[: chunk.num_bytes], sealed)
            _put(file.fileno(), sealed[: chunk.num_bytes], chunk.stored_at)
        _put(file.fileno(), memoryview(sealer.tail()), layout.body_bytes)


def _open(path: Path, target: Path, key: bytes, place: ChunkPosition) -> None:
    size = path.stat().st_size
    with path.open("rb", buffering=0) as file:
        tail = memoryview(bytearray(min(size, FOOTER_BYTES)))
        _fill(file.fileno(), tail, size - len(tail), place.file)
        unsealer = Decryptor(key, place, bytes(tail), size)
        layout = unsealer.layout
        tags = memoryview(bytearray(layout.num_chunks * TAG_BYTES))
        _fill(file.fileno(), tags, layout.plain_bytes, place.file)
        unsealer.learn(bytes(tags))
        memory = memoryview(bytearray(min(layout.chunk_bytes, layout.plain_bytes)))
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            for number in range(layout.num_chunks):
                chunk = layout.chunk(number)
                _fill(file.fileno(), memory[: chunk.num_bytes], chunk.stored_at, place.file)
                unsealer.open(number, memory[: chunk.num_bytes])
                _put(descriptor, memory[: chunk.num_bytes], chunk.first_byte)
        finally:
            os.close(descriptor)


def _fill(descriptor: int, into: memoryview, at: int, what: str) -> None:
    while len(into):
        num_read = os.preadv(descriptor, [into], at)
        if not num_read:
            raise UnusableSnapshot(f"the image {what} ends too early")
        into, at = into[num_read:], at + num_read


def _put(descriptor: int, data: memoryview, at: int) -> None:
    while len(data):
        num_written = os.pwrite(descriptor, data, at)
        data, at = data[num_written:], at + num_written

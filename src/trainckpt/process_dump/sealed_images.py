"""Sealed images: those of a dump of a run that is encrypted, encrypted with a key of their own.

    seal    each image is encrypted where it lies, chunk by chunk, before the dump is committed:
            what stood there in the clear is written over. The key is wrapped for the recipients,
            and gone
    opened  whoever has an identity gets them back as files of their own, while CRIU reads them

CRIU writes and reads nothing but plain files, so for those seconds they are on the disk.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from typing import TYPE_CHECKING

from trainckpt.encryption import envelope
from trainckpt.encryption.sealed_file import (
    CHUNK_BYTES,
    FOOTER_BYTES,
    TAG_BYTES,
    Layout,
    Place,
    Sealer,
    Unsealer,
)
from trainckpt.errors import UnusableSnapshot

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from trainckpt.encryption.keys import Identity
    from trainckpt.format.dump import DumpName, DumpRecord
    from trainckpt.format.encryption import Wrapped

OPENED = "opened"  # beside the images, and never left there


def seal(
    images: Path, run: str, name: DumpName, recipients: Sequence[str]
) -> tuple[Wrapped, ...]:  # fmt: skip
    """Encrypt every image in place; not synced. The key, for each recipient.

    If it fails what lies there is neither the one nor the other: for whoever called to delete.
    """
    key = envelope.new_key()
    wrapped = envelope.wrap_for_all(key, recipients, run, str(name))
    for path in sorted(images.iterdir()):
        _seal(path, key, Place(run, str(name), path.name))
    return wrapped


def key_of(record: DumpRecord, identities: Sequence[Identity]) -> bytes:
    """The key of its images.

    Raises:
        ConfigurationError: no identity, or one that it is not encrypted to.
        UnusableSnapshot: what was wrapped was changed.
    """
    return envelope.unwrap_any(record.keys, identities, record.run, str(record.name))


@contextlib.contextmanager
def opened(images: Path, record: DumpRecord, key: bytes) -> Iterator[Path]:
    """A folder with the images as CRIU wrote them, for as long as the block runs.

    Raises:
        UnusableSnapshot: one is not what was encrypted for its place.
        OSError: there is no room.
    """
    folder = images.parent / OPENED
    shutil.rmtree(folder, ignore_errors=True)  # of a resume that was killed
    folder.mkdir(mode=0o700)
    try:
        for image in record.images:
            place = Place(record.run, str(record.name), image.name)
            _open(images / image.name, folder / image.name, key, place)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _seal(path: Path, key: bytes, place: Place) -> None:
    layout = Layout(0, path.stat().st_size)
    sealer = Sealer(key, place, layout)
    plain = memoryview(bytearray(CHUNK_BYTES))
    into = memoryview(bytearray(CHUNK_BYTES + TAG_BYTES))
    with path.open("r+b", buffering=0) as file:
        for number in range(layout.num_chunks):
            chunk = layout.chunk(number)
            _fill(file.fileno(), plain[: chunk.num_bytes], chunk.stored_at, path.name)
            sealed = into[: chunk.num_bytes + TAG_BYTES]
            sealer.seal(number, plain[: chunk.num_bytes], sealed)
            _put(file.fileno(), sealed[: chunk.num_bytes], chunk.stored_at)
        _put(file.fileno(), memoryview(sealer.tail()), layout.body_bytes)


def _open(path: Path, target: Path, key: bytes, place: Place) -> None:
    size = path.stat().st_size
    with path.open("rb", buffering=0) as file:
        tail = memoryview(bytearray(min(size, FOOTER_BYTES)))
        _fill(file.fileno(), tail, size - len(tail), place.file)
        unsealer = Unsealer(key, place, bytes(tail), size)
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
        done = os.preadv(descriptor, [into], at)
        if not done:
            raise UnusableSnapshot(f"the image {what} ends too early")
        into, at = into[done:], at + done


def _put(descriptor: int, data: memoryview, at: int) -> None:
    while len(data):
        done = os.pwrite(descriptor, data, at)
        data, at = data[done:], at + done

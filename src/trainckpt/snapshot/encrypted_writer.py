"""Encrypt a rank's shard file while writing it. The mirror of `decrypting_tier`.

    wait      until all data is copied, as training may wait for the copies
    encrypt   blocks of chunks, on two threads, from the arena to one of a few buffers. Or to
              memory for the whole file, kept for other hosts
    write     several blocks at a time, while the next are encrypted
    digest    the stored bytes meanwhile; the digest reveals nothing of the plain ones

Each key encrypts a file once: a failed save starts anew with another key.
"""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

from trainckpt.encryption.encrypted_file import TAG_BYTES, ChunkPosition, EncryptedLayout, Encryptor
from trainckpt.format import digest, names
from trainckpt.format.manifest import FileEntry, Plain
from trainckpt.storage import direct_io
from trainckpt.storage.direct_io import address, copy_bytes, private_memory
from trainckpt.storage.worker_pool import SerialWorker

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from concurrent.futures import Future

    from trainckpt.format.names import SnapshotName
    from trainckpt.snapshot.shard_writer import InMemory
    from trainckpt.storage.base import Tier

BLOCK_BYTES = 4 << 20  # of one write: several chunks, one request to a disk
NUM_SEALERS = 2
NUM_AHEAD = 2  # blocks being encrypted or waiting for the writer
NUM_WRITTEN = 4  # blocks being written
NUM_BUFFERS = NUM_AHEAD + NUM_WRITTEN - 1


class SnapshotKey(NamedTuple):
    """The key of a snapshot's files, and the id of the run."""

    run: str
    key: bytes


def stored_bytes(shard: InMemory) -> int:
    """Return the encrypted length of a file in memory."""
    head_bytes = shard.header.header_bytes
    return EncryptedLayout(head_bytes, len(shard.memory) - head_bytes).stored_bytes


def write_encrypted(
    tier: Tier | None,
    name: SnapshotName,
    rank: int,
    shard: InMemory,
    *,
    copied: Iterable[int],
    snapshot_key: SnapshotKey,
    into: memoryview | None = None,
) -> FileEntry:
    """Encrypt and write as `shard_writer.write_shard`; return the entry of the file written.

    Args:
        tier: None: write only to `into`.
        name, rank, shard, copied, snapshot_key: As there.
        into: `stored_bytes` of memory to keep the encrypted file; None: do not keep it.
    """
    complete = threading.Event()

    def digest_head() -> bytes:
        complete.wait()
        return shard.head

    with SerialWorker("trainckpt-digest") as digesting:
        try:
            head = digesting.submit(digest_head)
            file = _EncryptedFile(
                name, rank, shard.header.header_bytes, len(shard.memory), snapshot_key
            )
            blocks = file.blocks(shard.memory, copied, complete, head, into)
            key, num_bytes = f"{name.folder}/{file.name}", file.layout.stored_bytes
            if into is None:
                assert tier is not None
                tier.write(key, file.digested(blocks), num_bytes, NUM_WRITTEN)
            elif tier is not None:
                tier.write_parts(key, num_bytes, file.parts(blocks))
            else:
                for _ in file.parts(blocks):
                    pass
        finally:
            complete.set()
        return file.entry(digest.digest(head.result()))


def stream_encrypted(
    tier: Tier,
    name: SnapshotName,
    rank: int,
    *,
    head: bytes,
    num_bytes: int,
    blocks: Iterator[memoryview],
    snapshot_key: SnapshotKey,
) -> FileEntry:
    """Encrypt and write as `shard_writer.write_stream`: `num_bytes` in all, head first."""
    file = _EncryptedFile(name, rank, len(head), num_bytes, snapshot_key)
    passing = file.passing(head, blocks)
    tier.write(f"{name.folder}/{file.name}", passing, file.layout.stored_bytes)
    return file.entry(digest.digest(head))


class _EncryptedFile:
    def __init__(
        self,
        name: SnapshotName,
        rank: int,
        head_bytes: int,
        num_bytes: int,
        snapshot_key: SnapshotKey,
    ) -> None:
        self.name = names.shard_file_name(rank)
        self.layout = EncryptedLayout(head_bytes, num_bytes - head_bytes)
        self._sealer = Encryptor(
            snapshot_key.key, ChunkPosition(snapshot_key.run, str(name), self.name), self.layout
        )
        self._whole = digest.Running()
        self._behind = ""

    def entry(self, head_digest: str) -> FileEntry:
        """Return its entry, once all bytes have passed."""
        plain = Plain(self.layout.plain_bytes, head_digest)
        return FileEntry(
            name=self.name,
            num_bytes=self._whole.num_bytes,
            digest=self._whole.hexdigest(),
            header_digest=self._behind,
            sealed=True,
            plain=plain,
        )

    def blocks(
        self,
        data: memoryview,
        copied: Iterable[int],
        complete: threading.Event,
        head: Future[bytes],
        into: memoryview | None,
    ) -> Iterator[memoryview]:
        """Yield the encrypted blocks in order.

        Each stays in `into`, or is valid until `NUM_WRITTEN` more were requested.
        """
        copied, end_of_all = iter(copied), (address(data) or 0) + len(data)
        for behind in copied:  # training may wait for the copies, and encrypting takes its cores
            if behind >= end_of_all:
                break
        with SerialWorker(
            "trainckpt-copied"
        ) as copying:  # a thread of its own: its end must not wait for writes
            rest = copying.submit(lambda: deque(copied, 0))
            yield from self._body(data, complete, into)
            rest.result()  # raises if the save was abandoned meanwhile
        last = self._end(head.result())
        if into is not None:
            body_bytes = self.layout.body_bytes
            into[body_bytes:] = last
            last = into[body_bytes:]
        yield last

    def _body(
        self, data: memoryview, complete: threading.Event, into: memoryview | None
    ) -> Iterator[memoryview]:
        body = data[self.layout.head_bytes :]
        size = min(BLOCK_BYTES, len(body))
        buffers = direct_io.buffers(NUM_BUFFERS, size) if into is None else []
        waiting: deque[Future[memoryview]] = deque()
        with ThreadPoolExecutor(NUM_SEALERS, "trainckpt-seal") as sealers:
            for number, (at, end) in enumerate(_cuts(len(body), self.layout.chunk_bytes)):
                buffer = into[at:end] if into else buffers[number % NUM_BUFFERS][: end - at]
                waiting.append(sealers.submit(self._seal, body[:end], at, buffer))
                if len(waiting) == NUM_AHEAD:
                    yield waiting.popleft().result()
                if number == NUM_BUFFERS:  # the disk is busy, so cores are free for the head
                    complete.set()
            complete.set()
            while waiting:
                yield waiting.popleft().result()

    def digested(self, blocks: Iterable[memoryview]) -> Iterator[memoryview]:
        """Yield the blocks, digesting each while the consumer writes it."""
        with ThreadPoolExecutor(1, "trainckpt-digest") as digesting:
            for block in blocks:
                taken = digesting.submit(self._whole.update, block)
                yield block
                taken.result()

    def parts(self, blocks: Iterable[memoryview]) -> Iterator[tuple[int, memoryview]]:
        """Yield (offset in the file, block) and digest the blocks; they must stay valid."""
        at = 0
        for block in blocks:
            self._whole.update(block)
            yield at, block
            at += len(block)

    def _seal(self, body: memoryview, at: int, into: memoryview) -> memoryview:
        """Encrypt one block of the body.

        Each chunk's tag is overwritten by the next chunk. A tag past the block's end would land in
        a block of another thread, so that chunk goes through its own memory.
        """
        end, each = len(body), self.layout.chunk_bytes
        for first in range(at, end, each):
            last = min(first + each, end)
            fits = last + TAG_BYTES <= end
            room = last - first + TAG_BYTES
            target = into[first - at :][:room] if fits else memoryview(bytearray(room))
            self._sealer.encrypt(first // each, body[first:last], target)
            if not fits:
                copy_bytes(into[first - at : last - at], target[: last - first])
        return into

    def passing(self, head: bytes, blocks: Iterator[memoryview]) -> Iterator[memoryview]:
        """Yield encrypted blocks of a stream: its head comes first and is emitted last."""
        for block in self._passing(head, blocks):
            self._whole.update(block)
            yield block

    def _passing(self, head: bytes, blocks: Iterator[memoryview]) -> Iterator[memoryview]:
        layout, number, filled = self.layout, 0, 0
        plain = private_memory(min(layout.chunk_bytes, layout.body_bytes))
        room = min(BLOCK_BYTES, layout.body_bytes)
        sealed = private_memory(room + TAG_BYTES)
        used = 0
        next(blocks)  # the head
        for block in blocks:
            done = 0
            while done < len(block):
                size = layout.chunk(number).num_bytes
                step = min(len(block) - done, size - filled)
                copy_bytes(plain[filled : filled + step], block[done : done + step])
                done, filled = done + step, filled + step
                if filled < size:
                    continue
                self._sealer.encrypt(number, plain[:size], sealed[used : used + size + TAG_BYTES])
                number, filled, used = number + 1, 0, used + size
                if used + layout.chunk_bytes > room:
                    yield sealed[:used]
                    used = 0
        if used:
            yield sealed[:used]
        yield self._end(head)

    def _end(self, head: bytes) -> memoryview:
        layout, plain = self.layout, memoryview(head)
        found = memoryview(bytearray(layout.head_bytes + layout.tail_bytes))
        for number in range(layout.num_body_chunks, layout.num_chunks):
            chunk = layout.chunk(number)
            at, end = chunk.first_byte, chunk.first_byte + chunk.num_bytes
            self._sealer.encrypt(number, plain[at:end], found[at : end + TAG_BYTES])
        found[layout.head_bytes :] = self._sealer.tail()
        self._behind = digest.digest(found)
        return found


def _cuts(num_bytes: int, chunk_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield begin and end of the body's blocks.

    Small ones come first: the disk need not wait for a first block of `BLOCK_BYTES`.
    """
    at, size = 0, chunk_bytes
    while at < num_bytes:
        end = min(at + size, num_bytes)
        yield at, end
        at, size = end, min(2 * size, BLOCK_BYTES)

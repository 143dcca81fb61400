"""Save sealed: a rank's shard file, encrypted while it is written. The mirror of `opened`.

    wait      until all is copied, since training may wait for that
    encrypt   blocks of chunks, by two threads, from where the file lies in memory to one of a few
              buffers: that is all the memory it takes. Or to memory for all of it, where it stays:
              what other hosts are to keep
    write     several blocks at a time, while the next ones are encrypted
    digest    of what is written, meanwhile; it says nothing of what was encrypted

Everything is encrypted once: what fails is begun anew, with another key.
"""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

from trainckpt.encryption.sealed_file import TAG_BYTES, Layout, Place, Sealer
from trainckpt.format import digest, names
from trainckpt.format.files import FileEntry, Plain
from trainckpt.tiers import direct
from trainckpt.tiers.direct import address, copy, memory
from trainckpt.tiers.workers import InTurn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from concurrent.futures import Future

    from trainckpt.format.names import SnapshotName
    from trainckpt.snapshot.save import InMemory
    from trainckpt.tiers.base import Tier

BLOCK_BYTES = 4 << 20  # of one write: several chunks, one request to a disk
NUM_SEALERS = 2
NUM_AHEAD = 2  # blocks that are encrypted or waited for
NUM_WRITTEN = 4  # blocks on their way to a disk
NUM_BUFFERS = NUM_AHEAD + NUM_WRITTEN - 1


class Seal(NamedTuple):
    """With what a snapshot's files are encrypted.

    Attributes:
        run: Id of the run.
        key: The snapshot's.
    """

    run: str
    key: bytes


def stored_bytes(shard: InMemory) -> int:
    """Of a file in memory, once it is encrypted."""
    head_bytes = shard.header.header_bytes
    return Layout(head_bytes, len(shard.memory) - head_bytes).stored_bytes


def write_sealed(
    tier: Tier | None,
    name: SnapshotName,
    rank: int,
    shard: InMemory,
    copied: Iterable[int],
    seal: Seal,
    into: memoryview | None = None,
) -> FileEntry:
    """As `save.write_shard`, encrypted; what was written.

    Args:
        tier: None: it is written nowhere but to `into`.
        name, rank, shard, copied, seal: See there.
        into: `stored_bytes` of memory, where the encrypted file stays; None: it stays nowhere.
    """
    complete = threading.Event()

    def digest_head() -> bytes:
        complete.wait()
        return shard.head

    with InTurn("trainckpt-digest") as digesting:
        try:
            head = digesting.submit(digest_head)
            file = _SealedFile(name, rank, shard.header.header_bytes, len(shard.memory), seal)
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


def stream_sealed(
    tier: Tier,
    name: SnapshotName,
    rank: int,
    head: bytes,
    num_bytes: int,
    blocks: Callable[[], Iterator[memoryview]],
    seal: Seal,
) -> FileEntry:
    """As `save.write_stream`, encrypted: `num_bytes` in all, of which the head comes first."""
    file = _SealedFile(name, rank, len(head), num_bytes, seal)
    passing = file.passing(head, blocks())
    tier.write(f"{name.folder}/{file.name}", passing, file.layout.stored_bytes)
    return file.entry(digest.digest(head))


class _SealedFile:
    """One file on its way."""

    def __init__(
        self, name: SnapshotName, rank: int, head_bytes: int, num_bytes: int, seal: Seal
    ) -> None:
        self.name = names.shard_file_name(rank)
        self.layout = Layout(head_bytes, num_bytes - head_bytes)
        self._sealer = Sealer(seal.key, Place(seal.run, str(name), self.name), self.layout)
        self._whole = digest.Running()
        self._behind = ""

    def entry(self, head_digest: str) -> FileEntry:
        """What is known of it when all has passed."""
        plain = Plain(self.layout.plain_bytes, head_digest)
        return FileEntry(
            self.name, self._whole.num_bytes, self._whole.hexdigest(), self._behind, True, plain
        )

    def blocks(
        self,
        data: memoryview,
        copied: Iterable[int],
        complete: threading.Event,
        head: Future[bytes],
        into: memoryview | None,
    ) -> Iterator[memoryview]:
        """The file's blocks, in order; where they stay in `into`, or each until `NUM_WRITTEN` more
        were asked for."""
        copied, end_of_all = iter(copied), (address(data) or 0) + len(data)
        for behind in copied:  # training may wait for that, and to encrypt takes the cores it needs
            if behind >= end_of_all:
                break
        with InTurn("trainckpt-copied") as copying:  # its end must not wait for what is written
            rest = copying.submit(lambda: deque(copied, 0))
            yield from self._body(data, complete, into)
            rest.result()  # it may yet be abandoned
        last = self._end(head.result())
        if into is not None:
            body_bytes = self.layout.body_bytes
            into[body_bytes:] = last
            last = into[body_bytes:]
        yield last

    def _body(
        self, data: memoryview, complete: threading.Event, into: memoryview | None
    ) -> Iterator[memoryview]:
        """What is copied, encrypted; all but the head."""
        body = data[self.layout.head_bytes :]
        size = min(BLOCK_BYTES, len(body))
        buffers = direct.buffers(NUM_BUFFERS, size) if into is None else []
        waiting: deque[Future[memoryview]] = deque()
        with ThreadPoolExecutor(NUM_SEALERS, "trainckpt-seal") as sealers:
            for number, (at, end) in enumerate(_cuts(len(body), self.layout.chunk_bytes)):
                buffer = into[at:end] if into else buffers[number % NUM_BUFFERS][: end - at]
                waiting.append(sealers.submit(self._seal, body[:end], at, buffer))
                if len(waiting) == NUM_AHEAD:
                    yield waiting.popleft().result()
                if number == NUM_BUFFERS:  # the disk has work, so cores may be had for the head
                    complete.set()
            complete.set()
            while waiting:
                yield waiting.popleft().result()

    def digested(self, blocks: Iterable[memoryview]) -> Iterator[memoryview]:
        """The same blocks, each digested while whoever takes it writes it."""
        with ThreadPoolExecutor(1, "trainckpt-digest") as digesting:
            for block in blocks:
                taken = digesting.submit(self._whole.update, block)
                yield block
                taken.result()

    def parts(self, blocks: Iterable[memoryview]) -> Iterator[tuple[int, memoryview]]:
        """The same blocks, which stay, and where in the file each begins."""
        at = 0
        for block in self._whole.over(blocks):
            yield at, block
            at += len(block)

    def _seal(self, body: memoryview, at: int, into: memoryview) -> memoryview:
        """Encrypt one block of the body: all behind `at`.

        Each chunk's tag is written over by the next chunk. Where it would lie behind the block,
        which another thread encrypts, the chunk goes through memory of its own.
        """
        end, each = len(body), self.layout.chunk_bytes
        for first in range(at, end, each):
            last = min(first + each, end)
            fits = last + TAG_BYTES <= end
            room = last - first + TAG_BYTES
            target = into[first - at :][:room] if fits else memoryview(bytearray(room))
            self._sealer.seal(first // each, body[first:last], target)
            if not fits:
                copy(into[first - at : last - at], target[: last - first])
        return into

    def passing(self, head: bytes, blocks: Iterator[memoryview]) -> Iterator[memoryview]:
        """The blocks of a file that pass by in order, head first, encrypted, head last."""
        return self._whole.over(self._passing(head, blocks))

    def _passing(self, head: bytes, blocks: Iterator[memoryview]) -> Iterator[memoryview]:
        layout, number, filled = self.layout, 0, 0
        plain = memory(min(layout.chunk_bytes, layout.body_bytes))
        room = min(BLOCK_BYTES, layout.body_bytes)
        sealed = memory(room + TAG_BYTES)
        used = 0
        next(blocks)  # the head
        for block in blocks:
            done = 0
            while done < len(block):
                size = layout.chunk(number).num_bytes
                step = min(len(block) - done, size - filled)
                copy(plain[filled : filled + step], block[done : done + step])
                done, filled = done + step, filled + step
                if filled < size:
                    continue
                self._sealer.seal(number, plain[:size], sealed[used : used + size + TAG_BYTES])
                number, filled, used = number + 1, 0, used + size
                if used + layout.chunk_bytes > room:
                    yield sealed[:used]
                    used = 0
        if used:
            yield sealed[:used]
        yield self._end(head)

    def _end(self, head: bytes) -> memoryview:
        """Head, tags and footer."""
        layout, plain = self.layout, memoryview(head)
        found = memoryview(bytearray(layout.head_bytes + layout.tail_bytes))
        for number in range(layout.num_body_chunks, layout.num_chunks):
            chunk = layout.chunk(number)
            at, end = chunk.first_byte, chunk.first_byte + chunk.num_bytes
            self._sealer.seal(number, plain[at:end], found[at : end + TAG_BYTES])
        found[layout.head_bytes :] = self._sealer.tail()
        self._behind = digest.digest(found)
        return found


def _cuts(num_bytes: int, chunk_bytes: int) -> Iterator[tuple[int, int]]:
    """Where the body's blocks begin and end.

    Small ones first: the disk need not wait for the first of `BLOCK_BYTES`.
    """
    at, size = 0, chunk_bytes
    while at < num_bytes:
        end = min(at + size, num_bytes)
        yield at, end
        at, size = end, min(2 * size, BLOCK_BYTES)

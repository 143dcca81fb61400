"""Write one rank's shard file. The mirror of `restore`.

Write order (docs/format.md): 1. shard files, every rank; 2. receipts; 3. manifest; 4. commit.
This module does 1 and returns the entry for 2. Nothing refers to the file yet, so a crash leaves
garbage.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from trainckpt.errors import SaveFailed, UnusableSnapshot
from trainckpt.format import digest, names
from trainckpt.format.manifest import FileEntry
from trainckpt.snapshot.encrypted_writer import stream_encrypted, write_encrypted
from trainckpt.storage.direct_io import address
from trainckpt.storage.worker_pool import SerialWorker

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from trainckpt.format.names import SnapshotName
    from trainckpt.format.shard_file import ShardHeader
    from trainckpt.snapshot.encrypted_writer import SnapshotKey
    from trainckpt.storage.base import Tier

AT_ONCE_BYTES = 8 << 20  # whole pages: a part is written while more is copied


class InMemory(Protocol):
    """A shard file in memory.

    Attributes:
        header: Laid out.
        memory: The file's exact bytes except the head. Best aligned to a page.
    """

    header: ShardHeader
    memory: memoryview

    @property
    def top(self) -> memoryview:
        """Return the memory of the head, valid once `head` was read."""

    @property
    def head(self) -> bytes:
        """Return the file's first bytes. Call it on a thread: it digests missing regions."""

    @property
    def digests(self) -> Mapping[str, str]:
        """Return the digests known already, by region key."""


def write_shard(
    tier: Tier | None,
    name: SnapshotName,
    rank: int,
    shard: InMemory,
    *,
    copied: Iterable[int] = (),
    snapshot_key: SnapshotKey | None = None,
    into: memoryview | None = None,
) -> FileEntry:
    """Write one shard file from memory into the snapshot's folder; durable on return.

    Data is written as it is copied. Then a thread digests it by block for the head, written last.

    Args:
        tier, name, rank: The destination; tier None: only encrypt the file to `into`.
        shard: Complete once `copied` has ended.
        copied: Yields addresses in its memory; all bytes below are complete.
        snapshot_key: The key to encrypt with; None: not encrypted.
        into: Memory to keep the encrypted file in; None: do not keep it.

    Raises:
        SaveFailed: the run's record is gone from the tier (its directory vanished).
        TierUnavailable: the tier refused; nothing refers to the bytes written.
    """
    if snapshot_key is not None:
        with _in_place(tier):
            return write_encrypted(
                tier, name, rank, shard, copied=copied, snapshot_key=snapshot_key, into=into
            )
    assert tier is not None
    file_name, head_bytes = names.shard_file_name(rank), shard.header.header_bytes
    num_bytes = len(shard.memory)
    complete = threading.Event()

    def parts() -> Iterator[tuple[int, memoryview]]:
        at, begin = head_bytes, address(shard.memory) or 0
        for behind in copied:
            end = at + (behind - begin - at) // AT_ONCE_BYTES * AT_ONCE_BYTES
            if end > at:
                yield at, shard.memory[at:end]
                at = end
        complete.set()
        if num_bytes > at:
            yield at, shard.memory[at:]
        head.result()  # `top` holds the head now
        yield 0, shard.top

    def digest_head() -> str:
        complete.wait()
        return digest.digest(shard.head)

    with _in_place(tier), SerialWorker("trainckpt-digest") as digesting:
        try:
            head = digesting.submit(digest_head)
            tier.write_parts(f"{name.folder}/{file_name}", num_bytes, parts())
        finally:
            complete.set()  # also after an error, so the digest thread ends
        return FileEntry(file_name, num_bytes, "", head.result())


def write_stream(
    tier: Tier,
    name: SnapshotName,
    rank: int,
    *,
    head: bytes,
    num_bytes: int,
    blocks: Iterator[memoryview],
    snapshot_key: SnapshotKey | None = None,
) -> FileEntry:
    """Write a file from a stream of blocks, each valid only until the next; as `write_shard`."""
    with _in_place(tier):
        if snapshot_key is not None:
            return stream_encrypted(
                tier,
                name,
                rank,
                head=head,
                num_bytes=num_bytes,
                blocks=blocks,
                snapshot_key=snapshot_key,
            )
        file_name = names.shard_file_name(rank)
        tier.write(f"{name.folder}/{file_name}", blocks)
    return FileEntry(file_name, num_bytes, "", digest.digest(head))


@contextmanager
def _in_place(tier: Tier | None) -> Iterator[None]:
    """Check before a write that the run's record exists; translate errors of a vanished folder."""
    if tier is not None and tier.size(names.RUN_RECORD) is None:
        raise SaveFailed(
            f"the run directory {tier.url} is gone", hint="restore it, or stop the run"
        )
    try:
        yield
    except UnusableSnapshot as error:  # the folder vanished during the write
        raise SaveFailed(str(error)) from error

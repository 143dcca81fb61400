"""Write one rank's shard file and report it. The mirror of `restore`.

Write order (docs/format.md): 1. shard files, every rank; 2. receipts; 3. manifest; 4. commit.
This module does 1 and makes the receipt for 2. Nothing refers to the file yet, so a crash leaves
garbage.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from trainckpt.errors import SaveFailed, UnusableSnapshot
from trainckpt.format import digest, names
from trainckpt.format.manifest import FileEntry, Plain
from trainckpt.snapshot.encrypted_writer import stream_sealed, write_sealed
from trainckpt.storage.file_io import address
from trainckpt.storage.worker_pool import SerialWorker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from trainckpt.format.names import SnapshotName
    from trainckpt.format.shard_file import ShardHeader
    from trainckpt.snapshot.encrypted_writer import SnapshotKey
    from trainckpt.storage.base import Tier

AT_ONCE_BYTES = 8 << 20  # whole pages: a part is written while more is copied


@dataclass(frozen=True)
class Receipt:
    """A rank's report after its shard file reached stable storage.

    Attributes:
        file: Its file.
        reached: Older files it refers to.
    """

    file: FileEntry
    reached: tuple[FileEntry, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON, to send between ranks."""
        return {"file": _to_json(self.file), "reached": [_to_json(file) for file in self.reached]}

    @classmethod
    def from_json(cls, data: Any) -> Receipt:
        """Return the receipt from `to_json`."""
        return cls(_from_json(data["file"]), tuple(_from_json(each) for each in data["reached"]))


def _to_json(file: FileEntry) -> list[Any]:
    plain = [file.plain.num_bytes, file.plain.header_digest] if file.plain else []
    return [file.name, file.num_bytes, file.digest, file.header_digest, *plain]


def _from_json(data: list[Any]) -> FileEntry:
    name, num_bytes, found, header, *rest = data
    plain = Plain(*rest) if rest else None
    return FileEntry(
        name=name,
        num_bytes=num_bytes,
        digest=found,
        header_digest=header,
        sealed=plain is not None,
        plain=plain,
    )


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
    tier: Tier,
    name: SnapshotName,
    rank: int,
    shard: InMemory,
    *,
    copied: Iterable[int] = (),
    seal: SnapshotKey | None = None,
    into: memoryview | None = None,
) -> Receipt:
    """Write one shard file from memory into the snapshot's folder; durable on return.

    Data is written as it is copied. Then a thread digests it by block for the head, written last.

    Args:
        tier, name, rank: The destination.
        shard: Complete once `copied` has ended.
        copied: Yields addresses in its memory; all bytes below are complete.
        seal: The key to encrypt with; None: not encrypted.
        into: Memory to keep the encrypted file in; None: do not keep it.

    Raises:
        SaveFailed: the run's record is gone from the tier (its directory vanished).
        TierUnavailable: the tier refused; nothing refers to the bytes written.
    """
    if seal is not None:
        with _in_place(tier):
            return Receipt(
                write_sealed(tier, name, rank, shard, copied=copied, seal=seal, into=into)
            )
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
        entry = FileEntry(file_name, num_bytes, "", head.result())
    return Receipt(entry)


def only_sealed(
    name: SnapshotName,
    rank: int,
    shard: InMemory,
    *,
    copied: Iterable[int],
    seal: SnapshotKey,
    into: memoryview,
) -> Receipt:
    """Encrypt a file into memory without writing it; otherwise as `write_shard`."""
    return Receipt(write_sealed(None, name, rank, shard, copied=copied, seal=seal, into=into))


def only_digested(rank: int, shard: InMemory) -> Receipt:
    """Return the receipt of a file that stays in memory and is not written."""
    head = digest.digest(shard.head)
    return Receipt(FileEntry(names.shard_file_name(rank), len(shard.memory), "", head))


def write_stream(
    tier: Tier,
    name: SnapshotName,
    rank: int,
    *,
    head: bytes,
    num_bytes: int,
    blocks: Callable[[], Iterator[memoryview]],
    seal: SnapshotKey | None = None,
) -> Receipt:
    """Write a file from a stream of blocks, each valid only until the next; as `write_shard`."""
    if seal is not None:
        with _in_place(tier):
            return Receipt(
                stream_sealed(
                    tier, name, rank, head=head, num_bytes=num_bytes, blocks=blocks, seal=seal
                )
            )
    file_name = names.shard_file_name(rank)
    with _in_place(tier):
        tier.write(f"{name.folder}/{file_name}", blocks())
    return Receipt(FileEntry(file_name, num_bytes, "", digest.digest(head)))


@contextmanager
def _in_place(tier: Tier) -> Iterator[None]:
    """Check before a write that the run's record exists; translate errors of a vanished folder."""
    if tier.size(names.RUN_RECORD) is None:
        raise SaveFailed(
            f"the run directory {tier.url} is gone", hint="restore it, or stop the run"
        )
    try:
        yield
    except UnusableSnapshot as error:  # the folder vanished during the write
        raise SaveFailed(str(error)) from error

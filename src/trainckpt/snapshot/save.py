"""Save: write one rank's shard file and report it. The mirror of `restore`.

Write order (docs/format.md): 1. shard files, every rank; 2. receipts; 3. manifest; 4. commit.
This is 1, and the receipt of 2. Nothing refers to the file yet; a crash leaves garbage.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from trainckpt.errors import SaveFailed, UnusableSnapshot
from trainckpt.format import digest, names
from trainckpt.format.files import FileEntry, Plain
from trainckpt.snapshot.save_sealed import stream_sealed, write_sealed
from trainckpt.tiers.direct import address
from trainckpt.tiers.workers import InTurn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from trainckpt.format.names import SnapshotName
    from trainckpt.format.shard_file import ShardHeader
    from trainckpt.snapshot.save_sealed import Seal
    from trainckpt.tiers.base import Tier

AT_ONCE_BYTES = 8 << 20  # whole pages: what is handed on while more is copied


@dataclass(frozen=True)
class Receipt:
    """What a rank reports once its shard file is on stable storage.

    Attributes:
        file: Its own.
        reached: Older ones that it refers to.
    """

    file: FileEntry
    reached: tuple[FileEntry, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As it travels between ranks."""
        return {"file": _to_json(self.file), "reached": [_to_json(file) for file in self.reached]}

    @classmethod
    def from_json(cls, data: Any) -> Receipt:
        """The inverse of `to_json`."""
        return cls(_from_json(data["file"]), tuple(_from_json(each) for each in data["reached"]))


def _to_json(file: FileEntry) -> list[Any]:
    plain = [file.plain.num_bytes, file.plain.header_digest] if file.plain else []
    return [file.name, file.num_bytes, file.digest, file.header_digest, *plain]


def _from_json(data: list[Any]) -> FileEntry:
    name, num_bytes, found, header, *rest = data
    plain = Plain(*rest) if rest else None
    return FileEntry(name, num_bytes, found, header, plain is not None, plain)


class InMemory(Protocol):
    """A shard file in memory.

    Attributes:
        header: Laid out.
        memory: The file's exact bytes, but for the head. At best it begins at a page.
    """

    header: ShardHeader
    memory: memoryview

    @property
    def top(self) -> memoryview:
        """Where the head stands once it was asked for."""

    @property
    def head(self) -> bytes:
        """The file's first bytes. Asked for on a thread: it digests what was not yet."""

    @property
    def digests(self) -> Mapping[str, str]:
        """Of regions that were digested already, by key."""


def write_shard(
    tier: Tier,
    name: SnapshotName,
    rank: int,
    shard: InMemory,
    copied: Iterable[int] = (),
    seal: Seal | None = None,
    into: memoryview | None = None,
) -> Receipt:
    """Write one shard file from memory into the snapshot's folder; durable when it returns.

    The data is on its way as soon as it is copied. Then a thread digests it by block for the head,
    which comes last.

    Args:
        tier, name, rank: Where to.
        shard: Complete once `copied` has ended.
        copied: Gives addresses in its memory below which it is complete.
        seal: It is encrypted.
        into: Memory where the encrypted file stays, if it is to stay.

    Raises:
        SaveFailed: the run's record is gone from the tier (its directory vanished).
        TierUnavailable: the tier refused; nothing refers to what was written.
    """
    if seal is not None:
        with _in_place(tier):
            return Receipt(write_sealed(tier, name, rank, shard, copied, seal, into))
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
        head.result()  # stands there now
        yield 0, shard.top

    def digest_head() -> str:
        complete.wait()
        return digest.digest(shard.head)

    with _in_place(tier), InTurn("trainckpt-digest") as digesting:
        try:
            head = digesting.submit(digest_head)
            tier.write_parts(f"{name.folder}/{file_name}", num_bytes, parts())
        finally:
            complete.set()  # whatever became of it, nobody waits any more
        entry = FileEntry(file_name, num_bytes, "", head.result())
    return Receipt(entry)


def only_sealed(
    name: SnapshotName,
    rank: int,
    shard: InMemory,
    copied: Iterable[int],
    seal: Seal,
    into: memoryview,
) -> Receipt:
    """As `write_shard`, of a file that is written nowhere: encrypted, it stays in memory."""
    return Receipt(write_sealed(None, name, rank, shard, copied, seal, into))


def only_digested(rank: int, shard: InMemory) -> Receipt:
    """The receipt of a file that is written nowhere: it stays in memory."""
    head = digest.digest(shard.head)
    return Receipt(FileEntry(names.shard_file_name(rank), len(shard.memory), "", head))


def write_stream(
    tier: Tier,
    name: SnapshotName,
    rank: int,
    head: bytes,
    num_bytes: int,
    blocks: Callable[[], Iterator[memoryview]],
    seal: Seal | None = None,
) -> Receipt:
    """As `write_shard`, of a file whose bytes pass by in order, each block only for a moment."""
    if seal is not None:
        with _in_place(tier):
            return Receipt(stream_sealed(tier, name, rank, head, num_bytes, blocks, seal))
    file_name = names.shard_file_name(rank)
    with _in_place(tier):
        tier.write(f"{name.folder}/{file_name}", blocks())
    return Receipt(FileEntry(file_name, num_bytes, "", digest.digest(head)))


@contextmanager
def _in_place(tier: Tier) -> Iterator[None]:
    """Around a write: the run's place must be there, before and after."""
    if tier.size(names.RUN_RECORD) is None:
        raise SaveFailed(f"the run's place {tier.url} is gone", hint="restore it, or stop the run")
    try:
        yield
    except UnusableSnapshot as error:  # a folder vanished under us
        raise SaveFailed(str(error)) from error

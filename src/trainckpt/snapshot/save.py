"""Save: write one rank's shard file and report it. The mirror of `restore`.

Write order (docs/format.md): 1. shard files, every rank; 2. receipts; 3. manifest; 4. commit.
This is 1, and the receipt of 2. Nothing refers to the file yet; a crash leaves garbage.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainckpt.errors import SaveFailed, UnusableSnapshot
from trainckpt.format import digest, names
from trainckpt.format.manifest import FileEntry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from trainckpt.format.names import SnapshotName
    from trainckpt.tiers.base import Tier


@dataclass(frozen=True)
class Receipt:
    """What a rank reports once its shard file is on stable storage."""

    file: FileEntry

    def to_json(self) -> dict[str, Any]:
        """As it travels between ranks."""
        f = self.file
        return {"name": f.name, "bytes": f.num_bytes, "digest": f.digest, "header": f.header_digest}

    @classmethod
    def from_json(cls, data: Any) -> Receipt:
        """The inverse of `to_json`."""
        return cls(FileEntry(data["name"], data["bytes"], data["digest"], data["header"]))


def write_shard(
    tier: Tier,
    name: SnapshotName,
    rank: int,
    head: bytes,
    blocks: Callable[[], Iterator[memoryview]],
) -> Receipt:
    """Write one shard file into the snapshot's folder; durable when it returns.

    Raises:
        SaveFailed: the run's record is gone from the tier (its directory vanished).
        TierUnavailable: the tier refused; nothing refers to what was written.
    """
    if tier.size(names.RUN_RECORD) is None:
        raise SaveFailed(f"the run's place {tier.url} is gone", hint="restore it, or stop the run")
    file_name = names.shard_file_name(rank)
    whole = digest.Running()
    try:
        tier.write(f"{name.folder}/{file_name}", whole.over(blocks()))
    except UnusableSnapshot as error:  # a folder vanished under us
        raise SaveFailed(str(error)) from error
    return Receipt(FileEntry(file_name, whole.num_bytes, whole.hexdigest(), digest.digest(head)))

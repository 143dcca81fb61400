"""The manifest: names every shard file of a snapshot with length and digests.

It is canonical JSON that carries the digest of itself, so a flipped bit in it is found too.
It grows with files plus tensors, never with their product: which file holds which part of a
tensor stands in each shard file's own header, which `header_digest` covers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trainckpt.errors import UnusableSnapshot
from trainckpt.format import digest, names, strict, versions
from trainckpt.format.cursor import Cursor

MAX_BYTES = 256_000_000
SPLIT = "split"  # one copy, its regions spread over the files
RANK = "rank"  # every rank has its own, in its own file


@dataclass(frozen=True)
class FileEntry:
    """One shard file: its name, length, and the digests of the whole and of its header."""

    name: str
    num_bytes: int
    digest: str
    header_digest: str


@dataclass(frozen=True)
class TensorEntry:
    """One tensor: safetensors type, whole shape, and `SPLIT` or `RANK`."""

    dtype: str
    shape: tuple[int, ...]
    placement: str


@dataclass(frozen=True)
class Manifest:
    """A committed snapshot, as a value.

    Attributes:
        run: Id of the run; a manifest of another run is refused.
        name: Attempt, sequence, step and micro-batch.
        parent: The snapshot that the attempt began from, or None.
        cursor: Rank 0's.
        world: Ranks; file i is written by rank i.
        files: One a rank, in rank order.
        tensors: By name.
        created: Seconds since the epoch, for people; nothing is decided by it.
        kind: "snapshot".
        tags: Names the user gave; a tagged snapshot is never pruned.
        reason: Why it was taken ("every 100 steps", "SIGTERM", "final").
        writer: What wrote it, such as "trainckpt 0.1.0".
        fingerprint: Versions, devices, determinism settings, as `resume` compares them.
    """

    run: str
    name: names.SnapshotName
    parent: str | None
    cursor: Cursor
    world: int
    files: tuple[FileEntry, ...]
    tensors: dict[str, TensorEntry]
    created: float
    kind: str = "snapshot"
    tags: tuple[str, ...] = ()
    reason: str = ""
    fingerprint: dict[str, Any] = field(default_factory=dict)
    writer: str = ""

    @property
    def num_bytes(self) -> int:
        """Bytes of all shard files."""
        return sum(file.num_bytes for file in self.files)


def dump(manifest: Manifest) -> bytes:
    """Canonical JSON, with the digest of everything else in it under `digest`."""
    body = {
        "format": versions.WRITTEN,
        "algorithm": digest.ALGORITHM,
        "kind": manifest.kind,
        "run": manifest.run,
        "id": manifest.name.id,
        "attempt": manifest.name.attempt,
        "sequence": manifest.name.sequence,
        "parent": manifest.parent,
        "cursor": manifest.cursor.to_json(),
        "world": manifest.world,
        "files": [
            {"name": f.name, "bytes": f.num_bytes, "digest": f.digest, "header": f.header_digest}
            for f in manifest.files
        ],
        "tensors": {
            name: [entry.dtype, list(entry.shape), entry.placement]
            for name, entry in manifest.tensors.items()
        },
        "created": manifest.created,
        "tags": list(manifest.tags),
        "reason": manifest.reason,
        "fingerprint": manifest.fingerprint,
        "writer": manifest.writer,
    }
    return strict.sealed(body)


def load(data: bytes, what: str) -> Manifest:
    """Read a manifest back; raises `UnusableSnapshot` for anything `dump` would not write."""
    body = strict.parse(data, what, max_bytes=MAX_BYTES)
    if not isinstance(body, dict):
        raise UnusableSnapshot(f"{what} is not a manifest")
    versions.check_version(body.get("format"), what)
    body = strict.unsealed(body, what)
    cursor = Cursor.from_json(body.get("cursor"))
    files = tuple(_file(entry, what) for entry in strict.field(body, "files", list, what))
    tensors = {
        name: _tensor(name, entry, what)
        for name, entry in strict.field(body, "tensors", dict, what).items()
    }
    parent = body.get("parent")
    tags = strict.field(body, "tags", list, what)
    manifest = Manifest(
        run=strict.field(body, "run", str, what),
        name=names.SnapshotName(
            strict.count(body, "attempt", what),
            strict.count(body, "sequence", what),
            cursor.step,
            cursor.micro,
        ),
        parent=parent if isinstance(parent, str) else None,
        cursor=cursor,
        world=strict.count(body, "world", what),
        files=files,
        tensors=tensors,
        created=float(strict.field(body, "created", (float, int), what)),
        kind=strict.field(body, "kind", str, what),
        tags=tuple(str(tag) for tag in tags),
        reason=strict.field(body, "reason", str, what),
        fingerprint=strict.field(body, "fingerprint", dict, what),
        writer=str(body.get("writer", "")),
    )
    if manifest.world != len(files) or len({f.name for f in files}) != len(files):
        raise UnusableSnapshot(f"{what} names {len(files)} files for {manifest.world} ranks")
    return manifest


def _file(entry: Any, what: str) -> FileEntry:
    found = FileEntry(
        names.check_file_name(strict.field(entry, "name", str, what)),
        strict.count(entry, "bytes", what),
        strict.field(entry, "digest", str, what),
        strict.field(entry, "header", str, what),
    )
    if not (digest.is_digest(found.digest) and digest.is_digest(found.header_digest)):
        raise UnusableSnapshot(f"{what}: {found.name} has no digest")
    return found


def _tensor(name: str, entry: Any, what: str) -> TensorEntry:
    if (
        not isinstance(entry, list)
        or len(entry) != 3
        or not isinstance(entry[0], str)
        or entry[2] not in (SPLIT, RANK)
    ):
        raise UnusableSnapshot(f"{what}: {name[:100]} has no readable entry")
    return TensorEntry(entry[0], strict.counts(entry[1], what), str(entry[2]))

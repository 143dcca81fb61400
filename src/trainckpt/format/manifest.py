"""Read and write the manifest, which names a snapshot's shard files with lengths and digests.

It is canonical JSON that carries the digest of itself, so a flipped bit in it is found too. It
grows with files plus tensors, never with their product. A tensor's layout gives the file of each
part; the file's own header, covered by `header_digest`, gives the offset.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING, Any

from trainckpt.errors import UnusableSnapshot
from trainckpt.format import digest, encryption, exactness, json_io, names, versions
from trainckpt.format.cursor import Cursor
from trainckpt.format.files import FileEntry, Files, parse_file, parse_files
from trainckpt.format.layout import Layout, replicated
from trainckpt.format.shard_file import ITEM_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainckpt.format.encryption import Encryption

MAX_BYTES = 256_000_000
LATEST_S = 2.5e11  # the year 9892: the limit of calendars
SPLIT = "split"  # one copy, its regions spread over the files
RANK = "rank"  # every rank has its own, in its own file


@dataclass(frozen=True)
class TensorEntry:
    """One tensor: safetensors type, whole shape, and `SPLIT` or `RANK`.

    `layout`: the ranks it is split over; None if it is each rank's own.
    """

    dtype: str
    shape: tuple[int, ...]
    placement: str
    layout: Layout | None = None

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the whole tensor."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Manifest:
    """A committed snapshot, as a value.

    Attributes:
        run: Id of the run; a manifest of another run is refused.
        name: Attempt, sequence, step and micro-batch.
        parent: The snapshot the attempt began from, or None.
        cursor: Rank 0's.
        window: The cursor at the start of the open window; another layout resumes from there.
        world: Ranks; file i is written by rank i.
        files: One a rank, in rank order.
        tensors: By name.
        created: Seconds since the epoch, for people; no decision uses it.
        kind: "snapshot".
        tags: Names from the user; a tagged snapshot is never pruned.
        reason: Why it was taken ("every 100 steps", "SIGTERM", "final").
        writer: The program, such as "trainckpt 0.1.0".
        fingerprint: Versions, devices, determinism settings, as `resume` compares them.
        reached: Older snapshots' shard files with regions of this one, named as
            `names.reached_file` reads them.
        encryption: Wrapped keys and the encrypted part; None: not encrypted.
        lost: Ranks that had died with their own state; another rank's stands in for it.
        carried: Gradients from before its window may have counted, and are missing.
    """

    run: str
    name: names.SnapshotName
    parent: str | None
    cursor: Cursor
    world: int
    files: Sequence[FileEntry]
    tensors: dict[str, TensorEntry]
    created: float
    kind: str = "snapshot"
    tags: tuple[str, ...] = ()
    reason: str = ""
    fingerprint: dict[str, Any] = field(default_factory=dict)
    writer: str = ""
    window: Cursor | None = None
    reached: Sequence[FileEntry] = ()
    encryption: Encryption | None = None
    lost: tuple[int, ...] = ()
    carried: bool = False

    @property
    def not_bitwise(self) -> list[str]:
        """Return why no resume from it can be bitwise, one sentence each."""
        return exactness.reasons(self.lost, carried=self.carried)

    @property
    def is_locked(self) -> bool:
        """Return True if it is encrypted and not yet decrypted (`snapshot.decrypting_tier`)."""
        return self.encryption is not None and Files.of(self.files).plain is None

    @property
    def num_bytes(self) -> int:
        """Return the bytes of its own shard files."""
        return sum(Files.of(self.files).sizes)

    @property
    def reached_bytes(self) -> int:
        """Return the bytes of the older files it refers to."""
        return sum(file.num_bytes for file in self.reached)


def dump(manifest: Manifest) -> bytes:
    """Return canonical JSON, with the digest of everything else in it under `digest`."""
    body = _body(manifest)
    if manifest.encryption is not None:
        body["encryption"] = manifest.encryption.to_json()
    return json_io.sealed(body)


def bound(manifest: Manifest) -> bytes:
    """Return the bytes the encrypted part authenticates: the manifest without `encryption`."""
    return json_io.canonical(_body(manifest))


def _body(manifest: Manifest) -> dict[str, Any]:
    files = Files.of(manifest.files)
    reached = Files.of(sorted(manifest.reached, key=lambda file: file.name))
    whole = bool(files.digests) and bool(reached.digests or not reached)
    if manifest.encryption is not None and not whole:
        raise ValueError(f"{manifest.name} names encrypted files without digests")
    used = (entry.layout for entry in manifest.tensors.values() if entry.layout)
    layouts = {layout: number for number, layout in enumerate(dict.fromkeys(used))}
    body = {
        "format": versions.WRITTEN if whole else versions.BY_HEADS,
        "algorithm": digest.ALGORITHM,
        "kind": manifest.kind,
        "run": manifest.run,
        "id": manifest.name.id,
        "attempt": manifest.name.attempt,
        "sequence": manifest.name.sequence,
        "parent": manifest.parent,
        "cursor": manifest.cursor.to_json(),
        "world": manifest.world,
        "window": manifest.window.to_json() if manifest.window else None,
        "files": files.to_json(whole=whole),
        "layouts": [layout.to_json() for layout in layouts],
        "tensors": {
            name: [entry.dtype, list(entry.shape), layouts[entry.layout] if entry.layout else RANK]
            for name, entry in manifest.tensors.items()
        },
        "created": manifest.created,
        "tags": list(manifest.tags),
        "reason": manifest.reason,
        "fingerprint": manifest.fingerprint,
        "writer": manifest.writer,
    }
    if manifest.lost:
        body["lost"] = list(manifest.lost)
    if manifest.carried:
        body["carried"] = True
    if manifest.reached:
        body["format"] = versions.WITH_REFERENCES if whole else versions.BY_HEADS
        body["reached"] = {"names": reached.names, **reached.to_json(whole=whole)}
    if manifest.encryption is not None:
        body["format"] = versions.ENCRYPTED
    return body


def load(data: bytes, what: str) -> Manifest:
    """Parse a manifest; raise `UnusableSnapshot` for anything `dump` would not write."""
    body = json_io.parse(data, what, max_bytes=MAX_BYTES)
    if not isinstance(body, dict):
        raise UnusableSnapshot(f"{what} is not a manifest")
    versions.check_version(body.get("format"), what)
    body = json_io.unsealed(body, what)
    cursor = Cursor.from_json(body.get("cursor"))
    window = body.get("window")
    world, created = json_io.count(body, "world", what), _created(body, what)
    files = _files(body, world, what)
    tensors = _tensors(body, world, what)
    parent = body.get("parent")
    tags = json_io.field(body, "tags", list, what)
    manifest = Manifest(
        run=json_io.field(body, "run", str, what),
        name=names.SnapshotName(
            json_io.count(body, "attempt", what),
            json_io.count(body, "sequence", what),
            cursor.step,
            cursor.micro,
        ),
        parent=parent if isinstance(parent, str) else None,
        cursor=cursor,
        world=world,
        files=files,
        tensors=tensors,
        created=created,
        kind=json_io.field(body, "kind", str, what),
        tags=tuple(str(tag) for tag in tags),
        reason=json_io.field(body, "reason", str, what),
        fingerprint=json_io.field(body, "fingerprint", dict, what),
        writer=str(body.get("writer", "")),
        window=Cursor.from_json(window) if window is not None else None,
        reached=_reached(body, what),
        lost=exactness.parse_lost(body, world, what),
        carried=body.get("carried") is True,
    )
    if body["format"] == versions.ENCRYPTED:
        manifest = _encrypted(manifest, body, what)
    if any(names.reached_file(file.name)[0] >= manifest.name for file in manifest.reached):
        raise UnusableSnapshot(f"{what} refers to files that are not older than it is")
    if world != len(files) or not world:
        raise UnusableSnapshot(f"{what} names {len(files)} files for {world} ranks")
    return manifest


def _encrypted(manifest: Manifest, body: dict[str, Any], what: str) -> Manifest:
    """Mark all files as encrypted, its own and the referenced ones, and add the keys."""
    found = encryption.parse(body.get("encryption"), what)
    folders = {names.reached_file(file.name)[0] for file in manifest.reached}
    if found.keys.keys() != {str(name) for name in (manifest.name, *folders)}:
        raise UnusableSnapshot(f"{what} has keys of other snapshots than it reaches")
    files = Files.of(manifest.files)
    files.sealed = True
    reached = tuple(replace(file, sealed=True) for file in manifest.reached)
    return replace(manifest, files=files, reached=reached, encryption=found)


def _created(body: dict[str, Any], what: str) -> float:
    found = json_io.field(body, "created", (float, int), what)
    if not abs(found) < LATEST_S:
        raise UnusableSnapshot(f"{what}: {str(found)[:60]} is no time")
    return float(found)


def _files(body: dict[str, Any], world: int, what: str) -> Files:
    if body["format"] == 1:
        listed = [parse_file(entry, what) for entry in json_io.field(body, "files", list, what)]
        if len({file.name for file in listed}) != len(listed):
            raise UnusableSnapshot(f"{what} names a file twice")
        return Files.of(listed)
    return _columns(body, json_io.field(body, "files", dict, what), world, what)


def _reached(body: dict[str, Any], what: str) -> Sequence[FileEntry]:
    none = body["format"] >= versions.ENCRYPTED and "reached" not in body
    if none or body["format"] < versions.WITH_REFERENCES:
        return ()
    columns = json_io.field(body, "reached", dict, what)
    listed = json_io.field(columns, "names", list, what)
    for path in listed:
        names.reached_file(path)
    if len(set(listed)) != len(listed):
        raise UnusableSnapshot(f"{what} refers to a file twice")
    found = _columns(body, columns, len(listed), what)
    found.names = listed
    return tuple(found)


def _columns(body: dict[str, Any], columns: dict[str, Any], number: int, what: str) -> Files:
    return parse_files(columns, number, what, whole=body["format"] != versions.BY_HEADS)


def _tensors(body: dict[str, Any], world: int, what: str) -> dict[str, TensorEntry]:
    if body["format"] == 1:
        places: dict[Any, Layout | None] = {SPLIT: replicated(world), RANK: None}
    else:
        listed = json_io.field(body, "layouts", list, what)
        places = {i: Layout.from_json(data, world, what) for i, data in enumerate(listed)}
        places[RANK] = None
    return {
        name: _tensor(name, entry, places, what)
        for name, entry in json_io.field(body, "tensors", dict, what).items()
    }


def _tensor(name: str, entry: Any, places: dict[Any, Layout | None], what: str) -> TensorEntry:
    if (
        not isinstance(entry, list)
        or len(entry) != 3
        or type(entry[2]) not in (int, str)
        or entry[2] not in places
        or not isinstance(entry[0], str)
        or entry[0] not in ITEM_BYTES
    ):
        raise UnusableSnapshot(f"{what}: {name[:100]} has no readable entry")
    layout, shape = places[entry[2]], json_io.counts(entry[1], what)
    if layout is not None and any(d is not None and d >= len(shape) for d in layout.dims):
        raise UnusableSnapshot(f"{what}: {name[:100]} has no dimension that its layout divides")
    return TensorEntry(entry[0], shape, SPLIT if layout else RANK, layout)

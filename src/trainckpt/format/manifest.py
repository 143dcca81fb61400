"""Read and write the manifest, which names a snapshot's shard files with lengths and digests.

It is canonical JSON that carries the digest of itself, so a flipped bit in it is found too. It
grows with files plus tensors, never with their product. A tensor's layout gives the file of each
part; the file's own header, covered by `header_digest`, gives the offset.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import astuple, dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from trainckpt.errors import UnusableSnapshot
from trainckpt.format import digest, exactness, json_io, names
from trainckpt.format.cursor import Cursor
from trainckpt.format.layout import Layout, replicated
from trainckpt.format.names import SnapshotName
from trainckpt.format.shard_file import ITEM_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


# ---- the list of files: length and digests of each
#
# In JSON they are columns, since there may be thousands.


@dataclass(frozen=True)
class Plain:
    """A file before encryption: its length, and the digest of its header."""

    num_bytes: int
    header_digest: str


@dataclass(frozen=True)
class FileEntry:
    """One shard file: name, length and digests. `format.digest_check` compares them.

    Attributes:
        digest: Of the whole file, if encrypted or in a manifest before version 5. Else "": the
            head has the digests of everything behind it, so its own digest covers the file.
        header_digest: Of the file's head.
        sealed: The file is encrypted: length and digests are of the stored bytes, and
            `header_digest` is of the bytes behind the encrypted data.
        plain: The facts before encryption, if the key is known.
    """

    name: str
    num_bytes: int
    digest: str
    header_digest: str
    sealed: bool = False
    plain: Plain | None = None

    @property
    def content(self) -> Plain:
        """Return the length and header digest of the bytes as read, after decryption."""
        return self.plain or Plain(self.num_bytes, self.header_digest)

    def to_json(self) -> list[Any]:
        """Return it as JSON, to send between ranks."""
        plain = astuple(self.plain) if self.plain else ()
        return [self.name, self.num_bytes, self.digest, self.header_digest, *plain]

    @classmethod
    def from_json(cls, data: list[Any]) -> FileEntry:
        """Return the entry from `to_json`."""
        name, num_bytes, whole, header, *rest = data
        plain = Plain(*rest) if rest else None
        return cls(name, num_bytes, whole, header, sealed=plain is not None, plain=plain)


def columns(files: Sequence[FileEntry | Plain]) -> dict[str, Any]:
    """Return the files' lengths and header digests, as columns."""
    return {
        "bytes": [file.num_bytes for file in files],
        "headers": "".join(file.header_digest for file in files),
    }


def _parse_columns(
    found: dict[str, Any], called: Sequence[str], what: str, *, whole: bool
) -> tuple[FileEntry, ...]:
    """Parse the columns of files of these names; `whole`: with digests of whole files."""
    sizes = json_io.field(found, "bytes", list, what)
    headers = json_io.field(found, "headers", str, what)
    digests = json_io.field(found, "digests", str, what) if whole else ""
    if any(type(size) is not int or not 0 <= size < 2**63 for size in sizes):
        raise UnusableSnapshot(f"{what}: the length of a file is not readable")
    for column in (digests, headers) if whole else (headers,):
        if not digest.are_digests(column, {len(called)}) or len(sizes) != len(called):
            raise UnusableSnapshot(f"{what} has not one digest for each of {len(called)} files")
    parts = [slice(i * digest.NUM_HEX, (i + 1) * digest.NUM_HEX) for i in range(len(called))]
    return tuple(
        FileEntry(name, size, digests[part], headers[part])
        for name, size, part in zip(called, sizes, parts, strict=True)
    )


def with_plain(files: Sequence[FileEntry], data: Any, what: str) -> tuple[FileEntry, ...]:
    """Return encrypted files with their facts before encryption, parsed from `columns`' result.

    Raises:
        UnusableSnapshot: it is malformed, or of another number of files.
    """
    plain = _parse_columns(data, [file.name for file in files], what, whole=False)
    return tuple(
        replace(file, plain=Plain(p.num_bytes, p.header_digest))
        for file, p in zip(files, plain, strict=True)
    )


def _parse_file(entry: Any, what: str) -> FileEntry:
    found = FileEntry(
        names.check_file_name(json_io.field(entry, "name", str, what)),
        json_io.count(entry, "bytes", what),
        json_io.field(entry, "digest", str, what),
        json_io.field(entry, "header", str, what),
    )
    if not (digest.is_digest(found.digest) and digest.is_digest(found.header_digest)):
        raise UnusableSnapshot(f"{what}: {found.name} has no digest")
    return found


# ---- encryption: wrapped keys, and an encrypted part
#
#     keys     of its own snapshot, and of each older one it refers to: the snapshot's key, wrapped
#              for each recipient. A change of recipients changes only this
#     sealed   readable only with the key: the files' lengths and header digests before encryption.
#              It also authenticates the rest of the manifest against changes without the key
#
# Pure: contains no cipher. Used by: manifest (to write and read), snapshot.


CIPHER = "AES-256-GCM"
MAX_RECIPIENTS = 256


@dataclass(frozen=True)
class Wrapped:
    """A snapshot's key, wrapped for one recipient.

    Attributes:
        to: The recipient's public key, as text.
        key: The ephemeral public key and the encrypted key, together.
    """

    to: str
    key: bytes


@dataclass(frozen=True)
class Encryption:
    """The encryption facts of one manifest.

    Attributes:
        keys: Full name of a snapshot -> its wrapped keys.
        sealed: The encrypted part; see the module's header.
    """

    keys: Mapping[str, tuple[Wrapped, ...]]
    sealed: bytes

    def to_json(self) -> dict[str, Any]:
        """Return it as in a manifest."""
        keys = {name: wrapped_to_json(each) for name, each in self.keys.items()}
        return {"cipher": CIPHER, "keys": keys, "sealed": to_text(self.sealed)}


def parse(data: Any, what: str) -> Encryption:
    """Parse `Encryption.to_json`'s result; raise `UnusableSnapshot` for anything else."""
    if json_io.field(data, "cipher", str, what) != CIPHER:
        raise UnusableSnapshot(f"{what} is encrypted in a way that this release does not know")
    keys = json_io.field(data, "keys", dict, what)
    for name in keys:
        if SnapshotName.parse(name) is None:
            raise UnusableSnapshot(f"{what} has a key of {name[:100]!r}, which is no snapshot")
    return Encryption(
        {name: wrapped_from_json(each, what) for name, each in keys.items()},
        from_text(json_io.field(data, "sealed", str, what), what),
    )


def wrapped_to_json(wrapped: Sequence[Wrapped]) -> list[list[str]]:
    """Return one key, wrapped for each recipient, as JSON."""
    return [[each.to, to_text(each.key)] for each in wrapped]


def wrapped_from_json(listed: Any, what: str) -> tuple[Wrapped, ...]:
    """Parse `wrapped_to_json`'s result; raise `UnusableSnapshot` for anything else, or no key."""
    found = [
        Wrapped(pair[0], from_text(pair[1], what))
        for pair in (listed if type(listed) is list and len(listed) <= MAX_RECIPIENTS else ())
        if type(pair) is list and len(pair) == 2 and type(pair[0]) is str
    ]
    if not found or len(found) != len(listed):
        raise UnusableSnapshot(f"{what}: its wrapped keys are not readable")
    return tuple(found)


def to_text(data: bytes) -> str:
    """Return bytes as text for JSON (base64)."""
    return base64.b64encode(data).decode("ascii")


def from_text(text: Any, what: str) -> bytes:
    """Return the bytes from `to_text`."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError, TypeError):
        raise UnusableSnapshot(f"{what}: a key in it is not readable") from None


# ---- the manifest


MAX_BYTES = 256_000_000
LATEST_S = 2.5e11  # the year 9892: the limit of calendars
SPLIT = "split"  # one copy, its regions spread over the files
RANK = "rank"  # every rank has its own, in its own file


class TensorEntry(NamedTuple):
    """One tensor: safetensors type, whole shape, and the ranks it is split over.

    `layout` None: it is each rank's own.
    """

    dtype: str
    shape: tuple[int, ...]
    layout: Layout | None = None

    @property
    def placement(self) -> str:
        """Return `SPLIT` or `RANK`."""
        return SPLIT if self.layout else RANK

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
        return any(file.sealed and file.plain is None for file in self.files)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of its own shard files."""
        return sum(file.num_bytes for file in self.files)

    @property
    def reached_bytes(self) -> int:
        """Return the bytes of the older files it refers to."""
        return sum(file.num_bytes for file in self.reached)


def dump(manifest: Manifest) -> bytes:
    """Return canonical JSON, with the digest of everything else in it under `digest`."""
    members = _members(manifest)
    if manifest.encryption is not None:
        members["encryption"] = json_io.canonical(manifest.encryption.to_json())
    members["digest"] = json_io.canonical(digest.digest(json_io.canonical_object(members)))
    return json_io.canonical_object(members)


def bound(manifest: Manifest) -> bytes:
    """Return the bytes the encrypted part authenticates: the manifest without `encryption`."""
    return json_io.canonical_object(_members(manifest))


def _members(manifest: Manifest) -> dict[str, bytes]:
    """Return the canonical JSON of each member, but of `encryption` and `digest`."""
    reached = sorted(manifest.reached, key=lambda file: file.name)
    whole = all(file.digest for file in (*manifest.files, *reached))
    if manifest.encryption is not None and not whole:
        raise ValueError(f"{manifest.name} names encrypted files without digests")
    layouts = number_layouts(manifest.tensors)
    body = {
        "format": names.WRITTEN if whole else names.BY_HEADS,
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
        "files": _dump_files(manifest.files, whole=whole),
        "layouts": [layout.to_json() for layout in layouts],
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
        body["format"] = names.WITH_REFERENCES if whole else names.BY_HEADS
        called = [file.name for file in reached]
        body["reached"] = {"names": called, **_dump_files(reached, whole=whole)}
    if manifest.encryption is not None:
        body["format"] = names.ENCRYPTED
    members = {key: json_io.canonical(value) for key, value in body.items()}
    return {**members, "tensors": spell_tensors(manifest.tensors, layouts)}


def number_layouts(tensors: Mapping[str, TensorEntry]) -> dict[Layout, int]:
    """Return the number of each layout in a table of tensors, by first use."""
    used = (entry.layout for entry in tensors.values() if entry.layout)
    return {layout: number for number, layout in enumerate(dict.fromkeys(used))}


def spell_tensors(tensors: Mapping[str, TensorEntry], layouts: Mapping[Layout, int]) -> bytes:
    """Return the canonical JSON of the table of tensors.

    It is put together from texts. Lists for tens of thousands of tensors would start collections
    of garbage, each of which stops training for some tenths of a second.
    """
    texts = []
    known: dict[TensorEntry, str] = {}  # most tensors have one of a few shapes
    for name in sorted(tensors):
        entry = tensors[name]
        if (text := known.get(entry)) is None:
            number = layouts[entry.layout] if entry.layout else RANK
            facts = [entry.dtype, list(entry.shape), number]
            text = known[entry] = json_io.canonical(facts).decode()
        texts.append(f"{json_io.canonical_text(name)}:{text}")
    return f"{{{','.join(texts)}}}".encode()


def _dump_files(files: Sequence[FileEntry], *, whole: bool) -> dict[str, Any]:
    found = columns(files)
    return {**found, "digests": "".join(file.digest for file in files)} if whole else found


def load(data: bytes, what: str, *, with_tensors: bool = True) -> Manifest:
    """Parse a manifest; raise `UnusableSnapshot` for anything `dump` would not write.

    `with_tensors`: parse its table of tensors too, which takes most of the time.
    """
    body = json_io.parse(data, what, max_bytes=MAX_BYTES)
    if not isinstance(body, dict):
        raise UnusableSnapshot(f"{what} is not a manifest")
    names.check_version(body.get("format"), what)
    body = json_io.verify_digest(body, what, data)
    cursor = Cursor.from_json(body.get("cursor"))
    window = body.get("window")
    world, parent = json_io.count(body, "world", what), body.get("parent")
    created = json_io.field(body, "created", (float, int), what)
    if not abs(created) < LATEST_S:
        raise UnusableSnapshot(f"{what}: {str(created)[:60]} is no time")
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
        files=_files(body, what),
        tensors=_tensors(body, world, what) if with_tensors else {},
        created=float(created),
        kind=json_io.field(body, "kind", str, what),
        tags=tuple(str(tag) for tag in json_io.field(body, "tags", list, what)),
        reason=json_io.field(body, "reason", str, what),
        fingerprint=json_io.field(body, "fingerprint", dict, what),
        writer=str(body.get("writer", "")),
        window=Cursor.from_json(window) if window is not None else None,
        reached=_reached(body, what),
        lost=exactness.parse_lost(body, world, what),
        carried=body.get("carried") is True,
    )
    if body["format"] == names.ENCRYPTED:
        manifest = _encrypted(manifest, body, what)
    if any(names.reached_file(file.name)[0] >= manifest.name for file in manifest.reached):
        raise UnusableSnapshot(f"{what} refers to files that are not older than it is")
    if world != len(manifest.files) or not world:
        raise UnusableSnapshot(f"{what} names {len(manifest.files)} files for {world} ranks")
    return manifest


def _encrypted(manifest: Manifest, body: dict[str, Any], what: str) -> Manifest:
    """Mark all files as encrypted, its own and the referenced ones, and add the keys."""
    found = parse(body.get("encryption"), what)
    folders = {names.reached_file(file.name)[0] for file in manifest.reached}
    if found.keys.keys() != {str(name) for name in (manifest.name, *folders)}:
        raise UnusableSnapshot(f"{what} has keys of other snapshots than it reaches")
    files, reached = (
        tuple(replace(file, sealed=True) for file in listed)
        for listed in (manifest.files, manifest.reached)
    )
    return replace(manifest, files=files, reached=reached, encryption=found)


def _files(body: dict[str, Any], what: str) -> tuple[FileEntry, ...]:
    if body["format"] == 1:
        listed = [_parse_file(entry, what) for entry in json_io.field(body, "files", list, what)]
        if len({file.name for file in listed}) != len(listed):
            raise UnusableSnapshot(f"{what} names a file twice")
        return tuple(listed)
    found = json_io.field(body, "files", dict, what)
    number = len(json_io.field(found, "bytes", list, what))
    return _columns(body, found, [names.shard_file_name(rank) for rank in range(number)], what)


def _reached(body: dict[str, Any], what: str) -> tuple[FileEntry, ...]:
    none = body["format"] >= names.ENCRYPTED and "reached" not in body
    if none or body["format"] < names.WITH_REFERENCES:
        return ()
    found = json_io.field(body, "reached", dict, what)
    listed = json_io.field(found, "names", list, what)
    for path in listed:
        names.reached_file(path)
    if len(set(listed)) != len(listed):
        raise UnusableSnapshot(f"{what} refers to a file twice")
    return _columns(body, found, listed, what)


def _columns(
    body: dict[str, Any], found: dict[str, Any], called: Sequence[str], what: str
) -> tuple[FileEntry, ...]:
    return _parse_columns(found, called, what, whole=body["format"] != names.BY_HEADS)


def _tensors(body: dict[str, Any], world: int, what: str) -> dict[str, TensorEntry]:
    if body["format"] == 1:
        places: dict[Any, Layout | None] = {SPLIT: replicated(world), RANK: None}
    else:
        listed = json_io.field(body, "layouts", list, what)
        places = {i: Layout.from_json(data, world, what) for i, data in enumerate(listed)}
        places[RANK] = None
    tensors = json_io.field(body, "tensors", dict, what)
    return {name: _tensor(name, entry, places, what) for name, entry in tensors.items()}


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
    return TensorEntry(entry[0], shape, layout)

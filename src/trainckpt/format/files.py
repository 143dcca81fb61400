"""Read and write a manifest's list of files: length and digests of each.

Files are stored as columns, since there may be thousands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, overload

from trainckpt.errors import UnusableSnapshot
from trainckpt.format import digest, json_io, names


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


class Files(Sequence[FileEntry]):
    """The files of a snapshot in rank order, stored as columns; entries are made on access.

    Attributes:
        sizes: Bytes of each.
        digests, headers: Hex digests of the whole files and of the headers, concatenated.
            `digests` is "" unless all files have one, as in `FileEntry`.
        names: Only in format 1, or for older files; else they follow from the ranks.
        sealed: They are encrypted.
        plain: The facts of each before encryption, if known.
    """

    sealed = False
    plain: Sequence[Plain] | None = None

    def __init__(
        self, sizes: list[int], digests: str, headers: str, names_: list[str] | None = None
    ) -> None:
        self.sizes, self.digests, self.headers, self.names = sizes, digests, headers, names_

    @classmethod
    def of(cls, entries: Sequence[FileEntry]) -> Files:
        """Return the columns of these entries."""
        if isinstance(entries, Files):
            return entries
        found = [entry.name for entry in entries]
        plain = found == [names.shard_file_name(rank) for rank in range(len(entries))]
        files = cls(
            [entry.num_bytes for entry in entries],
            "".join(entry.digest for entry in entries) if all(e.digest for e in entries) else "",
            "".join(entry.header_digest for entry in entries),
            None if plain else found,
        )
        files.sealed = any(entry.sealed for entry in entries)
        if files.sealed:
            files.plain = [entry.content for entry in entries]
        return files

    def __len__(self) -> int:
        return len(self.sizes)

    @overload
    def __getitem__(self, index: int) -> FileEntry: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[FileEntry, ...]: ...
    def __getitem__(self, index: int | slice) -> FileEntry | tuple[FileEntry, ...]:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(len(self))))
        rank = range(len(self))[index]
        name = names.shard_file_name(rank) if self.names is None else self.names[rank]
        part = slice(rank * digest.NUM_HEX, (rank + 1) * digest.NUM_HEX)
        plain = self.plain[rank] if self.plain is not None else None
        return FileEntry(
            name=name,
            num_bytes=self.sizes[rank],
            digest=self.digests[part],
            header_digest=self.headers[part],
            sealed=self.sealed,
            plain=plain,
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash((self.digests, self.headers))

    def to_json(self, *, whole: bool) -> dict[str, Any]:
        """Return the columns as in a manifest; `whole`: with the digests of the whole files."""
        columns: dict[str, Any] = {"bytes": self.sizes, "headers": self.headers}
        return {**columns, "digests": self.digests} if whole else columns


def parse_files(columns: dict[str, Any], number: int, what: str, *, whole: bool) -> Files:
    """Parse the columns of `number` files; raise `UnusableSnapshot` for anything else."""
    sizes = json_io.field(columns, "bytes", list, what)
    if any(type(size) is not int or not 0 <= size < 2**63 for size in sizes):
        raise UnusableSnapshot(f"{what}: the length of a file is not readable")
    digests = json_io.field(columns, "digests", str, what) if whole else ""
    found = Files(sizes, digests, json_io.field(columns, "headers", str, what))
    for column in (found.digests, found.headers) if whole else (found.headers,):
        if not digest.are_digests(column, {number}) or len(sizes) != number:
            raise UnusableSnapshot(f"{what} has not one digest for each of {number} files")
    return found


def parse_file(entry: Any, what: str) -> FileEntry:
    """Parse one file as stored in format 1."""
    found = FileEntry(
        names.check_file_name(json_io.field(entry, "name", str, what)),
        json_io.count(entry, "bytes", what),
        json_io.field(entry, "digest", str, what),
        json_io.field(entry, "header", str, what),
    )
    if not (digest.is_digest(found.digest) and digest.is_digest(found.header_digest)):
        raise UnusableSnapshot(f"{what}: {found.name} has no digest")
    return found

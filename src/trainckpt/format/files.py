"""The files that a manifest names: length and digests of each.

Files are spelled as columns, since there may be thousands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, overload

from trainckpt.errors import UnusableSnapshot
from trainckpt.format import digest, names, strict


@dataclass(frozen=True)
class Plain:
    """Of a file, before it was encrypted: its length, and the digest of its header."""

    num_bytes: int
    header_digest: str


@dataclass(frozen=True)
class FileEntry:
    """One shard file: its name, length, and digests. `format.checking` compares them.

    Attributes:
        digest: Of the whole file, where it is encrypted, or named by a manifest before version 5.
            Else "": the head holds the digests of everything behind it, so its own tells the whole.
        header_digest: Of the file's head.
        sealed: It is encrypted: length and digests are of what is stored, that of the header is of
            what stands behind the encrypted data.
        plain: Of a sealed one, what it was before, where the key is there.
    """

    name: str
    num_bytes: int
    digest: str
    header_digest: str
    sealed: bool = False
    plain: Plain | None = None

    @property
    def content(self) -> Plain:
        """What is read of it: length, and digest of the header."""
        return self.plain or Plain(self.num_bytes, self.header_digest)


class Files(Sequence[FileEntry]):
    """The files of a snapshot in rank order, kept as columns: one is made when it is asked for.

    Attributes:
        sizes: Bytes of each.
        digests, headers: Hex digests of each, of the whole and of the header, end to end. As of
            `FileEntry`: there are none of the whole unless all files have one.
        names: Only in format 1; they follow from the ranks since.
        sealed: They are encrypted.
        plain: What each was before, where that is known.
    """

    sealed = False
    plain: Sequence[Plain] | None = None

    def __init__(
        self, sizes: list[int], digests: str, headers: str, names_: list[str] | None = None
    ) -> None:
        self.sizes, self.digests, self.headers, self.names = sizes, digests, headers, names_

    @classmethod
    def of(cls, entries: Sequence[FileEntry]) -> Files:
        """The columns of these entries."""
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
            name, self.sizes[rank], self.digests[part], self.headers[part], self.sealed, plain
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash((self.digests, self.headers))

    def to_json(self, *, whole: bool) -> dict[str, Any]:
        """As a manifest spells them; `whole`: with the digests of the whole files."""
        columns: dict[str, Any] = {"bytes": self.sizes, "headers": self.headers}
        return {**columns, "digests": self.digests} if whole else columns


def parse_files(columns: dict[str, Any], number: int, what: str, *, whole: bool) -> Files:
    """The inverse of `Files.to_json`, of so many files; `UnusableSnapshot` for anything else."""
    sizes = strict.field(columns, "bytes", list, what)
    if any(type(size) is not int or not 0 <= size < 2**63 for size in sizes):
        raise UnusableSnapshot(f"{what}: the length of a file is not readable")
    digests = strict.field(columns, "digests", str, what) if whole else ""
    found = Files(sizes, digests, strict.field(columns, "headers", str, what))
    for column in (found.digests, found.headers) if whole else (found.headers,):
        if not digest.are_digests(column, {number}) or len(sizes) != number:
            raise UnusableSnapshot(f"{what} has not one digest for each of {number} files")
    return found


def parse_file(entry: Any, what: str) -> FileEntry:
    """One file, as format 1 spelled it."""
    found = FileEntry(
        names.check_file_name(strict.field(entry, "name", str, what)),
        strict.count(entry, "bytes", what),
        strict.field(entry, "digest", str, what),
        strict.field(entry, "header", str, what),
    )
    if not (digest.is_digest(found.digest) and digest.is_digest(found.header_digest)):
        raise UnusableSnapshot(f"{what}: {found.name} has no digest")
    return found

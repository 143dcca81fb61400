"""Format versions this release writes and reads. Version 1 stays readable for ever."""

from __future__ import annotations

from trainckpt.errors import UnusableSnapshot

VERSION = "0.1.0"  # of this release; pyproject.toml says the same
WRITTEN = 2  # of shard files
WITH_REFERENCES = 3  # of those, only where there are any
ENCRYPTED = 4  # manifests of snapshots that are, or that refer to such
BY_HEADS = 5  # manifests of all others: no digests of whole files, those of their heads tell all
READABLE = frozenset({1, 2, 3, 4, 5})
SHARD_FILES, RUN_RECORDS = frozenset({1, 2, 3}), frozenset({1})


def check_version(found: object, what: str, readable: frozenset[int] = READABLE) -> None:
    """Raise `UnusableSnapshot` unless `found` is a format version this release reads."""
    if type(found) is not int or found not in readable:
        raise UnusableSnapshot(
            f"{what} has format version {found!r}; this release reads {sorted(readable)}",
            hint="resume with the release of trainckpt that wrote it, or a newer one",
        )

"""Format versions this release writes and reads. Version 1 stays readable for ever."""

from __future__ import annotations

from trainckpt.errors import UnusableSnapshot

VERSION = "0.1.0"  # of this release; pyproject.toml says the same
WRITTEN = 2  # of shard files
WITH_REFERENCES = 3  # of shard files with references
ENCRYPTED = 4  # of manifests of encrypted snapshots
BY_HEADS = 5  # of all other manifests: digests of heads, which cover the files, not of whole files
READABLE = frozenset({1, 2, 3, 4, 5})
SHARD_FILES, RUN_RECORDS = frozenset({1, 2, 3}), frozenset({1})


def check_version(found: object, what: str, readable: frozenset[int] = READABLE) -> None:
    """Raise `UnusableSnapshot` unless `found` is a format version this release reads."""
    if type(found) is not int or found not in readable:
        raise UnusableSnapshot(
            f"{what} has format version {found!r}; this release reads {sorted(readable)}",
            hint="resume with the release of trainckpt that wrote it, or a newer one",
        )

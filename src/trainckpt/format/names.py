"""Name snapshots and the files of a run, and check relative paths before they are opened.

RUN/run.json                          the run's record: its id
RUN/attempts/<n>.json                 one record an attempt
RUN/notices/<attempt>-<id>.json       notices to a live attempt
RUN/survivors/<attempt>/              the survivors' agreement on a save after ranks died
RUN/snapshots/<id>~<a>.<q>/           one snapshot: attempt a, sequence number q
    rank00000.safetensors ...         shard files
    manifest.json                     its existence is the commit
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from trainckpt.errors import ConfigurationError, UnusableSnapshot

# ---- format versions; version 1 stays readable for ever


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


# ---- names


RUN_RECORD = "run.json"
ATTEMPTS = "attempts"
NOTICES = "notices"
SNAPSHOTS = "snapshots"
SURVIVORS = "survivors"
MANIFEST = "manifest.json"

_FOLDER = re.compile(r"s([0-9]{1,15})(?:m([0-9]{1,15}))?~([0-9]{1,9})\.([0-9]{1,9})")
_RECORD = re.compile(r"([1-9][0-9]{0,8})\.json")
MAX_ATTEMPT = 10**9 - 1
_SHARD_FILE = re.compile(r"rank([0-9]{5,9})\.safetensors")
_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, order=True)
class SnapshotName:
    """Name of one snapshot of a run; sorts by (attempt, sequence), the order of commits.

    `str(SnapshotName(attempt=2, sequence=7, step=1200, micro=3)) == "s1200m3~2.7"`
    """

    attempt: int
    sequence: int
    step: int
    micro: int

    @property
    def id(self) -> str:
        """Return the plain id, `s1200m3`: several snapshots of a run may share it."""
        return f"s{self.step}m{self.micro}" if self.micro else f"s{self.step}"

    def __str__(self) -> str:
        return f"{self.id}~{self.attempt}.{self.sequence}"

    @property
    def folder(self) -> str:
        """Return the path of the snapshot's folder, relative to the run."""
        return f"{SNAPSHOTS}/{self}"

    @classmethod
    def parse(cls, text: str) -> SnapshotName | None:
        """Return the name spelled by `text`, or None."""
        match = _FOLDER.fullmatch(text)
        if match is None:
            return None
        step, micro, attempt, sequence = (int(part or 0) for part in match.groups())
        found = cls(attempt, sequence, step, micro)
        return found if str(found) == text else None


def recorded_attempt(name: str) -> int | None:
    """Return the attempt of a record's file name, or None for another file."""
    match = _RECORD.fullmatch(name)
    return int(match[1]) if match else None


def shard_file_name(rank: int) -> str:
    """Return the file name of one rank's part of a snapshot."""
    return f"rank{rank:05d}.safetensors"


def sealed_file_name(rank: int) -> str:
    """Return the name of the encrypted file in memory, where the plain one may lie beside it."""
    return f"{shard_file_name(rank)}.sealed"


def reached_file(path: object) -> tuple[SnapshotName, int]:
    """Return the snapshot and rank spelled by `s2~1.2/rank00000.safetensors`.

    A snapshot refers to an older one's file by such a path, relative to the snapshots' folder.

    Raises:
        UnusableSnapshot: another path; no other may be opened.
    """
    folder, _, file = path.partition("/") if isinstance(path, str) else ("", "", "")
    name, match = SnapshotName.parse(folder), _SHARD_FILE.fullmatch(file)
    if name is None or match is None or shard_file_name(int(match[1])) != file:
        raise UnusableSnapshot(f"{str(path)[:100]!r} is no shard file of a snapshot")
    return name, int(match[1])


def check_file_name(name: object) -> str:
    """Return `name` if it is a plain file name; else raise `UnusableSnapshot`."""
    if (
        not isinstance(name, str)
        or not name
        or len(name) > 255
        or name.startswith(".")
        or any(c in name for c in "/\\\0")
    ):
        raise UnusableSnapshot(f"a manifest names the file {str(name)[:100]!r}, outside its folder")
    return name


def check_tag(tag: str) -> str:
    """Return `tag` if it can name a snapshot; else raise `ConfigurationError`."""
    if not _TAG.fullmatch(tag) or tag == "latest" or re.fullmatch(r"s\d+(m\d+)?", tag):
        raise ConfigurationError(
            f"tag {tag!r} cannot name a snapshot",
            hint="use letters, digits, '.', '_' and '-', at most 64, not 'latest' or 's<number>'",
        )
    return tag


def split_target(target: str) -> tuple[str, str | None]:
    """Split `RUN@SNAPSHOT`; the part after the last `@` is a snapshot only without a `/`."""
    run, at, snapshot = target.rpartition("@")
    return (run, snapshot) if at and run and "/" not in snapshot else (target, None)

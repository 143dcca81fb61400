"""Verify: read and check every byte of every copy of a snapshot, and say which file is bad."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from trainckpt.errors import UnusableSnapshot
from trainckpt.format import digest
from trainckpt.snapshot.restore import read_header

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from trainckpt.format.manifest import FileEntry, Manifest
    from trainckpt.tiers.base import Tier

CHUNK_BYTES = 8 << 20
# Only the header is read; the reader for torch would import it, which takes seconds.
_FRAMEWORK = "numpy" if find_spec("numpy") else "pt"


@dataclass(frozen=True)
class Copy:
    """What was found of one file of one snapshot in one tier."""

    snapshot: str
    tier: str
    file: str
    ok: bool
    reason: str = ""


def verify(
    tier: Tier, manifest: Manifest, progress: Callable[[int], None] = lambda num_bytes: None
) -> tuple[Copy, ...]:
    """Read every file of a snapshot whole; `progress` is told the bytes of each chunk read."""
    found = []
    for file in manifest.files:
        reason = _check(tier, manifest.name.folder, file, progress)
        found.append(Copy(str(manifest.name), tier.name, file.name, not reason, reason))
    return tuple(found)


def _check(tier: Tier, folder: str, file: FileEntry, progress: Callable[[int], None]) -> str:
    key = f"{folder}/{file.name}"
    try:
        size = tier.size(key)
        if size is None:
            return "is missing"
        if size != file.num_bytes:
            return f"has {size} bytes, not {file.num_bytes}"
        if digest.digest_blocks(_chunks(tier, key, size, progress)) != file.digest:
            return "does not match its digest"
        read_header(tier, folder, file)
        return _plain_reader(tier, key)
    except UnusableSnapshot as error:
        return error.message


def _chunks(
    tier: Tier, key: str, size: int, progress: Callable[[int], None]
) -> Iterator[memoryview]:
    chunk = memoryview(bytearray(min(size, CHUNK_BYTES)))
    for first_byte in range(0, size, CHUNK_BYTES):
        part = chunk[: min(CHUNK_BYTES, size - first_byte)]
        tier.read_into(key, first_byte, part)
        progress(len(part))
        yield part


def _plain_reader(tier: Tier, key: str) -> str:
    """That the plain safetensors library reads the file too is part of the format's promise."""
    from safetensors import SafetensorError, safe_open

    path = Path(tier.url) / key
    if not path.is_file():
        return ""
    try:
        with safe_open(path, framework=_FRAMEWORK) as opened:
            opened.keys()
    except SafetensorError as error:
        return f"is not readable as safetensors: {error}"
    return ""

"""Folders and files private to this user, closed to all others, and never symbolic links."""

from __future__ import annotations

import contextlib
import json
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path


def make_private(folder: Path) -> bool:
    """Make a private folder; return False if another file or another user's folder is there."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    return is_private(folder)


def must_be_private(folder: Path) -> None:
    """Make a private folder; raise `PermissionError` if `make_private` returns False."""
    if not make_private(folder):
        raise PermissionError(f"{folder} belongs to, or is open to, another user")


def is_private(folder: Path) -> bool:
    """Return True for a real folder of this user, closed to others."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return (found.st_mode & 0o170077) == 0o040000 and found.st_uid == os.getuid()


def write_private(path: Path, data: bytes) -> None:
    """Write a private file atomically: readers never see part of it. Not durable."""
    temporary = path.with_name(f"{path.name}.{os.urandom(8).hex()}")
    try:
        temporary.touch(mode=0o600, exist_ok=False)
        temporary.write_bytes(data)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def atomic_write_json(path: Path, value: Any) -> None:
    """Write a value as JSON, as `write_private`."""
    write_private(path, json.dumps(value).encode())

"""Private folders and files: of this user, closed to all others, and no link to anywhere else."""

from __future__ import annotations

import contextlib
import os
import secrets
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def make_private(folder: Path) -> bool:
    """Make a folder that is ours alone; False if what stands there is another's."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    return is_private(folder)


def must_be_private(folder: Path) -> None:
    """As `make_private`; raises `PermissionError` where that says False."""
    if not make_private(folder):
        raise PermissionError(f"{folder} is not this user's alone")


def is_private(folder: Path) -> bool:
    """A real folder, of this user, closed to others."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return (found.st_mode & 0o170077) == 0o040000 and found.st_uid == os.getuid()


def write_private(path: Path, data: bytes) -> None:
    """Make a file with this content at once: nobody sees less of it. Not to outlive a power cut."""
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    try:
        temporary.touch(mode=0o600, exist_ok=False)
        temporary.write_bytes(data)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)

"""The page cache: what it holds of a file is written back and forgotten. No root is needed."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def evict(path: Path) -> None:
    """Of a file, or of all files of a folder."""
    for each in [path] if path.is_file() else path.rglob("*"):
        if each.is_file():
            file = os.open(each, os.O_RDONLY)
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)

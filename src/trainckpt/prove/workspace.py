"""The folder a run of the proof works in: the user's working directory, with links for its files.

    <proof>/work/<path of the user's folder>    directories are real, files are links to the
                                                user's; beside them, links for `../data`

Each run of the proof gets a fresh one, at the same path, so that a path in the state is the same
text in all of them. What the script creates or replaces stays in there: `checkpoints/last.ckpt` of
the straight run is not there for the interrupted one, and the user's own is left alone. A file that
the script opens and writes over is the user's, as it is for the script.
"""

from __future__ import annotations

import os
from collections import deque
from contextlib import suppress
from pathlib import Path

MOST_ENTRIES = 10_000  # directories beyond them are links
MOST_BESIDE = 1_000  # a folder with more entries is not linked for the sake of `../x`


class Workspace:
    """Working directories for the runs of a proof.

    Args:
        folder: The proof's own.
        origin: The user's working directory.

    Attributes:
        root: What stands for `/`.
    """

    def __init__(self, folder: Path, origin: Path) -> None:
        self._folder, self._origin = folder, origin
        self.root = folder / "work"

    @property
    def path(self) -> Path:
        """Folder in which a run works."""
        return self.root.joinpath(*self._origin.parts[1:])

    def make(self) -> str:
        """Make a fresh one, with the user's files as they are now.

        Returns:
            "", or why it cannot be made, such as a file system without links.
        """
        if len(self._origin.parts) == 1:
            return "it is the root"
        try:
            self.path.parent.mkdir(parents=True)
            inner = self._origin
            for outer in inner.parents[:-1]:
                _link_beside(outer, self.root.joinpath(*outer.parts[1:]), inner)
                inner = outer
            _mirror(self._origin, self.path, self._folder)
            if self.path.is_symlink():
                return f"{self._origin} holds more than {MOST_ENTRIES} files"
        except OSError as error:
            return str(error)
        return ""

    def move_to(self, place: Path) -> None:
        """Keep it there, if it was made: the run has ended."""
        with suppress(FileNotFoundError):
            self.root.rename(place)


def _link_beside(source: Path, target: Path, but: Path) -> None:
    entries = _entries(source)
    for entry in entries if entries is not None and len(entries) <= MOST_BESIDE else ():
        if entry.name != but.name:
            (target / entry.name).symlink_to(entry.path)


def _mirror(source: Path, target: Path, but: Path) -> None:
    """Breadth first. Hidden directories, such as .git and .venv, are links."""
    left, number = deque([(source, target)]), 0
    while left:
        here, there = left.popleft()
        entries = _entries(here)
        if entries is None or number + len(entries) > MOST_ENTRIES:
            there.symlink_to(here)
            continue
        there.mkdir()
        number += len(entries)
        for entry in entries:
            path, name = Path(entry.path), entry.name
            if entry.is_dir(follow_symlinks=False) and not name.startswith("."):
                if path != but:
                    left.append((path, there / name))
            else:
                (there / name).symlink_to(path)


def _entries(folder: Path) -> list[os.DirEntry[str]] | None:
    """None: this user may not look into it."""
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except PermissionError:
        return None

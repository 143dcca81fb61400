"""Memory of this host with shard files for other hosts, beside the arenas of its own ranks.

    arenas/copy00003.0, .1      replica of rank 3's shard file; two, filled in turn
    arenas/sealed00002.0, .1    rank 2's own shard file, encrypted, as other hosts have it
    arenas/fetched00002.0       the same, as stored: fetched after a resume on a new host, so other
                                hosts can replicate it again
    snapshots/<folder>/         published names of the above, and
        manifest.json           the snapshot's manifest: without access to the run directory, a
                                host still knows its content

The arena with the newest snapshot stays untouched until the other one is complete.
"""

from __future__ import annotations

import contextlib
import os
from stat import S_ISREG
from typing import TYPE_CHECKING

from trainckpt.storage.private_files import must_be_private, write_private
from trainckpt.storage.shared_memory import ArenaInUse

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from trainckpt.storage.arena import Arena
    from trainckpt.storage.shared_memory import SharedMemoryDir

MANIFEST = "manifest.json"


class DoubleBuffer:
    """Two arenas for one kind of file; the one without the newest snapshot may be filled."""

    def __init__(self, memory_dir: SharedMemoryDir, name: str, *, anew: bool = False) -> None:
        """Open the slots; with `anew`, replace arenas left unfinished by an earlier attempt.

        A process of that attempt may still be writing to them.
        """
        self._memory_dir, self._name, self._anew = memory_dir, name, anew
        self._open: dict[int, Arena] = {}

    def free(self, newest: str | None) -> Arena:
        """Return an arena without the snapshot of the folder `newest`.

        Raises:
            OSError: other processes have locked both, or as the system reports it.
        """
        for number in range(2):
            if number not in self._open:
                path = arena_path(self._memory_dir, self._name, number)
                with contextlib.suppress(ArenaInUse):
                    opened = self._memory_dir.open_arena(path)
                    if self._anew and not opened.holds():
                        opened.remove()
                        opened = self._memory_dir.open_arena(path)
                    self._open[number] = opened
            arena = self._open.get(number)
            if arena is not None and newest not in arena.holds():
                return arena
        raise ArenaInUse(f"{self._name} is in use by another process")

    def capacity_bytes(self, newest: str | None) -> tuple[int, int]:
        """Return the bytes of the arena `free` would return, and of both, as far as opened."""
        found = [self._open[number] for number in sorted(self._open)]
        free = (arena.capacity_bytes for arena in found if newest not in arena.holds())
        return next(free, 0), sum(arena.capacity_bytes for arena in found)

    def release(self, newest: str | None) -> None:
        """Remove the published names of other snapshots."""
        for arena in self._open.values():
            if newest not in arena.holds():
                with contextlib.suppress(OSError):
                    arena.retract()

    def close(self, *, keep: bool) -> None:
        """Unlock both arenas; `keep` their bytes, or remove them."""
        for arena in self._open.values():
            with contextlib.suppress(OSError):
                if keep:
                    arena.close()
                else:
                    arena.remove()
        self._open.clear()


def arena_path(memory_dir: SharedMemoryDir, name: str, number: int) -> Path:
    """Return the path of one of a slot's two arenas."""
    return memory_dir.root / "arenas" / f"{name}.{number}"


def sealed_slot(rank: int) -> str:
    """Return the slot name of a rank's own file, encrypted."""
    return f"sealed{rank:05d}"


def fetched_slot(rank: int) -> str:
    """Return the slot name of a rank's own file, fetched for other hosts to replicate."""
    return f"fetched{rank:05d}"


def remove_slot(memory_dir: SharedMemoryDir, name: str) -> None:
    """Remove a slot's unlocked arenas and their published names."""
    for number in range(2):
        path = arena_path(memory_dir, name, number)
        if path.exists():
            with contextlib.suppress(OSError):
                memory_dir.open_arena(path).remove()


def write_manifest(memory_dir: SharedMemoryDir, folder: str, data: bytes) -> None:
    """Write the manifest atomically: readers find it whole or not at all."""
    target = memory_dir.root / folder
    must_be_private(target.parent)
    must_be_private(target)
    write_private(target / MANIFEST, data)


def read_manifest(memory_dir: SharedMemoryDir, folder: str, max_bytes: int) -> bytes | None:
    """Return the manifest; None if it is missing or longer than `max_bytes`."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK  # a pipe in its place must not block
    with contextlib.suppress(OSError):
        descriptor = os.open(memory_dir.root / folder / MANIFEST, flags)
        try:
            if S_ISREG(os.fstat(descriptor).st_mode):
                with os.fdopen(descriptor, "rb", closefd=False) as file:
                    data = file.read(max_bytes + 1)
                return data if len(data) <= max_bytes else None
        finally:
            os.close(descriptor)
    return None


def release_manifests(memory_dir: SharedMemoryDir, keep: Iterable[str]) -> None:
    """Remove the manifests of all snapshots except those in `keep`."""
    kept = set(keep)
    for folder in memory_dir.folders():
        if folder not in kept:
            with contextlib.suppress(OSError):
                (memory_dir.root / folder / MANIFEST).unlink(missing_ok=True)
                (memory_dir.root / folder).rmdir()  # fails if it has other files


def files(memory_dir: SharedMemoryDir, folder: str) -> list[str]:
    """Return the file names in memory of one snapshot, including the manifest; sorted."""
    with contextlib.suppress(OSError):
        return sorted(path.name for path in (memory_dir.root / folder).iterdir())
    return []

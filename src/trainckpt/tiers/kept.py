"""Kept: what this host's memory holds for other hosts, beside the arenas of its own ranks.

    arenas/copy00003.0, .1      a copy of rank 3's shard file; two, filled in turn
    arenas/sealed00002.0, .1    rank 2's own shard file, encrypted, as others have it
    arenas/fetched00002.0       the same, as it is stored: fetched after a resume on a host that had
                                lost it, for others to keep it again
    snapshots/<folder>/         the same by the names of what they hold, and
        manifest.json           the snapshot's manifest: with it, hosts that have lost the run's
                                place of sight still know what they have

The one of the two that holds the newest snapshot is not touched before the other one is complete.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from typing import TYPE_CHECKING

from trainckpt.tiers.memory import MemoryTaken
from trainckpt.tiers.private import must_be_private

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from trainckpt.tiers.arena import Arena
    from trainckpt.tiers.memory import MemoryPlace

MANIFEST = "manifest.json"


class Slot:
    """Two arenas for one kind of file, of which one may be filled."""

    def __init__(self, place: MemoryPlace, name: str, *, anew: bool = False) -> None:
        """`anew`: none is used again that an attempt before has left unfinished: a process of it
        may be writing there still.
        """
        self._place, self._name, self._anew = place, name, anew
        self._open: dict[int, Arena] = {}

    def free(self, newest: str | None) -> Arena:
        """The arena that does not hold the snapshot of this folder.

        Raises:
            OSError: both are taken by another process, or as the system reports it.
        """
        for number in range(2):
            if number not in self._open:
                with contextlib.suppress(MemoryTaken):
                    self._open[number] = self._opened(number)
            arena = self._open.get(number)
            if arena is not None and newest not in arena.holds():
                return arena
        raise MemoryTaken(f"{self._name} is in use by another process")

    def _opened(self, number: int) -> Arena:
        path = arena_path(self._place, self._name, number)
        arena = self._place.open_arena(path)
        if not self._anew or arena.holds():
            return arena
        arena.remove()
        return self._place.open_arena(path)

    def capacity_bytes(self, newest: str | None) -> tuple[int, int]:
        """Of the arena that `free` would give, and of both, as far as they were opened."""
        found = [self._open[number] for number in sorted(self._open)]
        free = (arena.capacity_bytes for arena in found if newest not in arena.holds())
        return next(free, 0), sum(arena.capacity_bytes for arena in found)

    def release(self, newest: str | None) -> None:
        """Take away the names of what belongs to other snapshots."""
        for arena in self._open.values():
            if newest not in arena.holds():
                with contextlib.suppress(OSError):
                    arena.retract()

    def close(self, *, keep: bool) -> None:
        """Let others have both; `keep` the bytes."""
        for arena in self._open.values():
            with contextlib.suppress(OSError):
                if keep:
                    arena.close()
                else:
                    arena.remove()
        self._open.clear()


def arena_path(place: MemoryPlace, name: str, number: int) -> Path:
    """Of one of the two of a slot."""
    return place.root / "arenas" / f"{name}.{number}"


def sealed_slot(rank: int) -> str:
    """Name of the slot of a rank's own file, encrypted."""
    return f"sealed{rank:05d}"


def fetched_slot(rank: int) -> str:
    """Name of the slot of a rank's own file that was brought back for others to keep."""
    return f"fetched{rank:05d}"


def remove_slot(place: MemoryPlace, name: str) -> None:
    """Give back both arenas of a slot that nobody uses, and the names of what they hold."""
    for number in range(2):
        path = arena_path(place, name, number)
        if path.exists():
            with contextlib.suppress(OSError):
                place.open_arena(path).remove()


def write_manifest(place: MemoryPlace, folder: str, data: bytes) -> None:
    """Atomically; others find it whole or not at all."""
    target = place.root / folder
    must_be_private(target.parent)
    must_be_private(target)
    temporary = target / f".{secrets.token_hex(8)}"
    try:
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as f:
            f.write(data)
        temporary.replace(target / MANIFEST)
    finally:
        temporary.unlink(missing_ok=True)


def read_manifest(place: MemoryPlace, folder: str, max_bytes: int) -> bytes | None:
    """What was written; None if there is nothing, or more than that."""
    try:
        descriptor = os.open(place.root / folder / MANIFEST, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        data = file.read(max_bytes + 1)
    return data if len(data) <= max_bytes else None


def release_manifests(place: MemoryPlace, keep: Iterable[str]) -> None:
    """Forget the manifests of all other snapshots."""
    kept = set(keep)
    for folder in place.folders():
        if folder not in kept:
            with contextlib.suppress(OSError):
                (place.root / folder / MANIFEST).unlink(missing_ok=True)
                (place.root / folder).rmdir()  # if nothing else is held of it


def files(place: MemoryPlace, folder: str) -> list[str]:
    """Names of what is held of one snapshot, the manifest included; sorted."""
    with contextlib.suppress(OSError):
        return sorted(path.name for path in (place.root / folder).iterdir())
    return []

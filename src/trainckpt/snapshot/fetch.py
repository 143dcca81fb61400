"""Fetch: shard files from a tier into this host's memory, where all its ranks read them.

    whoever starts a run again     while the ranks still import and find each other
    the ranks of one host          each its share of the files that all of them need

Nothing is verified here: whoever reads does that, and reads from the tier itself what is not good.
So what a fetch brings is only ever nearer, and one that fails costs nothing.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING

from trainckpt.errors import TrainckptError
from trainckpt.tiers.arena import RESERVED_BYTES
from trainckpt.tiers.memory import MemoryTaken
from trainckpt.tiers.workers import Workers

if TYPE_CHECKING:
    from collections.abc import Iterable

    from trainckpt.format.manifest import FileEntry, Manifest
    from trainckpt.tiers.arena import Arena
    from trainckpt.tiers.base import Readable
    from trainckpt.tiers.memory import MemoryPlace

PART_BYTES = 8 << 20
NUMBERS = range(2)  # arenas of a rank among which one is taken
MOSTLY = 0.5  # of a snapshot's bytes that several ranks need, for which fetching together pays


def fetch(
    tier: Readable, place: MemoryPlace, manifest: Manifest, numbers: Iterable[int]
) -> list[int]:
    """Bring the shard files of these ranks into memory, unless they are there; which came."""
    came = []
    for number in numbers:
        file = manifest.files[number]
        folder = manifest.name.folder
        if is_there(place, manifest, number):
            continue
        arena = _arena(place, number)
        if arena is None:
            continue
        with contextlib.closing(arena):
            try:
                _fill(tier, arena, folder, file)
            except (OSError, TrainckptError):
                with contextlib.suppress(OSError):
                    arena.retract()
            else:
                came.append(number)
    return came


def is_shared(manifest: Manifest) -> bool:
    """Whether most bytes of a snapshot lie alike on several ranks, which all read them."""
    shared = total = 0
    for entry in manifest.tensors.values():
        total += entry.num_bytes
        if entry.layout is not None and entry.layout.num_replicas > 1:
            shared += entry.num_bytes
    return shared > MOSTLY * total


def is_there(place: MemoryPlace, manifest: Manifest, number: int) -> bool:
    """Whether this host's memory holds a file of the snapshot, good or not."""
    file = manifest.files[number]
    held = place.held(manifest.name.folder, file.name, file.content.num_bytes)
    if held is not None:
        held.close()
    return held is not None


def room_for(place: MemoryPlace, manifest: Manifest, number: int) -> Arena | None:
    """An arena with as much memory as a file needs, to be filled and published; None: no room."""
    arena = _arena(place, number)
    if arena is not None:
        try:
            arena.reserve(manifest.files[number].content.num_bytes)
        except OSError:
            arena.close()
            return None
    return arena


def _arena(place: MemoryPlace, rank: int) -> Arena | None:
    """An arena of this rank that nobody has, the one that holds nothing if there is one."""
    found: list[Arena] = []
    for number in NUMBERS:
        with contextlib.suppress(MemoryTaken, OSError):
            found.append(place.arena(rank, number))
    found.sort(key=lambda arena: len(arena.holds()))
    for arena in found[1:]:
        arena.close()
    return found[0] if found else None


def _fill(tier: Readable, arena: Arena, folder: str, file: FileEntry) -> None:
    """While one part of it is read, memory for the next is made sure of."""
    num_bytes, key = file.content.num_bytes, f"{folder}/{file.name}"
    reserving = arena.reserving(num_bytes)
    try:
        with Workers(1, "trainckpt-reserve") as ahead:
            ends = range(RESERVED_BYTES, num_bytes + RESERVED_BYTES, RESERVED_BYTES)
            for _ in ends:
                ahead.submit(partial(next, reserving))
            for end, left in zip(ends, reversed(range(len(ends))), strict=True):
                ahead.settle(left)
                part = arena.memory[end - RESERVED_BYTES : end]
                _read(tier, key, end - RESERVED_BYTES, part)
    except OSError:
        arena.empty()
        raise
    arena.publish(folder, file.name)


def _read(tier: Readable, key: str, first_byte: int, into: memoryview) -> None:
    steps = range(0, len(into), PART_BYTES)
    parts = [(first_byte + at, into[at : at + PART_BYTES]) for at in steps]
    tier.read_parts(key, parts, lambda _: None)

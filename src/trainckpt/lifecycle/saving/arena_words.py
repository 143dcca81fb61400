"""Where a rank's saves are laid out, for people. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainckpt.tiers.arena import Arena
    from trainckpt.tiers.memory import MemoryPlace

NO_ROOM = "has no room for them (docker run --shm-size=8g, or --ipc=host, gives it more)"


def where(place: MemoryPlace, filled: Arena, *, is_supervised: bool) -> str:
    """Which memory that is, and what ends with it."""
    root = place.root.parent.parent
    if not filled.is_memfd:
        return f"shared memory in {place.root}"
    if filled.outlives:
        return f"memory that the supervisor holds, gone when it ends: {root} {NO_ROOM}"
    more = "" if is_supervised else "; `trainckpt run` would hold it"
    return f"private memory, so no copy outlives the process: {root} {NO_ROOM}{more}"


def no_memory(num_bytes: int) -> str:
    """Why so much is written from the live tensors."""
    return (
        f"no memory for its saves: {mb(num_bytes)} do not fit memory_budget and what is left, so "
        "training waits while each file is written"
    )


def mb(num_bytes: int) -> str:
    """In megabytes."""
    return f"{num_bytes / 1e6:.1f} MB"

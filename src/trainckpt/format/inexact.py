"""Inexact: what is missing from a snapshot that survivors of dead ranks have saved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainckpt.errors import UnusableSnapshot

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def reasons(lost: Sequence[int], *, carried: bool) -> list[str]:
    """Why no resume from it can be bitwise, one sentence each.

    Args:
        lost: Ranks whose own state died with them.
        carried: Gradients that the window began with may have counted, and are not in it.
    """
    ranks = ", ".join(map(str, lost[:20]))
    found = [f"rank {ranks} died with all that was its own"] if lost else []
    if carried:
        found.append("gradients that its window began with died with the ranks that held them")
    return found


def parse_lost(body: Mapping[str, Any], world: int, what: str) -> tuple[int, ...]:
    """The manifest's `lost`; raises `UnusableSnapshot` if it does not name ranks."""
    found = body.get("lost", [])
    if type(found) is not list or any(
        type(rank) is not int or not 0 <= rank < world for rank in found
    ):
        raise UnusableSnapshot(f"{what}: {str(found)[:60]} are not ranks that were lost")
    return tuple(found)

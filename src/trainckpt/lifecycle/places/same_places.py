"""Same places: all ranks were given one run and the same slower tiers. Pure.

Each rank reads its own arguments and environment. Where they differ, some would read what others
never wrote, or wait for a tier that nobody copies to. Directories are compared between ranks that
see the same file systems; whether several hosts see one directory is tried out (`attach`).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from trainckpt.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainckpt.tiers.base import Tier

RUN, TIERS = "run", "tiers"


def own_places(place: Tier, slower: Sequence[Tier]) -> list[list[str]]:
    """What this rank was given: name and whereabouts of each place, its own run's first."""
    return [[tier.name, _where(tier.url)] for tier in (place, *slower)]


def must_be_the_same(views: Sequence[str], everyone: Sequence[Sequence[Sequence[str]]]) -> None:
    """Refuse to go on if they are not.

    Args:
        views: Of each rank: same for ranks that see the same file systems.
        everyone: What each rank was given (`own_places`).

    Raises:
        ConfigurationError: says which rank was given what.
    """
    first = everyone[0]
    for rank, mine in enumerate(everyone[1:], 1):
        what = RUN if _differ([first[0]], [mine[0]], views[0] == views[rank]) else ""
        if not what and _differ(first[1:], mine[1:], views[0] == views[rank]):
            what = TIERS
        if what:
            begin, end = (0, 1) if what == RUN else (1, None)
            theirs, ours = (
                ", ".join(where for _, where in each[begin:end]) or "none" for each in (first, mine)
            )
            raise ConfigurationError(
                f"the ranks were given different places ({what}): rank 0 {theirs}; "
                f"rank {rank} {ours}",
                hint="give every rank the same arguments, and the same TRAINCKPT_... variables",
            )


def _differ(one: Sequence[Sequence[str]], other: Sequence[Sequence[str]], same_view: bool) -> bool:
    if len(one) != len(other):
        return True
    for (name, where), (other_name, other_where) in zip(one, other, strict=True):
        is_store = "://" in where or "://" in other_where
        if name != other_name or (where != other_where and (is_store or same_view)):
            return True
    return False


def _where(url: str) -> str:
    return url if "://" in url else os.path.abspath(url)  # noqa: PTH100 - a look may hang

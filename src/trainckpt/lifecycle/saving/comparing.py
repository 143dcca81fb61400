"""Comparing: which tensors all ranks hold alike, from save to save of one attempt.

The first comparison and that of the last save are of all bytes; between them large tensors that
only steps change are sampled, another part each time. What was found to differ is each rank's own
until all its bytes are compared again: the next sample may not reach what differs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainckpt.lifecycle.run.log import logger
from trainckpt.state import replicas

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from trainckpt.state.captured import Captured


class Comparing:
    """Of one rank. All ranks that hold a group come to the same result."""

    def __init__(self, rank: int, world: int) -> None:
        self._rank, self._world = rank, world
        self._number = 0  # of the comparison, of those that counted
        self._is_whole = True
        self._alike: set[str] = set()  # groups, in some comparison
        self._apart: set[str] = set()  # groups, since the last comparison of all bytes

    def digests(
        self, captured: Captured, stepped: Collection[str], *, last: bool
    ) -> dict[str, tuple[str, int, str]]:
        """What to bring to the other ranks; see `replicas.group_digests`.

        Args:
            captured: State of this rank.
            stepped: Tensors that only steps change.
            last: Nothing follows this save.
        """
        if self._world < 2:
            return {}
        self._is_whole = last or not self._number
        sampled = () if self._is_whole else stepped
        return replicas.group_digests(
            captured, self._rank, self._world, sampled=sampled, number=self._number
        )

    def alike(
        self,
        found: Sequence[str],
        mine: Mapping[str, object],
        captured: Captured,
        stepped: Collection[str],
    ) -> list[str]:
        """Groups that are alike on all ranks.

        Args:
            found: Those whose digests are, now.
            mine: Groups that this rank has brought.
            captured, stepped: As for `digests`.
        """
        self._number += 1
        if self._is_whole:
            self._apart.clear()
        if differing := mine.keys() - set(found):
            layouts = captured.layouts(self._world)
            sampled = {
                replicas.group_of(captured, name, layouts[name])
                for name in stepped
                if name in layouts
            }
            self._say(differing & sampled - self._apart)
            self._apart |= differing & sampled
        alike = [group for group in found if group not in self._apart]
        self._alike.update(alike)
        return alike

    def _say(self, differing: set[str]) -> None:
        for group in sorted(differing & self._alike):
            if self._rank == 0:
                logger.warning(
                    "%s: the ranks held this alike, and do not any more; each rank's own is saved "
                    "from now on", group.partition(" over ")[0],
                )  # fmt: skip

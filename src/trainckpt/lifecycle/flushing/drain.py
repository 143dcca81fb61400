"""How long an attempt that ends goes on copying to slower tiers; less once it is asked to leave.

Rank 0 decides for all. A rank that is asked tells it, through the keys of the tier at hand.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from trainckpt.lifecycle.run.log import logger

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    Asked = tuple[str, float | None]  # why, and how many seconds are left; None: nobody said

LOOK_S = 1.0


def _nobody() -> Asked | None:
    return None


def _no_less(reason: str, left_s: float | None) -> float:  # noqa: ARG001 - as `limit_of`
    return float("inf")


class Drain:
    """Training thread.

    Attributes:
        hurried: Why it is shorter than it was to be, or "".
    """

    def __init__(
        self,
        limit_s: float,
        asked: Callable[[], Asked | None] = _nobody,
        limit_of: Callable[[str, float | None], float] = _no_less,
    ) -> None:
        """Begin.

        Args:
            limit_s: If nobody asks.
            asked: Whether this rank is asked to leave, and has not been before; may repeat itself.
            limit_of: What may still be used, for that reason and with so much left.
        """
        self.hurried = ""
        self._until_s = time.monotonic() + limit_s
        self._asked, self._limit_of = asked, limit_of
        self._heard: set[str] = set()

    def left_s(self) -> float:
        """Never negative."""
        return max(self._until_s - time.monotonic(), 0.0)

    def asked(self) -> Asked | None:
        """This rank is asked to leave."""
        return self._asked()

    def look(self, told: Sequence[Any] | None) -> None:
        """Rank 0, every `LOOK_S`: whether it is asked; `told`: what another rank was, if any."""
        for each in (self._asked(), told):
            if each is None or each[0] in self._heard:
                continue
            reason, left_s = each
            self._heard.add(reason)  # once: what is left only shrinks, and a copy is not quicker
            limit_s = max(self._limit_of(reason, left_s), 0.0)
            if limit_s < self.left_s():
                self.hurried, self._until_s = reason, time.monotonic() + limit_s
                logger.info(
                    "%s: the run is finished, and its snapshot committed; copies to slower tiers "
                    "get %.0f s more", reason, limit_s,
                )  # fmt: skip

"""How often a slower tier gets a copy: `every="10 steps, s3: 100 steps"`. Pure.

A tier without an interval gets every snapshot that it can keep up with. One with an interval gets
the first snapshot at or beyond each multiple, or the newest that there is once the time is over.
What somebody asked for, what has a tag and what a run ends with goes to every tier in any case.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainckpt.errors import ConfigurationError
from trainckpt.lifecycle.deciding.interval import WRITING_SHARE
from trainckpt.lifecycle.places import place
from trainckpt.lifecycle.run.options import LOCAL
from trainckpt.tiers.redacted import redacted

if TYPE_CHECKING:
    from trainckpt.lifecycle.places.slower import Slower
    from trainckpt.lifecycle.run.options import Every
    from trainckpt.tiers.base import Tier


@dataclass(frozen=True)
class LastCopy:
    """The last copy that has arrived in a tier; before the first, where the attempt began.

    Attributes:
        step: Of the snapshot.
        begun_s: When it was begun, by the monotonic clock.
        took_s: How long it took; None: none was made yet.
    """

    step: int
    begun_s: float
    took_s: float | None = None


def wait_s(every: Every | None, step: int, last: LastCopy, now_s: float) -> float:
    """How long the newest snapshot, of this step, has to wait to be copied.

    Args:
        every: Of the tier; None: it has none.
        step: Of the newest snapshot.
        last: What arrived there last.
        now_s: By the monotonic clock.

    Returns:
        Seconds; 0: it is due; infinite: another snapshot will be.
    """
    if every is None:
        return 0.0
    if every.steps is not None:
        return 0.0 if step // every.steps > last.step // every.steps else math.inf
    seconds = (last.took_s or 0.0) / WRITING_SHARE if every.auto else every.seconds
    return math.inf if seconds is None else max(last.begun_s + seconds - now_s, 0.0)


def interval_of(every: Every, tier: Tier) -> Every | None:
    """Of one slower tier."""
    return next((each for name, each in every.tiers if name in (tier.name, tier.url)), None)


def check(every: Every, slower: Slower) -> None:
    """Refuse intervals of tiers that there are not; a proof has none."""
    called = {name for tier in slower.tiers for name in (tier.name, tier.url)}
    unknown = [redacted(name) for name, _ in every.tiers if name not in called]
    if unknown and not os.environ.get(place.PROVE_VARIABLE):
        names = ", ".join([LOCAL, *(tier.name for tier in slower.tiers)])
        raise ConfigurationError(
            f"every={every.in_full!r}: {unknown[0]!r} is none of this run's tiers",
            hint=f"one of {names}; the option tiers names more",
        )

"""Choose how often a slower tier gets a copy: `every="10 steps, s3: 100 steps"`. Pure.

A tier without an interval gets every snapshot that it can keep up with. One with an interval gets
the first snapshot at or beyond each multiple, or the newest one once the time is over. Requested
and tagged snapshots, and a run's final one, go to every tier in any case.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainckpt.attempt.options import LOCAL
from trainckpt.errors import ConfigurationError
from trainckpt.run_directory import run_url
from trainckpt.storage.redact import redacted

if TYPE_CHECKING:
    from trainckpt.attempt.options import Every
    from trainckpt.run_directory.tier_config import TierConfig
    from trainckpt.storage.base import Tier


WRITING_SHARE = 0.5  # largest share of the time with a save under way


@dataclass(frozen=True)
class LastCopy:
    """The last copy that has arrived in a tier; before the first, where the attempt began.

    Attributes:
        step: Of the snapshot.
        begun_s: Start of the copy, by the monotonic clock.
        took_s: Its duration; None: none was made yet.
    """

    step: int
    begun_s: float
    took_s: float | None = None


def wait_s(every: Every | None, step: int, last: LastCopy, now_s: float) -> float:
    """Return the seconds until the newest snapshot, of this step, is copied.

    Args:
        every: Interval of the tier; None: it has none.
        step: Step of the newest snapshot.
        last: The last copy that arrived there.
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
    """Return the interval of one slower tier; None: it has none."""
    return next((each for name, each in every.tiers if name in (tier.name, tier.url)), None)


def check(every: Every, slower: TierConfig) -> None:
    """Refuse intervals of unknown tiers; in a proof all are allowed."""
    called = {name for tier in slower.tiers for name in (tier.name, tier.url)}
    unknown = [redacted(name) for name, _ in every.tiers if name not in called]
    if unknown and not os.environ.get(run_url.PROVE_VARIABLE):
        names = ", ".join([LOCAL, *(tier.name for tier in slower.tiers)])
        raise ConfigurationError(
            f"every={every.in_full!r}: this run has no tier {unknown[0]!r}",
            hint=f"use one of {names}, or add it to the option tiers",
        )

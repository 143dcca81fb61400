"""doctor, for a run's slower tiers: whether each answers, how fast it is, what the run has met.

Those that the options name here and now, and those that the run's newest attempt has recorded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainckpt.cli import doctor_speed, doctor_store, tiers_shown
from trainckpt.errors import TrainckptError
from trainckpt.lifecycle.places.slower import open_slower, recorded
from trainckpt.lifecycle.run import launch
from trainckpt.lifecycle.run.machine import Item
from trainckpt.lifecycle.run.options import read_options
from trainckpt.snapshot import attempts
from trainckpt.tiers.local import LocalTier
from trainckpt.tiers.object_store import ObjectStoreTier

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trainckpt.format.attempt import AttemptRecord
    from trainckpt.tiers.base import Tier
    from trainckpt.tiers.places import Place

NOT_STORED, NAME_IT = "its URL holds a secret that was not stored", "name it: TRAINCKPT_TIERS"
CURE = "see whether it can be reached, and written, from here"


def examine(place: Place) -> list[Item]:
    """Of each tier: its speed, calls to it if it is a store, and the run's trouble with it."""
    try:
        records = attempts.read_attempts(place)
    except (TrainckptError, OSError):
        records = {}  # the place's own items say so
    try:
        slower = open_slower(read_options({}).tiers, None, place).tiers
        also, unknown = recorded(records, place, slower)
    except TrainckptError as error:
        return [Item("tiers", ok=False, value=error.message, cure=error.hint, needed=False)]
    items = [Item(f"tier {name}", ok=False, value=NOT_STORED, cure=NAME_IT, needed=False)
             for name in unknown]  # fmt: skip
    for tier in (*slower, *also):
        items += _tier(tier, records)
    return items


def _tier(tier: Tier, records: Mapping[int, AttemptRecord]) -> list[Item]:
    name, url = f"tier {tier.name}", launch.redact_text(tier.url)
    try:
        if isinstance(tier, ObjectStoreTier):
            speed = doctor_speed.try_store(tier)
        else:
            assert isinstance(tier, LocalTier)
            _, (_, speed) = doctor_speed.try_directory(tier)
        items = [Item(name, ok=True, value=f"{url}: {speed.in_words()}", needed=False)]
    except (TrainckptError, OSError) as error:
        why = getattr(error, "message", None) or f"{url}: {getattr(error, 'strerror', error)}"
        cure = getattr(error, "hint", "") or CURE
        items = [Item(name, ok=False, value=launch.redact_text(why), cure=cure, needed=False)]
    if isinstance(tier, ObjectStoreTier):
        items.append(doctor_store.health(tier, f"calls to {tier.name}"))
    trouble = tiers_shown.trouble_of(records, tier.name)
    if trouble is not None:
        told = tiers_shown.in_words(trouble)
        items.append(Item(f"{tier.name} in the run", ok=False, value=told, cure=CURE, needed=False))
    return items

"""doctor, for a run in an object store: whether it answers, how it creates, how fast it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainckpt.cli import doctor_speed
from trainckpt.errors import TrainckptError
from trainckpt.lifecycle.run.machine import Item
from trainckpt.tiers.breaker import CLOSED

if TYPE_CHECKING:
    from trainckpt.tiers.object_store import ObjectStoreTier

PLACE = "run's place"


def examine(tier: ObjectStoreTier) -> list[Item]:
    """What the store can do. The first item says whether it can be used at all."""
    try:
        speed = doctor_speed.try_store(tier)
        creates_only = tier.creates_only()
    except TrainckptError as error:
        return [
            Item(PLACE, ok=False, value=error.message, cure=error.hint or "see docs"),
            health(tier),
        ]
    how = "refused where the name is there" if creates_only else "not refused: names are claimed"
    return [
        Item(PLACE, ok=True, value=f"{tier.url} can be read and written"),
        Item("create only", ok=True, value=how, needed=False),
        Item("speed", ok=True, value=speed.in_words(), needed=False),
        health(tier),
    ]


def health(tier: ObjectStoreTier, name: str = "calls to the store") -> Item:
    """Whether calls go through, as far as this command has seen."""
    found = tier.health()
    value = found.state if not found.last_error else f"{found.state}; met {found.last_error}"
    return Item(name, found.state == CLOSED, value, "see whether it can be reached", needed=False)
